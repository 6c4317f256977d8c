"""VllmPolicy: a vLLM engine that takes weights while it generates. The only file that imports vllm.

Two processes are at work. `VllmPolicy` lives in the Serve replica and drives vLLM's asynchronous
front end; `StagedTransferEngine` lives in the engine's worker process, where `WorkerExtension`
registers it. A publish goes through vLLM's weight-transfer interface like this:

    replica                              worker
    join       -> init_weight_transfer_engine   build the process group          } generation
    stage      -> update_weights                a thread receives into staging    } goes on
    commit     -> pause, keep running requests
               -> finish_weight_update          load staging, compare what the engine will use
               -> set version, resume
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.v1.engine.async_llm import AsyncLLM

from leeway.actors.config import PolicyConfig
from leeway.actors.failures import EngineError
from leeway.actors.policy import Completion, CompletionRequest, check_request
from leeway.actors.weight_receiver import Committed, Rendezvous, StagingArea, check_manifest
from leeway.replay.board import TensorSpec
from leeway.replay.errors import ChecksumMismatch, TransferError
from leeway.replay.schema import PolicyVersion

BACKEND = "leeway_staged"
MAX_STARTS = 5
"""Times a request is sent whose first token came after a change of weights; the last one counts."""
SHUTDOWN_S = 20.0
"""Seconds the engine's processes have to end by themselves; they take about 3 on a busy CPU."""


class VllmPolicy:
    """A Policy on one vLLM engine."""

    def __init__(
        self, engine: AsyncLLM, model: Path, max_model_len: int, version: PolicyVersion
    ) -> None:
        self._engine = engine
        self._loaded = _loaded_shapes(model)
        self._max_model_len = max_model_len
        self._version = version
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._stop_ids: dict[tuple[str, ...], list[int]] = {}

    @classmethod
    async def start(
        cls, model: Path, config: PolicyConfig, *, seed: int, version: PolicyVersion
    ) -> VllmPolicy:
        """Load `model`, whose weights are policy version `version`. Takes 25 to 50 s on a CPU."""
        set_environment(config)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(model, config, seed)))
        await engine.update_weight_version(str(version))
        return cls(engine, model, config.max_model_len, version)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Sample one turn; the versions are those the engine reports for its tokens."""
        check_request(request, self._max_model_len)
        max_tokens = min(request.max_tokens, self._max_model_len - len(request.prompt_ids))
        stop_ids = await self._single_token_stops(request.stop)
        params = sampling_params(max_tokens, request.stop, stop_ids, request.temperature)
        for start in itertools.count(1):
            # A request sent during the pause would carry the old salt.
            await self._unpaused.wait()
            started_for = self._version
            completion = await self._sample(request, params, f"v{started_for}")
            if completion.versions[0] == started_for or start == MAX_STARTS:
                return completion
            # It waited in the engine's queue while weights changed: it may have read a prefix that
            # was cached under the older ones. Which requests do depends on time alone, so sampling
            # it again biases nothing.
        raise AssertionError("unreachable")

    async def _sample(
        self, request: CompletionRequest, params: SamplingParams, salt: str
    ) -> Completion:
        """One pass of the engine. The salt keeps prefixes of other versions from being reused."""
        prompt: Any = {"prompt_token_ids": request.prompt_ids, "cache_salt": salt}
        final = None
        # vLLM forgets an id only after its last output; a retry must not collide with it.
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        try:
            async for output in self._engine.generate(prompt, params, request_id):
                final = output.outputs[0]
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            raise EngineError(f"request {request.request_id}: {error}") from error
        return self._completion(request, final)

    def _completion(self, request: CompletionRequest, final: Any) -> Completion:
        if final is None or final.weight_versions is None or final.logprobs is None:
            raise EngineError(f"request {request.request_id}: the engine ended it without tokens")
        token_ids = list(final.token_ids)
        versions = [
            int(span.version) for span in final.weight_versions for _ in range(span.start, span.end)
        ]
        return Completion(
            token_ids=token_ids,
            logprobs=[
                float(entry[token].logprob)
                for token, entry in zip(token_ids, final.logprobs, strict=True)
            ],
            versions=versions[: len(token_ids)],
            finish="stop" if final.finish_reason == "stop" else "length",
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
        """Raise when the engine is dead."""
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
        """Join a transfer group; returns when the worker's join has started and ended."""
        info = {"rendezvous": rendezvous.to_dict()}
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        await self._until_idle("join", rendezvous.timeout_s)

    async def stage(self, manifest: list[TensorSpec], timeout_s: float) -> float:
        """Receive a published version into staging while generation goes on. Returns seconds."""
        began = time.monotonic()
        specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in manifest]
        await self._engine.start_weight_update()
        await self._engine.update_weights(
            WeightTransferUpdateRequest(update_info={"manifest": specs})
        )
        await self._until_idle("receive", timeout_s)
        return time.monotonic() - began

    async def commit(self, version: PolicyVersion, checksum: str) -> Committed:
        """Swap the staged weights in, running requests kept. Returns the pause.

        Raises ChecksumMismatch before anything changed. Any other error leaves the engine with
        unknown weights: it must be restarted.
        """
        for problem in await self._engine.collective_rpc("leeway_check", args=(checksum,)):
            if problem:
                await self.abandon()
                raise ChecksumMismatch(problem)
        core = self._engine.engine_core
        self._unpaused.clear()
        began = time.monotonic()
        try:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
            await self._engine.finish_weight_update(str(version))
            self._version = version
        finally:
            self._unpaused.set()
            await self._engine.resume_generation()
        return Committed(version=version, checksum=checksum, pause_s=time.monotonic() - began)

    async def abandon(self) -> None:
        """Forget a transfer that failed, so that the next one can start."""
        await self._engine.collective_rpc("leeway_abandon")

    async def _until_idle(self, what: str, timeout_s: float) -> None:
        # Each look is a call between two steps of the engine, so a long wait looks less often.
        deadline, pause_s = time.monotonic() + timeout_s, 0.002
        while time.monotonic() < deadline:
            states = set(await self._engine.collective_rpc("leeway_transfer_state"))
            problems = states - {"busy", "idle"}
            if problems:
                raise TransferError(problems.pop())
            if states == {"idle"}:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
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
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    extra: dict[str, Any] = (
        {"gpu_memory_utilization": config.gpu_memory_utilization}
        if on_gpu
        # Small blocks: siblings share prompts, and a turn's prompt is the turn before it.
        else {"distributed_executor_backend": "uni", "block_size": 32}
    )
    return {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed,
        "enforce_eager": not on_gpu,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "worker_extension_cls": "leeway.actors.vllm_policy.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        **extra,
    }


def _loaded_shapes(model: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in the model's safetensors files; empty if it has none."""
    tensors = get_safetensors_params_metadata(str(model))
    # Old checkpoints hold this buffer; engines compute it.
    return {
        name: entry["shape"]
        for name, entry in tensors.items()
        if "shape" in entry and not name.endswith(".rotary_emb.inv_freq")
    }


# ---- in the engine's worker process


@dataclass
class _InitInfo(WeightTransferInitInfo):
    rendezvous: dict[str, Any]


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
    manifest: list[list[Any]]


class StagedTransferEngine(WeightTransferEngine):
    """vLLM's weight-transfer interface over a StagingArea."""

    init_info_cls, update_info_cls = _InitInfo, _UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.staging = StagingArea(self.device)
        # It warns at each reload about layers without weights of their own, such as a tied head;
        # what was not loaded shows in check_in_use.
        reload_log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        reload_log.setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        rendezvous = Rendezvous.from_dict(init_info.rendezvous)
        self.staging.start_join(rendezvous, rank_in_engine=self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Nothing yet: loading starts when staging is complete, in finish_weight_update."""

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        self.staging.start_receive(
            [TensorSpec(name=n, dtype=d, shape=s) for n, d, s in update_info.manifest]
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes the device after each call, which would wait for the transfer.
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        staged = self.staging.take()
        model: Any = self.model
        initialize_layerwise_reload(model)
        model.load_weights(iter(staged.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        _rebind_tied_head(self.model, self.device)
        check_in_use(self.model, staged)

    def shutdown(self) -> None:
        self.staging.close()
        # The process ends now. Looking for garbage in all it ever loaded would take 2 s more.
        atexit.register(gc.freeze)

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        raise TransferError("the learner sends through leeway.learner.weights, not through vLLM")


class WorkerExtension:
    """Calls that the replica makes in every worker. Importing this module registers the engine."""

    weight_transfer_engine: StagedTransferEngine
    _weight_update_active: bool

    def leeway_transfer_state(self) -> str:
        """`busy`, `idle`, or what went wrong."""
        return self.weight_transfer_engine.staging.state()

    def leeway_check(self, checksum: str) -> str | None:
        """What is wrong with the staged weights, None if nothing is."""
        try:
            self.weight_transfer_engine.staging.check(checksum)
        except TransferError as error:
            return str(error)
        return None

    def leeway_abandon(self) -> None:
        """Drop a transfer that failed."""
        self.weight_transfer_engine.staging.abandon()
        self._weight_update_active = False


def _rebind_tied_head(model: Any, device: torch.device) -> None:
    # CPU builds pack lm_head into a closure; with tied embeddings a reload leaves the old packed
    # copy in use, and log-probs are off by 10 with no error.
    head = getattr(model, "lm_head", None)
    if device.type != "cpu" or head is None or not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def check_in_use(model: torch.nn.Module, staged: Mapping[str, torch.Tensor]) -> None:
    """Raise TransferError unless what the engine will compute with is what was staged.

    Plain weights are compared bit for bit. CPU builds keep packed weights inside closures that
    cannot be read back, so those are probed: their output for a fixed input must equal the staged
    weights'.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    unseen = set(staged)
    for path, module in model.named_modules():
        expected, names = _expected_weight(path, packed, staged)
        if expected is None:
            continue
        unseen -= names
        if not _uses(module, expected):
            raise TransferError(f"{path} does not use the weights that were sent for it")
    left = {name for name in unseen if name.endswith(".weight")}
    if left:
        raise TransferError(f"the engine has no place for {sorted(left)[0]}")


def _expected_weight(
    path: str, packed: Mapping[str, list[str]], staged: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor | None, set[str]]:
    parent, _, leaf = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    names = [f"{prefix}{part}.weight" for part in packed.get(leaf, [leaf])]
    if path == "lm_head" and names[0] not in staged:
        names = ["model.embed_tokens.weight"]
    if not all(name in staged for name in names):
        return None, set()
    return torch.cat([staged[name] for name in names]), set(names)


def _uses(module: torch.nn.Module, expected: torch.Tensor) -> bool:
    cpu_linear = getattr(module, "cpu_linear", None)
    weight: Any = getattr(module, "weight", None)
    if cpu_linear is not None:
        generator = torch.Generator().manual_seed(expected.shape[0])
        probe = torch.randn(4, expected.shape[1], generator=generator).to(expected.dtype)
        got = cpu_linear(probe, weight, None)[:, : expected.shape[0]].float()
        want = probe.float() @ expected.float().T
        tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
        return bool(((got - want).norm() <= tolerance * want.norm()).item())
    if weight is None or weight.numel() < expected.numel():
        return False
    return torch.equal(weight[: expected.shape[0]], expected.to(weight.dtype))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
