"""The processes of a release, started and ended as a cluster does it."""

from __future__ import annotations

import contextlib
import textwrap

import psutil

from leeway.services.layout import RunDirectory
from tests.helm.chart import CHART, CUSTOM_KINDS, NAMESPACE, RELEASE, helm, parsed

from .local_processes import SMALL, Place, Process, children_of, steps_of
from .release import Release

VALUES = """
config: |
{config}
serve:
  policy: {{actorOptions: {{num_cpus: 1, num_gpus: 0}}}}
"""


def small_release(place: Place, *, num_steps: int, more: str = "") -> Release:
    """The chart as it comes for CPUs, with a run of a few steps as its configuration; `more` are
    values over it."""
    config = SMALL.replace("num_steps = 6", f"num_steps = {num_steps}")
    config = config.replace("checkpoint_every = 2", "checkpoint_every = 1")
    values = place.folder / "values.yaml"
    values.write_text(VALUES.format(config=textwrap.indent(config, "  ")) + more)
    kinds = [f"--api-versions={kind}" for kind in CUSTOM_KINDS]
    files = [CHART / "ci" / "cpu-values.yaml", values]
    manifest = helm(
        *("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *kinds),
        *(f"--values={file}" for file in files),
    )
    found = Release(parsed(manifest), place)
    found.write_files()
    return found


def replica(name: str) -> psutil.Process | None:
    """The newest Serve replica of a deployment among all that this test has started."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::") and name in "".join(process.cmdline()):
                found.append(process)
    return max(found, key=lambda process: process.create_time(), default=None)


class Rehearsal:
    """The release, and what runs of it."""

    def __init__(self, release: Release, place: Place) -> None:
        self.release = release
        self.place = place
        self.run = RunDirectory(release.run)
        self.running: dict[str, Process] = {}
        """By component, and by `component-ordinal` for pods of a number above 0."""

    def start(self, *components: str) -> None:
        for component in components:
            name, _, ordinal = component.partition("-")
            self.running[component] = self.release.start(name, int(ordinal or 0))

    def start_ray(self, *, is_alone: bool = True) -> None:
        """Ray, and the applications as soon as it takes them. On a busy machine its start may fail,
        since it waits 15 s for a process of its own: then it starts again, as a kubelet lets it.
        Unless it `is_alone`, a node of workers starts beside it if none runs."""
        self.running["ray"] = self.release.start_ray(is_alone=is_alone)

        def deployed() -> bool:
            if not self.running["ray"].is_alive:
                self.running["ray"] = self.release.start_ray(is_alone=is_alone)
            deploying = self.release.deploy()
            if deploying.popen.wait(240) != 0:
                return False
            if not is_alone and "ray-worker" not in self.running:
                self.running["ray-worker"] = self.release.start_ray_worker()
            return True

        self.place.until(deployed, 600)

    def kill(self, component: str) -> None:
        """A pod ends with all of its processes. Ray's would end by themselves, but for some of
        those of Serve."""
        process = self.running.pop(component)
        inside = children_of(process)
        process.kill()
        for child in inside:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def until_replica(self, deployment: str) -> psutil.Process:
        """Steps do not show that it runs: behind a restart they are made of what is in the buffer
        before Serve has started its replicas."""
        return self.place.until(lambda: replica(deployment), 400, *self.running.values())

    def until_more_steps(self, timeout_s: float = 400) -> None:
        before = max(steps_of(self.run), default=0)
        self.place.until(
            lambda: max(steps_of(self.run), default=0) > before, timeout_s, *self.running.values()
        )

    def until_the_head_has_ended(self) -> None:
        """Ray's head ends by itself soon after its Redis has gone."""
        head = self.running.pop("ray")
        self.place.until(lambda: not head.is_alive, 240)
