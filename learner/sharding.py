"""How a network lies on the ranks, and in which precision it computes: FSDP2.

Every rank holds a slice of each weight, of its gradient and of its optimizer state, in float32. A
block's whole weights exist while it runs: gathered from all ranks and, where the learner computes
in bfloat16, rounded to it. Gradients are summed over the ranks in float32 and sliced again. One
rank is the same with nothing to gather; in float32 it needs none of this and is left as it is.

Three things are done to a network once, before its first pass: its blocks forget their activations
if asked to, are compiled if asked to, and are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from leeway.learner.config import LearnerConfig
from leeway.learner.world import World
from leeway.replay.board import TensorSpec
from leeway.replay.errors import ConfigurationError
from leeway.replay.flat_weights import describe


@dataclass(frozen=True)
class Layout:
    """How a network is prepared; the keys of LearnerConfig say what they cost."""

    precision: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    reshard: bool = True

    @classmethod
    def of(cls, config: LearnerConfig) -> Layout:
        """What a configuration asks for."""
        return cls(
            config.precision, config.activation_checkpointing, config.compile, config.reshard
        )


def lay_out(
    network: nn.Module, world: World, layout: Layout, exact: nn.Module | None = None
) -> None:
    """Prepare `network`, in place, to be called on every rank alike.

    `exact` is a part that computes in its weights' own precision.
    """
    blocks = list(_blocks(network))
    if not blocks:
        raise ConfigurationError(
            "this model does not name its blocks (_no_split_modules), so it can neither be sharded "
            "nor compiled; train a model like Qwen2, Qwen3, Llama or Gemma 3"
        )
    for block in blocks:
        if layout.compile:
            block.forward = torch.compile(block.forward, dynamic=True)
        if layout.activation_checkpointing:
            block.forward = _forgetful(block.forward)
    if world.size > 1 or layout.precision == "bfloat16":
        _shard(network, blocks, world, layout, exact)


def _shard(
    network: nn.Module,
    blocks: list[nn.Module],
    world: World,
    layout: Layout,
    exact: nn.Module | None,
) -> None:
    mesh, own = world.mesh(), MixedPrecisionPolicy()
    policy = own
    if layout.precision == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # One rank has nothing to free: its whole weights are a copy in another precision.
    reshard = layout.reshard and world.size > 1
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if exact is not None:
        fully_shard(exact, mesh=mesh, mp_policy=own, reshard_after_forward=False)
    # What lies outside the blocks, such as embeddings, is read once more by the output layer.
    fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded(network):
        # Weights of the loss are of the whole batch: gradients are added up, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if world.size == 1:
            # The rounded copy serves all passes of an optimizer step; see `settle`.
            module.set_reshard_after_backward(False)


def settle(network: nn.Module) -> None:
    """Free the whole weights that passes left behind; due after the last one.

    They would be taken for the current ones after the next optimizer step.
    """
    for module in _sharded(network):
        module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing its memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of all that an engine loads: parameters once, tied ones not repeated,
    and saved buffers.

    Gathered one by one, so every rank must go through all of them, or none would end; no rank
    holds more than one unless it keeps it. On one rank nothing is copied.
    """
    for name, parameter in model.named_parameters():
        yield name, _full(parameter.detach())
    for name, buffer in _saved_buffers(model):
        yield name, buffer.detach()


def weight_manifest(model: nn.Module, dtype: torch.dtype) -> list[TensorSpec]:
    """Names and shapes of `full_weights`, in its order, float parameters in `dtype`; nothing is
    gathered.

    Buffers keep their own dtype: who saves one in float32, such as the bias of a router, means it.
    """
    return describe(dict(model.named_parameters()), dtype) + describe(dict(_saved_buffers(model)))


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()
    return tensor


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    kinds: set[str] = set()
    for module in network.modules():
        if isinstance(module, PreTrainedModel):
            kinds |= set(module._no_split_modules or ())
    for module in network.modules():
        if type(module).__name__ in kinds:
            yield module


def _sharded(network: nn.Module) -> Iterator[FSDPModule]:
    for module in network.modules():
        if isinstance(module, FSDPModule):
            yield module


def _forgetful(forward: Any) -> Any:
    def run(*arguments: Any, **named: Any) -> Any:
        # Nothing in a network that is trained here is random, so no generator need be kept.
        return checkpoint(
            forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named
        )

    return run
