"""A policy whose completions show in traces: wrapped around the engine, where it is."""

from __future__ import annotations

from leeway.actors.policy import Completion, CompletionRequest, Policy
from leeway.replay import tracing
from leeway.replay.schema import PolicyVersion


class TracedPolicy:
    """A Policy over another."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def complete(self, request: CompletionRequest) -> Completion:
        """See Policy.complete. The span is a child of the one that the request names."""
        attributes = {
            "leeway.request": request.request_id,
            "leeway.num_prompt_tokens": len(request.prompt_ids),
        }
        with tracing.span("engine.complete", attributes, parent=request.traceparent) as span:
            completion = await self._policy.complete(request)
            if span is not None:
                span.set_attribute("leeway.num_tokens", len(completion.token_ids))
                span.set_attribute("leeway.version", min(completion.versions))
        return completion

    async def version(self) -> PolicyVersion:
        """See Policy.version."""
        return await self._policy.version()

    async def close(self) -> None:
        """See Policy.close."""
        await self._policy.close()
