"""What the routes of one run share, built when the application is."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from leeway.replay.board import EngineRecord
from leeway.replay.errors import LeewayError
from leeway.replay.run_board import Event
from leeway.replay.run_records import Action, ControlRequest, LiveSettings
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Replay
from leeway.services.api.hub import Hub
from leeway.services.api.reader import Reader, answer_deadline
from leeway.services.api.recent import RecentGroups
from leeway.services.config import RunConfig

log = logging.getLogger(__name__)

PROCESS: Final = "api"
"""What the API is called among the processes of a run."""
Engines = Callable[[], Awaitable[Sequence[EngineRecord]]]


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
    async def change_settings(
        self, values: Mapping[str, float], before: LiveSettings
    ) -> LiveSettings | None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """One run, as its API sees it."""

    run: Path
    """Its directory. Processes of other machines may write to another of the same name."""
    config: RunConfig
    board: Board
    replay: Replay
    engines: Engines
    """Those that live, with the version that each samples from."""
    secret: bytes
    """What tickets of slots are sealed with; the same in every API of the run."""
    reader: Reader
    recent: RecentGroups
    hub: Hub

    async def oldest_version(self) -> PolicyVersion | None:
        """The oldest that a live engine samples from; None when none lives."""
        versions = [engine.version for engine in await self.engines()]
        return PolicyVersion(min(versions)) if versions else None

    async def note(self, kind: str, text: str) -> None:
        """Make an event of what was done. It is done, so an event that is lost is no failure."""
        try:
            async with answer_deadline():
                await self.board.append_event(kind, text)
        except LeewayError as error:
            log.warning("no event tells that %s: %s", text, error)
