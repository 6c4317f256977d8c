"""A Ray that this machine alone reaches, and there only who holds its token.

Whoever reaches Ray's ports can have code run: its calls are pickled. So a Ray of our own listens on
loopback and asks for a token that nobody else knows. A cluster named by RAY_ADDRESS has its own
rules.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

_ONE_MACHINE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0 tells Ray that no other machine joins: each of its servers listens on 127.0.0.1 then. No
argument does, as Ray replaces 127.0.0.1 by an address that others reach."""


def close_ray() -> None:
    """Say so in the environment, for this process and what it starts. Call it before ray is
    imported, which is when it reads the first of them.

    A token that is already there stays. Ray would else make one that lasts for ever, in the home
    directory, readable by everybody.
    """
    os.environ.setdefault(_ONE_MACHINE, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
