"""Every number told of a step is of the whole batch, however its passes are cut up, by hand.

The policy reads the token before only: behind id 0 the next of four tokens is drawn evenly, behind
1 with 1/2, 1/4, 1/8, 1/8, behind 2 with 1/8, 1/8, 1/4, 1/2. So log-probs are whole multiples of
ln 2, and an entropy is 2 ln 2 or 1.75 ln 2.

Two groups: in the first a wins and b loses, the second's c and e have equal rewards and teach
nothing. The rate is too small to move anything, so a second minibatch is read by the same policy.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.config import LearnerConfig
from leeway.learner.metrics import StepMetrics
from leeway.learner.trainer import Trainer
from leeway.learner.update import build_update
from leeway.learner.world import World
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

VERSION = 10
LN2 = math.log(2)
EVERYTHING, SCARCE = 4096, 4
"""Tokens of a micro-batch: the whole batch's, or those of a alone."""

torch.set_num_threads(1)


def near(value: object) -> object:
    # The sampler's log-probs are float32.
    return pytest.approx(value, rel=1e-6, abs=1e-6)


def policy() -> LlamaForCausalLM:
    """Embeddings are unit vectors, the block adds nothing, and the output layer is the table."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            rms_norm_eps=1e-12,
            tie_word_embeddings=False,
        )
    ).double()
    weights = dict(model.named_parameters())
    table = [[0.25] * 4, [1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 8, 1 / 8, 1 / 4, 1 / 2], [0.25] * 4]
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
        weights["model.embed_tokens.weight"].copy_(torch.eye(4))
        # The norm of a unit vector of four has twice its length.
        weights["model.norm.weight"].fill_(0.5)
        weights["lm_head.weight"].copy_(torch.tensor(table, dtype=torch.float64).log().T)
    return model


def trajectory(
    name: str,
    ids: Sequence[int],
    turns: Sequence[Turn],
    bits: Sequence[int],
    d: Sequence[float],
    versions: Sequence[int],
    reward: float,
    scores: Mapping[str, float],
) -> Trajectory:
    """Tokens that cost the policy `bits` times ln 2, and that lie `d` above the sampler's."""
    return Trajectory(
        trajectory_id=name,
        token_ids=np.array(ids, np.int32),
        turns=tuple(turns),
        logprobs=(-LN2 * np.array(bits) - np.array(d)).astype(np.float32),
        versions=np.array(versions, np.int32),
        reward=reward,
        stop_reason="answer",
        scores=dict(scores),
        duration_s=1.0,
    )


def batch() -> PackedBatch:
    """Trained are 3, 2, 1 and 2 tokens in 2, 1, 1 and 1 turns."""
    a = trajectory(
        "a", [0, 1, 0, 2, 3], [Turn(1, 2, 1, "invalid"), Turn(4, 1, 0, "answer")],
        bits=[2, 1, 1], d=[0.5, -0.1, 0.0], versions=[10, 9, 10],
        reward=1.0, scores={"f1": 0.25, "think_tokens": 6.0},
    )  # fmt: skip
    b = trajectory(
        "b", [0, 2, 0], [Turn(1, 2, 0, "answer")],
        bits=[2, 3], d=[-0.2, -0.4], versions=[5, 9],
        reward=0.0, scores={"f1": 0.0, "retrieved_answer": 3.0},
    )  # fmt: skip
    c = trajectory(
        "c", [0, 0], [Turn(1, 1, 0, "invalid")],
        bits=[2], d=[1.0], versions=[10],
        reward=0.75, scores={"f1": 0.25, "think_tokens": 1.0},
    )  # fmt: skip
    e = trajectory(
        "e", [0, 0, 1], [Turn(1, 2, 0, "search")],
        bits=[2, 2], d=[0.0, -0.6], versions=[9, 10],
        reward=0.75, scores={"f1": 1.0, "think_tokens": 2.0},
    )  # fmt: skip
    groups = [
        Group(group_id=GroupId(name), question_id="q", worker_id="w", trajectories=trajectories)
        for name, trajectories in (("teaches", (a, b)), ("equal", (c, e)))
    ]
    return build_batch(groups)


D = (0.5, -0.1, 0.0, -0.2, -0.4, 1.0, 0.0, -0.6)
K3 = sum(math.exp(-d) - 1 + d for d in D) / 8
DATA = {
    # Oldest versions 9, 5, 10, 9: staleness 1, 5, 0, 1. In order 0, 1, 1, 5; 95 % of the way from
    # the first to the last is at place 2.85.
    "staleness_mean": (1 + 5 + 0 + 1) / 4,
    "staleness_p95": 1 + 0.85 * 4,
    "staleness_max": 5,
    "staleness_histogram/0": 1,
    "staleness_histogram/1": 2,
    "staleness_histogram/5": 1,
    "reward_mean": (1.0 + 0.0 + 0.75 + 0.75) / 4,
    # Off the mean of 0.625 by 0.375, -0.625, 0.125 and 0.125.
    "reward_std": math.sqrt((0.375**2 + 0.625**2 + 2 * 0.125**2) / 4),
    "score/f1": (0.25 + 0.0 + 0.25 + 1.0) / 4,
    # b carries no such score: it counts neither as 0 nor among those divided by.
    "score/think_tokens": (6 + 1 + 2) / 3,
    "score/retrieved_answer": 3.0,
    "turns_per_trajectory": (2 + 1 + 1 + 1) / 4,
    "trained_tokens_per_trajectory": (3 + 2 + 1 + 2) / 4,
    "tokens_per_trajectory": (5 + 3 + 2 + 3) / 4,
    # Of turns: by trajectory it would be 2 / 4, or 1.5 / 4.
    "invalid_share": 2 / 5,
    "num_zero_variance_groups": 1,
    "num_groups": 2,
    "num_trajectories": 4,
    "num_tokens_trained": 8,
}
OFF_POLICY = {
    # |d| in order 0, 0, 0.1, 0.2, 0.4, 0.5, 0.6, 1; 95 % of the way is at place 6.65.
    "log_ratio_abs_mean": (0.5 + 0.1 + 0.2 + 0.4 + 1.0 + 0.6) / 8,
    "log_ratio_abs_p95": 0.6 + 0.65 * 0.4,
    "log_ratio_abs_max": 1.0,
    "kl_behaviour": K3,
    "entropy": (2 + 1.75 + 1.75 + 2 + 1.75 + 2 + 2 + 2) / 8 * LN2,
}
GRPO = {
    # The winner's 1.65 and the loser's 0.67; what teaches nothing is never clipped, and counts.
    "clip_fraction_tokens": 2 / 8,
    "clip_fraction_turns": 2 / 5,
    "effective_sample_size": (
        sum(math.exp(d) for d in D) ** 2 / sum(math.exp(2 * d) for d in D) / 8
    ),
    "kl_old": K3,
}
GAPS: Mapping[int, Sequence[float]] = {0: (0.5, 0.0), 1: (), 2: (1.0,), 3: (0.6,)}
"""|d| of the tokens that version 10 sampled, by trajectory."""


def configure(objective: str, micro_batch_tokens: int, num_minibatches: int) -> LearnerConfig:
    # Below the 256 that a configuration allows, so that a tiny batch makes several micro-batches.
    return LearnerConfig(objective=objective, warmup_steps=0).model_copy(
        update={
            "micro_batch_tokens": micro_batch_tokens,
            "num_minibatches": num_minibatches,
            "learning_rate": 1e-15,
        }
    )


def step(
    objective: str = "grpo",
    micro_batch_tokens: int = EVERYTHING,
    num_minibatches: int = 1,
    world: World | None = None,
) -> StepMetrics:
    config = configure(objective, micro_batch_tokens, num_minibatches)
    return Trainer(policy(), config, world).train_step(batch(), VERSION)


def check_told(told: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert {name: told.get(name) for name in expected} == near(dict(expected))


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_tokens", [EVERYTHING, SCARCE])
def test_numbers_are_of_all_minibatches_and_micro_batches(
    micro_batch_tokens: int, num_minibatches: int
) -> None:
    told = step("grpo", micro_batch_tokens, num_minibatches).as_dict()
    check_told(told, DATA | OFF_POLICY | GRPO)
    assert told["num_optimizer_steps"] == num_minibatches
    # Last trained tokens stand at 4, 2, 1 and 2.
    assert told["num_tokens_read"] == 4 + 2 + 1 + 2


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize(
    ("micro_batch_tokens", "num_micro_batches"),
    [
        (EVERYTHING, 2),  # those with a gradient, those without
        (SCARCE, 3),  # a of 4 and b of 2 tokens apart, c and e together
    ],
)
def test_passes_with_and_without_a_gradient_are_counted_over_all_minibatches(
    micro_batch_tokens: int, num_micro_batches: int, num_minibatches: int
) -> None:
    # Version 10 draws c and e for the first of two minibatches.
    metrics = step("grpo", micro_batch_tokens, num_minibatches)
    assert metrics.num_micro_batches == num_micro_batches


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_the_gap_is_of_the_first_minibatch_s_tokens_of_the_version_that_reads_them(
    num_minibatches: int,
) -> None:
    config = configure("grpo", EVERYTHING, num_minibatches)
    trainer = Trainer(policy(), config)
    first, *_ = build_update(batch(), trainer.objective, VERSION, num_minibatches).minibatches
    gaps = [gap for b in first for gap in GAPS[b]]
    metrics = trainer.train_step(batch(), VERSION).policy
    assert metrics.gap_mean == (near(sum(gaps) / len(gaps)) if gaps else None)
    assert metrics.gap_max == (near(max(gaps)) if gaps else None)


@pytest.mark.parametrize("micro_batch_tokens", [EVERYTHING, SCARCE])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_against_the_start_of_the_step_ratios_are_one_and_only_the_way_from_the_sampler_is_told(
    micro_batch_tokens: int, num_minibatches: int
) -> None:
    told = step("decoupled-grpo", micro_batch_tokens, num_minibatches).as_dict()
    of_ratios = {
        "clip_fraction_tokens": 0.0,
        "clip_fraction_turns": 0.0,
        "effective_sample_size": 1.0,
        "kl_old": 0.0,
        "log_ratio_old_abs_mean": 0.0,
        "log_ratio_old_abs_p95": 0.0,
        "log_ratio_old_abs_max": 0.0,
        # exp(1) is cut to 2.
        "correction_mean": (
            math.exp(0.5) + math.exp(-0.1) + 1 + math.exp(-0.2) + math.exp(-0.4) + 2 + 1
            + math.exp(-0.6)
        ) / 8,
        "correction_share": 1 / 8,
    }  # fmt: skip
    check_told(told, DATA | OFF_POLICY | of_ratios)


def test_the_gap_is_to_the_engine_where_ratios_are_taken_against_the_start_of_the_step() -> None:
    metrics = step("decoupled-grpo").policy
    assert metrics.gap_mean == near((0.5 + 0.0 + 1.0 + 0.6) / 4)
    assert metrics.gap_max == near(1.0)


def test_a_first_pass_that_masks_nothing_tells_no_masked_fraction() -> None:
    """The penalty form reads its minibatch first, too, for the share of clipped tokens."""
    metrics = step("so-grpo-penalty", num_minibatches=2)
    assert metrics.policy.masked_fraction is None
    assert "masked_fraction" not in metrics.as_dict()


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What each of two ranks told."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    peers = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, __file__, str(folder / f"{rank}.json")]
        peers.append(subprocess.Popen(command, env=environment))
    assert [peer.wait(timeout=120) for peer in peers] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_tells_the_numbers_of_the_whole_batch(
    rank: int, of_two_ranks: list[dict[str, float]]
) -> None:
    gap = {"gap_mean": (0.5 + 0.0 + 1.0 + 0.6) / 4, "gap_max": 1.0}
    check_told(of_two_ranks[rank], DATA | OFF_POLICY | GRPO | gap)


def test_passes_and_tokens_read_are_those_of_one_rank(of_two_ranks: list[dict[str, float]]) -> None:
    # The first reads a and then e, the second b and then c.
    assert [told["num_tokens_read"] for told in of_two_ranks] == [4 + 2, 2 + 1]
    assert [told["num_micro_batches"] for told in of_two_ranks] == [2, 2]


if __name__ == "__main__":
    joined = World.from_environment(timeout_s=60, device="cpu")
    told = step("grpo", SCARCE, world=joined).as_dict()
    Path(sys.argv[1]).write_text(json.dumps(told))
    joined.barrier()
    joined.close()
    # All is said and written: a thread of torch's may abort a process that tidies up (SIGABRT).
    os._exit(0)
