"""The chart without a cluster: what it renders is started as local processes, each is killed once,
and the run goes on to its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from leeway.services.layout import RunDirectory
from tests.helm.chart import CHART, CUSTOM_KINDS, NAMESPACE, RELEASE, helm, parsed
from tests.helm.tools import FOLDER

from .local_processes import SMALL, Place, Process, steps_of
from .release import Release

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not (FOLDER / "helm4").is_file(), reason="no Helm: `make helm-test` fetches it"
    ),
]

VALUES = """
config: |
{config}
serve:
  policy: {{actorOptions: {{num_cpus: 1, num_gpus: 0}}}}
"""


@pytest.fixture
def release(place: Place) -> Iterator[Release]:
    """The chart as it comes for CPUs, with a run of a few steps as its configuration."""
    config = SMALL.replace("num_steps = 6", "num_steps = 12").replace("every = 2", "every = 1")
    values = place.folder / "values.yaml"
    values.write_text(VALUES.format(config="\n".join(f"  {line}" for line in config.splitlines())))
    kinds = [f"--api-versions={kind}" for kind in CUSTOM_KINDS]
    files = [CHART / "ci" / "cpu-values.yaml", values]
    manifest = helm(
        *("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *kinds),
        *(f"--values={file}" for file in files),
    )
    found = Release(parsed(manifest), place)
    found.write_files()
    yield found
    for folder in found.ray_folders:
        shutil.rmtree(folder, ignore_errors=True)


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

    def start(self, *components: str) -> None:
        for component in components:
            self.running[component] = self.release.start(component)

    def start_ray(self) -> None:
        """Ray, and the applications as soon as it takes them."""
        self.running["ray"] = self.release.start_ray()

        def deployed() -> bool:
            deploying = self.release.deploy()
            return deploying.popen.wait(60) == 0

        self.place.until(deployed, 240, self.running["ray"])

    def kill(self, component: str) -> None:
        self.running.pop(component).kill()

    def until_more_steps(self, timeout_s: float = 300) -> None:
        before = max(steps_of(self.run), default=0)
        self.place.until(
            lambda: max(steps_of(self.run), default=0) > before, timeout_s, *self.running.values()
        )


def test_each_process_of_the_chart_is_killed_once_and_the_run_ends(release: Release, place: Place):
    play = Rehearsal(release, place)
    # In no order that helps: each waits for Redis and for its peers.
    play.start("learner", "api")
    play.start("redis")
    play.start_ray()
    play.until_more_steps()

    play.kill("learner")
    play.start("learner")
    play.until_more_steps()

    play.kill("redis")
    play.kill("api")
    play.start("redis", "api")
    play.until_more_steps()

    for deployment in ("PolicyServer", "RolloutServer", "CourseServer"):
        process = replica(deployment)
        assert process is not None, f"no replica of {deployment} runs"
        process.kill()
        play.until_more_steps()

    play.kill("ray")
    play.start_ray()
    place.until(play.run.summary.is_file, 400, *play.running.values())

    summary = json.loads(play.run.summary.read_text())
    assert (summary["steps"], summary["max_staleness"]) == (12, 1)
    assert summary["max_staleness_seen"] <= 1
    assert sorted(set(steps_of(play.run))) == list(range(1, 13))
    assert answers(play) == {"/livez": 200, "/v1/status": 401}
    assert play.running["learner"].is_alive, (
        "it waits for SIGTERM: the StatefulSet would restart it"
    )
    codes = {name: play.running[name].stop() for name in ("learner", "api", "redis")}
    assert codes == {"learner": 0, "api": 0, "redis": 0}


def answers(play: Rehearsal) -> dict[str, int]:
    """The status is behind a token, the probe is not."""
    address = f"http://127.0.0.1:{play.release.port('api', 8080)}"
    paths = ("/livez", "/v1/status")
    return {path: httpx.get(f"{address}{path}", timeout=10).status_code for path in paths}


def test_the_liveness_probe_tells_a_learner_that_works_from_a_silent_one(release: Release):
    probe = release.pod("learner").main["livenessProbe"]["exec"]["command"]
    heartbeat = Path(release.environment("learner")["LEEWAY_HEARTBEAT_FILE"])
    command = [release.translated("learner", word) for word in probe]

    def verdict() -> int:
        done = subprocess.run(command, env=release.environment("learner"), capture_output=True)
        return done.returncode

    heartbeat.touch()
    assert verdict() == 0
    long_ago = time.time() - 24 * 3600
    os.utime(heartbeat, (long_ago, long_ago))
    assert verdict() != 0
