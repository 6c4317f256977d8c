"""In each worker process of a vLLM engine: receiving weights, and taking them into use.

vLLM makes `WorkerExtension` part of its worker class; the replica calls its methods: through vLLM
what must not happen during a step, all else through a side channel that costs the engine nothing.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from leeway.actors.copy_plan import CopyPlan
from leeway.actors.side_channel import SideChannel
from leeway.actors.weight_receiver import Delivery, Rendezvous, StagingArea
from leeway.replay import free_pages
from leeway.replay.errors import TransferError
from leeway.replay.flat_weights import Layout
from leeway.replay.memory_handle import MemoryHandle

log = logging.getLogger(__name__)

VERIFY_TURNS = 16
"""After each publish one in so many tensors is compared. To look at all would take the interpreter
from the engine for longer than the publish itself."""
SEEN_ROWS = 4
"""Of each tensor that was received in place, so many rows are compared with what is in use."""
SWITCH_S = 0.0005
"""A thread of the engine's process may keep the interpreter for so long while the engine wants it;
Python's own 5 ms, several times a step, would be felt."""


class WorkerExtension:
    """Calls that the replica makes in every worker, one at a time."""

    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any

    @property
    def _weights(self) -> EngineWeights:
        found: EngineWeights | None = self.__dict__.get("_leeway_weights")
        if found is None:
            model = self.model_runner.get_model()
            found = EngineWeights(model, self.vllm_config, self.device, self.rank)
            self.__dict__["_leeway_weights"] = found
        return found

    def leeway_listen(self) -> str:
        """Take the other calls, all but `leeway_commit`, through a side channel; its address."""
        found: SideChannel | None = self.__dict__.get("_leeway_channel")
        if found is None:
            _ = self._weights  # made here, on the engine's own thread
            names = (n for n in dir(WorkerExtension) if n.startswith("leeway_"))
            apart = {"leeway_listen", "leeway_commit"}
            found = SideChannel({n: getattr(self, n) for n in names if n not in apart})
            self.__dict__["_leeway_channel"] = found
        return found.address

    def leeway_join(self, rendezvous: dict[str, object]) -> None:
        """Begin to join a transfer group."""
        self._weights.join(Rendezvous.from_dict(rendezvous))

    def leeway_receive(self, delivery: dict[str, object], staged: bool) -> None:
        """Begin to receive a version: into staging, or into place while the engine stands still."""
        self._weights.receive(Delivery.from_dict(delivery), staged)

    def leeway_expose(self, delivery: dict[str, object]) -> None:
        """Begin to expose staging to the learner."""
        self._weights.expose(Delivery.from_dict(delivery))

    def leeway_memory(self) -> MemoryHandle:
        """Where it is."""
        return self._weights.staging.memory()

    def leeway_arrived(self, checksum: str, wire_s: float) -> None:
        """The learner has written a version there."""
        self._weights.arrived(checksum, wire_s)

    def leeway_transfer_state(self, wait_s: float) -> str:
        """`busy`, `idle`, or what went wrong."""
        return self._weights.staging.state(wait_s)

    def leeway_check(self, checksum: str) -> str | None:
        """What is wrong with the received weights, None if nothing is."""
        try:
            self._weights.staging.check(checksum)
        except TransferError as error:
            return str(error)
        return None

    def leeway_commit(self, version: str) -> dict[str, Any]:
        """Take what was received into use; the engine stands still."""
        began = time.monotonic()
        how = self._weights.commit()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        copy_s = time.monotonic() - began
        log.info("version %s: %s in %.1f ms", version, how, 1e3 * copy_s)
        return {"copy_s": copy_s, "wire_s": self._weights.staging.wire_s}

    def leeway_verify(self) -> bool:
        """Begin to compare what is in use with what was received; False if there is no need."""
        return self._weights.verify()

    def leeway_abandon(self) -> None:
        """Drop a transfer that failed."""
        self._weights.abandon()


class EngineWeights:
    """The weights of one worker's model and the way new ones get there.

    `CopyPlan`, where it is proved: a copy on the device. Else, and at first, the engine's own
    reload, layer by layer.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rank: int
    ) -> None:
        self.staging = StagingArea(device)
        self._model: Any = model
        self._model_config = vllm_config.model_config
        self._is_whole = vllm_config.parallel_config.world_size == 1
        self._device = device
        self._rank = rank
        # CPU builds pack linear layers and keep them where no copy reaches.
        self._may_copy = device.type != "cpu"
        self._is_proved = False
        self._plan: CopyPlan | None = None
        self._planned_for = 0
        """Address of the staging buffer that the plan reads from."""
        self._in_place = False
        self._turn = 0
        sys.setswitchinterval(SWITCH_S)
        # It warns at each reload about layers without weights of their own, such as a tied head;
        # what was not loaded shows in check_in_use.
        reload_log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        reload_log.setLevel(logging.ERROR)
        # The process ends fast: looking for garbage in all it ever loaded would take 2 s more.
        atexit.register(gc.freeze)

    def join(self, rendezvous: Rendezvous) -> None:
        """Begin to join a transfer group."""
        self.staging.start_join(rendezvous, rank_in_engine=self._rank)

    def receive(self, delivery: Delivery, staged: bool) -> None:
        """Begin to receive a version."""
        self._in_place = not staged
        if not self.staging.has_buffer_for(delivery):
            self._forget_plan()
        if staged:
            self.staging.start_receive(delivery, then=self._make_plan)
        else:
            self.staging.start_receive(delivery, in_place=_InPlaceReload(self))

    def expose(self, delivery: Delivery) -> None:
        """Begin to let the learner write into staging."""
        if not self.staging.has_buffer_for(delivery):
            self._forget_plan()
        self.staging.start_expose(delivery, then=self._make_plan)

    def arrived(self, checksum: str, wire_s: float) -> None:
        """A version was written there."""
        self._in_place = False
        self.staging.arrived(checksum, wire_s)

    def abandon(self) -> None:
        """Drop a transfer that failed."""
        self.staging.abandon()
        self._forget_plan()

    def _forget_plan(self) -> None:
        """It holds on to the buffer it reads from."""
        self._plan, self._planned_for = None, 0

    def _make_plan(self, layout: Layout, flat: torch.Tensor) -> Callable[[], None]:
        """On the receiving thread: so long as buffer and plan belong together nothing is done."""
        address = flat.data_ptr()
        if not self._may_copy or (self._plan is not None and address == self._planned_for):
            return lambda: None
        plan = CopyPlan.trace(self._model, self._model.load_weights, layout.views(flat))

        def keep() -> None:
            self._plan, self._planned_for = plan, address
            if plan is None:
                self._may_copy = False
                log.warning("this engine's loader does more than copy: it reloads in a pause")

        return keep

    def commit(self) -> str:
        """Take what was received into use. Says how."""
        if self._in_place:
            return "received in place"
        if self._plan is None or not self._may_copy:
            self._reload()
            return "reloaded"
        if self._is_proved:
            self._plan.copy()
            return "copied"
        outcome = self._plan.prove(self._model, self._reload)
        self._is_proved, self._may_copy = outcome is True, outcome is not False
        if outcome is False:
            log.warning("this engine changes weights as it loads them: they are always reloaded")
        return "reloaded, and the copy proved" if outcome else "reloaded"

    def _reload(self) -> None:
        received = self.staging.views()
        initialize_layerwise_reload(self._model)
        self._model.load_weights(iter(received.items()))
        self.finish_reload()
        self.check_in_use(sent_of(received))

    def check_in_use(self, sent: Mapping[str, Sent]) -> None:
        """Of an engine with one rank; others hold shards, which are not told apart here."""
        if self._is_whole:
            check_in_use(self._model, sent)

    def begin_reload(self) -> None:
        """The engine's own way, in pieces."""
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A piece. It is copied: the engine keeps tensors until it has all of a layer."""
        self._model.load_weights(iter([(n, t.clone()) for n, t in tensors.items()]))

    def finish_reload(self) -> None:
        """Behind the last piece."""
        finalize_layerwise_reload(self._model, self._model_config)
        _rebind_tied_head(self._model, self._device)

    def verify(self) -> bool:
        """Begin to compare, on a thread, part of what was copied with what was received, and what
        lies in exposed memory with what was sent.

        False where there is neither: a reload has checked itself already.
        """
        plan, turn = self._plan, self._turn
        is_copied = self._is_proved and plan is not None and not self._in_place
        if not is_copied and not self.staging.was_written:
            return False

        def compare() -> None:
            self.staging.recheck()
            if is_copied and plan is not None and plan.differs(turn, VERIFY_TURNS):
                raise TransferError("the engine does not hold the weights that were sent")
            free_pages.give_back()  # outside of any pause

        self._turn = (turn + 1) % VERIFY_TURNS
        self.staging.start("take the weights into use", compare, lambda _: None)
        return True


class _InPlaceReload:
    """The engine's own reload, fed as the weights come.

    There is no room to keep them, so only the first rows of each are compared in the end.
    """

    def __init__(self, weights: EngineWeights) -> None:
        self._weights = weights
        self._sent: dict[str, Sent] = {}

    def begin(self) -> None:
        """See InPlace."""
        self._weights.begin_reload()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See InPlace."""
        self._weights.load(tensors)
        for name, (rows, num_rows) in sent_of(tensors).items():
            self._sent[name] = Sent(rows[:SEEN_ROWS].clone(), num_rows)

    def end(self) -> None:
        """See InPlace."""
        self._weights.finish_reload()
        self._weights.check_in_use(self._sent)


class Sent(NamedTuple):
    """Of a weight that was sent, what is compared with what the engine computes with."""

    rows: torch.Tensor
    """The first ones, or all."""
    num_rows: int
    """That it has."""


def sent_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sent]:
    """All rows of the weights among them; biases and buffers are not compared."""
    weights = ((n, t) for n, t in tensors.items() if n.endswith(".weight"))
    return {name: Sent(tensor, len(tensor)) for name, tensor in weights}


def _rebind_tied_head(model: Any, device: torch.device) -> None:
    # CPU builds pack lm_head into a closure; with tied embeddings a reload leaves the old packed
    # copy in use, and log-probs are off by 10 with no error.
    head = getattr(model, "lm_head", None)
    if device.type != "cpu" or head is None or not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def check_in_use(model: torch.nn.Module, sent: Mapping[str, Sent]) -> None:
    """Raise TransferError unless what the engine will compute with is what was sent.

    Plain weights are compared bit for bit. CPU builds keep packed weights inside closures that
    cannot be read back, so those are probed: their output for a fixed input must equal that of the
    weights that were sent.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    unseen = set(sent)
    for path, module in model.named_modules():
        names = _names_of(path, packed, sent)
        unseen -= set(names)
        start = 0
        for name in names:
            if not _uses(module, start, sent[name].rows):
                raise TransferError(f"{path} does not use the weights that were sent for it")
            start += sent[name].num_rows
    if unseen:
        raise TransferError(f"the engine has no place for {min(unseen)}")


def _names_of(path: str, packed: Mapping[str, list[str]], sent: Mapping[str, Sent]) -> list[str]:
    """Of what makes up a module's weight, in the order of its rows; empty if it has none.

    qkv_proj -> q_proj.weight, k_proj.weight, v_proj.weight.
    """
    parent, _, leaf = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    names = [f"{prefix}{part}.weight" for part in packed.get(leaf, [leaf])]
    if path == "lm_head" and names[0] not in sent:
        names = ["model.embed_tokens.weight"]
    return names if all(name in sent for name in names) else []


def _uses(module: torch.nn.Module, start: int, expected: torch.Tensor) -> bool:
    """Whether the rows of its weight from `start` on are `expected`."""
    stop = start + len(expected)
    cpu_linear = getattr(module, "cpu_linear", None)
    weight: Any = getattr(module, "weight", None)
    if cpu_linear is not None:
        generator = torch.Generator().manual_seed(stop)
        probe = torch.randn(4, expected.shape[1], generator=generator).to(expected.dtype)
        got = cpu_linear(probe, weight, None)[:, start:stop].float()
        want = probe.float() @ expected.float().T
        tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
        return bool(((got - want).norm() <= tolerance * want.norm()).item())
    if weight is None or len(weight) < stop:
        return False
    return torch.equal(weight[start:stop], expected.to(weight.dtype))
