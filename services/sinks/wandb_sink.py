"""Weights & Biases. Offline, into wandb/ of the run directory, unless WANDB_API_KEY or WANDB_MODE
says otherwise; `wandb sync` uploads it later."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, cast

import wandb

from leeway.services.sinks.protocol import RunFacts, Value

Mode = Literal["online", "offline", "disabled", "shared"]


ID_FILE: Final = "wandb-id"
"""In the run directory."""


class WandbSink:
    """A Sink."""

    def __init__(self, run: RunFacts) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=_id_of(run.directory),
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            mode=_mode(),
            # The run has logs of its own, and machines are others' business.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        # By a metric of ours, not by wandb's count of calls: a resumed run may repeat steps.
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Sink.step."""
        self._run.log({**metrics, "step": step})

    def finish(self, summary: Mapping[str, Value]) -> None:
        """See Sink.finish."""
        self._run.summary.update(dict(summary))
        self._run.finish()


def _id_of(directory: Path) -> str:
    """Of this run alone, and the same after a resumption. Its name would not do: a project may hold
    a run of that name from another machine, which wandb would then go on with.
    """
    file = directory / ID_FILE
    if not file.is_file():
        partial = file.with_name(f".{ID_FILE}.{os.getpid()}")
        partial.write_text(secrets.token_hex(8) + "\n", encoding="ascii")
        partial.replace(file)
    return file.read_text(encoding="ascii").strip()


def _mode() -> Mode:
    """Without a key and a word of the user wandb would ask for one, in a process nobody sees."""
    chosen = os.environ.get("WANDB_MODE") or (
        "online" if os.environ.get("WANDB_API_KEY") else "offline"
    )
    return cast("Mode", chosen)
