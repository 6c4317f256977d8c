"""What a run did with its buffer, by the processes' own ledgers, against what the buffer holds.

hook/sitecustomize.py writes the ledgers, a line before and after each call; replay_ledger.Ledgers
reads them. A group that is neither trained nor stored must be one that the buffer had to drop when
the learner went back to a checkpoint, which the ledgers tell for each. For the other reasons of a
drop, which are rare, as many must be counted by the buffer as are missing.
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
    """Groups that are missing because the buffer had to drop them, by the ledgers; and those that
    it counts as dropped for another reason."""
    dropped: dict[str, int]
    """Groups and slots by reason, as the buffer counts them."""
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
        wrong = self.num_lost + self.num_overdrawn + self.num_stale + self.num_unverified
        return not (wrong or self.errors)


def unknown(why: str) -> Account:
    """Of a run whose buffer could not be read."""
    return Account(0, 0, 0, 0, {}, 0, 0, 0, 0, 0, (why,))


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
    missing = ledgers.added - set(trained) - set(maybe) - set(stored)
    went_back = {group_id for group_id in missing if ledgers.went_back_behind(group_id)}
    others = sum(n for reason, n in stats.dropped.items() if reason in OTHER_DROPS)
    stale = sum(lag > config.max_staleness for lag in ledgers.lags)
    stale += sum(int(str(step["staleness_max"])) > config.max_staleness for step in steps)
    return Account(
        num_added=len(ledgers.added),
        num_trained=Counter(trained).total(),
        num_stored=len(stored),
        num_dropped=len(went_back) + others,
        dropped=dict(stats.dropped),
        num_lost=max(0, len(missing - went_back) - others),
        num_overdrawn=sum(n > config.max_draws for n in trained.values()),
        num_stale=stale,
        num_taken=len(weights.taken),
        num_unverified=sum(pair not in weights.announced for pair in weights.taken),
        errors=tuple(ledgers.errors),
    )


OTHER_DROPS = frozenset({"returned", "overdue", "evicted", "mixed-versions"})
"""Reasons for which the buffer itself drops a group that was added. Not "lost-version": slots that
were never filled count under it, too, so its number could hide a loss."""


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
