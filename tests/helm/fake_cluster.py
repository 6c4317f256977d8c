"""An API server that answers what Helm asks before it renders: what kinds there are, and one
Secret. So `lookup` and `.Capabilities` are tested with the real Helm and without a cluster.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import CHART, NAMESPACE, RELEASE, helm

KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "ray.io/v1": ("RayService",),
}
"""What the chart makes by default, by apiVersion."""


def _resources(version: str) -> dict[str, Any]:
    """The answer to what kinds an apiVersion has."""
    resources = [
        {
            "name": f"{kind.lower().removesuffix('y')}ies"
            if kind[-1] == "y"
            else f"{kind.lower()}s",
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": ["create", "get", "list", "patch", "update"],
        }
        for kind in KINDS[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _answers(secret: dict[str, Any] | None, has_kuberay: bool) -> dict[str, Any]:
    """By path. Nothing else exists, the releases of Helm included."""
    versions = [v for v in KINDS if v != "v1" and (has_kuberay or v != "ray.io/v1")]
    groups = [
        {
            "name": version.partition("/")[0],
            "versions": [{"groupVersion": version, "version": "v1"}],
            "preferredVersion": {"groupVersion": version, "version": "v1"},
        }
        for version in versions
    ]
    answers = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": _resources("v1"),
        **{f"/apis/{version}": _resources(version) for version in versions},
    }
    answers["/api/v1/namespaces/search/secrets"] = {
        "kind": "SecretList",
        "apiVersion": "v1",
        "metadata": {},
        "items": [],
    }
    if secret is not None:
        meta = secret["metadata"]
        answers[f"/api/v1/namespaces/{meta['namespace']}/secrets/{meta['name']}"] = secret
    return answers


@contextmanager
def running(
    folder: Path, secret: dict[str, Any] | None = None, *, has_kuberay: bool = True
) -> Iterator[Path]:
    """A kubeconfig in `folder` that leads to it, on a free port; it ends with the block."""
    answers = _answers(secret, has_kuberay)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            status = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps({"apiVersion": "v1", **status} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(_kubeconfig(server.server_address[1])))
        yield file
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def install(config: Path, program: str, *arguments: str) -> dict[str, Any]:
    """The release that `helm install` would make in the cluster that `config` leads to: `manifest`
    is what it would send, `info` holds its notes."""
    said = helm(
        *("install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=server"),
        *("--kubeconfig", str(config), "--disable-openapi-validation", "--output=json", *arguments),
        program=program,
    )
    return json.loads(said)


def _kubeconfig(port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "fake", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
    }
