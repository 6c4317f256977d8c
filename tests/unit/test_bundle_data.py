"""The bundled corpus, questions and tokenizer keep their promises."""

from __future__ import annotations

import json
from functools import cache

import pytest

from leeway.actors.bundle.facts import (
    BundledIndex,
    contains,
    heldout_names,
    load_passages,
    load_questions,
    load_titles,
    mentions,
    plan_of,
    stands_in,
    unpacked,
)
from leeway.actors.config import SearchConfig, bundled_dir
from leeway.actors.search.protocol import TAGS, render_observation
from leeway.actors.search.rewards import exact_match


@cache
def index() -> BundledIndex:
    return BundledIndex(load_passages())


@cache
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(bundled_dir() / "tokenizer.json"))


def subjects(split: str) -> set[str]:
    return {index().by_id[id_].title for q in load_questions(split) for id_ in q.metadata.support}


def test_corpus_lines_are_id_and_a_quoted_title_line_before_a_short_text() -> None:
    lines = unpacked(bundled_dir() / "corpus.jsonl.xz").splitlines()
    assert 4000 <= len(lines) <= 7000
    records = [json.loads(line) for line in lines]
    assert len({r["id"] for r in records}) == len(records)
    for record in records:
        assert set(record) == {"id", "contents"}
        title, text = record["contents"].split("\n")
        assert title[0] == title[-1] == '"' and len(title) > 2
        assert 1 <= len(text.split()) <= 45


def test_the_packed_corpus_stays_below_one_and_a_half_megabytes() -> None:
    assert (bundled_dir() / "corpus.jsonl.xz").stat().st_size < 1_500_000


def test_no_country_person_work_or_place_is_shared_between_the_splits() -> None:
    assert not subjects("train") & subjects("held_out")


def test_no_passage_supports_questions_of_both_splits() -> None:
    train, held_out = (
        {id_ for q in load_questions(split) for id_ in q.metadata.support}
        for split in ("train", "held_out")
    )
    assert not train & held_out


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_answer_stands_in_its_last_support_passage(split: str) -> None:
    for question in load_questions(split):
        text = index().by_id[question.metadata.support[-1]].text
        assert any(stands_in(a, text) for a in question.golden_answers), question


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_about_two_thirds_of_the_questions_need_two_hops(split: str) -> None:
    hops = [q.metadata.hops for q in load_questions(split)]
    assert 0.6 <= hops.count(2) / len(hops) <= 0.72


def test_a_careful_player_answers_every_held_out_question() -> None:
    questions = load_questions("held_out")
    plans = [plan_of(q, index().by_id) for q in questions]
    queries = [query for plan in plans if plan for query in plan.queries]
    found = dict(zip(queries, index().search(queries), strict=True))
    for question, plan in zip(questions, plans, strict=True):
        assert plan is not None
        # Each next step is read off what the query before it brought.
        for query, read in zip(
            plan.queries, (plan.bridge, plan.answer)[-len(plan.queries) :], strict=True
        ):
            assert any(stands_in(str(read), f"{p.title} {p.text}") for p in found[query]), question
        assert exact_match(plan.answer, question.golden_answers) == 1.0


def test_no_two_hop_question_finds_its_answer_by_its_own_text() -> None:
    questions = [q for q in load_questions("held_out") if q.metadata.hops == 2]
    for question, found in zip(
        questions, index().search([q.question for q in questions]), strict=True
    ):
        assert not any(contains(p, a) for p in found for a in question.golden_answers), question


def test_titles_for_synthetic_episodes_name_no_held_out_entity() -> None:
    names = heldout_names(load_questions("held_out"), load_passages())
    assert not [title for title in load_titles() if mentions(title, names)]


def test_the_tokenizer_round_trips_every_question() -> None:
    for split in ("train", "held_out"):
        for question in load_questions(split):
            ids = tokenizer().encode(question.question).ids
            assert tokenizer().decode(ids, skip_special_tokens=True) == question.question


def test_every_tag_is_one_token_that_survives_skipping_special_tokens() -> None:
    for tag in TAGS:
        ids = tokenizer().encode(tag).ids
        assert len(ids) == 1
        assert tokenizer().decode(ids, skip_special_tokens=True) == tag


def test_digits_stand_alone() -> None:
    assert tokenizer().encode("1898").tokens == ["1", "8", "9", "8"]


def test_transformers_loads_the_same_tokenizer() -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(bundled_dir())
    text = '<think> a</think><search> capital Oslo</search>\nDoc 1: "Norway" .no 1898'
    assert loaded(text)["input_ids"] == tokenizer().encode(text).ids
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == ("<|end|>", "<|pad|>", 2048)


def test_two_supporting_passages_make_an_observation_within_the_limit() -> None:
    plans = [plan_of(q, index().by_id) for q in load_questions("held_out")]
    queries = [query for plan in plans if plan for query in plan.queries]
    shown = [render_observation([(p.title, p.text) for p in f]) for f in index().search(queries)]
    lengths = [len(e.ids) for e in tokenizer().encode_batch(shown)]
    assert max(lengths) <= SearchConfig().max_observation_tokens
