"""The report of a sweep: one page that needs nothing else, tables that other tools read."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from leeway.replay.errors import ConfigurationError, DataError
from leeway.services import cli
from leeway.services.experiments.arm_result import curves_of, read_lines
from leeway.services.experiments.sweep_folder import SweepFolder
from leeway.services.experiments.sweep_plots import heat_fields
from leeway.services.experiments.sweep_report import write_report
from leeway.services.experiments.sweep_rows import Row, cells_of, row_of

from .sweep_results import arm, leave


class References(HTMLParser):
    """What a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"src", "href", "xlink:href", "data", "action"}
        inside = ("#", "data:image/png;base64,")
        self.found += [
            v or "" for k, v in attrs if k in wanted and not (v or "").startswith(inside)
        ]
        if tag in ("script", "link", "iframe"):
            self.found.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """With its report: drawing takes seconds."""
    results = [
        arm(objective, lag, seed, 0.9 - 0.1 * lag - 0.01 * seed)
        for objective in ("grpo", "so-<b>")
        for lag in (0, 2)
        for seed in (0, 1)
    ]
    results += [
        arm("grpo", 3, 0, 0.1, status="collapsed", collapse_step=2),
        arm("grpo", 3, 1, status="failed", reason="out of <memory>"),
        arm("grpo", 0, 0, 0.4, rate=5e-5, is_scan=True),
    ]
    folder = leave(tmp_path_factory.mktemp("sweeps") / "demo", results, rates={"grpo": 1e-4})
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(folder: SweepFolder) -> str:
    return (folder.report / "sweep.html").read_text()


def test_the_page_loads_nothing_and_escapes_what_it_shows(page: str):
    references = References()
    references.feed(page)
    assert references.found == []
    assert "url(" not in page.replace("url(#", "")
    assert "so-<b>" not in page and "out of &lt;memory&gt;" in page


def test_the_page_says_what_was_found_and_how(page: str):
    references = References()
    references.feed(page)
    text = " ".join(" ".join(references.text).split())
    assert "grpo keeps 95% of its on-policy score (0.895) at no staleness tried" in text
    assert "1 arm collapsed; 1 arm failed" in text
    # 0.95 x 0.895 = 0.850: on-policy runs score 0.6 at step 2 and 0.9 at step 4, the others 0.7.
    assert "grpo 0: 4, 2: none in 4, 3: none in 4" in text
    assert "A run has collapsed at the first of 2 held-out evaluations" in text
    # The scan: what was tried, what was taken.
    assert "0.400" in text and "0.0001" in text
    assert "The rate lies at an end of the scan for grpo" in text


def test_the_rows_are_the_same_in_csv_and_parquet(folder: SweepFolder):
    report = folder.report
    rows = pyarrow.parquet.read_table(report / "rows.parquet")
    assert rows.column_names == list(Row.model_fields)
    assert rows.num_rows == 11
    from_csv = pyarrow.csv.read_csv(report / "rows.csv")
    assert from_csv["score"].to_pylist() == rows["score"].to_pylist()
    by_arm = {row["arm"]: row for row in rows.to_pylist()}
    assert by_arm["grpo-3-1-0.0001"]["reason"] == "out of <memory>"
    assert by_arm["grpo-2-0-0.0001"]["staleness"] == 2.0


def test_the_cost_in_steps_is_a_table_of_its_own(folder: SweepFolder):
    delays = pyarrow.csv.read_csv(folder.report / "delays.csv").to_pylist()
    assert [(d["series"], d["staleness"], d["step"]) for d in delays if d["series"] == "grpo"] == [
        ("grpo", 0, 4), ("grpo", 2, None), ("grpo", 3, None),
    ]  # fmt: skip
    # The failed run counts into none.
    assert [d["num_runs"] for d in delays if d["series"] == "grpo"] == [2, 2, 1]


def test_the_curves_hold_a_line_for_each_step_and_one_before(folder: SweepFolder):
    report = folder.report
    curves = pyarrow.parquet.read_table(report / "curves.parquet").to_pylist()
    own = [line for line in curves if line["arm"] == "grpo-2-0-0.0001"]
    assert [line["step"] for line in own] == [0, 1, 2, 3, 4]
    assert [line["held_out"] for line in own] == [0.3, None, 0.6, None, pytest.approx(0.7)]
    assert [line["staleness_mean"] for line in own] == [None, 0, 1, 2, 2]


def test_what_shares_a_field_of_the_heat_map_is_one_mean():
    results = [
        arm(lag=2, seed=0, score=0.8),
        arm(lag=2, seed=1, score=0.6),
        # Set to 3, and as old in the end.
        arm(lag=3, lags=[2.0] * 4, mode="bound", score=0.1, status="collapsed", collapse_step=2),
        arm("ppo", lag=2, score=0.7),
    ]
    cells = cells_of(row_of(result) for result in results)
    found = heat_fields(["grpo", "ppo"], cells, [[2.0, 2.0, 2.0]])
    # (0.8 + 0.6 + 0.1) / 3
    assert found == {(0, 0): (pytest.approx(0.5), 1), (1, 0): (pytest.approx(0.7), 0)}


def test_every_picture_is_a_png_and_an_svg(folder: SweepFolder):
    figures = folder.report / "figures"
    names = {file.stem for file in figures.iterdir()}
    assert {"score_by_staleness", "heat_map", "learning_curves_steps"} <= names
    assert {"learning_curves_seconds", "runs_ctn_norm", "runs_think_tokens"} <= names
    for name in names:
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (figures / f"{name}.svg").read_text()


def test_the_horizontal_axis_is_the_realised_staleness_and_never_the_setting(tmp_path: Path):
    # Set to 64, realised 3: under a bound that was never reached.
    results = [
        arm(lag=lag, seed=seed, mode="bound", lags=[age] * 4)
        for lag, age in ((0, 0.0), (64, 3.0))
        for seed in (0, 1)
    ]
    folder = leave(tmp_path / "bound", results, mode="bound")
    page = write_report(folder).read_text()
    assert ">64<" not in page
    assert "up to 3 versions" in page


def test_a_report_is_made_again_from_the_folder_alone(folder: SweepFolder):
    result = CliRunner().invoke(cli.app, ["sweep", "report", str(folder.root), "--json"])
    assert result.exit_code == 0, result.output
    body = json.loads(result.output.splitlines()[-1])
    assert [v["series"] for v in body["verdicts"]] == ["grpo", "so-<b>"]
    assert json.loads((folder.report / "verdicts.json").read_text()) == body["verdicts"]


def test_a_folder_without_a_sweep_and_one_without_a_result_are_refused(tmp_path: Path):
    with pytest.raises(
        ConfigurationError, match=r"holds no plan\.json; give the folder of a sweep"
    ):
        write_report(SweepFolder(tmp_path))
    with pytest.raises(DataError, match=r"no arm of .* has ended yet"):
        write_report(leave(tmp_path / "empty", []))


def test_a_sweep_of_which_every_arm_failed_has_a_report_without_pictures(tmp_path: Path):
    failed = arm(status="failed", reason="x", curves={"step": []})
    page = write_report(leave(tmp_path / "failed", [failed])).read_text()
    assert "no on-policy score" in page and "<svg" not in page


def test_curves_are_columns_at_six_digits_with_holes(tmp_path: Path):
    lines = [{"step": 1, "grad_norm": 1 / 3, "other": 1}, {"step": 2}]
    assert curves_of(lines) == {"step": [1.0, 2.0], "grad_norm": [0.333333, None]}
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(file) == [{"step": 1}, {"step": 2}]
