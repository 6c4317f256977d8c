"""The search episode: think, search, read, and answer in the end. Holds the rules, no state."""

from __future__ import annotations

from typing import Any, cast

from leeway.actors.config import RewardConfig, SearchConfig
from leeway.actors.environment import EnvironmentContext, Outcome, Question, Step
from leeway.actors.imports import import_named
from leeway.actors.search import protocol, rewards
from leeway.actors.search.prompts import Prompts
from leeway.actors.search.retriever import Retriever
from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import StopReason


def build(context: EnvironmentContext) -> SearchEnvironment:
    """The environment of `environment.factory = "search"`. Raises ConfigurationError for a chat
    template or a reward function that cannot be had.
    """
    reward = context.reward
    return SearchEnvironment(
        context.search,
        reward.format_penalty,
        context.retriever,
        reward.retrieval_reward,
        format_reward=reward.format_reward,
        answer_reward=answer_reward(reward),
        prompts=Prompts(context.search, context.tokenizer),
    )


def answer_reward(reward: RewardConfig) -> rewards.AnswerReward:
    """The function that `reward.answer` names."""
    if reward.answer in rewards.ANSWERS:
        return rewards.ANSWERS[reward.answer]
    found: Any = import_named(reward.answer, "reward.answer")
    if not callable(found):
        raise ConfigurationError(
            f'reward.answer = "{reward.answer}" is no function; it must take the last answer (a str'
            " or None) and the Question, and return a number"
        )
    return cast(rewards.AnswerReward, found)


class SearchEnvironment:
    """An Environment over a retriever.

    A malformed action gets the protocol's correction and costs a turn. On the last turn there is
    nobody left to read an observation, so a search ends the episode without being run.
    """

    stop = protocol.STOP
    observation_end = protocol.OBSERVATION_END

    def __init__(
        self,
        config: SearchConfig,
        format_penalty: float,
        retriever: Retriever,
        retrieval_reward: float = 0.0,
        *,
        format_reward: float = 0.0,
        answer_reward: rewards.AnswerReward = rewards.ANSWERS["auto"],
        prompts: Prompts | None = None,
    ) -> None:
        """The amounts are those of RewardConfig. `prompts` None: those of a model that knows the
        protocol and has no chat template.
        """
        self._top_k = config.top_k
        self._format_penalty = format_penalty
        self._retrieval_reward = retrieval_reward
        self._format_reward = format_reward
        self._answer_reward = answer_reward
        self._prompts = prompts or Prompts(config)
        self._retriever = retriever

    def prompt(self, question: Question) -> str:
        """As `search.prompt` and `search.chat_template` say; see Prompts."""
        return self._prompts(question)

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """Run the turn's action."""
        parsed = protocol.parse(generated)
        thought = protocol.thought(generated)
        if parsed.action == "answer" or turns_left == 0:
            return Step(action=parsed.action, observation="", is_terminal=True, thought=thought)
        if parsed.action == "invalid":
            return Step(
                action="invalid",
                observation=protocol.CORRECTION,
                is_terminal=False,
                thought=thought,
            )
        found = await self._retriever.search(parsed.content, self._top_k)
        return Step(
            action="search",
            observation=protocol.render_observation([(p.title, p.text) for p in found]),
            is_terminal=False,
            thought=thought,
            passages=tuple(f"{p.title} {p.text}" for p in found),
        )

    def score(
        self,
        question: Question,
        generated_turns: list[str],
        steps: list[Step],
        stop_reason: StopReason,
    ) -> Outcome:
        """What `reward.answer` gives for the last answer, less the format penalty if any action was
        malformed, plus the format reward if every turn kept the form, plus the retrieval reward if
        any search brought a golden answer.

        Right answer, one malformed action, penalty 0.1 -> reward 0.9. Two malformed ones: also 0.9.
        With retrieval reward 0.5, turns malformed, search (found), answer (right): turns earn
        [-0.1, 0.5, 1].
        """
        answer = protocol.last_answer(generated_turns)
        passages = [passage for step in steps for passage in step.passages]
        earned = self._turn_rewards(question, answer, generated_turns, steps)
        return Outcome(
            reward=float(sum(earned)),
            turn_rewards=tuple(earned) if self._retrieval_reward else None,
            scores={
                "exact_match": rewards.ANSWERS["auto"](answer, question),
                "f1": rewards.f1(answer, question.golden_answers),
                "num_searches": float(sum(step.action == "search" for step in steps)),
                "num_invalid": float(sum(step.action == "invalid" for step in steps)),
                "num_turns": float(len(steps)),
                "think_chars": float(sum(len(step.thought) for step in steps)),
                "retrieved_answer": rewards.contains_answer(passages, _golden_texts(question)),
            },
        )

    def _reward_of(self, answer: str | None, question: Question) -> float:
        """Of the function that reward.answer names, which may be a user's."""
        try:
            return float(self._answer_reward(answer, question))
        except Exception as error:
            name = getattr(self._answer_reward, "__name__", repr(self._answer_reward))
            raise ConfigurationError(
                f"reward.answer: {name} failed for question {question.id!r} ({error}); it must take"
                " the last answer (a str or None) and the Question, and return a number"
            ) from error

    def _turn_rewards(
        self, question: Question, answer: str | None, generated_turns: list[str], steps: list[Step]
    ) -> list[float]:
        """What each turn earned; what the answer and the format earn belongs to the last."""
        earned = [0.0] * len(steps)
        is_malformed = [step.action == "invalid" for step in steps]
        if any(is_malformed):
            earned[is_malformed.index(True)] -= self._format_penalty
        if self._retrieval_reward:
            golden = _golden_texts(question)
            found = [rewards.contains_answer(step.passages, golden) for step in steps]
            if any(found):
                earned[found.index(1.0)] += self._retrieval_reward
        if earned:
            earned[-1] += self._reward_of(answer, question)
            if self._format_reward:
                earned[-1] += self._format_reward * rewards.format_score(
                    generated_turns, thought_is_open=self._prompts.opens_thought
                )
        return earned


def _golden_texts(question: Question) -> tuple[str, ...]:
    """What a passage has to hold: the golden answers, of lettered choices their texts."""
    if not question.choices:
        return question.golden_answers
    letters = {letter.strip().upper() for letter in question.golden_answers}
    return tuple(c for i, c in enumerate(question.choices) if chr(65 + i) in letters)
