"""The whole loop in one process: it trains, every token is exactly as old as it should be, and a
run that has collapsed is ended."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leeway.actors.evaluation import Evaluation
from leeway.actors.worker import RolloutWorker
from leeway.services.config import RunConfig, load
from leeway.services.experiments import arm
from leeway.services.experiments.arm_result import ARM, ArmResult, ArmSpec, read_result
from leeway.services.experiments.collapse import CollapseRule
from leeway.services.experiments.in_process import held_out_questions, run, training_questions
from leeway.services.experiments.sweep_arms import arm_config, grid_arms
from leeway.services.experiments.sweep_file import load_sweep

ROOT = Path(__file__).parents[2]
SMALL = (
    "replay.groups_per_step=1",
    "replay.max_staleness=2",
    "rollout.group_size=2",
    "rollout.max_groups_in_flight=3",
    "policy.max_num_seqs=8",
    "learner.objective=so-ppo",
    "learner.num_steps=5",
    "eval.num_questions=2",
)


async def test_behind_the_ramp_every_trained_token_is_exactly_max_staleness_old(tmp_path: Path):
    config = load(ROOT / "deploy" / "configs" / "stability.toml", SMALL)
    ended = await run(config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["staleness_max"] for line in lines] == [0, 1, 2, 2, 2]
    assert [line["staleness_mean"] for line in lines] == [0, 1, 2, 2, 2]
    assert all("value_loss" in line for line in lines)
    text = (tmp_path / "evaluations.jsonl").read_text()
    written = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in written] == [0, 5]
    assert [line["score"] for line in written] == [e.score for e in ended.evaluations]
    assert all(0 <= line["score"] <= 1 for line in written)


def only_arm(folder: Path, objective: str, staleness: int, seed: int) -> RunConfig:
    file = folder / "sweep.toml"
    file.write_text(
        f'name = "s"\nbase = "{ROOT / "deploy" / "configs" / "stability.toml"}"\n[[grid]]\n'
        f'objective = ["{objective}"]\nstaleness = [{staleness}]\nseed = [{seed}]\n'
    )
    sweep = load_sweep(file)
    (only,) = grid_arms(sweep)
    return arm_config(sweep, only)


def test_every_arm_is_asked_the_same_questions_in_the_same_order(tmp_path: Path):
    a, b = only_arm(tmp_path, "grpo", 0, 0), only_arm(tmp_path, "so-ppo", 16, 7)
    streams = training_questions(a), training_questions(b)
    asked = [[stream.next().id for _ in range(300)] for stream in streams]
    held_out = [[question.id for question in held_out_questions(config)] for config in (a, b)]
    assert asked[0] == asked[1] and held_out[0] == held_out[1]
    assert (len(set(asked[0])), len(set(held_out[0]))) == (300, 400)


FALLING = (0.8, 0.9, 0.4, 0.3, 0.2, 0.1)
"""Half of the best is 0.45: steps 2 and 3 are the first two below it in a row."""


def scripted(scores: Iterator[float]) -> Any:
    async def evaluate(self: RolloutWorker, *_: Any, **__: Any) -> Evaluation:
        return Evaluation(
            num_questions=2, scores={"exact_match": next(scores)}, exact_match_by_hops={},
            num_by_hops={}, stop_reasons={}, versions=(), samples=(), duration_s=0.0,
        )  # fmt: skip

    return evaluate


def played(folder: Path, monkeypatch: pytest.MonkeyPatch, rule: CollapseRule) -> ArmResult:
    """The result of an arm of five steps, evaluated after each, whose scores fall."""
    spec = ArmSpec(
        name="falling",
        objective="so-grpo",
        staleness=1,
        seed=0,
        variant={},
        is_scan=False,
        overrides=(*SMALL, "learner.objective=so-grpo", "eval.every_steps=1"),
        mode="exact",
        loop="in-process",
        collapse=rule.model_dump(),
    )
    (folder / ARM).write_bytes(msgspec.json.encode(spec))
    base = ROOT / "deploy" / "configs" / "stability.toml"
    monkeypatch.setattr(sys, "argv", ["arm", str(folder), "--base", str(base)])
    monkeypatch.setattr(RolloutWorker, "evaluate", scripted(iter(FALLING)))
    arm.main()
    found = read_result(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(("stop_early", "num_steps"), [(True, 3), (False, 5)])
def test_a_collapsed_run_ends_at_its_second_fall_unless_the_rule_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_early: bool, num_steps: int
):
    result = played(tmp_path, monkeypatch, CollapseRule(stop_early=stop_early))
    # Kept as collapsed either way, with the score it fell to.
    assert (result.status, result.reason, result.collapse_step) == ("collapsed", None, 2)
    assert result.is_stopped_early == stop_early
    assert [one.score for one in result.evaluations] == list(FALLING[: num_steps + 1])
    assert len(result.curves["step"]) == num_steps
