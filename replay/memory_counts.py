"""Dropped groups by reason, and their trajectories by turns and by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Dropped:
    """Counters. A slot that was given back empty counts as a group without trajectories."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()
        self._turns: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, int]] = Counter()

    def count(self, reason: str, trajectories: Sequence[tuple[int, int]] = ()) -> None:
        """One group; `trajectories` are the turns and tokens of each."""
        self.groups[reason] += 1
        for turns, tokens in trajectories:
            self._turns[reason, turns] += 1
            self._tokens[reason, bucket(tokens)] += 1

    def by_turns(self) -> dict[str, dict[int, int]]:
        """{"overdue": {4: 7}}: seven trajectories of four turns."""
        return _nested(self._turns)

    def by_tokens(self) -> dict[str, dict[int, int]]:
        """{"overdue": {512: 7}}: seven trajectories of 257 to 512 tokens."""
        return _nested(self._tokens)


def bucket(tokens: int) -> int:
    """The least power of two that is not below: 300 -> 512, 512 -> 512."""
    return 1 << max(0, tokens - 1).bit_length()


def _nested(counts: Counter[tuple[str, int]]) -> dict[str, dict[int, int]]:
    table: dict[str, dict[int, int]] = {}
    for (reason, number), n in sorted(counts.items()):
        table.setdefault(reason, {})[number] = n
    return table
