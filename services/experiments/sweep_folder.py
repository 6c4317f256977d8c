"""The folder of a sweep: everything it knows lies in files, so that it can go on, move, be read.

runs/sweeps/sweep-a/
├── plan.json       what was asked for; a sweep that goes on must ask for the same
├── sweep.json      SweepState: where it stands
├── rates.json      the learning rate of each objective, once the scan is done
├── grid.json       the grid's arms by name, each with its learning rate, from then on
├── sweep.lock      held by the command that runs it
├── arms/NAME/      arm.json, metrics.jsonl, evaluations.jsonl, log.txt and, at the end, result.json
└── report/         sweep.html, tables and pictures
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from leeway.replay.errors import ConfigurationError, DataError
from leeway.services.experiments.arm_result import RESULT, ArmResult, read_result

STALE_S: Final = 60.0
"""A running sweep writes its state every few seconds; one that is silent for so long is over."""

PLAN_KEYS: Final = ("name", "mode", "retention", "set", "grid", "scan", "collapse")
"""What a reader of plan.json relies on."""

Phase = Literal["scanning", "running", "stopped", "done"]


class SweepState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sweep stands."""

    name: str
    phase: Phase
    num_arms: int
    """Scan and grid together, arms of both counted once."""
    num_ended: int
    num_failed: int
    num_collapsed: int
    running: list[str]
    """Arms that run now."""
    rates: dict[str, float]
    """Learning rate by objective, from the scan; empty before."""
    updated_at: float
    """Unix time."""

    @property
    def is_interrupted(self) -> bool:
        """It says that it runs, and nobody has said so for a while."""
        is_on = self.phase in ("scanning", "running")
        return is_on and time.time() - self.updated_at > STALE_S


@dataclass(frozen=True)
class SweepFolder:
    """Paths of one sweep."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def state(self) -> Path:
        return self.root / "sweep.json"

    @property
    def rates(self) -> Path:
        return self.root / "rates.json"

    @property
    def grid(self) -> Path:
        return self.root / "grid.json"

    @property
    def report(self) -> Path:
        return self.root / "report"

    def arm(self, name: str) -> Path:
        return self.root / "arms" / name

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Make the folder, or go on with it.

        Raises ConfigurationError if it was begun otherwise.
        """
        try:
            (self.root / "arms").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"{self.root} cannot hold the sweep ({error.strerror}); name another by --out"
            ) from None
        self.check(identity)
        if not self.plan.is_file():
            replace_text(self.plan, json.dumps(identity, indent=1))

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if a sweep of another identity was begun here."""
        if not self.plan.is_file():
            return
        wanted, found = json.loads(json.dumps(identity)), self.read_plan()
        changed = [key for key in wanted if wanted[key] != found.get(key)]
        if changed:
            raise ConfigurationError(
                f"{self.root} was begun with another {_words(changed)}; "
                "name another folder by --out, or undo the change"
            )

    def read_plan(self) -> dict[str, Any]:
        if not self.plan.is_file():
            raise ConfigurationError(
                f"{self.root} holds no plan.json; give the folder of a sweep, such as "
                "runs/sweeps/sweep-a"
            )
        try:
            plan = json.loads(self.plan.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DataError(f"{self.plan} is not JSON ({error}); run the sweep anew") from None
        missing = [key for key in PLAN_KEYS if key not in plan] if isinstance(plan, dict) else [""]
        if missing:
            raise DataError(f"{self.plan} is no plan of a sweep; run the sweep anew")
        return plan

    def read_state(self) -> SweepState | None:
        """None before the first arm. Raises DataError for a file that is none."""
        if not self.state.is_file():
            return None
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=SweepState)
        except msgspec.DecodeError as error:
            raise DataError(f"{self.state} is no state of a sweep: {error}") from None

    def write_state(self, state: SweepState) -> None:
        replace_text(self.state, msgspec.json.format(msgspec.json.encode(state)).decode())

    def read_rates(self) -> dict[str, float]:
        return json.loads(self.rates.read_text()) if self.rates.is_file() else {}

    def write_rates(self, rates: Mapping[str, float]) -> None:
        replace_text(self.rates, json.dumps(rates, indent=1))

    def read_grid(self) -> dict[str, float | None]:
        """Learning rate by name of the grid's arms; empty before the scan is done."""
        return json.loads(self.grid.read_text()) if self.grid.is_file() else {}

    def write_grid(self, rates: Mapping[str, float | None]) -> None:
        replace_text(self.grid, json.dumps(rates, indent=1))

    def ended(self) -> set[str]:
        """Names of the arms that have a result."""
        return {path.parent.name for path in self.root.glob(f"arms/*/{RESULT}")}

    def results(self) -> list[ArmResult]:
        """Of every arm that has ended, by name."""
        folders = sorted(path.parent for path in self.root.glob(f"arms/*/{RESULT}"))
        return [result for folder in folders if (result := read_result(folder)) is not None]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Sole use. Raises ConfigurationError while another command runs this sweep."""
        with (self.root / "sweep.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigurationError(
                    f"another command runs the sweep in {self.root}; wait for it, or stop it"
                ) from None
            yield


def _words(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def replace_text(path: Path, text: str) -> None:
    """At once or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
