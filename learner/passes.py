"""Forward and backward passes over whole trajectories of a batch, in micro-batches, over ranks.

Letters: `T` trained tokens of the whole batch, `S` those of a micro-batch, `R` its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from leeway.learner.batch import MicroBatch, PackedBatch, collate, split
from leeway.learner.head import HeadLoss, LossOf
from leeway.learner.model import logprob_loss, logprobs
from leeway.learner.objective.loss import BatchTerms, loss
from leeway.learner.objective.presets import Objective
from leeway.learner.update import Update
from leeway.learner.world import World

PASS_TOKENS: Final = 128
"""What a forward and backward pass on a CPU costs by itself, in padded tokens, where parting rows
is weighed against padding them."""
GPU_PASS_TOKENS: Final = 16384
"""The same on a GPU, which waits for kernels to be launched: there a pass over 500 tokens took as
long as one over 16,000 (half a billion parameters, H100)."""


@dataclass
class Pass:
    """What the passes over some trajectories found. Tensors are of the whole batch, on the CPU, 0
    where nothing was read."""

    lp_T: Tensor
    entropy_T: Tensor
    loss: float = 0.0
    num_micro_batches: int = 0
    num_padded_tokens: int = 0


@dataclass(frozen=True)
class Passes:
    """A policy network and how its work is cut up."""

    model: PreTrainedModel
    world: World
    micro_batch_tokens: int
    precision: str = "float32"
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        # Float64 in the tests that compare splits, the weights' own precision otherwise.
        object.__setattr__(self, "dtype", next(self.model.parameters()).dtype)

    def measure(self, batch: PackedBatch, trajectories: Sequence[int]) -> Pass:
        """Log-probs and entropy of some trajectories, without gradients, on every rank."""
        done = self._empty(batch)
        self._read(batch, trajectories, done)
        self._gather(done)
        return done

    def backward(
        self, update: Update, objective: Objective, rows: Sequence[int], terms: BatchTerms | None
    ) -> Pass:
        """Add the gradient of the loss of some trajectories; those without any are only read."""
        done = self._empty(update.batch)
        rows = tuple(rows)
        has_gradient = np.array(update.has_gradient(rows))
        if not objective.skips_zero_advantage:
            has_gradient[:] = True
        chosen = np.array(rows)
        for micro_batch in self._micro_batches(update.batch, chosen[has_gradient].tolist(), done):
            self._note(done, micro_batch, self._lose(update, objective, micro_batch, terms))
        self._read(update.batch, chosen[~has_gradient].tolist(), done)
        self._gather(done)
        return done

    def backward_linear(
        self, batch: PackedBatch, coefficient_T: Tensor, wanted_T: NDArray[np.bool_]
    ) -> None:
        """Add the gradient of sum(coefficient_T * lp_T) over the wanted tokens.

        Trajectories without one are not read, and none is read behind its last one.
        """
        last_B = _last_wanted(batch, wanted_T)
        if not last_B:
            return
        plan = split(last_B, self.micro_batch_tokens, self.world.size)
        pass_tokens = GPU_PASS_TOKENS if self.world.device.type == "cuda" else PASS_TOKENS
        for rows in plan[self.world.rank]:
            for part in narrowed([last_B[b] for b in rows], pass_tokens):
                micro_batch = collate(batch, rows[part], wanted_T)
                coefficient_S = coefficient_T[micro_batch.token_S].to(self.world.device, self.dtype)
                self._run(micro_batch, _linear(coefficient_S)).loss.backward()

    def _lose(
        self,
        update: Update,
        objective: Objective,
        micro_batch: MicroBatch,
        terms: BatchTerms | None,
    ) -> HeadLoss:
        device = self.world.device
        tokens = update.tokens.take(micro_batch.token_S).to(device)
        terms = None if terms is None else terms.take(micro_batch.token_S).to(device)

        def loss_of(lp_C: Tensor, chunk: slice) -> Tensor:
            of_chunk = None if terms is None else terms.take(chunk)
            return loss(objective, lp_C, tokens.take(chunk), of_chunk)

        result = self._run(micro_batch, loss_of)
        result.loss.backward()
        return result

    def _run(self, micro_batch: MicroBatch, loss_of: LossOf) -> HeadLoss:
        on_device = micro_batch.to(self.world.device)
        return logprob_loss(self.model, on_device, loss_of, self.precision)

    def _read(self, batch: PackedBatch, trajectories: Sequence[int], done: Pass) -> None:
        for micro_batch in self._micro_batches(batch, trajectories, done):
            on_device = micro_batch.to(self.world.device)
            lp_S, entropy_S = logprobs(self.model, on_device, self.precision)
            self._note(done, micro_batch, HeadLoss(lp_S.new_zeros(()), lp_S, entropy_S))

    def _note(self, done: Pass, micro_batch: MicroBatch, result: HeadLoss) -> None:
        done.lp_T[micro_batch.token_S] = result.lp_S.to(done.lp_T)
        done.entropy_T[micro_batch.token_S] = result.entropy_S.to(done.entropy_T)
        done.loss += result.loss.item()

    def _micro_batches(
        self,
        batch: PackedBatch,
        trajectories: Sequence[int],
        done: Pass,
    ) -> Iterator[MicroBatch]:
        """Those of this rank; ranks have equally many, and an empty one yields nothing."""
        if not trajectories:
            return
        plan = split(batch.lengths(trajectories), self.micro_batch_tokens, self.world.size)
        for rows in plan[self.world.rank]:
            done.num_micro_batches += 1
            if rows:
                micro_batch = collate(batch, rows)
                done.num_padded_tokens += micro_batch.input_ids_RL.numel()
                yield micro_batch

    def _empty(self, batch: PackedBatch) -> Pass:
        zero_T = torch.zeros(batch.num_tokens, dtype=self.dtype)
        return Pass(zero_T, zero_T.clone())

    def _gather(self, done: Pass) -> None:
        """Each rank filled its own tokens and left zeros elsewhere, so a sum puts them together."""
        if self.world.size == 1:
            return
        flat = torch.cat([done.lp_T, done.entropy_T, done.lp_T.new_tensor([done.loss])])
        flat = self.world.all_reduce_sum(flat.to(self.world.device)).cpu()
        size = len(done.lp_T)
        done.lp_T, done.entropy_T = flat[:size], flat[size : 2 * size]
        done.loss = flat[-1].item()


def _linear(coefficient_S: Tensor) -> LossOf:
    return lambda lp_C, chunk: (coefficient_S[chunk] * lp_C).sum()


def narrowed(lengths: Sequence[int], pass_tokens: int) -> list[slice]:
    """Where to part rows, longest first, so that padding and passes together cost least.

    lengths [9, 8, 2, 2], 3 tokens a pass: one part costs 3 + 4 * 9 = 39, two cost
    3 + 2 * 9 + 3 + 2 * 2 = 28 -> [0:2, 2:4]
    """
    cost, start = [0], [0]
    for stop in range(1, len(lengths) + 1):
        least = min((cost[i] + (stop - i) * lengths[i], i) for i in range(stop))
        cost.append(least[0] + pass_tokens)
        start.append(least[1])
    parts: list[slice] = []
    stop = len(lengths)
    while stop:
        parts.append(slice(start[stop], stop))
        stop = start[stop]
    return parts[::-1]


def _last_wanted(batch: PackedBatch, wanted_T: NDArray[np.bool_]) -> dict[int, int]:
    """Position of the last wanted token of each trajectory that has one."""
    token_S = np.flatnonzero(wanted_T)
    trajectory_S = batch.segments.trajectory_of_T.numpy()[token_S]
    # Tokens stand in order, so a later one overwrites an earlier one.
    positions = batch.position_T.numpy()[token_S]
    return dict(zip(trajectory_S.tolist(), positions.tolist(), strict=True))
