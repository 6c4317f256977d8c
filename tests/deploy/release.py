"""A rendered release as processes of this machine: what a cluster would run, without the cluster.

Each container becomes a process with the container's own command and environment, and nothing
else of ours. What a cluster adds is translated:

    a mounted path           a folder, the same for every container that mounts the same claim
    a Service and its port   127.0.0.1 and a free port
    a Secret or ConfigMap    its values, from the rendered objects
    an image                 its entry point, `leeway` under an init; for Redis the server here
    KubeRay                  `ray start` with the rayStartParams and what the head needs to find its
                             state in Redis again, then the serveConfigV2
"""

from __future__ import annotations

import base64
import copy
import json
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from leeway.replay.server import find_server_binary
from tests.helm.chart import Document, PodTemplate, find, pods

from .local_processes import BIN, Place, Process, free_port

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class RayState:
    """How a head of Ray reaches its state in Redis."""

    options: dict[str, str]
    """Of `ray start`."""
    environment: dict[str, str]


class Release:
    """The objects of `helm template`, started component by component."""

    def __init__(self, documents: list[Document], place: Place) -> None:
        self.documents = documents
        self._place = place
        self._ports: dict[tuple[str, int], int] = {}
        """Free ports by component and container port."""
        programs = place.folder / "bin"
        programs.mkdir()
        (programs / "redis-server").symlink_to(find_server_binary())
        self._path = f"{programs}:{BIN}:/usr/bin:/bin"
        self.ray_folders: list[str] = []

    # --- what the objects say

    def pod(self, component: str, ordinal: int = 0) -> PodTemplate:
        """The pod of a component, of the first group where it has several."""
        found = [pod for pod in pods(self.documents) if pod.component == component]
        assert found, f"no pod of {component}"
        if not ordinal:
            return found[0]
        assert ordinal < found[0].owner["spec"]["replicas"]
        named = copy.deepcopy(found[0].template)
        named["metadata"]["name"] = f"{component}-{ordinal}"
        return replace(found[0], template=named)

    def port(self, component: str, number: int) -> int:
        """Where a container port of a component is on this machine."""
        if (component, number) not in self._ports:
            self._ports[component, number] = free_port()
        return self._ports[component, number]

    def claim(self, name: str) -> Path:
        """The folder that stands for a volume."""
        folder = self._place.folder / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def run(self) -> Path:
        """The run directory, on the learner's volume."""
        args = self.pod("learner").main["args"]
        return Path(self._translated(self.pod("learner"), args[args.index("--run-dir") + 1]))

    # --- starting

    def start(self, component: str, ordinal: int = 0) -> Process:
        """The first container of a component's pod, of that number where it has several."""
        pod = self.pod(component, ordinal)
        container = pod.main
        entry_point = container.get("command") or ["leeway"]
        words = [*entry_point, *(container.get("args") or [])]
        command = [self._translated(pod, word) for word in words]
        environment = self.environment(component, ordinal)
        return self._place.start(*command, only=environment, log=f"{component}-{ordinal}")

    def start_ray(self, *, is_alone: bool = True) -> Process:
        """The head. `is_alone`: it plays the workers, too, with the resources of all of them."""
        head, state = self._head_component, self.ray_state()
        ports = {
            "port": self.port(head, 6379),
            "dashboard-port": self.port(head, 8265),
            "dashboard-agent-listen-port": self.port(head, 52365),
            "ray-client-server-port": free_port(),
        }
        # Sockets lie in this folder, and their paths may have 107 characters.
        self.ray_folders.append(tempfile.mkdtemp(prefix="r-", dir="/tmp"))
        return self._start_node(
            *("--head", "--include-dashboard=true"),
            *(self._worker_resources() if is_alone else ["--num-cpus=0"]),
            *(f"--{name}={port}" for name, port in ports.items()),
            f"--temp-dir={self.ray_folders[-1]}",
            *(f"--{name}={value}" for name, value in state.options.items()),
            only=self.environment(head) | state.environment,
            log="ray",
        )

    def start_ray_worker(self) -> Process:
        """One machine that plays all groups of workers, beside a head that is not alone."""
        waits = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # as KubeRay sets it
        component = next(p.component for p in pods(self.documents) if p.where.endswith(" policy"))
        return self._start_node(
            f"--address=127.0.0.1:{self.port(self._head_component, 6379)}",
            *self._worker_resources(),
            f"--dashboard-agent-listen-port={free_port()}",
            only=self.environment(component) | waits,
            log="ray-worker",
        )

    def _start_node(self, *options: str, only: Mapping[str, str], log: str) -> Process:
        ports = {
            "dashboard-agent-grpc-port": free_port(),
            "runtime-env-agent-port": free_port(),
            "metrics-export-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
        }
        return self._place.start(
            *("ray", "start", "--block", *options),
            *(f"--{name}={port}" for name, port in ports.items()),
            *("--node-ip-address=127.0.0.1", "--object-store-memory=134217728"),
            only=only,
            log=log,
        )

    def _worker_resources(self) -> list[str]:
        spec = find(self.documents, "RayService")["spec"]
        resources: dict[str, float] = {}
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            resources |= yaml.safe_load(shlex.split(group["rayStartParams"]["resources"])[0])
        return ["--num-cpus=16", f"--resources={json.dumps(resources)}"]

    def ray_state(self) -> RayState:
        """What KubeRay makes of gcsFaultToleranceOptions for the head."""
        cluster = find(self.documents, "RayService")["spec"]["rayClusterConfig"]
        given = cluster["gcsFaultToleranceOptions"]
        address = self._with_services(given["redisAddress"])
        return RayState(
            options={
                "redis-username": given["redisUsername"]["value"],
                "redis-password": self._referred(given["redisPassword"]["valueFrom"]),
            },
            environment={
                "RAY_REDIS_ADDRESS": address,
                "RAY_external_storage_namespace": "cluster",
            },
        )

    def deploy(self) -> Process:
        """Hand the applications to Ray, as KubeRay does; it ends when Ray has taken them."""
        spec = find(self.documents, "RayService")["spec"]
        file = self._place.folder / "serve.yaml"
        file.write_text(self._translated(self.pod(self._head_component), spec["serveConfigV2"]))
        address = f"http://127.0.0.1:{self.port(self._head_component, 8265)}"
        return self._place.start(
            *("serve", "deploy", str(file), "--address", address),
            only={"PATH": self._path},
            log="serve-deploy",
        )

    @property
    def _head_component(self) -> str:
        heads = [pod for pod in pods(self.documents) if pod.where.endswith(" head")]
        return heads[0].component

    # --- translating

    def environment(self, component: str, ordinal: int = 0) -> dict[str, str]:
        """Of the first container, as a kubelet makes it, and the PATH of the image."""
        pod = self.pod(component, ordinal)
        found: dict[str, str] = {"PATH": self._path}
        for variable in pod.main.get("env") or []:
            value = variable.get("value")
            if value is None:
                value = self._referred(variable["valueFrom"])
            value = re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), value)
            found[variable["name"]] = self._translated(pod, value)
        return found

    def translated(self, component: str, text: str) -> str:
        """A word of a container of a component as it reads here."""
        return self._translated(self.pod(component), text)

    def _referred(self, source: Mapping[str, Any]) -> str:
        reference = source["secretKeyRef"]
        secret = find(self.documents, "Secret", reference["name"])
        return base64.b64decode(secret["data"][reference["key"]]).decode()

    def _translated(self, pod: PodTemplate, text: str) -> str:
        """Paths, Services and ports of the cluster in `text`, as they are here."""
        folders = self._folders(pod)
        paths = "|".join(re.escape(path) for path in sorted(folders, key=len, reverse=True))
        text = re.sub(
            rf"(?<![\w./-])({paths})(?![\w.-])", lambda match: str(folders[match[1]]), text
        )
        text = self._with_services(text)
        own = {port["containerPort"] for port in pod.main.get("ports") or []}
        for number in own:
            here = str(self.port(pod.component, number))
            text = re.sub(rf"(?<![\w:./-]){number}(?![\w./-])", here, text)
        return text

    def _with_services(self, text: str) -> str:
        for service in (d for d in self.documents if d["kind"] == "Service"):
            labels = service["spec"].get("selector") or {}
            component = labels.get("app.kubernetes.io/component", "")
            for port in service["spec"]["ports"]:
                here = f"127.0.0.1:{self.port(component, port['port'])}"
                name = re.escape(service["metadata"]["name"])
                host = rf"({name}-\d+\.)?{name}(\.[\w.-]+)?"  # of a pod, or of the Service
                text = re.sub(rf"(?<![\w-]){host}:{port['port']}\b", here, text)
        return text

    def _folders(self, pod: PodTemplate) -> dict[str, Path]:
        """By mounted path."""
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes") or []}
        found = {}
        for mount in pod.main["volumeMounts"]:
            if mount["mountPath"] == SHARED_MEMORY:
                continue
            volume = volumes.get(mount["name"], {})
            if "configMap" in volume:
                name = volume["configMap"]["name"]
            else:
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                # Two pods of a component share nothing but claims.
                own = pod.template["metadata"].get("name", pod.component)
                name = claim or f"{own}-{mount['name']}"
            found[mount["mountPath"]] = self.claim(name)
        return found

    def write_files(self) -> None:
        """The files of every ConfigMap that a pod mounts."""
        for pod in pods(self.documents):
            for volume in pod.spec.get("volumes") or []:
                if "configMap" in volume:
                    name = volume["configMap"]["name"]
                    for file, text in find(self.documents, "ConfigMap", name)["data"].items():
                        translated = self._translated(pod, text)
                        if file == "redis.conf":  # it relies on the default, which may be taken
                            translated += f"\nport {self.port(pod.component, 6379)}\n"
                        (self.claim(name) / file).write_text(translated)
