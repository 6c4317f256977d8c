"""A learner that begins again closes admission for a while, and leaves it as it found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.services.beginning import SECTION, Beginning
from leeway.services.layout import RunDirectory


class Board:
    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {}
        self.events: list[str] = []

    async def put(self, section: str, value: dict[str, Any]) -> None:
        self.sections[section] = value

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return self.sections

    async def append_event(self, kind: str, text: str) -> None:
        self.events.append(text)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.board: Any = Board()
        self.replay = MemoryReplay(ReplayConfig(groups_per_step=2))
        self.run = RunDirectory(folder)

    def beginning(self) -> Beginning:
        return Beginning(self.run, self.board, self.replay, PolicyVersion(0))

    async def is_paused(self) -> bool:
        return (await self.replay.stats()).admission_paused


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_admission_is_closed_until_engines_have_the_version(scene: Scene):
    beginning = scene.beginning()
    assert await beginning.restore() is False
    assert await scene.is_paused()
    await beginning.open(is_paused=False)
    assert not await scene.is_paused()


async def test_what_an_operator_has_paused_stays_paused(scene: Scene):
    await scene.replay.pause_admission(True)
    beginning = scene.beginning()
    assert await beginning.restore() is True
    await beginning.open(is_paused=True)
    assert await scene.is_paused()


async def test_a_learner_that_is_killed_while_it_begins_is_no_operator(scene: Scene):
    await scene.beginning().restore()  # and no further
    assert await scene.beginning().restore() is False


async def test_who_opens_admission_meanwhile_is_heard(scene: Scene):
    await scene.replay.pause_admission(True)
    await scene.beginning().restore()
    await scene.replay.pause_admission(False)
    assert await scene.beginning().restore() is False


async def test_a_beginning_that_is_over_says_nothing_of_the_next(scene: Scene):
    await scene.beginning().restore()
    await scene.beginning().open(is_paused=False)
    assert scene.board.sections[SECTION] == {}
    await scene.replay.pause_admission(True)
    assert await scene.beginning().restore() is True
