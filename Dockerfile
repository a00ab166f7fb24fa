# Four images from one file. `router` has no torch in it; `engine` adds the build of torch for CPUs; `engine-gpu` has that
# for NVIDIA's GPUs, and what Triton needs.
#   docker build --target router -t pagoda-router .
#   docker build --target engine -t pagoda-engine .
#   docker build --target engine-gpu -t pagoda-engine-gpu .
#   docker build --target ray -t pagoda-ray .  # an engine with Ray, for the nodes of a cluster and for the driver
# Each lists what it holds, Python's and Debian's packages, in /usr/local/share/pagoda/sbom.cdx.json (CycloneDX).
#
# deploy/locks has the version and the hashes of every package but torch and what only its CUDA builds need. `make locks`
# writes these files anew. For builds that repeat, name the base by its digest: --build-arg BASE=python@sha256:…
ARG BASE=python:3.12.12-slim-bookworm
# Its builds differ by the index that they come from, and so do their hashes.
ARG TORCH=2.13.0

# Compiles the CPU kernels, for every instruction set. The compiler and the sources stay here.
FROM ${BASE} AS packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /app
COPY deploy/locks/base.txt ./
RUN pip install --prefix=/packages --ignore-installed --no-deps --require-hashes --requirement base.txt
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
    && python -m zipfile --list /wheels/pagoda_server-*.whl | grep --quiet kernels/_native \
    && pip install --prefix=/packages --ignore-installed --no-deps --no-index /wheels/*.whl
# Tests, symbols for debuggers and numpy's translator of Fortran serve nobody here, and pip, which only fetches wheels,
# starts without bytecode. What auditwheel has copied into .libs may not load once it is stripped.
RUN cd "$(echo /packages/lib/python3.*/site-packages)" \
    && find . -type d -name tests -prune -exec rm -rf {} + && rm -rf numpy/f2py \
    && find pip -type d -name __pycache__ -prune -exec rm -rf {} + \
    && find . -name '*.so' -not -path '*.libs/*' -exec strip --strip-unneeded {} +

# What all images have in common, so that a host stores it once.
FROM ${BASE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What is imported and what comes from the Hugging Face Hub: in the one volume that all containers share.
ENV PAGODA_CACHE=/models HF_HOME=/models/huggingface
RUN useradd --uid 10001 --create-home pagoda && install -d -o pagoda -g pagoda /models /channel \
    && pip uninstall --yes pip
COPY --from=packages /packages /usr/local
# The Hub's library goes without its second way of fetching files.
RUN ! pip check | grep ' requires ' | grep --invert-match 'requires hf-xet'
WORKDIR /home/pagoda

FROM base AS router
RUN --mount=type=bind,source=deploy/sbom.py,target=/sbom.py python /sbom.py pagoda-router
USER pagoda
VOLUME /models
EXPOSE 50051 8000
ENTRYPOINT ["pagoda", "serve"]

FROM base AS engine
# Another package index to take torch from. PyPI's build for x86-64 carries CUDA, gigabytes that a CPU cannot use.
ARG TORCH_INDEX
ARG TORCH
# Headers, tests and the programs of torch/bin serve those who compile extensions; `import torch` asks for one of them.
RUN --mount=type=bind,source=deploy,target=/deploy \
    pip install --no-deps --require-hashes --requirement /deploy/locks/engine.txt \
    && pip install --no-deps --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "torch==$TORCH" \
    && ! pip check | grep ' requires ' | grep --invert-match 'requires hf-xet' \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torch" \
    && rm -rf include test && find bin -type f ! -name torch_shm_manager -delete \
    && python /deploy/sbom.py pagoda-engine
USER pagoda
VOLUME /models
EXPOSE 50052
ENTRYPOINT ["python", "-m", "pagoda_server.engine"]

FROM engine AS ray
USER root
RUN --mount=type=bind,source=deploy,target=/deploy \
    pip install --no-deps --require-hashes --requirement /deploy/locks/ray.txt \
    && ! pip check | grep ' requires ' | grep --invert-match 'requires hf-xet' \
    && python /deploy/sbom.py pagoda-ray
USER pagoda
ENTRYPOINT []

FROM base AS engine-gpu
ARG TORCH_INDEX
ARG TORCH
# Triton compiles kernels when they are first used, and with a C compiler the code that launches them. It loads what it
# has made from its cache, which therefore must not be mounted noexec, as Docker mounts a tmpfs.
RUN --mount=type=bind,source=deploy,target=/deploy \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install --no-deps --require-hashes --requirement /deploy/locks/engine.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH" triton \
    && install -d -o pagoda -g pagoda /triton && python /deploy/sbom.py pagoda-engine-gpu
ENV TRITON_CACHE_DIR=/triton
USER pagoda
VOLUME /models
VOLUME /triton
EXPOSE 50052
ENTRYPOINT ["python", "-m", "pagoda_server.engine"]
