"""The whole loop in one process: it trains, and every token is exactly as old as it should be."""

import json
from pathlib import Path

from leeway.services.config import load
from leeway.services.experiments.in_process import run

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
