#!/usr/bin/env bash
# Builds the api image, runs it as Kubernetes would (no root, root file system read-only), and asks
# whether it lives and how it ends. Needs buildah, podman and, without BASE, mmdebstrap.
#
#     BASE            image to build on; without it one is made of Debian packages
#     BUILD_OPTIONS   more options of `buildah build`, such as --volume for certificates of a proxy
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d)
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver vfs)
image=localhost/leeway-api:check
container=""

finish() {
    if [[ -n $container ]]; then
        podman "${storage[@]}" --runtime runc --cgroup-manager cgroupfs rm --force --time 0 "$container" > /dev/null 2>&1 || true
    fi
    rm -rf "$work"
}
trap finish EXIT

if [[ -z ${BASE:-} ]]; then
    BASE=localhost/leeway-base:bookworm
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
        bookworm "$work/base.tar"
    scratch=$(buildah "${storage[@]}" from scratch)
    buildah "${storage[@]}" add --quiet "$scratch" "$work/base.tar" / > /dev/null
    buildah "${storage[@]}" commit --quiet "$scratch" "$BASE" > /dev/null
    buildah "${storage[@]}" rm "$scratch" > /dev/null
fi

# shellcheck disable=SC2086  # options, to be split
buildah "${storage[@]}" build --isolation chroot --format docker --build-arg "BASE=$BASE" \
    --file deploy/docker/api.Dockerfile --tag "$image" ${BUILD_OPTIONS:-} .
buildah "${storage[@]}" images --format '{{.Name}}:{{.Tag}} {{.Size}}' "$image"

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
mkdir -m 0777 "$work/runs"
container=$(podman "${storage[@]}" --runtime runc --cgroup-manager cgroupfs run --detach \
    --no-healthcheck --network host --read-only --cap-drop all --security-opt no-new-privileges \
    --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 \
    --tmpfs /tmp --volume "$work/runs:/var/lib/leeway/runs" \
    --volume "$PWD/deploy/configs/demo.toml:/etc/leeway/config.toml:ro" \
    --env LEEWAY_REDIS_URL=redis://127.0.0.1:1/0 \
    "$image" api /etc/leeway/config.toml --run-dir /var/lib/leeway/runs/check --port "$port")

for _ in $(seq 60); do
    if curl --silent --fail --max-time 2 "http://127.0.0.1:$port/livez"; then break; fi
    sleep 1
done
curl --silent --fail --max-time 2 "http://127.0.0.1:$port/livez" > /dev/null
engine() { podman "${storage[@]}" --runtime runc --cgroup-manager cgroupfs "$@"; }
[[ $(engine exec "$container" id --user) == 10001 ]]
[[ $(engine exec "$container" cat /proc/1/comm) == tini ]]
engine stop --time 20 "$container" > /dev/null
code=$(engine inspect --format '{{.State.ExitCode}}' "$container")
echo
echo "the api image lives, runs as user 10001 under tini, and ended with $code after SIGTERM"
[[ $code == 0 ]]
