"""`leeway export`: the policy of a run as a folder that others load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from leeway.learner.checkpoint import Checkpoints
from leeway.learner.config import LearnerConfig
from leeway.learner.model import load_model
from leeway.learner.trainer import Trainer
from leeway.replay.errors import ConfigurationError
from leeway.services import cli
from leeway.services.export import export_policy


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose versions 1, 2 and 3 have scores 0.5, 0.9 and 0.1; weights say the version."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    base = tmp_path / "base"
    LlamaForCausalLM(config).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    trainer = Trainer(load_model(base), LearnerConfig())
    checkpoints = Checkpoints(run / "checkpoints", base, trainer.world)
    for version, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
        with torch.no_grad():
            trainer.parameters[0].fill_(version / 3)
        checkpoints.save(trainer, version, score=score)
    checkpoints.close()
    return run


def first_weight(folder: Path) -> torch.Tensor:
    return next(AutoModelForCausalLM.from_pretrained(folder).parameters())[0, 0]


@pytest.mark.parametrize(
    ("options", "version"), [((), 3), (("--which", "last"), 3), (("--which", "best"), 2)]
)
def test_the_newest_or_the_best_is_written(
    run_dir: Path, tmp_path: Path, options: tuple[str, ...], version: int
):
    out = tmp_path / "made" / "policy"
    result = CliRunner().invoke(cli.app, ["export", str(run_dir), str(out), *options])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == f"policy version {version} is in {out}"
    assert first_weight(out).item() == pytest.approx(version / 3)
    assert (out / "tokenizer.json").is_file()
    assert not list(out.glob("training*"))


def test_weights_are_rounded_if_asked_for(run_dir: Path, tmp_path: Path):
    export_policy(run_dir, tmp_path / "half", "best", "bfloat16")
    weight = first_weight(tmp_path / "half")
    assert weight.dtype == torch.bfloat16
    assert weight == torch.tensor(2 / 3).bfloat16()


def test_a_dry_run_says_the_version_and_the_size_and_writes_nothing(run_dir: Path, tmp_path: Path):
    out = tmp_path / "policy"
    options = ["export", str(run_dir), str(out), "--which", "best", "--dry-run", "--json"]
    result = CliRunner().invoke(cli.app, options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["does"] == "write policy version 2 in float32"
    assert not out.exists()
    export_policy(run_dir, out, "best", "float32")
    written = sum(file.stat().st_size for file in out.iterdir())
    assert found["writes"][0]["num_bytes"] == written


def test_a_folder_that_is_in_use_is_refused(run_dir: Path):
    with pytest.raises(ConfigurationError, match="exists; name a folder"):
        export_policy(run_dir, run_dir, "last", "float32")


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigurationError, match="no complete checkpoint yet"):
        export_policy(tmp_path, tmp_path / "out", "last", "float32")
