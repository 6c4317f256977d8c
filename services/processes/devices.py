"""Which GPUs of a machine the learner takes, and which are left to Ray for the engines.

Only where one command starts both: in containers each sees its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Names that CUDA_VISIBLE_DEVICES takes: those that it holds, else one for each device file."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    files = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()]
    return sorted((path.name[6:] for path in files), key=int)


def split_gpus(
    gpus: list[str], num_ranks: int, num_engine_gpus: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Environment of the serve process and of the learner.

    8 GPUs, 2 ranks, 6 engines -> engines on 0 to 5, ranks on 6 and 7. Where there are not enough
    for both, both see all: on one GPU engine and learner share it.
    """
    if len(gpus) < num_ranks + num_engine_gpus:
        return {}, {}
    serve, learner = gpus[:-num_ranks], gpus[-num_ranks:]
    return {VISIBLE: ",".join(serve)}, {VISIBLE: ",".join(learner)}
