"""The stability bed: its arms are configurations, its numbers those of what the arms left."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.config import load
from leeway.services.experiments import stability
from leeway.services.experiments.stability import Arm, Bed, Outcome, arm, outcome, rows, scan

ROOT = Path(__file__).parents[2]


def leave(folder: Path, after: float, norms: Sequence[float], lag: int = 0) -> None:
    """What an arm of a few steps leaves."""
    folder.mkdir(parents=True)
    scores = {"before": {"exact_match": 0.4}, "after": {"exact_match": after}, "wall_s": 10.0}
    (folder / "result.json").write_text(json.dumps(scores))
    steps = [
        {
            "grad_norm": norm,
            "staleness_max": min(step, lag),
            "staleness_mean": min(step, lag),
            "clip_fraction_tokens": 0.1,
            "clip_fraction_turns": 0.2,
            "ctn_norm": 2.0 * step,
            "ctn_divisor": max(1.0, 2.0 * step),
            "kl_behaviour": 0.01 * step,
        }
        for step, norm in enumerate(norms)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.mark.parametrize("more", [(), *stability.CHOICES.values()])
def test_every_arm_is_a_valid_configuration(more: tuple[str, ...]) -> None:
    one = arm("so-grpo", 16, 1, 2e-4, *more)
    config = load(ROOT / stability.CONFIG, one.overrides)
    assert (config.replay.max_staleness, config.seed, config.learner.learning_rate) == (16, 1, 2e-4)


def test_an_outcome_is_read_from_what_the_arm_left(tmp_path: Path) -> None:
    one = arm("grpo", 2, 0, 1e-4)
    leave(tmp_path / one.name, 0.1, [1.0, 1.0, 2.0, 9.0], lag=2)
    found = outcome(one, tmp_path / one.name)
    # Median norm 1.5, so 9.0 alone is above 7.5; ||C|| 0, 2, 4, 6; the ramp of two steps is out.
    assert (found.before, found.after, found.lag, found.num_spikes) == (0.4, 0.1, 2.0, 1)
    assert (found.bias_norm, found.max_bias_norm, found.num_normalized) == (3.0, 6.0, 3)
    assert found.kl == pytest.approx(0.03)
    assert found.has_collapsed


def test_an_arm_that_failed_is_a_row_with_its_reason(tmp_path: Path) -> None:
    one = arm("grpo", 0, 0, 1e-4)
    (tmp_path / one.name).mkdir()
    (tmp_path / one.name / "log.txt").write_text("first\nleeway: out of memory\n")
    found = outcome(one, tmp_path / one.name)
    assert found.failure == "leeway: out of memory"
    (row,) = rows([found])
    assert len(row) == len(stability.COLUMNS) and row[-1] == "leeway: out of memory"


def test_seeds_of_one_group_share_a_row() -> None:
    outcomes = [Outcome(arm("ppo", 4, seed, 1e-4), None, after=0.2 + seed) for seed in (0, 1)]
    (row,) = rows(outcomes)
    assert row[0] == "ppo, lag 4, rate 0.0001"
    assert row[2:4] == ("0.200 1.200", "0.700")


class FakeBed(Bed):
    """Scores by learning rate: 2e-4 and 4e-4 are equally good."""

    def run(self, arms: Sequence[Arm]) -> list[Outcome]:
        score = {1e-4: 0.6, 2e-4: 0.8, 4e-4: 0.8}
        return [
            Outcome(one, None, after=score[float(one.group.rpartition(" ")[2])]) for one in arms
        ]


def test_the_scan_takes_the_best_rate_and_the_smaller_of_equals(tmp_path: Path) -> None:
    rates, found = scan(FakeBed(tmp_path, parallel=1))
    assert rates == dict.fromkeys(stability.OBJECTIVES, 2e-4)
    assert len(found) == 12


def test_an_arm_that_has_left_a_result_is_not_run_again_but_other_settings_are_refused(
    tmp_path: Path,
) -> None:
    one, config = arm("grpo", 0, 0, 1e-4), tmp_path / "none.toml"
    leave(tmp_path / one.name, 0.7, [1.0])
    # A configuration that does not exist: running the arm would fail.
    bed = Bed(tmp_path, parallel=1, config=config)
    (tmp_path / one.name / "settings.json").write_text(bed._settings(one))
    assert [found.after for found in bed.run([one])] == [0.7]
    other = Bed(tmp_path, parallel=1, config=config, overrides=["learner.num_steps=8"])
    with pytest.raises(ConfigurationError, match="other settings"):
        other.run([one])


def test_a_bed_runs_its_arms_and_reports_the_one_that_cannot_start(tmp_path: Path) -> None:
    bed = Bed(tmp_path, parallel=2, config=tmp_path / "none.toml")
    (found,) = bed.run([arm("grpo", 0, 0, 1e-4)])
    assert found.failure is not None and "does not exist" in found.failure


def test_an_arm_that_was_killed_says_by_which_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\nkill -9 $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr(stability.sys, "executable", str(dies))
    (found,) = Bed(tmp_path, parallel=1).run([arm("grpo", 0, 0, 1e-4)])
    assert found.failure == "it was ended by signal 9"
