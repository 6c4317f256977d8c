"""What the rollout worker itself costs a turn: everything around an engine and a retriever that
answer at once.

The worker is the real one, with the real search environment, the bundled tokenizer and 128 groups
of 8 in flight. Instant are three things only:

    engine      hands out turns that were made before: ids, log-probs, versions. It gives way to the
                loop once, so that all episodes are in flight at the same time
    retriever   hands out passages of the bundled corpus, others each time
    replay      grants every slot; what it is given it checks and encodes as the Redis buffer does,
                and throws the bytes away

CPU is that of the whole process, the pieces above and the look at the loop's lag included.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, cast

from leeway.actors.config import (
    DataConfig,
    RolloutConfig,
    SearchConfig,
    corpus_file,
    model_dir,
    train_file,
)
from leeway.actors.environment import Question, Step
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.rollout import Limits
from leeway.actors.search.documents import load_documents
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.questions import QuestionStream, load_questions
from leeway.actors.tokens import Tokens
from leeway.actors.worker import RolloutWorker
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Replay
from leeway.services.bench.loop_lag import loop_lags, percentile_ms
from leeway.services.bench.rollout_pieces import (
    INSTRUCTIONS,
    TOP_K,
    CodecOnly,
    InstantRetriever,
    build_passages,
)

GROUP_SIZE: Final = 8
NUM_EPISODES: Final = 1024
"""In flight at once, as 128 groups."""
TURN_TOKENS: Final = 100
SEARCHES: Final = (1, 2, 3)
"""Of an episode, in turn; an answer follows, so an episode has 2 to 4 turns."""
NUM_SCRIPTS: Final = 192
"""Episodes made before; siblings play different ones."""
WINDOW_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Overhead:
    """What was measured; the rates are medians over the windows."""

    turns_per_s: float
    cpu_ms_per_turn: float
    lag_p99_ms: float
    """Of all windows: how late the event loop woke who had asked to be woken."""
    lag_max_ms: float
    num_in_flight: int
    """Most episodes that were in flight at a look."""
    num_turns: int
    """Of all windows."""
    turn_tokens: float
    observation_tokens: float
    prompt_tokens: float


def measure(*, num_windows: int, turns_per_window: int) -> Overhead:
    """Play until the counts are full, in an event loop of its own."""
    with asyncio.Runner() as runner:
        return runner.run(_measure(num_windows, turns_per_window))


async def _measure(num_windows: int, turns_per_window: int) -> Overhead:
    replay, environment = CodecOnly(), _build_environment()
    worker = _build_worker(InstantPolicy(_scripts()), environment, replay)
    look = _Look(worker)
    running, looking = asyncio.create_task(worker.run()), asyncio.create_task(look.run())
    try:
        # One wave first: it fills the caches, and groups no longer walk in step.
        await _until(environment, 3 * NUM_EPISODES, running)
        look.lags_s.clear()
        windows = [
            await _window(environment, running, turns_per_window) for _ in range(num_windows)
        ]
        return _overhead(windows, replay, look)
    finally:
        looking.cancel()
        running.cancel()
        await asyncio.gather(looking, running, return_exceptions=True)


@dataclass(frozen=True)
class _Window:
    num_turns: int
    cpu_s: float
    wall_s: float


async def _window(
    environment: CountingEnvironment, running: asyncio.Task[None], num_turns: int
) -> _Window:
    before, cpu, wall = environment.num_turns, time.process_time(), time.perf_counter()
    await _until(environment, before + num_turns, running)
    return _Window(
        environment.num_turns - before, time.process_time() - cpu, time.perf_counter() - wall
    )


async def _until(
    environment: CountingEnvironment, num_turns: int, running: asyncio.Task[None]
) -> None:
    """Wait for the count; raises what ended the worker, TimeoutError after a while."""
    async with asyncio.timeout(WINDOW_TIMEOUT_S):
        while environment.num_turns < num_turns:
            if running.done():
                running.result()
            await asyncio.sleep(0.01)


class CountingEnvironment(SearchEnvironment):
    """The search environment; counts turns where they are worked on. The engine has answered a
    thousand of them long before."""

    num_turns = 0

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """See SearchEnvironment."""
        self.num_turns += 1
        return await super().step(question, generated, turns_left)


def _overhead(windows: Sequence[_Window], replay: CodecOnly, look: _Look) -> Overhead:
    return Overhead(
        turns_per_s=median(w.num_turns / w.wall_s for w in windows),
        cpu_ms_per_turn=median(1e3 * w.cpu_s / w.num_turns for w in windows),
        lag_p99_ms=percentile_ms(look.lags_s, 0.99),
        lag_max_ms=percentile_ms(look.lags_s, 1.0),
        num_in_flight=look.most_in_flight,
        num_turns=sum(w.num_turns for w in windows),
        turn_tokens=replay.num_generated / replay.num_turns,
        observation_tokens=replay.num_observed / replay.num_observations,
        prompt_tokens=replay.num_prompt / replay.num_episodes,
    )


class _Look:
    """Sees every few milliseconds how late it was woken, and how many episodes are in flight."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self.lags_s: list[float] = []
        self.most_in_flight = 0

    async def run(self) -> None:
        async for lag_s in loop_lags():
            self.lags_s.append(lag_s)
            in_flight = self._worker.snapshot().num_episodes_in_flight
            self.most_in_flight = max(self.most_in_flight, in_flight)


class InstantPolicy:
    """A Policy that knows every turn before it is asked."""

    def __init__(self, scripts: Sequence[Sequence[Completion]]) -> None:
        self._scripts = scripts

    async def complete(self, request: CompletionRequest) -> Completion:
        """The next turn of the episode that the request's id names: slot, sibling, turn."""
        await asyncio.sleep(0)
        slot, sibling, turn = request.request_id.rsplit("-", 2)
        episode = int(slot) * GROUP_SIZE + int(sibling)
        return self._scripts[episode % len(self._scripts)][int(turn)]

    async def version(self) -> PolicyVersion:
        """Always the base model."""
        return PolicyVersion(0)

    async def close(self) -> None:
        """Nothing is open."""


def _build_environment() -> CountingEnvironment:
    passages = build_passages(Tokens.load(model_dir("bundled")))
    search = SearchConfig(prompt_template=INSTRUCTIONS, top_k=TOP_K)
    return CountingEnvironment(search, 0.1, InstantRetriever(passages))


def _build_worker(
    engine: InstantPolicy, environment: CountingEnvironment, replay: CodecOnly
) -> RolloutWorker:
    return RolloutWorker(
        worker_id="bench",
        replay=cast(Replay, replay),
        policy=engine,
        environment=environment,
        tokens=Tokens.load(model_dir("bundled")),
        questions=QuestionStream(load_questions(train_file(DataConfig())), seed=0),
        config=RolloutConfig(
            group_size=GROUP_SIZE, max_groups_in_flight=NUM_EPISODES // GROUP_SIZE
        ),
        limits=Limits(
            max_turns=max(SEARCHES) + 1,
            max_turn_tokens=128,
            max_observation_tokens=500,
            max_model_len=4096,
        ),
        oldest_version=engine.version,
    )


def _scripts() -> list[list[Completion]]:
    """Episodes whose turns have TURN_TOKENS tokens: thoughts in the corpus' words, then a search
    or, in the end, an answer."""
    tokens, rng = Tokens.load(model_dir("bundled")), random.Random(0)
    thoughts = _thoughts(tokens)
    questions = load_questions(train_file(DataConfig()))[:NUM_SCRIPTS]
    scripts: list[list[Completion]] = []
    for question, num_searches in zip(questions, itertools.cycle(SEARCHES), strict=False):
        query = " ".join(question.question.split()[:6])
        ends = [f"<search>{query}</search>"] * num_searches
        ends.append(f"<answer>{question.golden_answers[0]}</answer>")
        scripts.append([_completion(tokens, next(thoughts), end, rng) for end in ends])
    return scripts


def _thoughts(tokens: Tokens) -> Iterator[list[int]]:
    """Endless text of the corpus, in pieces that are long enough for a turn."""
    for document in itertools.cycle(load_documents(corpus_file(SearchConfig()))):
        ids = tokens.encode(document.text)
        if len(ids) >= TURN_TOKENS:
            yield ids


def _completion(tokens: Tokens, thought: list[int], end: str, rng: random.Random) -> Completion:
    opening, closing = tokens.encode("<think>"), tokens.encode(f"</think>{end}")
    ids = [*opening, *thought[: TURN_TOKENS - len(opening) - len(closing)], *closing]
    return Completion(
        token_ids=ids,
        logprobs=[-rng.expovariate(2.0) for _ in ids],
        versions=[0] * len(ids),
        finish="stop",
    )
