# leeway-learner: torch and transformers, no Ray and no vLLM.
#
#     docker build --file deploy/docker/learner.Dockerfile --tag leeway-learner:0.1.0 .
#     docker build ... --build-arg VARIANT=gpu --tag leeway-learner:0.1.0-gpu .
# The base is an argument, so that a registry of your own, or an image made without one, serves too.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/leeway
# cpu or gpu: which list is installed.
ARG VARIANT=cpu
# torch for CPUs comes from an index of its own, before the list, which then finds it installed. With
# GPUs the list's own is right.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/images/learner-${VARIANT}.txt requirements.txt
RUN if [ "${VARIANT}" = cpu ]; then \
        /opt/leeway/bin/pip install --no-deps --index-url "${TORCH_INDEX}" \
            "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)"; \
    fi \
    && /opt/leeway/bin/pip install --no-deps --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY actors actors
COPY learner learner
COPY replay replay
COPY services services
# torch has files for one Python alone, which another cannot compile.
RUN /opt/leeway/bin/pip install --no-deps --no-build-isolation . \
    && /opt/leeway/bin/python -m compileall -q -x 'py3[0-9]+_' /opt/leeway/lib \
    && /opt/leeway/bin/pip uninstall --yes pip

FROM ${BASE}
ARG VARIANT=cpu
# With GPUs torch.compile writes kernels for Triton, which compiles what launches them: a C compiler
# and Python's headers, where the base has none. Debian keeps only the newest build of a package: a
# pin here would break the image at its next fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 tini \
    && if [ "${VARIANT}" = gpu ]; then \
        apt-get install --yes --no-install-recommends gcc libc6-dev \
        && { test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
            || apt-get install --yes --no-install-recommends python3-dev; }; \
    fi \
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
    MALLOC_TRIM_THRESHOLD_=2147483648
USER 10001:10001
WORKDIR /tmp
# PID 1 hands signals on and reaps what is orphaned.
ENTRYPOINT ["/usr/bin/tini", "--", "leeway"]
CMD ["learn", "/etc/leeway/config.toml", "--run-dir", "/var/lib/leeway/runs/run", "--stay"]
