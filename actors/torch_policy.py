"""TorchPolicy: plain transformers decoding in batches, in this process.

For tests, experiments and machines without vLLM. Requests that wait are decoded together,
left-padded, with a key/value cache; weights change between two decoding steps, so running requests
go on under the new version, as they do in the served engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from leeway.actors.config import PolicyConfig
from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest, check_request
from leeway.actors.tokens import Tokens
from leeway.actors.weight_receiver import Committed, Rendezvous, StagingArea, check_manifest
from leeway.replay.board import TensorSpec
from leeway.replay.errors import TransferError
from leeway.replay.schema import PolicyVersion

STOP_WINDOW_TOKENS = 16
"""A stop string is looked for in the text of this many last tokens."""
GATHER_S = 0.004
"""How long a batch waits for more requests after its first."""


@dataclass
class _Row:
    request: CompletionRequest
    future: Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, finish: str) -> Completion:
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish="stop" if finish == "stop" else "length",
        )


class TorchPolicy:
    """A Policy on one transformers model. One thread decodes; callers wait for futures."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokens: Tokens,
        config: PolicyConfig,
        *,
        seed: int,
        version: PolicyVersion,
    ) -> None:
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._tokens = tokens
        self._config = config
        self._version = version
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._staging = StagingArea(self._device)
        self._weights_lock = threading.Lock()
        self._queue: SimpleQueue[_Row | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="leeway-decode", daemon=True)
        self._thread.start()

    @classmethod
    async def start(
        cls, model: Path, config: PolicyConfig, *, seed: int, version: PolicyVersion
    ) -> TorchPolicy:
        """Load a Hugging Face directory on the GPU if there is one."""
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return cls(loaded.to(device), Tokens.load(model), config, seed=seed, version=version)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one turn."""
        check_request(request, self._config.max_model_len)
        # No row comes after the None of close(), so none is left unanswered.
        if self._is_closed:
            raise EngineError(f"request {request.request_id}: the policy is closed")
        row = _Row(request, Future())
        self._queue.put(row)
        return await asyncio.wrap_future(row.future)

    async def version(self) -> PolicyVersion:
        """Version of the weights in use."""
        return self._version

    async def check(self) -> None:
        """Raise when the decoding thread has ended."""
        if not self._thread.is_alive():
            raise EngineError("the decoding thread has ended")

    async def close(self) -> None:
        """End the decoding thread; requests in flight, and later ones, fail with EngineError."""
        self._is_closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 10)
        self._staging.close()

    # ---- weights

    async def check_manifest(self, manifest: list[TensorSpec]) -> None:
        """Raise TransferError unless the manifest lists what this model loads."""
        shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        is_tied = bool(self._model.config.tie_word_embeddings)  # pyright: ignore
        check_manifest(manifest, shapes, optional=("lm_head.weight",) if is_tied else ())

    async def join(self, rendezvous: Rendezvous) -> None:
        """Join a transfer group."""
        self._staging.start_join(rendezvous)
        await self._until_idle("join", rendezvous.timeout_s)

    async def stage(self, manifest: list[TensorSpec], timeout_s: float) -> float:
        """Receive a published version into staging. Returns seconds."""
        began = time.monotonic()
        self._staging.start_receive(manifest)
        await self._until_idle("receive", timeout_s)
        return time.monotonic() - began

    async def commit(self, version: PolicyVersion, checksum: str) -> Committed:
        """Swap the staged weights in between two decoding steps."""
        self._staging.check(checksum)
        began = time.monotonic()
        self.load(self._staging.take(), version)
        return Committed(version=version, checksum=checksum, pause_s=time.monotonic() - began)

    def load(self, weights: dict[str, torch.Tensor], version: PolicyVersion) -> None:
        """Take `weights` into use as `version`; `check_manifest` has passed them."""
        with self._weights_lock:
            self._model.load_state_dict(weights, strict=False)
            self._version = version

    async def abandon(self) -> None:
        """Forget a transfer that failed."""
        self._staging.abandon()

    async def _until_idle(self, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (state := self._staging.state()) == "busy":
            if time.monotonic() > deadline:
                raise TransferError(f"the engine did not {what} within {timeout_s:g} s")
            await asyncio.sleep(0.005)
        if state != "idle":
            raise TransferError(state)

    # ---- decoding, on the thread

    def _serve(self) -> None:
        while (rows := self._gather()) is not None:
            try:
                self._decode(rows)
            except Exception as error:
                for row in rows:
                    if not row.future.done():
                        row.future.set_exception(EngineError(f"decoding failed: {error}"))

    def _gather(self) -> list[_Row] | None:
        """The next batch; None when the policy was closed."""
        rows: list[_Row] = []
        row = self._queue.get()
        deadline = time.monotonic() + GATHER_S
        while row is not None:
            if row.future.set_running_or_notify_cancel():
                rows.append(row)
            if len(rows) >= self._config.max_num_seqs:
                return rows
            try:
                row = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return rows
        for waiting in rows:
            waiting.future.set_exception(EngineError("the policy is closed"))
        return None

    @torch.inference_mode()
    def _decode(self, rows: list[_Row]) -> None:
        if not rows:
            return
        ids_BL, mask_BL = _left_pad([row.request.prompt_ids for row in rows], self._device)
        temperature_B = torch.tensor([row.request.temperature for row in rows], device=self._device)
        cache = None
        active = list(range(len(rows)))
        while active:
            if self._is_closed:
                raise EngineError("the policy is closed")
            with self._weights_lock:
                version = self._version
                position_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
                out = self._model(
                    input_ids=ids_BL,
                    attention_mask=mask_BL,
                    position_ids=position_BL,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            cache = out.past_key_values
            lp_BV = out.logits[:, -1].float().log_softmax(-1)
            token_B = self._sample(lp_BV, temperature_B)
            chosen_B = lp_BV.gather(1, token_B[:, None])[:, 0]
            tokens, logprobs = token_B.tolist(), chosen_B.tolist()
            active = [
                b for b in active if not self._append(rows[b], tokens[b], logprobs[b], version)
            ]
            ids_BL = token_B[:, None]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(rows), 1)], dim=1)

    def _sample(self, lp_BV: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
        # Gumbel-max: exact samples at temperature 1, the mode at 0.
        noise = torch.rand(lp_BV.shape, generator=self._generator, device=lp_BV.device)
        gumbel_BV = -torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
        return (lp_BV + gumbel_BV * temperature_B[:, None]).argmax(-1)

    def _append(self, row: _Row, token: int, logprob: float, version: int) -> bool:
        """Add one token; True when the row is finished and its caller answered."""
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)
        request = row.request
        tail = self._tokens.decode(row.token_ids[-STOP_WINDOW_TOKENS:])
        room = self._config.max_model_len - len(request.prompt_ids)
        if token == self._tokens.eos_id or any(stop in tail for stop in request.stop):
            finish = "stop"
        elif len(row.token_ids) >= min(request.max_tokens, room):
            finish = "length"
        else:
            return False
        if not row.future.done():
            row.future.set_result(row.completion(finish))
        return True


def _left_pad(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(prompt) for prompt in prompts)
    ids = [[0] * (length - len(p)) + p for p in prompts]
    mask = [[0] * (length - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
