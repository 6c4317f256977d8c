"""The search episode: think, search, read, and answer in the end. Holds the rules, no state."""

from __future__ import annotations

from leeway.actors.config import SearchConfig
from leeway.actors.environment import Outcome, Question, Step
from leeway.actors.search import protocol, rewards
from leeway.actors.search.retriever import Retriever
from leeway.replay.schema import StopReason


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
    ) -> None:
        self._config = config
        self._format_penalty = format_penalty
        self._retrieval_reward = retrieval_reward
        self._retriever = retriever

    def prompt(self, question: Question) -> str:
        """The template with the question in it, the question's own tags made harmless."""
        return self._config.prompt_template.replace(
            "{question}", protocol.defuse(question.question)
        )

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
        found = await self._retriever.search(parsed.content, self._config.top_k)
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
        """Exact match of the last answer, less the format penalty if any action was malformed, plus
        the retrieval reward if any search brought a golden answer.

        Right answer, one malformed action, penalty 0.1 -> reward 0.9. Two malformed ones: also 0.9.
        With retrieval reward 0.5, turns malformed, search (found), answer (right): turns earn
        [-0.1, 0.5, 1].
        """
        answer = protocol.last_answer(generated_turns)
        golden = question.golden_answers
        exact_match = rewards.exact_match(answer, golden)
        num_invalid = sum(step.action == "invalid" for step in steps)
        passages = [passage for step in steps for passage in step.passages]
        earned = self._turn_rewards(steps, golden, exact_match)
        return Outcome(
            reward=float(sum(earned)),
            turn_rewards=tuple(earned) if self._retrieval_reward else None,
            scores={
                "exact_match": exact_match,
                "f1": rewards.f1(answer, golden),
                "num_searches": float(sum(step.action == "search" for step in steps)),
                "num_invalid": float(num_invalid),
                "num_turns": float(len(steps)),
                "think_chars": float(sum(len(step.thought) for step in steps)),
                "retrieved_answer": rewards.contains_answer(passages, golden),
            },
        )

    def _turn_rewards(
        self, steps: list[Step], golden: tuple[str, ...], exact_match: float
    ) -> list[float]:
        """What each turn earned; the answer's reward belongs to the last."""
        earned = [0.0] * len(steps)
        is_malformed = [step.action == "invalid" for step in steps]
        if any(is_malformed):
            earned[is_malformed.index(True)] -= self._format_penalty
        if self._retrieval_reward:
            found = [rewards.contains_answer(step.passages, golden) for step in steps]
            if any(found):
                earned[found.index(1.0)] += self._retrieval_reward
        if earned:
            earned[-1] += exact_match
        return earned
