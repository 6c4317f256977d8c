"""Forward and backward passes over whole trajectories of a batch, in micro-batches, over ranks.

Letters: `T` trained tokens of the whole batch, `S` those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from leeway.learner.attention import use_packed_attention
from leeway.learner.batch import MicroBatch, PackedBatch, collate, nothing, split
from leeway.learner.head import HeadLoss, LossOf
from leeway.learner.model import Network
from leeway.learner.objective.loss import BatchTerms, Tokens, loss
from leeway.learner.objective.presets import Objective
from leeway.learner.sharding import Layout, lay_out, settle
from leeway.learner.update import Update
from leeway.learner.world import World

PLAIN: Final = Layout()


@dataclass(frozen=True)
class Pass:
    """What the passes over some trajectories found. Tensors are of the whole batch, on the CPU, 0
    where nothing was read."""

    lp_T: Tensor
    entropy_T: Tensor
    loss: float
    num_micro_batches: int
    """Of this rank."""
    num_tokens_read: int
    """Of this rank: positions its passes read."""


class _Tally:
    """What passes find, kept on their device until the last one: a GPU that is asked in between
    stands still."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.zeros(2 * num_tokens + 1, dtype=dtype, device=device)
        self._lp_T, self._entropy_T, self._loss = self._flat.split([num_tokens, num_tokens, 1])
        self.num_micro_batches = 0
        self.num_tokens_read = 0

    def note(self, token_S: Tensor, found: HeadLoss) -> None:
        self._lp_T[token_S] = found.lp_S.to(self._flat.dtype)
        self._entropy_T[token_S] = found.entropy_S.to(self._flat.dtype)
        self._loss += found.loss.detach()

    def gather(self, world: World) -> Pass:
        """Each rank filled its own tokens and left zeros elsewhere, so a sum puts them together."""
        flat = world.all_reduce_sum(self._flat).cpu()
        size = len(self._lp_T)
        return Pass(
            flat[:size],
            flat[size : 2 * size],
            flat[-1].item(),
            self.num_micro_batches,
            self.num_tokens_read,
        )


class Passes:
    """A policy network laid out on the ranks, and how its work is cut up."""

    def __init__(
        self,
        model: PreTrainedModel,
        world: World,
        micro_batch_tokens: int,
        layout: Layout = PLAIN,
    ) -> None:
        """Takes `model` over: it is changed in place."""
        use_packed_attention(model)
        self.network = Network(model)
        # Float64 in the tests that compare splits, float32 otherwise: of the weights and the sums.
        self.dtype = next(model.parameters()).dtype
        lay_out(self.network, world, layout)
        self._world = world
        self._micro_batch_tokens = micro_batch_tokens

    def measure(self, batch: PackedBatch, trajectories: Sequence[int]) -> Pass:
        """Log-probs and entropy of some trajectories, without gradients, on every rank."""
        tally = self._tally(batch)
        self._read(batch, trajectories, tally)
        settle(self.network)
        return tally.gather(self._world)

    def backward(
        self, update: Update, objective: Objective, rows: Sequence[int], terms: BatchTerms | None
    ) -> Pass:
        """Add the gradient of the loss of some trajectories; those without any are only read."""
        batch, device = update.batch, self._world.device
        tally = self._tally(batch)
        rows = tuple(rows)
        has_gradient = np.array(update.has_gradient(rows))
        if not objective.skips_zero_advantage:
            has_gradient[:] = True
        chosen = np.array(rows)
        tokens = update.tokens.to(device)
        terms = None if terms is None else terms.to(device)
        plan = self._plan(batch.lengths(chosen[has_gradient].tolist()))
        for micro_batch in self._micro_batches(batch, plan, tally):
            loss_of = _objective_loss(objective, tokens, terms, micro_batch.token_S)
            tally.note(micro_batch.token_S, self._differentiate(micro_batch, loss_of))
        self._read(batch, chosen[~has_gradient].tolist(), tally)
        settle(self.network)
        return tally.gather(self._world)

    def backward_linear(
        self, batch: PackedBatch, coefficient_T: Tensor, wanted_T: NDArray[np.bool_]
    ) -> None:
        """Add the gradient of sum(coefficient_T * lp_T) over the wanted tokens.

        Trajectories without one are not read, and none is read behind its last one.
        """
        plan = self._plan(_last_wanted(batch, wanted_T))
        coefficient_T = coefficient_T.to(self._world.device, self.dtype)
        for micro_batch in self._micro_batches(batch, plan, wanted_T=wanted_T):
            self._differentiate(micro_batch, _linear(coefficient_T[micro_batch.token_S]))
        settle(self.network)

    def _differentiate(self, micro_batch: MicroBatch, loss_of: LossOf) -> HeadLoss:
        found: HeadLoss = self.network(micro_batch, loss_of)
        found.loss.backward()
        return found

    @torch.no_grad()
    def _read(self, batch: PackedBatch, trajectories: Sequence[int], tally: _Tally) -> None:
        plan = self._plan(batch.lengths(trajectories))
        for micro_batch in self._micro_batches(batch, plan, tally):
            tally.note(micro_batch.token_S, self.network(micro_batch))

    def _plan(self, lengths: Mapping[int, int]) -> list[list[int]]:
        """Trajectories of each micro-batch of this rank; ranks have equally many."""
        if not lengths:
            return []
        return split(lengths, self._micro_batch_tokens, self._world.size)[self._world.rank]

    def _micro_batches(
        self,
        batch: PackedBatch,
        plan: Sequence[Sequence[int]],
        tally: _Tally | None = None,
        wanted_T: NDArray[np.bool_] | None = None,
    ) -> Iterator[MicroBatch]:
        """On the device. An empty one is run too: the other ranks wait for this one's slices."""
        for rows in plan:
            micro_batch = collate(batch, rows, wanted_T) if rows else nothing()
            if tally is not None:
                tally.num_micro_batches += 1
                tally.num_tokens_read += micro_batch.num_tokens
            yield micro_batch.to(self._world.device)

    def _tally(self, batch: PackedBatch) -> _Tally:
        return _Tally(batch.num_tokens, self.dtype, self._world.device)


def _objective_loss(
    objective: Objective, tokens: Tokens, terms: BatchTerms | None, token_S: Tensor
) -> LossOf:
    """The loss of a micro-batch's tokens, chunk by chunk."""
    tokens = tokens.take(token_S)
    terms = None if terms is None else terms.take(token_S)

    def loss_of(lp_C: Tensor, chunk: slice) -> Tensor:
        of_chunk = None if terms is None else terms.take(chunk)
        return loss(objective, lp_C, tokens.take(chunk), of_chunk)

    return loss_of


def _linear(coefficient_S: Tensor) -> LossOf:
    return lambda lp_C, chunk: (coefficient_S[chunk] * lp_C).sum()


def _last_wanted(batch: PackedBatch, wanted_T: NDArray[np.bool_]) -> dict[int, int]:
    """Position of the last wanted token of each trajectory that has one."""
    token_S = np.flatnonzero(wanted_T)
    trajectory_S = batch.segments.trajectory_of_T.numpy()[token_S]
    # Tokens stand in order, so a later one overwrites an earlier one.
    positions = batch.position_T.numpy()[token_S]
    return dict(zip(trajectory_S.tolist(), positions.tolist(), strict=True))
