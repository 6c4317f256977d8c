#!/usr/bin/env bash
# Builds the images for CPUs and runs them as Kubernetes would: no root, root file system read-only,
# no capability. With actor and learner a Redis, `leeway serve` and the learner must train two steps
# together, with api beside them ready; api by itself must live. Each must end with 0 after SIGTERM.
# What each holds of Debian is written to build/sbom, beside what `make sbom` writes.
# Needs buildah, podman and runc and, without BASE, mmdebstrap; 12 GB of disk and ten minutes.
#
#     deploy/docker/check.sh [api] [learner] [actor]
#
#     BASE            image to build on; without it one is made of Debian packages
#     BUILD_OPTIONS   more options of `buildah build`, such as --volume for certificates of a proxy
#     TAG             check only: do not build, take localhost/leeway-NAME:TAG
#     STORAGE         folder that holds images and is kept; without it one is made and removed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

names=("${@:-api}")
[[ $# -gt 0 ]] || names=(api learner actor)
work=$(mktemp -d)
place=${STORAGE:-$work}
storage=(--root "$place/storage" --runroot "$place/run" --storage-driver "${STORAGE_DRIVER:-overlay}")
containers=()
# podman asks for a million, which not every machine may give.
files=$(ulimit -Hn)
[[ $files =~ ^[0-9]+$ ]] || files=65536

engine() { podman "${storage[@]}" --runtime runc --cgroup-manager cgroupfs "$@"; }
has() { [[ " ${names[*]} " == *" $1 "* ]]; }
image() { echo "localhost/leeway-$1:${TAG:-check}"; }
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

finish() {
    for container in "${containers[@]}"; do
        engine rm --force --time 0 "$container" > /dev/null 2>&1 || true
    done
    rm -rf "$work"
}
trap finish EXIT

make_base() {
    BASE=localhost/leeway-base:bookworm
    if buildah "${storage[@]}" inspect --type image "$BASE" > /dev/null 2>&1; then return; fi
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
        bookworm "$work/base.tar"
    scratch=$(buildah "${storage[@]}" from scratch)
    buildah "${storage[@]}" add --quiet "$scratch" "$work/base.tar" / > /dev/null
    buildah "${storage[@]}" commit --quiet "$scratch" "$BASE" > /dev/null
    buildah "${storage[@]}" rm "$scratch" > /dev/null
}

build() {
    # shellcheck disable=SC2086  # options, to be split
    buildah "${storage[@]}" build --layers --isolation chroot --format docker \
        --build-arg "BASE=$BASE" --file "deploy/docker/$1.Dockerfile" --tag "$(image "$1")" \
        ${BUILD_OPTIONS:-} .
    buildah "${storage[@]}" images --format '{{.Name}}:{{.Tag}} {{.Size}}' "$(image "$1")"
}

# start NAME IMAGE OPTION... -- ARGUMENT...
start() {
    local name=leeway-check-$$-$1 image=$2 options=()
    shift 2
    while [[ $1 != -- ]]; do options+=("$1"); shift; done
    shift
    containers+=("$name")
    engine run --detach --name "$name" --no-healthcheck --network host --read-only --cap-drop all \
        --security-opt no-new-privileges --ulimit "nofile=$files:$files" --ulimit nproc=4096:4096 \
        --shm-size 1g --tmpfs /tmp:exec,mode=1777 --volume "$work/runs:/var/lib/leeway/runs" \
        --volume "$PWD/deploy/docker/check.toml:/etc/leeway/config.toml:ro" \
        --env "LEEWAY_REDIS_URL=redis://127.0.0.1:${redis_port:-1}/0" \
        "${options[@]}" "$image" "$@" > /dev/null
}

# stop NAME SECONDS: SIGTERM; it must end with 0.
stop() {
    local name=leeway-check-$$-$1 code
    engine stop --time "$2" "$name" > /dev/null
    code=$(engine inspect --format '{{.State.ExitCode}}' "$name")
    echo "$1 ended with $code after SIGTERM"
    [[ $code == 0 ]] || { engine logs --tail 20 "$name"; return 1; }
}

# until_true SECONDS COMMAND...: until it succeeds, as long as every container runs.
until_true() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" > /dev/null 2>&1; do
        if ((SECONDS > deadline)) || engine inspect --format '{{.State.Running}}' "${containers[@]}" | grep -q false; then
            echo "did not come true: $*" >&2
            for container in "${containers[@]}"; do
                echo "--- $container" >&2
                engine logs --tail 20 "$container" >&2 || true
            done
            return 1
        fi
        sleep 1
    done
}

says_version() {
    engine run --rm --network none --read-only --cap-drop all --security-opt no-new-privileges \
        --ulimit "nofile=$files:$files" --ulimit nproc=4096:4096 --tmpfs /tmp "$(image "$1")" --version
}

# The packages that Debian has put into an image.
write_sbom() {
    mkdir -p build/sbom
    engine run --rm --network none --entrypoint cat --ulimit "nofile=$files:$files" \
        --ulimit nproc=4096:4096 "$(image "$1")" /var/lib/dpkg/status \
        | python3 -m requirements.debian "leeway-$1" > "build/sbom/$1.debian.cdx.json"
}

# Of the container's first process, as the kernel says: its user, its capabilities, its root.
check_user_and_init() {
    local pid
    pid=$(engine inspect --format '{{.State.Pid}}' "leeway-check-$$-$1")
    [[ $(< "/proc/$pid/comm") == tini ]] || { echo "$1: PID 1 is no init" >&2; return 1; }
    grep -q '^Uid:.10001.10001.10001.10001$' "/proc/$pid/status" || { echo "$1: not user 10001" >&2; return 1; }
    grep -q '^CapEff:.0*$' "/proc/$pid/status" || { echo "$1: has capabilities" >&2; return 1; }
    grep -qE '^[^ ]+ / [^ ]+ ro[, ]' "/proc/$pid/mounts" || { echo "$1: can write its image" >&2; return 1; }
}

# start_api PATH: until it answers with success there.
start_api() {
    local port
    port=$(free_port)
    start api "$(image api)" -- api /etc/leeway/config.toml --run-dir /var/lib/leeway/runs/check --port "$port"
    until_true 600 curl --silent --fail --max-time 5 "http://127.0.0.1:$port$1"
    until_true 10 check_user_and_init api
}

check_run() {
    local binary
    redis_port=$(free_port)
    binary='import sys; from leeway.replay.server import find_server_binary as f; import os; os.execv(f(), ["redis-server", *sys.argv[1:]])'
    start redis "$(image actor)" --entrypoint '["/opt/leeway/bin/python", "-c"]' -- \
        "$binary" --port "$redis_port" --bind 127.0.0.1 --dir /tmp --save ""
    until_true 60 bash -c "exec 3<> /dev/tcp/127.0.0.1/$redis_port"
    start serve "$(image actor)" -- serve /etc/leeway/config.toml --run-dir /var/lib/leeway/runs/check
    start learner "$(image learner)" -- learn /etc/leeway/config.toml --run-dir /var/lib/leeway/runs/check --stay
    # Right after its start a container is still the program that starts it.
    until_true 10 check_user_and_init serve
    until_true 10 check_user_and_init learner
    if has api; then start_api /readyz; fi
    until_true 1200 test -f "$work/runs/check/summary.json"
    echo "the images trained: $(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["steps"])' "$work/runs/check/summary.json") steps"
    if has api; then stop api 20; fi
    stop learner 90
    stop serve 90
    engine stop --time 20 "leeway-check-$$-redis" > /dev/null
    for container in "${containers[@]}"; do engine rm --force --time 0 "$container" > /dev/null; done
    containers=()
}

mkdir -m 0777 "$work/runs"
if [[ -z ${TAG:-} ]]; then
    [[ -n ${BASE:-} ]] || make_base
    for name in "${names[@]}"; do build "$name"; done
fi
for name in "${names[@]}"; do says_version "$name"; write_sbom "$name"; done
if has learner && has actor; then
    check_run
elif has api; then
    start_api /livez
    stop api 20
fi
