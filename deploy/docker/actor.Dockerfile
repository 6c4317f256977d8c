# leeway-actor: vLLM and Ray. KubeRay starts `ray start` in it; by itself it is `leeway serve`.
#
#     docker build --file deploy/docker/actor.Dockerfile --tag leeway-actor:0.1.0 .
#     docker build ... --build-arg VARIANT=gpu --tag leeway-actor:0.1.0-gpu .
# The base is an argument, so that a registry of your own, or an image made without one, serves too.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm
# cpu or gpu: the stage that the last one copies from.
ARG VARIANT=cpu

FROM ${BASE} AS build-cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/leeway
# The index of torch decides what it is built for; its version stands in the list.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/images/actor.txt requirements/images/actor.txt
RUN /opt/leeway/bin/pip install --no-deps --index-url "${TORCH_INDEX}" \
        "$(grep '^torch==' requirements/images/actor.txt)" \
    && /opt/leeway/bin/pip install --no-deps -r requirements/images/actor.txt
COPY pyproject.toml README.md LICENSE ./
COPY actors actors
COPY learner learner
COPY replay replay
COPY services services
RUN /opt/leeway/bin/pip install --no-deps --no-build-isolation . \
    && /opt/leeway/bin/python -m compileall -q /opt/leeway/lib \
    && /opt/leeway/bin/pip uninstall --yes pip

FROM ${BASE} AS build-gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/leeway
COPY requirements/images/actor-gpu.txt requirements/images/actor-gpu.txt
# vLLM and torch say themselves which CUDA libraries they need; the list says which versions of them
# and of what Leeway needs besides.
RUN /opt/leeway/bin/pip install -r requirements/images/actor-gpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY actors actors
COPY learner learner
COPY replay replay
COPY services services
RUN /opt/leeway/bin/pip install --no-deps --no-build-isolation . \
    && /opt/leeway/bin/python -m compileall -q /opt/leeway/lib \
    && /opt/leeway/bin/pip uninstall --yes pip

# hadolint ignore=DL3006
FROM build-${VARIANT} AS build

FROM ${BASE}
# Debian keeps only the newest build of a package: a pin here would break the image at its next fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 leeway \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp leeway \
    && install -d -o leeway -g leeway /var/lib/leeway/runs /var/lib/leeway/models /var/lib/leeway/data
COPY --from=build /opt/leeway /opt/leeway
# No secret: the word that hadolint sees is part of "tokenizers".
# hadolint ignore=DL3064
ENV PATH=/opt/leeway/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false \
    # A thread that waits must not spin: engine and learner may share cores.
    OMP_WAIT_POLICY=PASSIVE \
    # Large blocks are kept instead of being handed back and zeroed again each time.
    MALLOC_MMAP_THRESHOLD_=1073741824 \
    MALLOC_TRIM_THRESHOLD_=2147483648 \
    RAY_USAGE_STATS_ENABLED=0 \
    # The sampler's small kernels would be compiled at the first batch, for 20 s.
    TORCH_COMPILE_DISABLE=1
USER 10001:10001
WORKDIR /tmp
# PID 1 hands signals on and reaps what is orphaned.
ENTRYPOINT ["/usr/bin/tini", "--", "leeway"]
CMD ["serve", "/etc/leeway/config.toml", "--run-dir", "/var/lib/leeway/runs/run"]
