"""The warm start: its batches, its decode loop, its judge."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from leeway.actors.bundle.facts import load_passages, load_questions, plan_of
from leeway.actors.search.script import CARELESS, END, PAD, CareMix, episodes
from leeway.learner.warmstart import (
    WarmstartConfig,
    build_model,
    collated,
    decode,
    learning_rate,
    mean_loss,
    save,
    train,
    until_stop,
)
from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.services.processes import warmstart
from leeway.services.processes.warmstart import (
    EpisodeWorkers,
    Judge,
    Packed,
    bundled_tokenizer,
    care_mix,
    packed,
    save_policy,
)


def test_the_bundled_shape_has_four_million_parameters() -> None:
    model = build_model(2048, 1, 0)
    assert 3_900_000 < model.num_parameters() < 4_100_000


def test_a_batch_trains_each_marked_token_from_the_one_before_it() -> None:
    first = (np.array([5, 6, 7], np.int32), np.array([False, True, False]))
    second = (np.array([8, 9], np.int32), np.array([False, True]))
    batch = collated([first, second], pad_id=0)
    assert batch.ids.shape == (2, 32)
    assert batch.targets.tolist() == [6, 9]
    assert batch.ids.reshape(-1)[batch.before].tolist() == [5, 8]


def test_the_learning_rate_rises_to_its_peak_and_ends_at_a_tenth() -> None:
    config = WarmstartConfig(num_steps=1000)
    assert learning_rate(0, config) == pytest.approx(1e-5)
    assert learning_rate(99, config) == pytest.approx(1e-3)
    assert learning_rate(999, config) == pytest.approx(1e-4)


def test_training_lowers_the_loss() -> None:
    tokenizer = bundled_tokenizer()
    some = packed(list(islice(episodes(0, CareMix(no_search=1.0)), 8)), tokenizer)
    rows = np.split(some.ids.astype(np.int32), some.ends[:-1])
    masks = np.split(some.is_trained, some.ends[:-1])
    batch = collated(list(zip(rows, masks, strict=True)), 0)
    model = build_model(2048, 1, 0)
    before = mean_loss(model, batch).item()
    train(model, iter([batch] * 5), WarmstartConfig(num_steps=5), lambda step, loss: None)
    assert mean_loss(model, batch).item() < before - 0.5


def test_packing_keeps_every_token_and_marks_the_generated_ones() -> None:
    tokenizer = bundled_tokenizer()
    chunk = list(islice(episodes(2, CARELESS), 20))
    some = packed(chunk, tokenizer)
    start = 0
    for episode, end in zip(chunk, some.ends, strict=True):
        ids, mask = some.ids[start:end], some.is_trained[start:end]
        text = "".join(s.text for s in episode.segments)
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
        trained = "".join(s.text for s in episode.segments if s.is_trained)
        assert tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False) == trained
        start = end


def test_a_context_decodes_alike_alone_and_beside_a_longer_one() -> None:
    model = build_model(64, 1, 0).eval()
    short, long = [5, 6, 7], list(range(10, 40))
    both = decode(model, [short, long], stop_ids={1}, pad_id=0, max_tokens=8)
    alone = decode(model, [short], stop_ids={1}, pad_id=0, max_tokens=8)
    assert both[0] == alone[0]


def test_a_turn_ends_with_its_first_stop_token() -> None:
    assert until_stop([5, 9, 0, 0], {9}) == [5, 9]
    assert until_stop([5, 6], {9}) == [5, 6]


def test_the_saved_folder_is_bfloat16_and_below_ten_megabytes(tmp_path: Path) -> None:
    model = build_model(2048, 1, 0)
    save(model, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 10_000_000
    assert not (tmp_path / "generation_config.json").exists()
    assert model.dtype == torch.float32


def test_care_is_changed_by_name_and_unknown_names_are_refused() -> None:
    assert care_mix("careless", "early_stop=0.7").early_stop == 0.7
    with pytest.raises(ConfigurationError, match="early_stop"):
        care_mix("careless", "early=0.7")


def test_the_judge_scores_a_careful_player_one(tmp_path: Path, monkeypatch) -> None:
    tokenizer = bundled_tokenizer()
    model = build_model(2048, tokenizer.token_to_id(END), tokenizer.token_to_id(PAD))
    save_policy(model, tmp_path)
    judge = Judge(tmp_path, "cpu")
    by_id = {p.id: p for p in load_passages()}
    questions = load_questions("held_out")[:100]
    plans = [plan for q in questions if (plan := plan_of(q, by_id))]
    scripts = [
        [
            *(f"<think> a</think><search> {query}</search>" for query in plan.queries),
            f"<think> b</think><answer> {plan.answer}</answer>",
        ]
        for plan in plans
    ]
    left = {f"Question: {q.question}\n": turns for q, turns in zip(questions, scripts, strict=True)}

    def careful(model, contexts, **_):
        prompts = [tokenizer.decode(ids).split("\n")[0] + "\n" for ids in contexts]
        return [tokenizer.encode(left[prompt].pop(0)).ids for prompt in prompts]

    monkeypatch.setattr("leeway.learner.warmstart.decode", careful)
    games = judge.play(questions)
    assert all(game.is_right for game in games)
    assert [g.num_searches for g in games] == [q.metadata.hops for q in questions]


def test_workers_send_what_was_packed() -> None:
    sent = packed(list(islice(episodes(1000, CARELESS, 0.5), 3)), bundled_tokenizer())
    came = Packed.from_bytes(sent.to_bytes())
    for a, b in zip(sent, came, strict=True):
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist()


def test_workers_are_read_in_turn_and_give_the_same_each_time(monkeypatch) -> None:
    monkeypatch.setattr(warmstart, "CHUNK", 2)
    with EpisodeWorkers(1, CARELESS, 0.5, 2) as workers:
        first = [ids.tolist() for ids, _ in islice(workers.examples(), 6)]
    expected: list[list[int]] = []
    sources = [episodes(1000 + i, CARELESS, 0.5) for i in range(2)]
    for source in (sources[0], sources[1], sources[0]):
        chunk = packed(list(islice(source, 2)), bundled_tokenizer())
        expected += [part.tolist() for part in np.split(chunk.ids, chunk.ends[:-1])]
    assert first == expected


def test_a_worker_that_died_is_named(monkeypatch) -> None:
    monkeypatch.setattr(warmstart, "make_episodes", lambda *_: None)
    with (
        EpisodeWorkers(1, CARELESS, 0.5, 2) as workers,
        pytest.raises(LeewayError, match="which makes episodes, ended with exit code 0"),
    ):
        next(workers.examples())


def test_a_worker_that_hangs_is_named(monkeypatch) -> None:
    monkeypatch.setattr(warmstart, "make_episodes", lambda *_: time.sleep(600))
    monkeypatch.setattr(warmstart, "CHUNK_S", 0.1)
    with (
        EpisodeWorkers(1, CARELESS, 0.5, 1) as workers,
        pytest.raises(LeewayError, match=r"process \d+ made no episodes within 0\.1 s"),
    ):
        next(workers.examples())
