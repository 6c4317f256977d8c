"""The run directory: unique, private where it must be, and found again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.config import RunConfig, load
from leeway.services.layout import RunDirectory, RunState, create_run, latest_run, open_for_resume
from leeway.services.layout import open_run as open_existing


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load(None, ["name=demo", f"directory={tmp_path}/runs"])


def test_two_runs_of_one_second_have_two_directories(config: RunConfig):
    first, second = (create_run(config, now=1_700_000_000.0) for _ in range(2))
    assert second.root.name == f"{first.root.name}-2"
    assert first.root.name.startswith("demo-2023111")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    bad = load(None, [f"directory={tmp_path}/file/runs"])
    with pytest.raises(ConfigurationError, match="name a folder that can be written"):
        create_run(bad)


def test_the_redis_password_is_in_a_file_of_its_own_for_the_owner_only(config: RunConfig):
    secret = load(None, [f"directory={config.directory}", "replay.url=redis://:secret@h:1/0"])
    run = create_run(secret)
    assert "secret" not in run.config.read_text()
    assert stat.S_IMODE(run.redis_url.stat().st_mode) == 0o600
    assert run.read_config() == secret


def test_a_lost_redis_url_says_how_to_give_it(config: RunConfig):
    run = create_run(load(None, [f"directory={config.directory}", "replay.url=redis://:s@h:1/0"]))
    run.redis_url.unlink()
    with pytest.raises(ConfigurationError, match=r"--set replay\.url="):
        run.read_config()


def test_overrides_apply_to_a_resumed_run(config: RunConfig):
    run = create_run(config)
    assert run.read_config(["learner.num_steps=7"]).learner.num_steps == 7


def test_the_state_reads_back(config: RunConfig):
    run = create_run(config)
    assert run.read_state() is None
    state = RunState(name="demo", started_at=1.0, pids={"train": 1}, api_address="http://h:1")
    run.write_state(state)
    assert run.read_state() == state


def test_a_broken_state_is_named(config: RunConfig):
    run = create_run(config)
    run.state.write_text("{")
    with pytest.raises(ConfigurationError, match=r"run\.json is not the state of a run"):
        run.read_state()


def test_a_run_that_is_still_trained_is_not_resumed(config: RunConfig):
    run = create_run(config)
    # Any living process that has leeway in its command line but is not this one.
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/sh", ["leeway", "-c", "sleep 30; exit"])
    try:
        _wait_for_exec(pid)
        run.write_state(RunState(name="demo", started_at=1.0, pids={"train": pid}))
        with pytest.raises(ConfigurationError, match=f"still being trained by process {pid}"):
            open_for_resume(run.root)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert open_for_resume(run.root) == run


def _wait_for_exec(pid: int) -> None:
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"leeway"):
        os.sched_yield()


def test_a_folder_that_is_no_run_is_named(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"holds no config\.toml"):
        open_existing(tmp_path)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        open_existing(tmp_path / "no")


def test_the_latest_run_is_the_one_started_last(config: RunConfig):
    first, second = create_run(config), create_run(config)
    os.utime(first.config, (1, 1))
    assert latest_run(config.directory) == second


def test_no_run_at_all_is_said(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="there is no run in"):
        latest_run(tmp_path)


def test_every_path_lies_in_the_directory(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert run.log("serve") == tmp_path / "logs" / "serve.log"
    names = [n for n in dir(RunDirectory) if isinstance(getattr(RunDirectory, n), property)]
    assert all(getattr(run, name).parent == tmp_path for name in names)
