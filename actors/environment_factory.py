"""The one place where an environment is built: for training, evaluation and in-process runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from leeway.actors.config import EnvironmentConfig, RewardConfig, SearchConfig
from leeway.actors.environment import Environment, EnvironmentContext
from leeway.actors.imports import import_named
from leeway.actors.search.retriever import Passage, Retriever
from leeway.actors.tokenizer_facts import TokenizerFacts
from leeway.replay.errors import ConfigurationError, LeewayError

Factory = Callable[[EnvironmentContext], Environment]

_SEARCH: Final = "leeway.actors.search.environment:build"
_METHODS: Final = {"prompt": 1, "step": 3, "score": 4}
"""Methods of the protocol and how many arguments each is called with."""


def build_environment(
    config: EnvironmentConfig,
    search: SearchConfig,
    reward: RewardConfig,
    retriever: Retriever,
    tokenizer: TokenizerFacts,
) -> Environment:
    """What `environment.factory` builds. Raises ConfigurationError, in one sentence, for a factory
    that cannot be imported, that fails, or that returns something that is no Environment.
    """
    context = EnvironmentContext(
        retriever=retriever,
        tokenizer=tokenizer,
        search=search,
        reward=reward,
        options=config.options,
    )
    path = _SEARCH if config.factory == "search" else config.factory
    factory = import_named(path, "environment.factory")
    if not callable(factory):
        raise _refusal(config, "is no function; it must take an EnvironmentContext")
    try:
        built: Any = factory(context)
    except LeewayError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise _refusal(config, f"failed: {what}") from error
    problem = _problem(built)
    if problem:
        raise _refusal(
            config, f"returned {_article(type(built).__name__)}, which is no Environment: {problem}"
        )
    return built


def check_factory(
    config: EnvironmentConfig, search: SearchConfig, reward: RewardConfig, tokenizer: TokenizerFacts
) -> None:
    """Build an environment and throw it away, so that what is wrong with it is said before
    anything starts. Its retriever finds nothing yet. Raises what build_environment raises.
    """
    build_environment(config, search, reward, _NoRetriever(), tokenizer)


class _NoRetriever:
    async def search(self, query: str, top_k: int) -> list[Passage]:
        raise ConfigurationError(
            "an environment was asked to search while the configuration is still being checked;"
            " search in step, not in the factory"
        )

    async def close(self) -> None:
        """Nothing is open."""


def _refusal(config: EnvironmentConfig, what: str) -> ConfigurationError:
    return ConfigurationError(f'environment.factory = "{config.factory}" {what}')


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _problem(built: Any) -> str | None:
    """The first part of the Environment protocol that `built` breaks."""
    stop = getattr(built, "stop", None)
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        return "stop must be a tuple of texts, such as ('</answer>',)"
    if not isinstance(getattr(built, "observation_end", None), str):
        return "observation_end must be a text"
    for name, num_arguments in _METHODS.items():
        method = getattr(built, name, None)
        if not callable(method):
            return f"it has no method {name}"
        if not _takes(method, num_arguments):
            return f"{name} must take {num_arguments} arguments beside self"
    if not inspect.iscoroutinefunction(built.step):
        return "step must be an async function"
    return None


def _takes(method: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(method).bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True
