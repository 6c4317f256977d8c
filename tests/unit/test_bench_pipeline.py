"""What `leeway bench pipeline` reads from a run's metrics."""

import json
import threading
from pathlib import Path

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.bench import pipeline
from leeway.services.bench.pipeline import course_of


def line(step: int, num_ready: int) -> dict[str, float]:
    """A step of 10 s that trained 2 groups of 500 tokens."""
    return {
        "step": step,
        "time": 10.0 * step,
        "num_tokens_trained": 1000,
        "num_groups": 2,
        "num_ready": num_ready,
        "wait_s": 1.0,
        "seconds": 8.0,
        "publish_s": 0.5,
        "confirm_s": 0.5,
        "engine_up_s": 10.0 * step,
        "engine_busy_s": 9.0 * step,
        "engine_prompt_tokens": 500 * step,
        "engine_cached_tokens": 300 * step,
        "engine_tokens": 90 * step,
        "engine_discarded_tokens": 10 * step,
        "staleness_mean": step / 2,
    }


@pytest.mark.parametrize(
    ("ready", "backlog", "tokens_per_s"),
    [((5, 4, 4, 4), 0.0, 100.0), ((5, 4, 2, 1), 0.75, 25.0), ((0, 0, 3, 6), 0.0, 100.0)],
    ids=["steady", "drains", "fills"],
)
def test_groups_that_lay_ready_before_do_not_count(
    tmp_path: Path, ready: tuple[int, ...], backlog: float, tokens_per_s: float
):
    lines = [json.dumps(line(step, n)) for step, n in enumerate(ready, start=1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    course = course_of(tmp_path, 2)
    assert (course.num_tokens, course.wall_s) == (2000, 20.0)
    assert (course.backlog, course.tokens_per_s) == (backlog, tokens_per_s)
    assert (course.idle, course.engine_busy, course.staleness) == (0.1, 0.9, 1.75)
    assert course.longest_wait_s == 1.0
    assert (course.reused, course.discarded) == (0.6, 0.1)
    third = course_of(tmp_path, 2, 3)
    assert (third.num_tokens, third.wall_s, third.staleness) == (1000, 10.0, 1.5)


def test_an_engine_that_told_nothing_anew_has_its_share_since_its_start(tmp_path: Path):
    """30 s up and 24 s busy, at both lines."""
    lines = [line(step, 0) | {"engine_up_s": 30.0, "engine_busy_s": 24.0} for step in (2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert course_of(tmp_path, 1).engine_busy == 0.8


def test_half_that_was_cut_is_played_from_its_start_and_one_that_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    played: list[Path] = []

    def train(
        command: list[str], *, cwd: Path, **_: object
    ) -> pipeline.subprocess.CompletedProcess:
        played.append(cwd)
        run = cwd / "runs" / "run-2"
        run.mkdir(parents=True)
        text = "\n".join(json.dumps(line(step, 0)) for step in range(1, 5))
        (run / "metrics.jsonl").write_text(text)
        (run / "summary.json").write_text("{}")
        return pipeline.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(pipeline.subprocess, "run", train)
    half = tmp_path / "asynchronous"
    cut = half / "runs" / "run-1"
    cut.mkdir(parents=True)
    size = pipeline._size(True, False)
    first = pipeline._play(half, "asynchronous", tmp_path, size, False)
    assert not cut.exists()
    assert pipeline._play(half, "asynchronous", tmp_path, size, False) == first
    assert played == [half]


def test_one_half_has_its_own_figures_and_the_other_is_compared_with_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Apart 5 steps, of which those behind the third are looked at; in lockstep 4 and two."""
    played: list[str] = []

    def play(folder: Path, half: str, model: Path, size: object, is_cuda: bool) -> Path:
        played.append(half)
        apart = half == "asynchronous"
        lines = [line(step, 0) for step in range(1, 6 if apart else 5)]
        for of_step in lines:
            settled = of_step["step"] > 3
            of_step["time"] *= 1.0 if apart else 2.0
            of_step["wait_s"] = 2.0 if settled else 5.0
            of_step["engine_busy_s"] += 1.0 if of_step["step"] == 3 else 0.0
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(part) for part in lines))
        return folder

    monkeypatch.setattr(pipeline, "_play", play)
    result = pipeline.run(quick=True, out=tmp_path, half="asynchronous")
    assert played == ["asynchronous"]
    assert result.keys["half"] == "asynchronous"
    assert (result.keys["learner_idle"], result.keys["settling_learner_idle"]) == (0.2, 0.5)
    assert (result.keys["engine_busy"], result.keys["settling_engine_busy"]) == (0.85, 1.0)
    assert result.keys["staleness"] == 2.25
    assert result.keys["longest_wait_s"] == 2.0
    assert [row[0] for row in result.rows] == ["asynchronous, steps 3 to 3", "asynchronous"]
    both = pipeline.run(quick=True, out=tmp_path)
    assert (both.keys["speedup"], both.keys["synchronous_learner_idle"]) == (2.0, 0.175)
    assert played == ["asynchronous", "asynchronous", "synchronous"]
    assert set(pipeline.run(quick=True, out=tmp_path, half="synchronous").keys).isdisjoint(
        {"settling_engine_busy", "speedup"}
    )


def test_half_without_a_folder_is_refused_in_words():
    with pytest.raises(ConfigurationError, match=r"give both the same --out FOLDER"):
        pipeline.run(quick=True, half="synchronous")


@pytest.mark.parametrize(
    ("overlaps", "order"),
    [
        (True, ["asynchronous began", "synchronous began", "asynchronous ended"]),
        (False, ["asynchronous began", "asynchronous ended", "synchronous began"]),
    ],
)
def test_a_short_run_ends_while_the_next_begins_and_a_long_one_before(
    overlaps: bool, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The steps are trained at once; the end comes when the other has begun, or 0.3 s later."""
    happened: list[str] = []
    other = threading.Event()

    def play(folder: Path, half: str, *_: object) -> Path:
        happened.append(f"{half} began")
        if half == "synchronous":
            other.set()
            return folder
        run = folder / "runs" / "run-1"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("{}\n" * 5)
        other.wait(60 if overlaps else 0.3)
        happened.append(f"{half} ended")
        return folder

    monkeypatch.setattr(pipeline, "_play", play)
    size = pipeline._size(True, False)
    names = tuple(pipeline.STALENESS)
    runs = pipeline._play_all(tmp_path, names, tmp_path, size, False, overlaps=overlaps)
    assert runs == {name: tmp_path / name for name in names}
    assert happened == order


def test_a_run_that_fails_before_its_last_step_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    played: list[str] = []

    def fail(folder: Path, half: str, *_: object) -> Path:
        played.append(half)
        raise RuntimeError("leeway train ended with 1")

    monkeypatch.setattr(pipeline, "_play", fail)
    with pytest.raises(RuntimeError, match="ended with 1"):
        pipeline.run(quick=True, out=tmp_path)
    assert played == ["asynchronous"]
