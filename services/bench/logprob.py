"""Log-probs, entropy and the gradient of a loss over them, at a large vocabulary, against the plain
way: all logits, their log-softmax, a gather.

Time is measured in turns in this process. Peak memory is what the work adds to the inputs: on a GPU
by torch's own count, on a CPU by the resident size of a fresh process per side, because a process
does not give back the peak of the other side.

    python -m leeway.services.bench.logprob ours 1024 256 151936 float32

prints that number of bytes.

Letters: `S` trained tokens, `H` hidden width, `V` vocabulary.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from leeway.learner.head import Head, LossOf, head_loss
from leeway.learner.objective.loss import Tokens, loss
from leeway.learner.objective.presets import PRESETS
from leeway.learner.objective.ratio import Segments
from leeway.services.bench.result import BenchResult
from leeway.services.bench.timing import interleaved

VOCABULARY: Final = 151_936
NUM_TURNS: Final = 4
TURN_TOKENS: Final = 32
OBJECTIVE: Final = PRESETS["so-grpo"]


@dataclass(frozen=True)
class Shape:
    """One case."""

    num_tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def words(self) -> list[str]:
        """As arguments of the child process."""
        sizes = [self.num_tokens, self.width, self.vocabulary]
        return [*map(str, sizes), str(self.dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Inputs:
    """What both sides start from: hidden states, float32 weights as the learner holds them."""

    hidden_SH: Tensor
    weight_VH: Tensor
    target_S: Tensor
    tokens: Tokens


@dataclass(frozen=True)
class Outcome:
    """What one side found; gradients are with respect to hidden states and weights."""

    loss: Tensor
    entropy_S: Tensor
    grad_hidden_SH: Tensor
    grad_weight_VH: Tensor


def build_inputs(shape: Shape, device: str) -> Inputs:
    """Trajectories of 4 turns of 32 trained tokens, whose log-probs lie about the clip distance
    from those they were sampled with."""
    torch.manual_seed(0)
    hidden_SH = torch.randn(shape.num_tokens, shape.width, device=device, dtype=shape.dtype)
    weight_VH = torch.empty(shape.vocabulary, shape.width, device=device)
    weight_VH.normal_(std=shape.width**-0.5)
    target_S = torch.randint(shape.vocabulary, (shape.num_tokens,), device=device)
    # Logits are normal with variance 1, so a log-prob is z - ln V - 1/2.
    target_SH = weight_VH[target_S].to(shape.dtype)
    z_S = (hidden_SH * target_SH).sum(-1).float()
    old_S = z_S - torch.tensor(float(shape.vocabulary)).log().item() - 0.5
    token_S = torch.arange(shape.num_tokens, device=device)
    turn_S = token_S // TURN_TOKENS
    trajectory_S = turn_S // NUM_TURNS
    num_turns, num_trajectories = int(turn_S[-1]) + 1, int(trajectory_S[-1]) + 1
    drift_K = 0.3 * torch.randn(num_turns, device=device)
    advantage_B = torch.randn(num_trajectories, device=device)
    tokens = Tokens(
        old_S + drift_K[turn_S],
        advantage_B[trajectory_S],
        torch.full_like(old_S, 1 / shape.num_tokens),
        Segments(turn_S, trajectory_S, num_turns, num_trajectories),
    )
    return Inputs(hidden_SH.requires_grad_(), weight_VH.requires_grad_(), target_S, tokens)


def ours(inputs: Inputs) -> Outcome:
    """The learner's head."""
    result = head_loss(
        inputs.hidden_SH,
        Head(inputs.weight_VH),
        inputs.target_S,
        _loss_of(inputs),
        inputs.tokens.segments.trajectory_of_T.bincount().tolist(),
    )
    result.loss.backward()
    return _taken(inputs, result.loss, result.entropy_S)


def plain(inputs: Inputs) -> Outcome:
    """Whole logits; float32 from the log-softmax on, as trainers have it."""
    logits_SV = inputs.hidden_SH @ inputs.weight_VH.to(inputs.hidden_SH.dtype).T
    lp_SV = logits_SV.float().log_softmax(-1)
    lp_S = lp_SV.gather(-1, inputs.target_S[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy_S = -(lp_SV.exp() * lp_SV).sum(-1)
    total = _loss_of(inputs)(lp_S, slice(None))
    total.backward()
    return _taken(inputs, total, entropy_S)


SIDES: Final[dict[str, Callable[[Inputs], Outcome]]] = {"ours": ours, "plain": plain}


def _loss_of(inputs: Inputs) -> LossOf:
    return lambda lp_C, chunk: loss(OBJECTIVE, lp_C, inputs.tokens.take(chunk))


def _taken(inputs: Inputs, total: Tensor, entropy_S: Tensor) -> Outcome:
    grads = inputs.hidden_SH.grad, inputs.weight_VH.grad
    assert grads[0] is not None and grads[1] is not None
    inputs.hidden_SH.grad = inputs.weight_VH.grad = None
    return Outcome(total.detach(), entropy_S, grads[0], grads[1])


# --- memory ---


def peak_bytes(side: str, shape: Shape) -> int:
    """What one side adds to its inputs at most."""
    if torch.cuda.is_available():
        return _peak_on_gpu(side, shape)
    command = [sys.executable, "-m", "leeway.services.bench.logprob", side, *shape.words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _peak_on_gpu(side: str, shape: Shape) -> int:
    inputs = build_inputs(shape, "cuda")
    SIDES[side](inputs)  # compiles kernels
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    SIDES[side](inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_of_this_process(side: str, shape: Shape) -> int:
    # Libraries start their threads and buffers on a small case first.
    small = Shape(64, shape.width, 1024, shape.dtype)
    SIDES[side](build_inputs(small, "cpu"))
    inputs = build_inputs(shape, "cpu")
    gc.collect()
    before = _resident_bytes("VmRSS")
    SIDES[side](inputs)
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    """VmRSS now, VmHWM at most; getrusage would also count what the parent held at the fork."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


# --- run ---


def run(*, quick: bool) -> BenchResult:
    """float32 and bfloat16 on the shape that the machine bears."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_tokens, width = _sizes(device, quick)
    shapes = [
        Shape(num_tokens, width, VOCABULARY, dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    measured = [_measure(shape, device, 2 if quick else 5) for shape in shapes]
    slowest = max(measured, key=lambda row: row.seconds[0] / row.seconds[1])
    largest = max(measured, key=lambda row: row.peaks[0] / row.peaks[1])
    return BenchResult(
        name="logprob",
        columns=(
            *("case", "tokens", "width", "vocabulary", "ours ms", "plain ms", "time ratio"),
            *("ours MiB", "plain MiB", "memory ratio"),
        ),
        rows=tuple(row.cells() for row in measured),
        keys={
            "peak_memory_ratio": largest.peaks[0] / largest.peaks[1],
            "time_ratio": slowest.seconds[0] / slowest.seconds[1],
            "ours_ms": 1e3 * slowest.seconds[0],
            "plain_ms": 1e3 * slowest.seconds[1],
            "ours_mib": largest.peaks[0] / 2**20,
            "plain_mib": largest.peaks[1] / 2**20,
        },
    )


def _sizes(device: str, quick: bool) -> tuple[int, int]:
    """Trained tokens and hidden width: a 1.5B model on a GPU, a 0.5B one on a CPU."""
    if device == "cuda":
        return (4096, 1536) if quick else (8192, 1536)
    return (1024, 256) if quick else (2048, 896)


@dataclass(frozen=True)
class _Measured:
    shape: Shape
    seconds: tuple[float, float]
    """Ours, plain."""
    peaks: tuple[int, int]
    """Ours, plain, in bytes."""

    def cells(self) -> tuple[str, ...]:
        *sizes, dtype = self.shape.words
        seconds, peaks = self.seconds, self.peaks
        return (
            dtype,
            *(f"{int(size):,}" for size in sizes),
            *(f"{1e3 * side:.0f}" for side in seconds),
            f"{seconds[0] / seconds[1]:.2f}",
            *(f"{side / 2**20:.0f}" for side in peaks),
            f"{peaks[0] / peaks[1]:.2f}",
        )


def _measure(shape: Shape, device: str, repeats: int) -> _Measured:
    inputs = build_inputs(shape, device)
    seconds = interleaved(partial(ours, inputs), partial(plain, inputs), repeats)
    del inputs
    gc.collect()
    return _Measured(shape, seconds, (peak_bytes("ours", shape), peak_bytes("plain", shape)))


def main(words: list[str]) -> None:
    """The child process that measures one side's peak."""
    side, *sizes, dtype = words
    shape = Shape(*map(int, sizes), dtype=getattr(torch, dtype))
    print(_peak_of_this_process(side, shape))


if __name__ == "__main__":
    main(sys.argv[1:])
