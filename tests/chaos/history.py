"""What a buffer in Redis went through, by the file that Redis appends to, and what it holds now.

The buffer counts what it drops and forgets the ids; the file names them. Nothing here calls the
code of the buffer, but for the layout of its records.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from leeway.replay.redis_replies import to_record
from leeway.replay.scripts import STATE_FIELDS

MULTI: Final = b"\r\nMULTI\r\n"
EXEC: Final = b"\r\nEXEC\r\n"

SNAPSHOT: Final = """
local prefix = ARGV[1]
local payloads = {}
for _, name in ipairs(redis.call('KEYS', prefix .. 'payload:*')) do
  local id = string.sub(name, #prefix + 9)
  payloads[#payloads + 1] = {id, redis.call('STRLEN', name), redis.call('TTL', name)}
end
return {
  redis.call('GET', prefix .. 'state'),
  redis.call('HGETALL', prefix .. 'groups'),
  redis.call('ZRANGE', prefix .. 'ready', 0, -1),
  redis.call('ZRANGE', prefix .. 'again', 0, -1),
  redis.call('ZRANGE', prefix .. 'leases', 0, -1),
  redis.call('HGETALL', prefix .. 'lease'),
  redis.call('ZCARD', prefix .. 'slots'),
  payloads,
}
"""


def check_whole(admin: Any, prefix: str) -> None:
    """No group or lease is half written, none stands in two places, and the counters agree. Holds
    between any two scripts."""
    reply = admin.eval(SNAPSHOT, 0, prefix)
    packed, groups, ready, again, leases, lease, num_slots, payloads = reply
    if packed is None:
        return
    numbers = struct.unpack_from(f">{STATE_FIELDS.index('room_signal')}d", packed)
    state = dict(zip(STATE_FIELDS, numbers, strict=False))
    records = {_text(i): to_record(r) for i, r in zip(groups[::2], groups[1::2], strict=True)}
    held = [i for packed in lease[1::2] for i in msgspec.msgpack.decode(packed)["ids"]]
    places = [*map(_text, ready), *map(_text, again), *held]
    assert len(places) == len(set(places)), "a group stands in two places"
    assert set(places) == set(records)
    kept = {_text(i): size for i, size, ttl_s in payloads if ttl_s == -1}
    assert kept == {i: record.size for i, record in records.items()}, "a group is half written"
    assert {*map(_text, leases)} == {*map(_text, lease[::2])}, "a lease is half written"
    found = (len(records), sum(kept.values()), len(leases), num_slots)
    counted = (state[n] for n in ("num_stored", "num_bytes", "num_leases", "num_slots"))
    assert found == tuple(counted), "the counters do not agree with what is stored"


def _text(word: bytes | str) -> str:
    return word if isinstance(word, str) else word.decode()


@dataclass
class History:
    """Read from the append-only file."""

    arrived: set[str] = field(default_factory=set[str])
    """Groups that were stored."""
    leased: set[str] = field(default_factory=set[str])
    """Leases that were given."""
    acknowledged: set[str] = field(default_factory=set[str])
    """Leases that were acknowledged."""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    """Groups that the buffer dropped without a step having trained them, with the reason."""

    @classmethod
    def read(cls, home: Path, prefix: str) -> Self:
        """Of the server in `home`, whose file was never rewritten."""
        history = cls()
        for path in append_only_files(home):
            before: list[list[bytes]] = []
            for words in commands(path.read_bytes()):
                history._take(words, before, prefix.encode())
                before = [*before[-1:], words]
        return history

    def _take(self, words: list[bytes], before: list[list[bytes]], prefix: bytes) -> None:
        verb, key, rest = words[0].upper(), words[1:2], words[2:]
        name = key[0].removeprefix(prefix) if key and key[0].startswith(prefix) else b""
        if (verb, name) == (b"HSET", b"groups"):
            self.arrived.update(map(_text, rest[::2]))
        elif (verb, name) == (b"HSET", b"lease"):
            self.leased.update(map(_text, rest[::2]))
        elif (verb, name) == (b"ZADD", b"acknowledged"):
            self.acknowledged.update(map(_text, rest[1::2]))
        elif (verb, name) == (b"HINCRBY", b"dropped") and len(before) == 2:
            # The record and the payload of the group go right in front of the count; where a slot
            # is dropped, they do not.
            record, payload = before
            is_group = record[0].upper() == b"HDEL" and record[1] == prefix + b"groups"
            if is_group and payload[0].upper() == b"UNLINK" and len(record) == 3:
                assert payload[1:] == [prefix + b"payload:" + record[2]]
                self.dropped[_text(record[2])] = _text(rest[0])


def append_only_files(home: Path) -> list[Path]:
    """A single file up to Redis 6, in a folder from 7 on."""
    row = (home / "appendonlydir").glob("appendonly.aof.*.incr.aof")
    files = sorted(row, key=lambda path: int(path.name.split(".")[2]))
    files = files or [home / "appendonly.aof"]
    with files[0].open("rb") as file:
        assert file.read(5) != b"REDIS", "rewritten, so the past is not in it"
    return files


def ends_in_a_script(home: Path) -> bool:
    """The file ends between MULTI and EXEC."""
    with append_only_files(home)[-1].open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**20))
        tail = file.read()
    return tail.rfind(MULTI) > tail.rfind(EXEC)


def commands(data: bytes) -> Iterator[list[bytes]]:
    """Commands of an append-only file, in their words."""
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        assert data[at : at + 1] == b"*", f"no command at byte {at}"
        num_words, at = int(data[at + 1 : end]), end + 2
        words: list[bytes] = []
        for _ in range(num_words):
            end = data.index(b"\r\n", at)
            size = int(data[at + 1 : end])
            words.append(data[end + 2 : end + 2 + size])
            at = end + 4 + size
        yield words
