"""Benches: both sides of each do the same work, and a result is a table and one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leeway.learner.objective.presets import PRESETS
from leeway.services import cli
from leeway.services.bench import ctn, logprob, objective
from leeway.services.bench.report import json_line, plain_table
from leeway.services.bench.result import BenchResult
from leeway.services.bench.timing import interleaved

RESULT = BenchResult(
    "fake", ("case", "ms"), (("small", "1.5"), ("large", "12.0")), {"speedup": 8.0}
)
NAMES = ("objective", "logprob", "ctn", "decode")


# --- both sides agree ---


@pytest.mark.parametrize("name", ["so-grpo", "so-ppo"])
def test_packed_and_padded_give_the_same_loss_and_gradient(name: str):
    case = objective.build_case(16, (3, 9))
    loss, grad_T = objective.packed_update(PRESETS[name], case)()
    padded_loss, grad_BL = objective.padded_update(PRESETS[name], case)()
    is_trained_BL = case.padded.turn_BL >= 0
    torch.testing.assert_close(padded_loss, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad_BL[is_trained_BL], grad_T, rtol=0, atol=1e-6)
    assert not grad_BL[~is_trained_BL].any()


def test_the_objective_case_has_clipped_and_free_turns():
    _, grad_T = objective.packed(PRESETS["so-grpo"], objective.build_case(16, (3, 9)))()
    assert 0 < (grad_T == 0).float().mean() < 1


def test_the_head_gives_the_gradients_of_whole_logits():
    inputs = logprob.build_inputs(logprob.Shape(300, 16, 97, torch.float32), "cpu")
    ours, plain = logprob.ours(inputs), logprob.plain(inputs)
    torch.testing.assert_close(ours.loss, plain.loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.entropy_S, plain.entropy_S)
    torch.testing.assert_close(ours.grad_hidden_SH, plain.grad_hidden_SH, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours.grad_weight_VH, plain.grad_weight_VH, rtol=1e-4, atol=1e-7)


def test_the_head_in_half_precision_stays_near_float32():
    exact = logprob.ours(logprob.build_inputs(logprob.Shape(300, 16, 97, torch.float32), "cpu"))
    half = logprob.ours(logprob.build_inputs(logprob.Shape(300, 16, 97, torch.bfloat16), "cpu"))
    assert half.grad_weight_VH.dtype == torch.float32
    assert (half.entropy_S - exact.entropy_S).abs().max() < 0.1
    off_VH = half.grad_weight_VH - exact.grad_weight_VH
    assert off_VH.norm() < 0.05 * exact.grad_weight_VH.norm()


def test_the_objective_bench_has_its_keys():
    result = objective.run(quick=True)
    assert {"speedup", "packed_ms", "padded_ms", "speedup_with_advantages"} == set(result.keys)
    assert all(len(row) == len(result.columns) for row in result.rows)


def test_the_logprob_bench_has_its_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprob, "VOCABULARY", 97)
    monkeypatch.setattr(logprob, "_sizes", lambda *_: (300, 16))
    monkeypatch.setattr(logprob, "peak_bytes", lambda side, _: {"ours": 1, "plain": 4}[side])
    result = logprob.run(quick=True)
    assert result.keys["peak_memory_ratio"] == 0.25
    assert {"time_ratio", "ours_ms", "plain_ms", "ours_mib", "plain_mib"} <= set(result.keys)


def test_five_percent_of_the_tokens_are_clipped_by_whole_turns_with_an_advantage():
    batch = ctn.build_case(48, 2048)
    has_advantage_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    has_advantage_T[:500] = False
    turn_of_T = batch.segments.turn_of_T
    chosen_T = ctn.choose(turn_of_T, has_advantage_T, np.random.default_rng(0))
    assert int(chosen_T.sum()) == round(0.05 * batch.num_tokens)
    turns = turn_of_T[chosen_T].unique()
    assert int(torch.isin(turn_of_T, turns).sum()) == int(chosen_T.sum())
    assert not turns.lt(turn_of_T[499]).any()


def test_chosen_tokens_lie_where_their_advantage_clips_and_others_at_ratio_one():
    batch = ctn.build_case(8, 2048)
    lp_T, a_T = torch.zeros(batch.num_tokens), torch.ones(batch.num_tokens)
    a_T[1::2] = -1
    chosen_T = torch.arange(batch.num_tokens) < 2
    moved = ctn.with_clipped(batch, lp_T, a_T, chosen_T)
    log_ratio_T = lp_T - moved.behaviour_T
    assert log_ratio_T[:4].tolist() == [0.5, -0.5, 0.0, 0.0]


# --- what is shown ---


def test_a_json_line_holds_name_machine_and_keys():
    assert json.loads(json_line(RESULT, "a box")) == {
        "name": "fake", "machine": "a box", "speedup": 8.0,
    }  # fmt: skip


def test_words_stand_left_and_numbers_right():
    assert plain_table(RESULT, "a box").splitlines() == [
        "bench fake", "a box", "", "case     ms", "small   1.5", "large  12.0", "", "speedup = 8",
    ]  # fmt: skip


def test_the_first_turn_of_each_side_is_not_counted():
    calls: list[str] = []
    interleaved(lambda: calls.append("ours"), lambda: calls.append("plain"), 2)
    assert calls == ["ours", "plain"] * 3


# --- commands ---


@pytest.mark.parametrize("name", NAMES)
def test_a_command_runs_its_bench_and_ends_with_one_line_of_json(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    seen: list[bool] = []
    module = types.ModuleType(f"leeway.services.bench.{name}")
    module.__dict__["run"] = lambda *, quick: seen.append(quick) or RESULT
    monkeypatch.setitem(sys.modules, module.__name__, module)
    done = CliRunner().invoke(cli.app, ["bench", name, "--json", "--quick"])
    assert (done.exit_code, seen) == (0, [True])
    assert json.loads(done.stdout)["speedup"] == 8.0
    assert "bench fake" in done.stderr
    done = CliRunner().invoke(cli.app, ["bench", name])
    assert seen == [True, False]
    assert "bench fake" in done.stdout


def test_an_unknown_option_of_a_bench_exits_2():
    assert CliRunner().invoke(cli.app, ["bench", "objective", "--slow"]).exit_code == 2


def test_help_of_a_bench_imports_no_torch():
    code = (
        "import sys, contextlib\nfrom leeway.services import cli\n"
        "with contextlib.suppress(SystemExit):\n    cli.app(['bench', 'logprob', '--help'])\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
