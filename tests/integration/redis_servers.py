"""Redis servers of every arrangement, on free ports of loopback, and a proxy that gets in between.

Each ends with its `with` block; only processes that were started here are ended.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import random
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from leeway.replay.connection import Link
from leeway.replay.server import find_server_binary

START_TIMEOUT_S = 20.0
PREFIX = "leeway:{run}:"
KEY = f"{PREFIX}key"
BOUNDS = (0, 5461, 10923, 16384)
"""Node n of a cluster of three holds the slots from BOUNDS[n] on, up to BOUNDS[n + 1]."""
SCRIPTS = {
    "put": 'redis.call("SET", key.text, arg.text)\nreturn redis.call("GET", key.text)',
    "get": 'return redis.call("GET", key.text)',
    "spin": "while true do end",
}


class Server:
    """A running redis-server."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, socket_path: Path, password: str
    ) -> None:
        self._process = process
        self._password = password
        self.port = port
        self.socket_path = socket_path

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def command(self, *words: Any) -> Any:
        """Reply to one command, given as the administrator."""
        path = str(self.socket_path)
        retry = Retry(NoBackoff(), 0)
        with redis.Redis(
            unix_socket_path=path, password=self._password, protocol=2, retry=retry
        ) as client:
            return client.execute_command(*words)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


@contextlib.contextmanager
def running(
    home: Path, *settings: str, password: str = "", port: int = 0, is_sentinel: bool = False
) -> Iterator[Server]:
    """A server with these lines in its configuration, once it answers."""
    port = port or free_port()
    folder = home / str(port)
    folder.mkdir(parents=True)
    short = tempfile.TemporaryDirectory()  # a socket's path has at most 107 bytes
    socket_path = Path(short.name) / "redis.sock"
    lines = (
        "bind 127.0.0.1",
        f"port {port}",
        f'dir "{folder}"',
        f'logfile "{folder / "redis.log"}"',
        f"unixsocket {socket_path}",
        *(() if is_sentinel else ('save ""', "appendonly no", "repl-diskless-sync-delay 0")),
        *([f"requirepass {password}"] if password else []),
        *([f"masterauth {password}"] if password and not is_sentinel else []),
        *settings,
    )
    path = folder / "redis.conf"
    path.write_text("\n".join(lines) + "\n")
    command = [find_server_binary(), str(path), *(["--sentinel"] if is_sentinel else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Server(process, port, socket_path, password)
    try:
        wait_until(lambda: _answers(server), f"redis-server of {folder}")
        yield server
    finally:
        server.kill()
        short.cleanup()


@contextlib.contextmanager
def cluster(home: Path) -> Iterator[list[Server]]:
    """Three masters that share the 16384 slots."""
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                running(
                    home,
                    "cluster-enabled yes",
                    "cluster-node-timeout 2000",
                    port=free_port(and_above=10000),  # where nodes talk to each other
                )
            )
            for _ in range(3)
        ]
        for number, node in enumerate(nodes):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.command("CLUSTER", "ADDSLOTS", *range(BOUNDS[number], BOUNDS[number + 1]))
            node.command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            wait_until(lambda node=node: _is_whole(node), f"the cluster at port {node.port}")
        yield nodes


@contextlib.contextmanager
def sentinel(home: Path, master: str, password: str) -> Iterator[tuple[Server, Server, Server]]:
    """A Sentinel that watches a master with one replica; all three want the password."""
    with (
        running(home, password=password) as first,
        running(home, f"replicaof 127.0.0.1 {first.port}", password=password) as second,
    ):
        # Sentinel asks a master for its replicas at once, and then every 10 s only.
        wait_until(lambda: b"state=online" in _info(first), "the replica")
        with running(
            home,
            f"sentinel monitor {master} 127.0.0.1 {first.port} 1",
            f"sentinel auth-pass {master} {password}",
            f"sentinel down-after-milliseconds {master} 500",
            f"sentinel failover-timeout {master} 3000",
            password=password,
            is_sentinel=True,
        ) as watcher:
            is_seen = functools.partial(watcher.command, "SENTINEL", "REPLICAS", master)
            wait_until(is_seen, "Sentinel to see the replica")
            yield first, second, watcher


def certificate(home: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    files = home / f"{name}.crt", home / f"{name}.key"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
            ),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]),
        ],
        check=True,
        capture_output=True,
    )
    return files


@contextlib.asynccontextmanager
async def linked(url: str, retry_s: float = 20.0) -> AsyncIterator[Link]:
    link = Link(url, retry_s)
    yield link
    await link.close()


def cluster_url(nodes: list[Server]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def node_of(key: str) -> int:
    """Which node of a cluster holds the key, by its hash tag."""
    return bisect.bisect_right(BOUNDS, key_slot(key.encode())) - 1


def write_scripts(folder: Path) -> None:
    """Scripts that put and get `text`, and one that does not end."""
    for name, text in SCRIPTS.items():
        (folder / f"{name}.lua").write_text(text)


class Proxy:
    """Passes bytes on to a server and back, until it is told to lose replies."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = 0
        self.num_connections = 0
        self.num_lost = 0
        self._num_to_lose = 0

    def lose_replies(self, num: int) -> None:
        """Close the connection instead of passing on what the server says next, `num` times."""
        self._num_to_lose = num

    def lead_to(self, port: int) -> None:
        """Serve connections that are made from now on by another server."""
        self._target_port = port

    @contextlib.asynccontextmanager
    async def open(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            await asyncio.gather(
                self._pass_on(reader, to_server), self._pass_on(from_server, writer, is_reply=True)
            )
        except ConnectionError:
            pass
        finally:
            to_server.close()
            writer.close()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_reply: bool = False
    ) -> None:
        while data := await source.read(2**16):
            if is_reply and self._num_to_lose:
                self._num_to_lose -= 1
                self.num_lost += 1
                break
            sink.write(data)
            await sink.drain()
        sink.close()


def free_port(and_above: int = 0) -> int:
    """A port that is free, and the one `and_above` it."""
    for _ in range(1000):
        port = random.randrange(20000, 50000)
        if all(_is_free(each) for each in {port, port + and_above}):
            return port
    raise AssertionError("no free port")


def wait_until(is_done: Callable[[], Any], what: str) -> None:
    """Ask until it says yes. Fails after START_TIMEOUT_S."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_done():
        assert time.monotonic() < deadline, f"waited {START_TIMEOUT_S:g} s for {what}"
        time.sleep(0.05)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(server: Server) -> bool:
    try:
        return bool(server.command("PING"))
    except redis.ConnectionError:
        return False


def _info(server: Server) -> bytes:
    return server.command("EVAL", "return redis.call('INFO', 'replication')", 0)


def _is_whole(node: Server) -> bool:
    told = node.command("CLUSTER INFO")
    return told["cluster_state"] == "ok" and told["cluster_known_nodes"] == "3"
