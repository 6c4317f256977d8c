"""Every exception of redis has one of ours."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import redis
import redis.exceptions

from leeway.replay.config import ReplayConfig
from leeway.replay.connection import (
    TRANSLATIONS,
    Link,
    address,
    check_url,
    script_source,
    translate,
)
from leeway.replay.errors import ConfigurationError, LeewayError, StoreError, StoreUnavailable
from leeway.replay.keys import ReplayKeys, board_keys, replay_keys

URL = "redis://user:secret@host:7000/0"
REDIS_EXCEPTIONS = [
    cls
    for _, cls in inspect.getmembers(redis.exceptions, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == "redis.exceptions"
]


@pytest.mark.parametrize("cls", REDIS_EXCEPTIONS, ids=lambda cls: cls.__name__)
def test_every_exception_of_redis_is_mapped(cls):
    assert cls.__name__ in TRANSLATIONS
    error = translate(cls.__new__(cls), URL)
    assert isinstance(error, LeewayError)
    assert "host:7000" in str(error)
    assert "secret" not in str(error)


def test_a_subclass_of_the_future_follows_its_parent():
    class NewKindOfError(redis.exceptions.ResponseError):
        pass

    assert type(translate(NewKindOfError("x"), URL)) is StoreError


def test_a_full_server_says_what_to_change():
    error = redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'")
    assert "raise maxmemory or lower max_groups" in str(translate(error, URL))


def test_addresses_never_hold_the_password():
    assert address(URL) == "host:7000"
    assert address("unix:///tmp/x.sock") == "/tmp/x.sock"


async def test_calls_are_retried_until_the_server_answers():
    link = Link(URL, retry_s=5.0)
    failures = [redis.exceptions.ConnectionError("gone"), redis.exceptions.BusyLoadingError("wait")]

    async def operation() -> str:
        if failures:
            raise failures.pop()
        return "ok"

    assert await link.call(operation) == "ok"


async def test_calls_stop_being_retried_at_the_deadline():
    link = Link(URL, retry_s=0.3)

    async def operation() -> None:
        raise redis.exceptions.ConnectionError("gone")

    started = asyncio.get_running_loop().time()
    with pytest.raises(StoreUnavailable, match="no answer from Redis at host:7000"):
        await link.call(operation)
    assert asyncio.get_running_loop().time() - started < 2.0


async def test_a_wrong_password_is_not_retried():
    tries = 0

    async def operation() -> None:
        nonlocal tries
        tries += 1
        raise redis.exceptions.AuthenticationError("WRONGPASS")

    with pytest.raises(ConfigurationError):
        await Link(URL).call(operation)
    assert tries == 1


def test_check_url_says_in_one_sentence_that_nobody_listens():
    with pytest.raises(ConfigurationError, match=r"no answer from Redis at 127\.0\.0\.1:1"):
        check_url("redis://127.0.0.1:1/0")


def test_check_url_refuses_what_is_not_a_redis_url():
    with pytest.raises(ConfigurationError, match="not a Redis URL"):
        check_url("http://example.org")


def test_every_key_stands_under_the_hash_tag_of_its_run():
    keys = [*replay_keys("first"), *board_keys("first")]
    assert all(key.startswith("leeway:{first}:") for key in keys)
    assert len(set(keys)) == len(keys) - 1  # the board shares `room` with the buffer


def test_run_names_that_would_break_the_hash_tag_are_refused():
    for name in ("", "a}b", "a b", "x" * 101):
        with pytest.raises(ConfigurationError, match="run name"):
            replay_keys(name)


def test_scripts_see_their_keys_by_name():
    source = script_source("drop", ReplayKeys._fields, ("base",))
    assert source.startswith("local key = {state = KEYS[1], dropped = KEYS[2], slots = KEYS[3]")


def test_a_buffer_smaller_than_a_step_is_refused():
    with pytest.raises(ValueError, match="max_groups = 3 must be at least groups_per_step = 4"):
        ReplayConfig(groups_per_step=4, max_groups=3)
