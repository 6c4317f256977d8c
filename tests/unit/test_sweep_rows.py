"""Numbers of a sweep: rows, cells, verdicts and comparisons, worked out by hand."""

from pathlib import Path

import msgspec
import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.experiments.arm_result import ArmResult
from leeway.services.experiments.collapse import Evaluated
from leeway.services.experiments.sweep_compare import compare, half_width
from leeway.services.experiments.sweep_delay import delays_of
from leeway.services.experiments.sweep_report import findings
from leeway.services.experiments.sweep_rows import (
    cells_of,
    interval,
    realised,
    row_of,
    select_grid,
)
from leeway.services.experiments.sweep_run import rates_of
from leeway.services.experiments.sweep_verdict import verdicts, versions

from .sweep_results import arm, leave


def test_realised_staleness_under_exact_is_that_behind_the_ramp():
    # Lag 2: steps of 0, 1, 2, 2.
    assert realised(arm(lag=2)) == 2.0


def test_realised_staleness_under_a_bound_is_the_mean_of_all_steps_by_trajectories():
    result = arm(
        lag=8, mode="bound", lags=[0, 2, 4, 4], curves={"num_trajectories": [10, 10, 10, 30]}
    )
    # (0 + 20 + 40 + 120) / 60
    assert realised(result) == 3.0


def test_a_run_within_its_ramp_counts_whole():
    assert realised(arm(lag=8, lags=[0, 1, 2, 3])) == 1.5


def test_a_row_holds_what_happened_in_the_run():
    row = row_of(arm(score=0.7))
    # Median norm 1.5, so 9.0 alone is above 7.5.
    assert (row.score_before, row.score, row.score_best, row.num_spikes) == (0.3, 0.7, 0.7, 1)
    assert (row.ctn_norm, row.ctn_norm_max, row.num_rescaled) == (3.0, 6.0, 3)
    assert (row.entropy_last, row.think_tokens, row.kl_max) == (0.2, 20.0, 0.03)
    # A step without the number is left out of its mean.
    assert row.effective_sample_size == pytest.approx(0.9)


def test_a_failed_arm_has_a_reason_and_no_score():
    row = row_of(arm(status="failed", reason="out of memory"))
    assert (row.status, row.reason, row.score) == ("failed", "out of memory", None)


def test_the_interval_is_students():
    low, high = interval([0.8, 0.9, 1.0]) or (0, 0)
    # 4.303 x 0.1 / sqrt(3) = 0.24843
    assert (low, high) == (pytest.approx(0.65157, abs=1e-5), pytest.approx(1.14843, abs=1e-5))
    assert interval([0.8]) is None


def test_a_cell_is_the_seeds_of_one_series_at_one_staleness():
    rows = [
        row_of(arm(lag=2, seed=0, score=0.8)),
        row_of(arm(lag=2, seed=1, score=0.1, status="collapsed")),
        row_of(arm(lag=2, seed=2, status="failed", reason="x")),
        row_of(arm(lag=2, seed=0, score=0.5, variant={"eps": 0.004})),
    ]
    first, second = cells_of(rows)
    # A collapsed arm is in the mean, a failed one is not.
    assert (first.scores, first.mean, first.staleness) == ([0.8, 0.1], pytest.approx(0.45), 2.0)
    assert (first.num_arms, first.num_failed, first.num_collapsed) == (3, 1, 1)
    assert (second.series, second.low) == ("grpo · eps 0.004", None)


def verdict_of(scores: dict[int, float], **options: float):
    rows = [row_of(arm(lag=lag, score=score)) for lag, score in scores.items()]
    return verdicts(cells_of(rows), **{"retention": 0.95, **options})[0]


def test_the_largest_staleness_is_the_last_before_the_first_loss():
    # 0.95 x 0.8 = 0.76: lag 1 keeps it, lag 2 does not, and lag 3, which does, is beyond a loss.
    verdict = verdict_of({0: 0.8, 1: 0.76, 2: 0.7, 3: 0.9})
    assert (verdict.kept_staleness, verdict.kept_score) == (1.0, 0.76)
    assert (verdict.lost_staleness, verdict.lost_score) == (2.0, 0.7)
    assert verdict.sentence == (
        "grpo keeps 95% of its on-policy score (0.800) up to 1 version (0.760); at 2 versions it "
        "is at 0.700; one seed, so the spread is unknown."
    )


def test_a_series_that_loses_nothing_says_how_far_it_was_tried():
    verdict = verdict_of({0: 0.8, 3: 0.8})
    assert (verdict.kept_staleness, verdict.lost_staleness) == (3.0, None)
    assert "at every staleness tried, up to 3 versions (0.800)" in verdict.sentence


def test_a_series_that_bears_nothing_says_so():
    assert (
        "at no staleness tried: at 1 version it is at 0.500"
        in verdict_of({0: 0.8, 1: 0.5}).sentence
    )


def test_a_low_score_of_a_run_that_is_hardly_through_its_ramp_is_said_to_be_one():
    # Lag 3, four steps: three of them train on what the first version sampled.
    verdict = verdict_of({0: 0.8, 3: 0.5})
    assert verdict.sentence == (
        "grpo keeps 95% of its on-policy score (0.800) at no staleness tried: at 3 versions it is "
        "at 0.500, where 75% of the steps train on what the first version sampled: it may want "
        "more steps; one seed, so the spread is unknown."
    )
    collapsed = [arm(lag=0, score=0.8), arm(lag=3, score=0.1, status="collapsed", collapse_step=4)]
    [verdict] = verdicts(cells_of(map(row_of, collapsed)), retention=0.95)
    assert "may want" not in verdict.sentence


def test_a_run_that_had_learned_and_fell_again_is_not_said_to_want_more_steps():
    # 0.95 x 0.6 = 0.57 counts as kept. All score 0.3, 0.6 and then their own: best 0.6 and 0.6.
    results = [arm(lag=0, score=0.6), arm(lag=3, score=0.4), arm(lag=3, seed=1, score=0.5)]
    cells = cells_of(map(row_of, results))
    assert [cell.best for cell in cells] == [0.6, 0.6]
    [verdict] = verdicts(cells, retention=0.95)
    assert verdict.sentence == (
        "grpo keeps 95% of its on-policy score (0.600) at no staleness tried: at 3 versions it is "
        "at 0.450, where it had been at 0.600 before, and fell again; one seed, so the spread is "
        "unknown."
    )


def test_the_best_of_a_cell_leaves_out_what_failed():
    failed = arm(lag=2, seed=1, score=0.9, status="failed", reason="x")
    [cell] = cells_of([row_of(arm(lag=2, score=0.8)), row_of(failed)])
    assert cell.best == 0.8
    [alone] = cells_of([row_of(failed)])
    assert alone.best is None


def test_steps_to_a_kept_score_are_the_median_of_the_runs_that_had_one():
    # On-policy 0.6, so 0.57 is kept. All score 0.3, 0.6 and then their own at steps 0, 2, 4.
    results = [arm(lag=0, score=0.6)]
    late = [[0.3, 0.3, 0.9], [0.3, 0.3, 0.5], [0.3, 0.6, 0.2]]
    for seed, scores in enumerate(late):
        evaluations = [Evaluated(2 * n, float(n), score) for n, score in enumerate(scores)]
        one = arm(lag=2, seed=seed, score=scores[-1])
        results.append(msgspec.structs.replace(one, evaluations=evaluations))
    said = verdicts(cells_of(map(row_of, results)), retention=0.95)
    on_policy, stale = delays_of(results, said, 0.95)
    assert on_policy.threshold == pytest.approx(0.57)
    assert (on_policy.step, on_policy.num_reached) == (2, 1)
    # Steps 4 and 2; one run never came to it.
    assert (stale.step, stale.num_reached, stale.num_runs, stale.last_step) == (3.0, 2, 3, 4)


def test_a_series_without_an_on_policy_score_has_no_cost_in_steps():
    results = [arm(lag=2)]
    assert delays_of(results, verdicts(cells_of(map(row_of, results)), 0.95), 0.95) == []


def test_a_row_tells_how_long_its_ramp_was():
    assert row_of(arm(lag=2)).num_ramp_steps == 2
    assert row_of(arm(lag=8, lags=[0, 1, 2, 3])).num_ramp_steps == 4
    assert row_of(arm(lag=8, mode="bound", lags=[0, 2, 4, 4])).num_ramp_steps == 0


def test_without_an_on_policy_run_there_is_no_verdict():
    verdict = verdict_of({2: 0.8, 3: 0.5})
    assert (verdict.on_policy, verdict.kept_staleness) == (None, None)
    assert verdict.sentence == (
        "grpo has no on-policy score to compare with: at 2 versions it is at 0.800, at 3 versions "
        "at 0.500; one seed, so the spread is unknown."
    )
    failed = [row_of(arm(lag=2, status="failed", reason="x"))]
    [verdict] = verdicts(cells_of(failed), retention=0.95)
    assert verdict.sentence == "grpo has no on-policy score to compare with; 1 arm failed."


def test_retention_is_the_share_that_must_be_kept():
    assert verdict_of({0: 0.8, 3: 0.7}, retention=0.85).kept_staleness == 3.0
    assert verdict_of({0: 0.8, 3: 0.7}, retention=0.9).kept_staleness == 0.0


@pytest.mark.parametrize(
    ("lag", "words"), [(1.0, "1 version"), (15.98, "16.0 versions"), (64.0, "64 versions")]
)
def test_versions_are_written_as_they_were_measured(lag: float, words: str):
    assert versions(lag) == words


# --- the scan


def scan(objective: str, rate: float, seed: int, score: float, **more: str):
    return arm(objective, 0, seed, score, rate=rate, is_scan=True, **more)


def test_the_scan_takes_the_best_mean_and_the_smaller_rate_of_equals():
    found = rates_of(
        [
            scan("grpo", 2e-4, 0, 0.9),
            scan("grpo", 2e-4, 1, 0.7),
            scan("grpo", 1e-4, 0, 0.8),
            scan("grpo", 1e-4, 1, 0.8),
            scan("ppo", 1e-4, 0, 0.2),
            scan("ppo", 2e-4, 0, 0.3),
        ]
    )
    assert found == {"grpo": 1e-4, "ppo": 2e-4}


def test_scores_within_the_tolerance_are_equal_and_the_smallest_rate_wins():
    runs = [scan("grpo", 5e-5, 0, 0.9), scan("grpo", 1e-4, 0, 0.91), scan("grpo", 2e-4, 0, 0.93)]
    assert rates_of(runs, 0.019) == {"grpo": 2e-4}
    assert rates_of(runs, 0.02) == {"grpo": 1e-4}
    assert rates_of(runs, 0.03) == {"grpo": 5e-5}
    dead = scan("grpo", 1e-5, 0, 0.99, status="failed", reason="x")
    assert rates_of([dead, scan("grpo", 1e-4, 0, 0.01)], 0.02) == {"grpo": 1e-4}


def test_a_failed_arm_of_the_scan_scores_nothing():
    failed = scan("grpo", 2e-4, 1, 0.99, status="failed", reason="x")
    assert rates_of([scan("grpo", 2e-4, 0, 0.9), failed, scan("grpo", 1e-4, 0, 0.5)]) == {
        "grpo": 1e-4
    }
    assert rates_of([failed]) == {}


def test_runs_of_the_scan_that_are_none_of_the_grid_are_in_no_curve():
    chosen = scan("grpo", 2e-4, 0, 0.3)
    results = [scan("grpo", 1e-4, 0, 0.5), chosen, arm("grpo", rate=2e-4)]
    # At the chosen rate too: its seed would count twice.
    assert select_grid(results, [results[2].spec.name]) == results[2:]
    # Where the grid names it, it is there once.
    assert select_grid(results, [chosen.spec.name]) == [chosen]


def test_a_cell_holds_each_seed_of_the_grid_once(tmp_path: Path):
    grid = [arm(seed=0, score=0.8, rate=2e-4), arm(seed=1, score=0.9, rate=2e-4)]
    folder = leave(tmp_path / "s", [*grid, scan("grpo", 2e-4, 0, 0.2)], rates={"grpo": 2e-4})
    (cell,) = findings(folder).cells
    assert (cell.num_arms, cell.scores, cell.mean) == (2, [0.8, 0.9], pytest.approx(0.85))


def test_the_scan_makes_no_series_beside_those_of_the_grid(tmp_path: Path):
    grid = [arm(variant={"eps": eps}, rate=2e-4) for eps in (0.004, 0.2)]
    folder = leave(tmp_path / "s", [*grid, scan("grpo", 2e-4, 0, 0.2)], rates={"grpo": 2e-4})
    found = findings(folder)
    assert [cell.series for cell in found.cells] == ["grpo · eps 0.004", "grpo · eps 0.2"]
    assert len(found.rows) == 3


def test_runs_at_a_rate_that_a_later_scan_replaced_are_in_no_cell_and_no_row(tmp_path: Path):
    old, new = arm(lag=2, score=0.1, rate=1e-4), arm(lag=2, score=0.8, rate=2e-4)
    folder = leave(tmp_path / "s", [old, new], rates={"grpo": 2e-4})
    folder.write_grid({new.spec.name: 2e-4})
    found = findings(folder)
    assert [(cell.num_arms, cell.scores) for cell in found.cells] == [(1, [0.8])]
    assert [row.arm for row in found.rows] == [new.spec.name]


# --- two sweeps


def test_the_half_width_of_a_difference_is_welchs():
    # Variances 0.0002 each over two seeds: error sqrt(0.0001 + 0.0001), two degrees of freedom.
    assert half_width([0.80, 0.82], [0.90, 0.92]) == pytest.approx(4.303 * 0.0141421, rel=1e-4)
    assert half_width([0.8], [0.9, 0.91]) is None


def test_sweeps_are_compared_at_like_staleness(tmp_path: Path):
    a = [arm(lag=lag, seed=seed, score=0.8 + seed / 50) for lag in (0, 3) for seed in (0, 1)]
    b = [arm(lag=lag, seed=seed, score=0.9 + seed / 50) for lag in (0, 1) for seed in (0, 1)]
    found = compare(
        findings(leave(tmp_path / "a", [*a, arm("ppo")])), findings(leave(tmp_path / "b", b))
    )
    (pair,) = found.pairs
    assert (pair.staleness_a, pair.staleness_b, pair.is_clear) == (0.0, 0.0, True)
    assert pair.difference == pytest.approx(0.1)
    assert (found.only_a, found.only_b, found.kept) == (["ppo"], [], {"grpo": (3.0, 1.0)})
    assert list(found.settings) == ["grid"]


def matches(
    tmp_path: Path, a: list[ArmResult], b: list[ArmResult], **options: list[str]
) -> list[tuple[str, str, float, float]]:
    found = compare(
        findings(leave(tmp_path / "a", a)), findings(leave(tmp_path / "b", b)), **options
    )
    return [(p.series_a, p.series_b, p.learning_rate_a, p.learning_rate_b) for p in found.pairs]


def test_a_rate_that_is_varied_meets_one_that_was_scanned(tmp_path: Path):
    varied = arm("so-grpo", rate=5e-5, variant={"learning_rate": 5e-5})
    assert matches(tmp_path, [arm("so-grpo", rate=2e-4)], [varied]) == [
        ("so-grpo", "so-grpo · learning_rate 5e-05", 2e-4, 5e-5)
    ]


def test_of_several_counterparts_those_at_the_same_rate_count(tmp_path: Path):
    arms = [arm("so-grpo", rate=r, variant={"learning_rate": r}) for r in (5e-5, 1e-4)]
    found = matches(tmp_path, arms, arms)
    assert sorted((of_a, of_b) for _, _, of_a, of_b in found) == [(5e-5, 5e-5), (1e-4, 1e-4)]


@pytest.mark.parametrize(
    ("variant", "num_pairs"),
    [
        # What so-grpo has anyway.
        ({"learner.ratio": "turn"}, 1),
        ({"eps": 0.2, "ctn": "gradient"}, 1),
        ({"draws": 1}, 1),
        ({"learner.ratio": "turn-arithmetic"}, 0),
        ({"eps": 0.004}, 0),
        ({"draws": 2}, 0),
    ],
)
def test_a_key_that_one_sweep_varies_is_at_its_preset_or_default_in_the_other(
    tmp_path: Path, variant: dict[str, object], num_pairs: int
):
    assert len(matches(tmp_path, [arm("so-grpo")], [arm("so-grpo", variant=variant)])) == num_pairs


def test_what_one_sweep_sets_for_every_arm_meets_what_the_other_varies(tmp_path: Path):
    one = arm("so-grpo")
    told = ("learner.eps_low=0.004", "learner.eps_high=0.004", *one.spec.overrides)
    one = msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, overrides=told))
    varied = [arm("so-grpo", variant={"eps": eps}) for eps in (0.2, 0.004)]
    assert [pair[1] for pair in matches(tmp_path, [one], varied)] == ["so-grpo · eps 0.004"]


def test_an_axis_may_differ_within_a_pair_when_asked(tmp_path: Path):
    b = [arm(variant={"eps": eps}) for eps in (0.004, 0.3)]
    found = matches(tmp_path, [arm()], b, across=["eps"])
    assert [pair[:2] for pair in found] == [
        ("grpo", "grpo · eps 0.004"),
        ("grpo", "grpo · eps 0.3"),
    ]
    written_out = arm(variant={"learner.eps_low": 0.1, "learner.eps_high": 0.1})
    assert len(matches(tmp_path / "keys", [written_out], b, across=["eps"])) == 2
    with pytest.raises(ConfigurationError, match="--across ctn: neither c nor d varies it"):
        compare(
            findings(leave(tmp_path / "c", [arm()])), findings(leave(tmp_path / "d", b)), ["ctn"]
        )
