"""A run in which a stage makes no progress ends by itself, with a sentence and the evidence."""

from __future__ import annotations

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
    *("--set", "supervision.step_deadline_s=20"),
)


def test_a_learner_that_stands_still_ends_the_run_with_a_sentence_and_the_evidence(
    leeway, tiny: Callable[[], Path]
):
    with leeway(tiny(), "train", "tiny.toml", *SETTINGS) as command:
        run: RunDirectory = command.run
        pids = command.state(run).pids
        command.until(lambda: run.metrics.is_file() and run.metrics.stat().st_size > 0, 240)
        # Whoever is stopped says nothing, and does not die.
        psutil.Process(pids["learner"]).suspend()
        ended = command.end(300, run)
    assert (ended.code, ended.left) == (1, []), ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("leeway: no step ended for ")
    assert "(supervision.step_deadline_s = 20): " in last
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
    assert "Thread" in files[f"stacks/api-{pids['api']}.txt"]
