"""One step per batch: from policy version v to v + 1.

Letters: `T` trained tokens of the whole batch, `B` trajectories.

A step, on every rank alike:
1. once for the batch: log-probs at the start where ratios are taken against them, the critic's
   values, advantages, weights (update.py);
2. for each minibatch (one, unless configured otherwise)
   a. where the objective needs a number of the whole minibatch first: log-probs without gradient;
   b. micro-batches forward and backward, log-probs kept; both are summed over ranks;
   c. everything must be finite, or NonFiniteError before the optimizer steps;
   d. gradient bounded to `max_grad_norm`, THEN divided by clipping-triggered normalization: a bound
      applied after the division would cancel it whenever both norms exceed the limit;
   e. AdamW;
3. the critic learns from the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from leeway.learner.batch import PackedBatch, check_ids
from leeway.learner.config import LearnerConfig
from leeway.learner.critic import Critic
from leeway.learner.errors import NonFiniteError
from leeway.learner.gradients import give_back, global_norm, scale_to, take_gradients
from leeway.learner.metrics import StepMetrics, data_metrics, policy_metrics
from leeway.learner.objective.ctn import bias_coefficient, ctn_divisor
from leeway.learner.objective.loss import BatchTerms, batch_terms, clipped
from leeway.learner.objective.presets import resolve
from leeway.learner.objective.ratio import importance_ratio, log_ratio
from leeway.learner.passes import Pass, Passes
from leeway.learner.sharding import Layout, full_weights, weight_manifest
from leeway.learner.update import Update, build_update, check_finite, tokens_of
from leeway.learner.world import World
from leeway.replay.board import TensorSpec

BETAS: Final = (0.9, 0.95)
"""AdamW. The second is below its default: gradients of policies change fast."""
CURRENT: Final = "log-prob under the policy being trained"


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did."""

    done: Pass
    grad_norm: float
    """Before it was bounded."""
    applied_norm: float
    """What the optimizer saw."""
    ctn_norm: float | None
    """None where nobody asked for it."""
    ctn_divisor: float
    learning_rate: float
    seconds_ctn: float
    terms: BatchTerms | None = None
    """Of the first pass, where the objective needs one."""


class Trainer:
    """A policy, its optimizer, the objective that moves it, and a critic where that needs one."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, world: World | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.world = World() if world is None else world
        self.objective = resolve(config)
        # It starts as a copy of the policy, which is sharded in the next line.
        self.critic = Critic(model, config, self.world) if self.objective.needs_critic else None
        self._passes = Passes(model, self.world, config.micro_batch_tokens, Layout.of(config))
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding), "token ids are looked up in a table"
        self._num_ids = embeddings.num_embeddings
        # Dropout would make the ratio of a policy to itself differ from 1.
        model.eval()

    def train_step(self, batch: PackedBatch, version: int) -> StepMetrics:
        """Take the policy from `version` to `version + 1`. The batch is the same on every rank."""
        started = time.perf_counter()
        update = self._update(batch, version)
        advance = self._stand_still if self._only_critic_learns(version) else self._optimizer_step
        steps = [advance(update, rows, version) for rows in update.minibatches]
        critic = None
        if self.critic is not None:
            assert update.targets is not None, "a critic learns from targets"
            critic = self.critic.train(batch, update.targets)
        self._synchronize()
        # Each token by the policy that its own optimizer step started from.
        lp_T = torch.stack([step.done.lp_T for step in steps]).sum(0)
        entropy_T = torch.stack([step.done.entropy_T for step in steps]).sum(0)
        return StepMetrics(
            version=version + 1,
            loss=_mean([step.done.loss for step in steps]),
            learning_rate=_mean([step.learning_rate for step in steps]),
            grad_norm=_mean([step.grad_norm for step in steps]),
            grad_norm_applied=_mean([step.applied_norm for step in steps]),
            ctn_norm=_largest([step.ctn_norm for step in steps]),
            ctn_divisor=max(step.ctn_divisor for step in steps),
            policy=policy_metrics(
                update, self.objective, lp_T, entropy_T, version, self._masked_fraction(steps)
            ),
            data=data_metrics(batch, version),
            critic=critic,
            num_optimizer_steps=len(steps),
            num_micro_batches=sum(step.done.num_micro_batches for step in steps),
            num_tokens_read=sum(step.done.num_tokens_read for step in steps),
            seconds=time.perf_counter() - started,
            seconds_ctn=sum(step.seconds_ctn for step in steps),
        )

    def _masked_fraction(self, steps: Sequence[OptimizerStep]) -> float | None:
        masks = [step.terms.masked_T for step in steps if step.terms is not None]
        if self.objective.surrogate != "second-moment" or not masks:
            return None
        return torch.stack(masks).any(0).float().mean().item()

    def learning_rate(self, version: int) -> float:
        """Of the step that leaves `version`.

        1e-4, 2 steps of warm-up and 4 in all: 5e-5, 1e-4, 1e-4, 1e-4; with linear decay 5e-5, 1e-4,
        1e-4, 5e-5.
        """
        config = self.config
        if version < config.warmup_steps:
            return config.learning_rate * (version + 1) / config.warmup_steps
        way = (version - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
        return config.learning_rate * _share_left(config.learning_rate_decay, min(way, 1.0))

    def measure(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-prob [T] and entropy [T] of the batch's trained tokens, without gradients."""
        check_ids(batch, self._num_ids)
        done = self._passes.measure(batch, range(len(batch.trajectories)))
        return done.lp_T, done.entropy_T

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's whole tensors, one by one; see `full_weights`."""
        return full_weights(self.model)

    def weight_manifest(self, dtype: torch.dtype) -> list[TensorSpec]:
        """What `weights` yields, by name and shape, floats in `dtype`."""
        return weight_manifest(self.model, dtype)

    def _update(self, batch: PackedBatch, version: int) -> Update:
        check_ids(batch, self._num_ids)
        proximal_T = value_T = None
        if self.objective.old == "proximal":
            proximal_T, _ = self.measure(batch)
            check_finite(batch, proximal_T, CURRENT)
        if self.critic is not None:
            value_T = self.critic.values(batch)
        return build_update(
            batch, self.objective, version, self.config.num_minibatches, proximal_T, value_T
        )

    def _only_critic_learns(self, version: int) -> bool:
        return self.critic is not None and version < (self.config.critic_warmup_steps or 0)

    def _stand_still(self, update: Update, rows: Sequence[int], version: int) -> OptimizerStep:
        done = self._passes.measure(update.batch, rows)
        check_finite(update.batch, done.lp_T, CURRENT)
        return OptimizerStep(done, 0.0, 0.0, None, 1.0, 0.0, 0.0)

    def _optimizer_step(self, update: Update, rows: Sequence[int], version: int) -> OptimizerStep:
        batch, objective = update.batch, self.objective
        terms = self._first_pass(update, rows) if objective.needs_first_pass else None
        done = self._passes.backward(update, objective, rows, terms)
        gradients = take_gradients(self.parameters)
        norm = global_norm(gradients, self.world)
        check_finite(batch, done.lp_T, CURRENT)
        _check_finite("loss", done.loss)
        _check_finite("gradient norm", norm)

        ctn_started = time.perf_counter()
        normalizes = objective.ctn == "gradient"
        measures = normalizes or bool(self.config.measure_ctn)
        ctn_norm = self._bias_norm(update, rows, done.lp_T) if measures else None
        seconds_ctn = time.perf_counter() - ctn_started
        divisor = 1.0
        if ctn_norm is not None:
            _check_finite("norm of the clipping bias", ctn_norm)
            if normalizes:
                divisor = ctn_divisor(ctn_norm, objective.ctn_c, objective.ctn_raw)
        scale, learning_rate = (
            scale_to(norm, self.config.max_grad_norm),
            self.learning_rate(version),
        )
        if objective.ctn_target == "gradient":
            scale /= divisor
        else:
            learning_rate /= divisor
        self._apply(gradients, scale, learning_rate)
        return OptimizerStep(
            done, norm, norm * scale, ctn_norm, divisor, learning_rate, seconds_ctn, terms
        )

    def _first_pass(self, update: Update, rows: Sequence[int]) -> BatchTerms:
        """Numbers of the minibatch; its mask is of the whole batch, False elsewhere."""
        done = self._passes.measure(update.batch, rows)
        token_S = tokens_of(update.batch, tuple(rows))
        terms = batch_terms(self.objective, done.lp_T[token_S], update.tokens.take(token_S))
        masked_T = torch.zeros(update.batch.num_tokens, dtype=torch.bool)
        masked_T[token_S] = terms.masked_T
        return BatchTerms(terms.clip_fraction, masked_T)

    def _bias_norm(self, update: Update, rows: Sequence[int], lp_T: Tensor) -> float:
        """||C||: one more pass over the trajectories that hold a clipped token, up to their last
        one.

        All ranks know all log-probs, so they agree without a message on whether to run it, and the
        trajectories are divided among them anew.
        """
        tokens = update.tokens
        w_T = importance_ratio(self.objective.ratio, log_ratio(lp_T, tokens.old_T), tokens.segments)
        clipped_T = clipped(self.objective, w_T, tokens.a_T)
        if len(update.minibatches) > 1:
            inside_T = torch.zeros_like(clipped_T)
            inside_T[tokens_of(update.batch, tuple(rows))] = True
            clipped_T &= inside_T
        if not clipped_T.any():
            return 0.0
        coefficient_T = bias_coefficient(w_T, tokens.a_T, tokens.term_weight_T, clipped_T)
        self._passes.backward_linear(update.batch, coefficient_T, clipped_T.numpy())
        return global_norm(take_gradients(self.parameters), self.world)

    def _apply(self, gradients: Sequence[Tensor], scale: float, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, self.config.weight_decay
        give_back(self.parameters, gradients, scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _synchronize(self) -> None:
        """The step's seconds would else end before its last kernel does."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def _share_left(decay: Literal["none", "linear", "cosine"], way: float) -> float:
    """Of the highest rate, `way` being 0 at the end of the warm-up and 1 behind the last step."""
    if decay == "linear":
        return 1.0 - way
    return 1.0 if decay == "none" else 0.5 * (1.0 + math.cos(math.pi * way))


def _largest(values: Sequence[float | None]) -> float | None:
    """None where none is known."""
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _check_finite(name: str, value: float) -> None:
    if not np.isfinite(value):
        raise NonFiniteError(f"the {name} is {value}; this optimizer step was not taken")
