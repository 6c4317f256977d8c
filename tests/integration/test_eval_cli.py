"""`leeway eval` as a person runs it: all eight benchmarks, stopped and gone on with, refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from leeway.services import cli
from leeway.services.evaluation.benchmarks import SPLITS

if TYPE_CHECKING:
    from tests.conftest import Command

Run = Callable[..., tuple[int, str, str]]
SAMPLES = ("--data", "samples", "--backend", "torch")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`leeway ARGUMENTS...` in this process and a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leeway", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def test_the_bundled_policy_plays_all_eight_and_can_be_read_turn_by_turn(run: Run, tmp_path: Path):
    out = tmp_path / "out"
    code, stdout, err = run("eval", *SAMPLES, "--num-questions", "3", "--out", out, "--json")
    assert code == 0, err
    results = json.loads(stdout)  # nothing else is on stdout
    assert results == json.loads((out / "results.json").read_text())
    assert list(results["benchmarks"]) == list(SPLITS)
    for name, found in results["benchmarks"].items():
        assert (found["num_questions"], found["num_errors"]) == (3, 0)
        assert sum(found["stop_reasons"].values()) == 3
        expected = {"accuracy"} if name == "medqa" else {"exact_match", "f1", "substring"}
        assert set(found["scores"]) == expected
        assert all(0 <= s["low"] <= s["mean"] <= s["high"] <= 1 for s in found["scores"].values())
    assert results["average"]["is_complete"]
    # It was trained to answer one-hop questions, so an evaluation that reads it wrongly shows.
    assert results["benchmarks"]["triviaqa"]["scores"]["exact_match"]["mean"] >= 2 / 3
    assert results["benchmarks"]["nq"]["means"]["num_searches"] >= 1

    code, shown, err = run("trajectories", "show", out, "--benchmark", "triviaqa", "--limit", "9")
    assert code == 0, err
    assert shown.count("turn 1: search") == 3 and "<information>" in shown
    assert "failures.html" in {path.name for path in out.iterdir()}
    page = (out / "failures.html").read_text()
    num_wrong = sum(
        line["samples"][0]["scores"].get(
            "accuracy", line["samples"][0]["scores"].get("exact_match")
        )
        == 0
        for line in lines(out)
    )
    assert page.count('"trajectory_id"') == num_wrong > 0


def test_samples_are_played_at_temperature_1_and_give_pass_at_k(run: Run, tmp_path: Path):
    arguments = (*SAMPLES, "--benchmarks", "nq", "--num-questions", "4", "--out", tmp_path / "out")
    code, stdout, err = run("eval", *arguments, "--samples", "3", "--pass-k", "1,3", "--json")
    assert code == 0, err
    scores = json.loads(stdout)["benchmarks"]["nq"]["scores"]
    assert list(scores) == ["exact_match", "f1", "substring", "pass@1", "pass@3"]
    assert scores["pass@1"]["mean"] == pytest.approx(scores["exact_match"]["mean"])
    assert scores["pass@3"]["mean"] >= scores["pass@1"]["mean"]
    assert [len(line["samples"]) for line in lines(tmp_path / "out")] == [3, 3, 3, 3]
    texts = {line["group"] for line in lines(tmp_path / "out")}
    assert len(texts) == 4


def test_a_finished_evaluation_is_told_again_and_not_played_again(run: Run, tmp_path: Path):
    arguments = ("eval", *SAMPLES, "--benchmarks", "nq", "--num-questions", "2")
    code, first, err = run(*arguments)
    assert code == 0, err
    [out] = [path for path in (tmp_path / "evals").iterdir() if path.name != "samples"]
    played = (out / "episodes.jsonl").read_bytes()
    code, again, err = run(*arguments)  # without --out: the settings name the folder
    assert code == 0 and again == first
    assert "2 questions were played before" in err
    assert (out / "episodes.jsonl").read_bytes() == played


def test_a_table_names_every_benchmark_and_where_the_files_are(run: Run, tmp_path: Path):
    code, out, err = run("eval", *SAMPLES, "--benchmarks", "nq,medqa", "--num-questions", "1")
    assert code == 0, err
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert rows[:4] == ["benchmark", "nq", "medqa", "average of 1 of the seven"]
    assert rows[6:9] == ["benchmark", "nq", "medqa"]
    assert "results.json" in out and "failures.html" in out


# --- stopped ---


def test_killed_it_goes_on_where_it_was(leeway: type[Command], tiny: Callable[[], Path]):
    folder = tiny()
    arguments = ("eval", "tiny.toml", "--data", "samples", "--corpus", "corpus.jsonl")
    with leeway(folder, *arguments, "--out", "out", "--set", "policy.max_num_seqs=1") as command:
        journal = folder / "out" / "episodes.jsonl"
        command.until(lambda: journal.is_file() and journal.read_bytes().count(b"\n") >= 3, 90)
        command.process.kill()
        command.end(30)
    with journal.open("ab") as file:
        file.write(b'{"benchmark": "nq", "quest')  # as if the kill had torn a line
    num_before = journal.read_bytes().count(b"\n")
    with leeway(folder, *arguments, "--out", "out", "--json") as command:
        ended = command.end(110)
    assert ended.code == 0, ended.err
    assert f"{num_before} questions were played before" in ended.err
    played = [(line["benchmark"], line["question"]["id"]) for line in lines(folder / "out")]
    assert len(played) == len(set(played)) == 8 * 12
    found = json.loads(ended.out)["benchmarks"]
    assert [one["num_questions"] for one in found.values()] == [12] * 8
    assert ended.left == []


def test_too_many_failures_end_it_with_1_and_what_was_played_is_kept(run: Run, tmp_path: Path):
    arguments = ("eval", *SAMPLES, "--benchmarks", "nq", "--num-questions", "4", "--attempts", "2")
    down = ("--retriever", "http://127.0.0.1:9", "--set", "search.retriever_timeout_s=0.2")
    code, out, err = run(*arguments, *down, "--out", "out")
    assert code == 1 and out == ""
    last = err.splitlines()[-1]
    assert "of 4 questions could not be played (retriever" in last
    assert "--max-error-share 0.05" in last and "127.0.0.1:9/retrieve" in last
    assert not (tmp_path / "out" / "results.json").exists()

    code, out, err = run(*arguments, *down, "--out", "out", "--max-error-share", "1")
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["nq"]
    num = found["num_errors"]
    # Who answers without a search needs no retriever.
    assert 2 <= num <= 4 and found["errors"] == {"retriever": num}
    assert f"nq: {num} not played (retriever {num}), counted as wrong" in out
    assert found["num_questions"] == 4 and found["scores"]["exact_match"]["mean"] <= 1 - num / 4
    code, shown, _ = run("trajectories", "show", "out")
    assert code == 0 and shown.count("not played: http://127.0.0.1:9/retrieve") == num


# --- refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to play with --data"),
        (["--data", "no-such-folder"], "does not exist"),
        (["--data", "samples", "--benchmarks", "nq,mine"], "has no mine/test or dev"),
        (["--data", "samples", "--benchmarks", ","], "names none"),
        (["--data", "samples", "--pass-k", "1"], "add --samples N"),
        (["--data", "samples", "--samples", "2", "--pass-k", "4"], "between 1 and --samples 2"),
        (["--data", "samples", "--samples", "2", "--pass-k", "x"], "no list of numbers"),
        (["--data", "samples", "--corpus", "a", "--index", "b"], "both say what is searched"),
        (["--data", "samples", "--model", "no-such-model"], "no-such-model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(run: Run, arguments: list[str], message: str):
    code, out, err = run("eval", *arguments)
    said = [line for line in err.splitlines() if line.startswith("leeway: ")]
    assert (code, out) == (2, "")
    assert len(said) == 1 and message in said[0]


def test_other_settings_in_the_same_folder_are_refused(run: Run):
    arguments = ("eval", *SAMPLES, "--benchmarks", "nq", "--num-questions", "1", "--out", "out")
    assert run(*arguments)[0] == 0
    code, _, err = run(*arguments, "--set", "search.top_k=1")
    assert code == 2
    assert "other settings: environment.search.top_k was 2 and is 1; name another folder" in err
