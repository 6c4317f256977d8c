"""Where policy versions lie on a disk that learner and engines share.

    checkpoints/step-00000012/      a Hugging Face model folder: version 12
        training.json               written last: a folder without it is not complete

learner/checkpoint.py writes them, with more beside; engines that start read the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from leeway.replay.schema import PolicyVersion

PREFIX: Final = "step-"
RECORD: Final = "training.json"


class PolicyFolder(NamedTuple):
    """A policy version on the disk."""

    path: Path
    version: PolicyVersion


def newest_policy(checkpoints: Path, base: Path) -> PolicyFolder:
    """The newest complete one below `checkpoints`; else `base`, as version 0.

    step-00000012, step-00000024 (without training.json) -> version 12
    """
    found = [
        PolicyFolder(path, PolicyVersion(int(path.name.removeprefix(PREFIX))))
        for path in checkpoints.glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdecimal() and (path / RECORD).is_file()
    ]
    return max(
        found, key=lambda folder: folder.version, default=PolicyFolder(base, PolicyVersion(0))
    )
