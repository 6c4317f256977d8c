"""`/v1/sweeps`: where sweeps stand, and the row of every run that has ended.

A sweep lives in files. The API looks in one folder, `sweeps` beside the run directories, where
`leeway sweep` puts them; it needs no process of the sweep, so a sweep that is over still answers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, HTTPException

from leeway.replay.errors import DataError
from leeway.services.api import parameters
from leeway.services.api.examples import ARM, SWEEP, example
from leeway.services.api.models import Answer
from leeway.services.api.resources import Page
from leeway.services.experiments.sweep_folder import SweepFolder, SweepState
from leeway.services.experiments.sweep_report import Findings, findings
from leeway.services.experiments.sweep_rows import Cell, Row, row_of, select_current
from leeway.services.experiments.sweep_verdict import Verdict

log = logging.getLogger(__name__)

MAX_ROWS: Final = 1000
_NAME: Final = re.compile(r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$")
_Sweep = Annotated[str, parameters.name(SWEEP, "Name of a sweep: that of its folder.")]


class SweepStatus(Answer):
    """Where a sweep stands."""

    name: str
    """Of its folder."""
    phase: str
    """scanning, running, stopped or done; interrupted where its process was killed."""
    num_arms: int
    """Runs it will have made, those of the scan included."""
    num_ended: int
    num_failed: int
    num_collapsed: int
    running: list[str]
    """Runs that are on now."""
    rates: dict[str, float]
    """Learning rate by objective, once the scan is done."""
    updated_at: float
    """Unix time."""


class SweepDetail(Answer):
    """A sweep and what it says so far."""

    status: SweepStatus
    mode: str
    """exact or bound."""
    retention: float
    """Share of the on-policy score that counts as kept."""
    verdicts: list[Verdict]
    """Empty before the first run has ended."""
    points: list[Cell]
    """By series in the order of the grid, then by staleness."""


def sweeps_router(folder: Path) -> APIRouter:
    """Routes over the sweeps in `folder`, which need not exist yet. They only read files."""
    router = APIRouter(prefix="/v1/sweeps", tags=["sweeps"])

    @router.get("", responses=example("sweeps"))
    def sweeps(
        cursor: Annotated[str | None, parameters.cursor(SWEEP, pattern=_NAME.pattern)] = None,
        limit: Annotated[int, parameters.limit(200)] = 50,
    ) -> Page[SweepStatus]:
        """Sweeps by name, behind `cursor`; one whose files cannot be read is left out."""
        names = sorted(found.root.name for found in _all(folder))
        left = [name for name in names if cursor is None or name > cursor]
        shown, more = left[:limit], len(left) > limit
        found = [status for name in shown if (status := _readable(folder / name)) is not None]
        return Page(items=found, next=shown[-1] if more else None)

    @router.get("/{name}", responses=example("sweep"))
    def sweep(name: _Sweep) -> SweepDetail:
        """One sweep, and what it says so far."""
        sweep = _one(folder, name)
        plan = sweep.read_plan()
        found = _findings(sweep)
        verdicts, cells = ([], []) if found is None else (found.verdicts, found.cells)
        return SweepDetail(
            status=_status(sweep),
            mode=str(plan["mode"]),
            retention=float(plan["retention"]),
            verdicts=list(verdicts),
            points=list(cells),
        )

    @router.get("/{name}/rows", responses=example("rows"))
    def rows(
        name: _Sweep,
        cursor: Annotated[str | None, parameters.cursor(ARM, max_length=200)] = None,
        limit: Annotated[int, parameters.limit(MAX_ROWS)] = 100,
    ) -> Page[Row]:
        """The runs that have ended, by name, behind `cursor`."""
        sweep = _one(folder, name)
        found = [row_of(result) for result in select_current(sweep.results(), sweep.read_grid())]
        return _page(sorted(found, key=lambda row: row.arm), cursor, limit)

    return router


def _page(rows: list[Row], cursor: str | None, limit: int) -> Page[Row]:
    """Names are the cursor: a run that ends meanwhile moves none that was shown."""
    left = [row for row in rows if cursor is None or row.arm > cursor]
    shown = left[:limit]
    more = len(left) > limit
    return Page(items=shown, next=shown[-1].arm if more else None)


def _all(folder: Path) -> Iterator[SweepFolder]:
    for path in folder.glob("*/plan.json"):
        if _NAME.fullmatch(path.parent.name):
            yield SweepFolder(path.parent)


def _one(folder: Path, name: str) -> SweepFolder:
    """Never outside `folder`: the name has no slash, and is not '..'."""
    sweep = SweepFolder(folder / name)
    if not _NAME.fullmatch(name) or not sweep.plan.is_file():
        names = ", ".join(sorted(found.root.name for found in _all(folder))) or "none yet"
        raise HTTPException(404, f"there is no sweep {name}; there are: {names}")
    return sweep


def _readable(folder: Path) -> SweepStatus | None:
    """None where somebody has just removed it, or has written into it what is none of a sweep."""
    try:
        return _status(SweepFolder(folder))
    except (OSError, DataError) as error:
        log.warning("the sweep in %s is not listed: %s", folder, error)
        return None


def _findings(sweep: SweepFolder) -> Findings | None:
    try:
        return findings(sweep)
    except DataError:
        if any(sweep.root.glob("arms/*/result.json")):
            raise
        return None


def _status(sweep: SweepFolder) -> SweepStatus:
    state = sweep.read_state() or SweepState(
        name=sweep.root.name, phase="stopped", num_arms=0, num_ended=0, num_failed=0,
        num_collapsed=0, running=[], rates={}, updated_at=sweep.plan.stat().st_mtime,
    )  # fmt: skip
    fields: dict[str, Any] = msgspec.to_builtins(state)
    if state.is_interrupted:
        fields |= {"phase": "interrupted", "running": []}
    return SweepStatus.model_validate(fields | {"name": sweep.root.name})
