"""On the PYTHONPATH of a run under faults: writes what every process does with buffer and board.

Python imports it when it starts. It waits until the client of either is imported, and then puts a
line before and after each call into a file of this process, where no fault reaches: the ledger that
run_ledger.py reads. Lines are written with os.write, so they outlive the process.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from typing import Any

FOLDER = os.environ.get("LEEWAY_CHAOS_LEDGERS")


class _Note:
    """The ledger of this process; opened when first needed, again after a fork."""

    def __init__(self) -> None:
        self._pid = 0
        self._file = -1

    def __call__(self, *words: object) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = f"{FOLDER}/{self._pid}-{os.urandom(3).hex()}"
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


note = _Note()


def watch_replay(store: Any) -> None:
    """Put lines around add, draw and acknowledge."""
    from leeway.replay.errors import LeaseExpired, SlotExpired

    replay = store.RedisReplay
    add, draw, acknowledge = replay.add, replay.draw, replay.acknowledge
    admit, restore_version = replay.admit, replay.restore_version

    async def noted_admit(self: Any, *arguments: Any, **named: Any) -> Any:
        asked = time.monotonic_ns()
        slots = await admit(self, *arguments, **named)
        for slot in slots:
            note("granted", slot.slot_id, asked)
        return slots

    async def noted_add(self: Any, slot: Any, group: Any) -> None:
        note("add", slot.slot_id)
        try:
            await add(self, slot, group)
        except SlotExpired:
            note("refused", slot.slot_id)
            raise
        note("added", slot.slot_id, group.version_range[1])

    async def noted_draw(self: Any, timeout_s: float) -> Any:
        lease = await draw(self, timeout_s)
        note("drawn", lease.lease_id, *(lease.version - g.oldest_version for g in lease.groups))
        return lease

    async def noted_acknowledge(self: Any, lease: Any, version: Any) -> None:
        ids = [group.group_id for group in lease.groups]
        note("acknowledge", lease.lease_id, *ids)
        try:
            await acknowledge(self, lease, version)
        except LeaseExpired:
            note("expired", lease.lease_id, *ids)
            raise
        note("acknowledged", lease.lease_id, *ids)

    async def noted_restore_version(self: Any, version: Any) -> Any:
        dropped = await restore_version(self, version)
        note("restored", version, time.monotonic_ns())
        return dropped

    replay.add, replay.draw, replay.acknowledge = noted_add, noted_draw, noted_acknowledge
    replay.admit, replay.restore_version = noted_admit, noted_restore_version


def watch_board(board: Any) -> None:
    """Put a line before what the learner announces and what engines hold afterwards."""
    policies = board.PolicyBoard
    announce, report = policies.announce, policies.report

    async def noted_announce(self: Any, announcement: Any) -> Any:
        note("announced", announcement.version, announcement.checksum)
        return await announce(self, announcement)

    async def noted_report(self: Any, said: Any) -> Any:
        if said.stage == "committed":
            note("committed", said.version, said.checksum, said.engine_id)
        return await report(self, said)

    policies.announce, policies.report = noted_announce, noted_report


WATCHED = {"leeway.replay.redis_store": watch_replay, "leeway.replay.board": watch_board}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what is watched as the others do, and watches it once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in WATCHED:
            return None
        watch = WATCHED.pop(name)  # so the next line asks the others
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_watch(module: Any) -> None:
            load(module)
            watch(module)

        spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec


if FOLDER:
    sys.meta_path.insert(0, _Finder())
