"""Random batches in both forms, and verl and TRL where they are installed.

verl and TRL pad: a row per trajectory, a mask for the tokens that the policy generated. Ours are
packed: those tokens alone, with the turn and the trajectory of each.

Letters: `T` trained tokens, `K` turns, `B` trajectories (rows), `L` columns of a padded row.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from leeway.learner.objective.ratio import Segments

RTOL = {torch.float64: 1e-7, torch.float32: 1e-6}
"""Of a gradient, element by element. Ours in float64 still carries reduce weights in float32, whose
rounding is 6e-8. verl adds 1e-8 to the counts it divides by; from an integer mask they are float32,
where nothing is left of it."""

LossOf = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Padded:
    """Where the trained tokens of one batch lie in rows, and whose they are."""

    mask_BL: Tensor
    """[B, L] int64; 1 at a trained token, 0 at observations and padding. Row-major order of the
    ones is the packed order."""
    segments: Segments
    group_of_B: Tensor
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def num_tokens(self) -> int:
        return int(self.mask_BL.sum())

    @property
    def num_rows(self) -> int:
        return len(self.mask_BL)

    @property
    def filled_share(self) -> float:
        """Of the rows, those with a trained token."""
        return (self.mask_BL.sum(-1) > 0).double().mean().item()

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def tokens(self) -> Tensor:
        """[T] normal numbers."""
        return self.normal(self.num_tokens)

    def policies(self, spread: float = 0.3) -> tuple[Tensor, Tensor]:
        """[T] log-probs of a policy and of an older one; one token in eight is far away."""
        old_T = -self.tokens().abs() - 0.1
        is_far_T = torch.rand(self.num_tokens, generator=self.generator) < 0.125
        return old_T + spread * self.tokens() * torch.where(is_far_T, 6.0, 1.0), old_T

    def per_trajectory(self, value_B: Tensor) -> Tensor:
        """[T] the value of each token's trajectory."""
        return value_B[self.segments.trajectory_of_T]

    def pad(self, value_T: Tensor) -> Tensor:
        """[B, L], with numbers that must not matter where the mask is 0."""
        value_BL = 3 * self.normal(*self.mask_BL.shape).to(value_T.dtype)
        return value_BL.masked_scatter(self.mask_BL.bool(), value_T)

    def pack(self, value_BL: Tensor) -> Tensor:
        """[T], the inverse of `pad`."""
        return value_BL[self.mask_BL.bool()]

    def with_turns_as_rows(self) -> Padded:
        """The same tokens, each turn in a row and a trajectory of its own."""
        turn_of_T, num_turns = self.segments.turn_of_T, self.segments.num_turns
        return self._with_rows(Segments(turn_of_T, turn_of_T, num_turns, num_turns))

    def with_trajectories_as_rows(self) -> Padded:
        """The same tokens without the observations between them."""
        return self._with_rows(self.segments)

    def _with_rows(self, segments: Segments) -> Padded:
        size_B = torch.bincount(segments.trajectory_of_T, minlength=segments.num_trajectories)
        mask_BL = (torch.arange(int(size_B.max())) < size_B[:, None]).long()
        groups = torch.arange(len(mask_BL))
        return Padded(mask_BL, segments, groups, self.dtype, self.generator)

    def check_same(self, ours: LossOf, theirs: LossOf, x_T: Tensor) -> None:
        """Our loss of packed `x_T` has the value and the gradient of theirs of padded ones."""
        x_T, x_BL = x_T.clone().requires_grad_(), self.pad(x_T).requires_grad_()
        our_loss, their_loss = ours(x_T), theirs(x_BL)
        our_loss.backward()
        their_loss.backward()
        assert x_T.grad is not None and x_BL.grad is not None
        rtol = RTOL[self.dtype]
        assert x_BL.grad[self.mask_BL == 0].abs().sum() == 0
        torch.testing.assert_close(x_T.grad, self.pack(x_BL.grad), rtol=rtol, atol=0)
        # Terms of both signs cancel in the sum, so its error is measured against their size.
        size = x_BL.grad.abs().sum().item()
        torch.testing.assert_close(
            our_loss.double(), their_loss.double(), rtol=rtol, atol=rtol * size
        )


def padded(
    rows: list[list[tuple[int, int]]], dtype: torch.dtype, generator: torch.Generator
) -> Padded:
    """A batch of rows of turns of (generated, observed) tokens; an observation of 0 tokens leaves
    two turns adjacent, and a row without turns is empty."""
    cells = [[c for g, o in row for c in [1] * g + [0] * o] for row in rows]
    width = max(map(len, cells)) + 2
    turn_sizes = torch.tensor([g for row in rows for g, _ in row])
    row_sizes = torch.tensor([sum(g for g, _ in row) for row in rows])
    segments = Segments(
        torch.repeat_interleave(turn_sizes),
        torch.repeat_interleave(row_sizes),
        len(turn_sizes),
        len(rows),
    )
    mask_BL = torch.tensor([row + [0] * (width - len(row)) for row in cells])
    # Groups of four, not beside each other.
    group_of_B = torch.arange(len(rows)) % -(-len(rows) // 4)
    return Padded(mask_BL, segments, group_of_B, dtype, generator)


def random_rows(
    generator: torch.Generator, num_rows: int, max_turns: int, max_tokens: int
) -> list[list[tuple[int, int]]]:
    def upto(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    return [
        [(upto(1, max_tokens), upto(0, 4)) for _ in range(upto(1, max_turns))]
        for _ in range(num_rows)
    ]


SHAPES = {
    "one-row": (1, 2, 6),
    "one-token-turns": (5, 4, 1),
    "one-turn-rows": (4, 1, 9),
    "rows": (8, 4, 7),
    "long-rows": (12, 6, 60),
}
"""Rows, turns per row and tokens per turn, at most."""
EMPTY_ROW = [[(3, 2), (2, 0), (1, 1)], [], [(4, 0)], [(1, 3), (5, 2)]]


def build_batch(shape: str, dtype: torch.dtype) -> Padded:
    generator = torch.Generator().manual_seed(len(shape))
    rows = EMPTY_ROW if shape == "empty-row" else random_rows(generator, *SHAPES[shape])
    return padded(rows, dtype, generator)


@pytest.fixture(params=[*SHAPES, "empty-row"])
def batch(request: pytest.FixtureRequest) -> Padded:
    """In float64."""
    return build_batch(request.param, torch.float64)


@pytest.fixture(
    params=[
        (shape, dtype)
        for shape in (*SHAPES, "empty-row")
        for dtype in RTOL
        if (shape, dtype) != ("long-rows", torch.float32)
    ],
    ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}",
)
def typed_batch(request: pytest.FixtureRequest) -> Padded:
    """In both precisions; long rows in float64 alone. Ours adds up a trajectory token by token, in
    float32 to 2e-6 over 200 tokens; rows of verl and TRL are added pairwise, to 2e-7."""
    return build_batch(*request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity", action="store_true", help="fail, do not skip, where verl or TRL is missing"
    )


def require(package: str, config: pytest.Config) -> None:
    """Skip where it is not installed, or fail under --parity, as `make parity` runs these tests;
    where it is, its import must not fail."""
    if importlib.util.find_spec(package) is None:
        leave = pytest.fail if config.getoption("--parity", default=False) else pytest.skip
        leave(f"{package} is not installed; `make parity` installs it and runs these tests")


@pytest.fixture(scope="session")
def verl(pytestconfig: pytest.Config) -> SimpleNamespace:
    """verl's modules, by their last name."""
    require("verl", pytestconfig)
    names = (
        "verl.trainer.config",
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.rollout_corr_helper",
        "verl.utils.torch_functional",
        "verl.workers.config",
    )
    modules = {name: importlib.import_module(name) for name in names}
    return SimpleNamespace(
        algos=modules["verl.trainer.ppo.core_algos"],
        correction=modules["verl.trainer.ppo.rollout_corr_helper"],
        functional=modules["verl.utils.torch_functional"],
        configs=modules["verl.workers.config"],
        trainer_configs=modules["verl.trainer.config"],
    )


@pytest.fixture(scope="session")
def trl(pytestconfig: pytest.Config) -> SimpleNamespace:
    """TRL's trainers, of which only functions are called, and its utilities."""
    require("trl", pytestconfig)
    with pytest.MonkeyPatch.context() as patch:
        # It would import vLLM, warn of its version and take 10 s.
        switches = importlib.import_module("trl.import_utils")
        patch.setattr(switches, "is_vllm_available", lambda *_, **__: False)
        return SimpleNamespace(
            grpo=importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer,
            rloo=importlib.import_module("trl.trainer.rloo_trainer").RLOOTrainer,
            utils=importlib.import_module("trl.trainer.utils"),
        )
