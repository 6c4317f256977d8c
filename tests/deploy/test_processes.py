"""A run as separate processes: `leeway serve`, `learn` and `api`, each started, killed and stopped
by itself. What they share is a Redis and a configuration file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leeway.replay.server import EmbeddedRedis
from leeway.services.layout import RunDirectory

from .local_processes import Place, Process, children_of, free_port, left_of, steps_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture
def redis(place: Place, tmp_path: Path) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        place.environment["LEEWAY_REDIS_URL"] = server.url
        yield server.url


def start(place: Place, name: str, *options: str, **environment: str) -> Process:
    command = ("leeway", name, "small.toml", "--run-dir", "runs/first", *options)
    return place.start(*command, environment=environment)


def test_each_is_killed_and_started_again_and_the_run_goes_on_to_its_end(place: Place, redis: str):
    run = RunDirectory(place.folder / "runs" / "first")
    port = free_port()
    serve, learner = start(place, "serve"), start(place, "learn")
    api = start(place, "api", "--port", str(port))
    place.until(lambda: len(steps_of(run)) >= 2, 300, serve, learner, api)

    api.kill()
    api = start(place, "api", "--port", str(port))
    learner.kill()
    learner = start(place, "learn")
    place.until(lambda: steps_of(run).count(2) and max(steps_of(run)) >= 3, 300, serve, learner)
    engines = children_of(serve)
    serve.kill()
    assert left_of(engines) == []
    serve = start(place, "serve")

    assert learner.popen.wait(400) == 0, learner.tail
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == 6
    assert summary["max_staleness_seen"] <= 1
    assert sorted(set(steps_of(run))) == [1, 2, 3, 4, 5, 6]
    assert httpx.get(f"http://127.0.0.1:{port}/livez", timeout=5).status_code == 200
    assert (api.stop(), serve.stop()) == (0, 0)
    assert redis not in serve.tail + learner.tail  # it holds the password


def test_sigterm_ends_each_with_0_and_the_learner_with_a_checkpoint(place: Place, redis: str):
    run = RunDirectory(place.folder / "runs" / "first")
    heartbeat = place.folder / "heartbeat"
    serve = start(place, "serve")
    learner = start(place, "learn", LEEWAY_HEARTBEAT_FILE=str(heartbeat))
    place.until(lambda: len(steps_of(run)) >= 1, 300, serve, learner)
    assert heartbeat.is_file()
    assert learner.stop() == 0
    last = steps_of(run)[-1]
    assert (run.checkpoints / f"step-{last:08d}" / "training.json").is_file()
    engines = children_of(serve)
    assert serve.stop() == 0
    assert left_of(engines) == []
    assert not run.summary.exists()


def test_a_learner_that_stays_waits_after_the_end_for_sigterm(place: Place, redis: str):
    run = RunDirectory(place.folder / "runs" / "first")
    config = place.folder / "small.toml"
    config.write_text(config.read_text().replace("num_steps = 6", "num_steps = 1"))
    serve, learner = start(place, "serve"), start(place, "learn", "--stay")
    place.until(run.report.is_file, 300, serve, learner)
    assert learner.is_alive
    assert learner.stop() == 0
    assert serve.stop() == 0


def test_two_ranks_end_with_0_on_sigterm_and_leave_a_checkpoint(place: Place, redis: str):
    run = RunDirectory(place.folder / "runs" / "first")
    config = place.folder / "small.toml"
    config.write_text(config.read_text().replace("[learner]", "[learner]\nnum_processes = 2"))
    serve, learner = start(place, "serve"), start(place, "learn")
    place.until(lambda: len(steps_of(run)) >= 1, 300, serve, learner)
    ranks = children_of(learner)
    assert len(ranks) >= 2
    assert learner.stop() == 0
    assert left_of(ranks) == []
    assert (run.checkpoints / f"step-{steps_of(run)[-1]:08d}" / "training.json").is_file()
    assert serve.stop() == 0


# --- bad input and peers that are not there


@pytest.mark.parametrize("name", ["learn", "serve", "api"])
def test_without_a_redis_that_all_reach_no_process_starts(place: Place, name: str):
    process = start(place, name)
    assert process.popen.wait(60) == 2
    assert process.tail.count("\n") == 1
    assert "set replay.url or LEEWAY_REDIS_URL" in process.tail
    assert not (place.folder / "runs").exists()


def test_a_run_name_that_is_no_key_is_refused(place: Place, redis: str):
    process = place.start("leeway", "learn", "small.toml", "--run-dir", "runs/my run")
    assert process.popen.wait(60) == 2
    assert "run name 'my run' must be 1 to 100 letters" in process.tail


def test_a_redis_url_that_is_none_is_refused_without_its_password(place: Place):
    process = start(place, "learn", LEEWAY_REDIS_URL="http://:secret@host/0")
    assert process.popen.wait(60) == 2
    assert "LEEWAY_REDIS_URL: replay.url is not a Redis URL" in process.tail
    assert "secret" not in process.tail


def test_a_process_that_waits_for_redis_ends_with_0_on_sigterm(place: Place):
    process = start(place, "learn", LEEWAY_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    place.until(lambda: "waiting up to 300 s for Redis" in process.tail, 60, process)
    assert process.stop(10) == 0


# --- rollouts without a learner


def test_rollout_writes_as_many_groups_as_asked_for_in_the_format_of_an_export(place: Place):
    from leeway.replay.archive import ArchiveReader

    out = place.folder / "groups.lwr"
    process = place.start("leeway", "rollout", "small.toml", "--num-groups", "5", "--out", str(out))
    assert process.popen.wait(180) == 0, process.tail
    assert "5 groups, " in process.tail
    with out.open("rb") as file:
        groups = list(ArchiveReader(file).groups())
    assert len({group.group_id for group in groups}) == 5
    assert {len(group.trajectories) for group in groups} == {2}
    assert list(place.folder.glob("*.partial")) == []


def test_rollout_does_not_replace_a_file_unasked(place: Place):
    (place.folder / "groups.lwr").write_text("mine")
    command = ("leeway", "rollout", "small.toml", "--num-groups", "5", "--out", "groups.lwr")
    process = place.start(*command)
    assert process.popen.wait(60) == 2
    assert "groups.lwr exists; name another file or say --force" in process.tail
    assert (place.folder / "groups.lwr").read_text() == "mine"
