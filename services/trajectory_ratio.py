"""Importance ratios of stored tokens: how much likelier a model finds them than who sampled them.

The log-probs are the learner's own, so a ratio here is the one that a step with this model would
see.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import Group, GroupId, Trajectory

MICRO_BATCH_TOKENS: Final = 8192


def token_ratios(model: Path, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
    """[T] current over behaviour probability of each trajectory's generated tokens.

    Behaviour -1.0, current -0.5 -> exp(0.5) = 1.65. Raises ConfigurationError for a folder that is
    no model, or one of another vocabulary.
    """
    from leeway.learner.batch import build_batch
    from leeway.learner.model import load_model
    from leeway.learner.passes import Passes
    from leeway.learner.world import World

    if not (model / "config.json").is_file():
        raise ConfigurationError(f"{model} holds no model; give a Hugging Face folder as --model")
    world = World.from_environment()
    network = load_model(model, world.device)
    highest = max(int(trajectory.token_ids.max()) for trajectory in trajectories)
    embedding: Any = network.get_input_embeddings()
    vocab_size = int(embedding.weight.shape[0])
    if highest >= vocab_size:
        raise ConfigurationError(
            f"the trajectories hold token {highest}, the model in {model} has {vocab_size}; give a"
            " checkpoint of the model that played them as --model"
        )
    alone = [
        Group(group_id=GroupId(str(i)), question_id="", worker_id="", trajectories=(trajectory,))
        for i, trajectory in enumerate(trajectories)
    ]
    batch = build_batch(alone)
    passes = Passes(network.eval(), world, MICRO_BATCH_TOKENS)
    current_T = passes.measure(batch, range(len(trajectories))).lp_T.double().numpy()
    ratio_T = np.exp(current_T - batch.behaviour_T.double().numpy()).astype(np.float32)
    return [ratio_T[batch.offset_B1[b] : batch.offset_B1[b + 1]] for b in range(len(trajectories))]
