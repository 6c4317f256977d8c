"""`leeway trajectories show` on the buffer of a run, at rest and while its Redis is up."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from leeway.actors.config import bundled_dir
from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import GroupId, PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group
from leeway.services import cli
from leeway.services.config import load
from leeway.services.layout import RunDirectory, create_run

Leeway = Callable[..., tuple[int, str, str]]
OVERRIDES = ("replay.groups_per_step=2", "replay.max_staleness=2", "data.train=train.jsonl")


@pytest.fixture
def leeway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Leeway:
    monkeypatch.chdir(tmp_path)
    lines = [
        {"id": f"question-{seed}", "question": f"Where is {seed}?", "golden_answers": ["north"]}
        for seed in range(2)
    ]
    Path("train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leeway", "trajectories", "show", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def run(leeway: Leeway) -> RunDirectory:
    """A run at rest, whose buffer holds question-0 at version 0 and question-1 at version 1."""
    made = create_run(load(None, [*OVERRIDES, "name=demo"]))
    with EmbeddedRedis.start(made.redis, made.root.name) as server:
        asyncio.run(fill(server.url, made.root.name))
    return made


async def fill(url: str, name: str) -> None:
    replay = RedisReplay(url, name, ReplayConfig(groups_per_step=2, max_staleness=2))
    for version, slot in enumerate(await replay.admit(2, PolicyVersion(0), 1.0)):
        group = build_group(slot, version=version, seed=version)
        known = tuple(
            msgspec.structs.replace(t, token_ids=(t.token_ids % 1900).astype(np.int32))
            for t in group.trajectories
        )
        await replay.add(slot, msgspec.structs.replace(group, trajectories=known))
    await replay.close()


def test_the_buffer_of_a_run_at_rest_is_shown_with_its_questions(leeway: Leeway, run: RunDirectory):
    code, out, err = leeway(str(run.root), "--json")
    assert code == 0, err
    found = json.loads(out)["trajectories"]
    assert [(t["question_id"], t["question"]) for t in found] == [
        ("question-0", "Where is 0?"),
        ("question-0", "Where is 0?"),
        ("question-1", "Where is 1?"),
        ("question-1", "Where is 1?"),
    ]
    assert {version for t in found[2:] for version in t["versions"]} == {1}
    assert leeway("--json")[1] == out  # the latest run


def test_a_question_is_found_by_words_of_its_text(leeway: Leeway, run: RunDirectory):
    _, out, _ = leeway(str(run.root), "--question", "where IS 1", "--json")
    assert {t["question_id"] for t in json.loads(out)["trajectories"]} == {"question-1"}


def test_without_its_question_file_a_run_is_shown_all_the_same(leeway: Leeway, run: RunDirectory):
    text = run.config.read_text().replace(str(Path("train.jsonl").resolve()), "bundled")
    run.config.write_text(text)
    code, out, err = leeway(str(run.root), "--json")
    assert code == 0, err
    assert {t["question"] for t in json.loads(out)["trajectories"]} == {None}


def test_the_last_checkpoint_is_what_ratios_are_taken_with(leeway: Leeway, run: RunDirectory):
    code, _, err = leeway(str(run.root), "--colour-by", "ratio")
    assert code == 2 and "has no checkpoint, so give --model DIR" in err
    checkpoint = run.checkpoints / "step-00000001"
    shutil.copytree(bundled_dir() / "model", checkpoint)
    (checkpoint / "training.json").write_text(
        '{"version":1,"score":null,"optimizer_steps":{},"rng":"","rng_cuda":[],"extra":{}}'
    )
    code, out, err = leeway(str(run.root), "--colour-by", "ratio", "--limit", "1", "--json")
    assert code == 0, err
    [shown] = json.loads(out)["trajectories"]
    assert len(shown["ratios"]) == len(shown["logprobs"])
    assert str(checkpoint) in err


def test_another_group_id_is_nothing(leeway: Leeway, run: RunDirectory):
    code, _, err = leeway(str(run.root), "--group", str(GroupId("nobody")))
    assert code == 2 and "is like that, among 2 groups" in err
