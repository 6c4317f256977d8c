"""Policy, retriever and rollout workers as others see them: over Serve handles.

Never over the HTTP proxy, which adds milliseconds. A request whose replica died is sent again to
another one, within a deadline: a turn is only appended once, so a retry repeats at most that turn.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)

from leeway.actors.failures import EngineError, RetrievalError
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.search.retriever import Passage
from leeway.replay import tracing
from leeway.replay.schema import PolicyVersion

RETRY_S = 120.0
"""A turn is retried on other replicas for this long: an engine takes up to 50 s to start again."""
READY_POLL_S = 0.5
EVALUATION_ATTEMPTS = 3

_retried = retry(
    retry=retry_if_exception_type((RayError, RayServeException)),
    stop=stop_after_delay(RETRY_S),
    wait=wait_exponential_jitter(initial=0.2, max=5),
    reraise=True,
)


class HandlePolicy:
    """Policy over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def complete(self, request: CompletionRequest) -> Completion:
        """See Policy.complete. Raises EngineError when no replica answered within RETRY_S."""
        try:
            return await self._complete(request)
        except (RayError, RayServeException) as error:
            raise EngineError(f"request {request.request_id}: {cause_of(error)}") from error

    @_retried
    async def _complete(self, request: CompletionRequest) -> Completion:
        return await self._handle.complete.remote(request)

    async def version(self) -> PolicyVersion:
        """See Policy.version."""
        return await self._handle.version.remote()

    async def close(self) -> None:
        """The engine belongs to its own application; nothing to do."""


class HandleRetriever:
    """Retriever over a Serve handle, tried again until `timeout_s` has passed."""

    def __init__(self, handle: DeploymentHandle, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """See Retriever.search."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._search(query, top_k)
        except TimeoutError:
            raise RetrievalError(
                f"the retriever application gave no passages for query {query!r} within "
                f"search.retriever_timeout_s = {self._timeout_s:g}; see the serve log"
            ) from None
        except (RayError, RayServeException) as error:
            raise RetrievalError(f"query {query!r}: {cause_of(error)}") from error

    @_retried
    async def _search(self, query: str, top_k: int) -> list[Passage]:
        return await self._handle.search.remote(query, top_k, tracing.traceparent())

    async def close(self) -> None:
        """The index belongs to its own application; nothing to do."""


def cause_of(error: BaseException) -> str:
    """The last line of what went wrong; Ray puts whole tracebacks into its messages."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


class HandleRollouts:
    """The rollout workers over a Serve handle: whoever moves the run asks them for evaluations."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def evaluate(self, num_questions: int) -> dict[str, Any]:
        """See RolloutServer.evaluate; begun again when the worker that plays it dies."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((RayError, RayServeException)),
            stop=stop_after_attempt(EVALUATION_ATTEMPTS),
            wait=wait_exponential_jitter(initial=1, max=10),
        )
        try:
            return await retrying(self._evaluate, num_questions)
        except RetryError as error:
            cause = cause_of(error.last_attempt.exception() or error)
            raise EngineError(
                f"the evaluation failed {EVALUATION_ATTEMPTS} times: {cause}"
            ) from error

    async def _evaluate(self, num_questions: int) -> dict[str, Any]:
        return await self._handle.evaluate.remote(num_questions)


async def application_handle(name: str, timeout_s: float) -> DeploymentHandle:
    """A handle to the application `name`, as soon as it is deployed. Raises EngineError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await asyncio.to_thread(serve.get_app_handle, name)
        except RayServeException as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no Serve application {name} within policy.start_timeout_s = {timeout_s:g}; "
                    "deploy it beside this one"
                ) from error
        await asyncio.sleep(READY_POLL_S)
