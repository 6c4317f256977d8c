"""The numbers of a sweep as files: rows (one for each arm) and curves (one for each arm and step).

Both as CSV and as Parquet. The only file of the experiments that imports pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from leeway.services.experiments.arm_result import CURVES, ArmResult
from leeway.services.experiments.sweep_delay import Delay
from leeway.services.experiments.sweep_rows import Row

_COUNTS = {
    *("seed", "staleness_set", "collapse_step", "steps", "num_ramp_steps"),
    *("num_rescaled", "num_spikes"),
}
_INT = pa.int64()
_WORDS = {"arm", "series", "objective", "variant", "status", "reason"}


def write_tables(
    folder: Path, rows: Sequence[Row], results: Sequence[ArmResult], delays: Sequence[Delay]
) -> list[Path]:
    """rows and curves, .csv and .parquet, and delays.csv; returns the five files."""
    tables = {"rows": rows_table(rows), "curves": curves_table(results)}
    written: list[Path] = []
    for name, table in tables.items():
        pyarrow.csv.write_csv(table, folder / f"{name}.csv")
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
        written += [folder / f"{name}.csv", folder / f"{name}.parquet"]
    pyarrow.csv.write_csv(delays_table(delays), folder / "delays.csv")
    return [*written, folder / "delays.csv"]


def delays_table(delays: Sequence[Delay]) -> pa.Table:
    """The fields of Delay."""
    kinds = {"series": pa.string(), **dict.fromkeys(("num_reached", "num_runs", "last_step"), _INT)}
    schema = pa.schema([(name, kinds.get(name, pa.float64())) for name in Delay.model_fields])
    return pa.Table.from_pylist([delay.model_dump() for delay in delays], schema)


def rows_table(rows: Sequence[Row]) -> pa.Table:
    """The fields of Row; `variant` as JSON."""
    names = list(Row.model_fields)
    data = [_plain(row) for row in rows]
    schema = pa.schema([(name, _type(name)) for name in names])
    return pa.Table.from_pylist(data, schema)


def _plain(row: Row) -> dict[str, Any]:
    return row.model_dump() | {"variant": json.dumps(row.variant)}


def _type(name: str) -> pa.DataType:
    if name in _WORDS:
        return pa.string()
    if name == "is_scan":
        return pa.bool_()
    return pa.int64() if name in _COUNTS else pa.float64()


def curves_table(results: Sequence[ArmResult]) -> pa.Table:
    """`arm`, the metrics of a step, and `held_out` where the step was evaluated; step 0 is before
    training."""
    lines: list[dict[str, Any]] = []
    for result in results:
        scores = {one.step: one for one in result.evaluations}
        if 0 in scores:
            lines.append({"arm": result.spec.name, "step": 0.0, "held_out": scores[0].score})
        for n, step in enumerate(result.curves.get("step", [])):
            line: dict[str, Any] = {name: values[n] for name, values in result.curves.items()}
            held_out = scores.get(int(step)) if step is not None else None
            line |= {"arm": result.spec.name, "held_out": held_out.score if held_out else None}
            lines.append(line)
    types = [("arm", pa.string()), *((name, pa.float64()) for name in (*CURVES, "held_out"))]
    return pa.Table.from_pylist(lines, pa.schema(types))
