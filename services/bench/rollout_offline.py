"""vLLM's own `LLM.generate` on the turns that a rollout has played: no event loop, and one call for
each turn of 64 episodes.

It lives in a process of its own, with as many threads as the other engine has, and idles while the
other works. Records go through the pipe as msgpack.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from leeway.replay.errors import ConfigurationError, WaitTimeout
from leeway.services.bench.rollout_load import (
    NEVER,
    NUM_TURNS,
    PASS_TIMEOUT_S,
    Load,
    Script,
    next_prompts,
    waves,
)

START_TIMEOUT_S: Final = 240.0
END_TIMEOUT_S: Final = 20.0

_encoder = msgspec.msgpack.Encoder()
_scripts = msgspec.msgpack.Decoder(list[Script])


class OfflineEngine:
    """A second engine with the same arguments as the rollout's, behind a pipe."""

    def __init__(self, model: Path, load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(model), _encoder.encode(load)), daemon=False
        )
        self._process.start()
        theirs.close()
        self._receive("start", START_TIMEOUT_S)

    def play(self, scripts: Sequence[Script]) -> float:
        """Seconds for all turns. Raises WaitTimeout when they take PASS_TIMEOUT_S."""
        self._pipe.send_bytes(_encoder.encode(scripts))
        return self._receive("play a repeat", PASS_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(b"")
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_TIMEOUT_S)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self, what: str, timeout_s: float) -> float:
        if not self._pipe.poll(timeout_s):
            self._process.kill()
            raise WaitTimeout(f"vLLM's offline engine did not {what} within {timeout_s:g} s")
        try:
            return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=float)
        except EOFError:
            self._process.join(END_TIMEOUT_S)
            raise ConfigurationError(
                f"vLLM's offline engine ended with code {self._process.exitcode} instead of"
                f" {what}ing; its own output above says why"
            ) from None


def _serve(pipe: Connection, model: str, encoded_load: bytes) -> None:
    load = msgspec.msgpack.decode(encoded_load, type=Load)
    engine = _Engine(Path(model), load)
    pipe.send_bytes(_encoder.encode(0.0))
    while encoded := pipe.recv_bytes():
        pipe.send_bytes(_encoder.encode(engine.play(_scripts.decode(encoded))))


class _Engine:
    """In the process: the LLM."""

    def __init__(self, model: Path, load: Load) -> None:
        import torch
        from vllm import LLM

        from leeway.actors.vllm_policy import engine_arguments, sampling_params, set_environment

        set_environment(load.policy)
        if not torch.cuda.is_available():
            torch.set_num_threads(load.policy.num_threads)
        self._load = load
        self._params = sampling_params(load.turn_tokens, (NEVER,), [], 1.0)
        self._params.flat_logprobs = True  # vLLM's own faster way
        self._llm = LLM(**engine_arguments(model, load.policy, seed=1))

    def play(self, scripts: Sequence[Script]) -> float:
        """Seconds for all turns."""
        began = time.perf_counter()
        for wave in waves(scripts, self._load):
            prompts = [script.prompt_ids for script in wave]
            for k in range(NUM_TURNS):
                prompts = next_prompts(prompts, self._generate(prompts), wave, k)
        return time.perf_counter() - began

    def _generate(self, prompts: Sequence[list[int]]) -> list[Sequence[int]]:
        inputs: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, self._params, use_tqdm=False)
        sampled = [output.outputs[0].token_ids for output in outputs]
        assert all(len(ids) == self._load.turn_tokens for ids in sampled), "a turn ended early"
        return sampled
