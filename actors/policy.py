"""The policy as the rollout sees it: token ids in, token ids with log-probs and versions out.

Implementations: `VllmPolicy` (vllm_policy.py), `TorchPolicy` (torch_policy.py) and `ScriptedPolicy`
(scripted_policy.py); all pass tests/contract/test_policy_contract.py.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from leeway.replay.schema import PolicyVersion


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to sample."""

    request_id: str
    """Unique; a retry carries the same id, and a policy may answer it from the first try."""
    prompt_ids: list[int]
    """Every token of the trajectory so far."""
    max_tokens: int
    stop: tuple[str, ...] = ()
    """Generation ends with the token that completes any of these; that token is kept whole."""
    temperature: float = 1.0
    """1 samples the policy itself; 0 is greedy. Other values would need a correction of the
    log-probs and are refused."""
    priority: int = 0
    """Where requests wait for room in the engine the lowest goes first, and equal ones as they
    came. A group's is the version it was admitted at: the older, the sooner it must be trained."""
    traceparent: str | None = None
    """The span that waits for the answer, in W3C's form; None while nothing is traced."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled. The three lists have one length, at least 1."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under the version that sampled it, at temperature 1."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish: Literal["stop", "length"]
    """`stop`: a stop string or the end-of-sequence token; `length`: max_tokens or full context."""
    num_cached: int = 0
    """Tokens of the prompt whose keys and values stood already; the others were computed."""
    num_discarded: int = 0
    """Tokens sampled for this turn and thrown away, because weights changed about its first one."""


class Policy(Protocol):
    """Something that completes prompts and knows which weights it does it with."""

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one turn. Raises ConfigurationError for a request that can never be served."""
        ...

    async def version(self) -> PolicyVersion:
        """The version the next token would be sampled with."""
        ...

    async def close(self) -> None:
        """Stop the engine and free what it holds."""
        ...


def check_request(request: CompletionRequest, max_model_len: int) -> None:
    """Raise ConfigurationError for a request that no engine of this length can serve."""
    from leeway.replay.errors import ConfigurationError

    if request.temperature not in (0.0, 1.0):
        raise ConfigurationError(
            f"temperature {request.temperature} would need corrected log-probs; "
            "use 1, or 0 for greedy"
        )
    if not request.prompt_ids:
        raise ConfigurationError("the prompt has no token; send at least one")
    if len(request.prompt_ids) >= max_model_len:
        raise ConfigurationError(
            f"the prompt has {len(request.prompt_ids)} tokens and policy.max_model_len is "
            f"{max_model_len}; shorten the prompt or raise max_model_len"
        )
    if request.max_tokens < 1:
        raise ConfigurationError(f"max_tokens is {request.max_tokens}; it must be at least 1")
