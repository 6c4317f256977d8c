"""What an episode of a benchmark scores, beyond what its environment says.

The environment's own scores train; these compare. They read the last answer of the model's own
tokens, whatever `reward.answer` rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from leeway.actors.environment import Question
from leeway.actors.search import protocol, rewards
from leeway.actors.tokens import Tokens
from leeway.replay.schema import Trajectory

OPEN: Final = ("exact_match", "f1", "substring")
"""Of a question with golden answers."""
CHOICE: Final = "accuracy"
"""Of a multiple choice."""
REWARD: Final = "reward"
"""Of an episode in an environment of the user's own."""
_THOUGHT: Final = frozenset(("think_chars", "think_tokens"))
"""Scores of the environment that are no result."""

Scores = Mapping[str, float]


def score_names(samples: Sequence[Scores], has_choices: bool) -> tuple[str, ...]:
    """Names of the scores of a benchmark, from those of its episodes; the first says whether an
    answer is right. Where only some questions have choices, accuracy is that of all.
    """
    if not samples:
        return (CHOICE,) if has_choices else OPEN
    if any(CHOICE in scores for scores in samples):
        return (CHOICE,)
    return tuple(name for name in (*OPEN, REWARD) if all(name in scores for scores in samples))


def search_scores(question: Question, trajectory: Trajectory, tokens: Tokens) -> dict[str, float]:
    """Of an episode of the search environment.

    Multiple choice, answer "(B)", golden "B" -> accuracy 1. Open, answer "the krone of Norway",
    golden "krone" -> exact_match 0, substring 1, f1 0.5.
    """
    answer = last_answer(trajectory, tokens)
    golden = question.golden_answers
    own = {
        name: value
        for name, value in trajectory.scores.items()
        if name not in _THOUGHT and name not in OPEN
    }
    if question.choices:
        return own | {CHOICE: rewards.multiple_choice(answer, golden, question.choices)}
    return own | {
        "exact_match": rewards.exact_match(answer, golden),
        "f1": rewards.f1(answer, golden),
        "substring": rewards.substring_match(answer, golden),
    }


def own_scores(trajectory: Trajectory) -> dict[str, float]:
    """Of an episode of another environment: what that says of it."""
    return {**trajectory.scores, REWARD: trajectory.reward}


def last_answer(trajectory: Trajectory, tokens: Tokens) -> str | None:
    """The last `<answer>` that the model itself wrote."""
    ids = trajectory.token_ids
    generated = [
        tokens.decode(ids[turn.start : turn.start + turn.num_generated].tolist())
        for turn in trajectory.turns
    ]
    return protocol.last_answer(generated)


def is_right(scores: Scores) -> bool:
    """Whether an answer counts as right: by its letter, by exact match, or by having earned
    something, whichever there is.

    {"accuracy": 1, "exact_match": 0} -> True: a letter is judged as one.
    """
    name = next(name for name in (CHOICE, OPEN[0], REWARD) if name in scores)
    return scores[name] > 0
