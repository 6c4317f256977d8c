"""The report of a sweep: made from the folder alone, again whenever one wants.

report/
├── sweep.html                        one file, readable offline, in light and dark
├── rows.csv, rows.parquet            a line for each arm
├── curves.csv, curves.parquet        a line for each arm and step
├── delays.csv                        a line for each series and staleness: steps to a kept score
├── verdicts.json                     what the page's table says
└── figures/NAME.png, NAME.svg
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leeway.replay.errors import DataError
from leeway.services.experiments.arm_result import ArmResult
from leeway.services.experiments.collapse import CollapseRule
from leeway.services.experiments.sweep_delay import Delay, delays_of
from leeway.services.experiments.sweep_folder import SweepFolder, replace_text
from leeway.services.experiments.sweep_rows import (
    Cell,
    Row,
    cells_of,
    row_of,
    select_current,
    select_grid,
)
from leeway.services.experiments.sweep_verdict import Verdict, verdicts


@dataclass(frozen=True)
class Findings:
    """A sweep as far as it has come."""

    name: str
    plan: Mapping[str, Any]
    """plan.json."""
    retention: float
    rates: Mapping[str, float]
    """Learning rate by objective, from the scan; empty without one."""
    results: Sequence[ArmResult]
    """Of the grid's arms."""
    rows: Sequence[Row]
    """Of all arms, the scan's included."""
    cells: Sequence[Cell]
    verdicts: Sequence[Verdict]
    delays: Sequence[Delay]

    @property
    def grid_rows(self) -> list[Row]:
        names = {result.spec.name for result in self.results}
        return [row for row in self.rows if row.arm in names]

    @property
    def rule(self) -> CollapseRule:
        return CollapseRule.model_validate(self.plan["collapse"])


def findings(folder: SweepFolder, retention: float | None = None) -> Findings:
    """Read a sweep; `retention` None takes the one of its file.

    Raises ConfigurationError where there is none, DataError where no arm has ended.
    """
    plan = folder.read_plan()
    everything = folder.results()
    if not everything:
        raise DataError(f"no arm of {folder.root} has ended yet; run the sweep first")
    retention = float(plan["retention"]) if retention is None else retention
    rates = folder.read_rates()
    names = folder.read_grid()
    grid = _in_order(select_grid(everything, names), plan)
    cells = cells_of(row_of(result) for result in grid)
    said = verdicts(cells, retention)
    return Findings(
        name=str(plan["name"]),
        plan=plan,
        retention=retention,
        rates=rates,
        results=grid,
        rows=[row_of(result) for result in select_current(everything, names)],
        cells=cells,
        verdicts=said,
        delays=delays_of(grid, said, retention),
    )


def _in_order(results: list[ArmResult], plan: Mapping[str, Any]) -> list[ArmResult]:
    """By the objectives of the grid, then by variant: the order in which a reader wrote them."""
    objectives = [
        name
        for grid in plan["grid"]
        for name in grid.get("objective", grid.get("learner.objective", []))
    ]
    place = {name: n for n, name in reversed(list(enumerate(objectives)))}

    def key(result: ArmResult) -> tuple[Any, ...]:
        spec = result.spec
        return (place.get(spec.objective, 0), str(spec.variant), spec.staleness, spec.seed)

    return sorted(results, key=key)


def write_report(folder: SweepFolder, retention: float | None = None) -> Path:
    """Write the folder `report` anew; returns sweep.html."""
    from leeway.services.experiments.sweep_canvas import draw
    from leeway.services.experiments.sweep_html import page
    from leeway.services.experiments.sweep_plots import pictures
    from leeway.services.experiments.sweep_tables import write_tables

    found = findings(folder, retention)
    partial = folder.report.with_name(".report.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "figures").mkdir(parents=True)
    drawn = [draw(picture) for picture in pictures(found.cells, found.results)]
    for one in drawn:
        (partial / "figures" / f"{one.picture.name}.png").write_bytes(one.png)
        (partial / "figures" / f"{one.picture.name}.svg").write_text(one.svg, encoding="utf-8")
    write_tables(partial, found.rows, found.results, found.delays)
    verdicts = [verdict.model_dump() for verdict in found.verdicts]
    encoded = json.dumps(verdicts, indent=2, ensure_ascii=False)
    replace_text(partial / "verdicts.json", encoded + "\n")
    replace_text(partial / "sweep.html", page(found, drawn, folder.read_state()))
    shutil.rmtree(folder.report, ignore_errors=True)
    partial.rename(folder.report)
    return folder.report / "sweep.html"
