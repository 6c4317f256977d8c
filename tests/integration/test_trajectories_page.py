"""The page of `leeway trajectories show` in a browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from leeway.actors.config import bundled_dir
from leeway.actors.environment import Question
from leeway.actors.tokens import Tokens
from leeway.replay.schema import Trajectory, Turn
from leeway.services.trajectory_html import write_html
from leeway.services.trajectory_view import ColourBy, build_episode, failed_episode

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
TOKENS = Tokens.load(bundled_dir())


def drawn(tmp_path: Path, colour_by: ColourBy, fragment: str = "") -> str:
    """The document after its script has run."""
    prompt, search, found = (TOKENS.encode(t) for t in ("Where?\n", "<search>x</search>", HOSTILE))
    trajectory = Trajectory(
        trajectory_id="t-0",
        token_ids=np.asarray([*prompt, *search, *found], np.int32),
        turns=(Turn(len(prompt), len(search), len(found), "search"),),
        logprobs=np.full(len(search), -0.5, np.float32),
        versions=np.arange(len(search), dtype=np.int32),
        reward=0.0,
        stop_reason="turns",
        scores={"exact_match": 0.0},
        duration_s=1.0,
    )
    question = Question(id="q", question=HOSTILE, golden_answers=("north",))
    ratios = np.full(len(search), 1.5, np.float32)
    episode = build_episode(trajectory, "g", "q", TOKENS, question=question, ratios=ratios)
    page = tmp_path / "page.html"
    write_html(page, "Shown", [episode, failed_episode(question, HOSTILE)], colour_by=colour_by)
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"{page.as_uri()}{fragment}"),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def words(markup: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", markup))


@pytest.mark.parametrize(
    ("colour_by", "kind"),
    [("turn", "turn0"), ("trained", "trained"), ("version", "version0"), ("ratio", "ratio5")],
)
def test_turns_are_blocks_and_generated_tokens_have_their_colour(
    tmp_path: Path, colour_by: ColourBy, kind: str
):
    page = drawn(tmp_path, colour_by)
    [turn] = re.findall(r"<section class=\"block\">(.*?)</section>", page, re.DOTALL)
    assert "Turn 1: search" in words(turn)
    generated, observed = re.findall(r"<pre.*?</pre>", turn, re.DOTALL)
    assert words(generated) == "<search>x</search>" and words(observed) == HOSTILE
    assert f'class="{kind}"' in generated and f'class="{kind}"' not in observed


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path):
    page = drawn(tmp_path, "turn")
    assert "<title>Shown</title>" in page
    assert "<img" not in page
    assert words(page).count(HOSTILE) >= 2


def test_an_address_names_a_trajectory_and_a_question_that_failed_says_why(tmp_path: Path):
    page = drawn(tmp_path, "turn", fragment="#2")
    [error] = re.findall(r'<p class="error">(.*?)</p>', page, re.DOTALL)
    assert words(error) == HOSTILE
    assert "not played" in words(page) and "<section" not in page
