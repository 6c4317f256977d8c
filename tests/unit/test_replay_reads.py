"""Over how many connections the payloads of a draw are read."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.connection import Link
from leeway.replay.redis_buffer import RedisBuffer
from leeway.replay.stored import Leased


class Answering(Link):
    """Answers each GET with so many bytes of the last letter of its key."""

    def __init__(self, size: int) -> None:
        super().__init__("redis://localhost:1/0")
        self.size = size
        self.calls: list[tuple[int, bool]] = []
        """Commands of each call, and whether it went alone."""

    async def execute(self, *commands: Any, is_alone: bool = False) -> list[Any]:
        self.calls.append((len(commands), is_alone))
        return [None if key.endswith("x") else key[-1].encode() * self.size for _, key in commands]


def leased(ids: str) -> Leased:
    return Leased("lease", 0, 0, list(ids))


@pytest.mark.parametrize(
    ("size", "calls"),
    [
        (2**15, [(16, False)]),  # half a MiB
        (2**15 + 1, [(8, True)] * 2),
        (2**17, [(4, True)] * 4),  # two MiB
        (2**20, [(4, True)] * 4),
    ],
)
async def test_a_step_is_read_over_a_connection_for_each_half_mib_of_the_step_before(size, calls):
    link = Answering(size)
    buffer = RedisBuffer(link, "run", ReplayConfig())
    ids = "abcdefghijklmnop"
    await buffer.read(leased(ids))
    assert link.calls == [(16, False)]  # nothing was read before
    link.calls.clear()
    drawn = await buffer.read(leased(ids))
    assert link.calls == calls
    assert [bytes(payload[:1]).decode() for payload in drawn.payloads] == list(ids)
    await link.close()


async def test_three_payloads_of_which_one_is_gone_are_read_over_two_connections():
    link = Answering(2**19)
    buffer = RedisBuffer(link, "run", ReplayConfig())
    await buffer.read(leased("axc"))
    drawn = await buffer.read(leased("axc"))
    assert link.calls == [(3, False), (2, True), (1, True)]
    assert [len(payload) for payload in drawn.payloads] == [2**19, 0, 2**19]
    await link.close()
