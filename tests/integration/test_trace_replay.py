"""Training on recorded groups: the real trainer, the table, and what is refused."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from leeway.actors.config import model_dir
from leeway.replay.archive import ArchivedGroup, ArchiveHeader, ArchiveWriter
from leeway.replay.errors import CodecError, ConfigurationError, DataError
from leeway.replay.schema import SCHEMA_VERSION, Group, GroupId, Trajectory, Turn
from leeway.replay.stored import entry_of
from leeway.services.config import RunConfig, load
from leeway.services.experiments.trace_replay import learn_from

ROOT = Path(__file__).parents[2]
SMALL = (
    "replay.staleness_policy=pace",
    "replay.max_staleness=1",
    "replay.groups_per_step=2",
    "rollout.max_groups_in_flight=2",
    "eval.num_questions=2",
    "policy.max_num_seqs=8",
    "learner.objective=grpo",
)


def recorded(number: int, seconds: float, turns: int, largest: int = 200) -> Group:
    """Two siblings, one of which was right."""

    def sibling(k: int) -> Trajectory:
        rng = np.random.default_rng(10 * number + k)
        return Trajectory(
            trajectory_id=f"{number}-{k}",
            token_ids=rng.integers(5, largest, 8 + 6 * turns).astype(np.int32),
            turns=tuple(
                Turn(start=8 + 6 * t, num_generated=4, num_observed=2, action="search")
                for t in range(turns)
            ),
            logprobs=np.full(4 * turns, -3.0, np.float32),
            versions=np.zeros(4 * turns, np.int32),
            reward=float(k),
            stop_reason="answer",
            scores={"exact_match": float(k)},
            duration_s=seconds,
        )

    return Group(
        group_id=GroupId(f"g{number}"),
        question_id=f"q{number}",
        worker_id="w",
        trajectories=(sibling(0), sibling(1)),
    )


def archive(path: Path, groups: list[Group]) -> Path:
    header = ArchiveHeader(
        schema_version=SCHEMA_VERSION, run="r", exported_at=time.time(), learner_version=0,
        limits={}, counters={},
    )  # fmt: skip
    with path.open("wb") as file:
        writer = ArchiveWriter(file, header)
        for number, group in enumerate(groups, 1):
            entry = entry_of(group)
            writer.add(
                ArchivedGroup(
                    group_id=group.group_id, version=entry.oldest, newest=entry.newest,
                    arrival=number, draws=0, returns=0, priority=entry.priority,
                    trajectories=entry.trajectories, payload=entry.payload,
                )
            )  # fmt: skip
        writer.end()
    return path


def config(*more: str) -> RunConfig:
    return load(ROOT / "deploy" / "configs" / "stability.toml", [*SMALL, *more])


MIXED = [recorded(0, 9.0, 3), *(recorded(n, 1.0, 1) for n in range(1, 8))]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_trains_a_model_and_says_what_drop_would_have_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
):
    out = tmp_path / "out"
    file = archive(tmp_path / "groups.leeway", MIXED)
    assert learn_from(config(f"learner.precision={precision}"), file, out, as_json=True) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["staleness_max"] <= 1 for line in lines)
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    by_policy = {o["policy"]: o for o in body["outcomes"]}
    assert (by_policy["pace"]["num_trained"], by_policy["pace"]["num_dropped"]) == (8, 0)
    # The one long group, of three turns.
    shares = {b["value"]: b["kept"] for b in by_policy["drop"]["bias"] if b["by"] == "turns"}
    assert shares[3] == 0.0
    assert body["score_before"] is not None and body["score_after"] is not None
    page = (out / "trace.html").read_text()
    assert "3 turns" in page and "under drop" in page
    weights = AutoModelForCausalLM.from_pretrained(out / "model").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model_dir("bundled")).state_dict()
    assert any((weights[name] != before[name]).any() for name in before)
    assert (out / "model" / "tokenizer.json").is_file()


def test_objectives_train_on_the_very_same_batches(tmp_path: Path):
    file = archive(tmp_path / "groups.leeway", MIXED)
    seen = []
    for objective in ("grpo", "so-grpo"):
        out = tmp_path / objective
        learn_from(config(f"learner.objective={objective}", "eval.num_questions=0"), file, out)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seen.append(
            [(v["reward_mean"], v["num_tokens_trained"], v["staleness_mean"]) for v in lines]
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("groups", "error", "sentence"),
    [
        ([], DataError, "holds no group"),
        (MIXED[:1], ConfigurationError, "holds 1 groups, too few for one step"),
        ([recorded(n, 1.0, 1, largest=10**6) for n in range(4)], DataError, "and the model has"),
    ],
)
def test_a_recording_that_cannot_be_trained_is_refused(
    tmp_path: Path, groups: list[Group], error: type[Exception], sentence: str
):
    with pytest.raises(error, match=sentence):
        learn_from(config(), archive(tmp_path / "g.leeway", groups), tmp_path / "out")


def test_a_file_that_is_missing_or_no_archive_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        learn_from(config(), tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "text").write_text("no archive, but long enough to be read as one")
    with pytest.raises(CodecError, match="is no exported buffer"):
        learn_from(config(), tmp_path / "text", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match="holds a run already"):
        learn_from(config(), archive(tmp_path / "g.leeway", MIXED), out)
