"""The chart's tests skip, and say why, where their tools are missing; `make helm-test` has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helm.schemas import OPERATORS, OWN
from tests.helm.tools import CHECKOV, FOLDER, SCHEMAS

sys.path.append(str(SCHEMAS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--helm",
        action="store_true",
        help="fail, do not skip, where a tool of the chart is missing",
    )


def leave(config: pytest.Config, why: str) -> None:
    """Skip, or fail under --helm, as `make helm-test` runs these tests."""
    (pytest.fail if config.getoption("--helm", default=False) else pytest.skip)(why)


@pytest.fixture(autouse=True, scope="session")
def helm_programs(pytestconfig: pytest.Config) -> None:
    """Both Helms and the schemas of Kubernetes."""
    needed = [FOLDER / "helm3", FOLDER / "helm4", SCHEMAS / "kubernetes_validate"]
    missing = [path.name for path in needed if not path.exists()]
    if missing:
        leave(pytestconfig, f"{', '.join(missing)} not in {FOLDER}: `make helm-test` fetches them")


@pytest.fixture(scope="session")
def checkov(pytestconfig: pytest.Config) -> Path:
    """The program."""
    if not CHECKOV.is_file():
        leave(pytestconfig, f"checkov is not in {FOLDER}: `make helm-test` fetches it")
    return CHECKOV


@pytest.fixture(scope="session", params=["own", "operators"])
def crd_folder(request: pytest.FixtureRequest) -> Path:
    """Definitions of RayService, ServiceMonitor and PrometheusRule: ours, then the operators'."""
    if request.param == "own":
        return OWN
    if not list(OPERATORS.glob("*.yaml")):
        pytest.skip(
            f"{OPERATORS} holds no CustomResourceDefinitions, so only our own were used: set "
            "CRD_DIR to a folder with those of KubeRay 1.7 and the Prometheus operator"
        )
    return OPERATORS
