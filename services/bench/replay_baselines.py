"""What the replay buffer is measured against: plain Redis, and a stream of pickled trajectories."""

# redis-py leaves its keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import io
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis
import redis.asyncio

from leeway.replay.codec import encode
from leeway.replay.connection import stream_entries
from leeway.replay.errors import WaitTimeout
from leeway.replay.schema import Group, Trajectory
from leeway.services.bench.replay_crew import (
    CALL_TIMEOUT_S,
    GROUPS_PER_STEP,
    JOB_TIMEOUT_S,
    Done,
    Load,
    Shared,
)

POLL_S: Final = 0.0005
"""How often a task looks whether it may go on. The other process tells it through shared memory, so
that Redis does nothing but move the bytes."""

STREAM: Final = "bench:stream"

Record = dict[str, Any]


def empty(url: str, *, rewrites: bool) -> None:
    """Forget everything in the bench's server, its append-only file too.

    `rewrites`: let Redis rewrite that file by itself, as it does with every 64 MiB. A child process
    that does so would fall on one turn of a race and not on the other.
    """
    with _sync_client(url) as client:
        # None may begin by itself between the look and the command, which would be refused then.
        client.config_set("auto-aof-rewrite-percentage", 0)
        client.flushall()
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        _wait_for_rewrite(client, deadline_s)
        client.bgrewriteaof()
        _wait_for_rewrite(client, deadline_s)
        client.config_set("auto-aof-rewrite-percentage", 100 if rewrites else 0)


def _wait_for_rewrite(client: Any, deadline_s: float) -> None:
    while any(
        client.info("persistence")[f"aof_rewrite_{word}"] for word in ("in_progress", "scheduled")
    ):
        if time.monotonic() > deadline_s:
            raise WaitTimeout(f"Redis did not rewrite its file in {CALL_TIMEOUT_S:g} s")
        time.sleep(0.001)


# --- SET, GET, DEL ---


def write_plain(load: Load, shared: Shared) -> Done:
    """Each producer SETs as many groups in one pipeline as ours has in flight."""
    return asyncio.run(_write_plain(load, shared))


def read_plain(load: Load, shared: Shared) -> Done:
    """Each consumer GETs and DELs one step of groups in one pipeline."""
    return asyncio.run(_read_plain(load, shared))


async def _write_plain(load: Load, shared: Shared) -> Done:
    client, data = await _connected(load.url, load.num_producers), encode(load.group())
    batches = _batches(load.num_groups, load.num_at_once)

    async def producer() -> None:
        for batch in batches:
            await _until(lambda end=batch.stop: end - shared.num_read.value <= load.max_groups)
            pipeline = client.pipeline(transaction=False)
            for number in batch:
                pipeline.set(str(number), data)
            await pipeline.execute()
            written = shared.num_written.value
            shared.journal[written : written + len(batch)] = list(batch)
            shared.num_written.value = written + len(batch)

    stopwatch = shared.start()
    await asyncio.gather(*(producer() for _ in range(load.num_producers)))
    done = stopwatch.done(load.num_groups, 0)
    await client.aclose()
    return done


async def _read_plain(load: Load, shared: Shared) -> Done:
    client = await _connected(load.url, load.num_consumers)
    batches = _batches(load.num_groups, GROUPS_PER_STEP)
    num_groups = size = 0

    async def consumer() -> None:
        nonlocal num_groups, size
        for batch in batches:
            await _until(lambda end=batch.stop: end <= shared.num_written.value)
            keys = [str(number) for number in shared.journal[batch.start : batch.stop]]
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.get(key)
            pipeline.delete(*keys)
            *groups, num_deleted = await pipeline.execute()
            num_groups += num_deleted
            size += sum(map(len, groups))
            shared.num_read.value += num_deleted

    stopwatch = shared.start()
    await asyncio.gather(*(consumer() for _ in range(load.num_consumers)))
    done = stopwatch.done(num_groups, size)
    await client.aclose()
    return done


async def _connected(url: str, num_connections: int) -> Any:
    """A client with one open connection for each caller."""
    client: Any = redis.asyncio.Redis.from_url(url, protocol=2, socket_timeout=CALL_TIMEOUT_S)
    await asyncio.gather(*(client.ping() for _ in range(num_connections)))
    return client


def _batches(num_groups: int, size: int) -> Iterator[range]:
    """5 by 2 -> range(0, 2), range(2, 4), range(4, 5)"""
    return (range(i, min(i + size, num_groups)) for i in range(0, num_groups, size))


async def _until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while not is_true():
        if time.monotonic() > deadline_s:
            raise WaitTimeout(f"the other process did nothing for {CALL_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)


# --- a stream ---


def write_stream(load: Load, is_whole: bool, shared: Shared) -> Done:
    """One XADD for each entry, one after the other. The lists are made before the clock starts."""
    group = load.group()
    entries = (
        [[record(group, t) for t in group.trajectories]]
        if is_whole
        else [record(group, t) for t in group.trajectories]
    )
    with _sync_client(load.url) as client:
        stopwatch = shared.start()
        for _ in range(load.num_groups):
            for entry in entries:
                client.xadd(STREAM, {"data": pickle.dumps(entry, pickle.HIGHEST_PROTOCOL)})
        return stopwatch.done(load.num_groups, 0)


def read_stream(load: Load, is_whole: bool, shared: Shared) -> Done:
    """One entry a call, until every group is read."""
    num_left = load.num_groups * (1 if is_whole else len(load.group().trajectories))
    num_trajectories = size = 0
    with _sync_client(load.url) as client:
        stopwatch = shared.start()
        for entry in _entries(client, num_left):
            records: list[Record] = entry if is_whole else [entry]
            num_trajectories += len(records)
            size += sum(len(r["token_ids"]) for r in records)
        return stopwatch.done(num_trajectories // len(load.group().trajectories), size)


def record(group: Group, trajectory: Trajectory) -> Record:
    """A trajectory as Python lists: tokens, labels that are -100 where nothing is trained."""
    labels = [-100] * len(trajectory.token_ids)
    for turn in trajectory.turns:
        trained = slice(turn.start, turn.start + turn.num_generated)
        labels[trained] = trajectory.token_ids[trained].tolist()
    return {
        "group_id": group.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "token_ids": trajectory.token_ids.tolist(),
        "labels": labels,
        "logprobs": trajectory.logprobs.tolist(),
        "reward": trajectory.reward,
        "version": int(trajectory.versions.max()),
        "stop_reason": trajectory.stop_reason,
        "scores": trajectory.scores,
    }


def _entries(client: Any, num_entries: int) -> Iterator[Any]:
    deadline_s, last_id = time.monotonic() + JOB_TIMEOUT_S - CALL_TIMEOUT_S, b"0-0"
    for _ in range(num_entries):
        reply = client.xread({STREAM: last_id}, count=1, block=int(1000 * CALL_TIMEOUT_S / 2))
        if not reply or time.monotonic() > deadline_s:
            raise WaitTimeout(f"the stream of the bench ended early, after {last_id!r}")
        ((last_id, fields),) = stream_entries(reply)
        yield _ListsOnly(io.BytesIO(fields[b"data"])).load()


class _ListsOnly(pickle.Unpickler):
    """For what was written above: lists, dicts, numbers and text. A pickle that names anything
    else, which could run it, is refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"an entry of the bench names {module_name}.{global_name}")


def _sync_client(url: str) -> Any:
    return redis.Redis.from_url(url, protocol=2, socket_timeout=CALL_TIMEOUT_S)
