"""`python -m leeway.services.bench.engine_metrics`: what `policy.engine_metrics` costs an engine.

Two engines with the bundled model in one process, beside a local Ray: one exports vLLM's metrics
through it, one does not. They take turns with the same requests. Told is the processor time of the
process that both are driven from, in which the metrics are recorded, for each step of an engine,
and the time that a step takes by the clock.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from leeway.actors.config import PolicyConfig, model_dir
from leeway.actors.policy import CompletionRequest
from leeway.replay.schema import PolicyVersion

if TYPE_CHECKING:
    from leeway.actors.vllm_policy import VllmPolicy

NUM_ROUNDS: Final = 7
NUM_REQUESTS: Final = 16
NUM_STEPS: Final = 128
"""Each request takes as many tokens, one a step."""


class Step(NamedTuple):
    """Mean of a round."""

    cpu_ms: float
    wall_ms: float


async def _round(policy: VllmPolicy, name: str) -> Step:
    requests = [
        CompletionRequest(
            request_id=f"{name}-{number}",
            prompt_ids=[5 + number, 17, 23],
            max_tokens=NUM_STEPS,
            stop=("\x00never",),
        )
        for number in range(NUM_REQUESTS)
    ]
    cpu_s, began = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(*map(policy.complete, requests))
    num_steps = max(len(answer.token_ids) for answer in answers)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began
    return Step(1e3 * cpu_s / num_steps, 1e3 * wall_s / num_steps)


async def _measure() -> dict[bool, list[Step]]:
    # Not above: vLLM imports Ray, which reads then how closed it is to be (closed_ray.py).
    from leeway.actors.vllm_policy import VllmPolicy

    policies: dict[bool, VllmPolicy] = {}
    for has_metrics in (False, True):
        config = PolicyConfig(engine_metrics=has_metrics, start_timeout_s=600)
        model = model_dir("bundled")
        policies[has_metrics] = await VllmPolicy.start(
            model, config, seed=0, version=PolicyVersion(0)
        )
    found: dict[bool, list[Step]] = {False: [], True: []}
    for number in range(NUM_ROUNDS + 1):
        for has_metrics, policy in policies.items():
            step = await _round(policy, f"{has_metrics}-{number}")
            if number:  # the first one warms up
                found[has_metrics].append(step)
    for policy in policies.values():
        await policy.close()
    return found


def main() -> None:
    """Print both, and the difference."""
    from leeway.services.processes.foster import fork_below
    from leeway.services.wiring import started_ray

    fork_below()
    with started_ray():
        found = asyncio.run(_measure())
    medians = {
        has_metrics: Step(*map(statistics.median, zip(*steps, strict=True)))
        for has_metrics, steps in found.items()
    }
    for has_metrics, (cpu_ms, wall_ms) in medians.items():
        with_ = "with" if has_metrics else "without"
        print(f"{with_:8} metrics: {cpu_ms:.3f} ms of processor time a step, {wall_ms:.2f} ms long")
    more_ms = medians[True].cpu_ms - medians[False].cpu_ms
    share = more_ms / medians[False].wall_ms
    print(f"metrics take {more_ms:.3f} ms a step, {share:.1%} of a step without them")


if __name__ == "__main__":
    main()
