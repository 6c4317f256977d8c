"""Decoding: TorchPolicy against transformers' `generate`, on the first and second turns of real
episodes.

Episodes come in groups of siblings, as training plays them. Both sides sample the same prompts with
the same stop strings and limits, and only tokens up to a row's stop are counted. TorchPolicy gets
all requests at once and starts each pass with nothing in its cache that it could use again; within
a pass, siblings and turns share what their prompts have in common. `generate` is measured on two
kinds of left-padded batches:

    mixed     turns mixed, as the requests of asynchronous rollouts come; the speedup is over these
    lockstep  first turns, then second turns, as a loop would play them that waits for every row
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from leeway.actors.config import (
    DataConfig,
    PolicyConfig,
    RolloutConfig,
    SearchConfig,
    corpus_file,
    held_out_file,
    model_dir,
)
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.rollout import Limits, play
from leeway.actors.search.documents import load_documents
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.index import Bm25Index
from leeway.actors.search.questions import load_questions
from leeway.actors.search.retriever import LocalRetriever
from leeway.actors.stops import StopFinder
from leeway.actors.tokens import Tokens
from leeway.actors.torch_policy import TorchPolicy
from leeway.replay.schema import PolicyVersion
from leeway.services.bench.result import BenchResult
from leeway.services.bench.timing import interleaved

BATCH: Final = 64
"""Rows of one `generate` call, and slots of TorchPolicy."""
NUM_TURNS: Final = 2


def run(*, quick: bool) -> BenchResult:
    """Tokens per second of both, measured in turns, with as many threads as a replica has."""
    model, config = model_dir("bundled"), PolicyConfig(backend="torch", max_num_seqs=BATCH)
    torch.set_num_threads(config.num_threads)
    with asyncio.Runner() as runner:
        policy = runner.run(TorchPolicy.start(model, config, seed=0, version=PolicyVersion(0)))
        requests = runner.run(_collect(policy, config, model, 6 if quick else 24))
        mixed = random.Random(0).sample(requests, len(requests))
        cases = [
            _measure(name, _Ours(runner, policy, mixed), _Generate(model, batches), quick)
            for name, batches in (
                ("mixed", _batches([mixed])),
                ("lockstep", _batches(_by_turn(requests))),
            )
        ]
        runner.run(policy.close())
    return _result(cases, len(requests))


@dataclass(frozen=True)
class _Case:
    name: str
    tokens_per_s: float
    generate_tokens_per_s: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.generate_tokens_per_s


def _measure(name: str, ours: _Ours, generate: _Generate, quick: bool) -> _Case:
    ours_s, generate_s = interleaved(ours, generate, 2 if quick else 5)
    return _Case(name, median(ours.num_tokens) / ours_s, median(generate.num_tokens) / generate_s)


class _Ours:
    """All requests at once, as rollouts send them."""

    def __init__(
        self, runner: asyncio.Runner, policy: TorchPolicy, requests: list[CompletionRequest]
    ) -> None:
        self._runner = runner
        self._policy = policy
        self._requests = requests
        self.num_tokens: list[int] = []
        """Tokens of each pass."""

    def __call__(self) -> None:
        self.num_tokens.append(self._runner.run(self._pass()))

    async def _pass(self) -> int:
        # What an earlier pass left in the cache is of older weights now.
        self._policy.load({}, PolicyVersion(await self._policy.version() + 1))
        done = await asyncio.gather(*(self._policy.complete(r) for r in self._requests))
        return sum(len(completion.token_ids) for completion in done)


class _Generate:
    """The same requests in left-padded batches."""

    def __init__(self, model: Path, batches: list[list[CompletionRequest]]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = "cuda" if torch.cuda.is_available() else "cpu"
        network: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        self._network: Any = network.to(device).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._tokens = Tokens.load(model)
        self._stops = StopFinder(self._tokens, network.config.vocab_size)
        self._batches = batches
        self._device = device
        self.num_tokens: list[int] = []
        """Useful tokens of each pass."""

    def __call__(self) -> None:
        self.num_tokens.append(sum(self._generate(batch) for batch in self._batches))

    @torch.inference_mode()
    def _generate(self, batch: list[CompletionRequest]) -> int:
        width = max(len(request.prompt_ids) for request in batch)
        paddings = [width - len(request.prompt_ids) for request in batch]
        ids = [[0] * n + r.prompt_ids for n, r in zip(paddings, batch, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in paddings]
        request = batch[0]
        sampled = self._network.generate(
            torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=request.max_tokens,
            stop_strings=list(request.stop),
            tokenizer=self._tokenizer,
            pad_token_id=0,
            use_cache=True,
        )
        return sum(self._num_useful(row, request.stop) for row in sampled[:, width:].tolist())

    def _num_useful(self, ids: list[int], stop: tuple[str, ...]) -> int:
        for n in range(1, len(ids) + 1):
            if ids[n - 1] == self._tokens.eos_id or self._stops.is_complete(ids[:n], stop):
                return n
        return len(ids)


class _Recorder:
    """A Policy that passes requests on and keeps them."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._policy = policy
        self.requests: list[CompletionRequest] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        return await self._policy.complete(request)

    async def version(self) -> PolicyVersion:
        return await self._policy.version()

    async def close(self) -> None:
        """The policy is its owner's."""


async def _collect(
    policy: TorchPolicy, config: PolicyConfig, model: Path, num_groups: int
) -> list[CompletionRequest]:
    """First and second turns of real episodes over the bundled held-out questions."""
    search, tokens = SearchConfig(), Tokens.load(model)
    retriever = LocalRetriever(Bm25Index(load_documents(corpus_file(search))))
    environment = SearchEnvironment(search, 0.0, retriever)
    questions = load_questions(held_out_file(DataConfig()))
    random.Random(0).shuffle(questions)
    recorder, limits = _Recorder(policy), Limits.of(search, config)
    await asyncio.gather(
        *(
            play(question, recorder, environment, tokens, limits, f"{question.id}-{sibling}")
            for question in questions[:num_groups]
            for sibling in range(RolloutConfig().group_size)
        )
    )
    return [request for turn in _by_turn(recorder.requests)[:NUM_TURNS] for request in turn]


def _by_turn(requests: list[CompletionRequest]) -> list[list[CompletionRequest]]:
    """A request's id ends with the number of its turn."""
    turns: dict[int, list[CompletionRequest]] = {}
    for request in requests:
        turns.setdefault(int(request.request_id.rpartition("-")[2]), []).append(request)
    return [turns[turn] for turn in sorted(turns)]


def _batches(parts: list[list[CompletionRequest]]) -> list[list[CompletionRequest]]:
    return [part[i : i + BATCH] for part in parts for i in range(0, len(part), BATCH)]


def _result(cases: list[_Case], num_requests: int) -> BenchResult:
    mixed, lockstep = cases
    return BenchResult(
        name="decode",
        columns=("batches of generate", "generate tokens/s", "TorchPolicy tokens/s", "speedup"),
        rows=tuple(
            (c.name, f"{c.generate_tokens_per_s:.0f}", f"{c.tokens_per_s:.0f}", f"{c.speedup:.1f}")
            for c in cases
        ),
        keys={
            "speedup": round(mixed.speedup, 2),
            "speedup_lockstep": round(lockstep.speedup, 2),
            "tokens_per_s": round(mixed.tokens_per_s, 1),
            "generate_tokens_per_s": round(mixed.generate_tokens_per_s, 1),
            "num_requests": num_requests,
            "num_threads": torch.get_num_threads(),
        },
    )
