"""A sign of life of the learner for probes that must not cost anything: a file, touched.

LEEWAY_HEARTBEAT_FILE names it. It appears when the model is loaded and is touched at every step and
in every slice of a wait, so a probe compares its age with the longest step:

    test ! -f "$LEEWAY_HEARTBEAT_FILE" || test -n "$(find "$LEEWAY_HEARTBEAT_FILE" -mmin -30)"

Without the file the process has not begun to work; a probe of its start looks for it. What an
earlier process left is removed by `leeway learn` before it waits for anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from leeway.replay.errors import ConfigurationError

FILE: Final = "LEEWAY_HEARTBEAT_FILE"


class Heartbeat:
    """Of one process. Without a file it does nothing."""

    def __init__(self, file: Path | None) -> None:
        """A file that an earlier process left is removed. Raises ConfigurationError."""
        self._file = file
        try:
            if file is not None:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(file, error) from None

    @classmethod
    def from_environment(cls) -> Heartbeat:
        """The first rank of a machine gives the sign for all of it: they end together."""
        name = os.environ.get(FILE)
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        return cls(Path(name) if name and is_first else None)

    def beat(self) -> None:
        """Touch the file. Raises ConfigurationError where that cannot be."""
        if self._file is None:
            return
        try:
            self._file.touch()
        except OSError as error:
            raise _unusable(self._file, error) from None


def _unusable(file: Path | None, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{FILE} = {file} cannot be written ({error.strerror}); name a file in a folder that can"
    )
