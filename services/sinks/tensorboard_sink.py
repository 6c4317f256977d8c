"""TensorBoard: event files in the run directory. Show them with `tensorboard --logdir runs`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from leeway.services.sinks.protocol import RunFacts, Value


class TensorboardSink:
    """A Sink."""

    def __init__(self, run: RunFacts) -> None:
        # What an earlier process wrote of steps that will be repeated is hidden.
        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )
        self._step = run.step
        keys = [f"    {key} = {json.dumps(value)}" for key, value in run.config.items()]
        self._writer.add_text("configuration", "\n".join(keys), run.step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Sink.step."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Value]) -> None:
        """See Sink.finish. Numbers are scalars below `summary`, words are a text."""
        for name, value in summary.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"summary/{name}", value, self._step)
            elif value is not None:
                self._writer.add_text(f"summary/{name}", value, self._step)
        self._writer.close()
