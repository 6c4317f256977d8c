"""The work that a rollout on a real engine and the engine alone both do, in plain numbers and ids.

Imports nothing that reads an index: vLLM's offline engine does not start beside numba, which the
index brings along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from leeway.actors.config import PolicyConfig
from leeway.replay.schema import Trajectory

GROUP_SIZE: Final = 8
NUM_TURNS: Final = 3
NEVER: Final = "</stop that no model writes>"
PASS_TIMEOUT_S: Final = 300.0
"""Seconds that one side may take for one repeat."""


class Load(msgspec.Struct, frozen=True):
    """How much is played in a repeat, and how long the pieces are."""

    num_in_flight: int = 128
    """Episodes at once. More than the engine has rows, as in a run: while a worker reads what one
    row has sampled, the next request is there."""
    num_rows: int = 64
    """Requests that the engine decodes at once."""
    num_episodes: int = 128
    turn_tokens: int = 64
    observation_tokens: int = 256

    @property
    def num_tokens(self) -> int:
        """Generated in a repeat: 128 episodes of 3 turns of 64 tokens are 24,576."""
        return self.num_episodes * NUM_TURNS * self.turn_tokens

    @property
    def policy(self) -> PolicyConfig:
        """An engine that holds all of it. Two engines must fit on a GPU."""
        return PolicyConfig(
            max_num_seqs=self.num_rows, max_model_len=1024, gpu_memory_utilization=0.4
        )


class Script(msgspec.Struct, frozen=True):
    """An episode without what the model says: [K] turns, [K - 1] observations between them."""

    prompt_ids: list[int]
    observations: list[list[int]]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Script:
        """What the rollout's trajectory was made of."""
        ids = trajectory.token_ids.tolist()
        ends = [turn.start + turn.num_generated for turn in trajectory.turns[:-1]]
        observed = [turn.num_observed for turn in trajectory.turns[:-1]]
        return cls(
            ids[: trajectory.turns[0].start],
            [ids[end : end + num] for end, num in zip(ends, observed, strict=True)],
        )

    def renamed(self, token: int) -> Script:
        """The same with another first token: equal lengths, and no prefix in common."""
        return Script([token, *self.prompt_ids[1:]], self.observations)


def waves(scripts: Sequence[Script], load: Load) -> Iterator[Sequence[Script]]:
    """As many episodes at once as the worker has in flight; the engine queues the rest."""
    for start in range(0, len(scripts), load.num_in_flight):
        yield scripts[start : start + load.num_in_flight]


def next_prompts(
    prompts: Sequence[list[int]],
    sampled: Sequence[Sequence[int]],
    wave: Sequence[Script],
    k: int,
) -> list[list[int]]:
    """Prompts of turn `k` + 1: what stood before turn `k`, its tokens, its observation."""
    return [
        [*prompt, *tokens, *(script.observations[k] if k < len(script.observations) else ())]
        for prompt, tokens, script in zip(prompts, sampled, wave, strict=True)
    ]
