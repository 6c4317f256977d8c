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

NO_VERSION: Final = -1
"""Of a slot whose tokens several versions computed, or none."""


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
        self._versions = np.full(num_slots, NO_VERSION)
        """Version that computed all of the slot's ids."""

    @property
    def num_free(self) -> int:
        """Rows that could begin now."""
        return len(self._free)

    def longest_prefix(
        self, prompt_ids: Sequence[int], version: PolicyVersion, pending: Collection[int]
    ) -> Prefix | None:
        """The longest beginning of the prompt that a slot holds under `version`.

        The prompt's last token is never part of it: somebody has to compute what comes next. Of a
        slot in `pending`, which is yet to be computed, only a sibling takes anything, which shares
        all of it: to wait for less costs more than it saves.
        """
        # The prompt's last token differs from anything, so every row has a first difference.
        wanted = np.array([*prompt_ids[:-1], -2], np.int32)
        common = (self._ids[:, : len(wanted)] != wanted).argmax(axis=1)
        common[self._versions != version] = 0
        waits = np.zeros(len(common), bool)
        waits[list(pending)] = True
        common[waits & (common < len(prompt_ids) - 1)] = 0
        slot = int((2 * common - waits).argmax())
        return Prefix(slot, int(common[slot])) if common[slot] >= MIN_PREFIX_TOKENS else None

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
        self._versions[:] = NO_VERSION

    def _hold(self, slot: int, ids: Sequence[int], version: PolicyVersion | None) -> None:
        self._ids[slot, : len(ids)] = ids
        self._ids[slot, len(ids) :] = -1
        self._versions[slot] = NO_VERSION if version is None else version
