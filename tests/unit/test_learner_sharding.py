"""Two ranks hold slices of what one rank holds whole, and checkpoints go from one to the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner import checkpoint
from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.config import LearnerConfig
from leeway.learner.model import Network, load_model
from leeway.learner.sharding import Layout, full_weights, lay_out, settle, weight_manifest
from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from leeway.replay.errors import ConfigurationError
from leeway.replay.flat_weights import pack
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

torch.set_num_threads(1)


def tiny(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=63,  # no multiple of two: the slices differ
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def batch(seed: int) -> PackedBatch:
    """A group of five: an odd number of trajectories for two ranks."""
    rng = np.random.default_rng(seed)

    def trajectory(i: int) -> Trajectory:
        first, second = (int(n) for n in rng.integers(1, 9, 2))
        num = first + second
        return Trajectory(
            trajectory_id=f"t{i}",
            token_ids=rng.integers(0, 63, 7 + num).astype(np.int32),
            turns=(Turn(3, first, 4, "search"), Turn(7 + first, second, 0, "answer")),
            logprobs=(-np.log(63) + 0.3 * rng.standard_normal(num)).astype(np.float32),
            versions=np.zeros(num, np.int32),
            reward=float(i % 2),
            stop_reason="answer",
            scores={},
            duration_s=1.0,
        )

    members = tuple(trajectory(i) for i in range(5))
    return build_batch(
        [Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=members)]
    )


def configure(**more: Any) -> LearnerConfig:
    config = LearnerConfig(objective="so-ppo", warmup_steps=0, learning_rate=1e-3)
    return config.model_copy(update={"micro_batch_tokens": 24, **more})


def train(trainer: Trainer, start: int, end: int) -> None:
    for version in range(start, end):
        trainer.train_step(batch(version), version)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.critic is not None
    critic = {f"critic.{name}": tensor for name, tensor in full_weights(trainer.critic.model)}
    found = dict(trainer.weights()) | critic
    return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}


def save(trainer: Trainer, directory: Path, base: Path, version: int) -> None:
    checkpoints = checkpoint.Checkpoints(directory, base, trainer.world)
    checkpoints.save(trainer, version)
    checkpoints.close()
    trainer.world.barrier()


def resume(directory: Path, world: World) -> Trainer:
    found = checkpoint.latest(directory)
    assert found is not None
    trainer = Trainer(load_model(found.path, world.device), configure(), world)
    assert checkpoint.restore(found.path, trainer).version == found.version
    return trainer


def gradient(world: World, **more: Any) -> Tensor:
    """Of the policy in one step, whole."""
    config = configure(objective="so-grpo", max_grad_norm=1e9, **more)
    trainer = Trainer(tiny().to(world.device), config, world)
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        for p in trainer.parameters:
            assert p.grad is not None
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            seen.append(whole.flatten().to("cpu", copy=True))

    trainer.optimizer.register_step_pre_hook(look)
    trainer.train_step(batch(0), 0)
    return torch.cat(seen)


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "activations forgotten": {"activation_checkpointing": True},
    "gathered once": {"reshard": False},
    "bfloat16": {"precision": "bfloat16"},
}


@dataclass(frozen=True)
class TwoRanks:
    """What two ranks did, and what they left in `folder`."""

    folder: Path
    seen: dict[str, Any]
    """Of rank 0."""


def work(folder: Path, world: World) -> dict[str, Any]:
    """Of each of the two ranks."""
    first = Trainer(load_model(folder / "base", world.device), configure(), world)
    slices = [p.to_local().numel() for p in first.parameters if isinstance(p, DTensor)]
    train(first, 0, 2)
    save(first, folder / "of-two", folder / "base", 2)
    after_two = weights(first)
    train(first, 2, 4)
    second = resume(folder / "of-one", world)
    train(second, 2, 4)
    return {
        "num_elements": sum(slices),
        "after_two": after_two,
        "after_four": weights(first),
        "resumed_after_four": weights(second),
        "gradients": {name: gradient(world, **more) for name, more in VARIANTS.items()},
    }


def prepare(folder: Path, world: World) -> None:
    """What two ranks find in `folder`: the base model, and a checkpoint of one rank."""
    tiny().save_pretrained(folder / "base")
    one = Trainer(load_model(folder / "base", world.device), configure(), world)
    train(one, 0, 2)
    save(one, folder / "of-one", folder / "base", 2)


def results(folder: Path) -> TwoRanks:
    """What two ranks have left in it."""
    seen = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert abs(seen[0]["num_elements"] - seen[1]["num_elements"]) < 32 * 16
    return TwoRanks(folder, seen[0])


def by_version(world: World) -> dict[int, dict[str, Tensor]]:
    """Weights of one rank that trains four steps."""
    trainer, found = Trainer(tiny().to(world.device), configure(), world), {}
    for version in range(4):
        train(trainer, version, version + 1)
        found[version + 1] = weights(trainer)
    return found


@pytest.fixture(scope="module")
def straight() -> dict[int, dict[str, Tensor]]:
    return by_version(World())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("ranks")
    prepare(folder, World())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    peers = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        peers.append(subprocess.Popen([sys.executable, __file__, str(folder)], env=environment))
    assert [peer.wait(timeout=150) for peer in peers] == [0, 0]
    return results(folder)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def test_each_rank_holds_half(two_ranks: TwoRanks) -> None:
    num_elements = sum(p.numel() for p in tiny().parameters())
    assert 0.4 < two_ranks.seen["num_elements"] / num_elements < 0.6


def test_two_ranks_train_as_one_does(
    two_ranks: TwoRanks, straight: dict[int, dict[str, Tensor]]
) -> None:
    assert_close(two_ranks.seen["after_two"], straight[2])
    assert_close(two_ranks.seen["after_four"], straight[4])
    start = dict(tiny().named_parameters())
    assert any(not torch.equal(straight[2][name], p) for name, p in start.items())


def test_what_is_published_has_the_names_of_the_model_and_no_tied_tensor_twice(
    two_ranks: TwoRanks,
) -> None:
    names = [name for name in two_ranks.seen["after_two"] if not name.startswith("critic.")]
    assert names == [name for name, _ in tiny().named_parameters()]


def test_saved_buffers_are_published_in_their_own_dtype_and_others_not_at_all() -> None:
    model, bias = tiny(), torch.tensor([1.0, 1.0 + 2**-20])  # bfloat16 cannot tell them apart
    block: Any = model.model.layers[0]
    block.mlp.register_buffer("router_bias", bias)
    block.mlp.register_buffer("num_seen", torch.tensor(2**40 + 1))
    block.mlp.register_buffer("scratch", torch.zeros(2), persistent=False)
    manifest = weight_manifest(model, torch.bfloat16)
    prefix = "model.layers.0.mlp."
    assert [spec.name for spec in manifest[-2:]] == [f"{prefix}router_bias", f"{prefix}num_seen"]
    assert [spec.dtype for spec in manifest[-2:]] == ["float32", "int64"]
    assert {spec.dtype for spec in manifest[:-2]} == {"bfloat16"}
    sent = pack(full_weights(model), manifest)
    views = sent.layout.views(sent.flat)
    assert torch.equal(views[f"{prefix}router_bias"], bias)
    assert int(views[f"{prefix}num_seen"]) == 2**40 + 1


def test_one_rank_goes_on_from_a_checkpoint_of_two(
    two_ranks: TwoRanks, straight: dict[int, dict[str, Tensor]]
) -> None:
    trainer = resume(two_ranks.folder / "of-two", World())
    assert_close(weights(trainer), straight[2])
    train(trainer, 2, 4)
    assert_close(weights(trainer), straight[4])


def test_two_ranks_go_on_from_a_checkpoint_of_one(
    two_ranks: TwoRanks, straight: dict[int, dict[str, Tensor]]
) -> None:
    assert_close(two_ranks.seen["resumed_after_four"], straight[4])


def test_each_rank_writes_its_own_slices(two_ranks: TwoRanks) -> None:
    found = checkpoint.latest(two_ranks.folder / "of-two")
    assert found is not None
    assert len(list(found.path.glob("training/shard-*.safetensors"))) == 2


@pytest.mark.parametrize("name", VARIANTS)
def test_the_layout_does_not_change_the_gradient(two_ranks: TwoRanks, name: str) -> None:
    exact, found = gradient(World()), two_ranks.seen["gradients"][name]
    if name == "bfloat16":
        assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > 0.999
        assert found.dtype == torch.float32
    else:
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_activations_forgotten_change_no_bit_on_one_rank() -> None:
    assert torch.equal(gradient(World(), activation_checkpointing=True), gradient(World()))


def test_the_current_weights_are_read_after_a_step_in_half_precision() -> None:
    """Passes without gradient leave whole weights behind, which must not be taken again."""
    config = configure(objective="so-grpo", precision="bfloat16", learning_rate=1e-2)
    trainer, data = Trainer(tiny(), config), batch(0)
    before, _ = trainer.measure(data)
    trainer.train_step(data, 0)
    after, _ = trainer.measure(data)
    fresh = Trainer(tiny(), config)
    with torch.no_grad():
        for p, (_, tensor) in zip(fresh.parameters, trainer.weights(), strict=True):
            assert isinstance(p, DTensor)
            p.to_local().copy_(tensor)
    assert torch.equal(fresh.measure(data)[0], after)
    assert not torch.allclose(before, after, atol=1e-3)


def test_master_weights_move_by_less_than_half_precision_can_tell() -> None:
    """A step of 1e-6 on weights of 0.1 is far below the 4e-4 between two bfloat16 numbers."""
    config = configure(objective="so-grpo", precision="bfloat16", learning_rate=1e-6)
    trainer = Trainer(tiny(), config)
    train(trainer, 0, 1)
    start = dict(tiny().named_parameters())
    moved = torch.cat([(t - start[name]).flatten() for name, t in trainer.weights()]).abs()
    assert {t.dtype for _, t in trainer.weights()} == {torch.float32}
    assert 0 < moved.max() < 2e-6


def test_one_rank_in_float32_is_left_as_it_is() -> None:
    network = Network(tiny())
    lay_out(network, World(), Layout())
    settle(network)
    assert not any(isinstance(p, DTensor) for p in network.parameters())


def test_a_model_without_named_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not name its blocks"):
        lay_out(nn.Linear(2, 2), World(), Layout())


if __name__ == "__main__":
    joined = World.from_environment(timeout_s=60, device="cpu")
    there = Path(sys.argv[1])
    torch.save(work(there, joined), there / f"{joined.rank}.pt")
    joined.close()
