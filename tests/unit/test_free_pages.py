"""Free memory goes back to the kernel now and then, and not more often."""

from __future__ import annotations

import asyncio
import ctypes
import types

import pytest

from leeway.replay import allocator, free_pages
from leeway.replay.free_pages import FEW_ARENAS


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    called: list[int] = []
    libc = types.SimpleNamespace(malloc_trim=called.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    return called


def test_what_is_held_is_counted_and_what_was_freed_is_not():
    before = free_pages.allocated_bytes()
    if before is None:
        pytest.skip("this C library does not count what it has given out")
    block = bytearray(64 * 2**20)
    held = free_pages.allocated_bytes() or 0
    del block
    freed = free_pages.allocated_bytes() or 0
    assert held - before == pytest.approx(64 * 2**20, rel=0.02)
    assert freed - before < 2**20


def test_pages_go_back_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch, trims: list[int]):
    now = 1000.0
    monkeypatch.setattr(free_pages, "_given_back_at", now - 60.0)
    monkeypatch.setattr(free_pages.time, "monotonic", lambda: now)
    free_pages.give_back()
    now += 59.0
    free_pages.give_back()
    assert trims == [0]
    now += 1.0
    free_pages.give_back()
    assert trims == [0, 0]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(free_pages, "_given_back_at", -1e9)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    free_pages.give_back()


async def test_a_process_without_pauses_gives_back_for_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch, trims: list[int]
):
    monkeypatch.setattr(free_pages, "EVERY_S", 0.001)
    giving = asyncio.create_task(free_pages.keep_giving_back())
    async with asyncio.timeout(60):
        while len(trims) < 3:
            await asyncio.sleep(0.001)
    giving.cancel()
    await asyncio.gather(giving, return_exceptions=True)
    assert giving.cancelled()
    assert set(trims) == {0}


def test_fewer_arenas_do_not_pass_for_bounds_of_an_operator(monkeypatch: pytest.MonkeyPatch):
    bounds: list[tuple[int, int]] = []
    libc = types.SimpleNamespace(mallopt=lambda name, size: bounds.append((name, size)) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(*next(iter(FEW_ARENAS.items())))
    assert allocator.keep_freed_memory.__wrapped__() is True
    assert len(bounds) == 2
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert allocator.keep_freed_memory.__wrapped__() is False
