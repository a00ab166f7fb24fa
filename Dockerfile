# Two images from one file. `router` has no torch in it; `engine` adds it.
#   docker build --target router -t pagoda-router .
#   docker build --target engine -t pagoda-engine .

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PAGODA_CACHE=/models
RUN useradd --uid 10001 --create-home pagoda && install -d -o pagoda -g pagoda /models
WORKDIR /app
COPY pyproject.toml README.md ./
COPY protos protos
COPY channel channel
COPY checkpoints checkpoints
COPY clients clients
COPY router router
COPY kernels kernels
COPY engine engine

FROM base AS router
RUN pip install .
USER pagoda
VOLUME /models
EXPOSE 50051
ENTRYPOINT ["pagoda", "serve"]

FROM base AS engine
# Another package index to take torch from: the default one's build carries CUDA, which an engine on a CPU can do without.
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"; fi && pip install ".[engine]"
USER pagoda
VOLUME /models
EXPOSE 50052
ENTRYPOINT ["python", "-m", "engine"]
