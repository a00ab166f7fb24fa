# Three images from one file. `router` has no torch in it; `engine` adds it; `engine-gpu` adds what Triton needs.
#   docker build --target router -t pagoda-router .
#   docker build --target engine -t pagoda-engine .
#   docker build --target engine-gpu -t pagoda-engine-gpu .

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What is imported and what comes from the Hugging Face Hub: in the one volume that all containers share.
ENV PAGODA_CACHE=/models HF_HOME=/models/huggingface
RUN useradd --uid 10001 --create-home pagoda && install -d -o pagoda -g pagoda /models /channel
WORKDIR /app
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
COPY settings settings
COPY channel channel
COPY grammars grammars
COPY runtime runtime
COPY checkpoints checkpoints
COPY clients clients
COPY router router
COPY kernels kernels
COPY engine engine

FROM base AS router
RUN pip install ./clients/python '.[tracing,certs]'
WORKDIR /home/pagoda
USER pagoda
VOLUME /models
EXPOSE 50051 8000
ENTRYPOINT ["pagoda", "serve"]

FROM base AS wheel
# Compiles the CPU kernels; the compiler stays out of the engine's image.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && pip wheel --no-deps --wheel-dir /wheels ./clients/python .

FROM base AS engine
# Another package index to take torch from: the default one's build carries CUDA, which an engine on a CPU can do without.
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"; fi
COPY --from=wheel /wheels /wheels
RUN pip install /wheels/pagoda_client-*.whl "$(ls /wheels/pagoda_server-*.whl)[engine]"
# Away from the sources, which have no compiled kernels beside them.
WORKDIR /home/pagoda
USER pagoda
VOLUME /models
EXPOSE 50052
ENTRYPOINT ["python", "-m", "pagoda_server.engine"]

FROM engine AS engine-gpu
USER root
# Triton compiles kernels when they are first used, and with a C compiler the code that launches them. It loads what it
# has made from its cache, which therefore must not be mounted noexec, as Docker mounts a tmpfs.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && install -d -o pagoda -g pagoda /triton
ENV TRITON_CACHE_DIR=/triton
USER pagoda
VOLUME /triton
