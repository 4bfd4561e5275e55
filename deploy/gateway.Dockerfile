# syntax=docker/dockerfile:1.7
# A gateway: HTTP, templates and tokenisers, no torch.
#   docker build -f deploy/gateway.Dockerfile -t forebay/gateway:0.1.0 .
FROM python:3.12.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/forebay
COPY constraints.txt ./
COPY shared shared
COPY gateway gateway
RUN /opt/forebay/bin/pip install -c constraints.txt ./shared ./gateway \
 && /opt/forebay/bin/pip uninstall -y pip

FROM python:3.12.12-slim-bookworm
LABEL org.opencontainers.image.title="forebay gateway" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --user-group --no-create-home forebay
COPY --from=build /opt/forebay /opt/forebay
ENV PATH=/opt/forebay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 FOREBAY_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
CMD ["forebay", "gateway"]
