"""What the processes of a run share: directory, Redis URL, records, heartbeat, and how they begin
and end a run on its board."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from leeway.learner.errors import LearnerStopped
from leeway.replay.errors import ConfigurationError, StoreUnavailable, WaitTimeout
from leeway.replay.policy_folder import newest_policy
from leeway.replay.run_board import Event
from leeway.services import ending
from leeway.services.config import load
from leeway.services.heartbeat import Heartbeat
from leeway.services.layout import RunDirectory, join_run
from leeway.services.processes.joining import begin, redis_url_of, wait_for_redis
from leeway.services.records import Records


class Board:
    """A run board in memory."""

    def __init__(self, phase: str | None = None, **sections: dict[str, Any]) -> None:
        self.sections = dict(sections)
        self.now = phase
        self.is_stopping = True
        self.noted: list[Event] = []

    async def clear_stop(self) -> None:
        self.is_stopping = False

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return dict(self.sections)

    async def put(self, section: str, value: dict[str, Any]) -> None:
        self.sections[section] = value

    async def phase(self) -> str | None:
        return self.now

    async def set_phase(self, phase: str) -> None:
        self.now = phase

    async def events(self, after: str = "", count: int = 100) -> list[Event]:
        return [event for event in self.noted if event.event_id > after][:count]


async def go_on() -> bool:
    return False


# --- the Redis URL


def test_the_environment_goes_before_the_file_and_an_override_before_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "run.toml"
    file.write_text('[replay]\nurl = "redis://file:1/0"\n')
    monkeypatch.delenv("LEEWAY_REDIS_URL", raising=False)
    assert load(file).replay.url == "redis://file:1/0"
    monkeypatch.setenv("LEEWAY_REDIS_URL", "redis://:secret@environment:2/0")
    assert load(file).replay.url == "redis://:secret@environment:2/0"
    assert load(file, ["replay.url=redis://override:3/0"]).replay.url == "redis://override:3/0"


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LEEWAY_REDIS_URL", "")
    assert load(None).replay.url is None


def test_a_variable_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LEEWAY_REDIS_URL", "localhost")
    with pytest.raises(ConfigurationError, match=r"^LEEWAY_REDIS_URL: replay.url is not a Redis"):
        load(None)


def test_processes_without_a_common_redis_are_told_what_to_set():
    with pytest.raises(ConfigurationError, match=r"set replay.url or LEEWAY_REDIS_URL"):
        redis_url_of(load(None))


async def test_the_wait_for_redis_has_a_deadline_and_names_the_address():
    with pytest.raises(StoreUnavailable, match=r"no Redis within 0.1 s .*127\.0\.0\.1:1"):
        await wait_for_redis("redis://127.0.0.1:1/0", "run", timeout_s=0.1)


def test_a_process_that_needs_no_files_starts_where_they_are_not(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('model = "/models/large"\n[data]\ntrain = "/data/train.jsonl"\n')
    with pytest.raises(ConfigurationError, match=r'model = "/models/large" does not exist'):
        load(file)
    assert load(file, has_files=False).model == "/models/large"
    file.write_text("[replay]\nslot_timeout_s = 1\n")
    with pytest.raises(ConfigurationError, match="does not outlast"):
        load(file, has_files=False)


# --- the run directory


def test_a_directory_is_made_once_and_keeps_the_configuration_without_the_password(tmp_path: Path):
    config = load(None, ["replay.url=redis://:secret@host:1/0"])
    for _ in range(2):
        run = join_run(config, tmp_path / "run.toml", tmp_path / "runs" / "first")
    assert run.root.name == "first"
    assert "secret" not in run.config.read_text()
    assert run.read_redis_url() == "redis://:secret@host:1/0"
    assert run.redis_url.stat().st_mode & 0o777 == 0o600


def test_a_run_that_is_started_with_its_own_file_leaves_it_as_it_is(tmp_path: Path):
    run = RunDirectory(tmp_path / "first")
    run.root.mkdir()
    run.config.write_text("# mine\n")
    join_run(load(None), run.config, run.root)
    assert run.config.read_text() == "# mine\n"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--run-dir .* cannot hold the run"):
        join_run(load(None), tmp_path / "run.toml", tmp_path / "file" / "first")


def test_the_newest_complete_policy_counts_else_the_base(tmp_path: Path):
    base = tmp_path / "base"
    assert newest_policy(tmp_path / "none", base) == (base, 0)
    for name, is_complete in (("step-00000002", True), ("step-00000010", True),
                              ("step-00000012", False), ("step-x", True)):  # fmt: skip
        (tmp_path / name).mkdir()
        if is_complete:
            (tmp_path / name / "training.json").write_text("{}")
    assert newest_policy(tmp_path, base) == (tmp_path / "step-00000010", 10)


def test_engines_look_for_checkpoints_where_the_learner_puts_them():
    from leeway.learner import checkpoint
    from leeway.replay import policy_folder

    assert (checkpoint._PREFIX, checkpoint._RECORD) == (policy_folder.PREFIX, policy_folder.RECORD)


# --- records


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def texts(run: RunDirectory) -> list[str]:
    return [json.loads(line)["text"] for line in run.events.read_text().splitlines()]


def event(number: int) -> Event:
    return Event(f"{number}-0", float(number), "run", f"event {number}")


async def test_whoever_goes_on_writes_no_event_twice_and_leaves_none_out(run: RunDirectory):
    board = Board()
    board.noted = [event(1), event(2)]
    await Records(run, board).copy()  # type: ignore[arg-type]
    board.noted.append(event(3))
    await Records(run, board).copy()  # type: ignore[arg-type]
    assert texts(run) == ["event 1", "event 2", "event 3"]


async def test_half_a_line_of_a_killed_process_is_written_anew(run: RunDirectory):
    board = Board()
    board.noted = [event(1), event(2)]
    await Records(run, board).copy()  # type: ignore[arg-type]
    run.events.write_text(run.events.read_text()[:-10])
    await Records(run, board).copy()  # type: ignore[arg-type]
    assert texts(run) == ["event 1", "event 2"]


async def test_more_events_than_one_answer_holds_are_all_copied(run: RunDirectory):
    board = Board()
    board.noted = [event(number) for number in range(100, 350)]
    await Records(run, board).copy()  # type: ignore[arg-type]
    assert len(texts(run)) == 250


async def test_evaluations_are_kept_as_the_board_has_them(run: RunDirectory):
    found = {"before": {"step": 0}, "history": [], "updated_at": 1.0}
    await Records(run, Board(eval=found)).copy()  # type: ignore[arg-type]
    assert json.loads(run.eval.read_text()) == found


async def test_transcripts_that_the_board_has_dropped_stay_in_the_file(run: RunDirectory):
    first, second, again = (
        {"step": step, "duration_s": duration_s, "samples": [{"text": f"of {step}"}]}
        for step, duration_s in ((2, 1.5), (4, 1.6), (2, 1.7))
    )
    without = {name: first[name] for name in ("step", "duration_s")}
    for place, history in enumerate(([None], [None, first], [None, without, second])):
        board = Board(eval={"history": history, "updated_at": float(place)})
        await Records(run, board).copy()  # type: ignore[arg-type]
    assert json.loads(run.eval.read_text())["history"] == [None, first, second]
    # The step is evaluated again after a resumption: its transcripts are not those of before.
    board = Board(eval={"history": [without, second, again], "updated_at": 9.0})
    await Records(run, board).copy()  # type: ignore[arg-type]
    assert json.loads(run.eval.read_text())["history"] == [first, second, again]


async def test_evaluations_are_written_when_there_are_new_ones(run: RunDirectory):
    board = Board(eval={"history": [], "updated_at": 1.0})
    records = Records(run, board)  # type: ignore[arg-type]
    await records.copy()
    run.eval.unlink()
    await records.copy()
    assert not run.eval.exists()
    run.eval.write_text('{"history": [')  # a damaged file is written anew
    board.sections["eval"]["updated_at"] = 2.0
    await records.copy()
    assert json.loads(run.eval.read_text()) == {"history": [], "updated_at": 2.0}


# --- heartbeat


def test_a_heartbeat_of_an_earlier_process_does_not_count(tmp_path: Path):
    file = tmp_path / "heartbeat"
    file.touch()
    heartbeat = Heartbeat(file)
    assert not file.exists()
    heartbeat.beat()
    os.utime(file, (0, 0))
    heartbeat.beat()
    assert time.time() - file.stat().st_mtime < 60


def test_a_heartbeat_that_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"LEEWAY_HEARTBEAT_FILE = .*nowhere/h cannot be"):
        Heartbeat(tmp_path / "nowhere" / "h").beat()


def test_only_the_first_rank_of_a_machine_gives_the_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("LEEWAY_HEARTBEAT_FILE", str(file))
    monkeypatch.setenv("LOCAL_RANK", "1")
    Heartbeat.from_environment().beat()
    assert not file.exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    Heartbeat.from_environment().beat()
    assert file.exists()


# --- start and end on the board


@pytest.mark.parametrize(
    ("phase", "version", "then"),
    [
        (None, 0, "starting"),
        ("training", 3, "training"),
        ("evaluating-before", 0, "evaluating-before"),
        ("done", 3, "starting"),
        ("evaluating-after", 3, "starting"),
        ("done", 5, "done"),
        ("evaluating-after", 5, "evaluating-after"),
    ],
)
async def test_a_learner_opens_a_run_anew_only_if_it_has_steps_left(phase, version, then):
    board = Board(phase, run={"started_at": 7.0})
    config = load(None, ["learner.num_steps=5"])
    await begin(board, config, "first", version)  # type: ignore[arg-type]
    assert (board.now, board.is_stopping) == (then, False)
    assert board.sections["run"]["started_at"] == 7.0
    assert board.sections["run"]["num_steps"] == 5


async def test_the_end_has_a_deadline_that_names_who_is_late():
    with pytest.raises(WaitTimeout, match="the serve process has not evaluated within 0 s"):
        await ending.until_done(Board("training"), go_on, timeout_s=0)  # type: ignore[arg-type]


async def test_a_run_that_is_done_is_not_opened_again():
    board = Board("done")
    await ending.until_done(board, go_on)  # type: ignore[arg-type]
    assert board.now == "done"


async def test_a_stop_ends_the_wait_for_the_last_evaluation():
    async def stop() -> bool:
        return True

    with pytest.raises(LearnerStopped):
        await ending.until_done(Board("training"), stop)  # type: ignore[arg-type]


async def test_whoever_stays_asks_whether_to_stop_until_it_is(monkeypatch: pytest.MonkeyPatch):
    answers = [False, False, True]
    monkeypatch.setattr(ending, "STAY_S", 0.01)

    async def stop_requested() -> bool:
        return answers.pop(0)

    await asyncio.wait_for(ending.until_stopped(stop_requested), 60)
    assert answers == []
