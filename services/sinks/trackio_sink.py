"""trackio: a SQLite file in the run directory, unless TRACKIO_DIR names another folder. Show it
with `TRACKIO_DIR=... trackio show`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from leeway.services.sinks.protocol import RunFacts, Value


class TrackioSink:
    """A Sink."""

    def __init__(self, run: RunFacts) -> None:
        # It is read when trackio is imported.
        os.environ.setdefault("TRACKIO_DIR", str(run.directory / "trackio"))
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.name,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self._step = run.step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Sink.step."""
        self._step = step
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Value]) -> None:
        """See Sink.finish. trackio has no summary; its values are logged with the last step."""
        values = {f"summary/{name}": v for name, v in summary.items() if v is not None}
        if values:
            self._run.log(values, step=self._step)
        self._run.finish()
