"""Two ranks of a learner over NCCL, each on a GPU of its own, as torchrun starts them: they train
what one rank trains, and one rank goes on from their checkpoint.

What they do is that of tests/unit/test_learner_sharding.py, where they are processes of a CPU.

python -m pytest -m gpu tests/gpu/test_ranks_gpu.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from tests.unit import test_learner_sharding as sharding
from tests.unit.test_learner_sharding import VARIANTS, TwoRanks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
ROOT = Path(__file__).parents[2]
RANKS_S = 300
NEAR = {"rtol": 1e-3, "atol": 1e-4}
"""Four steps of 1e-3 each move a weight by up to 4e-3. Two ranks add in another order, and where a
gradient is next to nothing the optimizer divides it by as little."""


def alone() -> World:
    """One rank, on the first GPU."""
    return World(device=torch.device("cuda", 0))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("ranks")
    sharding.prepare(folder, alone())
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (sys.executable, *torchrun, "--module", "tests.gpu.test_ranks_gpu", str(folder))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RANKS_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return sharding.results(folder)


@pytest.fixture(scope="module")
def straight() -> dict[int, dict[str, Tensor]]:
    return sharding.by_version(alone())


def test_two_ranks_train_over_nccl_as_one_does(
    two_ranks: TwoRanks, straight: dict[int, dict[str, Tensor]]
) -> None:
    assert two_ranks.seen["backend"] == "nccl"
    torch.testing.assert_close(two_ranks.seen["after_two"], straight[2], **NEAR)
    torch.testing.assert_close(two_ranks.seen["after_four"], straight[4], **NEAR)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_of_a_step_is_that_of_one_rank(two_ranks: TwoRanks, name: str) -> None:
    exact, found = sharding.gradient(alone()), two_ranks.seen["gradients"][name]
    if name == "bfloat16":
        assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > 0.999
    else:
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5)


def test_one_rank_goes_on_from_a_checkpoint_of_two(
    two_ranks: TwoRanks, straight: dict[int, dict[str, Tensor]]
) -> None:
    trainer = sharding.resume(two_ranks.folder / "of-two", alone())
    assert sharding.weights(trainer).keys() == two_ranks.seen["after_two"].keys()
    for name, tensor in sharding.weights(trainer).items():
        assert torch.equal(tensor, two_ranks.seen["after_two"][name]), name
    sharding.train(trainer, 2, 4)
    torch.testing.assert_close(sharding.weights(trainer), straight[4], **NEAR)


def test_two_ranks_go_on_from_a_checkpoint_of_one(
    two_ranks: TwoRanks, straight: dict[int, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(two_ranks.seen["resumed_after_four"], straight[4], **NEAR)


def test_blocks_of_each_rank_are_compiled_once_for_all_layers_and_lengths(
    two_ranks: TwoRanks,
) -> None:
    # As many as one rank compiles: see test_learner_gpu.py.
    assert 0 < two_ranks.seen["num_graphs"] <= 6
    assert two_ranks.seen["num_breaks"] == 0


def compiled(world: World) -> dict[str, int]:
    """Two steps of other lengths: what was compiled for them."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    config = sharding.configure(objective="reinforce", precision="bfloat16", compile=True)
    torch.manual_seed(0)
    # As in test_learner_gpu.py, which says how often its blocks are compiled by one rank.
    shape = LlamaConfig(
        vocab_size=63,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(shape)
    sharding.train(Trainer(model.to(world.device), config, world), 0, 2)
    return {
        "num_graphs": counters["stats"]["unique_graphs"],
        "num_breaks": sum(counters["graph_break"].values()),
    }


def work(folder: Path, world: World) -> dict[str, Any]:
    """Of each rank."""
    seen = sharding.work(folder, world) | compiled(world)
    return seen | {"backend": torch.distributed.get_backend()}


if __name__ == "__main__":
    joined = World.from_environment(timeout_s=120)
    there = Path(sys.argv[1])
    torch.save(work(there, joined), there / f"{joined.rank}.pt")
    joined.close()
