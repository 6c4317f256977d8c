"""From received weights to the tensors an engine computes with: a device-local copy.

An engine's own loader knows which tensor goes where: names it fuses, shards it takes, rows it pads.
But running it takes Python a tenth of a second, in which nothing is generated. So it is run once
without writing anything, and the copies it would have made are written down. From then on a version
is taken into use by making those copies.

That is allowed only where the engine keeps its weights as they are loaded. `CopyPlan.prove` finds
out: it must leave every tensor of the engine exactly as the engine's own reload leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]
"""An engine's loader, such as a vLLM model's `load_weights`."""

_CONSTANT = frozenset({"aten::fill_", "aten::zero_"})
"""Writes that are the same for every version: padding."""


class CopyPlan:
    """Pairs of views: where a piece of the received weights goes in the engine."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """`pairs` are (engine's view, received view), of equal shapes."""
        self._into = [into for into, _ in pairs]
        self._out_of = [received for _, received in pairs]

    @classmethod
    def trace(cls, model: nn.Module, load: Load, received: Mapping[str, Tensor]) -> CopyPlan | None:
        """What `load` would copy from `received` into the tensors of `model`; writes nothing.

        `received` are views of one buffer that stays: the plan reads what lies there when it is
        carried out. None if the loader does anything but copy, or fails.
        """
        recorder = _Recorder(model, received)
        try:
            with torch.no_grad(), recorder:
                load(iter(received.items()))
        except Exception:
            return None  # a loader that wants its tensors as they were at the start
        return None if recorder.refusal else cls(recorder.pairs)

    @property
    def num_bytes(self) -> int:
        """Bytes it writes."""
        return sum(into.numel() * into.element_size() for into in self._into)

    def copy(self) -> None:
        """Carry it out; on a GPU it is queued on the current stream."""
        torch._foreach_copy_(self._into, self._out_of)

    def differs(self, turn: int = 0, num_turns: int = 1) -> bool:
        """Whether the engine holds anything but what was received, bit by bit.

        Looks at every `num_turns`-th tensor, from the `turn`-th on.
        """
        found = [
            (_bits(into) != _bits(received.to(into.dtype))).any()
            for into, received in zip(
                self._into[turn::num_turns], self._out_of[turn::num_turns], strict=True
            )
        ]
        return bool(torch.stack(found).any()) if found else False

    def prove(self, model: nn.Module, reload: Callable[[], None]) -> bool | None:
        """Bring in what was received by the plan, then by the engine's own `reload`; compare.

        True: every tensor of the engine was the same after both. None: it was the same before, too,
        so nothing was shown. Afterwards the engine holds what `reload` made of it.
        """
        before = _fingerprint(model)
        self.copy()
        planned = _fingerprint(model)
        reload()
        if _fingerprint(model) != planned:
            return False
        return True if planned != before else None


class _Recorder(TorchDispatchMode):
    """Sees every operation and keeps those from being carried out that write into the model."""

    def __init__(self, model: nn.Module, received: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._model = {t.untyped_storage().data_ptr() for t in _tensors(model)}
        self._received = {t.untyped_storage().data_ptr() for t in received.values()}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.refusal: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = self._written(func, args, kwargs)
        if written is None:
            return func(*args, **kwargs)
        name = func._schema.name
        if name == "aten::copy_" and self._is_received(args[1]):
            source = args[1].detach().expand_as(written)
            self.pairs.append((written.detach(), source))
        elif name not in _CONSTANT:
            self.refusal = f"{name} writes into the model"
        return written

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        named = [(a, kwargs.get(a.name)) for a in func._schema.arguments[len(args) :]]
        for argument, value in [*zip(func._schema.arguments, args, strict=False), *named]:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and _storage(tensor) in self._model:
                    return tensor
        return None

    def _is_received(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._received


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors a module computes with: parameters, buffers, plain attributes; not its cache."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            if value is not None:
                yield value
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and name != "kv_cache":
                yield value


def _fingerprint(model: nn.Module) -> list[int]:
    """Of each tensor, in order, the sum of bits * (2 * place + 1), wrapping."""
    sums = [total for tensor in _tensors(model) for total in _weighted_sums(tensor)]
    return [int(total) for total in sums]


def _weighted_sums(tensor: Tensor, size: int = 2**22) -> Iterator[Tensor]:
    words = _bits(tensor).reshape(-1)
    factors = torch.arange(1, 2 * size + 1, 2, device=words.device)
    for at in range(0, words.numel(), size):
        part = words[at : at + size].to(torch.int64)
        yield part.mul_(factors[: len(part)]).sum()


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])
