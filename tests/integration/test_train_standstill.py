"""A run in which a stage makes no progress ends by itself, with a sentence and the evidence."""

from __future__ import annotations

import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from leeway.services.layout import RunDirectory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SETTINGS = (
    *("--set", "eval.num_questions=0"),
    *("--set", "learner.num_steps=100000"),
    *("--set", "supervision.step_deadline_s=60"),
)


def test_a_learner_that_stands_still_ends_the_run_with_a_sentence_and_the_evidence(
    leeway, tiny: Callable[[], Path]
):
    with leeway(tiny(), "train", "tiny.toml", *SETTINGS) as command:
        run: RunDirectory = command.run
        pids = command.state(run).pids
        command.until(lambda: run.metrics.is_file() and run.metrics.stat().st_size > 0, 240)
        # Whoever is stopped says nothing, and does not die.
        (learner,) = psutil.Process(pids["learner"]).children()
        learner.suspend()
        ended = command.end(300, run)
    assert (ended.code, ended.left) == (1, []), ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("leeway: no step ended for ")
    assert "(supervision.step_deadline_s = 60): " in last
    assert '"kind": "watchdog"' in run.events.read_text()
    (archive,) = run.root.glob("evidence-*.tar.gz")
    assert last.endswith(f"the evidence is in {archive}")
    with tarfile.open(archive) as tar:
        files = {
            name.partition("/")[2]: tar.extractfile(name).read().decode()  # type: ignore[union-attr]
            for name in tar.getnames()
        }
    assert {"verdict.txt", "contents.txt", "replay.json", "board.json"} <= files.keys()
    assert f"stacks/learner-{pids['learner']}.txt" in files
    assert any(name.endswith(f"-{learner.pid}.txt") for name in files)
    assert "Thread" in files[f"stacks/api-{pids['api']}.txt"]


def test_a_learner_without_a_sign_of_life_is_started_again(leeway, tiny: Callable[[], Path]):
    settings = (*SETTINGS[:4], "--set", "supervision.silence_deadline_s=30")
    with leeway(tiny(), "train", "tiny.toml", *settings) as command:
        run: RunDirectory = command.run
        pids = command.state(run).pids
        command.until(lambda: run.metrics.is_file() and run.metrics.stat().st_size > 0, 240)
        (learner,) = psutil.Process(pids["learner"]).children()
        learner.suspend()
        command.until(lambda: command.state(run).pids["learner"] != pids["learner"], 240)
        num_lines = len(run.metrics.read_text().splitlines())
        command.until(lambda: len(run.metrics.read_text().splitlines()) > num_lines, 240)
        command.signal(signal.SIGTERM)
        ended = command.end(120, run)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "the learner process gave no sign of life for " in run.events.read_text()
    assert not psutil.pid_exists(learner.pid)
