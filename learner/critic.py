"""The critic of the PPO family: a value for every state in which the policy is about to act.

Its network is a copy of the policy's, without the output layer, with one output of its own that
starts at 0. The value of a trained token is read where the token is predicted: the state is all
that stands before it.

Letters: `T` trained tokens of the batch, `N` those the critic learns from, `S` those of a
micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leeway.learner.attention import use_packed_attention
from leeway.learner.batch import MicroBatch, PackedBatch, collate, nothing, split
from leeway.learner.config import LearnerConfig
from leeway.learner.errors import NonFiniteError
from leeway.learner.gradients import give_back, global_norm, scale_to, take_gradients
from leeway.learner.model import predictor_states
from leeway.learner.sharding import Layout, lay_out, settle
from leeway.learner.update import ValueTargets
from leeway.learner.world import World

VALUE_CLIP: Final = 0.2
LEARNING_RATE_FACTOR: Final = 10.0
"""Of the policy's, where no rate is configured: what PPO trainers of language models use."""


class CriticMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of the critic in one step."""

    value_loss: float
    """Before the critic learned from the batch."""
    value_mean: float
    explained_variance: float
    """1 - var(return - value) / var(return), of the values at the start of the step; 0 for equal
    returns."""
    value_clip_fraction: float
    """Share of values whose loss was clipped in the last pass."""
    critic_grad_norm: float
    """Before it was bounded; of the last pass."""


class ValueModel(nn.Module):
    """A transformer with one output per position."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        use_packed_attention(policy)
        base: Any = policy.base_model
        self.base_model = copy.deepcopy(base)
        like = next(base.parameters())
        self.dtype = like.dtype
        """Of the values, whatever the network below computes in."""
        self.head = nn.Linear(policy.config.hidden_size, 1, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """[S] one value per token of the micro-batch."""
        hidden_SH = predictor_states(self.base_model, micro_batch)
        # A view would lose the hooks of FSDP.
        return self.head(hidden_SH.to(self.dtype)).squeeze(-1).clone()


def value_loss(value_N: Tensor, old_N: Tensor, return_N: Tensor, clip: float) -> Tensor:
    """[N] half the larger square of value - return and clip(value) - return, where clip keeps the
    value within `clip` of the old one (PPO).

    old 0, return 1, clip 0.2: value 0.5 -> 0.5 max(0.25, 0.64) = 0.32, without gradient; value 0.1
    -> 0.405; value -0.5 -> 0.5 max(2.25, 1.44) = 1.125.
    """
    kept_N = value_N.clamp(old_N - clip, old_N + clip)
    return 0.5 * torch.maximum((value_N - return_N).square(), (kept_N - return_N).square())


def is_value_clipped(value_N: Tensor, old_N: Tensor, return_N: Tensor, clip: float) -> Tensor:
    """[N] bool: the clipped square is the larger one, so the value has no gradient."""
    kept_N = value_N.clamp(old_N - clip, old_N + clip)
    return (kept_N - return_N).abs() > (value_N - return_N).abs()


class Critic:
    """A value model and its optimizer."""

    def __init__(self, policy: PreTrainedModel, config: LearnerConfig, world: World) -> None:
        self.model = ValueModel(policy)
        self.model.eval()  # no dropout: values at the start of a step are compared with later ones
        lay_out(self.model, world, Layout.of(config), exact=self.model.head)
        self._config = config
        self._world = world
        self._parameters = list(self.model.parameters())
        self._learning_rate = (
            config.critic_learning_rate or LEARNING_RATE_FACTOR * config.learning_rate
        )
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._learning_rate,
            weight_decay=config.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> Tensor:
        """[T] of every trained token."""
        dtype, device = self.model.dtype, self._world.device
        value_T = torch.zeros(batch.num_tokens, dtype=dtype, device=device)
        for micro_batch in self._micro_batches(batch, None):
            value_T[micro_batch.token_S] = self.model(micro_batch)
        settle(self.model)
        return self._world.all_reduce_sum(value_T).cpu()

    def train(self, batch: PackedBatch, targets: ValueTargets) -> CriticMetrics:
        """Go over the batch `critic_epochs` times, one optimizer step each."""
        first: tuple[float, float, float] | None = None
        last = (0.0, 0.0, 0.0)
        for _ in range(self._config.critic_epochs or 1):
            last = self._epoch(batch, targets)
            first = first or last
        assert first is not None
        left_N = targets.return_N - targets.old_N
        spread = targets.return_N.var(correction=0).item()
        return CriticMetrics(
            value_loss=first[0],
            value_mean=targets.old_N.mean().item(),
            # Equal returns may differ in their last bits, which would explain -1e31 of them.
            explained_variance=(
                1 - left_N.var(correction=0).item() / spread if spread > 1e-12 else 0.0
            ),
            value_clip_fraction=last[1],
            critic_grad_norm=last[2],
        )

    def _epoch(self, batch: PackedBatch, targets: ValueTargets) -> tuple[float, float, float]:
        """Loss, clipped share and gradient norm."""
        clip = self._config.value_clip or VALUE_CLIP
        both_2T = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
        both_2T[:, targets.token_N] = torch.stack([targets.old_N, targets.return_N]).double()
        both_2T = both_2T.to(self._world.device)
        # On the device until the last pass: a GPU that is asked in between stands still.
        totals = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for micro_batch in self._micro_batches(batch, targets.token_N):
            value_S = self.model(micro_batch)
            old_S, return_S = both_2T[:, micro_batch.token_S].to(value_S)
            loss = value_loss(value_S, old_S, return_S, clip).sum() / len(targets.token_N)
            loss.backward()
            is_clipped_S = is_value_clipped(value_S.detach(), old_S, return_S, clip)
            totals += torch.stack([loss.detach(), is_clipped_S.sum()])
        settle(self.model)
        gradients = take_gradients(self._parameters)
        norm = global_norm(gradients, self._world)
        loss, num_clipped = self._world.all_reduce_sum(totals).tolist()
        if not (np.isfinite(loss) and np.isfinite(norm)):
            raise NonFiniteError(
                f"the critic's loss is {loss}, its gradient norm {norm}; "
                "its optimizer step was not taken"
            )
        give_back(self._parameters, gradients, scale_to(norm, self._config.max_grad_norm))
        # Set anew: a resumed optimizer brings the rates of the run before.
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = self._learning_rate, self._config.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, num_clipped / len(targets.token_N), norm

    def _micro_batches(self, batch: PackedBatch, token_N: Tensor | None) -> Iterator[MicroBatch]:
        """Those of this rank, over all trajectories; only some of their tokens if given."""
        wanted_T = None
        if token_N is not None:
            wanted_T = np.zeros(batch.num_tokens, np.bool_)
            wanted_T[token_N.numpy()] = True
        for rows in split(batch.lengths(), self._config.micro_batch_tokens, self._world.size)[
            self._world.rank
        ]:
            micro_batch = collate(batch, rows, wanted_T) if rows else nothing()
            yield micro_batch.to(self._world.device)
