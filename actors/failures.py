"""What may go wrong while a group is played without ending the run, and how much of it.

LeewayError
├── EpisodeFailure           the group is dropped, its slot handed back, the reason counted
│   ├── RetrievalError       no passages within the deadline
│   ├── EngineError          the policy failed, or answered what cannot be trained on
│   ├── EpisodeTimeout       the group took longer than rollout.episode_timeout_s
│   ├── QuestionTooLong      the prompt leaves no room for one turn
│   └── GroupRefused         replay would not take the finished group
└── FailureBudgetExceeded    too many of the last groups were dropped; ends the run
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import ClassVar, Final

from leeway.replay.errors import LeewayError

WINDOW: Final = 50
"""Groups over which rollout.max_failure_share is measured."""


class EpisodeFailure(LeewayError):
    """A group that cannot become training data. `reason` is its drop reason in replay."""

    reason: ClassVar[str] = "failure"


class RetrievalError(EpisodeFailure):
    """The retriever gave no passages within its deadline. Its error is never an observation."""

    reason = "retriever"


class EngineError(EpisodeFailure):
    """The policy failed, or returned a completion that breaks its contract."""

    reason = "engine"


class EpisodeTimeout(EpisodeFailure):
    """A group took longer than rollout.episode_timeout_s."""

    reason = "timeout"


class QuestionTooLong(EpisodeFailure):
    """The prompt leaves no room for one turn within policy.max_model_len."""

    reason = "question-too-long"


class GroupRefused(EpisodeFailure):
    """Replay would not take the finished group; the message is replay's own."""

    reason = "refused"


class FailureBudgetExceeded(LeewayError):
    """More groups were dropped for failures than rollout.max_failure_share allows."""

    exit_code = 3


class FailureBudget:
    """Counts failures by reason over the last `WINDOW` groups and says when there are too many.

    max_failure_share 0.2 allows 10 failures in a window of 50: the eleventh raises, whether it is
    the eleventh group of the run or the last of fifty.
    """

    def __init__(self, max_failure_share: float, window: int = WINDOW) -> None:
        self._share = max_failure_share
        self._window: deque[EpisodeFailure | None] = deque(maxlen=window)
        self.totals: Counter[str] = Counter()
        """Failures by reason since the start."""

    @property
    def num_allowed(self) -> int:
        """Failures that a full window may hold."""
        return int(self._share * (self._window.maxlen or 0) + 1e-9)

    def allow(self, max_failure_share: float) -> None:
        """Another share from now on; what the window holds is judged by it at the next failure."""
        self._share = max_failure_share

    def record_success(self) -> None:
        """One more group became training data."""
        self._window.append(None)

    def record_failure(self, failure: EpisodeFailure) -> None:
        """One more group was dropped. Raises FailureBudgetExceeded when it is one too many."""
        self._window.append(failure)
        self.totals[failure.reason] += 1
        if len(self._failures()) > self.num_allowed:
            raise FailureBudgetExceeded(self.sentence()) from failure

    def sentence(self) -> str:
        """The state of the window in one sentence, with the latest failure as evidence."""
        failures = self._failures()
        if not failures:
            return f"none of the last {len(self._window)} groups failed"
        by_reason = Counter(failure.reason for failure in failures).most_common()
        counts = ", ".join(f"{reason} {count}" for reason, count in by_reason)
        return (
            f"{len(failures)} of the last {len(self._window)} groups were dropped for failures"
            f" ({counts}); rollout.max_failure_share = {self._share:g} allows {self.num_allowed} of"
            f" {self._window.maxlen}. The latest: {failures[-1]}"
        )

    def _failures(self) -> list[EpisodeFailure]:
        return [failure for failure in self._window if failure is not None]


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception of a task group that explains the others.

    An error outside the EpisodeFailure tree wins: a fault of the program must not be tolerated as a
    failure of an episode because both happened at once.
    """
    leaves = list(_leaves(failures))
    return next((e for e in leaves if not isinstance(e, EpisodeFailure)), leaves[0])


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
