"""What every Policy keeps to, whichever engine is behind it.

The suite runs over the names in `BACKENDS`. For each it looks up the fixture
`{name}_policy_factory`, which returns a PolicyFactory; a backend without that fixture
is an error. `scripted` is defined here, the others in tests/contract/conftest.py.

One policy serves the whole suite (an engine takes half a minute to start), so no rule here depends
on the version it starts with, and none closes it.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from leeway.actors.config import PolicyConfig
from leeway.actors.policy import Completion, CompletionRequest, Policy
from leeway.actors.scripted_policy import ScriptedPolicy
from leeway.actors.search.protocol import TAGS
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.replay.errors import ConfigurationError

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_ROWS = {
    "ScriptedPolicy": 0,
    "TorchPolicy": PolicyConfig().max_num_seqs,
    "VllmPolicy": PolicyConfig().max_num_seqs,
}
"""Requests that are sampled at once, the others wait; 0: none waits."""
BACKENDS = ["scripted", "torch", pytest.param("vllm", marks=pytest.mark.vllm)]

SetVersion = Callable[[int], Awaitable[None]]
PolicyFactory = Callable[[], AbstractAsyncContextManager[tuple[Policy, Tokens, SetVersion]]]


class Subject(NamedTuple):
    policy: Policy
    tokens: Tokens
    set_version: SetVersion

    async def complete(self, request_id: str, **changes: object) -> Completion:
        fields: dict[str, object] = {
            "request_id": request_id,
            "prompt_ids": self.tokens.encode("Question: Which currency is paid in Oslo?\n"),
            "max_tokens": 16,
            "temperature": 0.0,
        }
        return await self.policy.complete(CompletionRequest(**{**fields, **changes}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def scripted_policy_factory(tmp_path_factory: pytest.TempPathFactory) -> PolicyFactory:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, TAGS)

    @asynccontextmanager
    async def factory() -> AsyncIterator[tuple[Policy, Tokens, SetVersion]]:
        tokens = Tokens.load(folder)
        policy = ScriptedPolicy(tokens, {"": "<think>a long thought</think>" * 20})

        async def set_version(version: int) -> None:
            policy.set_version(version)

        yield policy, tokens, set_version
        await policy.close()

    return factory


@pytest.fixture(scope="module", params=BACKENDS)
def policy_factory(request: pytest.FixtureRequest) -> PolicyFactory:
    # Not in `subject`: an asynchronous fixture cannot ask for another one by name.
    return request.getfixturevalue(f"{request.param}_policy_factory")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def subject(policy_factory: PolicyFactory) -> AsyncIterator[Subject]:
    async with policy_factory() as (policy, tokens, set_version):
        yield Subject(policy, tokens, set_version)


async def test_of_those_that_wait_for_room_the_lowest_priority_goes_first(subject: Subject):
    # One of the engine's rows gets free before the others; the scripted policy answers at once.
    num_rows = NUM_ROWS[type(subject.policy).__name__]
    running = [
        asyncio.create_task(subject.complete(f"row-{i}", max_tokens=90 if i else 12, priority=9))
        for i in range(num_rows)
    ]
    await asyncio.sleep(0.05)
    ended: list[str] = []

    async def late(name: str, priority: int) -> None:
        await subject.complete(name, max_tokens=2, priority=priority)
        ended.append(name)

    sent = {"third": 7, "first": 3, "second": 3, "fourth": 8}
    await asyncio.gather(*(late(name, priority) for name, priority in sent.items()))
    await asyncio.gather(*running)
    assert ended == (["first", "second", "third", "fourth"] if num_rows else list(sent))


def check_shape(completion: Completion) -> None:
    num = len(completion.token_ids)
    assert num >= 1
    assert len(completion.logprobs) == len(completion.versions) == num
    assert all(math.isfinite(lp) and lp <= 0.0 for lp in completion.logprobs)
    assert all(type(token) is int for token in completion.token_ids)
    assert all(type(version) is int for version in completion.versions)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_three_lists_have_one_length_and_finite_logprobs(
    subject: Subject, temperature: float
):
    check_shape(await subject.complete(f"shape-{temperature}", temperature=temperature))


async def test_a_stop_string_ends_generation_with_the_token_that_completes_it(subject: Subject):
    ids = (await subject.complete("stop-free")).token_ids
    stop, num = a_stop_string(ids, subject.tokens)
    stopped = await subject.complete("stop-cut", stop=("never to be seen", stop))
    assert stopped.token_ids == ids[:num]
    assert stopped.finish == "stop"
    check_shape(stopped)


def a_stop_string(ids: list[int], tokens: Tokens) -> tuple[str, int]:
    """Two readable characters out of the middle, and the tokens it takes to complete them."""
    text = tokens.decode(ids)
    middle = text[len(text) // 3 :]
    pairs = [middle[i : i + 2] for i in range(len(middle) - 1)]
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    num = next(n for n in range(1, len(ids) + 1) if stop in tokens.decode(ids[:n]))
    return stop, num


async def test_max_tokens_ends_generation_as_length(subject: Subject):
    completion = await subject.complete("length", max_tokens=3)
    assert completion.token_ids[-1] != subject.tokens.eos_id, "the prompt must not end early"
    assert (len(completion.token_ids), completion.finish) == (3, "length")


async def test_greedy_is_deterministic(subject: Subject):
    first = await subject.complete("greedy-1")
    second = await subject.complete("greedy-2")
    assert first.token_ids == second.token_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-3)


async def test_a_request_may_be_sent_again_under_its_id(subject: Subject):
    first = await subject.complete("again")
    assert (await subject.complete("again")).token_ids == first.token_ids


async def test_tokens_carry_the_current_version(subject: Subject):
    completion = await subject.complete("version")
    assert set(completion.versions) == {await subject.policy.version()}


async def test_a_version_set_between_requests_shows_in_the_next(subject: Subject):
    version = await subject.policy.version() + 1
    await subject.set_version(version)
    assert await subject.policy.version() == version
    assert set((await subject.complete("next-version")).versions) == {version}


async def test_a_version_set_during_a_request_never_goes_back(subject: Subject):
    old = await subject.policy.version()
    running = asyncio.create_task(subject.complete("mid-version", max_tokens=48))
    await asyncio.sleep(0.01)
    await subject.set_version(old + 1)
    versions = (await running).versions
    assert versions == sorted(versions)
    assert set(versions) <= {old, old + 1}


async def test_many_requests_at_once_are_all_answered(subject: Subject):
    prompts = [subject.tokens.encode(f"Question: What is {i}?\n") for i in range(40)]
    completions = await asyncio.gather(
        *(
            subject.complete(f"many-{i}", prompt_ids=prompt, temperature=1.0)
            for i, prompt in enumerate(prompts)
        )
    )
    for completion in completions:
        check_shape(completion)


async def test_a_cancelled_request_does_not_disturb_the_others(subject: Subject):
    tasks = [asyncio.create_task(subject.complete(f"cancel-{i}")) for i in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    for i in (0, 2, 3):
        assert isinstance(results[i], Completion)
    check_shape(await subject.complete("after-cancel"))


async def test_a_cancelled_request_leaves_nothing_running_in_the_engine(subject: Subject):
    # One sibling fails and the others are cancelled: the engine must not go on with them.
    tasks = [asyncio.create_task(subject.complete(f"orphan-{i}", max_tokens=100)) for i in range(4)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10):
        while num_running(subject.policy):
            await asyncio.sleep(0.01)


def num_running(policy: Any) -> int:
    """Requests that the engine behind a policy still works on."""
    if hasattr(policy, "_engine"):  # vLLM
        return policy._engine.output_processor.get_num_unfinished_requests()
    if hasattr(policy, "_rows"):  # torch
        return len(policy._rows) + len(policy._waiting) + policy._queue.qsize()
    return 0  # scripted: it works in the caller's own task


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"prompt_ids": [1] * 200_000}, "200000 tokens"),
        ({"prompt_ids": []}, "no token"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
async def test_a_request_that_can_never_be_served_is_refused(
    subject: Subject, changes: dict[str, object], message: str
):
    with pytest.raises(ConfigurationError, match=message):
        await subject.complete("refused", **changes)
