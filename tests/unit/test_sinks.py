"""Sinks: what they are given, what they keep, and that a broken one stops nothing."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.config import MetricsConfig, load
from leeway.services.config_machine import check_packages
from leeway.services.layout import RunDirectory
from leeway.services.metering import Metering
from leeway.services.sinks import delivery, factory
from leeway.services.sinks.delivery import Sinks, numbers
from leeway.services.sinks.protocol import RunFacts, Value

LINE = {"step": 3, "version": 3, "time": 1.7e9, "loss": 0.5, "pause_ms": [1.0, 3.0]}
SUMMARY: dict[str, Value] = {"exact_match_after": 0.9, "steps": 3, "objective": "ppo"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries start slowly on a busy machine: the deadline of the test is what counts."""
    monkeypatch.setattr(delivery, "FINISH_S", 110.0)


class Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self.summary: Mapping[str, Value] | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, metrics))

    def finish(self, summary: Mapping[str, Value]) -> None:
        self.summary = summary


class Broken(Kept):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        raise RuntimeError("no space left")


def facts(folder: Path, step: int = 0) -> RunFacts:
    return RunFacts(
        name="demo-1",
        project="tests",
        directory=folder,
        step=step,
        config={"learner.num_steps": 3, "replay.url": None},
    )


def test_numbers_are_what_can_be_plotted():
    line = {**LINE, "gap_mean": None, "name": "x", "bad": float("nan"), "none": []}
    assert numbers(line) == {"loss": 0.5, "pause_ms": 2.0}


def test_every_sink_gets_every_step_in_order_and_the_summary():
    kept = {"a": Kept(), "b": Kept()}
    sinks = Sinks({name: lambda sink=sink: sink for name, sink in kept.items()})
    for step in (1, 2, 3):
        sinks.step(step, {"loss": step / 10})
    sinks.finish(SUMMARY)
    for sink in kept.values():
        assert sink.steps == [(1, {"loss": 0.1}), (2, {"loss": 0.2}), (3, {"loss": 0.3})]
        assert sink.summary == SUMMARY
    assert sinks.failures() == []


def test_a_sink_that_raises_is_told_once_and_left_alone():
    broken, whole = Broken(), Kept()
    sinks = Sinks({"broken": lambda: broken, "whole": lambda: whole})
    for step in (1, 2, 3):
        sinks.step(step, {"loss": 1.0})
    sinks.finish(SUMMARY)
    assert sinks.failures() == [
        "sink broken gets no more metrics: RuntimeError: no space left; training goes on"
    ]
    assert sinks.failures() == []
    assert len(broken.steps) == 1 and broken.summary is None
    assert len(whole.steps) == 3 and whole.summary == SUMMARY


def test_a_sink_that_cannot_be_built_stops_nothing():
    def build() -> Kept:
        raise SystemExit("no login")  # as some libraries do

    sinks = Sinks({"lost": build})
    sinks.step(1, {"loss": 1.0})
    sinks.finish({})
    assert sinks.failures() == [
        "sink lost gets no more metrics: SystemExit: no login; training goes on"
    ]


def test_a_sink_that_hangs_holds_neither_a_step_nor_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delivery, "FINISH_S", 0.05)
    monkeypatch.setattr(delivery, "QUEUE_STEPS", 2)
    let_go = Event()

    class Hanging(Kept):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            let_go.wait()

    sinks = Sinks({"hung": Hanging})
    for step in range(10):
        sinks.step(step, {"loss": 1.0})
    sinks.finish(SUMMARY)
    [sentence] = sinks.failures()
    assert "2 steps behind" in sentence
    let_go.set()


def test_a_sink_that_does_not_finish_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delivery, "FINISH_S", 0.05)
    let_go = Event()

    class Hanging(Kept):
        def finish(self, summary: Mapping[str, Value]) -> None:
            let_go.wait()

    sinks = Sinks({"hung": Hanging})
    sinks.finish(SUMMARY)
    [sentence] = sinks.failures()
    assert "did not finish within" in sentence
    let_go.set()


def test_an_unknown_sink_is_refused_with_those_that_exist():
    wanted = 'it must be a list of any of "wandb", "tensorboard", "trackio"'
    with pytest.raises(ConfigurationError, match=f"metrics.sinks is .*; {wanted}"):
        load(None, ['metrics.sinks=["tensorbord"]'])


def test_a_sink_is_named_once():
    with pytest.raises(ConfigurationError, match=r'metrics\.sinks names "wandb" twice'):
        load(None, ['metrics.sinks=["wandb", "wandb"]'])


def test_a_sink_that_is_not_installed_is_refused_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
):
    config = load(None, ['metrics.sinks=["trackio"]'])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "leeway-rl\[trackio\]"'):
        check_packages(config)
    factory.check_installed(MetricsConfig())


def test_every_sink_of_the_configuration_can_be_built_and_is_an_extra():
    import tomllib
    from typing import get_args

    from leeway.services.config import SinkName

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = get_args(SinkName)
    assert set(factory.BUILDERS) == set(names) <= set(project["optional-dependencies"])


class Board:
    """What Metering needs of the run board."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.events: list[tuple[str, str]] = []

    async def get_all(self) -> dict[str, Any]:
        return self.sections

    async def put(self, section: str, value: dict[str, Any]) -> None:
        self.sections[section] = json.loads(json.dumps(value))

    async def append_event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))


async def test_a_failing_sink_becomes_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(factory.BUILDERS, "wandb", lambda run: Broken())
    config, run, board = load(None, ['metrics.sinks=["wandb"]']), RunDirectory(tmp_path), Board()
    run.summary.write_text(json.dumps(SUMMARY))
    metering = Metering(config, run, board, step=0)  # pyright: ignore[reportArgumentType]
    await metering.resume()
    line = {"num_tokens_trained": 5, "num_trajectories": 2, "seconds": 1.0, "wait_s": 0.1}
    for step in (1, 2):
        await metering.step({"step": step, **line})
    await metering.finish(is_done=True)
    await metering.finish()
    assert [kind for kind, _ in board.events] == ["metrics"]
    assert board.sections["totals"]["counts"]["steps"] == 2


def test_tensorboard_keeps_steps_and_summary(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = Sinks({"tensorboard": lambda: factory.BUILDERS["tensorboard"](facts(tmp_path))})
    sinks.step(1, {"loss": 0.5, "score/exact_match": 0.25})
    sinks.step(2, {"loss": 0.25, "score/exact_match": 0.5})
    sinks.finish(SUMMARY)
    assert sinks.failures() == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [e.step for e in found.Scalars("summary/exact_match_after")] == [2]
    texts = set(found.Tags()["tensors"])
    assert {"configuration/text_summary", "summary/objective/text_summary"} <= texts


def test_tensorboard_hides_steps_that_a_resumed_run_repeats(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        sinks = Sinks({"t": lambda d=done: factory.BUILDERS["tensorboard"](facts(tmp_path, d))})
        for step in steps:
            sinks.step(step, {"loss": float(10 * done + step)})
        sinks.finish({})
        assert sinks.failures() == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 1.0), (2, 12.0), (3, 13.0)]


def test_trackio_keeps_steps_and_summary_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    sinks = Sinks({"trackio": lambda: factory.BUILDERS["trackio"](facts(tmp_path))})
    sinks.step(1, {"loss": 0.5})
    sinks.step(2, {"loss": 0.25})
    sinks.finish(SUMMARY)
    assert sinks.failures() == []
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
    logged = [(run, step, json.loads(metrics)) for run, step, metrics in rows]
    assert logged[:2] == [("demo-1", 1, {"loss": 0.5}), ("demo-1", 2, {"loss": 0.25})]
    assert logged[2][2]["summary/exact_match_after"] == 0.9


def test_wandb_keeps_a_run_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    sinks = Sinks({"wandb": lambda: factory.BUILDERS["wandb"](facts(tmp_path))})
    sinks.step(1, {"loss": 0.5})
    sinks.finish(SUMMARY)
    assert sinks.failures() == []
    run_id = (tmp_path / "wandb-id").read_text().strip()
    [file] = tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    names = (b"loss", b"exact_match_after", b"learner.num_steps")
    # Its own process writes the file, and on a busy machine it is not through with it at once.
    deadline = time.monotonic() + 60
    while not all(name in file.read_bytes() for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    kept = file.read_bytes()
    assert [name for name in names if name not in kept] == []


def test_wandb_knows_a_run_by_an_id_of_its_directory_not_by_its_name(tmp_path: Path):
    pytest.importorskip("wandb")
    from leeway.services.sinks.wandb_sink import _id_of

    here, there = tmp_path / "a" / "demo-1", tmp_path / "b" / "demo-1"
    for directory in (here, there):
        directory.mkdir(parents=True)
    assert _id_of(here) != _id_of(there)
    assert _id_of(here) == _id_of(here)


def test_wandb_is_online_only_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    from leeway.services.sinks.wandb_sink import _mode

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert _mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert _mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert _mode() == "disabled"
