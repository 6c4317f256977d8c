"""Engine, retriever and environment of an evaluation, in this process, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leeway.actors.environment_factory import build_environment
from leeway.actors.evaluation import Table
from leeway.actors.policy import Policy
from leeway.actors.rollout import Limits, check_limits
from leeway.actors.tokens import Tokens
from leeway.replay.errors import WaitTimeout
from leeway.replay.schema import PolicyVersion
from leeway.services.config import RunConfig

if TYPE_CHECKING:
    from leeway.actors.search.retriever import Retriever


@asynccontextmanager
async def open_table(config: RunConfig, model: Path) -> AsyncIterator[Table]:
    """All that episodes are played with; closed at the end of the block.

    Waits for the engine, policy.start_timeout_s at most, and then raises WaitTimeout.
    """
    tokens = Tokens.load(model)
    retriever = await asyncio.to_thread(open_retriever, config)
    try:
        environment = build_environment(
            config.environment, config.search, config.reward, retriever, tokens.facts
        )
        limits = Limits.of(config.search, config.policy)
        check_limits(limits, environment, tokens)
        policy = await _start(config, model)
        try:
            yield Table(policy, environment, tokens, limits, config.rollout.episode_timeout_s)
        finally:
            await policy.close()
    finally:
        await retriever.close()


def open_retriever(config: RunConfig) -> Retriever:
    """The outside server where `search.retriever_url` names one, else the index or corpus, here."""
    from leeway.actors.search.index_source import index_of
    from leeway.actors.search.retriever import HttpRetriever, LocalRetriever

    search = config.search
    if search.retriever_url is not None:
        return HttpRetriever(search.retriever_url, search.retriever_timeout_s)
    return LocalRetriever(index_of(search))


async def _start(config: RunConfig, model: Path) -> Policy:
    timeout_s = config.policy.start_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await _start_backend(config, model)
    except TimeoutError:
        raise WaitTimeout(
            f"the {config.policy.backend} engine had not loaded {model} after {timeout_s:g} s;"
            " raise policy.start_timeout_s"
        ) from None


async def _start_backend(config: RunConfig, model: Path) -> Policy:
    if config.policy.backend == "torch":
        from leeway.actors.torch_policy import TorchPolicy

        return await TorchPolicy.start(
            model, config.engine, seed=config.seed, version=PolicyVersion(0)
        )
    from leeway.actors.vllm_policy import VllmPolicy

    return await VllmPolicy.start(model, config.engine, seed=config.seed, version=PolicyVersion(0))
