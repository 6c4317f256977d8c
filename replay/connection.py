"""The one place that talks to the redis library: connections, retries, scripts, exceptions."""

# redis-py leaves its keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from leeway.replay.errors import ConfigurationError, LeewayError, StoreError, StoreUnavailable

T = TypeVar("T")

SOCKET_TIMEOUT_S: Final = 10.0
"""Longest silence of a connection before it counts as lost; longer than any blocking read."""

BLOCK_MS: Final = 5000
"""Longest single blocking read. A longer wait is a row of them."""

MAX_CONNECTIONS: Final = 16
"""Connections of one process to one run. More callers than that take turns."""

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


def translate(error: BaseException, url: str) -> LeewayError:
    """Our exception for one of redis; the nearest class of its ancestry decides."""
    kinds = (TRANSLATIONS.get(cls.__name__) for cls in type(error).__mro__)
    kind = next((kind for kind in kinds if kind), StoreError)
    where = address(url)
    if kind is StoreUnavailable:
        return kind(f"no answer from Redis at {where}: {error}; is it running and reachable?")
    if kind is ConfigurationError:
        return kind(f"Redis at {where} refuses the user or password in replay.url: {error}")
    if "maxmemory" in str(error):
        return kind(f"Redis at {where} is full: {error}; raise maxmemory or lower max_groups")
    return kind(f"Redis at {where}: {type(error).__name__}: {error}")


def address(url: str) -> str:
    """The address of a Redis URL without its password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path


def check_url(url: str) -> None:
    """Ping the server within 3 s; raise ConfigurationError if it does not answer."""
    try:
        with redis.Redis.from_url(
            url,
            socket_timeout=3.0,
            socket_connect_timeout=3.0,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        ) as client:
            client.ping()
    except ValueError as error:
        raise ConfigurationError(f"replay.url is not a Redis URL: {error}") from error
    except _OUTSIDE as error:
        raise ConfigurationError(str(translate(error, url))) from error


class Link:
    """A connection pool to one server, for one event loop. Calls are retried for `retry_s`."""

    def __init__(self, url: str, retry_s: float = 30.0) -> None:
        self.url = url
        self._retry_s = retry_s
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=SOCKET_TIMEOUT_S,
                socket_timeout=SOCKET_TIMEOUT_S,
                socket_connect_timeout=3.0,
                health_check_interval=30,
                retry=AsyncRetry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise ConfigurationError(f"replay.url is not a Redis URL: {error}") from error
        # Any: the library types every reply as the union of sync, async, bytes and str.
        self.client: Any = redis.asyncio.Redis.from_pool(pool)

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
        return await self._call_again(operation)

    async def _call_again(self, operation: Callable[[], Awaitable[T]]) -> T:
        attempts = AsyncRetrying(
            retry=retry_if_exception(self._is_worth_retrying),
            stop=stop_after_delay(self._retry_s),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )

        async def attempt() -> T:  # tenacity awaits coroutine functions only
            return await operation()

        try:
            return await attempts(attempt)
        except _OUTSIDE as error:
            raise translate(error, self.url) from error

    async def close(self) -> None:
        """Close every connection."""
        await self.client.aclose()

    def _is_worth_retrying(self, error: BaseException) -> bool:
        return isinstance(error, _OUTSIDE) and isinstance(
            translate(error, self.url), StoreUnavailable
        )


class ScriptSet:
    """The Lua scripts of one set of keys. `run("add", payload, id="x")` sends one atomic script."""

    def __init__(self, link: Link, keys: NamedTuple, prelude: Sequence[str]) -> None:
        self._link = link
        self._keys = keys
        self._prelude = tuple(prelude)
        self._scripts: dict[str, Any] = {}

    async def run(self, name: str, payload: bytes = b"", /, **arguments: object) -> Any:
        """Run lua/`name`.lua with named arguments, `payload` as ARGV[2]."""
        script = self._scripts.get(name)
        if script is None:
            source = script_source(name, self._keys._fields, self._prelude)
            script = self._scripts[name] = self._link.client.register_script(source)
        packed = msgspec.msgpack.encode(arguments)
        return await self._link.call(lambda: script(keys=self._keys, args=(packed, payload)))


@functools.cache
def script_source(name: str, fields: tuple[str, ...], prelude: tuple[str, ...]) -> str:
    """lua/`name`.lua behind its prelude, with `key` and `arg` defined.

    ("slots", "ready") begins with: local key = {slots = KEYS[1], ready = KEYS[2]}
    """
    keys = ", ".join(f"{field} = KEYS[{i}]" for i, field in enumerate(fields, start=1))
    header = f"local key = {{{keys}}}\nlocal arg = cmsgpack.unpack(ARGV[1])\n"
    return header + "\n".join(lua_text(part) for part in (*prelude, name))


def lua_text(name: str) -> str:
    """The text of lua/`name`.lua.

    By path: importlib.resources cannot open a namespace package of an editable install.
    """
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def stream_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries of an XREAD of one stream; none when it timed out."""
    return reply[0][1] if reply else []
