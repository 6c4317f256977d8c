"""The environment of `leeway bench pipeline`: every episode has the same turns, and its reward is
drawn, so that a step always has something to learn and the work is the same in every run."""

from __future__ import annotations

import zlib

from leeway.actors.environment import EnvironmentContext, Outcome, Question, Step
from leeway.actors.search import protocol
from leeway.replay.schema import StopReason

NEVER = "\u2603 never \u2603"
"""A stop string that no model writes: turns have the length that was asked for."""
OBSERVATION = protocol.render_observation([("Bench", "words " * 64)] * 3)
"""Three passages; `search.max_observation_tokens` cuts it to size."""


class SameWork:
    """A search in every turn but the last."""

    stop = (NEVER,)
    observation_end = protocol.OBSERVATION_END

    def prompt(self, question: Question) -> str:
        """The bare question."""
        return f"Question: {question.question}\n"

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """An observation, or the end."""
        is_last = turns_left == 0
        return Step(
            action="answer" if is_last else "search",
            observation="" if is_last else OBSERVATION,
            is_terminal=is_last,
        )

    def score(
        self,
        question: Question,
        generated_turns: list[str],
        steps: list[Step],
        stop_reason: StopReason,
    ) -> Outcome:
        """0 or 1, by what was generated."""
        drawn = float(zlib.crc32("".join(generated_turns).encode()) % 2)
        return Outcome(reward=drawn, scores={"exact_match": drawn})


def build(context: EnvironmentContext) -> SameWork:
    """See `environment.factory`."""
    return SameWork()
