"""The learner's loop: the order of a step, a stop between steps, a wait that names its reason."""

import pytest

from leeway.learner import loop
from leeway.learner.errors import LearnerStopped, NonFiniteError
from leeway.replay.errors import WaitTimeout
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease


class FakeReplay:
    def __init__(self, calls: list[str], num_empty: int = 0) -> None:
        self.calls = calls
        self.num_empty = num_empty

    async def draw(self, timeout_s: float) -> Lease:
        if self.num_empty:
            self.num_empty -= 1
            raise WaitTimeout("2 groups are still being played", waited_s={"blocked": 5.0})
        self.calls.append("draw")
        waited_s = {"blocked": 0.5, "missing": 0.25}
        return Lease(lease_id="l", version=PolicyVersion(0), groups=(), waited_s=waited_s)

    async def acknowledge(self, lease: Lease, version: int) -> None:
        self.calls.append(f"acknowledge {version}")


class FakeLearning:
    def __init__(self, calls: list[str], num_steps: int = 2, stop_at: int = 99) -> None:
        self.calls = calls
        self.version = PolicyVersion(0)
        self.num_steps = num_steps
        self.draw_timeout_s = 0.0
        self.stop_at = stop_at
        self.num_answered = 0
        self.num_paused = 0
        """How many looks find the run paused."""
        self.is_over = False

    async def stop_requested(self) -> bool:
        return self.version >= self.stop_at

    async def train(self, lease: Lease) -> None:
        self.version = PolicyVersion(self.version + 1)
        self.calls.append(f"train {self.version}")

    async def publish(self) -> None:
        self.calls.append(f"publish {self.version}")

    async def catch_up(self) -> None:
        self.calls.append("catch up")

    async def answer_requests(self) -> None:
        self.num_answered += 1

    async def is_paused(self) -> bool:
        self.num_paused -= 1
        return self.num_paused >= 0

    async def is_drained(self) -> bool:
        return self.is_over

    async def confirm(self) -> None:
        self.calls.append("confirm")

    async def after_step(self, wait_s: float, published: object) -> None:
        self.calls.append("after")


async def test_a_step_is_published_before_it_is_acknowledged_and_the_last_one_confirmed():
    calls: list[str] = []
    await loop.run(FakeLearning(calls), FakeReplay(calls))  # type: ignore[arg-type]
    step_1 = ["draw", "train 1", "confirm", "publish 1", "acknowledge 1", "after"]
    step_2 = ["draw", "train 2", "confirm", "publish 2", "acknowledge 2", "after"]
    assert calls == [*step_1, *step_2, "confirm"]


async def test_a_step_that_fails_is_neither_published_nor_acknowledged():
    class Failing(FakeLearning):
        async def train(self, lease: Lease) -> None:
            if self.version == 1:
                raise NonFiniteError("the critic's loss is inf")
            await super().train(lease)

    calls: list[str] = []
    with pytest.raises(NonFiniteError):
        await loop.run(Failing(calls), FakeReplay(calls))  # type: ignore[arg-type]
    step_1 = ["draw", "train 1", "confirm", "publish 1", "acknowledge 1", "after"]
    assert calls == [*step_1, "draw"]


async def test_a_stop_comes_between_two_steps():
    calls: list[str] = []
    with pytest.raises(LearnerStopped, match="before step 2"):
        await loop.run(FakeLearning(calls, stop_at=1), FakeReplay(calls))  # type: ignore[arg-type]
    assert calls[-1] == "after"


async def test_a_wait_for_groups_ends_with_the_reason_that_replay_gives():
    calls: list[str] = []
    with pytest.raises(WaitTimeout, match="2 groups are still being played"):
        await loop.run(FakeLearning(calls), FakeReplay(calls, num_empty=9))  # type: ignore[arg-type]


async def test_what_a_batch_waited_for_is_summed_over_the_slices_of_the_wait():
    calls: list[str] = []
    learning = FakeLearning(calls)
    learning.draw_timeout_s = 60.0
    lease = await loop.draw(learning, FakeReplay(calls, num_empty=2))  # type: ignore[arg-type]
    assert lease is not None
    assert lease.waited_s == {"blocked": 10.5, "missing": 0.25}


async def test_engines_are_caught_up_while_the_learner_waits():
    calls: list[str] = []
    learning = FakeLearning(calls, num_steps=1)
    learning.draw_timeout_s = 60.0
    await loop.run(learning, FakeReplay(calls, num_empty=1))  # type: ignore[arg-type]
    assert calls[:2] == ["catch up", "draw"]


async def test_requests_are_answered_after_each_step_and_while_the_learner_waits():
    calls: list[str] = []
    learning = FakeLearning(calls)
    learning.draw_timeout_s = 60.0
    await loop.run(learning, FakeReplay(calls, num_empty=3))  # type: ignore[arg-type]
    assert learning.num_answered == 2 + 3


async def test_a_pause_does_not_count_as_waiting():
    calls: list[str] = []
    learning = FakeLearning(calls, num_steps=1)
    learning.num_paused = 3
    await loop.run(learning, FakeReplay(calls, num_empty=3))  # type: ignore[arg-type]
    assert "train 1" in calls


async def test_a_drained_run_ends_as_if_its_last_step_were_done():
    calls: list[str] = []
    learning = FakeLearning(calls)
    learning.is_over = True
    await loop.run(learning, FakeReplay(calls, num_empty=2))  # type: ignore[arg-type]
    assert calls == ["confirm"]


async def test_groups_that_come_just_before_the_run_is_drained_are_trained():
    calls: list[str] = []
    learning = FakeLearning(calls, num_steps=1)
    learning.is_over = True
    await loop.run(learning, FakeReplay(calls, num_empty=1))  # type: ignore[arg-type]
    assert "train 1" in calls
