"""Counters over a real Redis: no restart of a process takes anything back from Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from leeway.actors.counters import Counters
from leeway.actors.search.questions import StreamState
from leeway.learner.weights.publisher import Published
from leeway.replay.board import RunBoard
from leeway.replay.config import ReplayConfig
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import connect_replay
from leeway.services.api.metrics import exposition
from leeway.services.config import load
from leeway.services.layout import RunDirectory
from leeway.services.metering import Metering

LINE = {
    "num_tokens_trained": 100,
    "num_trajectories": 8,
    "seconds": 1.5,
    "wait_s": 0.5,
    "staleness_histogram/1": 8,
}
PUBLISHED = Published(
    transport="nccl",
    version=PolicyVersion(1),
    num_engines=1,
    num_bytes=10,
    checksum="c",
    transfer_s=0.2,
    wire_s=0.1,
    pause_s=[0.01],
    copy_s=[0.005],
    evicted={},
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def board(url: str) -> AsyncIterator[RunBoard]:
    board = RunBoard(url, "counted")
    yield board
    await board.close()


async def learn(board: RunBoard, folder: Path, step: int) -> None:
    """One step and one publish by a learner process of its own."""
    metering = Metering(load(None), RunDirectory(folder), board, step - 1)
    await metering.resume()
    await metering.step({"step": step, **LINE})
    await metering.publish(PUBLISHED)
    await metering.finish()


async def roll_out(board: RunBoard) -> None:
    """One episode and one dropped group by a worker process of its own."""
    counters = Counters((await board.get_all()).get("rollout:worker-0"))
    counters.episodes["answer"] += 1
    counters.dropped["timeout"] += 1
    counters.episode_s.observe(3.0)
    snapshot = counters.snapshot(
        worker_id="worker-0",
        num_groups_in_flight=0,
        position=StreamState(seed=0, num_questions=1, position=0),
    )
    await board.put("rollout:worker-0", msgspec.to_builtins(snapshot, str_keys=True))


async def scrape(url: str, board: RunBoard) -> dict[str, float]:
    """Counters, and counts of histograms, as an API that was just started exposes them."""
    replay = connect_replay(url, "counted", ReplayConfig())
    text = exposition(await board.get_all(), await replay.stats(), None, now=time.time()).decode()
    await replay.close()
    return {
        sample.name
        + "".join(f" {v}" for k, v in sorted(sample.labels.items()) if k not in ("run", "le")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def test_a_learner_and_a_worker_that_start_again_count_on(
    url: str, board: RunBoard, tmp_path: Path
):
    await board.put("run", {"name": "counted"})
    await learn(board, tmp_path, 1)
    await roll_out(board)
    before = await scrape(url, board)
    await learn(board, tmp_path, 2)
    await roll_out(board)
    after = await scrape(url, board)
    assert set(before) == set(after)
    assert [name for name in before if after[name] < before[name]] == []
    assert after["leeway_learner_steps_total"] == 2
    assert after["leeway_learner_trained_tokens_total"] == 200
    assert after["leeway_learner_step_seconds_sum"] == 3.0
    assert after["leeway_learner_staleness_versions_count"] == 16
    assert after["leeway_publish_pause_seconds_count"] == 2
    assert after["leeway_rollout_episodes_total answer worker-0"] == 2
    assert after["leeway_rollout_groups_dropped_total timeout worker-0"] == 2
    assert after["leeway_rollout_episode_seconds_sum worker-0"] == 6.0
