# Four images from one file. `router` has no torch in it; `engine` adds the build of torch for CPUs; `engine-gpu` has that
# for NVIDIA's GPUs, and what Triton needs.
#   docker build --target router -t pagoda-router .
#   docker build --target engine -t pagoda-engine .
#   docker build --target engine-gpu -t pagoda-engine-gpu .
#   docker build --target ray -t pagoda-ray .  # an engine with Ray, for the nodes of a cluster and for the driver
# Each lists what it holds, Python's and Debian's packages, in /usr/local/share/pagoda/sbom.cdx.json (CycloneDX).
#
# For builds that repeat, name the base by its digest: --build-arg BASE=python@sha256:…
ARG BASE=python:3.12.12-slim-bookworm

# Compiles the CPU kernels, for every instruction set. The compiler and the sources stay here.
FROM ${BASE} AS wheels
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install --yes --no-install-recommends g++
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
COPY fleet fleet
# An installation may do without compiled kernels; an image must not.
RUN pip wheel --no-deps --wheel-dir /wheels ./clients/python . \
    && python -m zipfile --list /wheels/pagoda_server-*.whl | grep --quiet kernels/_native

# What all three images have in common, so that a host stores it once.
FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What is imported and what comes from the Hugging Face Hub: in the one volume that all containers share.
ENV PAGODA_CACHE=/models HF_HOME=/models/huggingface
RUN useradd --uid 10001 --create-home pagoda && install -d -o pagoda -g pagoda /models /channel
# numpy's tests and its translator of Fortran serve nobody here, and pip, which only fetches wheels, starts without bytecode.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels pip install /wheels/*.whl \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
    && find numpy -type d -name tests -prune -exec rm -rf {} + && rm -rf numpy/f2py \
    && find pip -type d -name __pycache__ -prune -exec rm -rf {} +
WORKDIR /home/pagoda

FROM base AS router
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,source=deploy/sbom.py,target=/sbom.py \
    pip install "$(ls /wheels/pagoda_server-*.whl)[tracing,certs]" && python /sbom.py pagoda-router
USER pagoda
VOLUME /models
EXPOSE 50051 8000
ENTRYPOINT ["pagoda", "serve"]

FROM base AS engine
# Another package index to take torch from. PyPI's build for x86-64 carries CUDA, gigabytes that a CPU cannot use.
ARG TORCH_INDEX
# Headers, tests and the programs of torch/bin serve those who compile extensions; `import torch` asks for one of them.
RUN --mount=type=bind,source=deploy/sbom.py,target=/sbom.py \
    pip install --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "torch>=2.11,<2.14" \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torch" \
    && rm -rf include test && find bin -type f ! -name torch_shm_manager -delete \
    && python /sbom.py pagoda-engine
USER pagoda
VOLUME /models
EXPOSE 50052
ENTRYPOINT ["python", "-m", "pagoda_server.engine"]

FROM engine AS ray
USER root
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,source=deploy/sbom.py,target=/sbom.py \
    pip install "$(ls /wheels/pagoda_server-*.whl)[ray]" && python /sbom.py pagoda-ray
USER pagoda
ENTRYPOINT []

FROM base AS engine-gpu
ARG TORCH_INDEX
# Triton compiles kernels when they are first used, and with a C compiler the code that launches them. It loads what it
# has made from its cache, which therefore must not be mounted noexec, as Docker mounts a tmpfs.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,source=deploy/sbom.py,target=/sbom.py \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(ls /wheels/pagoda_server-*.whl)[engine,gpu]" \
    && install -d -o pagoda -g pagoda /triton && python /sbom.py pagoda-engine-gpu
ENV TRITON_CACHE_DIR=/triton
USER pagoda
VOLUME /models
VOLUME /triton
EXPOSE 50052
ENTRYPOINT ["python", "-m", "pagoda_server.engine"]
