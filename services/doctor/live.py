"""The live parts of a run: its processes, engines, clocks and API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from leeway.replay.board import EngineRecord, PolicyBoard
from leeway.replay.errors import LeewayError
from leeway.replay.run_board import RunBoard
from leeway.services.doctor.finding import Finding, Part
from leeway.services.doctor.redis_checks import RETRY_S, skew_finding
from leeway.services.snapshot import SILENT_S

if TYPE_CHECKING:
    from leeway.services.layout import RunDirectory

RUN = Part("run")
ENGINES = Part("engines")
API = Part("api")

LISTEN_S: Final = 3.0
"""Members write every second: in so long each is heard at least twice."""
LISTEN_EVERY_S: Final = 0.05

Sections = Mapping[str, Mapping[str, Any]]


async def check_run(url: str, name: str) -> list[Finding]:
    """Phase, engines and their versions, and the clock of whoever writes on the board."""
    board, policies = RunBoard(url, name, RETRY_S), PolicyBoard(url, name, RETRY_S)
    try:
        phase = await board.phase()
        if phase is None:
            remedy = "start it, or correct the run's name: the last part of its directory"
            return [RUN.error("phase", f"Redis knows no run {name}", remedy)]
        reason = await board.stop_requested()
        found = [RUN.ok("phase", phase)]
        if reason is not None and phase != "done":
            found.append(RUN.note("stop", f"it was asked to stop: {reason}"))
        engines = await policies.engines()
        sections = await board.get_all()
        found += engine_findings(engines, sections, phase)
        found += await _clocks(board)
        return found
    except LeewayError as error:
        return [RUN.error("board", str(error), "see the findings about redis")]
    finally:
        await board.close()
        await policies.close()


def engine_findings(
    engines: Sequence[EngineRecord], sections: Sections, phase: str
) -> list[Finding]:
    """Engines alive, and how far each is behind the learner.

    Learner at 7, engines at 7 and 4, max_staleness 2 -> a warning for the second.
    """
    if not engines:
        text = f"none is alive in phase {phase}"
        if phase in ("starting", "done"):
            return [ENGINES.note("alive", text)]
        return [ENGINES.error("alive", text, "logs/serve.log says why none runs")]
    found = [ENGINES.ok("alive", f"{len(engines)}", count=len(engines))]
    version, bound = (
        sections.get("learner", {}).get("version"),
        sections.get("run", {}).get("bound"),
    )
    for engine in engines:
        if not isinstance(version, int) or not isinstance(bound, int):
            continue
        text = f"version {engine.version}, learner at {version}"
        if version - engine.version > max(bound, 1):
            remedy = "logs/serve.log and publishes.jsonl say why it takes no weights; end it, and "
            remedy += "Serve starts another"
            found.append(ENGINES.warning(engine.engine_id, text, remedy))
        else:
            found.append(ENGINES.ok(engine.engine_id, text))
    return found


async def _clocks(board: RunBoard) -> list[Finding]:
    """Members stamp what they write with their own clock: hear each write, and compare.

    The clock of a member is known as well as the moment of its write: to a twentieth of a second.
    """
    heard: dict[str, float] = {}
    offsets: dict[str, float] = {}
    end = time.monotonic() + LISTEN_S
    while time.monotonic() < end:
        sections, now = await board.get_all(), time.time()
        for member, section in sections.items():
            stamp = section.get("updated_at")
            if not isinstance(stamp, int | float):
                continue
            if member in heard and stamp != heard[member]:
                # The write lay between the last look and this one.
                offset = stamp - (now - LISTEN_EVERY_S / 2)
                offsets[member] = min(offset, offsets.get(member, offset), key=abs)
            heard[member] = stamp
        await asyncio.sleep(LISTEN_EVERY_S)
    return clock_findings(heard, offsets, time.time())


def clock_findings(
    heard: Mapping[str, float], offsets: Mapping[str, float], now: float
) -> list[Finding]:
    """One for each member that was heard; one for those that have gone silent.

    `heard` is what each last stamped, `offsets` the clocks of those that wrote while we listened.
    """
    found = [
        skew_finding(member, offset, LISTEN_EVERY_S) for member, offset in sorted(offsets.items())
    ]
    silent = sorted(
        member
        for member, stamp in heard.items()
        if ":" in member and member not in offsets and now - stamp > SILENT_S
    )
    if silent:
        found.append(ENGINES.note("silent", f"gone or ended: {', '.join(silent)}"))
    return found


def check_process(run: RunDirectory) -> list[Finding]:
    """Whether the processes that the run directory names live."""
    state = run.read_state()
    if state is None:
        return [RUN.note("process", "the directory names no process yet")]
    if "train" not in state.pids:
        return [RUN.note("process", "started one by one; a supervisor knows whether they live")]
    if run.running_pid() is not None:
        return [RUN.ok("process", f"leeway train is process {state.pids['train']}")]
    if run.summary.is_file():
        return [RUN.note("process", "it has ended; summary.json has its numbers")]
    remedy = f"leeway train --resume {run.root}"
    return [RUN.warning("process", "it is stopped", remedy)]


def check_api(address: str, token: str | None) -> list[Finding]:
    """Whether the API answers, takes the token, and how long it takes."""
    from leeway.services.status_client import NotAnswering, StatusClient

    began = time.perf_counter()
    try:
        with StatusClient(address, token) as client:
            client.read("/v1/status")
    except NotAnswering as error:
        return [API.error("status", str(error), "logs/api.log says why; leeway api starts it")]
    except LeewayError as error:
        return [API.error("status", str(error), "see docs/rest.md for tokens and addresses")]
    took_ms = (time.perf_counter() - began) * 1e3
    return [API.ok("status", f"{address} in {took_ms:.0f} ms", took_ms=round(took_ms, 1))]
