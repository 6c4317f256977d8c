"""The command line: light, and every error one line with the right exit code."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from leeway.replay.errors import ConfigurationError, DataError, LeewayError, StoreUnavailable
from leeway.services import cli
from leeway.services.config import load
from leeway.services.layout import create_run


def leeway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the command in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["leeway", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: leeway(monkeypatch, capsys, *arguments)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for the process wiring; `outcome` is returned or raised."""
    seen = types.SimpleNamespace(calls=[], outcome=0)

    def fake(config: Any, run_dir: Any, *, json_output: bool, resume: bool) -> int:
        seen.calls.append((config, run_dir, json_output, resume))
        if isinstance(seen.outcome, BaseException):
            raise seen.outcome
        return seen.outcome

    module = types.ModuleType("leeway.services.processes.train")
    module.__dict__["run"] = fake
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


# --- exit codes ---


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("the key"), 2),
        (DataError("line 3"), 2),
        (StoreUnavailable("no Redis"), 1),
        (LeewayError("it failed"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(run, training, error: LeewayError, code: int):
    training.outcome = error
    assert run("train") == (code, "", f"leeway: {error}\n")


def test_ctrl_c_exits_130(run, training):
    training.outcome = KeyboardInterrupt()
    assert run("train")[0] == 130


def test_the_exit_code_of_the_run_is_the_exit_code(run, training):
    training.outcome = 130
    assert run("train")[0] == 130


def test_an_error_nobody_foresaw_keeps_its_traceback(run, training):
    training.outcome = RuntimeError("bug")
    with pytest.raises(RuntimeError, match="bug"):
        cli.app(["train"], standalone_mode=False)


def test_an_unknown_option_exits_2(run):
    assert run("train", "--nope")[0] == 2


def test_ctrl_c_before_a_command_began_exits_130(run, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    assert run("train")[0] == 130


# --- train ---


def test_train_makes_a_run_directory_and_hands_it_over(run, training, tmp_path: Path):
    run("train", "--set", "name=demo", "--json")
    ((config, run_dir, json_output, resume),) = training.calls
    assert (config.name, json_output, resume) == ("demo", True, False)
    assert run_dir.root.parent == tmp_path / "runs"
    assert run_dir.read_config() == config


def test_resume_goes_on_in_the_same_directory(run, training, tmp_path: Path):
    before = create_run(load(None))
    run("train", "--resume", str(before.root), "--set", "learner.num_steps=9")
    ((config, run_dir, _, resume),) = training.calls
    assert (config.learner.num_steps, run_dir, resume) == (9, before, True)
    assert before.read_config().learner.num_steps == 9


def test_resume_and_a_file_together_are_refused(run, training):
    code, _, err = run("train", "a.toml", "--resume", "runs/x")
    assert code == 2
    assert "not both" in err
    assert not training.calls


def test_bad_input_starts_nothing(run, training, tmp_path: Path):
    code, _, err = run("train", "--set", "learner.num_steps=0")
    assert code == 2
    assert err.count("\n") == 1
    assert not training.calls
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_checks_and_starts_nothing(run, training, tmp_path: Path):
    code, out, _ = run("train", "--dry-run", "--set", "learner.num_steps=9")
    assert code == 0
    assert "num_steps = 9" in out
    assert not training.calls
    assert not (tmp_path / "runs").exists()


def test_notes_go_to_stderr_so_that_json_stays_clean(run, training):
    _, out, err = run("train", "--json", "--set", "replay.max_groups=20")
    assert out == ""
    assert err.startswith("note: ")


# --- the processes one by one ---


@pytest.mark.parametrize("process", ["learn", "serve", "api"])
def test_a_dry_run_of_a_process_asks_redis_and_makes_no_directory(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str
):
    from leeway.replay.server import EmbeddedRedis

    (tmp_path / "a.toml").write_text("seed = 1\n")
    arguments = (process, "a.toml", "--run-dir", "runs/a", "--dry-run", "--json")
    code, _, err = run(*arguments)
    assert code == 2
    assert "LEEWAY_REDIS_URL" in err
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        monkeypatch.setenv("LEEWAY_REDIS_URL", server.url)
        code, out, _ = run(*arguments)
    assert code == 0
    assert json.loads(out)["replay"]["url"].startswith("redis://leeway:***@")
    assert not (tmp_path / "runs").exists()
    assert run(*arguments)[0] == 2  # Redis has gone


# --- config ---


def test_config_show_prints_what_would_be_read_without_secrets(run, tmp_path: Path):
    code, out, _ = run("config", "show", "--set", "replay.url=redis://:secret@h:1/0")
    assert code == 0
    assert "secret" not in out
    (tmp_path / "shown.toml").write_text(out)
    assert run("config", "validate", "shown.toml")[0] == 0


def test_config_show_json_is_json(run):
    assert json.loads(run("config", "show", "--json")[1])["learner"]["num_steps"] == 60


def test_config_validate_says_so(run, tmp_path: Path):
    (tmp_path / "a.toml").write_text("seed = 1\n")
    assert run("config", "validate", "a.toml") == (0, "a.toml is valid\n", "")


def test_config_validate_json_says_what_is_wrong_and_exits_2(run):
    code, out, err = run("config", "validate", "--json", "--set", "learner.num_steps=0")
    verdict = json.loads(out)
    assert code == 2
    assert (verdict["is_valid"], err) == (False, f"leeway: {verdict['error']}\n")


def test_config_validate_json_holds_the_notes(run):
    verdict = json.loads(run("config", "validate", "--json", "--set", "replay.max_groups=20")[1])
    assert verdict["is_valid"] is True
    assert "replay.max_groups = 20 stops at fewer" in verdict["notes"][0]


def test_config_schema_is_one_line_with_json_and_no_page_besides(run):
    assert run("config", "schema", "--json")[1].count("\n") == 1
    assert run("config", "schema", "--json", "--markdown")[0] == 2


def test_config_schema_describes_every_key(run):
    schema = json.loads(run("config", "schema")[1])
    description = schema["$defs"]["LearnerConfig"]["properties"]["num_steps"]["description"]
    assert description.startswith("Steps of the run")
