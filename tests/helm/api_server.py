"""A real API server for the chart: built from Debian's source, started on free ports.

    python -m tests.helm.api_server     build it, once: 4 minutes on two free cores; 130 MB stay

No package holds the program, but Debian 12 has all of Kubernetes 1.20 as source, and etcd as a
package. That is older than what the chart supports. So the server gets a copy of the chart with the
apiVersions of that time, whose fields are the same, and the CustomResourceDefinitions without what
came later. It knows no Pod Security, and no controller runs: objects are stored, checked, changed
and deleted, and no pod is made.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, Document
from tests.helm.tools import FOLDER

SERVER, ETCD = FOLDER / "kube-apiserver", FOLDER / "etcd"
REFLECT = "github.com/modern-go/reflect2"
PACKAGES = (
    *("golang-1.19-go", "golang-1.19-src", "etcd-server"),
    "golang-github-modern-go-reflect2-dev",
)
RELEASE = "bookworm"
SOURCE, VERSION = f"kubernetes/{RELEASE}", "1.20.2"
FETCH_S, BUILD_S, START_S, STOP_S, KUBECTL_S = 600, 3600, 180, 30, 60
NUM_ATTEMPTS = 3
TOKEN = "of-a-server-that-lives-for-one-test"
OPENAPI = "pkg/generated/openapi"
NO_API = re.compile(r"generated|/testdata/|_examples|code-generator|sample-|kube-openapi/test")
"""Folders under the tag of OpenAPI that are no part of the server's."""
OLDER = {
    "templates/api/pdb.yaml": ("policy/v1\n", "policy/v1beta1\n"),
    "templates/learner/pdb.yaml": ("policy/v1\n", "policy/v1beta1\n"),
    "templates/api/hpa.yaml": ("autoscaling/v2\n", "autoscaling/v2beta2\n"),
}
"""By file of the chart, what an apiVersion was called in VERSION."""


# --- building


def why_not() -> str | None:
    """Why this machine cannot build it; None if it can."""
    release = Path("/etc/os-release")
    is_right = release.is_file() and f"VERSION_CODENAME={RELEASE}" in release.read_text()
    if not is_right or shutil.which("apt-get") is None:
        return f"only Debian 12 ({RELEASE}) has the source of a whole Kubernetes"
    return None


def main() -> int:
    """Exit code 0, or 1 with a sentence."""
    if SERVER.is_file() and ETCD.is_file():
        return 0
    reason = why_not()
    if reason is not None:
        print(f"no API server for the tests of the chart: {reason}")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        work = Path(name)
        print("building kube-apiserver from Debian's source: 4 minutes or more")
        _fetch(work)
        _generate(work)
        _compile(work, "cmd/kube-apiserver", "kube-apiserver")
        _keep(work / "root/usr/bin/etcd", ETCD)
        _keep(work / "kube-apiserver", SERVER)
    return 0


def _fetch(work: Path) -> None:
    """Go and etcd unpacked below root/, the source below src/."""
    _run(["apt-get", "download", *PACKAGES], work)
    for package in work.glob("*.deb"):
        _run(["dpkg", "-x", str(package), "root"], work)
    (work / "lists/partial").mkdir(parents=True)
    (work / "sources.list").write_text(f"deb-src {_site(work)} {RELEASE} main\n")
    own = [f"Dir::State::Lists={work}/lists", f"Dir::Etc::SourceList={work}/sources.list"]
    apt = ["apt-get", "-qq", *(f"-o{o}" for o in [*own, "Dir::Etc::SourceParts=/dev/null"])]
    _run([*apt, "update"], work)
    _run([*apt, "source", "--download-only", SOURCE], work)
    (work / "src").mkdir()
    (tar,) = work.glob("kubernetes_*.orig.tar.gz")
    _run(["tar", "xzf", str(tar), "-C", "src", "--strip-components=1"], work)
    # The one of the source crashes when a Go newer than 1.17 has compiled it.
    shutil.rmtree(work / "src/vendor" / REFLECT)
    shutil.copytree(work / "root/usr/share/gocode/src" / REFLECT, work / "src/vendor" / REFLECT)
    (work / "go/src/k8s.io").mkdir(parents=True)
    (work / "go/src/k8s.io/kubernetes").symlink_to(work / "src")


def _site(work: Path) -> str:
    """The mirror that this machine takes Debian's packages from."""
    said = _run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)", "Created-By: Packages"], work
    )
    sites = [line.split()[0] for line in said.splitlines() if line.split()[1:] == [RELEASE]]
    if not sites:
        sys.exit(f"apt knows no mirror of Debian {RELEASE}: run apt-get update first")
    return sites[0]


def _generate(work: Path) -> None:
    """What Debian's source lacks: the OpenAPI of all kinds, as Kubernetes' own Makefile does it."""
    _compile(work, "vendor/k8s.io/kube-openapi/cmd/openapi-gen", "openapi-gen")
    source = work / "src"
    tagged = _run(
        ["grep", "-rl", "--include=*.go", "+k8s:openapi-gen=", "pkg", "plugin", "staging/src"],
        source,
    )
    folders = {str(Path(f).parent) for f in tagged.splitlines() if not NO_API.search(f)}
    inputs = {
        f"k8s.io/kubernetes/{re.sub('^staging/src/', 'vendor/', folder)}" for folder in folders
    }
    header = source / "hack/boilerplate/boilerplate.generatego.txt"
    _go(
        work,
        *(str(work / "openapi-gen"), "-i", ",".join(sorted(inputs))),
        *("-p", f"k8s.io/kubernetes/{OPENAPI}", "-O", "zz_generated.openapi"),
        *("-h", str(header), "-r", str(work / "violations")),
    )


def _compile(work: Path, package: str, name: str) -> None:
    vendored = "k8s.io/kubernetes/vendor/k8s.io"
    named = [
        f"-X {vendored}/{part}/version.{key}={value}"
        for part in ("component-base", "client-go/pkg")
        for key, value in (("gitVersion", f"v{VERSION}"), ("gitMajor", "1"), ("gitMinor", "20"))
    ]
    flags = " ".join(["-s", "-w", *named])
    _go(work, "go", "build", "-ldflags", flags, "-o", str(work / name), f"./{package}")


def _go(work: Path, *command: str) -> None:
    """In GOPATH mode, which this source was made for, with nothing of the user's."""
    go = work / "root/usr/lib/go-1.19"
    environment = {
        "PATH": f"{go}/bin:/usr/bin:/bin",
        "HOME": str(work),
        "GOROOT": str(go),
        "GOPATH": str(work / "go"),
        "GOCACHE": str(work / "cache"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
    }
    folder = work / "go/src/k8s.io/kubernetes"
    # Go finds the vendored packages by this path, not by the one behind the link.
    _run(list(command), folder, {**environment, "PWD": str(folder)})


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_S
    )
    if ended.returncode:
        sys.exit(f"{' '.join(command[:3])} failed: {ended.stderr.strip()[-800:]}")
    return ended.stdout


def _keep(program: Path, where: Path) -> None:
    partial = where.with_name(f".{where.name}")
    shutil.copy2(program, partial)
    partial.replace(where)


# --- running


@contextmanager
def running(folder: Path) -> Iterator[Path]:
    """A kubeconfig in `folder` that leads to an empty server; both end with the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        _start_both(folder, started)
        yield folder / "kubeconfig"
    finally:
        _end(started)


def _start_both(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """etcd, and the server when it can reach it. Somebody else may take a port before they do: then
    they start anew with others."""
    for attempt in range(NUM_ATTEMPTS):
        try:
            _start_at(folder, started, *_free_ports(3))
        except RuntimeError:
            if attempt + 1 == NUM_ATTEMPTS or not _lost_a_port(folder):
                raise
            _end(started)
            shutil.rmtree(folder / "etcd", ignore_errors=True)
        else:
            return


def _start_at(
    folder: Path, started: list[subprocess.Popen[bytes]], client: str, peer: str, port: str
) -> None:
    started.append(
        _start(
            folder,
            *(str(ETCD), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        )
    )
    _write_files(folder, port)
    _wait(folder, started, lambda: _is_healthy(client))
    started.append(_start(folder, *_server(folder, client, port)))
    _wait(folder, started, lambda: _is_ready(folder / "kubeconfig"))


def _lost_a_port(folder: Path) -> bool:
    return any(
        "address already in use" in log.read_text("utf-8", "replace")
        for log in folder.glob("*.log")
    )


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """The last first, as what it needs must outlive it."""
    while started:
        process = started.pop()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[str]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [f"http://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return found


def _write_files(folder: Path, address: str) -> None:
    key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
    _run(key, folder)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    cluster = {"server": address.replace("http:", "https:"), "insecure-skip-tls-verify": True}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))


def _server(folder: Path, etcd: str, address: str) -> list[str]:
    key = str(folder / "accounts.key")
    return [
        *(str(SERVER), "--etcd-servers", etcd, "--bind-address", "127.0.0.1"),
        *("--secure-port", address.rpartition(":")[2], "--cert-dir", str(folder / "certificates")),
        *("--token-auth-file", str(folder / "tokens.csv"), "--authorization-mode", "AlwaysAllow"),
        *("--service-account-issuer", "https://kubernetes.default.svc"),
        *("--service-account-key-file", key, "--service-account-signing-key-file", key),
        *("--service-cluster-ip-range", "10.0.0.0/24"),
        # Its controller would make the default account of a namespace; none runs.
        *("--disable-admission-plugins", "ServiceAccount"),
    ]


def _start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as sink:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        )


def _wait(
    folder: Path, started: list[subprocess.Popen[bytes]], is_there: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_S
    while not is_there():
        over = next((process for process in started if process.poll() is not None), None)
        if over is not None or time.monotonic() > deadline:
            tails = [log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log")]
            raise RuntimeError(f"no API server within {START_S} s: {tails}")
        time.sleep(0.5)


def _is_healthy(etcd: str) -> bool:
    try:
        with urllib.request.urlopen(f"{etcd}/health", timeout=5) as answer:
            return json.load(answer)["health"] == "true"
    except OSError:
        return False


def _is_ready(config: Path) -> bool:
    try:
        return kubectl(config, "get", "--raw", "/readyz").returncode == 0
    except subprocess.TimeoutExpired:
        return False  # a busy machine; the deadline is the caller's


def kubectl(
    config: Path, *arguments: str, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """kubectl on the cluster of `config`."""
    return subprocess.run(
        [FOLDER / "kubectl", "--kubeconfig", config, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=KUBECTL_S,
        env={"PATH": os.environ["PATH"], "HOME": str(config.parent)},
    )


# --- what it gets


def older_chart(folder: Path) -> Path:
    """A copy of the chart that this server takes."""
    copy = folder / "leeway"
    shutil.copytree(CHART, copy)
    meta = copy / "Chart.yaml"
    text = meta.read_text()
    meta.write_text(re.sub(r"(?m)^kubeVersion: .*\n", "", text))
    assert meta.read_text() != text
    for name, (newer, older) in OLDER.items():
        file = copy / name
        assert newer in file.read_text(), f"{name} has no {newer.strip()}: change OLDER"
        file.write_text(file.read_text().replace(newer, older))
    return copy


def older_definitions(folder: Path) -> list[Document]:
    """The CustomResourceDefinitions of a folder, without rules in CEL and empty defaults, which
    this server cannot read."""
    found = [
        document
        for file in sorted(folder.glob("*.yaml"))
        for document in yaml.load_all(file.read_text(), yaml.CSafeLoader)
        if document
    ]
    return [_older(document) for document in found]


def _older(node: Any) -> Any:
    if isinstance(node, list):
        return [_older(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _older(value)
        for key, value in node.items()
        if key != "x-kubernetes-validations" and (key, value) != ("default", "")
    }
    # What tells the entries of a list apart has a default, or must be given.
    for key in kept.get("x-kubernetes-list-map-keys", ()):
        items = kept["items"]
        if "default" not in items["properties"][key]:
            items["required"] = sorted({*items.get("required", ()), key})
    return kept


if __name__ == "__main__":
    sys.exit(main())
