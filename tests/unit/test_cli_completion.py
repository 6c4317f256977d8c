"""What the shell offers: run directories, configuration files, keys; also as bash asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leeway.services.completion import configuration_files, override_keys, run_directories


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(root: Path, age_s: float) -> None:
    root.mkdir(parents=True)
    (root / "config.toml").touch()
    os.utime(root / "config.toml", (1e9 - age_s, 1e9 - age_s))


def test_run_directories_are_offered_the_newest_first(here: Path):
    make_run(here / "runs" / "old", 100)
    make_run(here / "runs" / "new", 1)
    (here / "runs" / "no-run").mkdir()
    assert run_directories("") == ["runs/new", "runs/old"]
    assert run_directories("runs/o") == ["runs/old"]


def test_runs_elsewhere_are_found_where_the_typed_path_leads(here: Path):
    make_run(here / "elsewhere" / "a", 1)
    assert run_directories("elsewhere/") == ["elsewhere/a"]
    assert run_directories(f"{here}/elsewhere/") == [f"{here}/elsewhere/a"]
    assert run_directories("nowhere/") == []


def test_configuration_files_are_those_here_and_in_deploy_configs(here: Path):
    (here / "deploy" / "configs").mkdir(parents=True)
    for name in ("a.toml", "b.txt", "deploy/configs/demo.toml"):
        (here / name).touch()
    assert configuration_files("") == ["a.toml", "deploy/configs/demo.toml"]
    assert configuration_files("deploy/configs/d") == ["deploy/configs/demo.toml"]


def test_keys_are_offered_with_their_meaning():
    found = dict(override_keys("learner.num_s"))
    assert list(found) == ["learner.num_steps="]
    assert found["learner.num_steps="].startswith("Steps of the run")


def test_behind_the_equals_sign_a_choice_offers_its_values():
    assert [value for value, _ in override_keys("policy.backend=")] == [
        "policy.backend=vllm", "policy.backend=torch",
    ]  # fmt: skip
    assert override_keys("learner.num_steps=") == []
    assert override_keys("nothing.of_that_name=") == []


def offered(words: str, folder: Path) -> tuple[list[str], str]:
    """What bash is answered, and which heavy modules that took."""
    code = (
        "import sys\nfrom leeway.services import cli\nsys.argv = ['leeway']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'redis', 'rich', 'httpx')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    protocol = {
        "_LEEWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | protocol,
    )
    return done.stdout.split(), done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("leeway st", ["status"]),
        ("leeway status ", ["runs/a"]),
        ("leeway train --res", ["--resume"]),
        ("leeway train ", ["a.toml"]),
        ("leeway train --set replay.max_st", ["replay.max_staleness="]),
        ("leeway replay ", ["inspect", "export", "import"]),
        ("leeway bench rollout --backend ", ["auto", "vllm", "torch"]),
    ],
)
def test_bash_is_answered_without_anything_heavy(here: Path, words: str, answer: list[str]):
    make_run(here / "runs" / "a", 1)
    (here / "a.toml").touch()
    assert offered(words, here) == (answer, "[]")


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_completion_is_an_option_of_leeway_itself(option: str):
    done = subprocess.run(
        [sys.executable, "-m", "leeway.services.cli", "--help"], capture_output=True, text=True
    )
    assert option in done.stdout
