"""Bad input through the command line: one sentence, exit code 2, nothing made or started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ONE_STEP_IN_FLIGHT = ["replay.max_staleness=0", "rollout.max_groups_in_flight=3"]
QUESTION = {"id": "x1", "question": "Where?", "golden_answers": ["north"]}


@pytest.fixture
def folder(tiny: Callable[[], Path]) -> Path:
    return tiny()


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine that is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refusal(leeway, folder: Path, *settings: str) -> str:
    """The sentence that `leeway train tiny.toml --set ...` ends with."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    with leeway(folder, "train", "tiny.toml", "--json", *overrides) as command:
        ended = command.end(60)
    assert (ended.code, ended.out, ended.left) == (2, "", []), ended.err
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("leeway: ")
    assert not (folder / "runs").exists()
    return ended.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["learner.num_step=3"], ["learner.num_step ", "did you mean learner.num_steps?"]),
        (["learner.num_steps=many"], ["learner.num_steps", "a whole number of at least 1"]),
        (["replay.groups_per_step=2000"], ["max_groups = 1024", "groups_per_step = 2000"]),
        (ONE_STEP_IN_FLIGHT, ["tiny.toml", "replay.max_staleness = 0", "to at most 2"]),
        (["model=nowhere"], ["tiny.toml", 'model = "nowhere" does not exist', '"bundled"']),
        (["search.corpus=no.jsonl"], ["tiny.toml", 'search.corpus = "no.jsonl"', "JSON-lines"]),
        (["data.train=no.jsonl"], ["tiny.toml", 'data.train = "no.jsonl"', "golden_answers"]),
        (["replay.url=redis://127.0.0.1:9/0"], ["tiny.toml: replay.url", "127.0.0.1:9"]),
    ],
)
def test_a_setting_that_cannot_work_is_refused(leeway, folder: Path, settings, words):
    sentence = refusal(leeway, folder, *settings)
    assert all(word in sentence for word in words), sentence


def test_an_unknown_key_of_the_file_is_named_with_the_file(leeway, folder: Path):
    (folder / "tiny.toml").write_text("[learner]\nnum_step = 3\n")
    assert refusal(leeway, folder) == (
        "leeway: tiny.toml: learner.num_step is not a key; did you mean learner.num_steps?\n"
    )


def test_a_port_in_use_is_refused(leeway, folder: Path, port: int):
    sentence = refusal(leeway, folder, f"api.port={port}")
    assert f"tiny.toml: api.port = {port} cannot be used on 127.0.0.1" in sentence


def test_a_model_folder_without_tokenizer_is_refused(leeway, folder: Path):
    for path in (folder / "model").glob("tokenizer*"):
        path.unlink()
    assert "holds no tokenizer (tokenizer.json); give a" in refusal(leeway, folder)


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("train.jsonl", json.dumps({**QUESTION, "golden_answers": []}), "no golden answer"),
        ("held_out.jsonl", json.dumps({"id": "x", "question": "Where?"}), "no golden answer"),
        ("train.jsonl", "Where?", "it must be"),
        ("corpus.jsonl", "Place 1 lies in the north.", "it must be"),
        ("corpus.jsonl", '{"id": 3, "contents": "again"}', "was used on line 4"),
    ],
)
def test_a_bad_line_is_named(leeway, folder: Path, file: str, line: str, words: str):
    path = folder / file
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as lines:
        lines.write(f"{line}\n")
    sentence = refusal(leeway, folder)
    assert sentence.startswith(f"leeway: {path}, line {number}")
    assert words in sentence


def test_a_question_that_is_trained_and_held_out_is_refused(leeway, folder: Path):
    with (folder / "held_out.jsonl").open("a") as lines:
        lines.write(json.dumps({**QUESTION, "question": "Where does PLACE 7 lie?"}) + "\n")
    sentence = refusal(leeway, folder)
    assert "held-out question 'x1' has the text of training question 'q7'" in sentence


def test_config_validate_reads_the_files_too(leeway, folder: Path):
    with leeway(folder, "config", "validate", "tiny.toml") as command:
        assert command.end(60).code == 0
    (folder / "corpus.jsonl").write_text("no JSON\n")
    with leeway(folder, "config", "validate", "tiny.toml") as command:
        ended = command.end(60)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"{folder / 'corpus.jsonl'}, line 1" in ended.err
