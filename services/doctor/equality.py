"""Engine against learner: the log-probs of the same tokens at the same weights.

The engine samples, the learner's own network reads what was sampled. Off-policy ratios are the
exponential of the difference, so a gap here is a clip fraction there. The two never hold their
weights at the same time: the engine ends first.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from leeway.actors.config import model_dir
from leeway.actors.policy import Completion, CompletionRequest, Policy
from leeway.actors.tokens import Tokens
from leeway.replay.errors import LeewayError
from leeway.replay.schema import Group, GroupId, PolicyVersion, Trajectory, Turn
from leeway.services.doctor.finding import Finding, Part

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

EQUALITY = Part("equality")

QUESTIONS: Final = (
    "Who wrote the play on which the opera Salome is based?",
    "Which river flows through the capital of Austria?",
    "In what year did the first person walk on the Moon?",
    "What is the chemical symbol of the element with atomic number 26?",
    "Which mountain is higher, Mont Blanc or Mount Elbrus?",
    "Who painted the ceiling of the Sistine Chapel?",
    "What is the longest bone of the human body?",
    "Which country has won the football World Cup most often?",
)
"""Fixed, so that two machines compare the same prompts."""
SAMPLES: Final = 4
"""Continuations of each."""
NUM_TOKENS: Final = 64
SAMPLE_TIMEOUT_S: Final = 300.0
SEED: Final = 0
QUIET: Final = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""For the libraries that load the model; read when they are imported."""

MEAN_WARNING: Final = 0.03
MEAN_ERROR: Final = 0.15
"""Nats. Rounding to bfloat16 on one side costs 0.005 to 0.02; another temperature, another
vocabulary or unequal weights cost ten times that."""


class Gap(msgspec.Struct, frozen=True):
    """|engine - learner| over all sampled tokens, in nats."""

    num_tokens: int
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, engine_T: NDArray[Any], learner_T: NDArray[Any]) -> Gap:
        """[-1.0, -2.0] against [-1.1, -2.0] -> mean 0.05, max 0.1"""
        gap_T = np.abs(np.asarray(engine_T, np.float64) - np.asarray(learner_T, np.float64))
        return cls(
            len(gap_T), float(gap_T.mean()), float(np.quantile(gap_T, 0.99)), float(gap_T.max())
        )


def check_equality(config: RunConfig) -> list[Finding]:
    """Load the configured model in the engine, sample; load it in the learner, read; compare."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        trajectories = asyncio.run(_sample(config))
        learner_T = learner_logprobs(config, trajectories)
    except (LeewayError, ImportError, OSError, RuntimeError) as error:
        remedy = "the model folder, free memory or the installation; see the findings above"
        what = f"could not be measured ({type(error).__name__}: {_first_line(error)})"
        return [EQUALITY.error("log-probs", what, remedy)]
    engine_T = np.concatenate([trajectory.logprobs for trajectory in trajectories])
    return [gap_finding(Gap.of(engine_T, learner_T), config)]


def gap_finding(gap: Gap, config: RunConfig) -> Finding:
    """Mean 0.001 -> ok, 0.05 -> warning, 0.4 -> error."""
    text = (
        f"|engine - learner| mean {gap.mean:.2g}, p99 {gap.p99:.2g}, max {gap.max:.2g} nats over "
        f"{gap.num_tokens:,} tokens ({config.policy.backend}, learner {config.learner.precision})"
    )
    facts = msgspec.structs.asdict(gap)
    if not np.isfinite(gap.max):
        remedy = "the weights hold numbers that are not finite: take another checkpoint"
        return EQUALITY.error("log-probs", text, remedy, num_tokens=gap.num_tokens)
    if gap.mean > MEAN_ERROR:
        remedy = (
            "do not train like this: engine and learner load different weights or vocabularies, or "
            "the engine changes its distribution; compare config.json and generation_config.json"
        )
        return EQUALITY.error("log-probs", text, remedy, **facts)
    if gap.mean > MEAN_WARNING:
        remedy = (
            'leave policy.dtype at "auto", which takes learner.precision, and try "float32" for '
            "that; ratios are off by this much before anything is stale"
        )
        return EQUALITY.warning("log-probs", text, remedy, **facts)
    return EQUALITY.ok("log-probs", text, **facts)


# ---- engine


async def _sample(config: RunConfig) -> list[Trajectory]:
    folder = model_dir(config.model)
    tokens = Tokens.load(folder)
    policy = await _start(config)
    try:
        asked = [
            (tokens.encode(text), f"doctor-{i}-{j}")
            for i, text in enumerate(QUESTIONS)
            for j in range(SAMPLES)
        ]
        async with asyncio.timeout(SAMPLE_TIMEOUT_S):
            done = await asyncio.gather(*(_complete(policy, ids, name) for ids, name in asked))
    except TimeoutError:
        raise LeewayError(f"the engine did not sample within {SAMPLE_TIMEOUT_S:g} s") from None
    finally:
        await policy.close()
    return [
        as_trajectory(ids, completion, name)
        for (ids, name), completion in zip(asked, done, strict=True)
    ]


async def _start(config: RunConfig) -> Policy:
    folder, version = model_dir(config.model), PolicyVersion(0)
    if config.policy.backend == "vllm":
        from leeway.actors.vllm_policy import VllmPolicy

        return await VllmPolicy.start(folder, config.engine, seed=SEED, version=version)
    from leeway.actors.torch_policy import TorchPolicy

    return await TorchPolicy.start(folder, config.engine, seed=SEED, version=version)


async def _complete(policy: Policy, ids: list[int], name: str) -> Completion:
    return await policy.complete(
        CompletionRequest(request_id=name, prompt_ids=ids, max_tokens=NUM_TOKENS)
    )


def as_trajectory(prompt_ids: list[int], completion: Completion, name: str) -> Trajectory:
    """A prompt of 5 and a completion of 3 tokens -> 8 tokens, one turn that begins at 5."""
    return Trajectory(
        trajectory_id=name,
        token_ids=np.array([*prompt_ids, *completion.token_ids], np.int32),
        turns=(Turn(len(prompt_ids), len(completion.token_ids), 0, "answer"),),
        logprobs=np.array(completion.logprobs, np.float32),
        versions=np.array(completion.versions, np.int32),
        reward=0.0,
        stop_reason="answer",
        scores={},
        duration_s=0.0,
    )


# ---- learner


def learner_logprobs(config: RunConfig, trajectories: list[Trajectory]) -> NDArray[np.float64]:
    """[T] of every sampled token, one trajectory behind the other, as a step would compute them."""
    from leeway.learner.batch import build_batch
    from leeway.learner.model import load_model
    from leeway.learner.passes import Passes
    from leeway.learner.sharding import Layout
    from leeway.learner.world import World

    world = World.from_environment()
    network = load_model(
        model_dir(config.model),
        world.device,
        trust_remote_code=config.policy.trust_remote_code,
    )
    groups = [
        Group(group_id=GroupId(str(i)), question_id="", worker_id="", trajectories=(trajectory,))
        for i, trajectory in enumerate(trajectories)
    ]
    batch = build_batch(groups)
    layout = Layout(precision=config.learner.precision)
    passes = Passes(network.eval(), world, config.learner.micro_batch_tokens, layout)
    try:
        return passes.measure(batch, range(len(trajectories))).lp_T.double().cpu().numpy()
    finally:
        world.close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
