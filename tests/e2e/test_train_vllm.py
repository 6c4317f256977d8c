"""The demo in small: the bundled policy behind vLLM, three optimizer steps, everything real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leeway.services.layout import RunDirectory
from leeway.services.results import Summary

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "configs" / "demo.toml"
SMALL = (
    "learner.num_steps=3",
    "replay.groups_per_step=4",
    "rollout.max_groups_in_flight=8",
    "eval.num_questions=16",
    "eval.every_steps=0",
)


@pytest.fixture(scope="module")
def ended(leeway, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("vllm")
    overrides = [word for setting in SMALL for word in ("--set", setting)]
    with leeway(folder, "train", str(DEMO), "--json", *overrides) as command:
        run = command.run
        command.state(run)
        return command.end(480, run)


@pytest.fixture(scope="module")
def summary(ended) -> Summary:
    assert ended.code == 0, ended.err
    return msgspec.json.decode(ended.out.splitlines()[-1], type=Summary)


@pytest.fixture(scope="module")
def run(summary: Summary) -> RunDirectory:
    return RunDirectory(Path(summary.run_dir))


@pytest.fixture(scope="module")
def steps(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_the_run_ends_with_0_and_leaves_nothing_running(ended):
    assert (ended.code, ended.left) == (0, []), ended.err


def test_every_version_reaches_the_engine_and_the_pause_is_short(summary: Summary):
    assert summary.steps == 3
    assert summary.publishes >= 2
    assert summary.pause_ms_p50 is not None and summary.pause_ms_p50 < 1000


def test_the_bundled_policy_reads_but_does_not_yet_search_twice(summary: Summary):
    assert summary.exact_match_before is not None and summary.exact_match_after is not None
    assert 0.05 <= summary.exact_match_before <= 0.6


def test_no_trained_token_is_staler_than_the_bound(summary: Summary, steps):
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["staleness_max"] for line in steps) == summary.max_staleness_seen
    assert summary.max_staleness_seen <= summary.max_staleness


def test_engine_and_learner_give_the_sampled_tokens_the_same_log_probs(steps):
    # Step 1 trains what the base model sampled. The learner computes in bfloat16, the engine does
    # not: a hundredth of a nat is rounding, wrong weights are off by whole nats.
    assert steps[0]["gap_mean"] < 0.05


def test_the_trained_model_gives_its_last_completion_the_log_probs_of_a_mode(run: RunDirectory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = json.loads(run.eval.read_text())["after"]["samples"][0]["text"]
    model: Any = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(run.model)
    seen = len(tokenizer(text[: text.rindex("<think>")]).input_ids)
    ids = tokenizer(text, return_tensors="pt").input_ids
    lp_TV = model(ids).logits[0, :-1].float().log_softmax(-1)
    chosen_T = lp_TV.gather(1, ids[0, 1:, None])[seen:, 0]
    assert chosen_T.isfinite().all()
    # It was decoded greedily by the engine from these weights; a guess would be ln 2048 = 7.6 off.
    assert chosen_T.mean() > -0.5
