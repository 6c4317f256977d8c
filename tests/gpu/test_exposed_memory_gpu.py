"""Memory of one GPU process that another one writes into, from another device and from the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]

from leeway.replay.errors import TransferError  # noqa: E402
from leeway.replay.exposed_memory import ExposedMemory, open_memory  # noqa: E402
from leeway.replay.memory_handle import MemoryHandle  # noqa: E402

NUM_BYTES = 256 * 2**20
DEVICE = torch.device("cuda", 0)
ANSWER_S = 60.0


def expose(end: Connection) -> None:
    """An engine: tells where its memory is, then what is in it whenever it is asked."""
    memory = ExposedMemory(NUM_BYTES, torch.device("cuda", 0))
    end.send(memory.handle())
    while end.recv():
        end.send(int(memory.flat.sum(dtype=torch.int64)))


class Exposing:
    """Its process, which sees one device alone."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.end, far = context.Pipe()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        try:
            self.process = context.Process(target=expose, args=(far,), daemon=True)
            self.process.start()
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        far.close()

    def ask(self) -> int:
        self.end.send(True)
        return self.answer()

    def answer(self):
        assert self.end.poll(ANSWER_S), "the process that exposes its memory does not answer"
        return self.end.recv()


@contextmanager
def exposing(device: str) -> Iterator[tuple[Exposing, MemoryHandle]]:
    other = Exposing(device)
    try:
        yield other, other.answer()
    finally:
        other.process.kill()
        other.process.join(10)


@pytest.mark.parametrize("device", ["0", "1"])
def test_what_is_written_is_there_in_the_other_process(device):
    with exposing(device) as (other, handle):
        target = open_memory(handle, DEVICE)
        for value in (1, 3):
            target.copy_(torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=DEVICE))
            torch.cuda.synchronize()
            assert other.ask() == value * NUM_BYTES
            assert int(target.sum(dtype=torch.int64)) == value * NUM_BYTES


def test_memory_may_be_opened_anew_by_the_same_learner():
    with exposing("1") as (other, handle):
        target = open_memory(handle, DEVICE)
        del target
        open_memory(handle, DEVICE).fill_(2)
        torch.cuda.synchronize()
        assert other.ask() == 2 * NUM_BYTES


def test_a_process_that_is_killed_while_it_is_written_to_does_not_take_the_writer_along():
    with exposing("1") as (other, handle):
        target = open_memory(handle, DEVICE)
        flat = torch.ones(NUM_BYTES, dtype=torch.uint8, device=DEVICE)
        for turn in range(200):
            target.copy_(flat, non_blocking=True)
            if turn == 50:
                os.kill(other.process.pid or 0, signal.SIGKILL)
        torch.cuda.synchronize()
        other.process.join(10)
        target.copy_(flat)
        assert int(flat.sum(dtype=torch.int64)) == NUM_BYTES
        del target
        with pytest.raises(TransferError, match="cannot be opened"):
            open_memory(handle, DEVICE)
    with exposing("1") as (other, handle):
        open_memory(handle, DEVICE).fill_(1)
        torch.cuda.synchronize()
        assert other.ask() == NUM_BYTES
