"""How the command line explains itself: light help pages, one sentence for a mistake."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from leeway.services import cli
from leeway.services.cli_examples import EXAMPLES
from leeway.services.cli_help import PANELS

HEAVY = (
    "torch", "ray", "vllm", "transformers", "numpy", "matplotlib", "fastapi", "redis", "pydantic",
    "msgspec", "httpx", "rich",
)  # fmt: skip


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(`replay export`, its command) of every command and group; "" is `leeway`."""
    command = command or typer.main.get_command(cli.app)
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


PATHS = [path for path, _ in commands()]
LEAVES = [path for path, command in commands() if not hasattr(command, "commands")]


def help_of(path: str, width: int = 80) -> str:
    done = CliRunner().invoke(
        cli.app, [*path.split(), "--help"], env={"COLUMNS": str(width)}, prog_name="leeway"
    )
    assert done.exit_code == 0
    return done.stdout


# --- light ---


def test_no_help_page_imports_anything_heavy():
    code = (
        "import sys, contextlib, io\nfrom leeway.services import cli\n"
        f"for path in {PATHS}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        cli.app([*path.split(), '--help'], standalone_mode=False)\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("path", ["", *LEAVES])
def test_help_takes_at_most_300_ms_of_processor_time(path: str):
    took: list[float] = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "leeway.services.cli", *path.split(), "--help"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if took[-1] <= 0.3:
            break
    assert min(took) <= 0.3


# --- pages ---


def test_every_command_stands_in_one_panel():
    commands_of_leeway = {path for path in PATHS if path and " " not in path}
    listed = [name for names in PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert commands_of_leeway <= set(listed)
    assert "Commands:" not in help_of("")


@pytest.mark.parametrize("path", PATHS)
def test_every_help_page_fits_80_columns(path: str):
    examples = [f"leeway {example.line}" for example in EXAMPLES.get(path, ())]
    lines = [line for line in help_of(path).splitlines() if line.strip() not in examples]
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("path", PATHS)
def test_every_command_has_an_example_on_its_page(path: str):
    assert EXAMPLES[path]
    assert f"leeway {EXAMPLES[path][0].line}" in help_of(path, 120)


@pytest.mark.parametrize("path", sorted(EXAMPLES))
def test_every_example_is_a_command_line_that_can_be_read(path: str):
    assert path in PATHS
    for example in EXAMPLES[path]:
        assert example.line.startswith(path)
        words = shlex.split(example.line)
        command = typer.main.get_command(cli.app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        command.make_context("leeway", words)


def test_the_page_of_the_command_line_has_an_example_of_every_command():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    leaves = [path for path, c in commands() if path and not hasattr(c, "commands")]
    ours = [path for path in leaves if not path.startswith("bench ")]  # benchmarks.md has those
    assert [
        path
        for path in ours
        if f"\nleeway {path} " not in f"\n{page}"
        and f"`leeway {path} " not in page
        and f"\nleeway {path}\n" not in page
    ] == []


def test_every_command_says_what_it_does_in_one_sentence():
    for path, command in commands():
        first = " ".join((command.help or "").partition("\n\n")[0].split())
        assert first.endswith("."), path
        assert len(first) <= 120, path


def test_an_option_of_one_name_means_one_thing():
    seen: dict[str, set[str]] = {}
    for _, command in commands():
        for param in command.params:
            for name in {"--set", "--url", "--run", "--run-dir"} & set(param.opts):
                seen.setdefault(name, set()).add(param.help)
    assert {name: len(texts) for name, texts in seen.items()} == {
        "--set": 1, "--url": 1, "--run": 1, "--run-dir": 1,
    }  # fmt: skip


def test_json_stands_last_and_is_a_flag_wherever_it_stands():
    for path, command in commands():
        names = [param.opts[0] for param in command.params if param.param_type_name == "option"]
        if "--json" in names and not path.startswith("bench"):
            assert names[-1] == "--json", path


# --- colour ---


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    from leeway.services import cli_help

    monkeypatch.setattr(cli_help.sys.stdout, "isatty", lambda: True)
    return cli_help._bold("Train")


def test_headings_are_bold_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert on_a_terminal(monkeypatch) == "\x1b[1mTrain\x1b[0m"
    assert "\x1b" not in help_of("")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("NO_COLOR", ""), ("TERM", "dumb")])
def test_no_color_and_a_dumb_terminal_are_heeded(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(name, value)
    assert on_a_terminal(monkeypatch) == "Train"


# --- mistakes ---

CONFIG = "leeway config --help"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trian", "leeway has no command trian; did you mean train? See leeway --help"),
        ("config shw", f"leeway config has no command shw; did you mean show? See {CONFIG}"),
        ("config xyz", "leeway config has no command xyz; it has show, validate, schema; see "
         f"{CONFIG}"),
        ("train --dry-rum", "leeway train has no option --dry-rum; did you mean --dry-run? See "
         "leeway train --help"),
        ("--nope", "leeway has no option --nope; see leeway --help"),
        ("export", "missing argument 'RUN_DIR'; see leeway export --help"),
        ("retriever index c --out", "option '--out' requires an argument; see leeway retriever "
         "index --help"),
        ("config show --set learner.num_step=3", "--set learner.num_step=3: learner.num_step is "
         "not a key; did you mean learner.num_steps?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_exit_code_2(line: str, sentence: str):
    command = [sys.executable, "-m", "leeway.services.cli", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"leeway: {sentence}\n")


def test_a_group_without_a_command_shows_its_page_and_exits_2():
    done = subprocess.run(
        [sys.executable, "-m", "leeway.services.cli", "replay"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: leeway replay [OPTIONS] COMMAND ...")


def test_the_version_is_the_distribution_s():
    from importlib.metadata import version

    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"leeway {version('leeway-rl')}\n"


def test_a_reader_that_closes_the_pipe_is_no_error():
    line = f"{shlex.quote(sys.executable)} -m leeway.services.cli config schema | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=os.environ)
    assert (done.stdout, done.stderr) == ("{\n", "")


# --- --json ---


def test_every_command_knows_json():
    leaves = [(path, c) for path, c in commands() if path and not hasattr(c, "commands")]
    without = [p for p, c in leaves if not any("--json" in param.opts for param in c.params)]
    assert without == []


@pytest.mark.parametrize(
    "line",
    [
        "config show --json",
        "config validate --json",
        "config schema --json",
        "train --dry-run --json",
    ],
)
def test_the_last_line_is_one_json_document(line: str):
    done = CliRunner().invoke(cli.app, line.split())
    assert done.exit_code == 0
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stdout.count("\n") == 1
