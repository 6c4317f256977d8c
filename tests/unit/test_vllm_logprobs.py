"""Log-probs behind token ids: what the engine's process appends, and what the replica takes off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leeway.actors.failures import EngineError

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

HALF, MINUS_TWO, MINUS_QUARTER = 0x3F000000, -0x40000000, -0x41800000
"""0.5, -2 and -0.25 as float32, read as int32."""


def output(name: str, *ids: int) -> Any:
    return SimpleNamespace(request_id=name, new_token_ids=list(ids))


def step(ids: list[list[int]], logprobs: list[list[float]], starts: list[int] | None = None) -> Any:
    return SimpleNamespace(
        logprob_token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        cu_num_generated_tokens=starts,
    )


class FakeEngine:
    """What leaves its process, and the requests that its front end knows."""

    def __init__(self, steps: list[list[Any]], known: dict[str, str]) -> None:
        self._steps = iter(steps)
        self.engine_core = self
        self.output_processor = self
        self.request_states = {
            inner: SimpleNamespace(external_req_id=outer) for inner, outer in known.items()
        }

    async def get_output_async(self) -> Any:
        return SimpleNamespace(outputs=next(self._steps))


def test_a_token_is_followed_by_the_bits_of_its_log_prob():
    from leeway.actors.vllm_logprobs import append_logprobs

    outputs = [output("b", 9), output("a", 7)]
    append_logprobs(outputs, {"a": 0, "b": 1}, step([[7, 1], [9, 2]], [[-2, 0], [-0.25, 0]]))
    assert outputs[0].new_token_ids == [9, MINUS_QUARTER]
    assert outputs[1].new_token_ids == [7, MINUS_TWO]


def test_several_tokens_of_a_step_stand_before_their_log_probs():
    from leeway.actors.vllm_logprobs import append_logprobs

    outputs = [output("a", 7), output("b", 8, 9), output("c")]
    rows = step([[7], [8], [9]], [[0.5], [-2], [-0.25]], starts=[0, 1, 3])
    append_logprobs(outputs, {"a": 0, "b": 1, "c": 2}, rows)
    assert [o.new_token_ids for o in outputs] == [[7, HALF], [8, 9, MINUS_TWO, MINUS_QUARTER], []]


async def test_the_replica_gets_the_tokens_and_the_log_probs_by_request():
    from leeway.actors.vllm_logprobs import SampledLogprobs

    steps = [
        [output("in-1", 7, HALF), output("in-2", 5, MINUS_TWO)],
        [output("in-1", 8, -0x800000)],
    ]
    engine: Any = FakeEngine(steps, {"in-1": "one", "in-2": "two"})
    logprobs = SampledLogprobs(engine)
    first = await engine.get_output_async()
    second = await engine.get_output_async()
    assert [o.new_token_ids for o in [*first.outputs, *second.outputs]] == [[7], [5], [8]]
    assert logprobs.of("one", 2) == [0.5, -np.inf]
    assert logprobs.of("two", 1) == [-2.0]
    with pytest.raises(EngineError, match="one"):
        logprobs.of("one", 2)  # asked before


async def test_what_comes_after_a_request_ended_is_dropped():
    from leeway.actors.vllm_logprobs import SampledLogprobs

    engine: Any = FakeEngine(
        [[output("in-1", 7, HALF)], [output("in-1", 8, HALF)]], {"in-1": "one"}
    )
    logprobs = SampledLogprobs(engine)
    await engine.get_output_async()
    logprobs.forget("one")
    engine.request_states.clear()
    late = await engine.get_output_async()
    assert late.outputs[0].new_token_ids == [8]
    assert not logprobs._bits


async def test_log_probs_of_another_token_are_refused():
    from leeway.actors.vllm_logprobs import SampledLogprobs, append_logprobs

    sampled = output("in-1", 7)
    append_logprobs([sampled], {"in-1": 0}, step([[6]], [[-2]]))
    engine: Any = FakeEngine([[sampled]], {"in-1": "one"})
    logprobs = SampledLogprobs(engine)
    await engine.get_output_async()
    with pytest.raises(EngineError, match=r"request one: .* other tokens"):
        logprobs.of("one", 1)
