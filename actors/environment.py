"""What an episode is played in: an Environment makes observations and rewards of generated text.

The search environment is one; a user's own is named by `environment.factory` and is built from an
EnvironmentContext (docs/environments.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from leeway.actors.config import RewardConfig, SearchConfig
from leeway.replay.schema import Action, StopReason

if TYPE_CHECKING:
    from leeway.actors.search.retriever import Retriever
    from leeway.actors.tokenizer_facts import TokenizerFacts


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    """Such as "system" or "user"."""
    content: str


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question of a dataset."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    """Any of these is right. Never empty. Letters, such as "B", where there are `choices`."""
    metadata: dict[str, object] = {}
    data_source: str = ""
    """Name of the benchmark or set it came from; empty where the file names none."""
    choices: tuple[str, ...] = ()
    """Multiple choice: the texts of A, B, C, ... Empty: a question with a free answer."""
    prompt: tuple[Message, ...] = ()
    """The messages that the data carry for this question. Empty: the environment writes its own."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment makes of one turn's generated text."""

    action: Action
    """`answer`: the episode's last word; `search`: any use of a tool; `invalid`: malformed."""
    observation: str
    """Text appended after the turn, untrained. Empty when the episode ends here. What came from
    outside is marked in it (`compose` and `foreign` of text.py)."""
    is_terminal: bool
    thought: str = ""
    """The part of the turn that is reasoning."""
    passages: tuple[str, ...] = ()
    """What a search found, as plain text; never the text of a correction."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode."""

    reward: float
    scores: dict[str, float]
    """By name; the same names in every episode of an environment. `exact_match` must be one: it is
    what evaluations report as the share of right answers."""
    turn_rewards: tuple[float, ...] | None = None
    """What each turn earned; they sum to `reward`. None where only the whole was rewarded."""


class Environment(Protocol):
    """The rules of an episode. Holds no per-episode state: turns come in as text, and one object
    plays hundreds of episodes at once.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of a turn."""
        ...

    @property
    def observation_end(self) -> str:
        """What every observation ends with; it stays when an observation is cut to its limit."""
        ...

    def prompt(self, question: Question) -> str:
        """First text of the episode, what came from outside marked in it (text.py)."""
        ...

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """React to one turn; `turns_left` completions may follow it, 0 on the last. It may wait for
        anything, within rollout.episode_timeout_s.

        Raises RetrievalError (failures.py) when no observation can be had; the group is dropped.
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


@dataclass(frozen=True, kw_only=True)
class EnvironmentContext:
    """What a factory builds an Environment from."""

    retriever: Retriever
    """Search over the run's corpus or server."""
    tokenizer: TokenizerFacts
    """Chat template and control tokens of the model."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The `[search]` table."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The `[reward]` table."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The `[environment.options]` table, as written."""
