"""`leeway replay` on a real Redis: what it shows, what a file brings over, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from leeway.replay.archive import ArchivedGroup, ArchiveReader
from leeway.replay.archive_buffer import OpenBuffer, Placed, export_groups
from leeway.replay.codec import decode
from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.stored import StoredGroup
from leeway.replay.synthetic import build_group
from leeway.services import cli
from leeway.services.config import load
from leeway.services.layout import RunDirectory, RunState, create_run

OVERRIDES = (
    "replay.groups_per_step=2",
    "replay.max_staleness=2",
    "replay.max_draws=3",
    "replay.draw_by=prioritised",
    "rollout.max_groups_in_flight=6",
)
CONFIG = ReplayConfig(groups_per_step=2, max_staleness=2, max_draws=3, draw_by="prioritised")
V0, V1, V3, V9 = (PolicyVersion(number) for number in (0, 1, 3, 9))
Leeway = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def leeway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Leeway:
    """Runs the command in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leeway", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


SHARDS = "replay.num_shards=2"


def made(name: str, server: EmbeddedRedis, tmp_path: Path, *more: str) -> RunDirectory:
    """A run whose Redis is `server`; its keys are no other run's."""
    overrides = (
        *OVERRIDES,
        f"name={name}-{uuid.uuid4().hex[:8]}",
        f"directory={tmp_path}/runs",
        *more,
    )
    return create_run(load(None, (*overrides, f"replay.url={server.url}")))


@pytest.fixture
def source(server: EmbeddedRedis, tmp_path: Path) -> RunDirectory:
    """Learner at 1: 2 groups trained once, 2 returned once, 1 with a set priority, 1 slot."""
    run = made("source", server, tmp_path)
    asyncio.run(fill(server.url, run.root.name))
    return run


async def fill(url: str, name: str) -> None:
    replay = RedisReplay(url, name, CONFIG)
    for seed, slot in enumerate(await replay.admit(2, V0, 1.0)):
        await replay.add(slot, build_group(slot, seed=seed))
    await replay.acknowledge(await replay.draw(1.0), V1)
    (first, second, third, *_) = await replay.admit(3, V1, 1.0)
    for seed, slot in enumerate((first, second), start=2):
        await replay.add(slot, build_group(slot, seed=seed))
    await replay.release(await replay.draw(1.0))
    await replay.update_priorities({first.slot_id: 7.5})
    await replay.drop(third, "worker-died")
    await replay.admit(1, V1, 1.0)
    await replay.close()


Contents = dict[str, tuple[StoredGroup, bytes]]


def contents(url: str, name: str, config: ReplayConfig = CONFIG) -> Contents:
    """Records and payloads by id, arrivals numbered from 0."""

    async def read() -> Contents:
        replay = RedisReplay(url, name, config)
        records = await replay.buffer.records()
        payloads = [payload async for payload in replay.buffer.payloads(list(records))]
        await replay.close()
        numbered = (
            msgspec.structs.replace(record, arrival=i) for i, record in enumerate(records.values())
        )
        return {
            group_id: (record, payload or b"")
            for group_id, record, payload in zip(records, numbered, payloads, strict=True)
        }

    return asyncio.run(read())


# --- inspect ---


def test_inspect_shows_what_the_buffer_holds(leeway: Leeway, source: RunDirectory):
    code, out, err = leeway("replay", "inspect", str(source.root))
    assert (code, err) == (0, "")
    rows = {line[:15].strip(): line[17:].rstrip() for line in out.splitlines()}
    assert rows["learner version"] == "1"
    assert rows["groups"] == "1 being played, 4 ready, 0 leased"
    assert rows["so far"] == "6 admitted, 4 added, 4 drawn, 2 trained"
    assert rows["versions"] == "outstanding, by version 1: 3"
    assert rows["staleness"] == "stored, by versions behind the learner 0: 2, 1: 2"
    assert rows["trained"] == "stored, by steps that trained them 0: 2, 1: 2"
    assert rows["returned"] == "stored, by returns untrained 0: 2, 1: 2"
    assert rows["dropped"] == "worker-died: 1"
    assert "version 1, for" in rows["slots"]
    assert rows["leases"] == "none"


def test_inspect_takes_the_latest_run(leeway: Leeway, source: RunDirectory):
    assert source.root.name in leeway("replay", "inspect")[1]


def test_inspect_json_is_one_line(leeway: Leeway, source: RunDirectory):
    code, out, _ = leeway("replay", "inspect", "--json")
    found = json.loads(out)
    assert (code, out.count("\n")) == (0, 1)
    assert found["run"] == source.root.name
    assert found["stats"]["num_ready"] == 4
    assert found["staleness"] == {"0": 2, "1": 2}
    assert found["largest_bytes"] > 0


def test_inspect_tells_one_group_in_words(leeway: Leeway, source: RunDirectory, server):
    group_id, (record, _) = next(iter(contents(server.url, source.root.name).items()))
    code, out, _ = leeway("replay", "inspect", "--group", group_id[:10])
    assert code == 0
    assert out.startswith(f"group {group_id}, question question-0, played by synthetic\n")
    times = "1 time" if record.returns == 1 else "0 times"
    assert f"trained by 1 step, returned {times}\n" in out
    assert "stopped by answer, version 0, 12 tokens (3 prompt), 0.5 s" in out
    assert "  turn 1: search, 3 generated, 3 observed\n" in out
    assert json.loads(leeway("replay", "inspect", "--group", group_id, "--json")[1])["record"]


def test_a_group_that_is_not_there_is_bad_input(leeway: Leeway, source: RunDirectory):
    code, _, err = leeway("replay", "inspect", "--group", "nope")
    assert code == 2
    assert err == "leeway: the buffer holds no group whose id begins with 'nope', among 4 groups\n"


def test_a_stopped_run_has_its_redis_started_and_stopped(leeway: Leeway, tmp_path: Path):
    run = create_run(load(None, (*OVERRIDES, f"directory={tmp_path}/runs")))
    with EmbeddedRedis.start(run.redis) as embedded:
        asyncio.run(fill(embedded.url, run.root.name))
    code, out, _ = leeway("replay", "inspect", str(run.root), "--json")
    assert (code, json.loads(out)["stats"]["num_ready"]) == (0, 4)
    assert leeway("replay", "export", "out.lwr", str(run.root))[0] == 0
    with EmbeddedRedis.start(run.redis) as embedded:  # nobody holds the directory
        assert len(contents(embedded.url, run.root.name)) == 4


def test_a_running_run_is_asked_where_it_is(leeway: Leeway, server, tmp_path, monkeypatch):
    run = create_run(load(None, (*OVERRIDES, f"directory={tmp_path}/runs")))
    run.write_redis_url(server.url)
    run.write_state(RunState(name="run", started_at=1.0, pids={"train": os.getppid()}))
    monkeypatch.setattr("leeway.services.layout._is_leeway", lambda pid: pid == os.getppid())
    asyncio.run(fill(server.url, run.root.name))
    assert leeway("replay", "inspect", str(run.root))[0] == 0
    assert not (run.redis / "redis.conf").exists()


# --- which buffer ---


def test_a_buffer_is_named_by_url_and_run(leeway: Leeway, source: RunDirectory, server):
    named = ("--url", server.url, "--run", source.root.name, "--config", str(source.config))
    assert leeway("replay", "inspect", *named)[0] == 0


def test_who_only_looks_needs_no_limits_and_changes_none(leeway: Leeway, source, server):
    before = limits_in_force(server.url, source.root.name)
    named = ("--url", server.url, "--run", source.root.name)
    assert leeway("replay", "inspect", *named)[0] == 0
    assert leeway("replay", "export", "out.lwr", *named)[0] == 0
    assert limits_in_force(server.url, source.root.name) == before


def limits_in_force(url: str, name: str) -> bytes:
    """They end the state: 13 numbers and three names, each of which ends with a zero."""
    with redis.Redis.from_url(url) as client:
        state: Any = client.get(f"leeway:{{{name}}}:state")
    limits = state[-(13 * 8 + len(b"pace\0prioritised\0fifo\0")) :]
    assert limits.endswith(b"pace\0prioritised\0fifo\0")
    return limits


def test_an_import_by_url_needs_the_limits_of_the_run(leeway: Leeway, source, server):
    leeway("replay", "export", "out.lwr")
    named = ("--url", server.url, "--run", source.root.name)
    code, _, err = leeway("replay", "import", "out.lwr", *named)
    assert (code, err.count("\n")) == (2, 1)
    assert "needs the limits of the run: give --config FILE" in err
    config = ("--config", str(source.config))
    assert leeway("replay", "import", "out.lwr", *named, *config)[0] == 0


def test_a_buffer_of_several_shards_comes_over_into_one_and_back(leeway: Leeway, server, tmp_path):
    sharded = made("sharded", server, tmp_path, SHARDS)

    async def make() -> None:
        buffer = OpenBuffer(server.url, sharded.root.name, sharded.read_config().replay)
        for slot in await buffer.replay.admit(6, V0, 1.0):
            await buffer.replay.add(slot, build_group(slot))
        assert {placed.shard for placed in await buffer.records()} == {0, 1}
        await buffer.close()

    asyncio.run(make())
    plain, back = made("plain", server, tmp_path), made("back", server, tmp_path, SHARDS)
    named = ("--url", server.url, "--run", sharded.root.name)
    assert "more shards than num_shards = 1" in leeway("replay", "inspect", *named)[2]
    for name, run in (("a.lwr", sharded), ("b.lwr", plain)):
        assert leeway("replay", "export", name, str(run.root))[1].startswith("6 groups")
        target = plain if run is sharded else back
        leeway("replay", "import", name, str(target.root))
        again = leeway("replay", "import", name, str(target.root))[1]
        assert again.startswith(f"0 groups stored from {name}, 6 skipped (stored)")
    stats = json.loads(leeway("replay", "inspect", str(back.root), "--json")[1])["stats"]
    assert stats["num_ready"] == 6

    async def draw() -> int:
        buffer = OpenBuffer(server.url, back.root.name, back.read_config().replay)
        lease = await buffer.replay.draw(1.0)
        await buffer.close()
        return len(lease.groups)

    assert asyncio.run(draw()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--run", "x"), "by both --url redis://... and --run NAME"),
        (("--url", "redis://127.0.0.1:6379"), "by both --url redis://... and --run NAME"),
        (("--url", "http://a", "--run", "x"), "is not a Redis URL"),
        ((".", "--run", "x"), "or give RUN_DIR alone"),
        (("nowhere",), "nowhere is not a folder"),
        ((".",), "holds no config.toml"),
        ((), "there is no run in runs/"),
    ],
)
def test_a_buffer_that_is_not_named_well_is_bad_input(leeway: Leeway, arguments, words: str):
    code, out, err = leeway("replay", "inspect", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_run_that_left_no_buffer_is_bad_input(leeway: Leeway, server, tmp_path):
    run = made("empty", server, tmp_path)
    code, _, err = leeway("replay", "inspect", str(run.root))
    assert code == 2
    assert err.endswith(f"holds no replay buffer of run {run.root.name}\n")


# --- export and import ---


def test_a_buffer_comes_over_whole(leeway: Leeway, source: RunDirectory, server, tmp_path):
    code, out, _ = leeway("replay", "export", "out.lwr", str(source.root))
    size = (tmp_path / "out.lwr").stat().st_size
    assert (code, out) == (
        0, f"4 groups, {size:,} bytes in out.lwr; 0 were trained or dropped meanwhile\n",
    )  # fmt: skip
    target = made("target", server, tmp_path)
    code, out, _ = leeway("replay", "import", "out.lwr", str(target.root))
    words = "4 groups stored from out.lwr; learner version 1, taken from the file\n"
    assert (code, out) == (0, words)
    before, after = (contents(server.url, run.root.name) for run in (source, target))
    assert after == before
    assert list(after) == list(before)
    assert sorted(record.draws for record, _ in after.values()) == [0, 0, 1, 1]
    assert sorted(record.returns for record, _ in after.values()) == [0, 0, 1, 1]
    assert max(record.priority for record, _ in after.values()) == 7.5


def test_what_was_imported_is_drawn_and_trained(leeway: Leeway, source, server, tmp_path):
    leeway("replay", "export", "out.lwr", str(source.root))
    target = made("target", server, tmp_path)
    leeway("replay", "import", "out.lwr", str(target.root))

    async def train() -> int:
        replay = RedisReplay(server.url, target.root.name, CONFIG)
        await replay.acknowledge(await replay.draw(1.0), PolicyVersion(2))
        stats = await replay.stats()
        await replay.close()
        return stats.num_trained

    assert asyncio.run(train()) == 2


def test_a_dry_run_says_what_would_come_over_and_leaves_all_as_it_is(
    leeway: Leeway, source: RunDirectory, server, tmp_path: Path
):
    code, out, _ = leeway("replay", "export", "out.lwr", str(source.root), "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "would write 4 groups")
    assert not (tmp_path / "out.lwr").exists()
    leeway("replay", "export", "out.lwr", str(source.root))
    target = made("target", server, tmp_path)
    code, out, _ = leeway("replay", "import", "out.lwr", str(target.root), "--dry-run", "--json")
    found = json.loads(out)
    assert (code, found["does"], found["facts"]) == (
        0, "store 4 groups", {"learner version": 1},
    )  # fmt: skip
    assert contents(server.url, target.root.name) == {}
    # What it says of a buffer that has some is what an import does.
    leeway("replay", "import", "out.lwr", str(target.root))
    before = contents(server.url, target.root.name)
    _, out, _ = leeway("replay", "import", "out.lwr", str(target.root), "--dry-run", "--json")
    assert json.loads(out)["facts"] == {"learner version": 1, "skipped (stored)": 4}
    assert contents(server.url, target.root.name) == before


def test_a_second_import_stores_nothing_twice(leeway: Leeway, source: RunDirectory):
    leeway("replay", "export", "out.lwr", str(source.root))
    code, out, _ = leeway("replay", "import", "out.lwr", str(source.root), "--json")
    assert code == 0
    assert json.loads(out) == {
        "num_groups": 0, "skipped": {"stored": 4}, "learner_version": 1,
        "is_version_taken": False, "fault": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "reasons"),
    [(V0, {"lost-version": 2}), (V3, {"overdue": 2}), (V9, {"overdue": 4})],
)
def test_groups_that_no_step_may_train_are_left_out(
    leeway: Leeway, source, server, tmp_path, version: PolicyVersion, reasons: dict[str, int]
):
    leeway("replay", "export", "out.lwr", str(source.root))
    target = made("target", server, tmp_path)

    async def use() -> None:
        replay = RedisReplay(server.url, target.root.name, CONFIG)
        for slot in await replay.admit(1, V0, 1.0):
            await replay.drop(slot, "only-to-be-used")
        await replay.restore_version(version)
        await replay.close()

    asyncio.run(use())
    found = json.loads(leeway("replay", "import", "out.lwr", str(target.root), "--json")[1])
    assert found["skipped"] == reasons
    assert found["num_groups"] == 4 - sum(reasons.values())
    assert (found["learner_version"], found["is_version_taken"]) == (version, False)


def test_export_says_nothing_of_the_password(leeway: Leeway, source: RunDirectory, tmp_path):
    leeway("replay", "export", "out.lwr", str(source.root))
    with (tmp_path / "out.lwr").open("rb") as file:
        header = ArchiveReader(file).header
    assert header.run == source.root.name
    assert header.limits["draw_by"] == "prioritised"
    assert header.counters["num_trained"] == 2
    assert "url" not in header.limits


def test_an_export_during_traffic_holds_whole_groups_alone(server, tmp_path: Path):
    path = tmp_path / "out.lwr"

    async def work() -> tuple[int, list[ArchivedGroup]]:
        replay = RedisReplay(server.url, f"traffic-{os.getpid()}", ReplayConfig(groups_per_step=4))
        observer = OpenBuffer(server.url, f"traffic-{os.getpid()}", replay.config)
        learner_version, is_over = V0, False

        async def play() -> None:
            while not is_over:
                for slot in await replay.admit(4, learner_version, 20.0):
                    await replay.add(slot, build_group(slot, num_tokens=400))

        async def train() -> None:
            nonlocal learner_version
            while not is_over:
                lease = await replay.draw(20.0)
                learner_version = PolicyVersion(learner_version + 1)
                await replay.acknowledge(lease, learner_version)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(play())
            trainer = tasks.create_task(train())
            await asyncio.sleep(0.2)
            num_gone, groups = 0, []
            for _ in range(20):
                exported = await export_groups(observer, path, overwrite=True)
                num_gone += exported.num_gone
                with path.open("rb") as file:
                    groups += ArchiveReader(file).groups()
            is_over = True
            assert not trainer.done()
        await replay.close()
        await observer.close()
        return num_gone, groups

    num_gone, groups = asyncio.run(work())
    assert groups
    assert all(decode(group.payload).group_id == group.group_id for group in groups)
    assert num_gone >= 0


async def test_a_group_that_is_trained_during_the_export_is_counted_as_gone(
    server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = f"gone-{os.getpid()}"
    buffer = OpenBuffer(server.url, name, ReplayConfig(groups_per_step=2, max_staleness=4))
    for slot in await buffer.replay.admit(5, V0, 1.0):
        await buffer.replay.add(slot, build_group(slot))
    read = buffer.records

    async def records_and_a_step() -> list[Placed]:
        found = await read()
        await buffer.replay.acknowledge(await buffer.replay.draw(1.0), V1)
        return found

    monkeypatch.setattr(buffer, "records", records_and_a_step)
    exported = await export_groups(buffer, tmp_path / "out.lwr")
    assert (exported.num_groups, exported.num_gone) == (3, 2)
    await buffer.close()


# --- files that are refused ---


def test_a_file_that_stands_is_replaced_by_force_alone(leeway: Leeway, source, tmp_path: Path):
    (tmp_path / "out.lwr").write_text("mine")
    code, _, err = leeway("replay", "export", "out.lwr")
    assert (code, (tmp_path / "out.lwr").read_text()) == (2, "mine")
    assert err == "leeway: out.lwr exists; name another file or say --force\n"
    assert leeway("replay", "export", "out.lwr", "--force")[0] == 0
    assert (tmp_path / "out.lwr").read_bytes().startswith(b"LWREPLAY")


@pytest.mark.parametrize("file", [".", "nowhere/out.lwr", "plain/out.lwr"])
def test_a_file_that_cannot_be_written_is_bad_input(leeway: Leeway, source, tmp_path, file: str):
    (tmp_path / "plain").write_text("")
    code, out, err = leeway("replay", "export", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [path.name for path in tmp_path.rglob("*.partial")] == []


@pytest.mark.parametrize("file", [".", "nowhere.lwr", "plain"])
def test_a_file_that_cannot_be_read_is_bad_input(leeway: Leeway, source, tmp_path, file: str):
    (tmp_path / "plain").write_text("not an exported buffer")
    code, out, err = leeway("replay", "import", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert file in err


def test_an_export_that_fails_leaves_no_file(leeway: Leeway, source, tmp_path, monkeypatch):
    async def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leeway.replay.archive_buffer._write_groups", fail)
    code, _, err = leeway("replay", "export", "out.lwr")
    assert (code, err) == (2, "leeway: out.lwr cannot be written: No space left on device\n")
    assert list(tmp_path.glob("out.lwr*")) == []


def test_what_stood_before_the_fault_is_kept_and_the_rest_comes_with_the_whole_file(
    leeway: Leeway, server, tmp_path: Path
):
    async def make() -> None:
        buffer = OpenBuffer(server.url, f"long-{os.getpid()}", ReplayConfig())
        for seed, slot in enumerate(await buffer.replay.admit(60, V0, 1.0)):
            await buffer.replay.add(slot, build_group(slot, seed=seed, num_tokens=4000))
        await export_groups(buffer, tmp_path / "whole.lwr")
        await buffer.close()

    asyncio.run(make())
    whole = (tmp_path / "whole.lwr").read_bytes()
    (tmp_path / "cut.lwr").write_bytes(whole[: len(whole) // 2])
    target = made("target", server, tmp_path)
    code, out, err = leeway("replay", "import", "cut.lwr", str(target.root))
    num_kept = int(out.split()[0])
    assert code == 2
    assert 0 < num_kept < 60
    assert err == (f"leeway: cut.lwr, record {num_kept + 1}: the file was cut within it\n")
    code, out, _ = leeway("replay", "import", "whole.lwr", str(target.root))
    assert code == 0
    assert out.startswith(
        f"{60 - num_kept} groups stored from whole.lwr, {num_kept} skipped (stored);"
    )
    assert len(contents(server.url, target.root.name)) == 60
