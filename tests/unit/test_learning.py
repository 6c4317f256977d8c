"""The learner's process: when it begins, what it asserts before it trains, how it ends."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from leeway.learner.errors import LearnerStopped
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import StalenessViolation, WaitTimeout
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Slot
from leeway.replay.synthetic import build_group
from leeway.services import learning
from leeway.services.beginning import until_training
from leeway.services.learning import LearnerProcess, check_staleness


def lease(learner_version: int, *versions: int) -> Lease:
    groups = tuple(
        build_group(Slot(slot_id=f"g{v}", version=PolicyVersion(v)), version=PolicyVersion(v))
        for v in versions
    )
    return Lease(lease_id="l", version=PolicyVersion(learner_version), groups=groups)


class Board:
    """A run board whose phases come one per question, the last one staying."""

    def __init__(self, *phases: str) -> None:
        self.phases = list(phases)

    async def wait_phase(self, name: str, timeout_s: float) -> str:
        phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
        if phase != name:
            raise WaitTimeout(f"it is in {phase!r}")
        return phase


async def go_on() -> bool:
    return False


async def stop() -> bool:
    return True


async def nobody_is_behind() -> None:
    return None


async def test_the_learner_begins_when_engines_are_up_and_not_before():
    board = Board("starting", "evaluating-before", "training")
    await until_training(board, go_on, nobody_is_behind)  # type: ignore[arg-type]
    assert board.phases == ["training"]


async def test_engines_that_start_with_older_weights_get_them_while_the_learner_waits():
    board, sent = Board("starting", "starting", "training"), []

    async def catch_up() -> None:
        sent.append(board.phases[0])

    await until_training(board, go_on, catch_up)  # type: ignore[arg-type]
    assert sent == ["starting", "training"]


async def test_a_stop_ends_the_wait_for_engines():
    with pytest.raises(LearnerStopped):
        await until_training(Board("starting"), stop, nobody_is_behind)  # type: ignore[arg-type]


async def test_the_wait_for_engines_has_a_deadline_and_names_who_is_late():
    with pytest.raises(WaitTimeout, match=r"serve process to load engines.*'starting'"):
        await until_training(Board("starting"), go_on, nobody_is_behind, timeout_s=0.0)  # type: ignore[arg-type]


def test_learner_at_10_oldest_8_and_9_is_within_2():
    check_staleness(lease(10, 8, 9), ReplayConfig(max_staleness=2))


def test_learner_at_10_oldest_8_is_outside_1_and_the_group_is_named():
    with pytest.raises(StalenessViolation, match=r"group g8 .* staleness is 2 and the bound is 1"):
        check_staleness(lease(10, 8, 9), ReplayConfig(max_staleness=1))


def test_a_version_newer_than_the_learner_is_refused():
    with pytest.raises(StalenessViolation, match="staleness is -1"):
        check_staleness(lease(10, 11), ReplayConfig(max_staleness=4))


def test_exact_refuses_a_group_that_is_too_young():
    exact = ReplayConfig(max_staleness=2, staleness_policy="exact")
    check_staleness(lease(10, 8, 8), exact)
    with pytest.raises(StalenessViolation, match=r"group g9 .* staleness 1, .* must be 2"):
        check_staleness(lease(10, 8, 9), exact)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seconds that a process was given to end."""
    given: list[int] = []
    monkeypatch.setattr(learning, "end_within", given.append)
    return given


def failing_rank(rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank whose first work fails, without a model and without Redis."""
    process: Any = object.__new__(LearnerProcess)
    process._world = SimpleNamespace(rank=rank, close=lambda: None)
    process._follow = process._join = AsyncMock(side_effect=error)
    for name in ("_connect", "_order"):
        setattr(process, name, MagicMock())
    process._save_and_close = AsyncMock()
    for name in ("_board", "_replay", "_policies"):
        setattr(process, name, AsyncMock())
    process._metering = AsyncMock(finish_s=4.5)
    process._config, process._run = MagicMock(), MagicMock()
    monkeypatch.setattr(learning, "tracing", MagicMock())
    monkeypatch.setattr(learning, "Records", lambda *_: SimpleNamespace(keep=AsyncMock()))
    monkeypatch.setattr(learning, "keep_timeline", MagicMock())
    return process


@pytest.mark.parametrize(("rank", "seconds"), [(0, 20 + 5), (1, 20)])
async def test_after_an_error_no_rank_may_hang_at_its_end(
    rank: int, seconds: int, deadlines: list[int], monkeypatch: pytest.MonkeyPatch
):
    process = failing_rank(rank, MemoryError("no more"), monkeypatch)
    with pytest.raises(MemoryError):
        await process.run()
    assert deadlines == [seconds]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stop_is_no_error_and_may_take_its_time(
    rank: int, deadlines: list[int], monkeypatch: pytest.MonkeyPatch
):
    process = failing_rank(rank, LearnerStopped("asked to"), monkeypatch)
    with pytest.raises(LearnerStopped):
        await process.run()
    assert deadlines == []


@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize("error", [LearnerStopped("asked to"), MemoryError("no more")])
async def test_a_run_keeps_its_timeline_however_it_ends(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    process, kept = failing_rank(0, error, monkeypatch), list[Any]()
    monkeypatch.setattr(learning, "keep_timeline", kept.append)
    with pytest.raises(type(error)):
        await process.run()
    assert kept == [process._run]


async def test_a_learner_lives_while_a_slow_disk_takes_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
):
    """It would else be killed for its silence, and train from the checkpoint before again."""
    monkeypatch.setattr(learning, "WRITTEN_S", 0.0)
    process: Any = object.__new__(LearnerProcess)
    happened: list[str] = []
    looks = iter([True, False, False, True])
    process._checkpoints = SimpleNamespace(
        is_over=lambda: next(looks),
        wait=lambda: happened.append("wait"),
        save=lambda *_: happened.append("save"),
        close=lambda: happened.append("close"),
    )
    process._steps = SimpleNamespace(take_score=lambda: 0.5, max_staleness_seen=1)
    process._trainer, process.version, process._checkpointed = None, PolicyVersion(7), 3
    process._order = lambda order: happened.append(type(order).__name__)
    process._heartbeat = SimpleNamespace(beat=lambda: happened.append("beat"))
    process._world = SimpleNamespace(size=2)
    await process._save_and_close()
    sign = ["beat", "Idle"]
    assert happened == ["wait", "Save", "save", *sign, *sign, "wait", "close"]
