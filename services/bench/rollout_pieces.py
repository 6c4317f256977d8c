"""What stands in for the pieces around a rollout worker that `leeway bench rollout` does not
measure: a retriever that answers at once, and a replay that keeps nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Final

from leeway.actors.config import SearchConfig, corpus_file
from leeway.actors.search.documents import load_documents
from leeway.actors.search.retriever import Passage
from leeway.actors.tokens import Tokens
from leeway.replay.codec import encode
from leeway.replay.errors import WaitTimeout
from leeway.replay.schema import Group, check_group
from leeway.replay.store import Slot, VersionSource

TOP_K: Final = 3
PASSAGE_TOKENS: Final = 95
"""Of each passage; three of them, with their titles and tags, are an observation of about 300."""
INSTRUCTIONS: Final = (
    "Answer the question. Think first, between <think> and </think>, whenever you learn"
    " something new. If you do not know enough, search by writing <search> a query </search>; the"
    " results come back between <information> and </information>. Search as often as you like."
    " When you know enough, write the answer alone between <answer> and </answer>, without an"
    " explanation.\n"
    "Question: {question}\n"
)
"""A prompt of about 150 tokens."""


class InstantRetriever:
    """A Retriever that returns the next passages of a pile, whatever is asked. A running number in
    their text makes every one new, so that no cache has seen it."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = itertools.cycle(passages)
        self._numbers = itertools.count()

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """The next `top_k` passages."""
        return [
            Passage(
                id=passage.id,
                title=passage.title,
                text=f"{passage.text} {next(self._numbers)}",
                score=passage.score,
            )
            for passage in itertools.islice(self._passages, top_k)
        ]

    async def close(self) -> None:
        """Nothing is open."""


class CodecOnly:
    """The part of replay that a worker sees. What it is given it checks and encodes, as the Redis
    buffer does in the worker's process, and throws the bytes away."""

    def __init__(self, num_slots: int | None = None, *, keeps_groups: bool = False) -> None:
        """`num_slots` None: as many as are asked for, for ever."""
        self._num_left = num_slots
        self._num_missing = num_slots or 0
        self._ids = itertools.count()
        self._is_keeping = keeps_groups
        self.groups: list[Group] = []
        """What was added, where it is kept."""
        self.num_groups = self.num_bytes = self.num_episodes = self.num_turns = 0
        self.num_prompt = self.num_generated = self.num_observed = self.num_observations = 0
        """Tokens of the prompts, of the turns and of the observations; how many of the latter."""
        self.filled = asyncio.Event()
        """Set when every slot has been filled."""

    async def admit(self, n: int, source: VersionSource, timeout_s: float) -> list[Slot]:
        """Slots, at once. Waits `timeout_s` when there is none left, as a full buffer does."""
        version = await source()
        num = n if self._num_left is None else min(n, self._num_left)
        if version is None or num == 0:
            await asyncio.sleep(timeout_s)
            raise WaitTimeout("every slot of the bench is taken")
        if self._num_left is not None:
            self._num_left -= num
        return [Slot(str(next(self._ids)), version) for _ in range(num)]

    async def add(self, slot: Slot, group: Group) -> None:
        """Check, encode, count."""
        check_group(group)
        self.num_bytes += len(encode(group))
        self.num_groups += 1
        for trajectory in group.trajectories:
            observed = [turn.num_observed for turn in trajectory.turns if turn.num_observed]
            self.num_episodes += 1
            self.num_turns += len(trajectory.turns)
            self.num_prompt += trajectory.turns[0].start
            self.num_generated += trajectory.num_trained_tokens
            self.num_observed += sum(observed)
            self.num_observations += len(observed)
        if self._is_keeping:
            self.groups.append(group)
        self._num_missing -= 1
        if self._num_missing == 0:
            self.filled.set()

    async def drop(self, slot: Slot, reason: str) -> None:
        """Nothing is held."""


def build_passages(tokens: Tokens) -> list[Passage]:
    """Neighbouring documents of the bundled corpus, two joined and cut to PASSAGE_TOKENS."""
    documents = load_documents(corpus_file(SearchConfig()))
    pairs = zip(documents[::2], documents[1::2], strict=False)
    return [
        Passage(
            id=first.id,
            title=first.title,
            text=tokens.decode(tokens.encode(f"{first.text} {second.text}")[:PASSAGE_TOKENS]),
            score=1.0,
        )
        for first, second in pairs
    ]
