"""deploy/compose.yaml without containers: read by podman-compose, each service a local process.

What containers add is translated: a volume, a bound file or a tmpfs is a path of this machine, the
name of a service is 127.0.0.1 and a free port, an image is its entry point.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from leeway.replay.server import find_server_binary
from tests.helm.tools import ROOT, SCHEMAS

from .local_processes import BIN, Place, Process, free_port

DEPLOY = ROOT / "deploy"
PODMAN_COMPOSE = SCHEMAS / "podman_compose.py"
RUN_S = 120
UNITS_S = {"s": 1, "m": 60}


class Refused(Exception):
    """podman-compose did not read the files; the message is what it said."""


def configuration(
    environment: Mapping[str, str], files: Sequence[str] = ("compose.yaml",)
) -> dict[str, Any]:
    """`podman-compose config` of files of deploy/: merged, with every variable replaced. Raises
    Refused."""
    named = [word for file in files for word in ("--file", str(DEPLOY / file))]
    with tempfile.TemporaryDirectory() as programs:
        # It asks podman for its version before it reads anything, and for nothing else.
        podman = Path(programs, "podman")
        podman.write_text("#!/bin/sh\necho podman version 5.0.0\n")
        podman.chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        ended = subprocess.run(
            [sys.executable, PODMAN_COMPOSE, *named, "config"],
            capture_output=True,
            text=True,
            timeout=RUN_S,
            env={"PATH": path, "PYTHONPATH": str(SCHEMAS), **environment},
        )
    if ended.returncode:
        raise Refused(ended.stderr)
    return without_extensions(yaml.safe_load(ended.stdout))


def without_extensions(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without what compose files may hold for themselves."""
    return {key: value for key, value in document.items() if not key.startswith("x-")}


class Composed:
    """The services, started one by one."""

    def __init__(self, place: Place, environment: Mapping[str, str]) -> None:
        self._place = place
        self._services: dict[str, Any] = configuration(environment)["services"]
        self._ports = {"6379": free_port(), "8080": free_port()}
        programs = place.folder / "bin"
        programs.mkdir()
        (programs / "redis-server").symlink_to(find_server_binary())
        self._path = f"{programs}:{BIN}:/usr/bin:/bin"

    def start(self, name: str) -> Process:
        service = self._services[name]
        words = [self.translated(name, word) for word in service["command"]]
        if "build" in service:
            words.insert(0, "leeway")
        else:
            words[-1] += f" --port {self.port('6379')}"  # it relies on the default
        return self._place.start(*words, only=self.environment(name), log=name)

    def is_healthy(self, name: str) -> bool:
        """What its health check says."""
        kind, script = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        script = self.translated(name, script)
        script = script.replace("redis-cli ", f"redis-cli -p {self.port('6379')} ")
        ended = subprocess.run(
            ["sh", "-c", script], env=self.environment(name), capture_output=True, timeout=RUN_S
        )
        return ended.returncode == 0

    def stop(self, name: str, process: Process) -> int:
        """SIGTERM, and the exit code within its stop_grace_period."""
        given = re.fullmatch(r"(\d+)([sm])", self._services[name]["stop_grace_period"])
        assert given is not None
        return process.stop(int(given[1]) * UNITS_S[given[2]])

    def port(self, number: str) -> int:
        """Where a port of a container is on this machine."""
        return self._ports[number]

    def folder(self, name: str) -> Path:
        """What stands for a volume."""
        found = self._place.folder / "volumes" / name
        found.mkdir(parents=True, exist_ok=True)
        return found

    def environment(self, name: str) -> dict[str, str]:
        """Of a service, and the PATH of its image."""
        given: dict[str, str] = self._services[name]["environment"]
        return {"PATH": self._path} | {key: self.translated(name, v) for key, v in given.items()}

    def translated(self, name: str, text: str) -> str:
        """Paths, names and ports of the containers in `text`, as they are here."""
        paths = self._paths(name)
        any_path = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
        text = re.sub(
            rf"(?<![\w./-])({any_path})(?![\w.-])", lambda match: str(paths[match[1]]), text
        )
        text = text.replace("@redis:6379", f"@127.0.0.1:{self.port('6379')}")
        return re.sub(r"\b8080$", str(self.port("8080")), text)

    def _paths(self, name: str) -> dict[str, Path]:
        """Of this machine, by path in the container."""
        service = self._services[name]
        found = {path.partition(":")[0]: self.folder(f"{name}-tmpfs") for path in service["tmpfs"]}
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            is_bound = source.startswith((".", "/"))
            found[target] = (DEPLOY / source).resolve() if is_bound else self.folder(source)
        return found
