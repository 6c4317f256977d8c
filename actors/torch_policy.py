"""TorchPolicy: decoding in this process, with a static cache and continuous batching.

For tests, experiments and machines without vLLM. One thread decodes:

    complete() ──> queue ──> waiting ──> a free cache slot ──> rows, a token each a step ──> future
                                         (prompt computed)     ^                    │
                                                               └────────────────────┘

New requests begin between two steps, and weights change between two steps, so running requests go
on under the new version, as they do in the served engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import insort
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from leeway.actors.config import PolicyConfig
from leeway.actors.decode_graphs import GraphStep
from leeway.actors.decoder import Decoder, EagerStep, Feed
from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest, check_request
from leeway.actors.slots import Prefix, Slots
from leeway.actors.stops import StopFinder
from leeway.actors.tokens import Tokens
from leeway.actors.weight_receiver import (
    Committed,
    Delivery,
    Rendezvous,
    StagingArea,
    check_manifest,
)
from leeway.replay.board import TensorSpec
from leeway.replay.errors import TransferError
from leeway.replay.memory_handle import MemoryHandle
from leeway.replay.schema import PolicyVersion
from leeway.replay.transfer import gpu_uuid

PREFILL_EVERY: Final = {"cpu": 1, "cuda": 3}
"""Decoding steps between two steps over prompts, as long as anything is decoded. On a GPU a step
over one prompt costs as much as one over thirty, and as several decoding steps, which are bursts
there."""
MAX_PREFILL_TOKENS: Final = {"cpu": 2048, "cuda": 16384}
"""Prompts stop joining a step beyond this many tokens, so that running rows wait no longer."""


@dataclass(eq=False)
class _Row:
    """A request on its way. `slot` is where its keys and values stand, None while it waits."""

    request: CompletionRequest
    future: Future[Completion]
    endings: frozenset[int]
    """Tokens that can end the row; all others go on without a closer look."""
    max_tokens: int
    """By the request or by the context, whichever is less."""
    place: tuple[int, int] = (0, 0)
    """Among those that wait: its priority, and how many came before."""
    slot: int | None = None
    num_cached: int = 0
    begun_at: PolicyVersion | None = None
    """Version of the first keys and values in the slot."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def prompt_feed(self, num_kept: int) -> Feed:
        """The prompt behind the `num_kept` tokens whose keys and values stand already."""
        assert self.slot is not None
        return Feed(self.slot, num_kept, self.request.prompt_ids[num_kept:])

    def next_feed(self) -> Feed:
        """The last token, sampled or of the prompt."""
        assert self.slot is not None
        position = len(self.request.prompt_ids) + len(self.token_ids) - 1
        return Feed(self.slot, position, self.token_ids[-1:] or self.request.prompt_ids[-1:])

    def append(self, token: int, logprob: float, version: PolicyVersion) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def answer(self, finish: str) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self.future.set_result(
            Completion(
                token_ids=self.token_ids,
                logprobs=self.logprobs,
                versions=self.versions,
                finish="stop" if finish == "stop" else "length",
                num_cached=self.num_cached,
            )
        )

    def fail(self, error: str) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineError(error))


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
        self._decoder = Decoder(model, config.max_num_seqs, config.max_model_len)
        device = self._decoder.device
        generator = torch.Generator(device).manual_seed(seed)
        self.generator = generator
        """Of sampling. Its state may be read and set while nothing is decoded."""
        self._prefill_step = EagerStep(self._decoder, generator)
        self._decode_step = (
            GraphStep(self._decoder, generator) if device.type == "cuda" else self._prefill_step
        )
        self._tokens = tokens
        self._stops = StopFinder(tokens, self._decoder.vocab_size)
        self._config = config
        self._version = version
        self.num_sampled = 0
        """Tokens since the start."""
        self._staging = StagingArea(device)
        self._weights_lock = threading.Lock()
        self._weights_gate = threading.Lock()
        self._queue: SimpleQueue[_Row | None] = SimpleQueue()
        self._waiting: list[_Row] = []
        """By priority, and as they came."""
        self._num_received = 0
        self._postponed: list[_Row] = []
        self._rows: list[_Row] = []
        self._slots = Slots(config.max_num_seqs, config.max_model_len)
        self._num_steps_since_prefill = 0
        self._has_postponed = False
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
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
        return cls(loaded.to(device), Tokens.load(model), config, seed=seed, version=version)

    @property
    def num_ranks(self) -> int:
        """Processes that receive weights."""
        return 1

    @property
    def dtype(self) -> str:
        """Of the weights, such as bfloat16."""
        return str(next(self._model.parameters()).dtype).removeprefix("torch.")

    @property
    def gpus(self) -> list[str]:
        """UUID of the GPU it computes on, if it is one."""
        uuid = gpu_uuid(self._decoder.device)
        return [] if uuid is None else [uuid]

    @property
    def stages(self) -> bool:
        """Versions are received beside the one in use, always."""
        return True

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one turn."""
        check_request(request, self._config.max_model_len)
        # No row comes after the None of close(), so none is left unanswered.
        if self._is_closed:
            raise EngineError(f"request {request.request_id}: the policy is closed")
        endings = self._stops.could_complete(request.stop)
        if self._tokens.eos_id is not None:
            endings |= {self._tokens.eos_id}
        room = self._config.max_model_len - len(request.prompt_ids)
        row = _Row(request, Future(), endings, min(request.max_tokens, room))
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

    async def expose(self, delivery: Delivery) -> list[MemoryHandle]:
        """Let the learner write into staging; where that is."""
        self._staging.start_expose(delivery)
        await self._until_idle("expose its memory", delivery.timeout_s)
        return [self._staging.memory()]

    async def arrived(self, checksum: str, wire_s: float) -> None:
        """The learner has written a version there, in `wire_s` seconds."""
        self._staging.arrived(checksum, wire_s)

    async def stage(self, delivery: Delivery) -> float:
        """Receive a published version into staging. Returns seconds."""
        began = time.monotonic()
        self._staging.start_receive(delivery)
        await self._until_idle("receive", delivery.timeout_s)
        return time.monotonic() - began

    async def commit(self, version: PolicyVersion, checksum: str) -> Committed:
        """Swap the staged weights in between two decoding steps."""
        self._staging.check(checksum)
        began = time.monotonic()
        self.load(self._staging.views(), version)
        pause_s = time.monotonic() - began
        self._staging.recheck()
        return Committed(
            version=version,
            checksum=checksum,
            pause_s=pause_s,
            copy_s=pause_s,
            wire_s=self._staging.wire_s,
        )

    def load(self, weights: dict[str, torch.Tensor], version: PolicyVersion) -> None:
        """Take `weights` into use as `version`; `check_manifest` has passed them."""
        with self._weights():
            self._model.load_state_dict(weights, strict=False)
            if self._decoder.device.type == "cuda":
                torch.cuda.synchronize(self._decoder.device)
            self._version = version
            self._slots.expire()

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Sole use of the weights: for a step, or to change them.

        The gate makes it fair: the decoding thread, which is back after each step at once, would
        otherwise win the lock from one that waits for it, again and again.
        """
        with self._weights_gate:
            self._weights_lock.acquire()
        try:
            yield
        finally:
            self._weights_lock.release()

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
        while self._receive():
            try:
                self._step()
            except Exception as error:
                self._fail_all(f"decoding failed: {error}")
        self._fail_all("the policy is closed")

    def _receive(self) -> bool:
        """Take in what was sent, waiting if there is nothing else to do; False after close()."""
        while True:
            try:
                row = self._queue.get(block=not (self._rows or self._waiting))
            except Empty:
                return True
            if row is None:
                return False
            self._num_received += 1
            row.place = (row.request.priority, self._num_received)
            insort(self._waiting, row, key=lambda other: other.place)

    def _fail_all(self, error: str) -> None:
        for row in {*self._rows, *self._waiting, *self._postponed}:
            row.fail(error)
        self._rows.clear()
        self._waiting.clear()
        self._postponed.clear()
        self._slots = Slots(self._config.max_num_seqs, self._config.max_model_len)

    @torch.inference_mode()
    def _step(self) -> None:
        """Begin what waits, as far as there is room, then sample one token for every row."""
        self._drop_cancelled()
        if self._may_admit():
            with self._weights():
                self._prefill()
        with self._weights():
            if self._rows:
                feeds = [row.next_feed() for row in self._rows]
                self._sample(self._decode_step, self._rows, feeds)

    def _may_admit(self) -> bool:
        self._num_steps_since_prefill += 1
        wait = PREFILL_EVERY[self._decoder.device.type]
        return not self._rows or self._num_steps_since_prefill >= wait

    def _prefill(self) -> None:
        prompts = self._admit()
        if prompts:
            # Siblings of what is computed now need no step over their prompts: no need to wait.
            if not self._has_postponed:
                self._num_steps_since_prefill = 0
            rows, feeds = zip(*prompts, strict=True)
            self._sample(self._prefill_step, rows, feeds)

    def _drop_cancelled(self) -> None:
        for row in [row for row in self._rows if row.future.cancelled()]:
            self._end(row)

    def _admit(self) -> list[tuple[_Row, Feed]]:
        """Move waiting requests to free slots; the rows whose prompts are to be computed."""
        prompts: list[tuple[_Row, Feed]] = []
        pending: set[int] = set()
        num_tokens = 0
        most = MAX_PREFILL_TOKENS[self._decoder.device.type]
        while self._waiting and self._slots.num_free and num_tokens < most:
            # A row stays among those that wait until it has begun, so that no error loses it.
            row = self._waiting[0]
            prefix = self._slots.longest_prefix(row.request.prompt_ids, self._version, pending)
            if row.future.cancelled():
                self._waiting.pop(0)
            elif prefix is not None and prefix.slot in pending:
                self._postponed.append(self._waiting.pop(0))
            else:
                feed = self._begin(row, prefix)
                # The last token of a prompt goes in like a sampled one, with the next of all rows.
                if len(feed.ids) > 1:
                    prompts.append((row, feed))
                    pending.add(feed.slot)
                num_tokens += len(feed.ids)
                self._waiting.pop(0)
        self._has_postponed = bool(self._postponed)
        self._waiting[:0] = self._postponed
        self._postponed.clear()
        return prompts

    def _begin(self, row: _Row, prefix: Prefix | None) -> Feed:
        row.slot = self._slots.take(row.request.prompt_ids, self._version, prefix)
        row.begun_at = self._version
        self._rows.append(row)
        if prefix is not None and prefix.slot != row.slot:
            self._decoder.copy(prefix.slot, row.slot, prefix.num_tokens)
        row.num_cached = prefix.num_tokens if prefix is not None else 0
        return row.prompt_feed(row.num_cached)

    def _sample(
        self, step: EagerStep | GraphStep, rows: Sequence[_Row], feeds: Sequence[Feed]
    ) -> None:
        going = list(enumerate(rows))
        for tokens, logprobs in step(feeds, [row.request.temperature for row in rows]):
            for n, row in going:
                row.append(tokens[n], logprobs[n], self._version)
                self.num_sampled += 1
            ended = [row for _, row in going if self._ends(row)]
            if ended:
                # Tokens behind a row's end are dropped; nobody reads their keys and values.
                going = [(n, row) for n, row in going if row not in ended]

    def _ends(self, row: _Row) -> bool:
        """Answer the row and free its slot if its last token ends it."""
        might_end = row.token_ids[-1] in row.endings or len(row.token_ids) >= row.max_tokens
        finish = self._finish(row) if might_end else None
        if finish is None:
            return False
        self._end(row)
        row.answer(finish)
        return True

    def _finish(self, row: _Row) -> str | None:
        """Why the row ends with its last token, None if it goes on."""
        if row.token_ids[-1] == self._tokens.eos_id:
            return "stop"
        if self._stops.is_complete(row.token_ids, row.request.stop):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_tokens else None

    def _end(self, row: _Row) -> None:
        """Free the row's slot; what stands in it is every token but the last, which was not fed."""
        assert row.slot is not None
        ids = (row.request.prompt_ids + row.token_ids)[:-1]
        version = self._version if row.begun_at == self._version else None
        self._slots.release(row.slot, ids, version)
        self._rows.remove(row)
