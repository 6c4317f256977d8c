"""Scripted episodes: by seed, in the protocol, without held-out entities, as careless as said."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest

from leeway.actors.bundle.facts import heldout_names, load_passages, load_questions, mentions
from leeway.actors.search.protocol import CORRECTION, last_answer, parse
from leeway.actors.search.script import CAREFUL, CARELESS, Episode, episodes

NUM = 4000


@cache
def sample(careless: bool) -> list[Episode]:
    return list(islice(episodes(3, CARELESS if careless else CAREFUL), NUM))


def turns(episode: Episode) -> list[str]:
    return [s.text for s in episode.segments if s.is_trained]


def test_a_seed_makes_the_same_episodes_again_and_another_seed_others() -> None:
    assert list(islice(episodes(5), 50)) == list(islice(episodes(5), 50))
    assert list(islice(episodes(5), 50)) != list(islice(episodes(6), 50))


def test_no_episode_names_a_held_out_entity() -> None:
    names = heldout_names(load_questions("held_out"), load_passages())
    for episode in sample(True):
        assert not mentions(" ".join(s.text for s in episode.segments), names)


def test_no_episode_asks_a_held_out_question() -> None:
    asked = {f"Question: {q.question}\n" for q in load_questions("held_out")}
    assert not [e for e in sample(True) if e.segments[0].text in asked]


def test_a_careful_episode_searches_once_for_each_hop_and_answers() -> None:
    for episode in sample(False):
        actions = [parse(turn).action for turn in turns(episode)]
        assert actions == ["search"] * episode.hops + ["answer"]


def test_a_careful_answer_stands_in_the_last_observation() -> None:
    for episode in sample(False):
        answer = last_answer(turns(episode))
        assert answer and answer in episode.segments[-2].text


def test_about_one_episode_in_ten_is_real() -> None:
    assert sum(e.is_real for e in sample(True)) / NUM == pytest.approx(0.1, abs=0.03)


def test_mistakes_are_as_frequent_as_the_table_says() -> None:
    some = sample(True)
    two = [e for e in some if e.hops == 2]
    share = {m: sum(e.mistake == m for e in some) / NUM for m in ("no_search", "poor_query")}
    assert share["no_search"] == pytest.approx(0.1, abs=0.03)
    # Drawn independently; a guess without a search comes first: 0.9 * 0.1.
    assert share["poor_query"] == pytest.approx(0.09, abs=0.03)
    early = sum(e.mistake == "early_stop" for e in two) / len(two)
    assert early == pytest.approx(0.9 * 0.9 * 0.6, abs=0.04)
    assert sum(e.is_malformed for e in some) / NUM == pytest.approx(0.05, abs=0.015)


def test_a_malformed_turn_holds_no_action_and_the_correction_follows() -> None:
    for episode in sample(True):
        invalid = [parse(turn).action == "invalid" for turn in turns(episode)]
        assert sum(invalid) == episode.is_malformed
        assert sum(s.text == CORRECTION for s in episode.segments) == episode.is_malformed


def test_no_episode_takes_more_than_four_turns() -> None:
    assert max(len(turns(e)) for e in sample(True)) <= 4
