"""The decoder against transformers, and what TorchPolicy builds on it."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from leeway.actors.config import PolicyConfig, bundled_dir
from leeway.actors.decoder import Decoder, Feed, Sampled, sample
from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.search.protocol import STOP, TAGS
from leeway.actors.slots import MIN_PREFIX_TOKENS, Prefix, Slots
from leeway.actors.stops import StopFinder
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.actors.torch_policy import TorchPolicy
from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import PolicyVersion
from tests.unit.small_models import (
    CONFIGS,
    build_model,
    check_log_probs,
    check_mixed_rows,
    oracle,
    random_rows,
)

MAX_LEN = 96


# ---- the network


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_log_probs_are_those_of_transformers(name: str):
    model = build_model(name)
    check_log_probs(model, Decoder(model, num_slots=4, max_len=MAX_LEN))


@torch.inference_mode()
def test_rows_of_any_length_and_start_go_through_together():
    model = build_model()
    check_mixed_rows(model, Decoder(model, num_slots=4, max_len=MAX_LEN))


@torch.inference_mode()
def test_a_copied_beginning_serves_as_if_computed():
    model, ids = build_model(), random_rows()[2]
    decoder = Decoder(model, num_slots=2, max_len=MAX_LEN)
    decoder.logits([Feed(0, 0, ids[:30])])
    decoder.copy(0, 1, 25)
    logits = decoder.logits([Feed(1, 25, ids[25:])])
    torch.testing.assert_close(logits[0].log_softmax(-1), oracle(model, ids)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-tied", "llama-biased", "qwen3"])
@torch.inference_mode()
def test_weights_that_the_module_loads_are_used_at_once(name: str):
    model, other, ids = build_model(name), build_model(name, seed=1), random_rows()[1]
    decoder = Decoder(model, num_slots=1, max_len=MAX_LEN)
    model.load_state_dict({n: p.clone() for n, p in other.named_parameters()}, strict=False)
    logits = decoder.logits([Feed(0, 0, ids)])
    torch.testing.assert_close(logits[0].log_softmax(-1), oracle(other, ids)[-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(oracle(model, ids), oracle(other, ids))


def test_an_architecture_that_is_not_known_is_refused_by_name():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=97))
    with pytest.raises(ConfigurationError, match=r"'gpt2'; set policy\.backend = \"vllm\""):
        Decoder(model, num_slots=1, max_len=MAX_LEN)


def test_a_machine_that_cannot_compile_the_kernels_is_told_so(monkeypatch: pytest.MonkeyPatch):
    decoder = Decoder(build_model(), num_slots=1, max_len=MAX_LEN)

    def fail(*tensors: torch.Tensor) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(decoder, "static_step", fail)
    reason = "Failed to find C compiler. Please specify via CC environment variable."
    with pytest.raises(ConfigurationError, match=r"needs Triton and a C compiler.*install"):
        decoder._compile()
    reason = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder._compile()


def test_a_sliding_window_is_refused_unless_no_sequence_reaches_it():
    model = build_model("mistral", sliding_window=50)
    Decoder(model, num_slots=1, max_len=50)
    with pytest.raises(ConfigurationError, match="sliding window of 50"):
        Decoder(model, num_slots=1, max_len=51)


def test_sampling_follows_the_softmax_and_temperature_zero_the_mode():
    logits_BV = torch.tensor([[1.0, 3.0, 2.0]]).expand(20_000, 3)
    uniform = torch.rand(logits_BV.shape, generator=torch.Generator().manual_seed(0))
    token_B, lp_B = sample(logits_BV, torch.ones(20_000), uniform)
    share_V = torch.bincount(token_B, minlength=3) / 20_000
    # softmax([1, 3, 2]); four standard errors of a share of 0.67 are 0.013
    torch.testing.assert_close(share_V, torch.tensor([0.090, 0.665, 0.245]), atol=0.014, rtol=0)
    assert lp_B[token_B == 1][0].item() == pytest.approx(-0.4076, abs=1e-4)
    greedy_B, lp_B = sample(logits_BV[:9], torch.zeros(9), uniform[:9])
    assert greedy_B.tolist() == [1] * 9
    assert lp_B[0].item() == pytest.approx(-0.4076, abs=1e-4)


# ---- slots

LONG = list(range(20))
V0, V1 = PolicyVersion(0), PolicyVersion(1)


def test_the_next_turn_gets_the_slot_of_the_turn_before():
    slots = Slots(3, 64)
    assert [slots.take([7] * 20, V0), slots.take(LONG, V0)] == [0, 1]
    slots.release(1, [*LONG, 50, 51], V0)
    turn = [*LONG, 50, 51, 60, 61]
    prefix = slots.longest_prefix(turn, V0, pending=())
    assert prefix == Prefix(slot=1, num_tokens=22)
    assert slots.take(turn, V0, prefix) == 1
    # A slot in use is copied from.
    assert slots.longest_prefix([*turn, 1], V0, pending=()) == Prefix(1, 24)
    assert slots.take([*turn, 1], V0, Prefix(1, 24)) == 2


def test_a_prompt_that_stands_whole_still_leaves_its_last_token_to_compute():
    slots = Slots(1, 64)
    slots.release(slots.take(LONG, V0), LONG, V0)
    assert slots.longest_prefix(LONG, V0, pending=()) == Prefix(0, 19)


@pytest.mark.parametrize("computed_by", [V0, None])
def test_other_versions_and_mixtures_are_never_reused(computed_by: PolicyVersion | None):
    slots = Slots(2, 64)
    slots.release(slots.take(LONG, V0), LONG, computed_by)
    assert slots.longest_prefix(LONG, V1, pending=()) is None


def test_a_common_beginning_of_few_tokens_is_not_worth_a_copy():
    slots = Slots(1, 64)
    slots.take(LONG, V0)
    enough = [*LONG[:MIN_PREFIX_TOKENS], 99]
    assert slots.longest_prefix(enough, V0, pending=()) == Prefix(0, MIN_PREFIX_TOKENS)
    assert slots.longest_prefix(enough[1:], V0, pending=()) is None


def test_only_a_sibling_waits_for_what_is_yet_to_be_computed():
    slots = Slots(2, 64)
    slots.take(LONG, V0)
    other = [*LONG[:-1], 98, 99]
    assert slots.longest_prefix(other, V0, pending=()) == Prefix(0, 19)
    assert slots.longest_prefix(other, V0, pending={0}) is None
    assert slots.longest_prefix(LONG, V0, pending={0}) == Prefix(0, 19)


def test_of_equal_beginnings_one_that_is_computed_already_wins():
    slots = Slots(3, 64)
    slots.take(LONG, V0), slots.take(LONG, V0)
    assert slots.longest_prefix(LONG, V0, pending={0}) == Prefix(1, 19)
    assert slots.longest_prefix(LONG, V0, pending={1}) == Prefix(0, 19)


# ---- stop strings


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, TAGS)
    return Tokens.load(folder)


STOPS = [STOP, ("ab", "b€"), ("\n\n",), ("€",), (" x",), ("> <",), ()]


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("kind", ["bytes", "bundled"])
def test_no_stop_string_is_missed_however_its_tokens_fall(
    stop: tuple[str, ...], kind: str, byte_tokens: Tokens
):
    tokens = byte_tokens if kind == "bytes" else Tokens.load(bundled_dir() / "model")
    finder, rng = StopFinder(tokens, tokens.vocab_size), random.Random(0)
    pieces = [*stop, "a", "b", "x ", "€", "\n", "</sea", "rch>", "</", "answer", ">", " "]
    for _ in range(60):
        text = "".join(rng.choices(pieces, k=12))
        ids = tokens.encode(text[:5]) + tokens.encode(text[5:9]) + tokens.encode(text[9:])
        ids.insert(rng.randrange(len(ids)), rng.randrange(tokens.vocab_size))
        lengths = range(1, len(ids) + 1)
        first = next((n for n in lengths if finder.is_complete(ids[:n], stop)), None)
        scanned = [n for n in lengths if any(s in tokens.decode(ids[:n]) for s in stop)]
        assert first == (scanned[0] if scanned else None)


# ---- the policy


class Playground:
    """A policy over a tiny model whose vocabulary is the byte tokenizer's."""

    def __init__(self, tokens: Tokens, **config: int) -> None:
        self.tokens = tokens
        self.model = build_model(vocab_size=tokens.vocab_size)
        settings = {"max_model_len": MAX_LEN, "max_num_seqs": 4, **config}
        self.policy = TorchPolicy(
            self.model, tokens, PolicyConfig(backend="torch", **settings), seed=0, version=V0
        )
        self.fed: list[Feed] = []
        logits = self.policy._decoder.logits

        def watched(feeds: list[Feed]) -> torch.Tensor:
            self.fed += [feed for feed in feeds if len(feed.ids) > 1]
            return logits(feeds)

        self.policy._decoder.logits = watched  # type: ignore[method-assign]

    async def complete(self, prompt_ids: list[int], max_tokens: int = 8, **more: Any) -> Completion:
        request = {"request_id": "r", "temperature": 0.0, **more}
        return await self.policy.complete(
            CompletionRequest(prompt_ids=prompt_ids, max_tokens=max_tokens, **request)
        )

    def check(self, prompt_ids: list[int], completion: Completion) -> None:
        """The log-probs are those of the model as it is now."""
        ids = completion.token_ids
        lp_TV = oracle(self.model, prompt_ids + ids)[len(prompt_ids) - 1 : -1]
        expected = lp_TV.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture
async def playground(byte_tokens: Tokens) -> AsyncIterator[Playground]:
    ground = Playground(byte_tokens)
    yield ground
    await ground.policy.close()


async def test_rows_that_decode_together_have_the_log_probs_they_have_alone(playground: Playground):
    prompts = [row for row in random_rows(200) for _ in range(3)]
    completions = await asyncio.gather(
        *(playground.complete(prompt, temperature=1.0) for prompt in prompts)
    )
    assert len({tuple(completion.token_ids) for completion in completions}) > 3
    for prompt, completion in zip(prompts, completions, strict=True):
        playground.check(prompt, completion)


async def test_the_next_turn_computes_only_what_is_new(playground: Playground):
    prompt = random_rows(200)[1]
    first = await playground.complete(prompt)
    turn = [*prompt, *first.token_ids, 5, 6, 7]
    second = await playground.complete(turn)
    # The last sampled token was never fed, so it is computed with the observation.
    start = len(prompt) + len(first.token_ids) - 1
    assert [(feed.start, len(feed.ids)) for feed in playground.fed] == [(0, 17), (start, 4)]
    playground.check(turn, second)


async def test_what_a_burst_samples_behind_the_end_of_a_row_is_dropped(playground: Playground):
    prompt = random_rows(200)[1]
    alone = await playground.complete(prompt)
    step = playground.policy._prefill_step

    def burst(feeds: list[Feed], temperatures: list[float]) -> list[Sampled]:
        sampled: list[Sampled] = []
        for _ in range(3):
            sampled += step(feeds, temperatures)
            following = zip(feeds, sampled[-1].tokens, strict=True)
            feeds = [Feed(feed.slot, feed.start + 1, [token]) for feed, token in following]
        return sampled

    playground.policy._decode_step = burst  # type: ignore[assignment]
    # 1 and 8 are no multiples of 3 beside the first token.
    short, long = await asyncio.gather(
        playground.complete(prompt, max_tokens=1), playground.complete(prompt)
    )
    assert [short.token_ids, long.token_ids] == [alone.token_ids[:1], alone.token_ids]
    turn = [*prompt, *long.token_ids, 5, 6]
    playground.check(turn, await playground.complete(turn))


async def test_what_an_older_version_computed_of_a_prompt_is_not_reused(playground: Playground):
    prompt, policy = random_rows(200)[1], playground.policy
    await playground.complete(prompt)
    step = policy._decode_step

    def swap_first(feeds: list[Feed], temperatures: list[float]) -> list[Sampled]:
        # As if weights had changed between a row's beginning and its first token.
        if policy._version == V0:
            policy._version = V1
            policy._slots.expire()
        return step(feeds, temperatures)

    policy._decode_step = swap_first  # type: ignore[assignment]
    sibling = await playground.complete(prompt)
    assert set(sibling.versions) == {V1}
    playground.fed.clear()
    await playground.complete(prompt)
    assert [(feed.start, len(feed.ids)) for feed in playground.fed] == [(0, 17)]


async def test_siblings_share_their_prompt(playground: Playground):
    prompt = random_rows(200)[1]
    completions = await asyncio.gather(
        *(playground.complete(prompt, temperature=1.0) for _ in range(4))
    )
    assert [(feed.start, len(feed.ids)) for feed in playground.fed] == [(0, 17)]
    for completion in completions:
        playground.check(prompt, completion)


async def test_keys_and_values_of_older_weights_are_not_reused(playground: Playground):
    prompt = random_rows(200)[1]
    await playground.complete(prompt)
    other = build_model(seed=1, vocab_size=playground.tokens.vocab_size)
    playground.policy.load(dict(other.named_parameters()), V1)
    second = await playground.complete([*prompt, 5])
    assert [feed.start for feed in playground.fed] == [0, 0]
    playground.check([*prompt, 5], second)


async def test_a_row_that_saw_two_versions_leaves_nothing_to_reuse(playground: Playground):
    prompt = random_rows(200)[1]
    running = asyncio.create_task(playground.complete(prompt, max_tokens=60))
    while not playground.fed:
        await asyncio.sleep(0)
    playground.policy.load({}, V1)
    first = await running
    assert set(first.versions) == {V0, V1}
    await playground.complete(prompt + first.token_ids[:2])
    assert [feed.start for feed in playground.fed] == [0, 0]


async def test_a_short_request_sent_while_a_long_one_runs_ends_first(playground: Playground):
    ended: list[str] = []

    async def run(name: str, max_tokens: int) -> None:
        await playground.complete([3] * 10, max_tokens)
        ended.append(name)

    long = asyncio.create_task(run("long", 80))
    while not playground.fed:
        await asyncio.sleep(0)
    await asyncio.gather(long, run("short", 2))
    assert ended == ["short", "long"]


async def test_more_requests_than_slots_are_all_answered(playground: Playground):
    prompts = [[i] * 10 for i in range(30)]
    completions = await asyncio.gather(*(playground.complete(prompt) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        playground.check(prompt, completion)


async def test_a_cancelled_request_frees_its_slot(byte_tokens: Tokens):
    ground = Playground(byte_tokens, max_num_seqs=1, max_model_len=4096)
    long = asyncio.create_task(ground.complete([3] * 10, 4000))
    while not ground.fed:
        await asyncio.sleep(0)
    long.cancel()
    completion = await asyncio.wait_for(ground.complete([4] * 10, 4), 10)
    assert len(completion.token_ids) == 4
    await ground.policy.close()


async def test_the_full_context_ends_a_request(playground: Playground):
    prompt = [3] * (MAX_LEN - 3)
    completion = await playground.complete(prompt, 50)
    assert (len(completion.token_ids), completion.finish) == (3, "length")
    playground.check(prompt, completion)


async def test_close_fails_what_runs_and_what_waits(byte_tokens: Tokens):
    ground = Playground(byte_tokens, max_num_seqs=1, max_model_len=4096)
    tasks = [asyncio.create_task(ground.complete([3] * 10, 4000)) for _ in range(3)]
    while not ground.fed:
        await asyncio.sleep(0)
    await ground.policy.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineError] * 3
    with pytest.raises(EngineError, match="closed"):
        await ground.complete([3])


async def test_a_step_that_fails_fails_its_requests_and_no_later_one(playground: Playground):
    decoder = playground.policy._decoder
    works = decoder.logits

    def broken(feeds: list[Feed]) -> torch.Tensor:
        raise RuntimeError("out of memory")

    decoder.logits = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="out of memory"):
        await playground.complete([3] * 10)
    decoder.logits = works  # type: ignore[method-assign]
    playground.check([3] * 10, await playground.complete([3] * 10))


async def test_a_failure_while_prompts_are_admitted_answers_every_request(playground: Playground):
    """Siblings are set aside while the first of them is computed; none is forgotten."""
    take, calls = playground.policy._slots.take, []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room for keys and values")
        return take(*arguments)

    playground.policy._slots.take = failing  # type: ignore[method-assign]
    siblings, other = [list(range(1, 20))] * 3, list(range(30, 50))
    requests = [playground.complete(ids) for ids in (*siblings, other)]
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(answer, EngineError | Completion) for answer in answers)
    assert any("no room" in str(answer) for answer in answers)


async def test_weights_loaded_under_the_same_version_leave_nothing_to_reuse(
    playground: Playground,
):
    prompt = list(range(1, 20))
    await playground.complete(prompt)
    playground.policy.load({}, V0)
    playground.fed.clear()
    await playground.complete(prompt)
    assert [feed.start for feed in playground.fed] == [0]


async def test_the_bundled_policy_starts():
    config = PolicyConfig(backend="torch", max_num_seqs=2)
    policy = await TorchPolicy.start(bundled_dir() / "model", config, seed=0, version=V0)
    assert await policy.version() == 0
    await policy.close()


@pytest.mark.parametrize(
    ("asked", "expected", "apart"),
    [("auto", "float32", 1e-4), ("float32", "float32", 1e-4), ("bfloat16", "bfloat16", 0.3)],
)
async def test_it_computes_in_the_precision_that_is_asked(asked: Any, expected: str, apart: float):
    config = PolicyConfig(backend="torch", max_num_seqs=2, dtype=asked)
    folder = bundled_dir() / "model"
    policy = await TorchPolicy.start(folder, config, seed=0, version=V0)
    prompt = list(range(1, 20))
    found = await policy.complete(
        CompletionRequest(request_id="a", prompt_ids=prompt, max_tokens=8)
    )
    await policy.close()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        lp_TV = model(torch.tensor([prompt + found.token_ids])).logits[0].log_softmax(-1)
    exact = [float(lp_TV[len(prompt) - 1 + i, t]) for i, t in enumerate(found.token_ids)]
    assert policy.dtype == expected
    assert found.logprobs == pytest.approx(exact, abs=apart)
    assert (found.logprobs == pytest.approx(exact, abs=1e-4)) == (expected == "float32")
