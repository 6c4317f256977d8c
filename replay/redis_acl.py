"""What the user of a run may do in Redis: the commands that Leeway sends, on the keys of runs.

The contract tests run as this user, so a command that is missing here fails there. One test
searches the code for each that stands here, so that none stays which nobody sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from leeway.replay.errors import ConfigurationError

USER: Final = "leeway"
KEY_PATTERN: Final = "leeway:*"
"""Keys of every run. `leeway:{first}:*` and `leeway:{first/*}:*` are those of the run `first`."""

SCRIPT_COMMANDS: Final = (
    "del",
    "exists",
    "get",
    "hdel",
    "hexists",
    "hget",
    "hgetall",
    "hincrby",
    "hmget",
    "hset",
    "persist",
    "pexpire",
    "sadd",
    "set",
    "sismember",
    "strlen",
    "time",
    "unlink",
    "xadd",
    "zadd",
    "zcard",
    "zmscore",
    "zpopmin",
    "zrange",
    "zrangebyscore",
    "zrem",
    "zremrangebyscore",
    "zscore",
)
"""What lua/*.lua calls."""
CLIENT_COMMANDS: Final = (
    "client|setname",
    "eval",
    "evalsha",
    "exec",
    "info",
    "memory|usage",
    "multi",
    "ping",
    "scan",
    "select",
    "xrange",
    "xread",
    "xrevrange",
    "zremrangebyrank",
)
"""What is sent besides. SELECT and CLIENT SETNAME come from ?db= and ?client_name= of a URL; SCAN
and MEMORY USAGE from `leeway soak`, and tell names of keys, never what foreign ones hold."""
CLUSTER_COMMANDS: Final = ("asking", "cluster|slots", "command", "readonly")
"""What the client of a Redis Cluster needs besides, to find the nodes."""

_PASSWORD: Final = re.compile(r"[!#-&(-~]{16,}")
"""Redis reads a word that holds a quote in a way of its own."""


def user_line(
    password: str, keys: Sequence[str] = (KEY_PATTERN,), *, is_cluster: bool = False
) -> str:
    """The line of redis.conf or of an ACL file that makes the user of a run.

    `password` is in clear, and ends up so in the file; give "#" and its SHA-256 in hex to keep it
    out. Raises ConfigurationError for one that is short, or that would end the word it stands in.
    """
    if not _PASSWORD.fullmatch(password):
        raise ConfigurationError(
            "the Redis password must be at least 16 printable ASCII characters, no space or quote"
        )
    secret = password if re.fullmatch("#[0-9a-f]{64}", password) else f">{password}"
    return f"user {USER} on {secret} {user_rights(keys, is_cluster=is_cluster)}"


def user_rights(keys: Sequence[str] = (KEY_PATTERN,), *, is_cluster: bool = False) -> str:
    """Those of the user of a run, as `ACL SETUSER NAME` takes them."""
    allowed = {*SCRIPT_COMMANDS, *CLIENT_COMMANDS, *(CLUSTER_COMMANDS if is_cluster else ())}
    return " ".join(
        (
            *(f"~{pattern}" for pattern in keys),
            "resetchannels -@all",
            *(f"+{command}" for command in sorted(allowed)),
        )
    )
