"""What an episode is played in: an Environment turns generated text into observations and rewards."""

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


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode."""

    reward: float
    scores: dict[str, float]


class Environment(Protocol):
    """The rules of an episode. Holds no per-episode state: turns come in as text."""

    stop: tuple[str, ...]
    """Stop strings of a turn."""

    def prompt(self, question: Question) -> str:
        """First text of the episode."""
        ...

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """React to one turn. Raises RetrievalError (failures.py) when no observation can be had."""
        ...

    def score(
        self, question: Question, generated_turns: list[str], stop_reason: StopReason
    ) -> Outcome:
        """Reward and scores, read from the model's own text only."""
        ...
