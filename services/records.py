"""What the run board says, kept in the run directory: events.jsonl and eval.json.

One process at a time writes them: the learner, and behind it whoever ends the run. Both go on
behind the last line, so that no event is written twice.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from pathlib import Path
from typing import Any, Final

from leeway.replay.board import RunBoard
from leeway.replay.run_board import Event
from leeway.services.layout import RunDirectory

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
_AT_ONCE: Final = 100
_TAIL_BYTES: Final = 65536


class Records:
    """Copies from the board of a run to its directory."""

    def __init__(self, run: RunDirectory, board: RunBoard) -> None:
        self._run = run
        self._board = board
        self._seen = _last_id(run.events)
        self._evaluated_at: float | None = None
        """`updated_at` of the evaluations that were written last."""

    async def keep(self) -> None:
        """Copy every second, until cancelled."""
        while True:
            try:
                await self.copy()
            except OSError as error:  # a full disk; the board keeps them until there is room
                log.warning("events could not be copied to the run directory: %s", error)
            await asyncio.sleep(EVERY_S)

    async def copy(self) -> None:
        """Bring both files up to now."""
        # From the first event on: without an id the board tells the last ones.
        while events := await self._board.events(self._seen or "0-0", _AT_ONCE):
            self._append(events)
        evaluations = (await self._board.get_all()).get("eval")
        if evaluations is not None and evaluations["updated_at"] != self._evaluated_at:
            _write(self._run.eval, _with_samples(evaluations, _read(self._run.eval)))
            self._evaluated_at = evaluations["updated_at"]

    def _append(self, events: list[Event]) -> None:
        lines = [
            {"id": event.event_id, "time": event.time_s, "kind": event.kind, "text": event.text}
            for event in events
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        append_whole(self._run.events, text.encode())
        self._seen = events[-1].event_id


def _last_id(file: Path) -> str:
    """Of the last whole line; "" without one. A process that was killed may leave half a line,
    which is ended here."""
    if not file.is_file():
        return ""
    with file.open("rb+") as lines:
        size = lines.seek(0, 2)
        lines.seek(max(0, size - _TAIL_BYTES))
        tail = lines.read()
        if tail and not tail.endswith(b"\n"):
            lines.truncate(size - len(tail.rpartition(b"\n")[2]))
    whole = tail[: tail.rfind(b"\n") + 1].splitlines()
    return json.loads(whole[-1])["id"] if whole else ""


def _with_samples(evaluations: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The transcripts that the board has dropped since stay where they were written before."""
    known = {_moment(entry): entry for entry in before.get("history", []) if entry}
    history = [
        known.get(_moment(entry), entry) if entry and "samples" not in entry else entry
        for entry in evaluations["history"]
    ]
    return {**evaluations, "history": history}


def _moment(evaluation: dict[str, Any]) -> tuple[Any, Any]:
    """Which one it is: a step may be evaluated again, after a resumption."""
    return evaluation.get("step"), evaluation.get("duration_s")


def _read(file: Path) -> dict[str, Any]:
    """Nothing where the file is missing or was damaged; the board says the scores again."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    partial.replace(file)


def append_whole(file: Path, data: bytes) -> None:
    """Append all of it or nothing: half a line would stay for ever. Raises OSError."""
    with file.open("ab", buffering=0) as lines:
        size = lines.seek(0, 2)
        try:
            written = lines.write(data)
            if written != len(data):
                raise OSError(errno.ENOSPC, "No space left on device", str(file))
        except OSError:
            lines.truncate(size)
            raise
