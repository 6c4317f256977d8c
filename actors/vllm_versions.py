"""What differs between the releases of vLLM that this project works with.

From 0.32 on an engine says itself which version of the weights sampled which tokens. Before, down
to 0.25.1, the tokens are counted here as they come out of the engine, in the order in which they
come: behind a mark that is put into the queue while the engine stands still, they are of the next
version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM

from leeway.actors.failures import EngineError


class TokenVersions(Protocol):
    """Which version of the weights sampled which token of a request."""

    async def set(self, version: int) -> None:
        """From now on it is `version`; the engine stands still."""
        ...

    def of(self, request_id: str, output: Any) -> list[int]:
        """The version of each token of a finished request, vLLM's CompletionOutput of it at hand.

        To be asked once. Raises EngineError when it is not known.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request was given up."""
        ...


async def token_versions(engine: AsyncLLM, version: int) -> TokenVersions:
    """The engine's own where it has them, else counted."""
    if hasattr(engine, "update_weight_version"):
        versions: TokenVersions = ReportedVersions(engine)
        await versions.set(version)
        return versions
    return CountedVersions(engine, version)


class ReportedVersions:
    """vLLM 0.32 and later: the engine stamps what leaves it."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine: Any = engine

    async def set(self, version: int) -> None:
        """See TokenVersions.set."""
        await self._engine.update_weight_version(str(version))

    def of(self, request_id: str, output: Any) -> list[int]:
        """See TokenVersions.of."""
        if output.weight_versions is None:
            raise EngineError(f"request {request_id}: the engine ended it without versions")
        spans = output.weight_versions
        return [int(span.version) for span in spans for _ in range(span.start, span.end)]

    def forget(self, request_id: str) -> None:
        """See TokenVersions.forget."""


class _Mark(EngineCoreOutputs):
    """Nothing but a place in the queue of outputs. vLLM passes over it: it holds no outputs."""


class CountedVersions:
    """vLLM before 0.32: counted where outputs are taken from the engine's queue."""

    def __init__(self, engine: AsyncLLM, version: int) -> None:
        self._client: Any = engine.engine_core
        self._processor: Any = engine.output_processor
        self._version = version
        self._coming: list[int] = []
        """The versions behind the marks that are still in the queue, oldest first."""
        self._counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By request: versions and how many of its tokens each sampled, in order."""
        self._take = self._client.get_output_async
        self._process = self._processor.process_outputs
        self._client.get_output_async = self._next
        self._processor.process_outputs = self._count

    async def set(self, version: int) -> None:
        """See TokenVersions.set. All that the engine gave out before lies in the queue already."""
        self._coming.append(version)
        self._client.outputs_queue.put_nowait(_Mark())

    async def _next(self) -> Any:
        # Whoever takes an output has dealt with the one before.
        outputs = await self._take()
        if isinstance(outputs, _Mark):
            self._version = self._coming.pop(0)
        return outputs

    def _count(self, outputs: Any, *arguments: Any, **named: Any) -> Any:
        for output in outputs:
            state = self._processor.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                counts = self._counts[state.external_req_id]
                num_tokens = len(output.new_token_ids)
                if counts and counts[-1][0] == self._version:
                    num_tokens += counts.pop()[1]
                counts.append((self._version, num_tokens))
        return self._process(outputs, *arguments, **named)

    def of(self, request_id: str, output: Any) -> list[int]:
        """See TokenVersions.of."""
        counts = self._counts.pop(request_id, None)
        if counts is None:
            raise EngineError(f"request {request_id}: the engine ended it without tokens")
        return [version for version, num_tokens in counts for _ in range(num_tokens)]

    def forget(self, request_id: str) -> None:
        """See TokenVersions.forget."""
        self._counts.pop(request_id, None)


def watch_outputs(engine: AsyncLLM, seen: Callable[[int], None]) -> None:
    """Call `seen` with the number of new tokens whenever outputs are taken from the engine."""
    processor: Any = engine.output_processor
    process = processor.process_outputs

    def watched(outputs: Any, *arguments: Any, **named: Any) -> Any:
        seen(sum(len(output.new_token_ids) for output in outputs))
        return process(outputs, *arguments, **named)

    processor.process_outputs = watched
