"""Links to Redis in every arrangement: socket, limited user, TLS, Sentinel, cluster."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from leeway.replay.board import EngineRecord, PolicyBoard, RunBoard
from leeway.replay.connection import ScriptSet, check_url
from leeway.replay.errors import ConfigurationError, StoreUnavailable
from leeway.replay.keys import replay_prefix
from leeway.replay.redis_acl import user_line
from leeway.replay.schema import PolicyVersion
from leeway.replay.wakeups import Wakeups
from tests.integration import redis_servers
from tests.integration.buffer_life import live
from tests.integration.redis_servers import KEY, PREFIX, Proxy, Server, cluster_url, linked, node_of

PASSWORD = "a-password-of-the-tests"


def set_user(server: Server, *, is_cluster: bool = False) -> None:
    """What redis.conf would say, said to a server that runs."""
    server.command("ACL", "SETUSER", *user_line(PASSWORD, is_cluster=is_cluster).split()[1:])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_servers.running(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small scripts stand where the buffer's would."""
    redis_servers.write_scripts(tmp_path)
    monkeypatch.setattr("leeway.replay.scripts.LUA_FOLDER", tmp_path)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with redis_servers.cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def limited_url(server: Server) -> str:
    set_user(server)
    return f"redis://leeway:{PASSWORD}@127.0.0.1:{server.port}/0?client_name=tested"


async def test_a_socket_with_a_password(tmp_path, scripts):
    with redis_servers.running(tmp_path, password="a/b@c") as server:
        url = f"unix://:a%2Fb%40c@{server.socket_path}?db=3"
        await asyncio.to_thread(check_url, url)
        async with linked(url) as link:
            assert await ScriptSet(link, PREFIX).run("put", text="x") == b"x"
        with pytest.raises(ConfigurationError, match="refuses the user or password"):
            check_url(f"unix://{server.socket_path}")


async def test_a_buffer_lives_behind_a_socket_with_a_password(tmp_path):
    with redis_servers.running(tmp_path, password="a/b@c") as server:
        await live(f"unix://:a%2Fb%40c@{server.socket_path}?db=3")
        assert int(server.command("DBSIZE")) == 0, "all of it lies in database 3"


async def test_a_buffer_lives_with_a_password(tmp_path):
    with redis_servers.running(tmp_path, password="secret") as server:
        await live(server.url)
        with pytest.raises(ConfigurationError, match="refuses the user or password"):
            await live(server.url.replace("secret", "wrong"))


async def test_a_buffer_lives_with_the_rights_of_the_rule(limited_url: str):
    await live(limited_url)


async def test_the_boards_need_no_more_than_the_rule(limited_url: str):
    await asyncio.to_thread(check_url, limited_url)
    await use_boards(limited_url)


async def test_a_limited_user_reaches_the_keys_of_leeway_only(limited_url, scripts):
    async with linked(limited_url) as link:
        assert await ScriptSet(link, PREFIX).run("put", text="x") == b"x"
        assert (await link.execute(("MULTI",), ("SET", KEY, "x"), ("EXEC",)))[-1] == [b"OK"]
        for refused in (
            ("SET", "other", "x"),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("CONFIG", "GET", "*"),
            ("DEBUG", "SLEEP", "0"),
            ("ACL", "LIST"),
            ("CLIENT", "LIST"),
            ("SCRIPT", "FLUSH"),
            ("BGREWRITEAOF",),
            ("REPLICAOF", "127.0.0.1", "1"),
            ("SHUTDOWN", "NOSAVE"),
            ("MONITOR",),
            ("PUBLISH", "leeway:x", "x"),
            ("GET", "other"),
            ("MEMORY", "USAGE", "other"),
            ("EVAL", "return redis.call('GET', 'other')", 0),
            ("EVAL", "return redis.call('FLUSHALL')", 0),
        ):
            with pytest.raises(ConfigurationError, match="does not let the user"):
                await link.execute(refused)
        with pytest.raises(ConfigurationError, match="does not let the user"):
            await ScriptSet(link, "other:").run("put", text="x")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
async def test_tls_trusts_the_named_authority_only(server, tmp_path):
    (file, key), (other, _) = (
        redis_servers.certificate(tmp_path, name) for name in ("ours", "other")
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(file, key)
    async with Proxy(server.port).open(tls) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0"
        await asyncio.to_thread(check_url, f"{url}?ssl_ca_certs={file}")
        for accepted in (f"?ssl_ca_certs={file}", "?ssl_cert_reqs=none"):
            async with linked(url + accepted) as link:
                assert await link.execute(("ECHO", "x")) == [b"x"]
        for refused in ("", f"?ssl_ca_certs={other}"):
            async with linked(url + refused) as link:
                with pytest.raises(ConfigurationError, match=r"not trusted.*ssl_ca_certs=FILE"):
                    await link.execute(("ECHO", "x"))
            with pytest.raises(ConfigurationError, match="not trusted"):
                await asyncio.to_thread(check_url, url + refused)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
async def test_a_buffer_lives_behind_tls(server, tmp_path):
    file, key = redis_servers.certificate(tmp_path, "ours")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(file, key)
    async with Proxy(server.port).open(tls) as proxy:
        await live(f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={file}")
        assert proxy.num_connections > 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
async def test_a_server_may_ask_for_the_client_s_certificate(server, tmp_path):
    (file, key), (mine, my_key) = (
        redis_servers.certificate(tmp_path, name) for name in ("its", "mine")
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(mine))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(file, key)
    async with Proxy(server.port).open(tls) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={file}"
        async with linked(f"{url}&ssl_certfile={mine}&ssl_keyfile={my_key}") as link:
            assert await link.execute(("ECHO", "x")) == [b"x"]
        async with linked(url, retry_s=0.1) as link:
            with pytest.raises(StoreUnavailable):
                await link.execute(("ECHO", "x"))


async def test_sentinel_leads_to_the_master_and_to_the_one_after_it(tmp_path, scripts):
    with redis_servers.sentinel(tmp_path, "main", "secret") as (first, second, watcher):
        place = f"redis+sentinel://:secret@127.0.0.1:{watcher.port}"
        url = f"{place}/main/0?sentinel_password=secret"
        await asyncio.to_thread(check_url, url)
        with pytest.raises(ConfigurationError, match="No master found for 'other'"):
            await asyncio.to_thread(check_url, url.replace("/main/", "/other/"))
        async with linked(url) as link:
            wakeups = Wakeups(link, f"{PREFIX}stream")
            await link.execute(("SET", KEY, "first"), ("WAIT", 1, 2000))
            waiting = asyncio.create_task(wakeups.wait(wakeups.heard, 15.0))
            await asyncio.sleep(0.1)
            first.kill()
            assert await link.execute(("SET", KEY, "second")) == [b"OK"]
            assert await ScriptSet(link, PREFIX).run("put", text="x") == b"x"
            assert await link.call(lambda: link.client.get(KEY)) == b"second"
            await link.execute(("XADD", f"{PREFIX}stream", "*", "a", "b"))
            await waiting
            assert wakeups.heard != "0-0"
            await wakeups.close()
        assert second.command("GET", KEY) == b"second"


async def test_a_buffer_behind_sentinel_outlives_its_master(tmp_path):
    with redis_servers.sentinel(tmp_path, "main", "secret") as (first, second, watcher):
        place = f"redis+sentinel://:secret@127.0.0.1:{watcher.port}"
        url = f"{place}/main/0?sentinel_password=secret"

        async def lose_the_master() -> None:
            async with linked(url) as link:  # what the replica has not, nobody gives back
                await link.execute(("SET", KEY, "x"), ("WAIT", 1, 5000))
            first.kill()

        await live(url, lose_the_master)
        assert int(second.command("DBSIZE")) > 1


async def test_a_cluster_runs_each_call_where_its_keys_lie(cluster, scripts):
    url = cluster_url(cluster)
    await asyncio.to_thread(check_url, url)
    async with linked(url) as link:
        prefixes = [f"leeway:{{{run}}}:" for run in range(32)]
        replies = await asyncio.gather(
            *(ScriptSet(link, prefix).run("put", text=prefix) for prefix in prefixes)
        )
        assert replies == [prefix.encode() for prefix in prefixes]
        assert await link.execute(("SET", KEY, "1"), ("GET", KEY)) == [b"OK", b"1"]
        wakeups = Wakeups(link, f"{PREFIX}stream")
        waiting = asyncio.create_task(wakeups.wait(wakeups.heard, 10.0))
        await link.execute(("XADD", f"{PREFIX}stream", "*", "a", "b"))
        await waiting
        await wakeups.close()
    assert all(node.command("DBSIZE") > 3 for node in cluster)


async def test_the_boards_work_on_a_cluster(cluster):
    await use_boards(cluster_url(cluster))


async def test_a_limited_user_of_a_cluster_may_ask_for_slots_and_commands_too(cluster, scripts):
    for node in cluster:
        set_user(node, is_cluster=True)
    url = cluster_url(cluster).replace("://", f"://leeway:{PASSWORD}@")
    await asyncio.to_thread(check_url, url)
    async with linked(url) as link:
        assert await ScriptSet(link, PREFIX).run("put", text="x") == b"x"
        assert await link.call(lambda: link.client.xread({f"{PREFIX}none": "0"}, block=1)) == []


async def test_a_buffer_lives_with_the_rights_of_the_rule_on_a_cluster(cluster):
    for node in cluster:
        set_user(node, is_cluster=True)
    url = cluster_url(cluster).replace("://", f"://leeway:{PASSWORD}@")
    for run in _one_run_a_node():
        await live(url, run=run)


async def test_a_cluster_may_be_reached_by_a_node_that_lives(cluster):
    async with linked(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster[2].port}") as link:
        assert await link.execute(("SET", KEY, "x")) == [b"OK"]


async def test_a_slot_that_moves_is_followed(cluster):
    source = next(node for node in cluster if _holds(node, KEY))
    target = next(node for node in cluster if node is not source)
    slot = source.command("CLUSTER", "KEYSLOT", KEY)
    async with linked(cluster_url(cluster)) as link:
        await link.execute(("SET", KEY, "stays"))
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", _node_id(source))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", _node_id(target))
        # The slot's new keys are made at the target, though it is the source's still.
        fresh = f"{PREFIX}fresh"
        assert await link.execute(("SET", fresh, "x"), ("GET", fresh)) == [b"OK", b"x"]
        while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", _node_id(target))
        assert await link.execute(("GET", KEY), ("GET", fresh)) == [b"stays", b"x"]


async def test_a_single_server_is_no_cluster(server):
    with pytest.raises(ConfigurationError, match="Cluster mode is not enabled"):
        await asyncio.to_thread(check_url, f"redis+cluster://127.0.0.1:{server.port}")
    async with linked(f"redis+cluster://127.0.0.1:{server.port}") as link:
        with pytest.raises(ConfigurationError, match="Cluster mode is not enabled"):
            await link.execute(("PING",))


async def use_boards(url: str) -> None:
    """What the processes of a run do with the boards."""
    run, policies = RunBoard(url, "run"), PolicyBoard(url, "run")
    await run.clear_stop()
    await run.set_phase("training")
    assert await run.wait_phase("training", 5.0) == "training"
    await run.put("learner", {"step": 1})
    assert (await run.get_all())["learner"]["step"] == 1
    await run.append_event("kind", "text")
    assert (await run.events())[-1].text == "text"
    await run.request_stop("enough")
    assert await run.wait_stop(5.0) == "enough"
    await policies.heartbeat(
        EngineRecord(engine_id="e", num_ranks=1, dtype="float32", gpus=[], version=3, address="a"),
        ttl_s=30,
    )
    assert await policies.oldest_version() == PolicyVersion(3)
    assert await policies.next_announcement(0, 0.01) is None
    await policies.withdraw("e")
    assert await policies.engines() == []
    await run.close()
    await policies.close()


def _one_run_a_node() -> list[str]:
    """Names of three runs, each of which another node holds."""
    of_node = dict[int, str]()
    while len(of_node) < 3:
        name = f"life-{uuid.uuid4().hex}"
        of_node[node_of(replay_prefix(name))] = name
    return list(of_node.values())


def _holds(node: Server, key: str) -> bool:
    slot = node.command("CLUSTER", "KEYSLOT", key)
    ranges = next(line.split()[8:] for line in _nodes(node) if b"myself" in line)
    bounds = [tuple(map(int, each.split(b"-"))) for each in ranges if not each.startswith(b"[")]
    return any(bound[0] <= slot <= bound[-1] for bound in bounds)


def _node_id(node: Server) -> str:
    return node.command("CLUSTER", "MYID").decode()


def _nodes(node: Server) -> list[bytes]:
    return node.command("EVAL", "return redis.call('CLUSTER', 'NODES')", 0).splitlines()
