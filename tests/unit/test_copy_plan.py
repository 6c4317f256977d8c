"""The copies an engine's loader makes, written down and made without it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from leeway.actors.copy_plan import CopyPlan
from leeway.replay.flat_weights import pack

Pairs = Iterable[tuple[str, Tensor]]


class Engine(nn.Module):
    """Loads as engines do: two names fused into one weight, padded rows, a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(8, 3), requires_grad=False)
        self.gate_up = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.head = self.embed

    def load_weights(self, weights: Pairs) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)
            else:
                start = {"gate": 0, "up": 2}[name]
                self.gate_up.data.narrow(0, start, 2).copy_(tensor)


def received(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"embed": (5, 3), "up": (2, 3), "gate": (2, 3)}
    packed = pack({name: torch.randn(*shape) for name, shape in shapes.items()})
    return packed.layout.views(packed.flat)


def expected(views: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    embed = torch.cat([views["embed"], torch.zeros(3, 3)])
    return embed, torch.cat([views["gate"], views["up"]])


def test_tracing_writes_nothing_and_the_plan_writes_what_the_loader_would():
    engine, views = Engine(), received(0)
    plan = CopyPlan.trace(engine, engine.load_weights, views)
    assert plan is not None
    assert not engine.embed.any() and not engine.gate_up.any()
    # 5 x 3 + 2 x 3 + 2 x 3 floats of 4 bytes.
    assert plan.num_bytes == 108
    plan.copy()
    for held, wanted in zip((engine.embed, engine.gate_up), expected(views), strict=True):
        assert torch.equal(held, wanted)


def test_plan_reads_what_lies_in_the_buffer_when_it_is_carried_out():
    engine, views = Engine(), received(0)
    plan = CopyPlan.trace(engine, engine.load_weights, views)
    views["gate"].fill_(7.0)
    plan.copy()
    assert (engine.gate_up[:2] == 7.0).all()


def test_weights_are_rounded_to_the_engines_dtype():
    engine, views = Engine().bfloat16(), received(0)
    plan = CopyPlan.trace(engine, engine.load_weights, views)
    plan.copy()
    assert torch.equal(engine.gate_up[2:], views["up"].bfloat16())
    assert not plan.differs()


def test_one_bit_of_difference_is_found_when_its_turn_comes():
    engine, views = Engine(), received(0)
    plan = CopyPlan.trace(engine, engine.load_weights, views)
    plan.copy()
    assert not plan.differs()
    engine.gate_up.data[0, 0] = torch.nextafter(engine.gate_up[0, 0], torch.tensor(9.0))
    assert plan.differs()
    # Three copies, looked at one in a turn: embed, up, gate; the gate has changed.
    assert [plan.differs(turn, 3) for turn in range(3)] == [False, False, True]


def adds(engine: Engine) -> object:
    return lambda weights: [engine.gate_up.data[:2].add_(t[:2]) for _, t in weights]


def computes(engine: Engine) -> object:
    return lambda weights: [engine.gate_up.data[:2].copy_(2 * t[:2]) for _, t in weights]


def fails(engine: Engine) -> object:
    def load(weights: Pairs) -> None:
        raise ValueError("packed")

    return load


@pytest.mark.parametrize("loader", [adds, computes, fails])
def test_loader_that_does_more_than_copy_has_no_plan_and_has_changed_nothing(loader):
    engine = Engine()
    assert CopyPlan.trace(engine, loader(engine), received(0)) is None
    assert not engine.gate_up.any()


# --- the proof ----------------------------------------------------------------------------------


class Deriving(Engine):
    """Keeps a tensor computed from its weights, which no loader writes."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = torch.zeros(3, 4)

    def finish(self) -> None:
        self.derived.copy_(self.gate_up.T)


def prove(engine: Engine, seed: int) -> bool | None:
    views = received(seed)
    plan = CopyPlan.trace(engine, engine.load_weights, views)
    assert plan is not None

    def reload() -> None:
        engine.load_weights(iter(views.items()))
        if isinstance(engine, Deriving):
            engine.finish()

    return plan.prove(engine, reload)


def test_plan_that_leaves_what_a_reload_leaves_is_proved():
    engine = Engine()
    assert prove(engine, 0) is True
    assert torch.equal(engine.gate_up, expected(received(0))[1])


def test_plan_that_misses_a_derived_tensor_is_refused():
    engine = Deriving()
    assert prove(engine, 0) is False
    # What the engine holds is what its reload made, all the same.
    assert torch.equal(engine.derived, engine.gate_up.T)


def test_weights_that_the_engine_holds_already_prove_nothing():
    engine = Engine()
    prove(engine, 0)
    assert prove(engine, 0) is None
