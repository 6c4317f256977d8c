"""Replies come out as they went in, however the network cuts them up; a silent link ends a wait."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.replay.wire import LARGE_BYTES, SMALL_BYTES, WireParser, pack

SILENCE_S = 5.0


class Transport:
    """What a parser needs of a transport that reads nothing by itself."""

    def __init__(self) -> None:
        self.protocol: Any = SimpleNamespace(eof_received=lambda: None, connection_lost=lambda _: 0)
        self.is_aborted = False

    def get_extra_info(self, name: str) -> Any:
        return object() if name == "sslcontext" else None

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def receive(self, data: bytes) -> None:
        """What the event loop does with bytes of the socket."""
        while data:
            buffer = self.protocol.get_buffer(-1)
            taken = min(len(buffer), len(data))
            buffer[:taken] = data[:taken]
            self.protocol.buffer_updated(taken)
            data = data[taken:]


def connected() -> tuple[WireParser, Transport]:
    parser, transport = WireParser(65536), Transport()
    parser.on_connect(SimpleNamespace(_writer=SimpleNamespace(transport=transport)))  # type: ignore[arg-type]
    return parser, transport


def as_sent(reply: Any) -> bytes:
    """RESP2 of a reply."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n%s" % (len(reply), b"".join(map(as_sent, reply)))


TEXT = st.one_of(
    st.binary(max_size=40),
    # Around the sizes at which a text goes another way.
    st.sampled_from(
        [LARGE_BYTES - 1, LARGE_BYTES, SMALL_BYTES - 6, SMALL_BYTES, 3 * SMALL_BYTES]
    ).map(lambda size: bytes(i % 251 for i in range(size))),
)
REPLY = st.recursive(
    st.one_of(st.none(), st.integers(-(2**62), 2**62), TEXT),
    lambda inner: st.lists(inner, max_size=4),
)


@settings(deadline=None)
@given(st.lists(REPLY, min_size=1, max_size=6), st.lists(st.integers(1, 9000), min_size=1))
def test_replies_do_not_depend_on_how_they_are_cut_up(replies, sizes):
    async def play() -> list[Any]:
        parser, transport = connected()
        waiting = asyncio.ensure_future(parser.exchange([b"x"], len(replies), SILENCE_S))
        await asyncio.sleep(0)
        data, k = b"".join(map(as_sent, replies)), 0
        while data:
            transport.receive(data[: sizes[k % len(sizes)]])
            data, k = data[sizes[k % len(sizes)] :], k + 1
        received = await waiting
        assert not await parser.can_read()
        return received

    assert asyncio.run(play()) == replies


async def test_a_row_of_large_texts_that_has_come_is_read_at_once():
    """One turn of the event loop for all of them, where the link is a plain socket."""
    near, far = socket.socketpair()
    near.setblocking(False)
    parser, transport = WireParser(65536), Transport()
    of_socket = {"socket": near}
    transport.get_extra_info = of_socket.get  # type: ignore[method-assign]
    parser.on_connect(SimpleNamespace(_writer=SimpleNamespace(transport=transport)))  # type: ignore[arg-type]
    replies = [os.urandom(size) for size in (2 * SMALL_BYTES, SMALL_BYTES, 3, 2 * SMALL_BYTES)]
    far.sendall(b"".join(map(as_sent, replies)))
    waiting = parser.exchange([b"x"], len(replies), SILENCE_S)
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    transport.protocol.buffer_updated(near.recv_into(transport.protocol.get_buffer(-1)))
    assert await task == replies
    assert not await parser.can_read()
    near.close()
    far.close()


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=6), st.lists(st.integers(1, 30_000), min_size=1))
def test_nor_on_a_plain_socket_where_more_comes_than_was_announced(replies, sizes):
    async def play() -> list[Any]:
        near, far = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=near)
        parser = WireParser(65536)
        parser.on_connect(SimpleNamespace(_writer=writer))  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(parser.exchange([b"x"], len(replies), 60.0))
        far.setblocking(False)
        data, k = b"".join(map(as_sent, replies)), 0
        while data:
            size = sizes[k % len(sizes)]
            await asyncio.get_running_loop().sock_sendall(far, data[:size])
            await asyncio.sleep(0)
            data, k = data[size:], k + 1
        received = await waiting
        writer.close()
        far.close()
        return received

    assert asyncio.run(play()) == replies


async def test_a_link_that_ends_within_a_row_ends_the_wait():
    near, far = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=near)
    parser = WireParser(65536)
    parser.on_connect(SimpleNamespace(_writer=writer))  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(parser.exchange([b"x"], 2, 60.0))
    await asyncio.sleep(0)
    assert far.recv(1) == b"x"
    text = os.urandom(2 * SMALL_BYTES)
    far.sendall(as_sent(text) + as_sent(text)[:-9])
    far.close()
    with pytest.raises(redis.exceptions.ConnectionError, match="closed by server"):
        await waiting
    writer.close()


async def test_an_error_is_a_reply_among_others():
    parser, transport = connected()
    waiting = asyncio.ensure_future(parser.exchange([b"x"], 3, SILENCE_S))
    await asyncio.sleep(0)
    transport.receive(b"+OK\r\n-NOSCRIPT No matching script.\r\n:7\r\n")
    first, second, third = await waiting
    assert (first, third) == (b"OK", 7)
    assert isinstance(second, redis.exceptions.NoScriptError)


async def test_a_large_text_within_a_list_is_bytes_and_by_itself_a_view():
    text = os.urandom(2 * SMALL_BYTES)
    parser, transport = connected()
    waiting = asyncio.ensure_future(parser.exchange([b"x"], 2, SILENCE_S))
    await asyncio.sleep(0)
    transport.receive(as_sent(text) + as_sent([text]))
    alone, (within,) = await waiting
    assert isinstance(alone, memoryview) and alone.readonly and alone == text
    assert isinstance(within, bytes) and within == text


async def test_what_nobody_asked_for_makes_a_connection_unfit():
    parser, transport = connected()
    transport.receive(b":1\r\n")
    assert await parser.can_read()
    parser, transport = connected()
    transport.receive(b"$10\r\nhal")
    assert await parser.can_read()


async def test_a_link_that_ends_ends_the_wait_and_is_unfit_afterwards():
    parser, transport = connected()
    waiting = asyncio.ensure_future(parser.exchange([b"x"], 1, SILENCE_S))
    await asyncio.sleep(0)
    transport.protocol.connection_lost(None)
    with pytest.raises(redis.exceptions.ConnectionError, match="closed by server"):
        await waiting
    assert await parser.can_read()
    with pytest.raises(redis.exceptions.ConnectionError):
        await parser.exchange([b"x"], 1, SILENCE_S)


async def test_what_is_no_reply_ends_the_wait_and_the_link():
    parser, transport = connected()
    waiting = asyncio.ensure_future(parser.exchange([b"x"], 1, SILENCE_S))
    await asyncio.sleep(0)
    transport.receive(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(redis.exceptions.InvalidResponse, match="HTTP"):
        await waiting
    assert transport.is_aborted


async def test_only_silence_counts_against_the_deadline():
    """Bytes come every 0.15 s for a second, then no more: the wait outlives 0.3 s and then ends."""
    parser, transport = connected()
    started = asyncio.get_running_loop().time()
    waiting = asyncio.ensure_future(parser.exchange([b"x"], 1, silence_s=0.3))
    await asyncio.sleep(0)
    transport.receive(b"$100\r\n")
    for _ in range(6):
        await asyncio.sleep(0.15)
        assert not waiting.done()
        transport.receive(b"x")
    with pytest.raises(redis.exceptions.TimeoutError):
        await waiting
    assert asyncio.get_running_loop().time() - started > 0.9


async def test_much_is_sent_whole_although_the_socket_takes_little():
    """More parts than one call of the system writes, and more bytes than a socket holds."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=near)
    far_reader, far_writer = await asyncio.open_connection(sock=far)
    parser = WireParser(65536)
    parser.on_connect(SimpleNamespace(_writer=writer))  # type: ignore[arg-type]
    parts = [os.urandom(1 + i % 3000) for i in range(1500)]
    waiting = asyncio.ensure_future(parser.exchange(parts, 1, SILENCE_S))
    sent = await far_reader.readexactly(sum(map(len, parts)))
    assert sent == b"".join(parts)
    far_writer.write(b"+OK\r\n")
    assert await waiting == [b"OK"]
    for each in (writer, far_writer):
        each.close()
    del reader


async def test_nothing_is_written_to_a_link_that_has_ended():
    """Its descriptor may be a file that was opened since."""
    near, far = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=near)
    parser = WireParser(65536)
    parser.on_connect(SimpleNamespace(_writer=writer))  # type: ignore[arg-type]
    far.close()
    await asyncio.sleep(0.05)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with pytest.raises(redis.exceptions.ConnectionError):
        await parser.exchange([b"*1\r\n$4\r\nPING\r\n"], 1, SILENCE_S)
    with pytest.raises(BlockingIOError):
        os.read(read_end, 1)
    for end in (read_end, write_end):
        os.close(end)
    writer.close()


def test_commands_are_packed_in_one_part_but_for_large_words():
    large = b"x" * LARGE_BYTES
    assert pack([("SET", "a", 1), ("GET", b"b", 0.5)]) == [
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n*3\r\n$3\r\nGET\r\n$1\r\nb\r\n$3\r\n0.5\r\n"
    ]
    parts = pack([("SET", "\N{SNOWMAN}", large), ("PING",)])
    assert parts[1] is large
    assert (parts[0], parts[2]) == (
        b"*3\r\n$3\r\nSET\r\n$3\r\n\xe2\x98\x83\r\n$4096\r\n",
        b"\r\n*1\r\n$4\r\nPING\r\n",
    )


@pytest.mark.parametrize("word", [None, True, [1]])
def test_what_is_no_word_of_a_command_is_refused(word):
    with pytest.raises(redis.exceptions.DataError, match="no word of a Redis command"):
        pack([("SET", "a", word)])
