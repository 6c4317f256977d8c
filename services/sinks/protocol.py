"""What a sink of metrics does, and what it is told about the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

Value = str | int | float | None


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The run whose metrics a sink gets."""

    name: str
    """The same after a resumption, so that a sink goes on with what it has."""
    project: str
    directory: Path
    """The run directory; a sink that keeps files keeps them in a folder of its name there."""
    step: int
    """Optimizer steps done. A resumed run may repeat later ones, which then count."""
    config: Mapping[str, object]
    """Every key of the configuration by its dotted name, secrets masked."""


class Sink(Protocol):
    """Takes metrics. It may raise and it may be slow: delivery.py calls it on a thread of its own,
    and leaves it alone after its first error."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimizer step, by the names of metrics.jsonl; each step is told once, in order."""
        ...

    def finish(self, summary: Mapping[str, Value]) -> None:
        """The run has ended: its final numbers, empty after a stop. Write out what is left."""
        ...
