"""The chart without a cluster: what it renders is started as local processes, each is killed once,
and the run goes on to its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helm.tools import FOLDER

from .local_processes import Place, steps_of
from .rehearsal import Rehearsal, replica, small_release
from .release import Release

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not (FOLDER / "helm4").is_file(), reason="no Helm: `make helm-test` fetches it"
    ),
]


@pytest.fixture
def release(request: pytest.FixtureRequest, place: Place) -> Iterator[Release]:
    """Of 12 steps, or of as many as the test's parameter says."""
    found = small_release(place, num_steps=getattr(request, "param", 12))
    yield found
    for folder in found.ray_folders:
        shutil.rmtree(folder, ignore_errors=True)


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
    play.until_the_head_has_ended()
    play.start("redis", "api")
    play.start_ray()
    play.until_more_steps()

    for deployment in ("PolicyServer", "RolloutServer", "CourseServer"):
        play.until_replica(deployment).kill()
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


@pytest.mark.parametrize("release", [10_000], indirect=True, ids=["endless"])
def test_the_workers_of_ray_stay_while_their_head_is_replaced(release: Release, place: Place):
    play = Rehearsal(release, place)
    play.start("redis", "learner")
    play.start_ray(is_alone=False)
    play.until_more_steps()
    engine = play.until_replica("PolicyServer")

    play.kill("ray")
    play.start_ray(is_alone=False)
    for _ in range(5):  # more than the buffer holds: what is trained was played since
        play.until_more_steps()

    assert play.running["ray-worker"].is_alive
    assert replica("PolicyServer") == engine, "it need not be loaded again"
    assert engine.is_running()


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
