"""Calls into a worker's process beside its engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from leeway.actors import side_channel
from leeway.actors.side_channel import SideChannel, call
from leeway.replay.errors import TransferError


def test_a_call_brings_what_the_function_returns():
    channel = SideChannel({"add": lambda a, b: a + b, "none": lambda: None})
    assert call(channel.address, "add", 2, 3) == 5
    assert call(channel.address, "none") is None
    assert call(channel.address, "add", [1], ["b" * 200_000]) == [1, "b" * 200_000]


def test_what_goes_wrong_there_is_an_error_here():
    def fail() -> None:
        raise ValueError("the buffer is gone")

    channel = SideChannel({"fail": fail, "odd": object})
    with pytest.raises(TransferError, match="the buffer is gone"):
        call(channel.address, "fail")
    with pytest.raises(TransferError, match="there is no call other"):
        call(channel.address, "other")
    with pytest.raises(TransferError):
        call(channel.address, "odd")  # msgpack knows no such value


def test_who_hangs_and_who_is_gone_is_told_within_the_deadline(monkeypatch: pytest.MonkeyPatch):
    may_end = threading.Event()
    channel = SideChannel({"hang": may_end.wait})
    began = time.monotonic()
    with pytest.raises(TransferError, match="did not answer hang"):
        call(channel.address, "hang", timeout_s=0.2)
    assert time.monotonic() - began < 30
    may_end.set()
    with pytest.raises(TransferError, match="did not answer hang"):
        call("leeway-nobody", "hang")


def test_who_connects_and_says_nothing_or_nonsense_does_not_stop_the_channel(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(side_channel, "READ_S", 0.2)
    channel = SideChannel({"ping": lambda: "pong"})
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.connect(f"\0{channel.address}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as loud:
        loud.connect(f"\0{channel.address}")
        loud.sendall(b"\xc1nonsense")
        loud.shutdown(socket.SHUT_WR)
        assert b"error" in loud.recv(65_536)
    assert call(channel.address, "ping") == "pong"
    silent.close()


def test_another_user_is_not_listened_to(monkeypatch: pytest.MonkeyPatch):
    called: list[int] = []
    channel = SideChannel({"ping": lambda: called.append(1)})
    monkeypatch.setattr(side_channel, "_user_of", lambda _: os.getuid() + 1)
    with pytest.raises(TransferError, match="did not answer"):
        call(channel.address, "ping")
    assert called == []


def test_nothing_is_left_of_a_process_that_is_killed():
    program = (
        "import time\nfrom leeway.actors.side_channel import SideChannel\n"
        "print(SideChannel({'ping': lambda: 1}).address, flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert call(address, "ping") == 1
    process.kill()
    process.wait(60)
    with open("/proc/net/unix", encoding="ascii") as sockets:
        assert address not in sockets.read()
    with pytest.raises(TransferError, match="did not answer"):
        call(address, "ping")
