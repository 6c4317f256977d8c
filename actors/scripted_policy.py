"""ScriptedPolicy: plays a script in place of a model. For tests, examples and measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest, check_request
from leeway.actors.tokens import Tokens
from leeway.replay.schema import PolicyVersion

Script = Callable[[str], str] | Mapping[str, str]
"""From the text so far to the next completion's text. In a table the longest key that the text so
far ends with is taken; the key "" fits everything."""


class ScriptedPolicy:
    """A Policy that completes every prompt with what its script says, ended by end-of-sequence.

    Stop strings, `max_tokens` and the context length cut the script's text as they cut a model's.
    Log-probs are made up from token and position, so equal requests get equal answers.
    """

    def __init__(
        self,
        tokens: Tokens,
        script: Script,
        *,
        max_model_len: int = 4096,
        version: int = 0,
        token_delay_s: float = 0.0,
    ) -> None:
        self._tokens = tokens
        self._script = script
        self._max_model_len = max_model_len
        self._version = PolicyVersion(version)
        self._token_delay_s = token_delay_s
        self._is_closed = False

    def set_version(self, version: int) -> None:
        """Tokens sampled from now on carry `version`, those of running requests included."""
        self._version = PolicyVersion(version)

    async def version(self) -> PolicyVersion:
        """The version the next token gets."""
        return self._version

    async def close(self) -> None:
        """Later requests fail with EngineError."""
        self._is_closed = True

    async def complete(self, request: CompletionRequest) -> Completion:
        """The script's text for this prompt, token by token."""
        check_request(request, self._max_model_len)
        if self._is_closed:
            raise EngineError(f"request {request.request_id}: the policy is closed")
        planned, finish = self._plan(request)
        versions: list[int] = []
        await asyncio.sleep(0)
        for _ in planned:
            if self._token_delay_s:
                await asyncio.sleep(self._token_delay_s)
            versions.append(self._version)
        return Completion(
            token_ids=planned,
            logprobs=[_logprob(token, t) for t, token in enumerate(planned)],
            versions=versions,
            finish=finish,
        )

    def _plan(self, request: CompletionRequest) -> tuple[list[int], Literal["stop", "length"]]:
        ids = self._tokens.encode(self._text(self._tokens.decode(request.prompt_ids)))
        num_to_stop = self._num_to_stop(ids, request.stop)
        if num_to_stop is not None:
            ids = ids[:num_to_stop]
        elif self._tokens.eos_id is not None:
            ids.append(self._tokens.eos_id)
        if not ids:
            raise EngineError(f"request {request.request_id}: the script answers with no token")
        room = min(request.max_tokens, self._max_model_len - len(request.prompt_ids))
        return (ids[:room], "length") if len(ids) > room else (ids, "stop")

    def _text(self, prompt: str) -> str:
        if not isinstance(self._script, Mapping):
            return self._script(prompt)
        keys = [key for key in self._script if prompt.endswith(key)]
        if not keys:
            raise EngineError(f"the script has no line for a prompt that ends in {prompt[-80:]!r}")
        return self._script[max(keys, key=len)]

    def _num_to_stop(self, ids: list[int], stop: tuple[str, ...]) -> int | None:
        """How many tokens it takes until a stop string is complete; None if it never is."""

        def is_stopped(num: int) -> bool:
            text = self._tokens.decode(ids[:num])
            return any(string in text for string in stop)

        if not is_stopped(len(ids)):
            return None
        low, high = 0, len(ids)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_stopped(middle) else (middle, high)
        return high


def _logprob(token: int, position: int) -> float:
    """Between -1.05 and -0.05, scattered, the same for the same token at the same place."""
    return -0.05 - ((token * 2_654_435_761 + position * 40_503) % 1000) / 1000
