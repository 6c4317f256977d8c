"""`--dry-run`: everything is checked, what would be done is said, and nothing changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from leeway.replay.errors import ConfigurationError
from leeway.replay.server import EmbeddedRedis
from leeway.services import cli, dry_run

TORCH = '[policy]\nbackend = "torch"\nmax_model_len = 512\n[rollout]\ngroup_size = 4\n'
Said = Callable[..., tuple[int, str, str]]


def everything_in(folder: Path) -> dict[str, int]:
    """Files and folders, with when they were changed."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture
def leeway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Said:
    """Runs the command in a folder that must stay as it is: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        before = everything_in(tmp_path)
        monkeypatch.setattr(sys, "argv", ["leeway", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert everything_in(tmp_path) == before
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def plan(leeway: Said, *arguments: str) -> dict[str, Any]:
    """What `--json` says: one line."""
    code, out, err = leeway(*arguments, "--dry-run", "--json")
    assert code == 0, err
    [line] = out.splitlines()
    found = json.loads(line)
    assert found.pop("dry_run") is True
    return found


def test_a_rollout_says_how_much_it_would_play(leeway: Said, tmp_path: Path):
    (tmp_path / "t.toml").write_text(TORCH)
    found = plan(leeway, "rollout", "t.toml", "--num-groups", "64", "--out", "g.leeway")
    assert found["does"] == "play 64 groups of 4 with the torch policy"
    assert [place["what"] for place in found["reads"]] == ["policy", "passages", "questions"]
    assert all(place["num_bytes"] > 1000 for place in found["reads"])
    assert found["writes"] == [{"what": "archive", "where": "g.leeway", "num_bytes": None}]
    # 64 groups of 4 of at most 512 tokens.
    assert found["facts"]["trajectories"] == 256
    assert found["facts"]["tokens at most"] == 131_072


@pytest.mark.parametrize(
    ("out", "words"),
    [("there.leeway", "exists"), ("nowhere/g.leeway", "nowhere is no folder; make it")],
)
def test_a_rollout_that_could_not_be_written_is_refused(
    leeway: Said, tmp_path: Path, out: str, words: str
):
    (tmp_path / "t.toml").write_text(TORCH)
    (tmp_path / "there.leeway").write_text("")
    for more in ((), ("--dry-run",)):
        code, said, err = leeway("rollout", "t.toml", "--num-groups", "1", "--out", out, *more)
        assert (code, said) == (2, "")
        assert words in err


def test_the_plan_of_an_api_has_its_address_and_needs_no_file_of_the_run(
    leeway: Said,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "t.toml").write_text('[search]\ncorpus = "nowhere.jsonl"\n')
    options = ("--run-dir", "demo", "--host", "0.0.0.0", "--port", "8123", "--dry-run", "--json")
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as redis:
        monkeypatch.setenv("LEEWAY_REDIS_URL", redis.url)
        code, out, err = leeway("api", "t.toml", *options)
    assert code == 0, err
    assert json.loads(out)["api"] | {"host": "0.0.0.0", "port": 8123} == json.loads(out)["api"]


@pytest.mark.parametrize("command", ["learn", "serve", "api"])
@pytest.mark.parametrize(
    ("run_dir", "words"), [("file/demo", "cannot be written"), ("a b", "must be 1 to 100 letters")]
)
def test_a_run_directory_that_cannot_be_is_refused_by_a_plan_too(
    leeway: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, run_dir: str,
    words: str,
):  # fmt: skip
    monkeypatch.setenv("LEEWAY_REDIS_URL", f"unix://{tmp_path}/none.sock")
    (tmp_path / "t.toml").write_text(TORCH)
    (tmp_path / "file").write_text("")
    code, out, err = leeway(command, "t.toml", "--run-dir", run_dir, "--dry-run")
    assert (code, out) == (2, "")
    assert words in err


def test_an_evaluation_says_what_is_left_to_play(leeway: Said):
    options = ("--data", "samples", "--benchmarks", "nq,popqa", "--num-questions", "3")
    found = plan(leeway, "eval", *options, "--backend", "torch", "--samples", "2")
    assert found["does"] == "play 6 questions of 2 benchmarks, sample, with the torch policy"
    assert found["facts"]["episodes"] == 12
    assert found["facts"]["questions of nq"] == 3


def test_an_index_reads_the_corpus_through(leeway: Said, tmp_path: Path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        '{"id": 1, "contents": "\\"A\\"\\nbc"}\n{"id": 2, "contents": "\\"D\\"\\ne"}\n'
    )
    found = plan(leeway, "retriever", "index", "c.jsonl", "--out", "i")
    assert found["does"] == "index 2 passages as bm25"
    assert found["facts"] == {"characters": 5}
    with corpus.open("a") as file:
        file.write('{"id": 1, "contents": "\\"A\\"\\nagain"}\n')
    code, _, err = leeway("retriever", "index", "c.jsonl", "--out", "i", "--dry-run")
    assert code == 2 and "id '1' was used on line 1" in err


def test_a_retriever_says_where_it_would_listen(leeway: Said, tmp_path: Path):
    (tmp_path / "c.jsonl").write_text('{"id": 1, "contents": "\\"A\\"\\nbc"}\n')
    found = plan(leeway, "retriever", "serve", "c.jsonl", "--port", "0")
    assert found["does"] == "serve 1 passages, bm25"
    assert found["writes"][0]["where"] == "http://127.0.0.1:0/retrieve"
    code, _, err = leeway("retriever", "serve", "c.jsonl", "--host", "nowhere.invalid", "--dry-run")
    assert code == 2 and '--host = "nowhere.invalid" is not an address' in err


def test_a_warm_start_says_what_it_would_train(leeway: Said):
    found = plan(leeway, "warmstart", "--out", "w", "--steps", "3", "--batch", "10")
    assert found["does"] == "train 3 steps of 10 scripted episodes"
    assert found["facts"] == {"episodes": 30}
    for words, error in (
        (("--eval", "5"), "--out w is no model folder"),
        (("--steps", "1", "--init", "w"), "--init w is no model folder"),
        ((), "nothing is asked for"),
    ):
        code, _, err = leeway("warmstart", "--out", "w", *words, "--dry-run")
        assert code == 2 and error in err


def test_a_sweep_says_where_its_arms_would_be_kept(leeway: Said, tmp_path: Path):
    (tmp_path / "t.toml").write_text(TORCH)
    (tmp_path / "s.toml").write_text(
        'name = "s"\nbase = "t.toml"\n[[grid]]\nobjective = ["grpo"]\nstaleness = [2, 4]\n'
    )
    code, out, _ = leeway("sweep", "s.toml", "--out", "o", "--num-gpus", "0.5", "--dry-run")
    assert code == 0
    assert out.splitlines()[-1] == (
        "each with 1 cores and 0.5 GPUs, by ray; kept in o, where 0 have ended"
    )
    found = plan(leeway, "sweep", "s.toml", "--out", "o")
    assert (found["folder"], found["num_ended"], len(found["arms"])) == ("o", 0, 2)


LOOKS = {
    "status", "doctor", "config show", "config validate", "config schema", "replay inspect",
    "trajectories show", "sweep report", "sweep compare",
}  # fmt: skip
"""Commands that only look, or make again what they were asked for."""
MEASURES = {"bench", "soak"}
"""Their input is themselves: there is nothing to check before."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """(`replay export`, its options) of every command."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), {name for p in command.params for name in p.opts}
        return
    for name, one in inner.items():
        yield from leaves(one, (*path, name))


def test_every_command_has_json_and_every_one_that_works_has_a_dry_run():
    found = dict(leaves(typer.main.get_command(cli.app)))
    assert found.keys() >= LOOKS
    assert {path for path, options in found.items() if "--json" not in options} == set()
    working = {path for path in found if path.split()[0] not in MEASURES} - LOOKS
    assert {path for path in working if "--dry-run" not in found[path]} == set()


def test_words_name_places_and_sizes(capsys: pytest.CaptureFixture[str]):
    place = dry_run.Place(what="policy", where="m", num_bytes=1536)
    out = dry_run.Place(what="archive", where="a")
    facts = {"trajectories": 1234, "Redis": "none"}
    dry_run.tell(dry_run.Plan(does="play", reads=[place], writes=[out], facts=facts), False)
    assert capsys.readouterr().out.splitlines() == [
        "would play",
        "  reads   policy: m, 1.5 KiB",
        "  writes  archive: a",
        "  trajectories: 1,234",
        "  Redis: none",
        "nothing was changed",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB")],
)
def test_sizes_are_written_as_people_read_them(num_bytes: int, text: str):
    assert dry_run.size_of(num_bytes) == text


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    dry_run.check_writable(tmp_path / "new" / "deeper" / "x", "--out")
    with pytest.raises(ConfigurationError, match=r"--out .*file/x cannot be written"):
        dry_run.check_writable(tmp_path / "file" / "x", "--out")
    with pytest.raises(ConfigurationError, match="and its disk has"):
        dry_run.check_room(tmp_path / "x", 2**60)
