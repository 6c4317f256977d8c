"""What clipping-triggered normalization adds to a step where 5 % of the trained tokens are clipped.

||C|| takes a second pass over every trajectory that holds a clipped token, up to its last one. How
many those are depends on how clipped tokens lie: a turn's ratio clips whole turns, a token's ratio
single tokens all over the batch. Both are measured; the key is of the turns, which the paper's
objectives clip.

A trajectory without advantage is read and not differentiated, so groups of equal rewards make the
step cheaper, not the second pass. In batches of the key every group teaches; another case has a
fifth of groups that do not, in which what normalization adds is a larger share of less.

Both trainers start from the same weights at a learning rate that changes none of them, so that
every step does the same work and stays at 5 %.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from leeway.actors.config import model_dir
from leeway.learner.batch import PackedBatch
from leeway.learner.config import LearnerConfig
from leeway.learner.metrics import StepMetrics
from leeway.learner.model import load_model
from leeway.learner.objective.presets import PRESETS
from leeway.learner.trainer import Trainer
from leeway.learner.update import build_update
from leeway.learner.world import World
from leeway.services.bench.episodes import Shape, build_episodes
from leeway.services.bench.result import BenchResult
from leeway.services.bench.timing import interleaved

CLIP_FRACTION: Final = 0.05
GROUP_SIZE: Final = 8
GPU_MICRO_BATCH_TOKENS: Final = 32768
"""What half a billion parameters leave room for in 80 GB. The larger a pass, the less a GPU waits
for kernels to be launched."""
DISTANCE: Final = 0.5
"""Log-ratio of a clipped token: exp(0.5) and exp(-0.5) lie outside 1 +- 0.2."""


@dataclass(frozen=True)
class Way:
    """How clipped tokens lie, and in which batch."""

    name: str
    ratio: str
    """That clips so: the ratio of a turn only clips it whole."""
    all_teach: bool = False


WAYS: Final = (
    Way("turns", "turn", all_teach=True),
    Way("turns, a fifth of the groups teach nothing", "turn"),
    Way("single tokens, a fifth likewise", "token"),
)


@dataclass(frozen=True)
class Measured:
    """One case."""

    name: str
    plain_s: float
    ctn_s: float
    pass_share: float
    """Of the step, the second pass, as the trainer times it."""
    clip_fraction: float
    affected_share: float
    """Of the trajectories, those with a clipped token."""

    @property
    def overhead(self) -> float:
        """Step time with normalization over step time without, less 1."""
        return self.ctn_s / self.plain_s - 1


def episode_shapes(num_trajectories: int, rng: np.random.Generator) -> list[Shape]:
    """1 to 4 turns of 20 to 40 trained tokens, 150 to 250 observed between them."""
    shapes: list[Shape] = []
    for num_turns in rng.integers(1, 5, num_trajectories):
        turns = tuple(rng.integers(20, 41, num_turns).tolist())
        observations = tuple(rng.integers(150, 251, num_turns - 1).tolist())
        shapes.append(Shape(int(rng.integers(80, 151)), turns, observations))
    return shapes


def build_case(
    num_trajectories: int, vocabulary: int, seed: int = 0, *, all_teach: bool = False
) -> PackedBatch:
    """Groups of 8 whose questions differ in difficulty: some have equal rewards and teach nothing,
    unless `all_teach`: then every other trajectory has a reward of 1."""
    rng = np.random.default_rng(seed)
    shapes = episode_shapes(num_trajectories, rng)
    chance = np.repeat(rng.random(num_trajectories // GROUP_SIZE), GROUP_SIZE)
    rewards = (rng.random(num_trajectories) < chance).astype(float)
    if all_teach:
        rewards = np.arange(num_trajectories) % 2.0
    return build_episodes(shapes, rewards.tolist(), GROUP_SIZE, vocabulary, rng)


def choose(segment_of_T: Tensor, can_clip_T: Tensor, rng: np.random.Generator) -> Tensor:
    """[T] bool: whole segments at random that together hold 5 % of all tokens.

    A segment without advantage cannot be clipped, so it is passed over.
    """
    segments, sizes = segment_of_T[can_clip_T].unique(return_counts=True)
    target = round(CLIP_FRACTION * len(segment_of_T))
    for _ in range(10_000):
        order = rng.permutation(len(segments))
        ends = np.cumsum(sizes.numpy()[order])
        count = int(np.searchsorted(ends, target))
        if count < len(ends) and ends[count] == target:
            break
    else:
        raise AssertionError(f"no choice of segments holds exactly {target} tokens")
    return torch.isin(segment_of_T, segments[torch.from_numpy(order[: count + 1])])


def with_clipped(batch: PackedBatch, lp_T: Tensor, a_T: Tensor, clipped_T: Tensor) -> PackedBatch:
    """Behaviour log-probs that put the chosen tokens outside the clip and all others at ratio 1."""
    distance_T = torch.where(clipped_T, DISTANCE * a_T.sign(), 0.0)
    return replace(batch, behaviour_T=lp_T - distance_T)


# --- run ---


def run(*, quick: bool) -> BenchResult:
    """The bundled policy; on a GPU random weights in the shape of Qwen2-0.5B, in a larger batch and
    larger passes, as it would be trained there.
    """
    is_cuda = torch.cuda.is_available()
    num_trajectories, repeats = (32, 2) if quick else (512 if is_cuda else 128, 7)
    ways = WAYS[:1] if quick else WAYS
    name, model = (
        ("0.5B", _half_billion())
        if is_cuda
        else ("bundled policy", load_model(model_dir("bundled"), "cpu"))
    )
    measured = _measure(name, model, num_trajectories, repeats, ways)
    by_turns = measured[0]
    return BenchResult(
        name="ctn",
        columns=(
            *("case", "step ms", "with ctn ms", "overhead", "second pass / step"),
            *("clipped", "trajectories affected"),
        ),
        rows=tuple(_cells(row) for row in measured),
        keys={
            "ctn_overhead": by_turns.overhead,
            **({} if quick else {"ctn_overhead_equal_groups": measured[1].overhead}),
            "ctn_share": by_turns.pass_share,
            "clip_fraction": by_turns.clip_fraction,
            "affected_share": by_turns.affected_share,
            "step_ms": 1e3 * by_turns.plain_s,
        },
    )


def _half_billion() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config)


def _measure(
    name: str,
    model: PreTrainedModel,
    num_trajectories: int,
    repeats: int,
    ways: Sequence[Way],
) -> list[Measured]:
    rows: list[Measured] = []
    for way in ways:
        batch = build_case(num_trajectories, model.config.vocab_size, all_teach=way.all_teach)
        a_T = build_update(batch, PRESETS["so-grpo"], 0).tokens.a_T
        tokens_T = torch.arange(batch.num_tokens)
        segment_of_T = batch.segments.turn_of_T if way.ratio == "turn" else tokens_T
        chosen_T = choose(segment_of_T, a_T != 0, np.random.default_rng(0))
        trainers = _trainers(model, way.ratio)
        prepared = with_clipped(batch, trainers[0].measure(batch)[0], a_T, chosen_T)
        affected = len(batch.segments.trajectory_of_T[chosen_T].unique()) / num_trajectories
        rows.append(_time(f"{name}, {way.name}", trainers, prepared, affected, repeats))
    return rows


def _trainers(model: PreTrainedModel, ratio: str) -> tuple[Trainer, Trainer]:
    """Without and with normalization, each with weights of its own, on the model's device."""
    is_cuda = model.device.type == "cuda"
    config = LearnerConfig.model_validate(
        {
            "objective": "so-grpo",
            "ratio": ratio,
            "learning_rate": 1e-30,
            "precision": "bfloat16" if is_cuda else "float32",
            **({"micro_batch_tokens": GPU_MICRO_BATCH_TOKENS} if is_cuda else {}),
        }
    )
    plain, normalized = (config.model_copy(update={"ctn": ctn}) for ctn in ("none", "gradient"))
    world = World(device=model.device)
    return (
        Trainer(copy.deepcopy(model), plain, world),
        Trainer(copy.deepcopy(model), normalized, world),
    )


def _time(
    name: str,
    trainers: tuple[Trainer, Trainer],
    batch: PackedBatch,
    affected_share: float,
    repeats: int,
) -> Measured:
    plain, normalized = trainers
    metrics: list[StepMetrics] = []

    def step(trainer: Trainer) -> Callable[[], None]:
        return lambda: metrics.append(trainer.train_step(batch, 0))

    ctn_s, plain_s = interleaved(step(normalized), step(plain), repeats)
    of_normalized = metrics[2::2]
    share = float(np.median([m.seconds_ctn / m.seconds for m in of_normalized]))
    return Measured(
        name, plain_s, ctn_s, share, of_normalized[-1].policy.clip_fraction_tokens, affected_share
    )


def _cells(row: Measured) -> tuple[str, ...]:
    return (
        row.name,
        f"{1e3 * row.plain_s:.0f}",
        f"{1e3 * row.ctn_s:.0f}",
        f"{100 * row.overhead:.1f} %",
        f"{100 * row.pass_share:.1f} %",
        f"{100 * row.clip_fraction:.2f} %",
        f"{100 * row.affected_share:.1f} %",
    )
