"""Benches: both sides of each do the same work, and a result is a table and one JSON line."""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from operator import attrgetter, methodcaller

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leeway.learner.objective.presets import PRESETS
from leeway.replay.codec import encode
from leeway.replay.errors import StoreError, WaitTimeout
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group
from leeway.services import cli
from leeway.services.bench import (
    ctn,
    logprob,
    objective,
    replay,
    replay_baselines,
    replay_crew,
)
from leeway.services.bench.replay_baselines import record
from leeway.services.bench.report import json_line, plain_table
from leeway.services.bench.result import BenchResult
from leeway.services.bench.timing import interleaved

RESULT = BenchResult(
    "fake", ("case", "ms"), (("small", "1.5"), ("large", "12.0")), {"speedup": 8.0}
)
NAMES = ("objective", "logprob", "ctn", "decode", "replay")


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


# --- replay: two processes, and both sides move the same groups ---

TINY = replay.Plan(
    cases=((2048, 2, 1), (2048, 64, 8)),
    stream_sizes=(2048,),
    turns=1,
    turn_bytes=2048 * 128,
    stream_bytes=2048 * 32,
    num_buffered=64,
    num_draws=2,
    levels=(32, 64),
    num_rounds=2,
)


@pytest.fixture
def crew() -> Iterator[replay_crew.Crew]:
    with replay_crew.Crew() as crew:
        yield crew


WAIT = methodcaller("start")
FAIL = attrgetter("no_such_number")
NOTHING = attrgetter("num_read.value")


def test_the_replay_bench_moves_the_same_groups_through_both_sides_and_has_its_keys():
    result = replay.measure(TINY)
    # 2 turns, the first of which is not counted, of 3 sides: 2 cases of 128 groups, streams of 12
    # steps of 16.
    assert result.keys["num_groups"] == 2 * 3 * (128 + 128 + 192)
    assert [row[0] for row in result.rows] == [
        *(replay.PLAIN, replay.CODEC) * 2, replay.STREAM, replay.WHOLE,
    ]  # fmt: skip
    assert all(len(row) == len(result.columns) for row in result.rows)
    assert {
        *("ratio_to_redis", "ratio_with_codec", "ratio_to_stream", "ratio_to_group_stream"),
        *("draw_p99_ms", "draw_bare_p99_ms", "cost_growth", "encode_gb_s", "decode_gb_s"),
        *("admit_us/32", "add_us/32", "draw_us/64", "acknowledge_us/64"),
        *("release_us/32", "drop_us/32", "update_priorities_us/64", "stats_us/64"),
    } <= set(result.keys)
    assert all(float(value) > 0 for value in result.keys.values())


def test_a_group_has_about_the_stored_bytes_that_were_asked_for():
    load = replay_crew.Load("", "", 16).of_size(65_536)
    assert len(encode(load.group())) == pytest.approx(65_536, rel=0.1)


def test_producers_together_have_at_least_64_groups_in_flight():
    loads = [replay_crew.Load("", "", 16, 8, num_producers=n) for n in (1, 8, 64)]
    assert [load.num_at_once for load in loads] == [64, 8, 1]


def test_a_record_is_lists_whose_labels_are_the_trained_tokens():
    group = build_group(Slot("a", PolicyVersion(3)), None, 1, 8)
    trajectory = group.trajectories[0]
    # 2 prompt, 2 generated, 2 observed, 2 generated.
    ids = trajectory.token_ids.tolist()
    assert record(group, trajectory)["labels"] == [-100] * 2 + ids[2:4] + [-100] * 2 + ids[6:]
    assert record(group, trajectory)["version"] == 3


def test_a_failed_process_fails_the_bench_with_its_error(crew: replay_crew.Crew):
    with pytest.raises(StoreError, match=r"consumers failed:[\s\S]*no_such_number"):
        crew.both(WAIT, FAIL)


def test_a_dead_process_fails_the_bench_at_once(crew: replay_crew.Crew):
    next(p for p in multiprocessing.active_children() if p.name == "producers").kill()
    with pytest.raises(StoreError, match="producers died"):
        crew.both(WAIT, WAIT)


def test_a_job_that_hangs_fails_the_bench_at_its_deadline(
    crew: replay_crew.Crew, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replay_crew, "JOB_TIMEOUT_S", 0.5)
    with pytest.raises(WaitTimeout, match=r"producers did not end in 0\.5 s"):
        crew.alone(WAIT)


def test_a_pickle_that_names_something_to_run_is_refused():
    data = pickle.dumps(print)
    with pytest.raises(pickle.UnpicklingError, match=r"names builtins\.print"):
        replay_baselines._ListsOnly(io.BytesIO(data)).load()
    kept = {"token_ids": [1, 2], "reward": 0.5, "scores": {"exact_match": 1.0}}
    assert replay_baselines._ListsOnly(io.BytesIO(pickle.dumps(kept))).load() == kept


def test_a_crew_leaves_no_process_behind():
    before = {child.pid for child in multiprocessing.active_children()}  # an engine of the session
    with replay_crew.Crew() as crew:
        assert crew.alone(NOTHING) == 0
    assert {child.pid for child in multiprocessing.active_children()} <= before


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


def test_a_model_size_that_publish_does_not_know_is_refused_with_the_choices():
    result = CliRunner().invoke(cli.app, ["bench", "publish", "--shape", "8B"])
    assert "no model of size 8B; take one of 0.01B, 1.5B, 7B" in str(result.exception)
