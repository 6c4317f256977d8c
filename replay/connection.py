"""The connection to Redis that everything else uses: retries, pipelines, scripts, exceptions."""

# redis-py leaves its keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import redis
from redis.exceptions import NoScriptError, RedisClusterException
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from leeway.replay.errors import ConfigurationError, LeewayError, StoreError, StoreUnavailable
from leeway.replay.pipelines import MAX_PIPELINES, Command, Pipelines
from leeway.replay.redis_clients import build_carry, build_client, ping
from leeway.replay.redis_urls import address, parse_url
from leeway.replay.scripts import script_source
from leeway.replay.wire import pack

__all__ = [
    "BLOCK_MS",
    "TRANSLATIONS",
    "Command",
    "Link",
    "ScriptSet",
    "address",
    "check_url",
    "stream_entries",
    "translate",
]

T = TypeVar("T")

BLOCK_MS: Final = 5000
"""Longest single blocking read. A longer wait is a row of them."""

MAX_CONNECTIONS: Final = 16
"""Connections of one process to one run for calls and blocking reads; more callers than that take
turns. Pipelines have MAX_PIPELINES of their own, so no blocking read holds one up."""

TRANSLATIONS: Final[Mapping[str, type[LeewayError]]] = {
    "AskError": StoreUnavailable,
    "AuthenticationError": ConfigurationError,
    "AuthenticationWrongNumberOfArgsError": ConfigurationError,
    "AuthorizationError": ConfigurationError,
    "BusyLoadingError": StoreUnavailable,
    "ChildDeadlockedError": StoreError,
    "ClusterCrossSlotError": StoreError,
    "ClusterDownError": StoreUnavailable,
    "ClusterError": StoreUnavailable,
    "ConnectionError": StoreUnavailable,
    "CrossSlotTransactionError": StoreError,
    "DataError": StoreError,
    "ExecAbortError": StoreError,
    "ExternalAuthProviderError": ConfigurationError,
    "IncorrectPolicyType": StoreError,
    "InvalidPipelineStack": StoreError,
    "InvalidResponse": StoreError,
    "LockError": StoreError,
    "LockNotOwnedError": StoreError,
    "MasterDownError": StoreUnavailable,
    "MaxConnectionsError": StoreUnavailable,
    "ModuleError": StoreError,
    "MovedError": StoreUnavailable,
    "NoPermissionError": ConfigurationError,
    "NoScriptError": StoreError,
    "NoSuchFieldsetError": StoreError,
    "OSError": StoreUnavailable,
    "OutOfMemoryError": StoreError,
    "PubSubError": StoreError,
    "ReadOnlyError": StoreUnavailable,
    "RedisClusterException": StoreError,
    "RedisError": StoreError,
    "ResponseError": StoreError,
    "SlotNotCoveredError": StoreUnavailable,
    "TimeoutError": StoreUnavailable,
    "TryAgainError": StoreUnavailable,
    "WatchError": StoreError,
}
"""Exceptions of redis by class name, since their set differs between its versions. A test walks
redis.exceptions. What maps to StoreUnavailable is retried first."""

_OUTSIDE: Final = (redis.RedisError, RedisClusterException, OSError)

_IN_WORDS: Final[Mapping[str, tuple[type[LeewayError], str]]] = {
    "CERTIFICATE_VERIFY_FAILED": (
        ConfigurationError,
        "the certificate of Redis at {where} is not trusted: {error}; name its authority by "
        "?ssl_ca_certs=FILE in replay.url",
    ),
    r"BUSY \w+ is busy": (
        StoreUnavailable,
        "Redis at {where} is busy with a script that does not end: {error}",
    ),
    "ReadOnlyError|READONLY": (
        StoreUnavailable,
        "Redis at {where} is a read-only replica: {error}; replay.url must lead to the master",
    ),
    "OutOfMemoryError|maxmemory": (
        StoreError,
        "Redis at {where} is full: {error}; raise maxmemory or lower max_groups",
    ),
    "NoPermissionError|NOPERM|ACL failure in script|user executing the script can't": (
        ConfigurationError,
        "Redis at {where} does not let the user in replay.url do this: {error}",
    ),
    "Cluster mode is not enabled": (
        ConfigurationError,
        "no Redis Cluster at {where}: {error}; write redis:// for a single server",
    ),
    "All slots are not covered|could not agree on": (
        StoreUnavailable,
        "the Redis cluster at {where} is not whole: {error}",
    ),
    "NOREPLICAS": (StoreUnavailable, "Redis at {where} has too few replicas to write: {error}"),
    "UNBLOCKED": (StoreUnavailable, "Redis at {where} is no longer the master: {error}"),
    "ClusterDownError|CLUSTERDOWN": (
        StoreUnavailable,
        "the Redis cluster at {where} is down: {error}",
    ),
}
"""What is told by class or text, since redis has no class for it or a script's error hides it."""


def translate(error: BaseException, url: str) -> LeewayError:
    """Our exception for one of redis; the nearest class of its ancestry decides."""
    if isinstance(error, RedisClusterException) and isinstance(error.__cause__, _OUTSIDE):
        return translate(error.__cause__, url)  # why no node could be asked for its slots
    where = address(url)
    for pattern, (kind, words) in _IN_WORDS.items():
        if re.search(pattern, f"{type(error).__name__} {error}"):
            return kind(words.format(where=where, error=error))
    kinds = (TRANSLATIONS.get(cls.__name__) for cls in type(error).__mro__)
    kind = next((kind for kind in kinds if kind), StoreError)
    if kind is StoreUnavailable:
        return kind(f"no answer from Redis at {where}: {error}; is it running and reachable?")
    if kind is ConfigurationError:
        return kind(f"Redis at {where} refuses the user or password in replay.url: {error}")
    return kind(f"Redis at {where}: {type(error).__name__}: {error}")


def check_url(url: str) -> None:
    """Ask the server for an answer within 3 s; raise ConfigurationError if there is none."""
    parsed = parse_url(url)
    try:
        ping(parsed)
    except _OUTSIDE as error:
        raise ConfigurationError(str(translate(error, url))) from error


class Link:
    """Connections to one Redis, for one event loop. What fails is repeated for `retry_s`.

    `execute` is for commands, `call` for the client of the library and for reads that block.
    """

    def __init__(self, url: str, retry_s: float = 30.0) -> None:
        """Connects when first used. Raises ConfigurationError for what is not a Redis URL."""
        self.url = url
        self._retry_s = retry_s
        parsed = parse_url(url)
        # Any: the library types every reply as the union of sync, async, bytes and str.
        self.client: Any = build_client(parsed, MAX_CONNECTIONS)
        # A cluster's nodes have no bound that blocking reads could use up.
        is_cluster = parsed.kind == "cluster"
        self._carrier: Any = (
            self.client if is_cluster else build_client(parsed, MAX_PIPELINES, carries=True)
        )
        self._pipelines = Pipelines(build_carry(self._carrier))

    async def execute(self, *commands: Command, is_alone: bool = False) -> list[Any]:
        """Replies of the commands, run one behind another on one connection.

        What is executed in the same turn of the event loop travels as one pipeline, but for what
        `is_alone`, since its replies are large. Replies come as Redis sends them: bytes, int, list
        or None; a large one of GET is a memoryview of its bytes. Raises the error of the first
        command that Redis refuses; those behind it have run all the same.

        On a cluster the keys of one call lie in one slot. While Redis gives no answer the commands
        are sent again, until `retry_s` have passed. They may have run already, so they must be
        harmless to repeat.
        """
        try:
            packed = pack(commands)
        except redis.DataError as error:
            raise translate(error, self.url) from error
        try:
            return await self._pipelines.submit(commands, packed, is_alone)
        except _OUTSIDE as error:
            if not self._is_worth_retrying(error):
                raise translate(error, self.url) from error
        return await self._call_again(lambda: self._pipelines.submit(commands, packed, is_alone))

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run `operation`, again while Redis gives no answer, until `retry_s` have passed.

        It may have run already when its reply was lost, so it must be harmless to repeat.
        """
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task else 0
        result = await self._call(operation)
        # redis sends with asyncio.wait_for, which in Python 3.11 can lose a cancellation; the
        # caller's loop would go on for ever. So it ends with this call, BLOCK_MS later at most.
        if task and task.cancelling() > num_cancels:
            raise asyncio.CancelledError
        return result

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T:
        try:
            return await operation()
        except _OUTSIDE as error:
            if not self._is_worth_retrying(error):
                raise translate(error, self.url) from error
            if isinstance(error, redis.ReadOnlyError):
                await self._disconnect_idle()
        return await self._call_again(operation)

    async def _call_again(self, operation: Callable[[], Awaitable[T]]) -> T:
        attempts = AsyncRetrying(
            retry=retry_if_exception(self._is_worth_retrying),
            stop=stop_after_delay(self._retry_s),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )

        async def attempt() -> T:  # tenacity awaits coroutine functions only
            try:
                return await operation()
            except redis.ReadOnlyError:
                await self._disconnect_idle()
                raise

        try:
            return await attempts(attempt)
        except _OUTSIDE as error:
            raise translate(error, self.url) from error

    async def close(self) -> None:
        """Close every connection. Callers of `execute` get StoreError."""
        await self._pipelines.close(StoreError(f"the link to Redis at {address(self.url)} closed"))
        if self._carrier is not self.client:
            await self._carrier.aclose()
        await self.client.aclose()

    async def _disconnect_idle(self) -> None:
        """A master once, a replica now: only a new connection can lead to the new master."""
        pool = getattr(self.client, "connection_pool", None)  # a cluster's client asks again itself
        if pool is not None:
            await pool.disconnect(inuse_connections=False)

    def _is_worth_retrying(self, error: BaseException) -> bool:
        return isinstance(error, _OUTSIDE) and isinstance(
            translate(error, self.url), StoreUnavailable
        )


class ScriptSet:
    """The Lua scripts of one set of keys. `run("drop", id="x")` sends one atomic script.

    Keys by name, or a prefix such as "leeway:{run}:", to which scripts add names. A prefix ends in
    a hash tag, so that every key of a script lies where the prefix does.
    """

    def __init__(self, link: Link, keys: NamedTuple | str, is_of_buffer: bool = False) -> None:
        """`is_of_buffer`: each stands behind what scripts of the buffer start with."""
        self._link = link
        self._is_of_buffer = is_of_buffer
        self._keys: tuple[str, ...] = (keys,) if isinstance(keys, str) else tuple(keys)
        self._fields = None if isinstance(keys, str) else keys._fields
        self._scripts: dict[str, tuple[str, str]] = {}

    async def run(
        self,
        name: str,
        /,
        *,
        before: Sequence[Command] = (),
        limits: bytes | None = None,
        **arguments: object,
    ) -> Any:
        """Run lua/`name`.lua with named arguments, behind the commands `before`; its reply.

        Arguments are numbers, text, lists and maps; the msgpack of Redis cannot read bytes, so
        `limits` travel beside them. All of it is sent again as `Link.execute` does, so it must be
        harmless to repeat.
        """
        source, sha = self._script(name)
        words = (len(self._keys), *self._keys, msgspec.msgpack.encode(arguments))
        tail = words if limits is None else (*words, limits)
        try:
            replies = await self._link.execute(*before, ("EVALSHA", sha, *tail))
        except StoreError as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
            replies = await self._link.execute(*before, ("EVAL", source, *tail))
        return replies[-1]

    def _script(self, name: str) -> tuple[str, str]:
        """Text and SHA-1, by which Redis knows a script that it has run before."""
        if name not in self._scripts:
            source = script_source(name, self._fields, self._is_of_buffer)
            self._scripts[name] = source, hashlib.sha1(source.encode()).hexdigest()
        return self._scripts[name]


def stream_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries of an XREAD of one stream; none when it timed out."""
    return reply[0][1] if reply else []
