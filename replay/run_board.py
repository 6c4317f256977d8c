"""Small state of a whole run, for the CLI, the REST interface and shutdown.

Records of steps and publishes, requests to the learner and settings changed meanwhile are in
run_records.py, which `RunBoard` is made of as well.

Who asks a run to stop writes it here; every process waits for it on one stream, `control`, which
also carries changes of the phase.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from leeway.replay.connection import Link
from leeway.replay.errors import WaitTimeout
from leeway.replay.keys import board_keys
from leeway.replay.run_lead import RunLead
from leeway.replay.run_records import RunRecords
from leeway.replay.waiting import Wait
from leeway.replay.wakeups import Wakeups

PHASES: Final = ("starting", "evaluating-before", "training", "evaluating-after", "done")
"""The phases of a training run in order. Other names may be used; only these have an order."""

MAX_EVENTS: Final = 1000
"""About how many events are kept."""


class Event(msgspec.Struct, frozen=True):
    """Something worth telling a person."""

    event_id: str
    """Pass it as `after` to read on from here."""
    time_s: float
    """Unix time at Redis."""
    kind: str
    text: str


class RunBoard(RunRecords):
    """Sections, events, stop signal and phase of one run, over Redis. One per event loop."""

    def __init__(self, url: str, run: str, retry_s: float = 30.0) -> None:
        """`retry_s` bounds how long a call is tried again while Redis does not answer."""
        keys, link = board_keys(run), Link(url, retry_s)
        super().__init__(keys, link)
        self._keys = keys
        self._link = link
        self._client = self._link.client
        self._control = Wakeups(self._link, self._keys.control)
        self.lead = RunLead(keys, link)

    async def put(self, section: str, value: dict[str, Any]) -> None:
        """Replace a section, such as "learner"; it is stamped with `updated_at`, Unix seconds."""
        data = msgspec.json.encode({**value, "updated_at": time.time()})
        await self._link.call(lambda: self._client.hset(self._keys.sections, section, data))

    async def get_all(self) -> dict[str, dict[str, Any]]:
        """Every section by name, each with its `updated_at`."""
        raw = await self._link.call(lambda: self._client.hgetall(self._keys.sections))
        return {name.decode(): msgspec.json.decode(data) for name, data in sorted(raw.items())}

    async def append_event(self, kind: str, text: str) -> None:
        """Note an event; the oldest are forgotten."""
        fields = {"kind": kind, "text": text}
        await self._link.call(
            lambda: self._client.xadd(self._keys.events, fields, maxlen=MAX_EVENTS)
        )

    async def events(self, after: str = "", count: int = 100) -> list[Event]:
        """Up to `count` events in order: those after event id `after`, else the last ones."""
        key = self._keys.events
        if after:
            entries = await self._link.call(
                lambda: self._client.xrange(key, min=f"({after}", count=count)
            )
        else:
            newest_first = await self._link.call(lambda: self._client.xrevrange(key, count=count))
            entries = newest_first[::-1]
        return [_event(entry_id.decode(), fields) for entry_id, fields in entries]

    async def request_stop(self, reason: str) -> None:
        """Ask every process of the run to stop. The first reason stays."""
        await self._signal(self._keys.stop, reason, only_if_unset=True)

    async def stop_requested(self) -> str | None:
        """Why the run was asked to stop; None if it was not."""
        return await self._text(self._keys.stop)

    async def clear_stop(self) -> None:
        """Forget an earlier request; whoever starts or resumes the run calls it first."""
        await self._link.call(lambda: self._client.delete(self._keys.stop))

    async def wait_stop(self, timeout_s: float) -> str | None:
        """The reason, as soon as a stop is requested; None after `timeout_s`."""
        wait = Wait(timeout_s)
        while True:
            heard = self._control.heard
            reason = await self.stop_requested()
            if reason is not None or wait.is_over:
                return reason
            await self._control.wait(heard, wait.next_s(None))

    async def set_phase(self, name: str) -> None:
        """Say what the run is doing."""
        await self._signal(self._keys.phase, name, only_if_unset=False)

    async def phase(self) -> str | None:
        """What the run is doing; None before the first phase."""
        return await self._text(self._keys.phase)

    async def wait_phase(self, name: str, timeout_s: float) -> str:
        """The phase, as soon as it is `name` or a later one of PHASES. Raises WaitTimeout."""
        wait = Wait(timeout_s)
        while True:
            heard = self._control.heard
            phase = await self.phase()
            if phase is not None and _has_reached(phase, name):
                return phase
            if wait.is_over:
                raise WaitTimeout(
                    f"the run did not reach phase {name!r} within {timeout_s:.1f} s; it is in "
                    f"{phase!r}"
                )
            await self._control.wait(heard, wait.next_s(None))

    async def close(self) -> None:
        """Close connections. The board stays."""
        await self._control.close()
        await self._link.close()

    async def _text(self, key: str) -> str | None:
        value = await self._link.call(lambda: self._client.get(key))
        return None if value is None else value.decode()

    async def _signal(self, key: str, value: str, only_if_unset: bool) -> None:
        async def write() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.set(key, value, nx=only_if_unset)
                pipeline.xadd(self._keys.control, {"set": value}, maxlen=16)
                await pipeline.execute()

        await self._link.call(write)


def _has_reached(phase: str, name: str) -> bool:
    if phase in PHASES and name in PHASES:
        return PHASES.index(phase) >= PHASES.index(name)
    return phase == name


def _event(entry_id: str, fields: dict[bytes, bytes]) -> Event:
    time_s = int(entry_id.split("-")[0]) / 1000
    return Event(entry_id, time_s, fields[b"kind"].decode(), fields[b"text"].decode())
