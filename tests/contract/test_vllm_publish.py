"""What a vLLM engine does beyond the contract: weights in place, versions counted by the wrapper.

The engine is the one of the publish contract; each rule puts back what it changes in it.
"""

from __future__ import annotations

import asyncio
import string
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from safetensors.torch import save_file

from leeway.actors.config import PolicyConfig
from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.side_channel import SideChannel
from leeway.actors.weight_receiver import Delivery
from leeway.replay.errors import ChecksumMismatch, TransferError
from leeway.replay.schema import PolicyVersion
from tests.contract.test_publish_contract import LONG_TOKENS, TOLERANCE, gap, prompt

if TYPE_CHECKING:
    from tests.contract.conftest import Receiver

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

DELIVERY = Delivery(manifest=[], chunk_bytes=64, timeout_s=1.0)


async def test_weights_received_in_place_are_in_use_and_the_pause_covers_their_transfer(
    vllm_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    a, b = vllm_receiver.models
    ids = prompt(vllm_receiver)
    await vllm_receiver.publish(a.weights())
    monkeypatch.setattr(vllm_receiver.policy, "_stages", False)
    running = asyncio.create_task(vllm_receiver.complete(ids, LONG_TOKENS))
    await asyncio.sleep(0.1)
    published = await vllm_receiver.publish(b.weights())
    completion = await running
    assert len(completion.token_ids) == LONG_TOKENS
    assert completion.versions == sorted(completion.versions)
    assert gap(b, ids, await vllm_receiver.complete(ids, 16)) < TOLERANCE
    assert published.pause_s[0] > published.wire_s > 0


class BothVersions:
    """Asks the engine, counts too, and wants both to agree."""

    def __init__(self, reported: Any, counted: Any) -> None:
        self._reported, self._counted = reported, counted
        self.num_compared = 0

    async def set(self, version: int) -> None:
        await self._counted.set(version)
        await self._reported.set(version)

    def of(self, request_id: str, output: Any) -> list[int]:
        reported = self._reported.of(request_id, output)
        counted = self._counted.of(request_id, output)
        assert counted[: len(output.token_ids)] == reported[: len(output.token_ids)]
        self.num_compared += len(set(reported)) > 1
        return reported

    def forget(self, request_id: str) -> None:
        self._counted.forget(request_id)


async def test_versions_counted_as_tokens_come_are_those_the_engine_reports(
    vllm_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    from leeway.actors.vllm_versions import CountedVersions

    policy = vllm_receiver.policy
    engine = policy.engine
    # The wrapper hooks into both; they are put back behind the test.
    monkeypatch.setattr(engine.engine_core, "get_output_async", engine.engine_core.get_output_async)
    monkeypatch.setattr(
        engine.output_processor, "process_outputs", engine.output_processor.process_outputs
    )
    both = BothVersions(policy._versions, CountedVersions(engine, await policy.version()))
    monkeypatch.setattr(policy, "_versions", both)
    for model in (*vllm_receiver.models, *vllm_receiver.models):
        running = [
            asyncio.create_task(
                vllm_receiver.complete(prompt(vllm_receiver, f"{i}?"), 60 * (i + 1))
            )
            for i in range(8)
        ]
        await asyncio.sleep(0.15)
        await vllm_receiver.publish(model.weights())
        for completion in await asyncio.gather(*running):
            assert completion.versions == sorted(completion.versions)
    assert both.num_compared > 0, "no request was under way during a publish"


async def test_log_probs_come_behind_the_tokens_and_vllm_sends_none_of_its_own(
    vllm_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    policy = vllm_receiver.policy
    ends: list[Any] = []
    complete = policy._completion
    monkeypatch.setattr(
        policy,
        "_completion",
        lambda name, last: (ends.append(last.outputs[0]), complete(name, last))[1],
    )
    completion = await vllm_receiver.complete(prompt(vllm_receiver), 16)
    [end] = ends
    assert not end.logprobs, "vLLM's arrays were sent, unpacked and kept beside ours"
    assert list(end.token_ids) == completion.token_ids
    assert len(completion.logprobs) == 16
    assert all(logprob < 0 for logprob in completion.logprobs)


async def test_requests_that_are_stopped_or_given_up_leave_no_log_probs_behind(
    vllm_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    policy = vllm_receiver.policy
    # Every stop string is looked for in the replica, and the engine has sampled on meanwhile.
    monkeypatch.setattr(policy, "_single_token_stops", AsyncMock(return_value=[]))
    ids = prompt(vllm_receiver)
    running = asyncio.create_task(vllm_receiver.complete(ids, LONG_TOKENS))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    request = CompletionRequest(
        request_id="stopped",
        prompt_ids=ids,
        max_tokens=LONG_TOKENS,
        stop=tuple(string.printable),
    )
    stopped = await policy.complete(request)
    assert stopped.finish == "stop"
    assert len(stopped.logprobs) == len(stopped.token_ids)
    await vllm_receiver.complete(ids, 4)
    assert not policy._logprobs._bits


async def test_requests_without_a_token_are_sent_again_when_weights_change_and_no_turn_is_lost(
    vllm_receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    policy = vllm_receiver.policy
    a, b = vllm_receiver.models
    await vllm_receiver.publish(a.weights())
    sample, passes = policy._sample, []

    async def noted(*arguments: Any) -> Any:
        passes.append(await sample(*arguments))
        return passes[-1]

    monkeypatch.setattr(policy, "_sample", noted)
    ids = prompt(vllm_receiver)
    num_rows = policy._config.max_num_seqs
    running = [asyncio.create_task(vllm_receiver.complete(ids, 200)) for _ in range(num_rows)]
    while len(policy._logprobs._bits) < num_rows:
        await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(vllm_receiver.complete(ids, 4)) for _ in range(8)]
    await asyncio.sleep(0.1)
    await vllm_receiver.publish(b.weights())
    await asyncio.gather(*running)
    for completion in await asyncio.gather(*waiting):
        assert len(set(completion.versions)) == 1
        assert gap(b, ids, completion) < TOLERANCE
        assert completion.num_discarded == 0
    assert passes.count((None, 0)) == 8
    assert len(passes) == num_rows + 16, "a turn was sampled whole and thrown away"
    assert not policy._sent
    assert not policy._logprobs._bits


# --- what goes wrong, on an engine that only writes down what it is asked ------------------------


class FakeEngine:
    """vLLM's front end and one worker as VllmPolicy sees them.

    `faults` maps a call's name to its error.
    """

    def __init__(self, **faults: Exception | str) -> None:
        self.calls: list[str] = []
        self.faults = faults
        self.engine_core = self

    def _note(self, name: str) -> None:
        self.calls.append(name)
        fault = self.faults.get(name)
        if isinstance(fault, Exception):
            raise fault

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[Any]:
        assert method == "leeway_commit", "all else costs the engine time"
        self._note("commit")
        return [{"copy_s": 0.0, "wire_s": 0.0}]

    def side_channel(self) -> SideChannel:
        """The worker's."""
        noted = ("join", "receive", "check", "verify", "abandon")
        calls: dict[str, Any] = {f"leeway_{name}": self._aside(name) for name in noted}
        state = self.faults.get("transfer_state", "idle")
        return SideChannel({**calls, "leeway_transfer_state": lambda _: state})

    def _aside(self, name: str) -> Any:
        def call(*_: object) -> object:
            self._note(name)
            return self.faults.get("problem") if name == "check" else True

        return call

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self._note("pause")

    async def resume_generation(self) -> None:
        self._note("resume")

    async def check_health(self) -> None:
        self._note("health")


class FakeVersions:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def set(self, version: int) -> None:
        self._engine.calls.append(f"version {version}")

    def forget(self, request_id: str) -> None:
        """Nothing was counted."""


def build(tmp_path: Any, staging: str, **faults: Exception | str) -> tuple[Any, FakeEngine]:
    from leeway.actors.vllm_policy import VllmPolicy

    engine: Any = FakeEngine(**faults)
    config = PolicyConfig.model_validate({"staging": staging})
    versions: Any = FakeVersions(engine)
    channels = [engine.side_channel().address]
    logprobs: Any = Mock()  # nothing is sampled
    policy = VllmPolicy(engine, tmp_path, config, logprobs, versions, PolicyVersion(3), channels)
    return policy, engine


async def test_staged_weights_are_checked_before_the_pause_and_verified_behind_it(tmp_path):
    policy, engine = build(tmp_path, "always")
    await policy.stage(DELIVERY)
    await policy.commit(PolicyVersion(4), "0f")
    assert engine.calls == [
        *("receive", "check", "pause", "commit", "version 4", "resume", "verify")
    ]
    assert await policy.version() == 4


async def test_in_place_the_pause_comes_before_the_weights(tmp_path):
    policy, engine = build(tmp_path, "never")
    await policy.stage(DELIVERY)
    await policy.commit(PolicyVersion(4), "0f")
    assert engine.calls == [
        *("pause", "receive", "check", "commit", "version 4", "resume", "verify")
    ]


async def test_wrong_checksum_of_staged_weights_leaves_the_engine_in_use(tmp_path):
    policy, engine = build(tmp_path, "always", problem="checksum 1e was received")
    with pytest.raises(ChecksumMismatch):
        await policy.commit(PolicyVersion(4), "0f")
    assert engine.calls == ["check", "abandon"]
    await policy.check()
    assert await policy.version() == 3


@pytest.mark.parametrize(
    ("faults", "calls"),
    [
        ({"problem": "checksum 1e"}, ["pause", "receive", "check", "resume"]),
        ({"transfer_state": "could not receive"}, ["pause", "receive", "resume"]),
    ],
)
async def test_what_fails_in_place_breaks_the_engine(tmp_path, faults, calls):
    policy, engine = build(tmp_path, "never", **faults)
    with pytest.raises(TransferError):
        await policy.stage(DELIVERY)
        await policy.commit(PolicyVersion(4), "0f")
    assert engine.calls == calls
    with pytest.raises(EngineError, match="its weights are of no version"):
        await policy.check()


@pytest.mark.parametrize("fault", ["commit", "verify"])
async def test_commit_that_fails_breaks_the_engine_and_ends_the_pause(tmp_path, fault):
    policy, engine = build(tmp_path, "always", **{fault: RuntimeError("out of memory")})
    await policy.stage(DELIVERY)
    with pytest.raises((RuntimeError, TransferError), match="out of memory"):
        await policy.commit(PolicyVersion(4), "0f")
    assert engine.calls.count("resume") == 1
    with pytest.raises(EngineError, match="version 4 was not taken into use: out of memory"):
        await policy.check()
    request = CompletionRequest(request_id="r", prompt_ids=[1], max_tokens=2)
    final = type("Output", (), {"outputs": []})()
    with pytest.raises(EngineError, match="out of memory"):
        policy._completion(request.request_id, final)


async def test_tokens_that_were_sampled_in_vain_are_counted(tmp_path, monkeypatch):
    policy, _ = build(tmp_path, "always")
    held = int(await policy.version())
    # Taken back with 3 tokens; begun under another version than asked for, with 2; then right.
    completions = [
        Completion(token_ids=[5, 6], logprobs=[-1.0, -1.0], versions=[v, v], finish="stop")
        for v in (held - 1, held)
    ]
    passes = [(None, 3), *((completion, 2) for completion in completions)]
    monkeypatch.setattr(policy, "_sample", AsyncMock(side_effect=passes))
    monkeypatch.setattr(policy, "_single_token_stops", AsyncMock(return_value=[]))
    request = CompletionRequest(request_id="r", prompt_ids=[1], max_tokens=2)
    completion = await policy.complete(request)
    assert (completion.versions, completion.num_discarded) == ([held, held], 5)


# --- what comes in place is compared in the end -------------------------------------------------


class FusedEngine(torch.nn.Module):
    """A worker's model of two matrices and a norm, in which `lost` is not loaded."""

    packed_modules_mapping: ClassVar = {"kv_proj": ["k_proj", "v_proj"]}

    def __init__(self, lost: str) -> None:
        super().__init__()
        self.kv_proj, self.norm = torch.nn.Linear(3, 16), torch.nn.LayerNorm(3)
        self._lost = lost
        parts = self.kv_proj.weight.detach().split([6, 10])
        self._places = {"k_proj.weight": parts[0], "v_proj.weight": parts[1]}
        self._places |= {"norm.weight": self.norm.weight.detach()}

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            if name in self._places.keys() - {self._lost}:
                self._places[name].copy_(tensor)


@pytest.mark.parametrize(
    ("lost", "problem"),
    [
        ("", None),
        ("k_proj.weight", "kv_proj does not use the weights that were sent"),
        ("v_proj.weight", "kv_proj does not use the weights that were sent"),
        ("norm.weight", "norm does not use the weights that were sent"),
        ("gate.weight", "the engine has no place for gate.weight"),
    ],
)
async def test_weights_received_in_place_that_are_not_in_use_are_an_error(
    monkeypatch, lost, problem
):
    from leeway.actors import vllm_worker

    monkeypatch.setattr(vllm_worker, "initialize_layerwise_reload", Mock())
    monkeypatch.setattr(vllm_worker, "finalize_layerwise_reload", Mock())
    monkeypatch.setattr(vllm_worker.sys, "setswitchinterval", Mock())
    config = Mock()
    config.parallel_config.world_size = 1
    engine = FusedEngine(lost)
    weights = vllm_worker.EngineWeights(engine, config, torch.device("cpu"), rank=0)
    reload = vllm_worker._InPlaceReload(weights)
    reload.begin()
    buffer = torch.rand(10, 3)  # one for all pieces
    reload.take({"v_proj.weight": buffer, "num_seen": torch.tensor(7)})
    reload.take({"k_proj.weight": buffer[:6].uniform_(), "norm.weight": torch.rand(3)})
    if lost == "gate.weight":
        reload.take({lost: torch.rand(2, 3)})
    outcome = nullcontext() if problem is None else pytest.raises(TransferError, match=problem)
    with outcome:
        reload.end()


# --- whether a version is staged ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("billions", "staging", "staged"),
    [(7, "auto", True), (32, "auto", False), (32, "always", True), (1, "never", False)],
)
async def test_memory_decides_whether_a_version_is_staged(monkeypatch, billions, staging, staged):
    # 85 % of 80 GB are 68, of which weights and staging may have 60 %, 40.8: 7B in bfloat16 are
    # twice 14 GB, 32B twice 64.
    from leeway.actors.vllm_policy import Staging

    be_a_gpu(monkeypatch, 80 * 10**9)
    config = PolicyConfig.model_validate({"staging": staging})
    assert Staging.of(config, {"w": [billions, 10**9]}).is_used is staged


async def test_ranks_of_an_engine_share_the_weights_in_use_and_each_stages_all_of_them(monkeypatch):
    # 20B in bfloat16: 10 GB of weights and 40 of staging on each of four, more than 40.8; of 16B,
    # 8 and 32 are not.
    from leeway.actors.vllm_policy import Staging

    be_a_gpu(monkeypatch, 80 * 10**9)
    config = PolicyConfig.model_validate({"tensor_parallel_size": 4})
    assert not Staging.of(config, {"w": [20, 10**9]}).is_used
    found = Staging.of(config, {"w": [16, 10**9]})
    assert (found.is_used, found.weight_bytes, found.room_bytes) == (True, 8 * 10**9, 32 * 10**9)


@pytest.mark.parametrize(
    ("setting", "room", "where"),
    [
        ("always", 0, "beside the weights in use"),
        ("never", 10**6, "straight into place"),
        ("auto", 10**6, "beside the weights in use"),
        ("auto", 40, "straight into place"),
    ],
)
async def test_the_log_says_once_where_versions_are_received_and_why(
    tmp_path, caplog, monkeypatch, setting, room, where
):
    """A GPU of `room` bytes: 85 % of 10**6 and 60 % of that are 510,000, of 40 they are 20."""
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    be_a_gpu(monkeypatch, room)
    caplog.set_level("INFO", "leeway.actors.vllm_policy")
    build(tmp_path, setting)
    budget = {0: "0", 10**6: "510,000", 40: "20"}[room]
    assert caplog.messages == [
        f'policy.staging = "{setting}": versions are received {where}; on each device '
        f"12 bytes of weights, 12 of staging, a budget of {budget}"
    ]


@pytest.mark.parametrize("setting", ["always", "never", "auto"])
async def test_on_a_cpu_the_log_says_it_too_and_nothing_bounds_staging(tmp_path, caplog, setting):
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    caplog.set_level("INFO", "leeway.actors.vllm_policy")
    build(tmp_path, setting)
    [message] = caplog.messages
    assert message.startswith(f'policy.staging = "{setting}": ')
    assert message.endswith("on each device 24 bytes of weights, 24 of staging, no bound")


def be_a_gpu(monkeypatch: pytest.MonkeyPatch, total_bytes: int) -> None:
    """Let vLLM find one of `total_bytes`."""
    from leeway.actors import vllm_policy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    platform = Mock()
    platform.get_device_total_memory.return_value = total_bytes
    platform.get_device_uuid.return_value = "GPU-0"
    monkeypatch.setattr(vllm_policy, "current_platform", platform)
