"""Checkpoints: exact resumption, and nothing half written."""

import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from leeway.learner import checkpoint
from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.checkpoint import Checkpoints
from leeway.learner.config import LearnerConfig
from leeway.learner.errors import CheckpointError, NonFiniteError
from leeway.learner.model import load_model
from leeway.learner.sharding import local
from leeway.learner.trainer import Trainer
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

CONFIG = LearnerConfig(warmup_steps=3, learning_rate=1e-2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The model that a run starts from."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


def batch(seed: int) -> PackedBatch:
    rng = np.random.default_rng(seed)
    trajectories = tuple(
        Trajectory(
            trajectory_id=str(i),
            token_ids=rng.integers(0, 64, 9).astype(np.int32),
            turns=(Turn(3, 2, 2, "search"), Turn(7, 2, 0, "answer")),
            logprobs=np.full(4, -4.2, np.float32),
            versions=np.zeros(4, np.int32),
            reward=float(i % 2),
            stop_reason="answer",
            scores={},
            duration_s=1.0,
        )
        for i in range(4)
    )
    group = Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=trajectories)
    return build_batch([group])


def train(trainer: Trainer, start: int, end: int) -> None:
    for version in range(start, end):
        trainer.train_step(batch(version), version)


def save(
    trainer: Trainer, base: Path, version: int, score: float | None = None
) -> checkpoint.Checkpoint:
    """Complete when it returns."""
    checkpoints = Checkpoints(base.parent / "checkpoints", base, trainer.world)
    checkpoints.save(trainer, version, {"epoch": 1}, score)
    checkpoints.close()
    found = checkpoint.latest(base.parent / "checkpoints")
    assert found is not None
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("objective", ["so-grpo", "so-ppo"])
def test_two_steps_and_a_resumption_and_two_steps_equal_four_steps(
    base: Path, objective: str, precision: str
) -> None:
    config = CONFIG.model_copy(update={"objective": objective, "precision": precision})
    straight = Trainer(load_model(base), config)
    train(straight, 0, 4)
    first = Trainer(load_model(base), config)
    train(first, 0, 2)
    found = save(first, base, 2)
    second = Trainer(load_model(found.path), config)
    restored = checkpoint.restore(found.path, second)
    assert (restored.version, restored.extra) == (2, {"epoch": 1})
    train(second, restored.version, 4)
    for resumed, expected in zip(second.parameters, straight.parameters, strict=True):
        assert torch.equal(local(resumed), local(expected))


def test_what_a_critic_that_fails_behind_the_policys_step_leaves_is_never_resumed(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.model_copy(update={"objective": "so-ppo"})
    straight = Trainer(load_model(base), config)
    train(straight, 0, 4)
    failing = Trainer(load_model(base), config)
    train(failing, 0, 2)
    found = save(failing, base, 2)
    before = [p.clone() for p in failing.parameters]

    def fail(*_: object) -> None:
        raise NonFiniteError("the critic's loss is inf")

    monkeypatch.setattr(failing.critic, "train", fail)
    with pytest.raises(NonFiniteError, match="the critic's loss is inf"):
        failing.train_step(batch(2), 2)
    pairs = zip(failing.parameters, before, strict=True)
    assert any(not torch.equal(now, then) for now, then in pairs)
    resumed = Trainer(load_model(found.path), config)
    train(resumed, checkpoint.restore(found.path, resumed).version, 4)
    for now, expected in zip(resumed.parameters, straight.parameters, strict=True):
        assert torch.equal(now, expected)


def test_the_random_generator_goes_on_where_it_was(base: Path) -> None:
    trainer = Trainer(load_model(base), CONFIG)
    found = save(trainer, base, 1)
    expected = torch.rand(3)
    checkpoint.restore(found.path, trainer)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_newest_two_are_kept_and_tokenizer_files_travel(base: Path) -> None:
    trainer = Trainer(load_model(base), CONFIG)
    for version in (1, 2, 10):
        save(trainer, base, version)
    kept = sorted(path.name for path in (base.parent / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000010"]
    found = checkpoint.latest(base.parent / "checkpoints")
    assert found is not None and found.version == 10
    assert (found.path / "tokenizer.json").read_text() == "{}"


def test_an_unfinished_checkpoint_is_never_the_latest(base: Path) -> None:
    directory = base.parent / "checkpoints"
    assert checkpoint.latest(directory) is None
    (directory / ".writing-step-00000003").mkdir(parents=True)
    assert checkpoint.latest(directory) is None


def test_an_engine_finds_the_policy_alone_beside_the_configuration(base: Path) -> None:
    trainer = Trainer(load_model(base), CONFIG.model_copy(update={"objective": "ppo"}))
    found = save(trainer, base, 1)
    assert [file.name for file in found.path.glob("*.safetensors")] == ["model.safetensors"]


def test_a_checkpoint_without_a_critic_is_refused_where_one_is_needed(base: Path) -> None:
    found = save(Trainer(load_model(base), CONFIG), base, 1)
    trainer = Trainer(load_model(base), CONFIG.model_copy(update={"objective": "ppo"}))
    with pytest.raises(CheckpointError, match="holds no critic"):
        checkpoint.restore(found.path, trainer)


def test_a_resumed_run_takes_its_rates_from_its_own_configuration(base: Path) -> None:
    config = CONFIG.model_copy(update={"objective": "ppo", "warmup_steps": 0})
    first = Trainer(load_model(base), config)
    train(first, 0, 1)
    found = save(first, base, 1)
    other = {"learning_rate": 3e-5, "critic_learning_rate": 7e-5, "weight_decay": 0.01}
    second = Trainer(load_model(found.path), config.model_copy(update=other))
    checkpoint.restore(found.path, second)
    train(second, 1, 2)
    assert second.critic is not None
    (policy,), (critic,) = second.optimizer.param_groups, second.critic.optimizer.param_groups
    assert (policy["lr"], policy["weight_decay"]) == (3e-5, 0.01)
    assert (critic["lr"], critic["weight_decay"]) == (7e-5, 0.01)


@pytest.mark.parametrize("name", ["training.json", "training/*.safetensors"])
def test_a_damaged_state_is_refused_by_name(base: Path, name: str) -> None:
    trainer = Trainer(load_model(base), CONFIG)
    train(trainer, 0, 1)
    found = save(trainer, base, 1)
    for file in found.path.glob(name):
        file.write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="step-00000001"):
        checkpoint.restore(found.path, trainer)


def test_the_best_is_kept_beside_the_newest_two(base: Path) -> None:
    trainer = Trainer(load_model(base), CONFIG)
    for version, score in ((1, 0.1), (2, 0.7), (3, 0.2), (4, None), (5, 0.3)):
        save(trainer, base, version, score)
    directory = base.parent / "checkpoints"
    assert sorted(path.name[-1] for path in directory.iterdir()) == ["2", "4", "5"]
    best = checkpoint.best(directory)
    assert best is not None and (best.version, best.score) == (2, 0.7)


def test_without_scores_there_is_no_best(base: Path) -> None:
    save(Trainer(load_model(base), CONFIG), base, 1)
    assert checkpoint.best(base.parent / "checkpoints") is None


def test_training_goes_on_while_a_checkpoint_of_the_moment_is_written(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing waits here until the next step is over; the weights are those of before."""
    trainer = Trainer(load_model(base), CONFIG)
    train(trainer, 0, 1)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    may_write = Event()
    write = PreTrainedModel.save_pretrained

    def late(self: PreTrainedModel, *arguments: Any, **named: Any) -> None:
        assert may_write.wait(60)
        write(self, *arguments, **named)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", late)
    directory = base.parent / "checkpoints"
    checkpoints = Checkpoints(directory, base, trainer.world)
    checkpoints.save(trainer, 1)
    train(trainer, 1, 2)
    assert checkpoint.latest(directory) is None
    may_write.set()
    checkpoints.close()
    found = checkpoint.latest(directory)
    assert found is not None
    saved = dict(load_model(found.path).named_parameters())
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    resumed = Trainer(load_model(found.path), CONFIG)
    checkpoint.restore(found.path, resumed)
    train(resumed, 1, 2)
    assert all(
        torch.equal(p, q) for p, q in zip(resumed.parameters, trainer.parameters, strict=True)
    )


def test_a_write_is_over_when_it_has_ended_or_its_time_has(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = Event()

    def slow(*_: Any, **__: Any) -> None:
        goes_on.wait(60)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", slow)
    trainer = Trainer(load_model(base), CONFIG)
    checkpoints = Checkpoints(base.parent / "checkpoints", base, trainer.world)
    assert checkpoints.is_over()
    checkpoints.save(trainer, 1)
    assert not checkpoints.is_over()
    now = time.monotonic()
    late = SimpleNamespace(monotonic=lambda: now + trainer.world.timeout_s)
    monkeypatch.setattr(checkpoint, "time", late)
    assert checkpoints.is_over()
    with pytest.raises(CheckpointError, match="was not written within 600 s; is the disk slow"):
        checkpoints.wait()
    goes_on.set()
    checkpoints.close()


def test_a_disk_that_fails_is_told_at_the_next_call(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(load_model(base), CONFIG)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    checkpoints = Checkpoints(base.parent / "checkpoints", base, trainer.world)
    checkpoints.save(trainer, 1)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.wait()
    assert checkpoint.latest(base.parent / "checkpoints") is None
