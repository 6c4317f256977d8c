"""The evidence of a run: what is in it, how large it grows, and that no secret is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leeway.replay.board import RunBoard
from leeway.replay.errors import ConfigurationError
from leeway.replay.server import EmbeddedRedis
from leeway.services import supervision
from leeway.services.cli import app
from leeway.services.config import load
from leeway.services.doctor import bundle
from leeway.services.doctor.bundle import Entry, fitted, stack_of, tail, write_bundle
from leeway.services.layout import RunDirectory, RunState, create_run

CANARY = "canary-7f3a9c21d4"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has logs, and secrets in several places."""
    made = create_run(load(None, [f'directory="{tmp_path}"']))
    made.write_redis_url(f"redis://leeway:{CANARY}@127.0.0.1:9/0")
    (made.root / "api-tokens.json").write_text(json.dumps({"read": CANARY, "control": CANARY}))
    made.log("learner").write_text(f"step 1\nconnecting to redis://leeway:{CANARY}@127.0.0.1:9/0\n")
    made.events.write_text('{"kind": "run", "text": "started"}\n')
    return made


@pytest.fixture
def sleeper(run: RunDirectory) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run, with a function to be found on its stack."""
    code = (
        "import time\ndef waits_for_godot():\n    print('ready', flush=True)\n    time.sleep(300)\n"
        "waits_for_godot()"
    )
    command = [sys.executable, "-c", code, str(run.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    run.write_state(RunState(name="run", started_at=time.time(), pids={"learner": process.pid}))
    yield process
    process.kill()
    process.wait()


def contents(path: str) -> dict[str, str]:
    """Every file of an archive by its name below the archive's own folder."""
    with tarfile.open(path) as tar:
        names = tar.getnames()
        assert len({name.partition("/")[0] for name in names}) == 1
        return {
            name.partition("/")[2]: tar.extractfile(name).read().decode()  # type: ignore[union-attr]
            for name in names
        }


def test_it_holds_logs_configuration_stacks_versions_machine_and_verdict(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    monkeypatch.setattr(bundle, "REDIS_S", 0.2)
    written = write_bundle(run, "no step ended for 9 s")
    files = contents(written.path)
    assert list(files) == written.files
    assert files["verdict.txt"] == "no step ended for 9 s\n"
    assert "step 1" in files["logs/learner.log"]
    assert json.loads(files["events.jsonl"])["text"] == "started"
    stack = files[f"stacks/learner-{sleeper.pid}.txt"]
    # A kernel may let nobody but root look into others.
    assert "waits_for_godot" in stack or "Permission" in stack
    assert "torch" in json.loads(files["versions.json"])
    assert json.loads(files["machine.json"])["cores"] == os.cpu_count()
    assert "error" in json.loads(files["replay.json"])
    assert "groups_per_step" in files["config.toml"]
    listed = files["contents.txt"].splitlines()
    assert len(listed) == len(files)
    assert all(any(f" {name}: " in line for line in listed) for name in files if "cont" not in name)
    assert not [name for name, text in files.items() if CANARY in text]
    assert os.stat(written.path).st_mode & 0o777 == 0o600


def test_of_a_living_redis_it_holds_numbers_and_board(run: RunDirectory):
    async def say(url: str) -> None:
        board = RunBoard(url, run.root.name)
        await board.put("learner", {"step": 7, "password": CANARY})
        await board.close()

    with EmbeddedRedis.start(run.redis) as server:
        run.write_redis_url(server.url)
        asyncio.run(say(server.url))
        files = contents(write_bundle(run).path)
        password = server.url.partition("@")[0].rpartition(":")[2]
    assert json.loads(files["board.json"])["learner"]["step"] == 7
    assert json.loads(files["replay.json"])["stats"]["num_ready"] == 0
    assert not [name for name, text in files.items() if CANARY in text or password in text]
    assert "verdict.txt" not in files


def test_a_file_keeps_its_last_bytes_from_a_whole_line_on(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_text("one\ntwo\nthree\n")
    assert tail(log, 8) == "three\n"
    assert tail(log, 100) == "one\ntwo\nthree\n"
    assert "cannot be read" in tail(tmp_path / "none.log")


def test_what_has_no_room_is_left_out_and_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_BYTES", 10)
    entries = [Entry("a", "first", "12345678"), Entry("b", "second", "123"), Entry("c", "x", "12")]
    first, *kept = fitted(iter(entries), frozenset())
    assert [entry.name for entry in kept] == ["a", "c"]
    assert "left out  b: no room within 10 bytes" in first.text


def test_a_process_that_is_gone_has_no_stack():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert "Error" in stack_of(process.pid)


def test_a_part_that_fails_leaves_its_reason_and_the_others(run: RunDirectory, monkeypatch):
    def refuse() -> dict[str, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(bundle, "REDIS_S", 0.2)
    monkeypatch.setattr(bundle, "versions", refuse)
    files = contents(write_bundle(run).path)
    assert files["surroundings.failed.txt"] == "PermissionError(13, 'Permission denied')\n"
    assert "step 1" in files["logs/learner.log"]


def test_stacks_take_no_longer_than_their_deadline(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    gone = threading.Event()
    monkeypatch.setattr(bundle, "REDIS_S", 0.2)
    monkeypatch.setattr(bundle, "STACKS_S", 0.1)
    monkeypatch.setattr(bundle, "stack_of", lambda pid: str(gone.wait(60)))
    files = contents(write_bundle(run).path)
    gone.set()
    assert "within 0.1 s" in files[f"stacks/learner-{sleeper.pid}.txt"]


def test_those_that_run_json_names_come_before_their_children(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    line = ["python", str(run.root)]
    families = {900: [(900, line), (5, ["ray::x"])], 7: [(7, line), (6, ["torch"])]}
    monkeypatch.setattr(bundle.supervision, "family_of", lambda pid: families[pid])
    monkeypatch.setattr(bundle, "MAX_STACKS", 3)
    run.write_state(RunState(name="run", started_at=0.0, pids={"serve": 900, "learner": 7}))
    assert bundle.processes_of(run) == [(900, "serve"), (7, "learner"), (5, "ray--x")]


def test_a_look_into_a_process_is_no_orphan():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    with pytest.raises(subprocess.TimeoutExpired):
        supervision.run_spared([sys.executable, "-c", code], 1.0)
    seen: list[bool] = []

    def look() -> None:
        deadline = time.monotonic() + 60
        while not any(seen) and time.monotonic() < deadline:
            seen.extend(supervision.is_spared(child) for child in supervision.children(os.getpid()))

    looking = threading.Thread(target=look)
    looking.start()
    supervision.run_spared([sys.executable, "-c", "import time; time.sleep(2)"], 60.0)
    looking.join()
    assert any(seen)
    assert not any(map(supervision.is_spared, supervision.children(os.getpid())))


def test_options_that_change_nothing_of_a_bundle_are_refused(run: RunDirectory):
    done = CliRunner().invoke(app, ["doctor", str(run.root), "--bundle", "--deep"])
    assert done.exit_code == 2 and "--deep" in done.output


def test_a_process_id_that_is_another_s_by_now_is_left_alone(run: RunDirectory):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.write_state(RunState(name="run", started_at=0.0, pids={"learner": stranger.pid}))
        assert bundle.processes_of(run) == []
    finally:
        stranger.kill()
        stranger.wait()


def test_the_command_says_where_it_lies(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "REDIS_S", 0.2)
    done = CliRunner().invoke(app, ["doctor", str(run.root), "--bundle", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert Path(found["path"]).parent == run.root
    assert found["num_bytes"] == Path(found["path"]).stat().st_size


def test_a_bundle_of_no_run_is_refused():
    assert CliRunner().invoke(app, ["doctor", "--bundle"]).exit_code == 2


def test_a_directory_that_takes_no_file_is_named(run: RunDirectory, monkeypatch):
    def refuse(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "REDIS_S", 0.2)
    monkeypatch.setattr(bundle.os, "open", refuse)
    with pytest.raises(ConfigurationError, match=r"evidence-.* cannot be written \(No space left"):
        write_bundle(run)
