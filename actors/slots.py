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

import numpy as np

from leeway.replay.schema import PolicyVersion

MIN_PREFIX_TOKENS: Final = 8
"""Shorter common beginnings are computed again: copying them costs as much."""


class Prefix(NamedTuple):
    """The first `num_tokens` positions of a slot."""

    slot: int
    num_tokens: int


class Slots:
    """The book of a cache's slots of `max_len` tokens. Holds no tensors."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._free = list(range(num_slots))
        """Longest free first, so that the latest turns stay readable longest."""
        # One array, so that a prompt is compared with all slots at once: in a loop over ids that
        # took longer than a decoding step. -1 stands behind the ids of a slot.
        self._ids = np.full((num_slots, max_len + 1), -1, np.int32)
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
        current = [slot for slot, held in enumerate(self._versions) if held == version]
        if not current or len(prompt_ids) <= MIN_PREFIX_TOKENS:
            return None
        # The prompt's last token differs from anything, so every row has a first difference.
        wanted = np.array([*prompt_ids[:-1], -2], np.int32)
        common = (self._ids[current, : len(wanted)] != wanted).argmax(axis=1).tolist()
        longest = max(zip(common, (slot not in pending for slot in current), current, strict=True))
        return Prefix(longest[2], longest[0]) if longest[0] >= MIN_PREFIX_TOKENS else None

    def take(
        self, prompt_ids: list[int], version: PolicyVersion, prefix: Prefix | None = None
    ) -> int:
        """A free slot for a prompt: the prefix's own if it is free, so nothing is copied."""
        is_own = prefix is not None and prefix.slot in self._free
        slot = prefix.slot if prefix is not None and is_own else self._free[0]
        self._free.remove(slot)
        self._hold(slot, prompt_ids, version)
        return slot

    def release(self, slot: int, ids: list[int], version: PolicyVersion | None) -> None:
        """Free a slot whose keys and values stand for `ids`, computed by `version` alone if any."""
        self._hold(slot, ids, version)
        self._free.append(slot)

    def expire(self) -> None:
        """The weights have changed: nothing that stands now is read by a new request."""
        self._versions = [None] * len(self._versions)

    def _hold(self, slot: int, ids: Sequence[int], version: PolicyVersion | None) -> None:
        self._ids[slot, : len(ids)] = ids
        self._ids[slot, len(ids) :] = -1
        self._versions[slot] = version
