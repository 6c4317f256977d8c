"""Trajectories made readable: every token with its text, and what is known about it.

Letters: `L` tokens of a trajectory, `T` those that the policy generated, `K` turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from leeway.actors.environment import Question
from leeway.actors.tokens import Tokens
from leeway.replay.errors import DataError
from leeway.replay.schema import Trajectory
from leeway.services.evaluation.scores import REWARD, is_right

ColourBy = Literal["turn", "trained", "version", "ratio"]

MAX_PARTS: Final = 8
"""Tokens that one character may be spread over before its parts are shown as they are."""
RATIO_EDGES: Final = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""Where the colour of an importance ratio changes; 0.95 to 1.05 has none."""


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in numbers."""

    action: str
    start: int
    """Place of its first generated token among the L."""
    num_generated: int
    num_observed: int
    reward: float | None
    """What the turn earned; None where only the whole was rewarded."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory to look at; its JSON form is what pages and `--json` carry."""

    trajectory_id: str
    group_id: str
    question_id: str
    data_source: str = ""
    """Benchmark or data set of the question; empty where unknown."""
    question: str | None = None
    """None where the source does not hold it; the prompt does."""
    golden_answers: tuple[str, ...] = ()
    is_failed: bool
    """Not answered rightly, or not played to its end."""
    error: str | None = None
    """Why the episode was never played to its end; then it has no token."""
    reward: float = 0.0
    stop_reason: str = ""
    duration_s: float = 0.0
    scores: dict[str, float] = {}
    turns: list[TurnView] = []
    """[K]"""
    token_ids: list[int] = []
    """[L]"""
    texts: list[str] = []
    """[L] text of each token; empty where a character ends in a later one."""
    logprobs: list[float] = []
    """[T] under the engine and version that sampled the token."""
    versions: list[int] = []
    """[T] policy version that sampled the token."""
    ratios: list[float] | None = None
    """[T] current over behaviour probability; None where no model was given."""


class Segment(NamedTuple):
    """A run of tokens of one kind."""

    kind: Literal["prompt", "generated", "observed"]
    turn: int | None
    """None for the prompt."""
    start: int
    stop: int
    """Places among the L."""
    trained: int
    """Place of the first token among the T; means nothing unless `generated`."""


def build_episode(
    trajectory: Trajectory,
    group_id: str,
    question_id: str,
    tokens: Tokens,
    *,
    question: Question | None = None,
    scores: Mapping[str, float] | None = None,
    ratios: NDArray[np.float32] | None = None,
) -> Episode:
    """The trajectory with the text of its tokens. `scores` replace the environment's own, where an
    evaluation has others. Raises DataError where the tokens are not the tokenizer's.
    """
    scores = trajectory.scores if scores is None else scores
    highest = int(trajectory.token_ids.max())
    if highest >= tokens.vocab_size:
        raise DataError(
            f"trajectory {trajectory.trajectory_id} holds token {highest}, the tokenizer has"
            f" {tokens.vocab_size}; give that of the model that played it with --tokenizer DIR"
        )
    ids = trajectory.token_ids.tolist()
    earned = trajectory.turn_rewards or (None,) * len(trajectory.turns)
    return Episode(
        trajectory_id=trajectory.trajectory_id,
        group_id=group_id,
        question_id=question_id,
        data_source=question.data_source if question else "",
        question=printable(question.question) if question else None,
        golden_answers=_right_answers(question) if question else (),
        is_failed=is_failed(scores, trajectory.reward),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
        duration_s=trajectory.duration_s,
        scores=dict(scores),
        turns=[
            TurnView(
                action=turn.action,
                start=turn.start,
                num_generated=turn.num_generated,
                num_observed=turn.num_observed,
                reward=reward,
            )
            for turn, reward in zip(trajectory.turns, earned, strict=True)
        ],
        token_ids=ids,
        texts=[printable(text) for text in token_texts(tokens, ids)],
        logprobs=[round(lp, 4) for lp in trajectory.logprobs.tolist()],
        versions=trajectory.versions.tolist(),
        ratios=None if ratios is None else [float(f"{ratio:.4g}") for ratio in ratios],
    )


def failed_episode(question: Question | None, error: str) -> Episode:
    """A question that was never played to its end."""
    return Episode(
        trajectory_id="",
        group_id="",
        question_id=question.id if question else "",
        data_source=question.data_source if question else "",
        question=printable(question.question) if question else None,
        golden_answers=_right_answers(question) if question else (),
        is_failed=True,
        error=printable(error),
    )


def is_failed(scores: Mapping[str, float], reward: float) -> bool:
    """Whether the answer was wrong. Without a score that says so, whether nothing was earned."""
    return not is_right({REWARD: reward, **scores})


def _right_answers(question: Question) -> tuple[str, ...]:
    """Golden answers; letters of choices with their texts."""
    found: list[str] = []
    for answer in question.golden_answers:
        place = ord(answer[0].upper()) - ord("A") if len(answer) == 1 else -1
        has_text = 0 <= place < len(question.choices)
        found.append(printable(f"{answer}: {question.choices[place]}" if has_text else answer))
    return tuple(found)


def segments(episode: Episode) -> Iterator[Segment]:
    """Prompt, then what each turn generated and observed; empty ones are left out.

    Turn (start 5, 3 generated, 4 observed) of 12 tokens: prompt 0-5, generated 5-8, observed 8-12.
    """
    start = episode.turns[0].start if episode.turns else len(episode.token_ids)
    if start:
        yield Segment("prompt", None, 0, start, 0)
    trained = 0
    for k, turn in enumerate(episode.turns):
        middle = turn.start + turn.num_generated
        if turn.num_generated:
            yield Segment("generated", k, turn.start, middle, trained)
        if turn.num_observed:
            yield Segment("observed", k, middle, middle + turn.num_observed, 0)
        trained += turn.num_generated


def token_texts(tokens: Tokens, ids: Sequence[int]) -> list[str]:
    """[L] the text that each token adds to what stands before it.

    A tokenizer may drop a space at the start of what it decodes, so each token is decoded behind
    the ones before it. A character of several tokens is the text of its last; the others have none.
    """
    texts: list[str] = []
    begin = read = 0  # ids[begin:read] is text already, and complete
    before = ""
    for end in range(1, len(ids) + 1):
        text = tokens.decode(list(ids[begin:end]))
        is_part = text.endswith("\ufffd") and end < len(ids) and end - read < MAX_PARTS
        if is_part:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, read = read, end
        before = tokens.decode(list(ids[begin:read]))
    return texts


_VISIBLE: Final = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **{code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}


def printable(text: str) -> str:
    """The text with control characters and changes of direction made visible, so that a document
    can neither steer a terminal nor turn a line around. "\\x1b[2J" -> "␛[2J".
    """
    return text.translate(_VISIBLE)


# --- colours ------------------------------------------------------------------------------------


def version_bins(episodes: Sequence[Episode], num_bins: int) -> list[tuple[int, int]]:
    """(first, last) version of each colour, ascending: one each, or ranges where there are more
    versions than colours. Versions 3, 4 and 9 -> (3, 3), (4, 4), (9, 9); 0 to 15 and 8 colours ->
    (0, 1), (2, 3), ...
    """
    found = sorted({version for episode in episodes for version in episode.versions})
    if len(found) <= num_bins:
        return [(version, version) for version in found]
    edges = np.linspace(found[0], found[-1] + 1, num_bins + 1)
    first = np.ceil(edges).astype(int)
    return [(int(low), int(high) - 1) for low, high in pairwise(first)]


def version_bin(bins: Sequence[tuple[int, int]], version: int) -> int:
    """Which of the bins holds the version."""
    return next(i for i, (_, last) in enumerate(bins) if version <= last)


def ratio_bin(ratio: float) -> int:
    """0 for a ratio below 0.5, 3 for one near 1, 6 for one from 2 on."""
    return sum(ratio >= edge for edge in RATIO_EDGES)


def ratio_labels() -> list[str]:
    """The legend of the seven bins."""
    edges = [f"{edge:g}" for edge in RATIO_EDGES]
    between = [f"{low}-{high}" for low, high in pairwise(edges)]
    return [f"< {edges[0]}", *between, f"≥ {edges[-1]}"]
