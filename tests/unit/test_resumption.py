"""The lines of steps that a killed learner had done and that are trained again."""

import json
from pathlib import Path

from leeway.services.resumption import cut_steps


def write(path: Path, steps: range, end: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + end)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_of_7_lines_and_a_checkpoint_of_step_4_3_go(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    assert cut_steps(path, 4) == 3
    assert steps(path) == [1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_that_was_cut_in_writing_goes(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3), '{"step": 2')
    assert cut_steps(path, 9) == 1
    assert steps(path) == [1, 2]


def test_nothing_is_cut_where_nothing_was_lost(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert cut_steps(path, 0) == 0
    write(path, range(1, 3))
    assert cut_steps(path, 2) == 0
    assert steps(path) == [1, 2]
