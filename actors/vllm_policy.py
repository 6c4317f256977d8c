"""VllmPolicy: a vLLM engine that takes weights while it generates.

Two processes are at work. `VllmPolicy` lives in the Serve replica and drives vLLM's asynchronous
front end; `WorkerExtension` is part of each of the engine's workers (actors/vllm_worker.py). A
publish goes like this:

    replica                              worker
    expose     -> leeway_expose          once: let the learner write into staging } generation
                  (nothing)              the learner writes                       } goes on
    arrived    -> leeway_arrived         it is through                            }
    commit     -> leeway_check           is it what was sent?                     }
               -> pause, running requests kept; what is under way on the device is drained
               -> leeway_commit          device-local copy of staging into place
               -> set version, resume
               -> leeway_verify          a thread compares what is in use         } goes on

A learner on another machine, whose GPU cannot reach that memory, sends over a process group:

    join       -> leeway_join            build it, once
    stage      -> leeway_receive         a thread receives into staging

Only `leeway_commit` goes through the engine, which waits for the device at each call. All else
takes the side channel (actors/side_channel.py).

Without memory for staging the pause begins before the weights are received, straight into place.
vLLM's own weight-transfer interface is not used: it waits for the device after each call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from leeway.actors import side_channel
from leeway.actors.config import PolicyConfig
from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest, check_request
from leeway.actors.vllm_logprobs import SCHEDULER, SampledLogprobs
from leeway.actors.vllm_metrics import stat_loggers
from leeway.actors.vllm_versions import TokenVersions, token_versions
from leeway.actors.weight_receiver import Committed, Delivery, Rendezvous, check_manifest
from leeway.replay.board import TensorSpec
from leeway.replay.errors import ChecksumMismatch, TransferError
from leeway.replay.memory_handle import MemoryHandle
from leeway.replay.schema import PolicyVersion

log = logging.getLogger(__name__)

WORKER_EXTENSION = "leeway.actors.vllm_worker.WorkerExtension"
BATCHES_OF = UsageContext.OPENAI_API_SERVER
"""Sizes of batches as vLLM's own server has them: on large GPUs 8,192 tokens a step. An engine of
no stated use has 2,048, which prompts alone would fill."""
MAX_SAMPLES = 5
"""Times a request is sampled whose first token came after a change of weights. The last one counts.
"""
SHUTDOWN_S = 20.0
"""Seconds the engine's processes have to end by themselves; they take about 3 on a busy CPU."""
LOOK_S = 0.1
"""Seconds that a worker waits for the end of its thread before it answers that it is busy."""
STAGED_SHARE = 0.6
"""Weights and staging may take this much of the engine's memory; the rest is for keys and values.
"""


class VllmPolicy:
    """A Policy on one vLLM engine."""

    def __init__(
        self,
        engine: AsyncLLM,
        model: Path,
        config: PolicyConfig,
        logprobs: SampledLogprobs,
        versions: TokenVersions,
        version: PolicyVersion,
        side_channels: list[str],
    ) -> None:
        """`side_channels` are the workers' addresses, by rank."""
        self._engine = engine
        self._side_channels = side_channels
        self._loaded = _loaded_shapes(model)
        self._config = config
        self._max_model_len = config.max_model_len
        staging = Staging.of(config, self._loaded)
        log.info("%s", staging)
        self._stages = staging.is_used
        self._logprobs = logprobs
        self._versions = versions
        self._version = version
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._pause_asked = False
        self._paused_at: float | None = None
        self._num_commits = 0
        """Tells apart two versions of one number, of which the first was lost with a learner."""
        self._gpus = _gpu_uuids(config)
        self._broken: str | None = None
        """Why nothing that the engine samples may be used any longer."""
        self._sent: dict[str, bool] = {}
        """Requests in the engine; False: taken back, whatever becomes of it."""
        self._stop_ids: dict[tuple[str, ...], list[int]] = {}

    @classmethod
    async def start(
        cls, model: Path, config: PolicyConfig, *, seed: int, version: PolicyVersion
    ) -> VllmPolicy:
        """Load `model`, whose weights are policy version `version`. Takes 25 to 50 s on a CPU."""
        set_environment(config)
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_arguments(model, config, seed), scheduler_cls=SCHEDULER),
            stat_loggers=stat_loggers(config),
            usage_context=BATCHES_OF,
        )
        logprobs = SampledLogprobs(engine)
        versions = await token_versions(engine, version)
        addresses = await engine.collective_rpc("leeway_listen")
        return cls(engine, model, config, logprobs, versions, version, addresses)

    @property
    def engine(self) -> AsyncLLM:
        """vLLM's own front end, for who measures it."""
        return self._engine

    @property
    def num_ranks(self) -> int:
        """Processes that receive weights."""
        return self._config.tensor_parallel_size

    @property
    def dtype(self) -> str:
        """Of the weights, such as bfloat16."""
        return _dtype(self._config)

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs it computes on."""
        return self._gpus

    @property
    def stages(self) -> bool:
        """Whether a version is received beside the one in use."""
        return self._stages

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one turn; the versions are those the engine reports for its tokens."""
        check_request(request, self._max_model_len)
        max_tokens = min(request.max_tokens, self._max_model_len - len(request.prompt_ids))
        stop_ids = await self._single_token_stops(request.stop)
        params = sampling_params(max_tokens, request.stop, stop_ids, request.temperature)
        num_samples = num_discarded = 0
        while True:
            # A request sent during the pause would carry the old salt.
            await self._unpaused.wait()
            started_for = self._version
            salt = f"v{started_for}-{self._num_commits}"
            completion, num_tokens = await self._sample(request, params, salt)
            if completion is None:
                num_discarded += num_tokens
                continue
            num_samples += 1
            if completion.versions[0] == started_for or num_samples == MAX_SAMPLES:
                return msgspec.structs.replace(completion, num_discarded=num_discarded)
            num_discarded += num_tokens
            # Its first token came after a change of weights: it may have read a prefix that was
            # cached under the older ones. Which requests do depends on time alone, so sampling it
            # again biases nothing.

    async def _sample(
        self, request: CompletionRequest, params: SamplingParams, salt: str
    ) -> tuple[Completion | None, int]:
        """One pass of the engine, and how many tokens it sampled; None if weights changed before
        the first.

        The salt keeps prefixes of other versions from being reused.
        """
        prompt: Any = {"prompt_token_ids": request.prompt_ids, "cache_salt": salt}
        last = None
        # vLLM forgets an id only after its last output; a retry must not collide with it.
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        self._sent[request_id] = True
        try:
            async for output in self._engine.generate(
                prompt, params, request_id, priority=request.priority
            ):
                last = output
        except (asyncio.CancelledError, GeneratorExit):
            self._forget(request_id)
            raise
        except Exception as error:
            self._forget(request_id)
            raise EngineError(f"request {request.request_id}: {error}") from error
        finally:
            wanted = self._sent.pop(request_id)
        if not wanted:
            self._forget(request_id)
            return None, 0 if last is None else len(last.outputs[0].token_ids)
        completion = self._completion(request_id, last)
        return completion, len(completion.token_ids)

    async def _take_back_waiting(self) -> None:
        """Take back the requests that have no token yet; they are sent again with the new salt.

        They waited while weights changed, so their turns would be thrown away at the end.
        """
        waiting = [name for name in self._sent if not self._logprobs.has_begun(name)]
        for name in waiting:
            self._sent[name] = False
        if waiting:
            await self._engine.abort(waiting)

    def _forget(self, request_id: str) -> None:
        self._logprobs.forget(request_id)
        self._versions.forget(request_id)

    def _completion(self, request_id: str, last: Any) -> Completion:
        if self._broken is not None:
            self._forget(request_id)
            raise EngineError(f"request {request_id}: {self._broken}")
        if last is None or not last.outputs[0].token_ids:
            self._forget(request_id)
            raise EngineError(f"request {request_id}: the engine ended it without tokens")
        final = last.outputs[0]
        token_ids = list(final.token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=self._logprobs.of(request_id, len(token_ids)),
            versions=self._versions.of(request_id, final)[: len(token_ids)],
            finish="stop" if final.finish_reason == "stop" else "length",
            num_cached=last.num_cached_tokens or 0,
        )

    async def _single_token_stops(self, stop: tuple[str, ...]) -> list[int]:
        # Where a stop string is one token the engine itself can end the request at once; stop
        # strings are found in the front end, after the engine has sampled past them.
        if stop not in self._stop_ids:
            tokenizer = self._engine.get_tokenizer()
            encoded = [tokenizer.encode(s, add_special_tokens=False) for s in stop]
            self._stop_ids[stop] = [ids[0] for ids in encoded if len(ids) == 1]
        return self._stop_ids[stop]

    async def version(self) -> PolicyVersion:
        """Version of the weights in use."""
        return self._version

    async def check(self) -> None:
        """Raise when the engine is dead, or its weights are of no version."""
        if self._broken is not None:
            raise EngineError(self._broken)
        await self._engine.check_health()

    async def close(self) -> None:
        """End the engine's processes; requests in flight, and later ones, fail with EngineError."""
        # The front end reports the end of its engine as a failure, with a traceback.
        logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
        await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)

    # ---- weights

    async def check_manifest(self, manifest: list[TensorSpec]) -> None:
        """Raise TransferError unless the manifest lists what the engine loaded from its folder."""
        if not self._loaded:
            return  # no safetensors: what is loaded shows only when it is
        is_tied = getattr(self._engine.model_config.hf_config, "tie_word_embeddings", False)
        check_manifest(manifest, self._loaded, optional=("lm_head.weight",) if is_tied else ())

    async def join(self, rendezvous: Rendezvous) -> None:
        """Join a transfer group; returns when the workers' joins have ended."""
        await self._aside("leeway_join", rendezvous.to_dict())
        await self._until_idle("join", rendezvous.timeout_s)

    async def expose(self, delivery: Delivery) -> list[MemoryHandle]:
        """Let the learner write into every worker's staging; where that is, by rank."""
        await self._aside("leeway_expose", delivery.to_dict())
        await self._until_idle("expose its memory", delivery.timeout_s)
        return msgspec.convert(await self._aside("leeway_memory"), list[MemoryHandle])

    async def arrived(self, checksum: str, wire_s: float) -> None:
        """The learner has written a version there, in `wire_s` seconds."""
        await self._aside("leeway_arrived", checksum, wire_s)

    async def stage(self, delivery: Delivery) -> float:
        """Receive a published version while generation goes on. Returns seconds.

        Without staging generation pauses here, until `commit`; what fails then leaves weights of no
        version, and the engine must be restarted.
        """
        began = time.monotonic()
        try:
            if not self._stages:
                await self._pause()
            await self._aside("leeway_receive", delivery.to_dict(), self._stages)
            await self._until_idle("receive", delivery.timeout_s)
        except BaseException as error:
            if not self._stages:
                self._broken = f"its weights are of no version: {error}"
                await self._resume()
            raise
        return time.monotonic() - began

    async def commit(self, version: PolicyVersion, checksum: str) -> Committed:
        """Take the received weights into use, running requests kept. Returns the pause.

        Raises ChecksumMismatch before anything changed. Any other error leaves the engine with
        unknown weights: it must be restarted.
        """
        await self._check(checksum)
        try:
            await self._pause()
            ranks = await self._engine.collective_rpc("leeway_commit", args=(str(version),))
            self._version = version
            self._num_commits += 1
            pause_s = await self._resume(version)
            await self._take_back_waiting()
            if any(await self._aside("leeway_verify")):
                await self._until_idle("verify", self._config.start_timeout_s)
        except BaseException as error:
            self._broken = f"version {version} was not taken into use: {error}"
            raise
        finally:
            await self._resume()
        return Committed(
            version=version,
            checksum=checksum,
            pause_s=pause_s,
            copy_s=max(rank["copy_s"] for rank in ranks),
            wire_s=max(rank["wire_s"] for rank in ranks),
        )

    async def _check(self, checksum: str) -> None:
        for problem in await self._aside("leeway_check", checksum):
            if problem and self._stages:
                await self.abandon()
                raise ChecksumMismatch(problem)
            if problem:
                self._broken = f"its weights are of no version: {problem}"
                await self._resume()
                raise TransferError(self._broken)

    async def _pause(self) -> None:
        """Until nothing is under way any longer; harmless when repeated."""
        if self._paused_at is None:
            self._unpaused.clear()
            self._pause_asked = True
            await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            self._paused_at = time.monotonic()

    async def _resume(self, version: PolicyVersion | None = None) -> float:
        """Go on, with tokens of `version` if it is a new one. Returns the seconds of the pause."""
        if not self._pause_asked:
            self._unpaused.set()
            return 0.0
        if version is not None:
            await self._versions.set(version)
        await self._engine.resume_generation()
        pause_s = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        self._pause_asked, self._paused_at = False, None
        self._unpaused.set()
        return pause_s

    async def abandon(self) -> None:
        """Forget a transfer that failed, so that the next one can start."""
        if self._pause_asked:
            # Received in place and not to be used: nothing brings the weights before back.
            self._broken = self._broken or "its weights are of no version: the learner gave up"
            await self._resume()
        await self._aside("leeway_abandon")

    async def _aside(self, method: str, *arguments: object) -> list[Any]:
        """Call every worker beside its engine, which goes on; the answers by rank."""
        calls = (
            asyncio.to_thread(side_channel.call, address, method, *arguments)
            for address in self._side_channels
        )
        return await asyncio.gather(*calls)

    async def _until_idle(self, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            states = set(await self._aside("leeway_transfer_state", LOOK_S))
            problems = states - {"busy", "idle"}
            if problems:
                raise TransferError(problems.pop())
            if states == {"idle"}:
                return
        raise TransferError(f"the engine did not {what} within {timeout_s:g} s")


def sampling_params(
    max_tokens: int, stop: tuple[str, ...], stop_ids: list[int], temperature: float
) -> SamplingParams:
    """A turn's parameters; `stop_ids` are the stop strings that are one token."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        logprobs=0,
        stop=list(stop),
        stop_token_ids=stop_ids,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def set_environment(config: PolicyConfig) -> None:
    """What an engine reads from the environment of the process that starts it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # 1 lets calls to workers be pickled
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if find_spec("flashinfer") is None:
        # vLLM takes for granted on recent GPUs that its sampler is there.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # A fork of a process that has so much as asked whether there are GPUs cannot use them.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if not torch.cuda.is_available():
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
        # The sampler's small kernels would be compiled at the first batch, for 20 s.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        # vLLM refuses the single-process executor on CPUs unless this is off. Its multi-process one
        # keeps a second process that spins while it waits, on cores the learner needs.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def engine_arguments(model: Path, config: PolicyConfig, seed: int) -> dict[str, Any]:
    """vLLM's engine arguments by name; an LLM of these is the same engine, offline."""
    on_gpu = torch.cuda.is_available()
    extra: dict[str, Any] = (
        {"gpu_memory_utilization": _memory_share(model, config)}
        if on_gpu
        # Small blocks: siblings share prompts, and a turn's prompt is the turn before it.
        else {"block_size": 32}
    )
    if config.tensor_parallel_size > 1:
        extra["tensor_parallel_size"] = config.tensor_parallel_size
        extra["distributed_executor_backend"] = "mp"
    elif not on_gpu:
        extra["distributed_executor_backend"] = "uni"
    return {
        "model": str(model),
        "dtype": _dtype(config),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed,
        "enforce_eager": not on_gpu,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "load_format": "safetensors",
        "trust_remote_code": config.trust_remote_code,
        **extra,
    }


def _gpu_uuids(config: PolicyConfig) -> list[str]:
    """Of the devices that this process sees, which are those its engine was started on."""
    if not torch.cuda.is_available():
        return []
    places = range(config.tensor_parallel_size)
    return [current_platform.get_device_uuid(i).removeprefix("GPU-") for i in places]


def _dtype(config: PolicyConfig) -> str:
    """Runs have decided; `auto` is left where an engine is measured by itself."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"


@dataclass(frozen=True)
class Staging:
    """Whether a version is received beside the weights in use, and the bytes that it depends on."""

    setting: str
    """`policy.staging`."""
    is_used: bool
    weight_bytes: int
    """Of the weights in use, on each device."""
    room_bytes: int
    """That staging takes on each device, where it is used: a whole version."""
    budget_bytes: int | None
    """That `auto` gives to both; None on a CPU, where it always stages."""

    @classmethod
    def of(cls, config: PolicyConfig, loaded: dict[str, list[int]]) -> Staging:
        """What the configuration says, or memory.

        7B in bfloat16 on 80 GiB, of which the engine has 85 %: 14.2 GiB of weights and as much of
        staging are 42 % of its 68 GiB, so `auto` stages. 32B would be 180 %: it is received in
        place.
        """
        whole = _num_bytes(config, loaded)
        weights, budget = whole // config.tensor_parallel_size, None
        if torch.cuda.is_available():
            total = current_platform.get_device_total_memory()
            budget = int(STAGED_SHARE * config.gpu_memory_utilization * total)
        fits = budget is None or weights + whole <= budget
        is_used = fits if config.staging == "auto" else config.staging == "always"
        return cls(config.staging, is_used, weights, whole, budget)

    def __str__(self) -> str:
        where = "beside the weights in use" if self.is_used else "straight into place"
        bound = "no bound" if self.budget_bytes is None else f"a budget of {self.budget_bytes:,}"
        return (
            f'policy.staging = "{self.setting}": versions are received {where}; on each device '
            f"{self.weight_bytes:,} bytes of weights, {self.room_bytes:,} of staging, {bound}"
        )


def _memory_share(model: Path, config: PolicyConfig) -> float:
    """What vLLM may fill with weights, keys and values: staging is left free."""
    staging = Staging.of(config, _loaded_shapes(model))
    if not staging.is_used:
        return config.gpu_memory_utilization
    total = current_platform.get_device_total_memory()
    return max(0.05, config.gpu_memory_utilization - staging.room_bytes / total)


def _num_bytes(config: PolicyConfig, loaded: dict[str, list[int]]) -> int:
    size = getattr(torch, _dtype(config)).itemsize
    return sum(prod(shape) * size for shape in loaded.values())


def _loaded_shapes(model: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in the model's safetensors files; empty if it has none."""
    tensors = get_safetensors_params_metadata(str(model))
    # Old checkpoints hold this buffer; engines compute it.
    return {
        name: entry["shape"]
        for name, entry in tensors.items()
        if "shape" in entry and not name.endswith(".rotary_emb.inv_freq")
    }
