"""What a run did with its buffer, by the processes' own ledgers, against what the buffer holds.

hook/sitecustomize.py writes the ledgers, a line before and after each call; replay_ledger.Ledgers
reads them. Nothing here believes the run's own counters, except where a group was dropped with a
reason: then as many must be counted as are missing.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import ReplayStats
from leeway.replay.stored import StoredGroup
from leeway.services.layout import RunDirectory
from tests.chaos.replay_ledger import Ledgers


class Account(msgspec.Struct, frozen=True):
    """What the ledgers prove of one run."""

    num_added: int
    """Groups whose add was acknowledged."""
    num_trained: int
    """Groups whose training was acknowledged; once for each time."""
    num_stored: int
    num_dropped: int
    """Groups that the buffer dropped, each counted with a reason."""
    dropped: dict[str, int]
    num_lost: int
    """Added, and neither trained, stored nor dropped with a reason."""
    num_overdrawn: int
    """Trained more often than max_draws."""
    num_stale: int
    """Drawn when older than max_staleness, by the ledger; or trained so, by metrics.jsonl."""
    num_taken: int
    """Versions that engines took into use, each with the checksum of what it holds."""
    num_unverified: int
    """Of them, those whose checksum is not one that the learner announced for that version."""
    errors: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not (self.num_lost or self.num_overdrawn or self.num_stale or self.num_unverified)


class AddedGroups:
    """How many groups were added so far, by the ledgers as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._num = 0

    def count(self) -> int:
        """Up to now."""
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self._num += sum(line.startswith(b"added ") for line in whole.splitlines())
        return self._num


class Weights(NamedTuple):
    """Versions and checksums, as learner and engines wrote them down."""

    announced: frozenset[tuple[str, str]]
    taken: list[tuple[str, str]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From the ledgers of a run."""
        lines = [
            line.split() for path in folder.iterdir() for line in path.read_text().splitlines()
        ]
        announced = frozenset((words[1], words[2]) for words in lines if words[0] == "announced")
        taken = [(words[1], words[2]) for words in lines if words[0] == "committed"]
        return cls(announced, taken)


def settle(run: RunDirectory, config: ReplayConfig, folder: Path) -> Account:
    """Start the run's Redis once more, and hold the ledgers against what it holds."""
    with EmbeddedRedis.start(run.redis, run.root.name) as server:
        stats, stored = asyncio.run(_contents(server.url, run.root.name, config))
    steps = _lines(run.metrics)
    return account(config, Ledgers.read(folder), stats, stored, steps, Weights.read(folder))


async def _contents(
    url: str, name: str, config: ReplayConfig
) -> tuple[ReplayStats, dict[str, StoredGroup]]:
    replay = RedisReplay(url, name, config)
    try:
        return await replay.stats(), {**await replay.buffer.records()}
    finally:
        await replay.close()


def account(
    config: ReplayConfig,
    ledgers: Ledgers,
    stats: ReplayStats,
    stored: dict[str, StoredGroup],
    steps: Sequence[dict[str, object]],
    weights: Weights,
) -> Account:
    """An acknowledgement whose reply was lost may count or not: the group is then not missing."""
    trained, maybe = ledgers.num_trained_of, ledgers.maybe_trained
    by_buffer = {r: n for r, n in stats.dropped.items() if r in BY_BUFFER}
    missing = ledgers.added - set(trained) - set(maybe) - set(stored)
    stale = sum(lag > config.max_staleness for lag in ledgers.lags)
    stale += sum(int(str(step["staleness_max"])) > config.max_staleness for step in steps)
    return Account(
        num_added=len(ledgers.added),
        num_trained=Counter(trained).total(),
        num_stored=len(stored),
        num_dropped=sum(by_buffer.values()),
        dropped=dict(stats.dropped),
        num_lost=max(0, len(missing) - sum(by_buffer.values())),
        num_overdrawn=sum(n > config.max_draws for n in trained.values()),
        num_stale=stale,
        num_taken=len(weights.taken),
        num_unverified=sum(pair not in weights.announced for pair in weights.taken),
        errors=tuple(ledgers.errors),
    )


BY_BUFFER = frozenset({"returned", "lost-version", "overdue", "evicted", "mixed-versions"})
"""Reasons for which the buffer itself drops a group that was added."""


def _lines(path: Path) -> list[dict[str, object]]:
    """Whole lines of a file; a process that was killed may leave half of one."""
    if not path.is_file():
        return []
    found: list[dict[str, object]] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
