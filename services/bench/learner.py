"""What share of the card's arithmetic a learner's step uses.

A step of 1.5 billion parameters in the shape of Qwen2.5-1.5B, with random weights, over search
trajectories of 2,048 tokens of which 600 are trained; on a CPU the bundled policy's shape over
shorter ones. All trajectories have an advantage, nothing is normalised by clipping, so that a step
is one pass forward and backward and one optimizer step.

Model FLOPs of a step, three times those of its forward pass (Kaplan et al., PaLM), with nothing
for what is computed twice:

    forward = 2 M P + sum over trajectories of 2 l^2 A D N + 2 V H S

`M` weights of all blocks' matrices, `P` tokens read, `l` those of one trajectory (causal attention
sees half of l^2, products with keys and values are 4 l^2 A D / 2), `A` heads of width `D`, `N`
blocks, `V` vocabulary, `H` hidden width, `S` trained tokens: the output layer runs for them alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from leeway.learner.batch import PackedBatch
from leeway.learner.config import LearnerConfig
from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from leeway.services.bench.episodes import Shape, build_episodes
from leeway.services.bench.result import BenchResult

GROUP_SIZE: Final = 8
NOMINAL_FLOPS: Final = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations a second, as the makers of the card name them (SXM)."""
NUM_KERNELS: Final = 8
"""Of the best case, the kernels that took most of the step."""
BILLION: Final[dict[str, Any]] = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TINY: Final[dict[str, Any]] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
LONG: Final = Shape(200, (150,) * 4, (416,) * 3)
SHORT: Final = Shape(64, (32,) * 3, (96,) * 2)


@dataclass(frozen=True)
class Case:
    """One way to lay the step out."""

    name: str
    learner: dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """What one kind of kernel took of a step."""

    name: str
    count: int
    ms: float


@dataclass(frozen=True)
class Measured:
    """One case; seconds are of a step."""

    step_s: float
    forward_s: float
    """A pass without gradient over the same tokens, output layer included."""
    passes_s: float
    """Forward and backward, sums and norm of the gradient."""
    optimizer_s: float
    peak_bytes: int
    """0 on a CPU."""
    kernels: tuple[Kernel, ...]
    """Longest first; empty on a CPU."""


CUDA_CASES: Final = (
    Case("as it comes, 8k tokens a pass", {"micro_batch_tokens": 8192}),
    Case("compiled, 8k", {"micro_batch_tokens": 8192, "compile": True}),
    Case("compiled, 16k", {"micro_batch_tokens": 16384, "compile": True}),
    Case(
        "compiled, activations forgotten, 32k",
        {"micro_batch_tokens": 32768, "compile": True, "activation_checkpointing": True},
    ),
)
CPU_CASES: Final = (
    Case("float32", {"micro_batch_tokens": 4096, "precision": "float32"}),
    Case(
        "float32, activations forgotten",
        {"micro_batch_tokens": 4096, "precision": "float32", "activation_checkpointing": True},
    ),
)


def run(*, quick: bool) -> BenchResult:
    """All layouts, of which the one with the highest share gives the keys; `quick` takes the first
    one and fewer trajectories."""
    on = "cuda" if torch.cuda.is_available() else "cpu"
    is_cuda = on == "cuda"
    cases = CUDA_CASES if is_cuda else CPU_CASES
    shape, config = (LONG, BILLION) if is_cuda else (SHORT, TINY)
    num_trajectories = (16 if quick else 32) if is_cuda else 8
    batch = build_case(num_trajectories, shape, config["vocab_size"])
    flops = step_flops(config, list(batch.lengths().values()), batch.num_tokens)
    matmul = matmul_flops(on)
    tried = [
        (case, _measure(case, config, batch, on, repeats=2 if quick else 5))
        for case in cases[: 1 if quick else None]
    ]
    # Once more: on a shared machine the first may have been disturbed.
    matmul = max(matmul, matmul_flops(on))
    peak = nominal_flops() or matmul
    rows = [_cells(case, measured, batch, flops / peak) for case, measured in tried]
    found = [measured for _, measured in tried if measured is not None]
    if not found:
        raise torch.OutOfMemoryError("no layout of the step fits this card")
    best = min(found, key=lambda measured: measured.step_s)
    rows += [_kernel_cells(kernel, best.step_s) for kernel in best.kernels[:NUM_KERNELS]]
    return BenchResult(
        name="learner",
        columns=(
            *("case", "step ms", "tokens/s", "mfu", "peak GiB", "forward ms"),
            *("forward + backward ms", "optimizer ms", "launches", "GPU busy"),
        ),
        rows=tuple(rows),
        keys={
            "tokens_per_s": _num_read(batch) / best.step_s,
            "mfu": flops / best.step_s / peak,
            "peak_gib": best.peak_bytes / 2**30,
            "step_ms": 1e3 * best.step_s,
            "step_tflop": flops / 1e12,
            "peak_tflops": peak / 1e12,
            "matmul_tflops": matmul / 1e12,
        },
    )


def build_case(num_trajectories: int, shape: Shape, vocabulary: int) -> PackedBatch:
    """Groups of 8, every other trajectory of which won."""
    rng = np.random.default_rng(0)
    rewards = [float(i % 2) for i in range(num_trajectories)]
    return build_episodes([shape] * num_trajectories, rewards, GROUP_SIZE, vocabulary, rng)


def step_flops(config: dict[str, Any], lengths: Sequence[int], num_trained: int) -> float:
    """Model FLOPs of a step, by the formula at the top of this file.

    Hidden 2, intermediate 3, 1 block of 2 heads (1 of keys), vocabulary 5: the matrices have 4 + 4
    + 4 + 18 = 30 weights. Lengths [2, 3], 4 trained: 3 (2 * 30 * 5 + 2 * (4 + 9) * 2 + 2 * 5 * 2 *
    4) = 1296.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = hidden // heads
    keys = config["num_key_value_heads"] * width
    matrices = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
    blocks = config["num_hidden_layers"]
    attention = sum(2 * length**2 for length in lengths) * heads * width * blocks
    head = 2 * config["vocab_size"] * hidden * num_trained
    return 3.0 * (2 * matrices * blocks * sum(lengths) + attention + head)


def nominal_flops() -> float | None:
    """Of this card; None for one that is not known, and on a CPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for card, flops in NOMINAL_FLOPS.items() if card in name), None)


def matmul_flops(on: str) -> float:
    """Operations a second of a large matrix product, the fastest of ten: what a card gives."""
    size, dtype = (8192, torch.bfloat16) if on == "cuda" else (2048, torch.float32)
    a, b = torch.randn(2, size, size, device=on, dtype=dtype)
    return 2 * size**3 / min(_times(lambda: a @ b, 10))


def _measure(
    case: Case, config: dict[str, Any], batch: PackedBatch, on: str, repeats: int
) -> Measured | None:
    """None where the card's memory does not hold it."""
    # What is compiled for a case before would hold its weights.
    torch.compiler.reset()
    gc.collect()
    if on == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer = _trainer(case, config, on)
        # Two: the second one compiles for any number of tokens.
        for _ in range(2):
            trainer.train_step(batch, 0)
        step_s = _seconds(lambda: trainer.train_step(batch, 0), repeats)
        passes_s, optimizer_s = _parts(trainer, batch)
        return Measured(
            step_s,
            _seconds(lambda: trainer.measure(batch), repeats),
            passes_s,
            optimizer_s,
            torch.cuda.max_memory_allocated() if on == "cuda" else 0,
            _kernels(trainer, batch) if on == "cuda" else (),
        )
    except torch.OutOfMemoryError:
        return None


def _trainer(case: Case, config: dict[str, Any], on: str) -> Trainer:
    torch.manual_seed(0)
    with torch.device(on):
        model = Qwen2ForCausalLM(Qwen2Config(**config))
    learner = {"objective": "grpo", "precision": "bfloat16", "learning_rate": 1e-6, **case.learner}
    return Trainer(model, LearnerConfig.model_validate(learner), World(device=torch.device(on)))


def _parts(trainer: Trainer, batch: PackedBatch) -> tuple[float, float]:
    """Seconds of one step up to the optimizer, and in it."""
    marks: list[float] = []

    def mark(*_: Any) -> None:
        _synchronize()
        marks.append(time.perf_counter())

    hooks = [
        trainer.optimizer.register_step_pre_hook(mark),
        trainer.optimizer.register_step_post_hook(mark),
    ]
    mark()
    trainer.train_step(batch, 0)
    for hook in hooks:
        hook.remove()
    return marks[1] - marks[0], marks[2] - marks[1]


def _kernels(trainer: Trainer, batch: PackedBatch) -> tuple[Kernel, ...]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainer.train_step(batch, 0)
    found = [
        Kernel(event.key, event.count, event.self_device_time_total / 1e3)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.ms))


def _seconds(work: Callable[[], object], repeats: int) -> float:
    return median(_times(work, repeats))


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each, after one that is not counted."""
    seconds: list[float] = []
    for _ in range(repeats + 1):
        _synchronize()
        started = time.perf_counter()
        work()
        _synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _num_read(batch: PackedBatch) -> int:
    return sum(batch.lengths().values())


def _cells(
    case: Case, measured: Measured | None, batch: PackedBatch, seconds_at_peak: float
) -> tuple[str, ...]:
    if measured is None:
        return (case.name, "out of memory", *[""] * 8)
    busy_ms = sum(kernel.ms for kernel in measured.kernels)
    return (
        case.name,
        f"{1e3 * measured.step_s:.0f}",
        f"{_num_read(batch) / measured.step_s:,.0f}",
        f"{seconds_at_peak / measured.step_s:.3f}",
        f"{measured.peak_bytes / 2**30:.1f}",
        f"{1e3 * measured.forward_s:.0f}",
        f"{1e3 * measured.passes_s:.0f}",
        f"{1e3 * measured.optimizer_s:.0f}",
        f"{sum(kernel.count for kernel in measured.kernels)}",
        f"{busy_ms / 1e3 / measured.step_s:.2f}" if measured.kernels else "",
    )


def _kernel_cells(kernel: Kernel, step_s: float) -> tuple[str, ...]:
    share = f"{kernel.ms / 1e3 / step_s:.2f}"
    return (f"  {kernel.name[:60]}", f"{kernel.ms:.0f}", *[""] * 6, f"{kernel.count}", share)
