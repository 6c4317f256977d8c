"""Memory of one process that another one writes into; on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from leeway.replay.errors import TransferError
from leeway.replay.exposed_memory import ExposedMemory, open_memory
from leeway.replay.memory_handle import MemoryHandle, machine

CPU = torch.device("cpu")
ENGINE = """
import sys, msgspec, torch
from leeway.replay.exposed_memory import ExposedMemory
from leeway.replay.memory_handle import machine

memory = ExposedMemory(int(sys.argv[1]), torch.device("cpu"))
print(msgspec.json.encode((memory.handle(), machine())).decode(), flush=True)
for _ in sys.stdin:
    print(memory.flat.tolist(), flush=True)
"""
"""It tells where its memory is, then what is in it whenever it is asked."""


class Other:
    """A process that exposes memory."""

    def __init__(self, num_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def holds(self) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.answer())


@contextmanager
def other(num_bytes: int) -> Iterator[tuple[Other, MemoryHandle]]:
    process = Other(num_bytes)
    try:
        handle, where = msgspec.json.decode(process.answer(), type=tuple[MemoryHandle, str])
        assert where == machine()
        yield process, handle
    finally:
        process.process.kill()
        process.process.communicate(timeout=10)


def test_what_is_written_is_there_in_the_process_whose_memory_it_is():
    with other(5) as (process, handle):
        target = open_memory(handle, CPU)
        assert target.tolist() == [0, 0, 0, 0, 0]
        target.copy_(torch.tensor([1, 2, 3, 4, 255], dtype=torch.uint8))
        assert process.holds() == [1, 2, 3, 4, 255]
        # A learner that starts again opens it once more and finds what is there.
        again = open_memory(handle, CPU)
        assert again.tolist() == [1, 2, 3, 4, 255]
        again[0] = 7
        assert target.tolist() == process.holds() == [7, 2, 3, 4, 255]


def test_a_process_that_is_killed_takes_neither_the_writer_nor_what_was_opened_along():
    with other(4) as (process, handle):
        target = open_memory(handle, CPU)
        process.process.kill()
        process.process.wait(10)
        target.fill_(9)
        assert target.tolist() == [9, 9, 9, 9]
        with pytest.raises(TransferError, match=rf"the memory of process {handle.pid} cannot be"):
            open_memory(handle, CPU)


def test_memory_of_this_process_is_the_tensor_itself():
    memory = ExposedMemory(3, CPU)
    assert open_memory(memory.handle(), CPU) is memory.flat


def test_what_has_the_number_of_a_process_that_is_gone_is_not_taken_for_it(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"of somebody else")
        handle = MemoryHandle(pid=os.getpid(), token="t", num_bytes=16, fd=file.fileno())
        with pytest.raises(TransferError, match=r"/fd/\d+ is something else"):
            open_memory(handle, CPU)


def test_memory_that_is_smaller_than_it_is_said_to_be_is_not_written_to():
    with other(4) as (_, handle):
        larger = msgspec.structs.replace(handle, num_bytes=2**20)
        with pytest.raises(TransferError, match="is smaller than 1048576 bytes"):
            open_memory(larger, CPU)


def test_memory_that_was_given_back_leaves_no_descriptor_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        memory = ExposedMemory(16, CPU)
        open_memory(memory.handle(), CPU)
        del memory
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_handle_travels_as_json():
    handle = MemoryHandle(
        pid=7, token="t", num_bytes=9, cuda=b"\x00\xff", offset=2, counter=b"\x01"
    )
    assert msgspec.json.decode(msgspec.json.encode(handle), type=MemoryHandle) == handle


def test_nothing_may_be_exposed_and_opened():
    assert open_memory(ExposedMemory(0, CPU).handle(), CPU).numel() == 0
