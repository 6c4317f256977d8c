"""How a bench's result is shown: a table for people, one JSON line for programs."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from leeway.services.bench.result import BenchResult, machine


def show(result: BenchResult, *, as_json: bool) -> None:
    """The table on stdout; with `as_json` the table on stderr and the line on stdout."""
    on = machine()
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False)
    if console.is_terminal:
        console.print(_rich_table(result, on))
    else:
        print(plain_table(result, on), file=console.file)
    if as_json:
        print(json_line(result, on), flush=True)


def json_line(result: BenchResult, on: str) -> str:
    """{"name": ..., "machine": ..., and the bench's keys}."""
    return json.dumps({"name": result.name, "machine": on, **result.keys, **result.cell_keys})


def plain_table(result: BenchResult, on: str) -> str:
    """Columns by spaces, without colour; what a pipe or a log file gets."""
    cells = [result.columns, *result.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(_pad, row, widths, _is_text(result))).rstrip() for row in cells]
    keys = [f"{name} = {_text(value)}" for name, value in result.keys.items()]
    return "\n".join([result.title, on, "", *lines, "", *keys])


def _rich_table(result: BenchResult, on: str) -> Table:
    keys = "\n".join(f"{name} = {_text(value)}" for name, value in result.keys.items())
    table = Table(title=result.title, caption=f"{on}\n{keys}", title_justify="left")
    for name, is_text in zip(result.columns, _is_text(result), strict=True):
        table.add_column(name, justify="left" if is_text else "right")
    for row in result.rows:
        table.add_row(*row)
    return table


def _is_text(result: BenchResult) -> list[bool]:
    """Which columns hold words; numbers stand to the right."""
    first = result.rows[0] if result.rows else result.columns
    return [not cell[:1].isdigit() for cell in first]


def _pad(cell: str, width: int, is_text: bool) -> str:
    return cell.ljust(width) if is_text else cell.rjust(width)


def _text(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
