"""What an episode is played in: an Environment makes observations and rewards of generated text."""

from __future__ import annotations

from typing import Protocol

import msgspec

from leeway.replay.schema import Action, StopReason


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question of a dataset."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    """Any of these is right. Never empty."""
    metadata: dict[str, object] = {}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment makes of one turn's generated text."""

    action: Action
    observation: str
    """Text appended after the turn, untrained. Empty when the episode ends here."""
    is_terminal: bool
    thought: str = ""
    """The part of the turn that is reasoning."""
    passages: tuple[str, ...] = ()
    """What a search found, as plain text; never the text of a correction."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode."""

    reward: float
    scores: dict[str, float]
    turn_rewards: tuple[float, ...] | None = None
    """What each turn earned; they sum to `reward`. None where only the whole was rewarded."""


class Environment(Protocol):
    """The rules of an episode. Holds no per-episode state: turns come in as text."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of a turn."""
        ...

    @property
    def observation_end(self) -> str:
        """What every observation ends with; it stays when an observation is cut to its limit."""
        ...

    def prompt(self, question: Question) -> str:
        """First text of the episode."""
        ...

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """React to one turn; `turns_left` completions may follow it, 0 on the last.

        Raises RetrievalError (failures.py) when no observation can be had.
        """
        ...

    def score(
        self,
        question: Question,
        generated_turns: list[str],
        steps: list[Step],
        stop_reason: StopReason,
    ) -> Outcome:
        """Reward and scores. The reward reads `generated_turns`, the model's own text, only;
        `steps` are what `step` made of them, one each.
        """
        ...
