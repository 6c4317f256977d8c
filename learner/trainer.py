"""One optimizer step per batch.

Letters: `T` trained tokens of the whole batch, `S` those of a micro-batch, `B` trajectories.

A step, on every rank alike:
1. where the objective needs a number of the whole batch first: log-probs without gradient;
2. micro-batches forward and backward, log-probs kept; gradients and log-probs summed over ranks;
3. everything must be finite, or NonFiniteError before any weight changes;
4. gradient bounded to `max_grad_norm`, THEN divided by clipping-triggered normalization: a bound
   applied after the division would cancel it whenever both norms exceed the limit;
5. AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from leeway.learner.batch import MicroBatch, PackedBatch, collate, split, turn_and_trajectory
from leeway.learner.config import LearnerConfig
from leeway.learner.errors import NonFiniteError
from leeway.learner.gradients import global_norm, sum_over_ranks, take_gradients
from leeway.learner.metrics import StepMetrics, data_metrics, policy_metrics
from leeway.learner.model import logprobs
from leeway.learner.objective import BatchTerms, batch_terms, clipped, loss, resolve
from leeway.learner.objective.ctn import bias_coefficient, ctn_divisor
from leeway.learner.objective.ratio import importance_ratio, log_ratio
from leeway.learner.world import World

BETAS: Final = (0.9, 0.95)
"""AdamW. The second is below its default: gradients of policies change fast."""


@dataclass
class Pass:
    """What the passes over a batch found; every tensor is of the whole batch, on the CPU."""

    lp_T: Tensor
    entropy_T: Tensor
    loss: float = 0.0
    num_micro_batches: int = 0
    num_padded_tokens: int = 0


class Trainer:
    """A model, its optimizer, and the objective that moves it."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, world: World | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.world = World() if world is None else world
        self.objective = resolve(config)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Dropout would make the ratio of a policy to itself differ from 1.
        model.eval()

    def train_step(self, batch: PackedBatch, version: int) -> StepMetrics:
        """Take the policy from `version` to `version + 1`. The batch is the same on every rank."""
        started = time.perf_counter()
        terms = self._first_pass(batch) if self.objective.needs_first_pass else None
        done = self._passes(batch, terms)
        gradients = take_gradients(self.parameters)
        sum_over_ranks(gradients, self.world)
        norm = global_norm(gradients)
        self._check_finite(batch, done, norm)

        ctn_started = time.perf_counter()
        ctn_norm = self._bias_norm(batch, done.lp_T) if self.objective.ctn == "gradient" else 0.0
        seconds_ctn = time.perf_counter() - ctn_started
        if not np.isfinite(ctn_norm):
            raise NonFiniteError(
                f"the norm of the clipping bias is {ctn_norm}; no weight was changed"
            )
        divisor = ctn_divisor(ctn_norm, self.objective.ctn_c, self.objective.ctn_raw)
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-12)) / divisor
        learning_rate = self._apply(gradients, scale, version)
        policy = policy_metrics(batch, self.objective, done.lp_T, done.entropy_T, version)
        return StepMetrics(
            version=version + 1,
            loss=done.loss,
            learning_rate=learning_rate,
            grad_norm=norm,
            grad_norm_applied=norm * scale,
            ctn_norm=ctn_norm,
            ctn_divisor=divisor,
            policy=policy,
            data=data_metrics(batch, version),
            num_micro_batches=done.num_micro_batches,
            num_padded_tokens=done.num_padded_tokens,
            seconds=time.perf_counter() - started,
            seconds_ctn=seconds_ctn,
        )

    def learning_rate(self, version: int) -> float:
        """Of the step that leaves `version`. 1e-4 with 2 warm-up steps: 5e-5, 1e-4, 1e-4, ..."""
        return self.config.learning_rate * min(
            1.0, (version + 1) / max(1, self.config.warmup_steps)
        )

    def measure(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-prob [T] and entropy [T] of the batch's trained tokens, without gradients."""
        done = self._empty_pass(batch)
        with torch.no_grad():
            for rows in self._plan(batch, range(len(batch.trajectories))):
                self._forward(batch, rows, done)
        self._gather(done)
        return done.lp_T, done.entropy_T

    def _first_pass(self, batch: PackedBatch) -> BatchTerms:
        lp_T, _ = self.measure(batch)
        return batch_terms(self.objective, lp_T, batch.tokens)

    def _passes(self, batch: PackedBatch, terms: BatchTerms | None) -> Pass:
        """Backward where there is a gradient; log-probs only where the advantage is zero."""
        done = self._empty_pass(batch)
        has_gradient_B = batch.advantage_B.numpy() != 0
        if not self.objective.skips_zero_advantage:
            has_gradient_B[:] = True
        for rows in self._plan(batch, np.flatnonzero(has_gradient_B).tolist()):
            self._backward(batch, rows, terms, done)
        with torch.no_grad():
            for rows in self._plan(batch, np.flatnonzero(~has_gradient_B).tolist()):
                self._forward(batch, rows, done)
        self._gather(done)
        return done

    def _plan(self, batch: PackedBatch, trajectories: Sequence[int]) -> list[list[int]]:
        if not trajectories:
            return []
        plan = split(batch, self.config.micro_batch_tokens, self.world.size, trajectories)
        return plan[self.world.rank]

    def _backward(
        self, batch: PackedBatch, rows: Sequence[int], terms: BatchTerms | None, done: Pass
    ) -> None:
        forward = self._forward(batch, rows, done)
        if forward is None:
            return
        micro_batch, lp_S = forward
        token_S = micro_batch.token_S.cpu()
        tokens = batch.tokens.take(token_S).to(lp_S.device)
        if terms is not None:
            terms = BatchTerms(terms.clip_fraction, terms.masked_T[token_S].to(lp_S.device))
        share = loss(self.objective, lp_S, tokens, terms)
        share.backward()
        done.loss += share.item()

    def _forward(
        self, batch: PackedBatch, rows: Sequence[int], done: Pass
    ) -> tuple[MicroBatch, Tensor] | None:
        """Log-probs of a micro-batch, also written into `done`; None for an empty one."""
        done.num_micro_batches += 1
        if not rows:
            return None
        micro_batch = collate(batch, rows)
        done.num_padded_tokens += micro_batch.input_ids_RL.numel()
        on_device = micro_batch.to(self.world.device)
        lp_S, entropy_S = logprobs(self.model, on_device, self.config.precision)
        done.lp_T[micro_batch.token_S] = lp_S.detach().to(done.lp_T)
        done.entropy_T[micro_batch.token_S] = entropy_S.to(done.entropy_T)
        return micro_batch, lp_S

    def _empty_pass(self, batch: PackedBatch) -> Pass:
        # Float64 in the tests that compare splits, the weights' own precision otherwise.
        zero_T = torch.zeros(batch.num_tokens, dtype=self.parameters[0].dtype)
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

    def _check_finite(self, batch: PackedBatch, done: Pass, norm: float) -> None:
        bad = (~torch.isfinite(done.lp_T)).nonzero()
        if len(bad):
            where, value = turn_and_trajectory(batch, int(bad[0])), done.lp_T[bad[0]].item()
            raise NonFiniteError(
                f"{where}: log-prob is {value} under the policy being trained; "
                "no weight was changed"
            )
        if not (np.isfinite(done.loss) and np.isfinite(norm)):
            raise NonFiniteError(
                f"loss is {done.loss}, gradient norm is {norm}; no weight was changed"
            )

    def _bias_norm(self, batch: PackedBatch, lp_T: Tensor) -> float:
        """||C||: one more pass over the trajectories that hold a clipped token, up to their last
        one.

        All ranks know all log-probs, so they agree without a message on whether to run it, and the
        trajectories are divided among them anew.
        """
        tokens = batch.tokens
        w_T = importance_ratio(self.objective.ratio, log_ratio(lp_T, tokens.old_T), tokens.segments)
        clipped_T = clipped(self.objective, w_T, tokens.a_T)
        if not clipped_T.any():
            return 0.0
        coefficient_T = bias_coefficient(w_T, tokens.a_T, tokens.weight_T, clipped_T)
        affected = tokens.segments.trajectory_of_T[clipped_T].unique().tolist()
        for rows in self._plan(batch, affected):
            if rows:
                micro_batch = collate(batch, rows, clipped_T.numpy()).to(self.world.device)
                lp_S, _ = logprobs(self.model, micro_batch, self.config.precision)
                coefficient_S = coefficient_T[micro_batch.token_S.cpu()].to(lp_S.device)
                (coefficient_S * lp_S).sum().backward()
        bias = take_gradients(self.parameters)
        sum_over_ranks(bias, self.world)
        return global_norm(bias)

    def _apply(self, gradients: Sequence[Tensor], scale: float, version: int) -> float:
        learning_rate = self.learning_rate(version)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            # The step's seconds would else end before its last kernel does.
            torch.cuda.synchronize(self.world.device)
        return learning_rate
