"""Which cache slot holds the keys and values of which tokens, and under which weights.

    take(prompt) ──> a row decodes in the slot ──> release(its tokens) ──> free, but still readable
                                                                           until it is taken again

A new request may start from what any slot holds, free or in use, as long as all of that was
computed under the current version: the next turn of a trajectory starts from the turn before, and
siblings of a group from each other. Older keys and values are never read by a new request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from leeway.replay.schema import PolicyVersion

MIN_PREFIX_TOKENS: Final = 8
"""Shorter common beginnings are computed again: copying them costs as much."""


class Prefix(NamedTuple):
    """The first `num_tokens` positions of a slot."""

    slot: int
    num_tokens: int


class Slots:
    """The book of a cache's slots. Holds no tensors."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        """Longest free first, so that the latest turns stay readable longest."""
        self._ids: list[list[int]] = [[] for _ in range(num_slots)]
        self._versions: list[PolicyVersion | None] = [None] * num_slots
        """Version that computed all of the slot's ids; None if there were several."""

    @property
    def num_free(self) -> int:
        """Rows that could begin now."""
        return len(self._free)

    def longest_prefix(
        self, prompt_ids: Sequence[int], version: PolicyVersion, pending: Collection[int]
    ) -> Prefix | None:
        """The longest beginning of the prompt that a slot holds under `version`.

        The prompt's last token is never part of it: somebody has to compute what comes next. Of
        equals, a slot in `pending`, which is yet to be computed, comes last.
        """
        wanted = prompt_ids[:-1]
        found = [
            Prefix(slot, _num_common(ids, wanted))
            for slot, ids in enumerate(self._ids)
            if self._versions[slot] == version
        ]
        best = max(found, key=lambda p: (p.num_tokens, p.slot not in pending), default=None)
        return best if best is not None and best.num_tokens >= MIN_PREFIX_TOKENS else None

    def take(
        self, prompt_ids: list[int], version: PolicyVersion, prefix: Prefix | None = None
    ) -> int:
        """A free slot for a prompt: the prefix's own if it is free, so nothing is copied."""
        is_own = prefix is not None and prefix.slot in self._free
        slot = prefix.slot if prefix is not None and is_own else self._free[0]
        self._free.remove(slot)
        self._ids[slot], self._versions[slot] = prompt_ids, version
        return slot

    def release(self, slot: int, ids: list[int], version: PolicyVersion | None) -> None:
        """Free a slot whose keys and values stand for `ids`, computed by `version` alone if any."""
        self._ids[slot], self._versions[slot] = ids, version
        self._free.append(slot)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """[1, 2, 3] and [1, 2, 4, 5] -> 2."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
