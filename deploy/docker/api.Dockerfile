# leeway-api: the REST API and the dashboard. No torch, no Ray, no vLLM.
#
#     docker build --file deploy/docker/api.Dockerfile --tag leeway-api:0.1.0 .
# The base is an argument, so that a registry of your own, or an image made without one, serves too.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/leeway
COPY requirements/images/api.txt requirements.txt
RUN /opt/leeway/bin/pip install --no-deps --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY actors actors
COPY learner learner
COPY replay replay
COPY services services
RUN /opt/leeway/bin/pip install --no-deps --no-build-isolation . \
    && /opt/leeway/bin/python -m compileall -q /opt/leeway/lib \
    && /opt/leeway/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
# Debian keeps only the newest build of a package: a pin here would break the image at its next fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 leeway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp leeway \
    && install -d -o leeway -g leeway /var/lib/leeway/runs /var/lib/leeway/models /var/lib/leeway/data
COPY --from=build /opt/leeway /opt/leeway
ENV PATH=/opt/leeway/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/livez', timeout=3)"]
USER 10001:10001
WORKDIR /tmp
# PID 1 hands signals on and reaps what is orphaned.
ENTRYPOINT ["/usr/bin/tini", "--", "leeway"]
CMD ["api", "/etc/leeway/config.toml", "--run-dir", "/var/lib/leeway/runs/run", "--host", "0.0.0.0", "--port", "8080"]
