"""The learner's bench: its formula by hand, and a run of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from leeway.services.bench import learner
from leeway.services.bench.episodes import Shape
from leeway.services.bench.report import plain_table

SMALL: dict[str, Any] = {
    "vocab_size": 5,
    "hidden_size": 2,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_flops_of_a_small_step_by_hand():
    # Matrices 4 + 2 + 2 + 4 + 18 = 30. 2 * 30 * 5 = 300; 2 (4 + 9) * 2 = 52; 2 * 5 * 2 * 4 = 80.
    assert learner.step_flops(SMALL, [2, 3], 4) == 3 * (300 + 52 + 80)


def test_the_shape_of_1_5_billion_has_as_many_weights():
    matrices = learner.step_flops(learner.BILLION | {"vocab_size": 0}, [0], 0)
    assert matrices == 0
    per_token = learner.step_flops(learner.BILLION, [1], 0) / 6
    assert per_token + 151_936 * 1536 == pytest.approx(1.54e9, rel=0.01)


def test_every_trajectory_is_differentiated():
    batch = learner.build_case(16, learner.SHORT, 64)
    assert batch.num_zero_variance_groups == 0
    assert len(batch.trajectories) == 16


def test_a_trajectory_on_a_gpu_has_2048_tokens():
    assert learner.LONG.prompt + sum(learner.LONG.turns) + sum(learner.LONG.observations) == 2048


def test_the_bench_has_its_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner, "TINY", learner.TINY | {"num_hidden_layers": 1, "vocab_size": 64})
    monkeypatch.setattr(learner, "SHORT", Shape(4, (3, 3), (5,)))
    monkeypatch.setattr(learner, "matmul_flops", lambda _: 1e12)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = learner.run(quick=False)
    assert {"tokens_per_s", "mfu", "peak_gib"} <= set(result.keys)
    assert [row[0] for row in result.rows] == ["float32", "float32, activations forgotten"]
    assert all(len(row) == len(result.columns) for row in result.rows)
    step_s = float(result.keys["step_ms"]) / 1e3
    assert math.isclose(float(result.keys["tokens_per_s"]) * step_s, 8 * 14)
    assert math.isclose(
        float(result.keys["mfu"]), float(result.keys["step_tflop"]) / step_s, rel_tol=1e-6
    )
    assert "bench learner" in plain_table(result, "here")


def test_a_layout_that_does_not_fit_is_told_and_not_counted():
    batch = learner.build_case(8, Shape(4, (3, 3), (5,)), 64)
    cells = learner._cells(learner.CPU_CASES[0], None, batch, 1.0)
    assert cells[:2] == ("float32", "out of memory")
    assert len(cells) == 10
