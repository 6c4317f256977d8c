"""A learner of two pods, from what the chart renders: each pod is ended as an update of the
StatefulSet ends it, the last one first, and the run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import psutil
import pytest

from tests.helm.chart import find
from tests.helm.tools import FOLDER

from .local_processes import Place, Process, children_of, left_of, steps_of
from .rehearsal import Rehearsal, small_release
from .release import Release

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (FOLDER / "helm4").is_file(), reason="no Helm: `make helm-test` fetches it"
    ),
]

TWO_PODS = """
learner: {replicas: 2}
storage: {runs: {accessModes: [ReadWriteMany]}}
"""
PODS = ("learner", "learner-1")


@pytest.fixture
def release(place: Place) -> Iterator[Release]:
    found = small_release(place, num_steps=8, more=TWO_PODS)
    yield found
    for folder in found.ray_folders:
        shutil.rmtree(folder, ignore_errors=True)


def start_pods(play: Rehearsal) -> None:
    """Pod 0, and the other when it can meet it, for here nothing else tells who of the two is the
    host that both of them name."""
    play.start("learner")
    port = play.release.port("learner", 29400)

    def listens() -> bool:
        found = [play.running["learner"].popen.pid, *children_ids(play.running["learner"])]
        return any(
            c.pid in found and c.status == psutil.CONN_LISTEN and tuple(c.laddr)[1:] == (port,)
            for c in psutil.net_connections("tcp")
        )

    play.place.until(listens, 120, play.running["learner"])
    play.start("learner-1")


def children_ids(process: Process) -> list[int]:
    return [child.pid for child in children_of(process)]


def end_both_by(play: Rehearsal, pod: str) -> None:
    """SIGTERM to one pod. Both end with 0 within the grace of its template, every rank with them,
    and the checkpoint of their last step holds what both ranks wrote."""
    grace_s = play.release.pod("learner").spec["terminationGracePeriodSeconds"]
    ranks = [rank for name in PODS for rank in children_of(play.running[name])]
    assert len(ranks) >= 2
    play.running[pod].stop(grace_s)
    codes = {name: play.running.pop(name).popen.wait(grace_s) for name in PODS}
    assert codes == dict.fromkeys(PODS, 0)
    assert left_of(ranks) == []
    folder = play.run.checkpoints / f"step-{steps_of(play.run)[-1]:08d}"
    assert (folder / "training.json").is_file()


def test_an_update_ends_the_last_pod_first_and_no_step_is_lost(release: Release, place: Place):
    objects = find(release.documents, "StatefulSet", "rel-leeway-learner")["spec"]
    assert objects["updateStrategy"] == {"type": "RollingUpdate"}
    assert objects["podManagementPolicy"] == "Parallel"
    play = Rehearsal(release, place)
    play.start("redis")
    start_pods(play)
    play.start_ray()
    play.until_more_steps()

    end_both_by(play, "learner-1")
    start_pods(play)
    play.until_more_steps()

    end_both_by(play, "learner")
    start_pods(play)
    place.until(play.run.summary.is_file, 600, *play.running.values())

    summary = json.loads(play.run.summary.read_text())
    assert summary["steps"] == 8
    assert steps_of(play.run) == list(range(1, 9)), "no step was trained twice"
    assert all(play.running[pod].is_alive for pod in PODS), "they wait for SIGTERM"

    # A pod that is deleted after the end ends both; the StatefulSet makes them again.
    end_both_by(play, "learner-1")
    written = play.run.summary.stat().st_mtime_ns
    start_pods(play)
    place.until(lambda: play.run.summary.stat().st_mtime_ns != written, 600, *play.running.values())
    assert json.loads(play.run.summary.read_text())["steps"] == 8
    assert steps_of(play.run) == list(range(1, 9)), "the end is found again, nothing is trained"
    assert all(play.running[pod].is_alive for pod in PODS), "they wait for SIGTERM again"
    end_both_by(play, "learner")
    assert play.running["redis"].stop() == 0
