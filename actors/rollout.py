"""One episode, token in and token out.

    prompt ids ──> complete ──> decode ──> environment.step ──> encode observation ──┐
        ^                                                                            │ appended
        └────────────────────────────────────────────────────────────────────────────┘

The ids are the truth and only ever grow: text is decoded from them to be understood, never encoded
again. An observation is encoded once, when it is made.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import tenacity

from leeway.actors.config import PolicyConfig, SearchConfig
from leeway.actors.counters import EpisodeInFlight, Stage
from leeway.actors.environment import Environment, Question, Step
from leeway.actors.failures import EngineError, QuestionTooLong
from leeway.actors.policy import Completion, CompletionRequest, Policy
from leeway.actors.tokens import Tokens
from leeway.actors.turnstile import Turnstile
from leeway.replay import tracing
from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import Action, StopReason, Trajectory, Turn

_ENGINE_ATTEMPTS: Final = 3
"""Tries of one turn. A retry carries the same id and the same ids, so it goes on from the last
completed turn, on another engine if the first one died."""
_STOP_REASONS: Final[dict[Action, StopReason]] = {
    "answer": "answer",
    "search": "turns",
    "invalid": "invalid",
}
"""What a terminal step of each action means for the episode."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an episode, in tokens and turns."""

    max_turns: int
    max_turn_tokens: int
    max_observation_tokens: int
    max_model_len: int
    """Most tokens of a trajectory, however many requests they come in. A turn is only begun with
    room for `max_turn_tokens`: a turn cut by the context would look like a malformed action and be
    punished for it."""

    @classmethod
    def of(cls, search: SearchConfig, policy: PolicyConfig) -> Limits:
        """The limits that two configuration tables set together."""
        limit = search.max_trajectory_tokens
        return cls(
            max_turns=search.max_turns,
            max_turn_tokens=search.max_turn_tokens,
            max_observation_tokens=search.max_observation_tokens,
            max_model_len=policy.max_model_len if limit is None else limit,
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether another turn fits behind `num_tokens`."""
        return num_tokens + self.max_turn_tokens <= self.max_model_len


def check_limits(limits: Limits, environment: Environment, tokens: Tokens) -> None:
    """Raise ConfigurationError for limits under which no episode could be played as configured."""
    num_end = len(tokens.encode(environment.observation_end))
    if limits.max_observation_tokens <= num_end:
        raise ConfigurationError(
            f"search.max_observation_tokens is {limits.max_observation_tokens}, but the closing tag"
            f" alone takes {num_end} tokens; allow a few hundred"
        )
    if limits.max_turn_tokens >= limits.max_model_len:
        raise ConfigurationError(
            f"search.max_turn_tokens is {limits.max_turn_tokens} and a trajectory may have"
            f" {limits.max_model_len} tokens: no turn fits; raise search.max_trajectory_tokens or"
            " policy.max_model_len"
        )


def encode_prompt(
    question: Question, environment: Environment, tokens: Tokens, limits: Limits
) -> list[int]:
    """The ids every episode of `question` starts with. Raises QuestionTooLong if no turn fits."""
    ids = tokens.encode(environment.prompt(question))
    if not limits.has_room(len(ids)):
        raise QuestionTooLong(
            f"question {question.id!r}: its prompt has {len(ids)} tokens, a turn of"
            f" search.max_turn_tokens = {limits.max_turn_tokens} does not fit behind it within the"
            f" {limits.max_model_len} of search.max_trajectory_tokens or policy.max_model_len"
        )
    return ids


async def play(
    question: Question,
    policy: Policy,
    environment: Environment,
    tokens: Tokens,
    limits: Limits,
    trajectory_id: str,
    *,
    temperature: float = 1.0,
    priority: int = 0,
    prompt_ids: list[int] | None = None,
    turnstile: Turnstile | None = None,
    in_flight: EpisodeInFlight | None = None,
) -> Trajectory:
    """Play one episode to its end. Raises an EpisodeFailure when it cannot become training data.

    `priority` is that of its requests. `prompt_ids` are the question's from `encode_prompt`,
    encoded once for all siblings; None encodes them here. Episodes of one event loop share a
    `turnstile`; one that plays alone needs none. `in_flight` is told where the episode is.
    """
    started = time.perf_counter()
    turnstile = turnstile or Turnstile()
    await turnstile.enter()
    if prompt_ids is None:
        prompt_ids = encode_prompt(question, environment, tokens, limits)
    episode = _Episode(prompt_ids.copy())
    stop_reason: StopReason | None = None
    while stop_reason is None:
        turns_left = limits.max_turns - len(episode.turns) - 1
        with tracing.span("rollout.turn", {"leeway.turn": len(episode.turns)}):
            request = _request(trajectory_id, episode, environment, limits, temperature, priority)
            _enter(in_flight, "generating")
            completion = await _complete(policy, request)
            _enter(in_flight, "searching")
            ticket = await turnstile.enter()
            generated = tokens.decode(completion.token_ids)
            step = await environment.step(question, generated, turns_left)
            await turnstile.enter_again(ticket)
        observed: list[int] = []
        if step.is_terminal or turns_left == 0:
            stop_reason = _STOP_REASONS[step.action]
        else:
            observed = _observation_ids(step.observation, environment, tokens, limits)
            if not limits.has_room(
                len(episode.token_ids) + len(completion.token_ids) + len(observed)
            ):
                observed, stop_reason = [], "tokens"
                step = msgspec.structs.replace(step, passages=())  # nobody was shown them
        episode.append(completion, generated, step, observed)
    outcome = environment.score(question, episode.generated, episode.steps, stop_reason)
    return Trajectory(
        trajectory_id=trajectory_id,
        token_ids=np.asarray(episode.token_ids, np.int32),
        turns=tuple(episode.turns),
        logprobs=np.asarray(episode.logprobs, np.float32),
        versions=np.asarray(episode.versions, np.int32),
        reward=outcome.reward,
        stop_reason=stop_reason,
        scores={**outcome.scores, "think_tokens": float(_num_think(episode, tokens))},
        duration_s=time.perf_counter() - started,
        turn_rewards=outcome.turn_rewards,
    )


def _request(
    trajectory_id: str,
    episode: _Episode,
    environment: Environment,
    limits: Limits,
    temperature: float,
    priority: int,
) -> CompletionRequest:
    return CompletionRequest(
        request_id=f"{trajectory_id}-{len(episode.turns)}",
        prompt_ids=episode.token_ids.copy(),
        max_tokens=limits.max_turn_tokens,
        stop=environment.stop,
        temperature=temperature,
        priority=priority,
        traceparent=tracing.traceparent(),
    )


def _enter(in_flight: EpisodeInFlight | None, stage: Stage) -> None:
    if in_flight is not None:
        in_flight.enter(stage)


@dataclass
class _Episode:
    """What has happened so far. Lists only grow."""

    token_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    generated: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def append(
        self, completion: Completion, generated: str, step: Step, observed: list[int]
    ) -> None:
        num_generated = len(completion.token_ids)
        self.turns.append(Turn(len(self.token_ids), num_generated, len(observed), step.action))
        self.token_ids += completion.token_ids
        self.token_ids += observed
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.generated.append(generated)
        self.steps.append(step)


def _num_think(episode: _Episode, tokens: Tokens) -> int:
    """Sampled tokens that are reasoning: a turn's tokens less those of the text around its thought.

    "<think>ab</think><search>cd</search>" of 8 tokens, "<think>" 1, "</think><search>cd</search>"
    5 -> 2. Thoughts are most of a turn, so what is around them is encoded in a fifth of the time.
    """
    num_think = 0
    for turn, generated, step in zip(episode.turns, episode.generated, episode.steps, strict=True):
        before, thought, after = generated.partition(step.thought) if step.thought else ("", "", "")
        if thought:
            num_around = len(tokens.encode(before)) + len(tokens.encode(after))
            # Sampled one way and encoded another, the text around may seem longer than the turn.
            num_think += max(0, turn.num_generated - num_around)
        elif step.thought:
            num_think += len(tokens.encode(step.thought))  # put together from several places
    return num_think


def _observation_ids(
    text: str, environment: Environment, tokens: Tokens, limits: Limits
) -> list[int]:
    """The observation's ids, cut before its end: the closing tag stays.

    6 ids of which the last 2 close, limit 5 -> the first 3 and the closing 2.
    """
    ids = tokens.encode(text)
    if len(ids) <= limits.max_observation_tokens:
        return ids
    end = tokens.encode(environment.observation_end)
    return ids[: max(0, limits.max_observation_tokens - len(end))] + end


async def _complete(policy: Policy, request: CompletionRequest) -> Completion:
    """One turn from the policy, tried again when an engine fails, checked before it is used."""
    try:
        completion = await policy.complete(request)
    except EngineError as error:
        completion = await _complete_again(policy, request, error)
    problem = _first_problem(completion, request)
    if problem:
        raise EngineError(f"request {request.request_id}: {problem}")
    return completion


async def _complete_again(
    policy: Policy, request: CompletionRequest, failure: EngineError
) -> Completion:
    """The tries behind the first one, which ended in `failure`.

    The first one is made without tenacity, whose bookkeeping takes 0.15 ms, a third of all that a
    turn may cost.
    """
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(_ENGINE_ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(initial=0.1, max=2.0, jitter=0.1),
        retry=tenacity.retry_if_exception_type(EngineError),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            if attempt.retry_state.attempt_number == 1:
                raise failure
            return await policy.complete(request)
    raise AssertionError("tenacity ends a retry by returning or raising")


def _first_problem(completion: Completion, request: CompletionRequest) -> str | None:
    num = len(completion.token_ids)
    if num == 0:
        return "the completion has no token"
    if len(completion.logprobs) != num or len(completion.versions) != num:
        return (
            f"the completion has {num} tokens, {len(completion.logprobs)} log-probs and"
            f" {len(completion.versions)} versions; the three must be one length"
        )
    if num > request.max_tokens:
        return f"the completion has {num} tokens, max_tokens is {request.max_tokens}"
    if not all(map(math.isfinite, completion.logprobs)):
        t = next(t for t, lp in enumerate(completion.logprobs) if not math.isfinite(lp))
        return f"log-prob of token {t} (id {completion.token_ids[t]}) is {completion.logprobs[t]}"
    return None
