"""What the routes of one run share, built when the application is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request, Response

from leeway.replay.run_board import Event
from leeway.replay.run_records import Action, ControlRequest, LiveSettings
from leeway.replay.store import Replay, VersionSource
from leeway.services.api.hub import Hub
from leeway.services.api.reader import Reader
from leeway.services.api.recent import RecentGroups
from leeway.services.config import RunConfig


class Board(Protocol):
    """What the API needs of the run board; replay.run_board.RunBoard is the real one."""

    async def get_all(self) -> dict[str, dict[str, Any]]: ...
    async def phase(self) -> str | None: ...
    async def events(self, after: str = "", count: int = 100) -> Sequence[Event]: ...
    async def append_event(self, kind: str, text: str) -> None: ...
    async def steps(self, after: int = 0, count: int = 100) -> list[dict[str, Any]]: ...
    async def publishes(self, count: int = 20) -> list[dict[str, Any]]: ...
    async def ask(self, action: Action, detail: str, take_up_s: float) -> ControlRequest: ...
    async def request(self, action: Action) -> ControlRequest | None: ...
    async def settings(self) -> LiveSettings: ...
    async def change_settings(self, values: Mapping[str, float]) -> LiveSettings: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """One run, as its API sees it."""

    run: Path
    """Its directory. Processes of other machines may write to another of the same name."""
    config: RunConfig
    board: Board
    replay: Replay
    oldest_version: VersionSource
    """Of the live engines."""
    secret: bytes
    """What tickets of slots are sealed with; the same in every API of the run."""
    reader: Reader
    recent: RecentGroups
    hub: Hub


def answer(request: Request, body: bytes) -> Response:
    """JSON with an ETag; 304 to who has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    known = [given.strip() for given in request.headers.get("if-none-match", "").split(",")]
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
