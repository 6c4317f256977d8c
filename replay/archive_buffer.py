"""A buffer in Redis, to a file and back: exported from one run, imported into another.

    records of every shard ─> payloads, 16 at a time ─> FILE.partial ─> FILE
    FILE ─> group by group: checked, too new and too old ones left out ─> put_back

Neither side stops the run: what is trained while it is exported is counted as gone. archive.py is
the file.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from leeway.replay.archive import ArchivedGroup, ArchiveHeader, ArchiveReader, ArchiveWriter
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import CodecError, ConfigurationError
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import SCHEMA_VERSION, PolicyVersion
from leeway.replay.sharded_store import ShardedReplay
from leeway.replay.store import Replay, ReplayStats
from leeway.replay.stored import StoredGroup


class Placed(NamedTuple):
    """A stored group's record, and where it is."""

    shard: int
    group_id: str
    record: StoredGroup


class OpenBuffer:
    """The buffer of a run, and its shards, for who handles groups as they are stored."""

    def __init__(self, url: str, run: str, config: ReplayConfig, retry_s: float = 30.0) -> None:
        """`retry_s` bounds how long a call is tried again while Redis does not answer."""
        self.run = run
        self.config = config
        limits, number = config.of_shard(), config.num_shards
        stores = [RedisReplay(url, run, limits, retry_s, shard) for shard in range(number)]
        self.shards = [store.buffer for store in stores]
        self.replay: Replay = stores[0] if number == 1 else ShardedReplay(stores, config)

    async def records(self) -> list[Placed]:
        """Every stored group, earliest arrival first. Each shard counts its own arrivals."""
        found = [
            Placed(shard, group_id, record)
            for shard, buffer in enumerate(self.shards)
            for group_id, record in (await buffer.records()).items()
        ]
        return sorted(found, key=lambda placed: (placed.record.arrival, placed.shard))

    async def payload(self, placed: Placed) -> bytes | None:
        """The encoded group; None if it is gone."""
        return await anext(self.shards[placed.shard].payloads([placed.group_id]))

    async def close(self) -> None:
        """Close connections."""
        await self.replay.close()


class Exported(NamedTuple):
    """What an export wrote."""

    num_groups: int
    num_bytes: int
    """Of the file."""
    num_gone: int
    """Groups that were trained or dropped before they were read."""


class Imported(NamedTuple):
    """What an import stored."""

    num_groups: int
    skipped: dict[str, int]
    """Groups by reason: "stored" (their ids are in the buffer), "lost-version" (newer than its
    learner), "overdue" (too old for any step to come)."""
    learner_version: int
    """Of the buffer."""
    is_version_taken: bool
    """The buffer was new and took its learner version from the file."""
    fault: CodecError | None
    """Where reading ended early. Everything before it is stored."""


def check_absent(path: Path, overwrite: bool) -> None:
    """Raise ConfigurationError where an export to `path` would replace what it may not."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"{path.absolute().parent} is no folder; make it, or name another")
    if path.exists() and not overwrite:
        raise ConfigurationError(f"{path} exists; name another file or say --force")


def check_readable(path: Path) -> None:
    """Raise ConfigurationError or CodecError unless `path` begins as an exported buffer."""
    with _open(path) as file:
        ArchiveReader(file, str(path))


async def export_groups(buffer: OpenBuffer, path: Path, overwrite: bool = False) -> Exported:
    """Write every buffered and leased group to `path`, while the run goes on.

    The records are read at once, the payloads a few at a time. Raises ConfigurationError where the
    file cannot be written or stands already and `overwrite` is False.
    """
    check_absent(path, overwrite)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            try:
                exported = await _write_groups(buffer, file)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from None
    return exported


async def _write_groups(buffer: OpenBuffer, file: BinaryIO) -> Exported:
    records = await buffer.records()
    # Asked after the records: the learner's version only grows, so it is theirs or newer.
    writer = ArchiveWriter(file, _header_of(await buffer.replay.stats(), buffer))
    payloads = [
        shard.payloads([placed.group_id for placed in records if placed.shard == number])
        for number, shard in enumerate(buffer.shards)
    ]
    for placed in records:
        payload = await anext(payloads[placed.shard])
        if payload is not None:
            writer.add(_archived(placed.group_id, placed.record, payload))
    writer.end()
    return Exported(writer.num_groups, file.tell(), len(records) - writer.num_groups)


def _header_of(stats: ReplayStats, buffer: OpenBuffer) -> ArchiveHeader:
    counters: dict[str, Any] = msgspec.to_builtins(stats)
    for held_now in ("waits", "slots", "leases"):
        del counters[held_now]
    return ArchiveHeader(
        schema_version=SCHEMA_VERSION,
        run=buffer.run,
        exported_at=time.time(),
        learner_version=stats.learner_version,
        limits=buffer.config.model_dump(mode="json", exclude={"url"}),  # it holds the password
        counters=counters,
    )


def _archived(group_id: str, record: StoredGroup, payload: bytes) -> ArchivedGroup:
    return ArchivedGroup(
        group_id=group_id,
        version=record.version,
        newest=record.newest,
        arrival=record.arrival,
        draws=record.draws,
        returns=record.returns,
        priority=record.priority,
        trajectories=record.trajectories,
        payload=payload,
    )


async def import_groups(buffer: OpenBuffer, path: Path, *, stores: bool = True) -> Imported:
    """Store the groups of `path` that the buffer lacks; harmless to repeat. Without `stores` the
    file is read through and what would be stored is counted; the buffer stays as it is.

    A new buffer takes the learner version of the file. Raises ConfigurationError for a file that
    cannot be opened, CodecError for one whose header cannot be read; a later fault is in the
    result.
    """
    with _open(path) as file:
        return await _store_groups(buffer, ArchiveReader(file, str(path)), stores)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None


async def _store_groups(buffer: OpenBuffer, reader: ArchiveReader, stores: bool) -> Imported:
    stats = await buffer.replay.stats()
    learner_version, is_version_taken = stats.learner_version, _is_new(stats)
    if is_version_taken:
        learner_version = PolicyVersion(reader.header.learner_version)
        if stores:
            await buffer.replay.restore_version(learner_version)
    stored = {str(group_id) for group_id in await buffer.replay.group_ids()}
    num_groups, skipped, fault = 0, Counter[str](), None
    try:
        for number, group in enumerate(reader.groups()):
            # Each shard gives an equal part of every step, so neighbours go to different ones.
            shard = buffer.shards[number % len(buffer.shards)]
            if group.newest > learner_version:
                skipped["lost-version"] += 1
            elif group.version + buffer.config.max_staleness < learner_version:
                skipped["overdue"] += 1
            elif group.group_id in stored:
                skipped["stored"] += 1
            else:
                outcome = "trained" if _is_trained(group, buffer.config) else "added"
                if stores:
                    outcome = await shard.put_back(group.group_id, group.record, group.payload)
                if outcome == "added":
                    stored.add(group.group_id)
                    num_groups += 1
                else:
                    skipped["stored" if outcome == "held" else "trained"] += 1
    except CodecError as error:
        fault = error
    return Imported(num_groups, dict(skipped), learner_version, is_version_taken, fault)


def _is_trained(group: ArchivedGroup, config: ReplayConfig) -> bool:
    """No step may train it again; put_back says so too."""
    return 0 < group.draws >= config.max_draws


def _is_new(stats: ReplayStats) -> bool:
    """Nothing was ever admitted, trained or imported."""
    num_stored = stats.num_ready + stats.num_leased
    return stats.learner_version == 0 and stats.num_admitted == 0 and num_stored == 0
