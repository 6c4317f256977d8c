"""What `leeway eval` reads and keeps: benchmarks, settings, the journal of finished questions."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from leeway.actors.environment import Question
from leeway.replay.errors import ConfigurationError, DataError
from leeway.replay.schema import Group, GroupId, Trajectory, Turn
from leeway.services.config import load
from leeway.services.evaluation.benchmarks import AVERAGED, SPLITS, load_benchmarks
from leeway.services.evaluation.journal import Entry, Journal, entry_of, read_entries, read_last
from leeway.services.evaluation.samples import NUM_QUESTIONS, write_samples
from leeway.services.evaluation.settings import (
    Settings,
    _flat,
    check_or_write,
    checksum_of,
    folder_name,
    settings_of,
)

# --- benchmarks ---


def write_questions(path: Path, num: int = 3, word: str = "Which") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"id": f"q{i}", "question": f"{word} {i}?", "golden_answers": [str(i)]})
        for i in range(num)
    ]
    text = "\n".join(lines) + "\n"
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return path


def test_the_samples_are_all_eight_in_the_order_of_the_field(tmp_path: Path):
    write_samples(tmp_path)
    found = load_benchmarks(tmp_path, None, None, seed=0)
    assert [benchmark.name for benchmark in found] == list(SPLITS)
    assert {benchmark.num_in_file for benchmark in found} == {NUM_QUESTIONS}
    by_name = {benchmark.name: benchmark.questions for benchmark in found}
    assert all(len(question.choices) == 4 for question in by_name["medqa"])
    assert len({question.golden_answers for question in by_name["medqa"]}) == 4  # A to D
    assert by_name["popqa"][0].prompt and not by_name["nq"][0].prompt


def test_samples_are_the_same_every_time(tmp_path: Path):
    for name in ("a", "b"):
        write_samples(tmp_path / name)
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*")]
    assert len(files) == 8
    assert all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files
    )


def test_the_seven_of_the_average_leave_out_the_multiple_choice():
    assert AVERAGED == (
        "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
    )  # fmt: skip


def test_only_what_is_there_is_played(tmp_path: Path):
    write_questions(tmp_path / "musique" / "dev.jsonl.xz")
    write_questions(tmp_path / "nq" / "test.jsonl")
    write_questions(tmp_path / "nq" / "dev.jsonl", 9)  # not the split of the field
    write_questions(tmp_path / "mine" / "test.jsonl")  # not one of the eight
    found = load_benchmarks(tmp_path, None, None, seed=0)
    assert [(b.name, b.file.name, b.num_in_file) for b in found] == [
        ("nq", "test.jsonl", 3),
        ("musique", "dev.jsonl.xz", 3),
    ]


def test_a_set_of_ones_own_is_played_by_its_name(tmp_path: Path):
    write_questions(tmp_path / "mine" / "dev.jsonl")
    [found] = load_benchmarks(tmp_path, ["mine"], None, seed=0)
    assert (found.name, found.file.name) == ("mine", "dev.jsonl")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nq", "popqa"], "has no popqa/test"),
        (["hotpotqa"], "has no hotpotqa/dev"),
        (["mine"], "has no mine/test or dev"),
    ],
)
def test_a_missing_benchmark_is_named_with_its_split(
    tmp_path: Path, names: list[str], message: str
):
    write_questions(tmp_path / "nq" / "test.jsonl")
    with pytest.raises(ConfigurationError, match=message):
        load_benchmarks(tmp_path, names, None, seed=0)


def test_a_folder_without_any_says_the_layout(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"nq/test\.jsonl, .* medqa/test\.jsonl"):
        load_benchmarks(tmp_path, None, None, seed=0)
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_benchmarks(tmp_path / "no", None, None, seed=0)


def test_two_files_of_one_split_are_refused(tmp_path: Path):
    write_questions(tmp_path / "nq" / "test.jsonl")
    write_questions(tmp_path / "nq" / "test.jsonl.xz")
    with pytest.raises(ConfigurationError, match=r"both test\.jsonl and test\.jsonl\.xz"):
        load_benchmarks(tmp_path, None, None, seed=0)


def test_one_file_of_all_is_told_apart_by_its_sources(tmp_path: Path):
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{source} {i}?"}],
            "question": f"{source} {i}?",
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}},
            "extra_info": {"index": i, "split": "test"},
        }
        for source in ("musique", "nq", "mine")
        for i in range(2)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    found = load_benchmarks(tmp_path / "test.parquet", None, None, seed=0)
    assert [(b.name, len(b.questions)) for b in found] == [("nq", 2), ("musique", 2), ("mine", 2)]
    [one] = load_benchmarks(tmp_path / "test.parquet", ["musique"], None, seed=0)
    assert [question.question for question in one.questions] == ["musique 0?", "musique 1?"]
    with pytest.raises(ConfigurationError, match="no question of popqa, but of nq, musique, mine"):
        load_benchmarks(tmp_path / "test.parquet", ["popqa"], None, seed=0)


def test_a_sample_is_decided_by_seed_and_name_alone(tmp_path: Path):
    for name in ("nq", "popqa"):
        write_questions(tmp_path / name / "test.jsonl", 50)

    def ids(seed: int, names: list[str] | None = None) -> list[list[str]]:
        found = load_benchmarks(tmp_path, names, 5, seed)
        return [[question.id for question in benchmark.questions] for benchmark in found]

    [nq, popqa] = ids(0)
    assert ids(0, ["popqa"]) == [popqa] and nq != popqa and ids(1)[0] != nq
    assert nq == sorted(nq, key=lambda name: int(name[1:]))  # in the order of the file
    assert len(load_benchmarks(tmp_path, ["nq"], 500, 0)[0].questions) == 50


# --- settings ---


def settings(tmp_path: Path, *overrides: str, num: int = 3, samples: int | None = None) -> Settings:
    write_questions(tmp_path / "data" / "nq" / "test.jsonl", num)
    benchmarks = load_benchmarks(tmp_path / "data", None, None, seed=0)
    return settings_of(load(None, list(overrides)), benchmarks, samples)


def test_the_same_settings_go_on_and_others_are_refused_by_name(tmp_path: Path):
    folder = tmp_path / "out"
    first = settings(tmp_path)
    assert not check_or_write(folder, first)
    assert check_or_write(folder, settings(tmp_path))
    for other, message in [
        (settings(tmp_path, "search.top_k=3"), "environment.search.top_k was 2 and is 3"),
        (settings(tmp_path, samples=4), "decoding was 'greedy' and is 'sample'"),
        (settings(tmp_path, "policy.backend=torch"), "backend was 'vllm' and is 'torch'"),
        (settings(tmp_path, num=4), "benchmarks.nq.num_questions was 3 and is 4"),
        (
            settings(tmp_path, "search.retriever_url=http://localhost:1"),
            "and is to search http://localhost:1",
        ),
    ]:
        with pytest.raises(ConfigurationError, match="with other settings") as refused:
            check_or_write(folder, other)
        assert message in str(refused.value) and "--out" in str(refused.value)
        assert folder_name(other) != folder_name(first)


def test_what_changes_no_number_changes_no_setting(tmp_path: Path):
    first = settings(tmp_path)
    again = settings(
        tmp_path, "search.retriever_timeout_s=5", "policy.max_num_seqs=3", "learner.num_steps=7"
    )
    assert again == first and folder_name(again) == folder_name(first)


def test_a_copy_elsewhere_is_the_same_and_an_edited_question_is_not(tmp_path: Path):
    here = settings(tmp_path / "here")
    assert folder_name(settings(tmp_path / "there")) == folder_name(here)
    assert not check_or_write(tmp_path / "out", here)
    assert check_or_write(tmp_path / "out", settings(tmp_path / "there"))
    write_questions(tmp_path / "edited" / "nq" / "test.jsonl", word="What")
    edited = settings_of(load(None), load_benchmarks(tmp_path / "edited", None, None, 0), None)
    with pytest.raises(ConfigurationError, match=r"benchmarks\.nq\.checksum was"):
        check_or_write(tmp_path / "out", edited)


def test_trained_weights_of_the_same_size_are_another_model(tmp_path: Path):
    rng = np.random.default_rng(0)
    file = tmp_path / "model.safetensors"
    file.write_bytes(rng.bytes(20_000_000))
    before = checksum_of(tmp_path)
    os.utime(file, (1, 1))
    assert checksum_of(tmp_path) == before
    file.write_bytes(rng.bytes(20_000_000))
    assert checksum_of(tmp_path) != before


def test_settings_that_are_none_are_refused(tmp_path: Path):
    (tmp_path / "settings.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="not the settings of an evaluation"):
        check_or_write(tmp_path, settings(tmp_path))


# --- the journal ---


def played(question_id: str, exact_match: float = 1.0) -> Entry:
    trajectory = Trajectory(
        trajectory_id=f"nq-{question_id}-0",
        token_ids=np.asarray([1, 2, 3], np.int32),
        turns=(Turn(1, 2, 0, "answer"),),
        logprobs=np.asarray([-1.0, -0.5], np.float32),
        versions=np.asarray([0, 0], np.int32),
        reward=exact_match,
        stop_reason="answer",
        scores={},
        duration_s=0.25,
    )
    group = Group(
        group_id=GroupId(f"nq-{question_id}"),
        question_id=question_id,
        worker_id="eval",
        trajectories=(trajectory,),
    )
    return entry_of("nq", question(question_id), group, [{"exact_match": exact_match}])


def question(question_id: str) -> Question:
    return Question(id=question_id, question="Which?", golden_answers=("a",))


def failed(question_id: str) -> Entry:
    return Entry(benchmark="nq", question=question(question_id), reason="engine", error="it died")


def test_what_is_appended_is_read_back_token_by_token(tmp_path: Path):
    path = tmp_path / "episodes.jsonl"
    with Journal(path) as journal:
        journal.append(played("a"))
        journal.append(failed("b"))
        # Before the journal is closed: a process that is killed here loses nothing.
        first, second = read_entries(path)
    group = first.trajectories()
    assert group is not None and group.trajectories[0].token_ids.tolist() == [1, 2, 3]
    assert first.samples[0].scores == {"exact_match": 1.0}
    assert second.trajectories() is None and second.error == "it died"


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path, cut: int):
    path = tmp_path / "episodes.jsonl"
    with Journal(path) as journal:
        for name in ("a", "b"):
            journal.append(played(name))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [entry.question.id for entry in read_entries(path)] == ["a"]
    with Journal(path) as journal:
        journal.append(played("c"))
    assert [entry.question.id for entry in read_entries(path)] == ["a", "c"]


def test_a_torn_first_line_leaves_an_empty_journal(tmp_path: Path):
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(b'{"benchmark": "nq", "ques')
    with Journal(path):
        pass
    assert path.read_bytes() == b""


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(msgspec.json.encode(played("a")) + b'\n{"benchmark": 1}\n')
    with pytest.raises(DataError, match=r"episodes\.jsonl, line 2: .* remove that line"):
        list(read_entries(path))
    broken = msgspec.structs.replace(played("a"), group="AAAA")
    with pytest.raises(DataError, match="question 'a': its group is damaged"):
        broken.trajectories()


def test_the_last_play_of_a_question_counts(tmp_path: Path):
    path = tmp_path / "episodes.jsonl"
    with Journal(path) as journal:
        for entry in (failed("a"), played("b"), played("a", 0.0)):
            journal.append(entry)
    found = [(entry.question.id, entry.error) for entry in read_last(path)]
    assert found == [("b", None), ("a", None)]


def test_two_commands_cannot_write_one_journal(tmp_path: Path):
    with (
        Journal(tmp_path / "episodes.jsonl"),
        pytest.raises(ConfigurationError, match="another leeway eval is writing"),
    ):
        Journal(tmp_path / "episodes.jsonl")


def test_options_of_an_environment_are_settings_whatever_their_names():
    """They may be called as our own paths are, which a checksum stands for."""
    values = {"model": "m", "environment": {"options": {"file": "a", "retriever": "b"}}}
    values |= {"retriever": "http://r", "retriever_checksum": "", "benchmarks": {}}
    assert _flat(values) == {
        "environment.options.file": "a",
        "environment.options.retriever": "b",
        "retriever": "http://r",
        "retriever_checksum": "",
    }
    assert "retriever" not in _flat(values | {"retriever_checksum": "x"})
    assert _flat({"benchmarks": {"nq": {"file": "f", "num": 3}}}) == {"benchmarks.nq.num": 3}
