"""The clients of the redis library, and how pipelines travel over their connections."""

# redis-py leaves its keyword arguments untyped.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    ReadOnlyError,
    ResponseError,
    SlotNotCoveredError,
    TimeoutError,
)
from redis.retry import Retry

from leeway.replay.pipelines import Carry, Command, PipelineCall
from leeway.replay.redis_urls import RedisUrl
from leeway.replay.wire import WireParser, pack

SOCKET_TIMEOUT_S: Final = 10.0
"""Longest silence of a connection before it counts as lost; longer than any blocking read."""

CONNECT_TIMEOUT_S: Final = 3.0
"""Longest time for making a connection, and for any answer to `ping`."""

MAX_NODE_CONNECTIONS: Final = 1024
"""Connections to one node of a cluster. There nobody takes turns: one more caller is an error."""

_KEYLESS: Final = {"CLIENT", "CONFIG", "EXEC", "INFO", "MULTI", "PING", "SCRIPT", "TIME", "WAIT"}


def ping(parsed: RedisUrl) -> None:
    """Connect and ask for an answer within 3 s. Raises what redis raises."""
    silence: dict[str, Any] = {
        "socket_timeout": CONNECT_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    tls: dict[str, Any] = {"ssl": True} if parsed.is_tls else {}
    options = silence | tls | parsed.options
    client: Any
    if parsed.kind == "sentinel":
        for_sentinels = silence | tls | parsed.sentinel_options
        sentinel = redis.Sentinel(parsed.hosts, sentinel_kwargs=for_sentinels, **options)
        client = sentinel.master_for(parsed.master, db=parsed.db)
    elif parsed.kind == "cluster":
        nodes = [redis.cluster.ClusterNode(host, port) for host, port in parsed.hosts]
        client = redis.RedisCluster(startup_nodes=nodes, **options)
    elif parsed.kind == "socket":
        client = redis.Redis(unix_socket_path=parsed.path, db=parsed.db, **options)
    else:
        ((host, port),) = parsed.hosts
        client = redis.Redis(host=host, port=port, db=parsed.db, **options)
    with client:
        client.ping()


def build_client(parsed: RedisUrl, max_connections: int, carries: bool = False) -> Any:
    """An asynchronous client. Callers beyond `max_connections` take turns, but for a cluster.

    `carries`: its connections are for `build_carry`.
    """
    silence: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 30,
        "retry": AsyncRetry(NoBackoff(), 0),
        "protocol": 2,
    }
    options = silence | parsed.options
    tls: dict[str, Any] = {"ssl": True} if parsed.is_tls else {}
    if parsed.kind == "cluster":
        nodes = [redis.asyncio.cluster.ClusterNode(host, port) for host, port in parsed.hosts]
        return redis.asyncio.RedisCluster(
            startup_nodes=nodes, max_connections=MAX_NODE_CONNECTIONS, **tls, **options
        )
    options |= {
        "db": parsed.db,
        "max_connections": max_connections,
        "timeout": SOCKET_TIMEOUT_S,
        **({"parser_class": WireParser} if carries else {}),
    }
    if parsed.kind == "sentinel":
        for_sentinels = silence | tls | parsed.sentinel_options
        sentinel = redis.asyncio.Sentinel(parsed.hosts, sentinel_kwargs=for_sentinels)
        pool: Any = _SentinelPool(parsed.master, sentinel, **tls, **options)
    elif parsed.kind == "socket":
        pool = redis.asyncio.BlockingConnectionPool(
            connection_class=redis.asyncio.UnixDomainSocketConnection, path=parsed.path, **options
        )
    else:
        ((host, port),) = parsed.hosts
        connection = redis.asyncio.SSLConnection if parsed.is_tls else redis.asyncio.Connection
        pool = redis.asyncio.BlockingConnectionPool(
            connection_class=connection, host=host, port=port, **options
        )
    return redis.asyncio.Redis.from_pool(pool)


class _SentinelPool(
    redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool
):
    """Connections to whichever master Sentinel names, as many as are allowed, then turns."""

    async def aclose(self) -> None:
        await super().aclose()
        manager: Any = self.sentinel_manager
        for client in manager.sentinels:
            await client.aclose()


def build_carry(client: Any) -> Carry:
    """How pipelines reach the servers of `client`."""
    is_cluster = isinstance(client, redis.asyncio.RedisCluster)
    return ClusterCarry(client) if is_cluster else PoolCarry(client.connection_pool)


class PoolCarry:
    """Pipelines to one server. It keeps what the pool gave: to hand a connection back and ask for
    it again costs more than the commands of a short pipeline."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._free: list[Any] = []

    async def __call__(self, calls: list[PipelineCall]) -> None:
        connection = await self._connected()
        try:
            is_read_only = False
            for call, replies in await _exchange(connection, calls):
                call.settle(replies)
                is_read_only = is_read_only or any(map(_says_read_only, replies))
            if is_read_only:
                # A master once, a replica now. Only a new connection can lead to the new master.
                await connection.disconnect(nowait=True)
        except BaseException:
            await self._pool.release(connection)
            raise
        self._free.append(connection)

    async def _connected(self) -> Any:
        """A connection that is up, with nothing unread."""
        while self._free:
            connection = self._free.pop()
            if connection.is_connected and not await connection.can_read():
                return connection
            await self._pool.release(connection)
        return await self._pool.get_connection()


class ClusterCarry:
    """Pipelines to the nodes of a cluster. A key of a call says to which node it belongs."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._is_stale = False
        self._refreshing = asyncio.Lock()

    async def __call__(self, calls: list[PipelineCall]) -> None:
        await self._refresh()
        calls_of: dict[str, tuple[Any, list[PipelineCall]]] = {}
        try:
            for call in calls:
                node = self._node(call.commands)
                calls_of.setdefault(node.name, (node, []))[1].append(call)
            # One behind the other: a link serves one run, and a run lives on one node.
            for node, calls_of_node in calls_of.values():
                await self._carry(node, calls_of_node)
        except (ConnectionError, TimeoutError, OSError, SlotNotCoveredError):
            self._is_stale = True
            raise

    async def _refresh(self) -> None:
        """Learn which node holds what: at first, and after a sign that it has changed."""
        await self._client.initialize()
        if self._is_stale:
            async with self._refreshing:
                if self._is_stale:
                    await self._client.nodes_manager.initialize()
                    self._is_stale = False

    def _node(self, commands: Sequence[Command]) -> Any:
        key = _first_key(commands)
        if key is None:
            return self._client.get_primaries()[0]
        return self._client.get_node_from_key(key)

    async def _carry(self, node: Any, calls: list[PipelineCall]) -> None:
        asked: list[tuple[PipelineCall, AskError]] = []
        connection = node.acquire_connection()
        try:
            for call, replies in await _exchange(connection, calls):
                redirection = next(
                    (reply for reply in replies if isinstance(reply, AskError)), None
                )
                if redirection is None:
                    call.settle(replies)
                else:
                    asked.append((call, redirection))
                if any(isinstance(reply, MovedError | ClusterDownError) for reply in replies):
                    self._is_stale = True
        finally:
            node.release(connection)
        for call, redirection in asked:
            await self._ask(call, redirection)

    async def _ask(self, call: PipelineCall, redirection: AskError) -> None:
        """The call at the node to which its keys are on their way."""
        node = self._client.get_node(host=redirection.host, port=redirection.port)
        if node is None:
            self._is_stale = True
            return call.fail(redirection)
        commands = [each for command in call.commands for each in (("ASKING",), command)]
        connection = node.acquire_connection()
        asked = PipelineCall(commands, pack(commands), call.result)
        try:
            ((_, replies),) = await _exchange(connection, [asked])
            call.settle(replies[1::2])
        finally:
            node.release(connection)


async def _exchange(
    connection: Any, calls: list[PipelineCall]
) -> list[tuple[PipelineCall, list[Any]]]:
    """Each call's replies; what Redis refused is among them as an exception.

    A connection whose replies did not all come is closed: the next caller would read them as its
    own.
    """
    if not isinstance(connection._parser, WireParser):  # a cluster makes its connections itself
        connection.set_parser(WireParser)
        if connection.is_connected:
            connection._parser.on_connect(connection)
    if connection.is_connected and await connection.can_read():
        await connection.disconnect(nowait=True)
    if not connection.is_connected:
        await connection.connect()
    packed = [part for call in calls for part in call.packed]
    num_replies = sum(len(call.commands) for call in calls)
    try:
        replies = iter(await connection._parser.exchange(packed, num_replies, SOCKET_TIMEOUT_S))
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return [(call, list(islice(replies, len(call.commands)))) for call in calls]


def _says_read_only(reply: Any) -> bool:
    # A script's error is told in its text alone.
    return isinstance(reply, ResponseError) and (
        isinstance(reply, ReadOnlyError) or "READONLY" in str(reply)
    )


def _first_key(commands: Sequence[Command]) -> str | bytes | int | float | None:
    """("EVALSHA", sha, 1, "leeway:{run}:", ...) -> "leeway:{run}:" """
    for command in commands:
        name = str(command[0]).upper()
        if name in ("EVAL", "EVALSHA"):
            return command[3]
        if name in ("XREAD", "XREADGROUP"):
            return command[command.index("STREAMS") + 1]
        if name not in _KEYLESS and len(command) > 1:
            return command[1]
    return None
