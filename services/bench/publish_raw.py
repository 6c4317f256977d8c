"""The limits of a publish: a broadcast of as many bytes between the same devices by
torch.distributed alone, and a copy of as many bytes on the engine's device."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

REPEATS = 7
TIMEOUT_S = 300.0


def measure(num_bytes: int, is_cuda: bool) -> tuple[float, float]:
    """Seconds of a broadcast, and of a device-local copy, of `num_bytes`; medians. Between two
    GPUs, or two processes of the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[float, float]] = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, port, num_bytes, is_cuda, results))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    try:
        return results.get(timeout=TIMEOUT_S)
    finally:
        for process in ranks:
            process.join(30)
            process.kill()


def _rank(
    rank: int,
    port: int,
    num_bytes: int,
    is_cuda: bool,
    results: multiprocessing.Queue[tuple[float, float]],
) -> None:
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
    )
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    broadcast_s = _median_s(lambda: dist.broadcast(flat, 0), device)
    if rank == 1:
        other = torch.empty_like(flat)
        results.put((broadcast_s, _median_s(lambda: other.copy_(flat), device)))
    dist.barrier()
    dist.destroy_process_group()


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    work()
    took = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return median(took)
