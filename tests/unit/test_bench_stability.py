"""`leeway bench stability`: which arms it runs, where, and what its table says of them."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leeway.services import cli
from leeway.services.bench import stability
from leeway.services.bench.report import json_line, plain_table
from leeway.services.bench.result import BenchResult
from leeway.services.experiments.sweep_arms import grid_arms, scan_arms
from leeway.services.experiments.sweep_file import Sweep, load_sweep
from leeway.services.experiments.sweep_folder import SweepFolder, SweepState
from leeway.services.experiments.sweep_rows import row_of
from leeway.services.experiments.sweep_run import Limits
from tests.unit.sweep_results import arm, leave

FILE = Path(__file__).parents[2] / "deploy" / "configs" / "sweep-lags.toml"


def state(num_arms: int, num_ended: int) -> SweepState:
    return SweepState(
        name="s",
        phase="done" if num_arms == num_ended else "stopped",
        num_arms=num_arms,
        num_ended=num_ended,
        num_failed=0,
        num_collapsed=0,
        running=[],
        rates={},
        updated_at=0.0,
    )


def table(*results: Any) -> BenchResult:
    rows = [row_of(result) for result in results]
    return stability.result_of(rows, state(len(rows), len(rows)), Path("f"), "")


# --- the table ---


def test_a_line_holds_the_seeds_of_an_objective_at_a_lag():
    # Norms of 1, 1, 2 and 9 have one spike; ||C|| is 0, 2, 4, 6.
    found = table(
        arm("ppo", 0, 0, 0.9),
        arm("ppo", 0, 1, 0.8, curves={"ctn_norm": [0.0, 0.0, 0.0, 8.0], "grad_norm": [1.0] * 4}),
        arm("ppo", 2, 0, 0.7),
    )
    assert found.rows[0] == (
        *("ppo", "0", "0.00", "0.0001", "0.900, 0.800", "0.850"),
        *("10.00 %", "-", "2.5000", "8.000", "0.5"),
    )
    assert found.rows[1][:5] == ("ppo", "2", "2.00", "0.0001", "0.700")
    assert all(len(row) == len(found.columns) for row in found.rows)


def test_an_arm_that_failed_is_named_and_in_no_mean():
    found = table(
        arm("ppo", 0, 0, 0.9), arm("ppo", 0, 1, status="failed"),
        arm("ppo", 0, 2, 0.1, status="collapsed"),
    )  # fmt: skip
    assert found.rows[0][4:6] == ("0.900, failed, 0.100 collapsed", "0.500")


def test_the_line_of_json_has_what_the_rows_have_by_objective_and_lag():
    found = table(arm("ppo", 0, 0, 0.9), arm("so-ppo", 2, 0, 0.7))
    line = json.loads(json_line(found, "a box"))
    assert line["exact_match/ppo/0"] == 0.9
    assert line["staleness/so-ppo/2"] == 2.0
    assert line["ctn_norm_max/so-ppo/2"] == 6.0
    assert line["spikes_per_arm/ppo/0"] == 1
    assert "clip_fraction_turns/ppo/0" not in line  # no arm has measured it
    assert (line["num_arms"], line["num_ended"], line["folder"]) == (2, 2, "f")
    assert "exact_match/ppo/0" not in plain_table(found, "a box")


def test_a_table_without_an_arm_has_its_columns():
    lines = plain_table(table(), "a box").splitlines()
    assert (lines[0], lines[3].split()[0]) == ("bench stability", "objective")


# --- which arms, and where ---


def test_quick_is_one_short_arm_for_each_objective_and_no_scan():
    sweep = stability.cut_down(load_sweep(FILE))
    arms = grid_arms(sweep)
    assert [(a.objective, a.staleness, a.seed) for a in arms] == [
        ("ppo", 2, 0), ("grpo", 2, 0), ("so-ppo", 2, 0), ("so-grpo", 2, 0),
    ]  # fmt: skip
    assert {a.values["learner.num_steps"] for a in arms} == {4}
    assert not any(a.needs_rate for a in arms)
    assert scan_arms(sweep, arms) == []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Sweep, Path, Limits]]:
    """What run_sweep was asked for; it leaves one arm ended of two."""
    found: list[tuple[Sweep, Path, Limits]] = []

    async def run_sweep(sweep: Sweep, folder: SweepFolder, limits: Limits, say: Any) -> SweepState:
        found.append((sweep, folder.root, limits))
        leave(folder.root, [arm("ppo", 0, 0, 0.9)])
        return state(2, 1)

    monkeypatch.setattr(stability, "run_sweep", run_sweep)
    monkeypatch.setattr(stability, "visible_gpus", lambda: [])
    monkeypatch.chdir(tmp_path)
    return found


def test_it_goes_on_in_the_folder_of_the_sweep_by_processes(
    seen: list[tuple[Sweep, Path, Limits]], capsys: pytest.CaptureFixture[str]
):
    found = stability.run(quick=False, file=FILE, max_minutes=2)
    [(sweep, folder, limits)] = seen
    assert folder == Path("runs/sweeps/sweep-lags")
    assert (sweep.file.resources.executor, sweep.file.resources.num_gpus) == ("processes", 0.0)
    assert sweep.identity() == load_sweep(FILE).identity()
    assert limits.max_s == 120
    assert found.title == "bench stability"
    assert "1 of 2 arms have not ended; --out runs/sweeps/sweep-lags goes on" in (
        capsys.readouterr().err
    )


def test_quick_has_a_folder_of_its_own_and_says_that_it_says_nothing_of_learning(
    seen: list[tuple[Sweep, Path, Limits]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(stability.tempfile, "tempdir", str(tmp_path))
    found = stability.run(quick=True, file=FILE)
    assert seen[0][1].parent == tmp_path
    first = plain_table(found, "a box").splitlines()[0]
    assert first == "bench stability, cut down to 4 steps: says nothing about learning"


def test_a_gpu_is_shared_as_the_file_says(
    seen: list[tuple[Sweep, Path, Limits]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(stability, "visible_gpus", lambda: ["0"])
    stability.run(quick=False, file=FILE, out=tmp_path / "o")
    assert seen[0][0].file.resources.num_gpus == 0.125
    assert seen[0][1] == tmp_path / "o"


def test_the_command_hands_its_options_on_and_ends_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[dict[str, Any]] = []
    module = types.ModuleType("leeway.services.bench.stability")
    module.__dict__["run"] = lambda **options: asked.append(options) or table(arm("ppo"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    words = ["bench", "stability", "--json", "--quick", "--out", "o", "--max-minutes", "3"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0
    assert asked == [
        {
            "quick": True,
            "file": Path("deploy/configs/sweep-lags.toml"),
            "out": Path("o"),
            "max_minutes": 3.0,
        }
    ]
    assert json.loads(done.stdout)["exact_match/ppo/0"] == 0.9
    assert "bench stability" in done.stderr
