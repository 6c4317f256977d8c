"""`leeway trajectories show`: what is chosen, how tokens become text, and that no text can act."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.actors.config import bundled_dir
from leeway.actors.environment import Question
from leeway.actors.tokens import Tokens
from leeway.replay.archive import ArchivedGroup, ArchiveHeader, ArchiveWriter
from leeway.replay.bounds import newest_version
from leeway.replay.codec import encode
from leeway.replay.schema import SCHEMA_VERSION, Group, GroupId, StopReason, Trajectory, Turn
from leeway.services import cli
from leeway.services.trajectory_html import build_page
from leeway.services.trajectory_view import (
    Episode,
    build_episode,
    failed_episode,
    is_failed,
    printable,
    ratio_bin,
    segments,
    token_texts,
    version_bin,
    version_bins,
)

TOKENS = Tokens.load(bundled_dir())
MODEL = bundled_dir() / "model"
PROMPT = "Question: capital of Norway?\n"
SEARCH = "<think>look</think><search>Norway capital</search>"
FOUND = '\n<information>\nDoc 1: "Norway" Oslo Ø 北京\n</information>\n'
ANSWER = "<answer>Oslo</answer>"


def play(
    name: str,
    *,
    observed: str = FOUND,
    answer: str = ANSWER,
    exact_match: float = 1.0,
    versions: tuple[int, int] = (3, 4),
    stop_reason: StopReason = "answer",
) -> Trajectory:
    """A search and an answer; the search is of the first version, the answer of the second."""
    prompt, search, found, end = (TOKENS.encode(t) for t in (PROMPT, SEARCH, observed, answer))
    turns = (
        Turn(len(prompt), len(search), len(found), "search"),
        Turn(len(prompt) + len(search) + len(found), len(end), 0, "answer"),
    )
    num = len(search) + len(end)
    return Trajectory(
        trajectory_id=name,
        token_ids=np.asarray([*prompt, *search, *found, *end], np.int32),
        turns=turns,
        logprobs=np.full(num, -0.5, np.float32),
        versions=np.asarray([versions[0]] * len(search) + [versions[1]] * len(end), np.int32),
        reward=exact_match,
        stop_reason=stop_reason,
        scores={"exact_match": exact_match, "num_searches": 1.0},
        duration_s=1.5,
    )


def group_of(name: str, question_id: str, *trajectories: Trajectory) -> Group:
    return Group(
        group_id=GroupId(name),
        question_id=question_id,
        worker_id="worker-0",
        trajectories=trajectories,
    )


def write_archive(path: Path, *groups: Group) -> Path:
    header = ArchiveHeader(
        schema_version=SCHEMA_VERSION,
        run="demo-1",
        exported_at=0.0,
        learner_version=4,
        limits={},
        counters={},
    )
    with path.open("wb") as file:
        writer = ArchiveWriter(file, header)
        for number, group in enumerate(groups):
            writer.add(
                ArchivedGroup(
                    group_id=group.group_id,
                    version=group.oldest_version,
                    newest=newest_version(group),
                    arrival=number,
                    draws=0,
                    returns=0,
                    priority=0.0,
                    trajectories=[(len(t.turns), len(t.token_ids)) for t in group.trajectories],
                    payload=encode(group),
                )
            )
        writer.end()
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Groups aa (two right), ab (one right, one wrong) and b (one wrong)."""
    return write_archive(
        tmp_path / "buffer.lw",
        group_of("aa", "q-1", play("aa-0"), play("aa-1")),
        group_of("ab", "q-2", play("ab-0"), play("ab-1", exact_match=0.0)),
        group_of("b", "q-3", play("b-0", exact_match=0.0, answer="<answer>Bergen</answer>")),
    )


@pytest.fixture
def leeway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leeway", "trajectories", "show", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


Leeway = Callable[..., tuple[int, str, str]]


def shown(leeway: Leeway, *arguments: str | Path) -> list[str]:
    """Ids of the trajectories that a command shows."""
    code, out, err = leeway(*arguments, "--tokenizer", "bundled", "--json")
    assert code == 0, err
    return [trajectory["trajectory_id"] for trajectory in json.loads(out)["trajectories"]]


# --- what is chosen ---


def test_everything_is_shown_in_the_order_of_arrival(leeway: Leeway, archive: Path):
    assert shown(leeway, archive) == ["aa-0", "aa-1", "ab-0", "ab-1", "b-0"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--group", "a"], ["aa-0", "aa-1", "ab-0", "ab-1"]),
        (["--trajectory", "ab-1"], ["ab-1"]),
        (["--question", "q-2"], ["ab-0", "ab-1"]),
        (["--failed"], ["ab-1", "b-0"]),
        (["--failed", "--group", "b"], ["b-0"]),
        (["--limit", "3"], ["aa-0", "aa-1", "ab-0"]),
    ],
    ids=" ".join,
)
def test_options_choose(leeway: Leeway, archive: Path, options: list[str], expected: list[str]):
    assert shown(leeway, archive, *options) == expected


def test_a_choice_of_nothing_says_among_how_many(leeway: Leeway, archive: Path):
    code, _, err = leeway(archive, "--group", "zz", "--tokenizer", "bundled")
    assert code == 2
    assert err == (
        "leeway: no trajectory of the buffer.lw, exported from demo-1 is like that, among 3"
        " groups\n"
    )


def test_a_limit_that_cuts_is_said(leeway: Leeway, archive: Path):
    _, out, _ = leeway(archive, "--tokenizer", "bundled", "--limit", "2")
    assert out.endswith("There are more than these 2: see --limit.\n")
    _, out, _ = leeway(archive, "--tokenizer", "bundled", "--limit", "5")
    assert "There are more" not in out


# --- refusals ---


def test_an_archive_without_a_tokenizer_is_refused(leeway: Leeway, archive: Path):
    code, _, err = leeway(archive)
    assert code == 2 and "--tokenizer DIR" in err and err.count("\n") == 1


def test_colour_by_ratio_without_a_model_is_refused(leeway: Leeway, archive: Path):
    code, _, err = leeway(archive, "--tokenizer", "bundled", "--colour-by", "ratio")
    assert code == 2 and "give --model DIR" in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["missing", "folder", "text"])
def test_what_holds_no_trajectories_is_refused(leeway: Leeway, tmp_path: Path, kind: str):
    source = tmp_path / kind
    if kind == "folder":
        source.mkdir()
    elif kind == "text":
        source.write_text("hello")
    code, _, err = leeway(source)
    assert code == 2 and "leeway replay export" in err and err.count("\n") == 1


def test_tokens_of_another_vocabulary_are_refused(leeway: Leeway, tmp_path: Path):
    foreign = play("x-0")
    foreign.token_ids[0] = 70_000
    path = write_archive(tmp_path / "foreign.lw", group_of("x", "q", foreign))
    code, _, err = leeway(path, "--tokenizer", "bundled")
    assert code == 2 and "token 70000, the tokenizer has 2048" in err


# --- tokens and their text ---


def test_turns_of_a_trajectory_are_its_segments():
    episode = build_episode(play("t"), "g", "q", TOKENS)
    first, second = episode.turns
    parts = [("".join(episode.texts[s.start : s.stop]), *s[:2]) for s in segments(episode)]
    assert parts == [
        (PROMPT, "prompt", None),
        (SEARCH, "generated", 0),
        (FOUND, "observed", 0),
        (ANSWER, "generated", 1),
    ]
    assert [s.trained for s in segments(episode)] == [0, 0, 0, first.num_generated]
    assert second.num_observed == 0


@given(st.text(max_size=60))
def test_the_texts_of_the_tokens_make_up_the_text(text: str):
    ids = TOKENS.encode(text)
    texts = token_texts(TOKENS, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == TOKENS.decode(ids)


@given(st.lists(st.integers(0, TOKENS.vocab_size - 1), max_size=40))
def test_any_tokens_have_one_text_each(ids: list[int]):
    assert len(token_texts(TOKENS, ids)) == len(ids)


def test_a_character_of_several_tokens_is_the_text_of_its_last():
    ids = TOKENS.encode("北")
    assert len(ids) == 3
    assert token_texts(TOKENS, ids) == ["", "", "北"]


def test_control_characters_and_turns_of_direction_are_made_visible():
    assert printable("a\x1b[2J\x00\x9b31m\u202egnp\n\tb") == "a␛[2J␀\ufffd31m[U+202E]gnp\n\tb"


def test_an_episode_fails_by_its_answer_not_by_its_penalty():
    assert not is_failed({"exact_match": 1.0}, -0.1)
    assert is_failed({"exact_match": 0.0}, 0.2)
    assert not is_failed({"exact_match": 0.0, "accuracy": 1.0}, 0.0)
    assert is_failed({"tool_calls": 3.0}, 0.0)


# --- colours ---


def episode_of(versions: tuple[int, int]) -> Episode:
    return build_episode(play("t", versions=versions), "g", "q", TOKENS)


def test_few_versions_have_a_colour_each_and_many_share():
    assert version_bins([episode_of((3, 4)), episode_of((4, 9))], 8) == [(3, 3), (4, 4), (9, 9)]
    many = [episode_of((v, v)) for v in range(16)]
    bins = version_bins(many, 8)
    assert bins == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert [version_bin(bins, v) for v in (0, 1, 2, 15)] == [0, 0, 1, 7]


def test_a_ratio_of_one_has_no_colour():
    assert [ratio_bin(r) for r in (0.1, 0.5, 0.94, 1.0, 1.05, 1.9, 2.0)] == [0, 1, 2, 3, 4, 5, 6]


def test_the_ratio_under_the_model_that_sampled_is_1_and_twice_as_likely_is_2():
    torch = pytest.importorskip("torch")
    from leeway.learner.model import load_model
    from leeway.services.trajectory_ratio import token_ratios

    trajectory = play("t")
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = load_model(MODEL)(input_ids=ids[None]).logits[0]
    lp = torch.log_softmax(logits[:-1], -1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
    places = [p for t in trajectory.turns for p in range(t.start, t.start + t.num_generated)]
    trajectory.logprobs[:] = lp[np.array(places) - 1]
    trajectory.logprobs[0] -= np.log(2.0)
    [ratios] = token_ratios(MODEL, [trajectory])
    assert ratios[0] == pytest.approx(2.0, rel=1e-3)
    assert ratios[1:] == pytest.approx(np.ones(len(ratios) - 1), rel=1e-3)


def test_ratios_are_in_the_json_once_there_is_a_model(leeway: Leeway, archive: Path):
    code, out, _ = leeway(archive, "--model", "bundled", "--colour-by", "ratio", "--json")
    assert code == 0
    [first, *_] = json.loads(out)["trajectories"]
    assert len(first["ratios"]) == len(first["logprobs"])
    assert 0 < min(first["ratios"]) < 0.5


# --- the terminal ---


def test_a_pipe_gets_turns_as_blocks_without_colour(leeway: Leeway, archive: Path):
    code, out, _ = leeway(archive, "--trajectory", "aa-0", "--tokenizer", "bundled")
    assert code == 0 and "\x1b" not in out
    lines = [line.strip() for line in out.splitlines()]
    turns = [line for line in lines if line.startswith("turn")]
    num = len(TOKENS.encode(SEARCH)), len(TOKENS.encode(ANSWER))
    assert turns == [
        f"turn 1: search, {num[0]} tokens, version 3, mean log-prob -0.500",
        f"turn 2: answer, {num[1]} tokens, version 4, mean log-prob -0.500",
    ]
    assert SEARCH in lines and ANSWER in lines


def test_a_document_cannot_steer_the_terminal(leeway: Leeway, tmp_path: Path):
    evil = play("x-0", observed="\x1b]0;owned\x07[bold red]no markup[/]\x1b[2J")
    path = write_archive(tmp_path / "evil.lw", group_of("x", "q", evil))
    _, out, _ = leeway(path, "--tokenizer", "bundled")
    assert "\x1b" not in out and "\x07" not in out
    assert "␛]0;owned␇[bold red]no markup[/]␛[2J" in out


# --- the page ---

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "\"'&lt;\u2028]]>{script}{style}{title}{data}",
]


class Elements(HTMLParser):
    """Start tags of a page, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(text: str):
    question = Question(id="q", question=text, golden_answers=(text,))
    episode = build_episode(play("t", observed=text), "g", "q", TOKENS, question=question)
    harmless = build_episode(play("t"), "g", "q", TOKENS)
    error = failed_episode(question, text)
    page = Elements(build_page(text, [episode, error], note=text, facts=[(text, text)]))
    expected = Elements(build_page("x", [harmless, harmless]))
    assert page.tags == expected.tags
    assert page.attributes == expected.attributes
    data = json.loads(page.scripts[0])
    assert data["episodes"][0]["question"] == text and data["title"] == text
    assert page.scripts[1].strip() == expected.scripts[1].strip()


def test_a_page_asks_for_nothing_from_outside():
    page = build_page("x", [build_episode(play("t"), "g", "q", TOKENS)])
    assert "default-src &#x27;none&#x27;" in page
    assert not {"link", "img", "iframe", "object", "base"} & set(Elements(page).tags)
    assert "http" not in page.replace("http-equiv", "")


def test_html_is_written_whole_and_said(leeway: Leeway, archive: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    code, out, _ = leeway(archive, "--tokenizer", "bundled", "--html", page)
    assert code == 0 and out == f"5 trajectories in {page}; open it in a browser\n"
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    assert len(json.loads(Elements(page.read_text()).scripts[0])["episodes"]) == 5


def test_html_in_a_folder_that_is_not_there_is_refused(
    leeway: Leeway, archive: Path, tmp_path: Path
):
    code, _, err = leeway(archive, "--tokenizer", "bundled", "--html", tmp_path / "no" / "p.html")
    assert code == 2 and "name another file" in err
