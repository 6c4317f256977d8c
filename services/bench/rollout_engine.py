"""The rollout worker on a real engine, against that engine alone with the same work.

    rollout    the real worker: 128 episodes in flight in groups of 8, three turns of 64 tokens,
               two observations of 256 tokens between them, from questions not played before
    waves      the engine itself: the first turns of 128 episodes at once, then the second ones,
               then the third ones. Prompts and observations are those that the rollout has just
               had, with another first token each, so that no prefix is found in the cache that
               somebody else computed

Every turn must have one length, whatever the model says. So the model is the bundled one without an
end-of-sequence token, the environment's stop string is one that it cannot write, and whether a turn
is a search or the answer is decided by its number alone. Text is decoded, parsed, rendered and
encoded all the same.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from leeway.actors.config import (
    DataConfig,
    RolloutConfig,
    SearchConfig,
    model_dir,
    train_file,
)
from leeway.actors.environment import Outcome, Question, Step
from leeway.actors.policy import CompletionRequest, Policy
from leeway.actors.rollout import Limits
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.questions import QuestionStream, load_questions
from leeway.actors.tokens import Tokens
from leeway.actors.worker import RolloutWorker
from leeway.replay.schema import StopReason
from leeway.replay.store import Replay
from leeway.services.bench.loop_lag import loop_lags
from leeway.services.bench.rollout_load import (
    GROUP_SIZE,
    NEVER,
    NUM_TURNS,
    PASS_TIMEOUT_S,
    Load,
    Script,
    next_prompts,
    waves,
)
from leeway.services.bench.rollout_pieces import (
    INSTRUCTIONS,
    TOP_K,
    CodecOnly,
    InstantRetriever,
    build_passages,
)


class FixedTurns:
    """The search environment with every turn's action decided by its number: searches, then an
    answer. The model's text is decoded and scored, but what it asks for is not done."""

    stop = (NEVER,)

    def __init__(self, search: SearchEnvironment) -> None:
        self._search = search
        self.observation_end = search.observation_end

    def prompt(self, question: Question) -> str:
        """See SearchEnvironment."""
        return self._search.prompt(question)

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        """A search for the question's own words, or an answer on the last turn."""
        action = "<search>words</search>" if turns_left else "<answer>words</answer>"
        return await self._search.step(question, f"<think>words</think>{action}", turns_left)

    def score(
        self,
        question: Question,
        generated_turns: list[str],
        steps: list[Step],
        stop_reason: StopReason,
    ) -> Outcome:
        """See SearchEnvironment."""
        return self._search.score(question, generated_turns, steps, stop_reason)


@dataclass(frozen=True)
class Pass:
    """One side's way through a repeat."""

    wall_s: float
    cpu_s: float
    """Of this process: the worker and the engine's front end. The engine itself computes in another
    process, or, the torch one, on a thread of this."""
    lags_s: list[float]
    """How late the event loop woke who had asked to be woken."""


class RolloutSide:
    """The worker's side of the race."""

    def __init__(self, policy: Policy, load: Load) -> None:
        tokens = Tokens.load(model_dir("bundled"))
        search = SearchConfig(prompt_template=INSTRUCTIONS, top_k=TOP_K)
        self._policy = policy
        self._load = load
        self._tokens = tokens
        self._environment = FixedTurns(
            SearchEnvironment(search, 0.1, InstantRetriever(build_passages(tokens)))
        )
        self._questions = QuestionStream(load_questions(train_file(DataConfig())), seed=0)

    async def play(self) -> tuple[Pass, list[Script]]:
        """Play `num_episodes`; with it, what was played for the other sides."""
        replay = CodecOnly(self._load.num_episodes // GROUP_SIZE, keeps_groups=True)
        worker = self._build_worker(replay)
        with Stopwatch() as watch:
            running = asyncio.create_task(worker.run())
            filled = asyncio.create_task(replay.filled.wait())
            try:
                async with asyncio.timeout(PASS_TIMEOUT_S):
                    await asyncio.wait({running, filled}, return_when=asyncio.FIRST_COMPLETED)
                took = watch.read()
                if running.done():
                    running.result()
            finally:
                running.cancel()
                filled.cancel()
                await asyncio.gather(running, filled, return_exceptions=True)
        assert replay.num_generated == self._load.num_tokens, "a turn has another length"
        return took, [Script.of(t) for group in replay.groups for t in group.trajectories]

    def _build_worker(self, replay: CodecOnly) -> RolloutWorker:
        load = self._load
        return RolloutWorker(
            worker_id="bench",
            replay=cast(Replay, replay),
            policy=self._policy,
            environment=self._environment,
            tokens=self._tokens,
            questions=self._questions,
            config=RolloutConfig(
                group_size=GROUP_SIZE,
                max_groups_in_flight=load.num_in_flight // GROUP_SIZE,
                episode_timeout_s=PASS_TIMEOUT_S,
            ),
            limits=Limits(
                max_turns=NUM_TURNS,
                max_turn_tokens=load.turn_tokens,
                max_observation_tokens=load.observation_tokens,
                max_model_len=load.policy.max_model_len,
            ),
            oldest_version=self._policy.version,
        )


async def in_waves(policy: Policy, scripts: Sequence[Script], load: Load) -> Pass:
    """The engine alone: the same turns, as many at a time, no rollout between them."""

    async def turn(name: str, ids: list[int]) -> list[int]:
        request = CompletionRequest(
            request_id=name, prompt_ids=ids, max_tokens=load.turn_tokens, stop=(NEVER,)
        )
        return (await policy.complete(request)).token_ids

    with Stopwatch() as watch:
        async with asyncio.timeout(PASS_TIMEOUT_S):
            for wave in waves(scripts, load):
                prompts = [script.prompt_ids for script in wave]
                for k in range(NUM_TURNS):
                    sampled = await asyncio.gather(
                        *(turn(f"wave-{k}-{i}", ids) for i, ids in enumerate(prompts))
                    )
                    prompts = next_prompts(prompts, sampled, wave, k)
        return watch.read()


class Stopwatch:
    """Wall and CPU time, and the loop's lag, from entry to `read`; within an event loop."""

    def __enter__(self) -> Self:
        self._looking = asyncio.create_task(self._look())
        self._lags_s: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def read(self) -> Pass:
        """The time so far."""
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Pass(wall_s, cpu_s, self._lags_s)

    def __exit__(self, *error: object) -> None:
        self._looking.cancel()

    async def _look(self) -> None:
        async for lag_s in loop_lags():
            self._lags_s.append(lag_s)


@contextmanager
def endless_model() -> Iterator[Path]:
    """The bundled model without an end-of-sequence token, in a folder that goes again."""
    with tempfile.TemporaryDirectory(prefix="leeway-endless-") as directory:
        folder = Path(directory) / "model"
        shutil.copytree(model_dir("bundled"), folder)
        for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
            path = folder / name
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings[key] = None  # left out, it would be what the architecture has by default
            path.write_text(json.dumps(settings), encoding="utf-8")
        yield folder
