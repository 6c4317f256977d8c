"""What every policy that receives weights keeps to, with real bytes and a real board: sent over
gloo, and written straight into the engine's memory.

Each rule starts from whatever the one before it left in the engine: it publishes what it needs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from leeway.actors.policy import Completion
from leeway.learner.weights.publisher import Publisher
from leeway.replay.board import Announcement
from leeway.replay.errors import TransferError
from leeway.replay.flat_weights import pack

if TYPE_CHECKING:
    from tests.contract.conftest import Receiver, TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

Weights = dict[str, torch.Tensor]

TOLERANCE = 1e-4
"""Of float32 log-probs, between the engine's arithmetic and the sender's."""
LONG_TOKENS = 900
"""A completion that outlasts a publish."""


@pytest.fixture(
    scope="module",
    params=[
        "torch collective",
        "torch direct",
        pytest.param("vllm collective", marks=pytest.mark.vllm),
        pytest.param("vllm direct", marks=pytest.mark.vllm),
    ],
)
def receiver(request: pytest.FixtureRequest) -> Receiver:
    backend, choice = request.param.split()
    receiver = request.getfixturevalue(f"{backend}_receiver")
    receiver.take(choice)
    return receiver


def prompt(receiver: Receiver, text: str = "Question: Who was born in Oslo?\n") -> list[int]:
    return receiver.tokens.encode(text)


def gap(model: TinyModel, prompt_ids: list[int], completion: Completion) -> float:
    """Largest difference to the sender's log-probs."""
    expected = model.logprobs(prompt_ids, completion.token_ids)
    return max(abs(x - y) for x, y in zip(completion.logprobs, expected, strict=True))


def beginning(completion: Completion, num_tokens: int) -> Completion:
    """Its first tokens."""
    return msgspec.structs.replace(
        completion,
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
    )


def gap_behind_a_change(
    old: TinyModel, new: TinyModel, prompt_ids: list[int], completion: Completion, num_old: int
) -> float:
    """Largest difference to what `new` says of its tokens, on the keys and values that `old` left.

    What `old` sampled last is the first that `new` reads, so a boundary one token off shows.
    """
    read = prompt_ids + completion.token_ids
    first = len(prompt_ids) + num_old - 1
    with torch.no_grad():
        kept = old.network(torch.tensor([read[:first]]), use_cache=True).past_key_values
        rest = torch.tensor([read[first:-1]])
        logits = new.network(rest, past_key_values=kept, use_cache=True).logits[0].float()
    sampled = torch.tensor(completion.token_ids[num_old:])
    expected = logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs[num_old:])).abs().max())


# --- what is in use -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_log_probs_after_a_publish_are_those_of_the_senders_model(receiver, temperature):
    ids = prompt(receiver)
    for model in reversed(receiver.models):
        published = await receiver.publish(model.weights())
        completion = await receiver.complete(ids, 32, temperature=temperature)
        assert set(completion.versions) == {published.version}
        assert gap(model, ids, completion) < TOLERANCE


async def test_pause_and_transfer_are_measured(receiver):
    published = await receiver.publish(receiver.models[0].weights())
    assert (published.num_engines, len(published.pause_s)) == (1, 1)
    assert 0 < published.pause_s[0] < 2
    assert 0 < published.wire_s <= published.transfer_s < 10
    assert published.transport == ("direct" if receiver.publisher.choice == "direct" else "gloo")
    (engine,) = await receiver.board.engines()
    assert engine.version == published.version


async def test_running_request_goes_on_across_a_publish_and_changes_version_once(receiver):
    a, b = receiver.models
    ids = prompt(receiver)
    # How far a request gets until the weights change depends on the machine.
    for head_start_s in (0.05, 0.2, 0.0):
        old = (await receiver.publish(a.weights())).version
        running = asyncio.create_task(receiver.complete(ids, LONG_TOKENS))
        await asyncio.sleep(head_start_s)
        new = (await receiver.publish(b.weights())).version
        completion = await running
        num_old = completion.versions.count(old)
        if 0 < num_old < LONG_TOKENS:
            break
    assert 0 < num_old < LONG_TOKENS
    assert (len(completion.token_ids), completion.finish) == (LONG_TOKENS, "length")
    assert completion.versions == [old] * num_old + [new] * (LONG_TOKENS - num_old)
    assert gap(a, ids, beginning(completion, num_old)) < TOLERANCE
    assert gap_behind_a_change(a, b, ids, completion, num_old) < TOLERANCE
    # One token to either side is told apart.
    assert gap(a, ids, beginning(completion, num_old + 1)) > TOLERANCE
    assert gap_behind_a_change(a, b, ids, completion, num_old - 1) > TOLERANCE


async def test_many_requests_at_once_go_on_across_a_publish(receiver):
    old = await receiver.policy.version()
    running = [
        asyncio.create_task(
            receiver.complete(prompt(receiver, f"Question {i}?\n"), 200, temperature=1.0)
        )
        for i in range(16)
    ]
    await asyncio.sleep(0.1)
    new = (await receiver.publish(receiver.models[0].weights())).version
    for completion in await asyncio.gather(*running):
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) <= {old, new}
        assert all(math.isfinite(lp) for lp in completion.logprobs)


async def test_cached_prefix_of_older_weights_is_not_reused(receiver):
    # vLLM caches whole blocks, of 32 to 128 tokens; the second completion reads those of the first.
    a, b = receiver.models
    ids = prompt(receiver, "Sir William Schwenck Gilbert was an English dramatist. " * 6)
    assert len(ids) > 256
    await receiver.publish(a.weights())
    first, second = [await receiver.complete(ids, 1) for _ in range(2)]
    assert gap(a, ids, first) < TOLERANCE
    assert gap(a, ids, second) < TOLERANCE
    assert (first.num_cached, second.num_cached >= 128) == (0, True)
    await receiver.publish(b.weights())
    completion = await receiver.complete(ids, 1)
    assert completion.num_cached == 0
    assert gap(b, ids, completion) < TOLERANCE
    assert gap(a, ids, completion) > 0.1, "the two models must be told apart by this token"


async def test_request_sent_while_weights_change_uses_one_version_for_its_first_token(receiver):
    a, b = receiver.models
    ids = prompt(receiver, "Arthur Sullivan wrote the music, and he was knighted for it. " * 6)
    await receiver.publish(a.weights())
    old = await receiver.policy.version()
    await receiver.complete(ids, 1)
    publishing = asyncio.create_task(receiver.publish(b.weights()))
    completions = []
    while not publishing.done():
        completions.append(await receiver.complete(ids, 1))
    await publishing
    completions.append(await receiver.complete(ids, 1))
    for completion in completions:
        model = a if completion.versions == [old] else b
        assert gap(model, ids, completion) < TOLERANCE


# --- what goes wrong ----------------------------------------------------------------------------


def lacking(weights: Weights) -> Weights:
    return {n: w for n, w in weights.items() if n != "model.layers.1.self_attn.k_proj.weight"}


def unknown(weights: Weights) -> Weights:
    return {**weights, "model.layers.2.mlp.up_proj.weight": torch.zeros(128, 64)}


def misshapen(weights: Weights) -> Weights:
    return {**weights, "model.norm.weight": torch.zeros(63)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lacking, r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"),
        (unknown, r"lists model\.layers\.2\.mlp\.up_proj\.weight, which the engine does not load"),
        (misshapen, r"lists model\.norm\.weight as \[63\]; the engine's is \[64\]"),
    ],
)
async def test_manifest_that_does_not_fit_leaves_the_engine_as_it_was(
    receiver, spoil: Callable[[Weights], Weights], message: str
):
    a, b = receiver.models
    ids = prompt(receiver)
    old = (await receiver.publish(a.weights())).version
    with pytest.raises(TransferError, match=message):
        await receiver.publisher.publish(await receiver.next_version(), pack(spoil(b.weights())))
    published = await receiver.publisher.confirm()
    assert list(published.evicted) == ["engine"]
    assert receiver.membership.broken is None
    completion = await receiver.complete(ids, 8)
    assert set(completion.versions) == {old}
    assert gap(a, ids, completion) < TOLERANCE
    await receiver.publish(b.weights())
    assert gap(b, ids, await receiver.complete(ids, 8)) < TOLERANCE


class LyingPublisher(Publisher):
    """Announces another checksum than that of what it sends: the bytes arrive corrupted."""

    def _announcement(self, *args: object) -> Announcement:
        announcement = super()._announcement(*args)  # type: ignore[arg-type]
        return msgspec.structs.replace(announcement, checksum="0" * 16)


async def test_corrupted_payload_leaves_the_engine_as_it_was(receiver):
    a, b = receiver.models
    ids = prompt(receiver)
    old = (await receiver.publish(a.weights())).version
    is_direct = receiver.publisher.choice == "direct"
    lying = LyingPublisher(receiver.board, torch.device("cpu"), 20.0, receiver.publisher.choice)
    await lying.resume()
    publishing = lying.publish(await receiver.next_version(), pack(b.weights()))
    if is_direct:  # the learner looks itself, and does not say that it is there
        with pytest.raises(
            TransferError, match=r"checksum .* is in the memory of rank 1, 0{16} was"
        ):
            await publishing
    else:
        assert await publishing == 1
        published = await lying.confirm()
        assert (published.num_engines, list(published.evicted)) == (0, ["engine"])
        assert published.evicted["engine"].startswith("ChecksumMismatch: checksum ")
    await receiver.publisher.resume()
    assert receiver.membership.broken is None
    completion = await receiver.complete(ids, 8)
    assert set(completion.versions) == {old}
    assert gap(a, ids, completion) < TOLERANCE


async def test_engine_survives_two_updates_with_a_failed_one_between(receiver):
    a, b = receiver.models
    ids = prompt(receiver)
    running = asyncio.create_task(receiver.complete(ids, LONG_TOKENS))
    await receiver.publish(a.weights())
    with pytest.raises(TransferError):
        await receiver.publisher.publish(await receiver.next_version(), pack(lacking(b.weights())))
    await receiver.publisher.confirm()
    await receiver.publish(b.weights())
    assert gap(b, ids, await receiver.complete(ids, 16)) < TOLERANCE
    versions = (await running).versions
    assert versions == sorted(versions)


async def test_request_with_an_id_in_use_is_answered_during_a_publish(receiver):
    ids = prompt(receiver)
    requests = [
        asyncio.create_task(receiver.complete(ids, 100, request_id="twice")) for _ in range(2)
    ]
    await receiver.publish(receiver.models[0].weights())
    for completion in await asyncio.gather(*requests):
        assert len(completion.token_ids) == 100
