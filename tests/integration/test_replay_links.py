"""What links do when Redis does not do what it should: busy, full, read-only, cut off."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leeway.replay.connection import Link, ScriptSet
from leeway.replay.errors import StoreError, StoreUnavailable
from tests.integration import redis_servers
from tests.integration.redis_servers import KEY, PREFIX, Proxy, Server, linked


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_servers.running(tmp_path_factory.mktemp("server"), "lua-time-limit 100") as running:
        yield running


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small scripts stand where the buffer's would."""
    redis_servers.write_scripts(tmp_path)
    monkeypatch.setattr("leeway.replay.scripts.LUA_FOLDER", tmp_path)


async def test_commands_of_one_call_run_in_order(server):
    async with linked(server.url) as link:
        replies = await link.execute(("SET", KEY, b"1"), ("INCRBY", KEY, 2), ("GET", KEY))
    assert replies == [b"OK", 3, b"3"]


async def test_callers_of_one_turn_share_a_connection_and_get_their_own_replies(server):
    async with linked(server.url) as link:
        ids = await asyncio.gather(
            *(link.execute(("CLIENT", "ID"), ("ECHO", n)) for n in range(64))
        )
    assert [echo for _, echo in ids] == [str(n).encode() for n in range(64)]
    assert len({client_id for client_id, _ in ids}) == 1


async def test_a_refused_command_is_told_to_its_caller_only(server):
    async with linked(server.url) as link:
        bad, good, invalid = await asyncio.gather(
            link.execute(("SET", KEY, "x"), ("INCR", KEY), ("SET", KEY, "ran")),
            link.execute(("GET", KEY)),
            link.execute(("SET", KEY, None)),  # type: ignore[arg-type]
            return_exceptions=True,
        )
    assert isinstance(bad, StoreError) and "not an integer" in str(bad)
    assert isinstance(invalid, StoreError) and "NoneType" in str(invalid)
    assert good == [b"ran"]


async def test_a_command_that_fails_in_a_transaction_is_told(server):
    async with linked(server.url) as link:
        replies = await link.execute(("MULTI",), ("SET", KEY, "x"), ("GET", KEY), ("EXEC",))
        assert replies[-1] == [b"OK", b"x"]
        with pytest.raises(StoreError, match="not an integer"):
            await link.execute(("MULTI",), ("SET", KEY, "x"), ("INCR", KEY), ("EXEC",))


async def test_cancelled_callers_leave_no_replies_behind(server):
    async with linked(server.url) as link:
        for turn in range(20):
            calls = [asyncio.create_task(link.execute(("ECHO", n))) for n in range(64)]
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            replies = await asyncio.gather(*calls, return_exceptions=True)
            assert replies[1::2] == [[str(n).encode()] for n in range(1, 64, 2)]
            assert await link.execute(("ECHO", "mine")) == [b"mine"]


async def test_blocking_reads_do_not_hold_commands_up(server):
    async with linked(server.url) as link:
        read = functools.partial(link.client.xread, {f"{PREFIX}none": "0"}, block=400)
        reads = [asyncio.create_task(link.call(read)) for _ in range(32)]
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await link.execute(("PING",))
        assert time.monotonic() - started < 0.3
        await asyncio.gather(*reads)


async def test_a_closed_link_says_so(server):
    link = Link(server.url)
    spinning = asyncio.create_task(link.execute(("BLPOP", f"{PREFIX}never", 5)))
    await asyncio.sleep(0.1)
    await link.close()
    with pytest.raises(StoreError, match="closed"):
        await spinning
    with pytest.raises(StoreError, match="closed"):
        await link.execute(("PING",))


async def test_a_script_is_sent_once_and_runs_behind_its_commands(server, scripts):
    server.command("SCRIPT", "FLUSH")
    async with linked(server.url) as link:
        put = ScriptSet(link, PREFIX)
        assert await put.run("put", text="one") == b"one"
        stages = await put.run("get", before=[("SET", f"{PREFIX}text", b"staged")])
        assert stages == b"staged"
        server.command("CONFIG", "RESETSTAT")
        assert await put.run("put", text="two") == b"two"
    assert server.command("INFO", "commandstats")["cmdstat_evalsha"]["calls"] == 1
    assert "cmdstat_eval" not in server.command("INFO", "commandstats")


async def test_a_lost_reply_is_asked_for_again(server):
    server.command("DEL", KEY)
    async with (
        Proxy(server.port).open() as proxy,
        linked(f"redis://127.0.0.1:{proxy.port}") as link,
    ):
        await link.execute(("PING",))
        proxy.lose_replies(2)
        replies = await link.execute(("SET", KEY, "once", "NX"), ("GET", KEY))
    assert (proxy.num_lost, replies) == (2, [None, b"once"])


async def test_killed_connections_are_made_again(server):
    is_over = False

    async def work(link: Link, name: str) -> None:
        while not is_over:
            assert await link.execute(("ECHO", name), ("ECHO", "x")) == [name.encode(), b"x"]

    async with linked(server.url) as link:
        workers = [asyncio.create_task(work(link, str(n))) for n in range(16)]
        for _ in range(10):
            await asyncio.to_thread(server.command, "CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.02)
        is_over = True
        await asyncio.gather(*workers)


async def test_a_busy_script_is_waited_for(server, scripts):
    async with linked(server.url) as spinning, linked(server.url) as link:
        spin = asyncio.create_task(ScriptSet(spinning, PREFIX).run("spin"))
        await asyncio.sleep(0.3)  # by now Redis says that it is busy
        setting = asyncio.create_task(link.execute(("SET", KEY, "x")))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.command, "SCRIPT", "KILL")
        assert await setting == [b"OK"]
        with pytest.raises(StoreError, match="killed"):
            await spin


async def test_a_script_that_stays_busy_is_named(server, scripts):
    async with linked(server.url) as spinning, linked(server.url, retry_s=0.2) as link:
        spin = asyncio.create_task(ScriptSet(spinning, PREFIX).run("spin"))
        await asyncio.sleep(0.3)
        with pytest.raises(StoreUnavailable, match="busy with a script"):
            await link.execute(("SET", KEY, "x"))
        await asyncio.to_thread(server.command, "SCRIPT", "KILL")
        with pytest.raises(StoreError, match="killed"):
            await spin


async def test_a_read_only_replica_is_named(tmp_path, scripts):
    with redis_servers.running(tmp_path, "replicaof 127.0.0.1 1") as replica:
        async with linked(replica.url, retry_s=0.2) as link:
            with pytest.raises(StoreUnavailable, match="read-only replica"):
                await link.execute(("SET", KEY, "x"))
            with pytest.raises(StoreUnavailable, match="read-only replica"):
                await ScriptSet(link, PREFIX).run("put", text="x")
            with pytest.raises(StoreUnavailable, match="read-only replica"):
                await link.call(lambda: link.client.set(KEY, "x"))


async def test_a_former_master_is_left_for_the_one_that_took_its_place(tmp_path):
    with redis_servers.running(tmp_path) as old, redis_servers.running(tmp_path) as new:
        proxy = Proxy(old.port)
        async with proxy.open(), linked(f"redis://127.0.0.1:{proxy.port}") as link:
            await link.execute(("SET", KEY, "old"))
            await link.call(lambda: link.client.set(KEY, "older"))
            old.command("REPLICAOF", "127.0.0.1", new.port)
            proxy.lead_to(new.port)
            assert await link.execute(("SET", KEY, "new")) == [b"OK"]
            assert await link.call(lambda: link.client.set(KEY, "newer"))
        assert new.command("GET", KEY) == b"newer"


async def test_a_full_server_is_an_error_at_once(tmp_path, scripts):
    with redis_servers.running(tmp_path, "maxmemory 1", "maxmemory-policy noeviction") as full:
        async with linked(full.url) as link:
            started = time.monotonic()
            with pytest.raises(StoreError, match="raise maxmemory or lower max_groups") as refused:
                await link.execute(("SET", KEY, "x"))
            assert not isinstance(refused.value, StoreUnavailable)
            with pytest.raises(StoreError, match="raise maxmemory or lower max_groups"):
                await ScriptSet(link, PREFIX).run("put", text="x")
            assert time.monotonic() - started < 1.0
