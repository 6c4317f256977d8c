"""What the two processes of `leeway bench replay` do with our buffer, as asyncio tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import msgspec

from leeway.replay.codec import decode, encode
from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.stored import Entry, entry_of
from leeway.services.bench.replay_crew import (
    CALL_TIMEOUT_S,
    ENGINE,
    GROUPS_PER_STEP,
    JOB_TIMEOUT_S,
    NUM_IN_FLIGHT,
    Done,
    Load,
    Shared,
)


class Payload(msgspec.Struct, frozen=True):
    """A group that is encoded already."""

    entry: Entry


# --- our side of a turn ---


def produce(load: Load, is_bare: bool, shared: Shared) -> Done:
    """Admit as many groups as one producer plays at once, add all of them, again."""
    return asyncio.run(_produce(load, is_bare, shared))


def consume(load: Load, is_bare: bool, shared: Shared) -> Done:
    """Draw and acknowledge, until every group is read."""
    return asyncio.run(_consume(load, is_bare, shared))


async def _produce(load: Load, is_bare: bool, shared: Shared) -> Done:
    replay, filled = await _connected(load, is_bare), _filler(load, is_bare)
    left = load.num_groups

    async def producer() -> None:
        nonlocal left
        while left:
            num_asked = min(left, load.num_at_once)
            left -= num_asked
            slots = await replay.admit(num_asked, ENGINE, CALL_TIMEOUT_S)
            left += num_asked - len(slots)
            outcomes = await asyncio.gather(*(replay.add(slot, filled(slot)) for slot in slots))
            assert set(outcomes) <= {None, "added"}, outcomes

    stopwatch = shared.start()
    await _all(producer() for _ in range(load.num_producers))
    done = stopwatch.done(load.num_groups, 0)
    await replay.close()
    return done


async def _consume(load: Load, is_bare: bool, shared: Shared) -> Done:
    replay = await _connected(load, is_bare)
    steps = iter(range(load.num_groups // GROUPS_PER_STEP))
    num_groups = size = 0

    async def consumer() -> None:
        nonlocal num_groups, size
        for _ in steps:
            lease = await replay.draw(CALL_TIMEOUT_S)
            num_groups += len(lease.groups)
            size += sum(map(_size, lease.groups))
            await replay.acknowledge(lease, PolicyVersion(lease.version + 1))

    stopwatch = shared.start()
    await _all(consumer() for _ in range(load.num_consumers))
    done = stopwatch.done(num_groups, size)
    await replay.close()
    return done


async def _all(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.timeout(JOB_TIMEOUT_S - CALL_TIMEOUT_S):
        await asyncio.gather(*tasks)


async def _connected(load: Load, is_bare: bool) -> Replay:
    """With as many connections as there are callers, and every script loaded but the rare ones."""
    replay = _opened(load.url, load.run, load.config, is_bare)
    await asyncio.gather(*(replay.stats() for _ in range(NUM_IN_FLIGHT)))
    return replay


def _filler(load: Load, is_bare: bool) -> Callable[[Slot], Any]:
    """Makes the group for a slot."""
    group = load.group()
    if is_bare:
        entry = entry_of(group)
        return lambda slot: Payload(entry)
    return lambda slot: msgspec.structs.replace(group, group_id=slot.slot_id)


def _size(group: Group | bytes | memoryview) -> int:
    if not isinstance(group, Group):
        return len(group)
    return sum(len(trajectory.token_ids) for trajectory in group.trajectories)


def _opened(url: str, run: str, config: ReplayConfig, is_bare: bool) -> Any:
    return _Bare(url, run, config) if is_bare else RedisReplay(url, run, config)


class _Bare:
    """A buffer that is given Payloads and gives their bytes: no checks, no codec."""

    def __init__(self, url: str, run: str, config: ReplayConfig) -> None:
        self._replay = RedisReplay(url, run, config)
        self.admit = self._replay.admit
        self.acknowledge = self._replay.acknowledge
        self.stats = self._replay.stats
        self.release = self._replay.release
        self.drop = self._replay.drop
        self.update_priorities = self._replay.update_priorities
        self.close = self._replay.close

    def add(self, slot: Slot, payload: Payload) -> asyncio.Future[Any]:
        return self._replay.buffer.add(slot, payload.entry)

    async def draw(self, timeout_s: float) -> Lease:
        lease_id, drawn = await self._replay.draw_encoded(timeout_s)
        payloads: Any = tuple(drawn.payloads)
        return Lease(lease_id, PolicyVersion(drawn.version), payloads)


# --- a buffer that stays full ---


class DrawTimes(NamedTuple):
    """Seconds of each draw."""

    decoded: list[float]
    bare: list[float]


class OperationTimes(NamedTuple):
    """Seconds of each call; those of `draw`, `acknowledge`, `release` and `update_priorities` per
    group."""

    admit: list[float]
    add: list[float]
    draw: list[float]
    acknowledge: list[float]
    release: list[float]
    drop: list[float]
    update_priorities: list[float]
    stats: list[float]


def fill(load: Load, shared: Shared) -> int:
    """Buffer `load.num_groups` groups, and return how many that were."""
    return asyncio.run(_fill(load))


def time_draws(load: Load, num_draws: int, shared: Shared) -> DrawTimes:
    """`num_draws` of each kind in turns; the drawn groups are replaced."""
    return asyncio.run(_time_draws(load, num_draws))


def time_operations(loads: list[Load], num_rounds: int, shared: Shared) -> list[OperationTimes]:
    """A step of groups drawn and replaced, one call at a time, in each filled buffer in turns."""
    return asyncio.run(_time_operations(loads, num_rounds))


async def _fill(load: Load) -> int:
    replay = await _connected(load, is_bare=True)
    await _add_groups(replay, load.num_groups, entry_of(load.group()))
    await replay.close()
    return load.num_groups


async def _add_groups(replay: Replay, num_groups: int, entry: Entry) -> None:
    left = num_groups
    while left:
        slots = await replay.admit(min(left, 1024), ENGINE, CALL_TIMEOUT_S)
        left -= len(slots)
        payloads: list[Any] = [Payload(entry) for slot in slots]
        await _all(map(replay.add, slots, payloads))


async def _time_draws(load: Load, num_draws: int) -> DrawTimes:
    whole, bare = await _connected(load, is_bare=False), await _connected(load, is_bare=True)
    entry = entry_of(load.group())
    times = DrawTimes([], [])
    for turn in range(num_draws + 1):  # the first is not counted
        for replay, seconds in zip((whole, bare), times, strict=True):
            started_s = time.perf_counter()
            lease = await replay.draw(CALL_TIMEOUT_S)
            if turn:
                seconds.append(time.perf_counter() - started_s)
            await replay.acknowledge(lease, PolicyVersion(lease.version + 1))
            await _add_groups(bare, len(lease.groups), entry)
    await whole.close()
    await bare.close()
    return times


async def _time_operations(loads: list[Load], num_rounds: int) -> list[OperationTimes]:
    replays = [await _connected(load, is_bare=True) for load in loads]
    entries = [entry_of(load.group()) for load in loads]
    times = [OperationTimes(*([] for _ in OperationTimes._fields)) for _ in loads]
    for _ in range(num_rounds):
        for replay, entry, seconds in zip(replays, entries, times, strict=True):
            await _time_round(replay, entry, seconds)
    for replay in replays:
        await replay.close()
    return times


async def _time_round(replay: Replay, entry: Entry, seconds: OperationTimes) -> None:
    clock = time.perf_counter
    unwanted = await replay.draw(CALL_TIMEOUT_S)
    at_s = [clock()]
    await replay.release(unwanted)
    at_s.append(clock())
    lease = await replay.draw(CALL_TIMEOUT_S)
    at_s.append(clock())
    await replay.acknowledge(lease, PolicyVersion(lease.version + 1))
    at_s.append(clock())
    await replay.stats()
    at_s.append(clock())
    seconds.stats.append(at_s[4] - at_s[3])
    num_groups, ids = len(lease.groups), list[str]()
    of_groups = (seconds.release, seconds.draw, seconds.acknowledge)
    for taken, begun_s, ended_s in zip(of_groups, at_s, at_s[1:], strict=False):
        taken.append((ended_s - begun_s) / num_groups)
    (given_up,) = await replay.admit(1, ENGINE, CALL_TIMEOUT_S)
    started_s = clock()
    await replay.drop(given_up, "unwanted")
    seconds.drop.append(clock() - started_s)
    for _ in range(num_groups):
        started_s = clock()
        slot = (await replay.admit(1, ENGINE, CALL_TIMEOUT_S))[0]
        admitted_s = clock()
        payload: Any = Payload(entry)
        await replay.add(slot, payload)
        seconds.admit.append(admitted_s - started_s)
        seconds.add.append(clock() - admitted_s)
        ids.append(slot.slot_id)
    started_s = clock()
    await replay.update_priorities(dict.fromkeys(ids, 1.0))
    seconds.update_priorities.append((clock() - started_s) / num_groups)


# --- the codec alone ---


class CodecSpeed(NamedTuple):
    """GB of token ids, log-probs and versions in a second of one core."""

    encode_gb_s: float
    decode_gb_s: float


def time_codec(loads: list[Load], shared: Shared) -> list[CodecSpeed]:
    """For the group of each load."""
    return [_codec_speed(load.group()) for load in loads]


def _codec_speed(group: Group) -> CodecSpeed:
    data = encode(group)
    num_bytes = sum(
        t.token_ids.nbytes + t.logprobs.nbytes + t.versions.nbytes for t in group.trajectories
    )
    passes = max(4, 16 * 2**20 // num_bytes)
    encode_s, decode_s = (
        _cpu_s(partial(encode, group), passes),
        _cpu_s(partial(decode, data), passes),
    )
    return CodecSpeed(num_bytes / encode_s / 1e9, num_bytes / decode_s / 1e9)


def _cpu_s(work: Callable[[], object], passes: int) -> float:
    """Median seconds of this process for `work`, over three rows of `passes`."""
    rows: list[float] = []
    for _ in range(3):
        started_s = time.process_time()
        for _ in range(passes):
            work()
        rows.append((time.process_time() - started_s) / passes)
    return median(rows)
