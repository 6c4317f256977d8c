"""Exceptions and URLs of Redis, each with its words; commands of many callers travel together."""

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
    translate,
)
from leeway.replay.errors import ConfigurationError, LeewayError, StoreError, StoreUnavailable
from leeway.replay.keys import board_keys, replay_prefix
from leeway.replay.pipelines import PipelineCall, Pipelines
from leeway.replay.redis_urls import parse_url

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


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("BUSY Redis is busy running a script.", StoreUnavailable, "busy with a script"),
        ("script: -READONLY You can't write", StoreUnavailable, "is a read-only replica"),
        ("script: -OOM used memory > 'maxmemory'", StoreError, "is full"),
        ("script: -NOPERM can't run this command", ConfigurationError, "does not let the user"),
        ("CERTIFICATE_VERIFY_FAILED", ConfigurationError, "name its authority"),
        ("NOREPLICAS Not enough good replicas", StoreUnavailable, "too few replicas"),
        ("UNBLOCKED force unblock", StoreUnavailable, "no longer the master"),
    ],
)
def test_what_only_the_text_tells_is_told_in_words(text, kind, words):
    error = translate(redis.exceptions.ResponseError(text), URL)
    assert type(error) is kind
    assert words in str(error)


def test_a_cluster_that_cannot_be_asked_says_why():
    error = redis.exceptions.RedisClusterException("cannot be connected")
    error.__cause__ = redis.exceptions.ConnectionError("refused")
    assert type(translate(error, URL)) is StoreUnavailable


@pytest.mark.parametrize(
    ("url", "where"),
    [
        (URL, "host:7000"),
        ("rediss://:secret@host", "host:6379"),
        ("redis://user:secret@[::1]:7000/1", "::1:7000"),
        ("unix:///tmp/x.sock", "/tmp/x.sock"),
        ("unix://user:secret@/tmp/x.sock?db=1", "/tmp/x.sock"),
        (
            "redis+sentinel://u:secret@a,b:1/main/0?sentinel_password=secret",
            "a:26379,b:1/main",
        ),
        ("rediss+cluster://u:secret@a:1,b:2", "a:1,b:2"),
        ("redis://u:secret/1@host:7000/0", "the address in replay.url"),
        ("redis://:12?secret@host:7000/0", "the address in replay.url"),
        ("redis://:secret#1@host:7000/0", "the address in replay.url"),
        ("redis://user:secret", "the address in replay.url"),
    ],
)
def test_addresses_never_hold_the_password(url, where):
    assert address(url) == where


def test_a_url_of_sentinels_names_everything():
    url = "redis+sentinel://u:p%40%2F@a,b:1/main/2?sentinel_username=s&sentinel_password=t"
    parsed = parse_url(url)
    assert parsed.hosts == (("a", 26379), ("b", 1))
    assert (parsed.master, parsed.db) == ("main", 2)
    assert parsed.options == {"username": "u", "password": "p@/"}
    assert parsed.sentinel_options == {"username": "s", "password": "t"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.org", "must begin with one of redis://, rediss://"),
        ("redis://", "names no host"),
        ("redis://u:secret@host:port/0", "a port is a number"),
        ("redis://u:secret@host:70000/0", "a port is a number"),
        ("redis://u:secret/1@host/0", "write / ? # and @ inside a user or password as %2F"),
        ("redis://u:secret@host/one", "'one' is not a database number"),
        ("redis://u:secret@host/0/1", "is not a database number"),
        ("redis://u:secret@a:1,b:2/0", "redis+sentinel:// or a redis+cluster://"),
        ("unix://tmp/x.sock", "three slashes"),
        ("redis+sentinel://u:secret@host:1", "need the name of a master"),
        ("redis+cluster://u:secret@host:1/2", "a cluster has no database but 0"),
        ("redis://u:secret@host?socket_timeout=1", "socket_timeout is none of"),
        ("redis://u:secret@host?ssl_ca_certs=/x", "ssl_ca_certs does nothing without TLS"),
        ("rediss://u:secret@host?ssl_ca_certs=/nowhere", "/nowhere is not a file"),
        ("rediss://u:secret@host?ssl_cert_reqs=maybe", "required, optional, none"),
        ("redis://u:secret@host?sentinel_password=secret", "sentinel_password is for"),
    ],
)
def test_a_bad_url_is_refused_in_words(url, words):
    for refuse in (Link, check_url):
        with pytest.raises(ConfigurationError) as refused:
            refuse(url)
        assert words in str(refused.value)
        assert "secret" not in str(refused.value)


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


def test_every_key_stands_under_the_hash_tag_of_its_run():
    assert replay_prefix("first") == "leeway:{first}:"
    assert all(key.startswith("leeway:{first}:") for key in board_keys("first"))


def test_run_names_that_would_break_the_hash_tag_are_refused():
    for name in ("", "a}b", "a b", "x" * 101):
        with pytest.raises(ConfigurationError, match="run name"):
            replay_prefix(name)


class _Carried:
    """Takes the place of Redis: notes each pipeline, answers with the last word of each command."""

    def __init__(self) -> None:
        self.pipelines: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, calls: list[PipelineCall]) -> None:
        self.pipelines.append(sum(len(call.commands) for call in calls))
        await self.may_answer.wait()
        for call in calls:
            call.settle([command[-1] for command in call.commands])


async def test_commands_of_one_turn_travel_together():
    carried = _Carried()
    pipelines = Pipelines(carried)
    calls = [pipelines.submit([("GET", n), ("GET", -n)], [b"x"]) for n in range(5)]
    assert await asyncio.gather(*calls) == [[n, -n] for n in range(5)]
    assert carried.pipelines == [10]


async def test_300_commands_travel_as_256_and_44():
    carried = _Carried()
    pipelines = Pipelines(carried)
    await asyncio.gather(*(pipelines.submit([("GET", n)], [b"x"]) for n in range(300)))
    assert carried.pipelines == [256, 44]


async def test_three_calls_of_a_quarter_mib_travel_as_two_and_one():
    carried = _Carried()
    pipelines = Pipelines(carried)
    await asyncio.gather(*(pipelines.submit([("GET", n)], [bytes(2**18)]) for n in range(3)))
    assert carried.pipelines == [2, 1]


async def test_calls_with_large_replies_travel_alone():
    carried = _Carried()
    pipelines = Pipelines(carried)
    calls = [pipelines.submit([("GET", n)], [b"x"], is_alone=n in {1, 2}) for n in range(5)]
    assert await asyncio.gather(*calls) == [[n] for n in range(5)]
    assert carried.pipelines == [1, 1, 1, 2]


async def test_a_ninth_pipeline_waits_and_takes_all_that_was_asked_for_meanwhile():
    carried = _Carried()
    carried.may_answer.clear()
    pipelines = Pipelines(carried)
    calls: list[asyncio.Future[list[object]]] = []
    for n in range(12):
        calls.append(pipelines.submit([("GET", n)], [b"x"]))
        await asyncio.sleep(0.001)
    assert carried.pipelines == [1] * 8
    carried.may_answer.set()
    assert await asyncio.gather(*calls) == [[n] for n in range(12)]
    assert carried.pipelines == [*[1] * 8, 4]


async def test_a_call_that_is_cancelled_before_it_leaves_is_not_sent():
    carried = _Carried()
    pipelines = Pipelines(carried)
    kept, cancelled = (pipelines.submit([("GET", n)], [b"x"]) for n in range(2))
    cancelled.cancel()
    assert await kept == [0]
    assert carried.pipelines == [1]


async def test_a_closed_queue_tells_everybody():
    carried = _Carried()
    carried.may_answer.clear()
    pipelines = Pipelines(carried)
    sent = pipelines.submit([("GET", 1)], [b"x"])
    await asyncio.sleep(0.001)
    queued = pipelines.submit([("GET", 2)], [b"x"])
    await pipelines.close(StoreError("closed"))
    for call in (sent, queued):
        with pytest.raises(StoreError, match="closed"):
            await call
    with pytest.raises(StoreError, match="closed"):
        pipelines.submit([("GET", 3)], [b"x"])


def test_a_buffer_smaller_than_a_step_is_refused():
    with pytest.raises(ValueError, match="max_groups = 3 must be at least groups_per_step = 4"):
        ReplayConfig(groups_per_step=4, max_groups=3)


def test_a_url_that_cannot_be_split_does_not_show_its_password():
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        parse_url("redis://:secretpw\uff0fx@localhost")
    assert "secretpw" not in str(caught.value)
