"""Which part of a run a process is, by its command line; Ray and vLLM set titles of their own."""

from __future__ import annotations

import re
from typing import Final

OTHER: Final = "other"

_ROLES: Final = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"^VLLM::", "engine"),
        (r"^ray::(SERVE_REPLICA::|ServeReplica:)policy\b", "policy replica"),
        (r"^ray::(SERVE_REPLICA::|ServeReplica:)retriever\b", "retriever"),
        (r"^ray::(SERVE_REPLICA::|ServeReplica:)rollout\b", "rollout worker"),
        (r"^ray::ServeController", "ray serve controller"),
        (r"^ray::", "ray workers and agents"),
        (r"/(gcs_server|raylet) ", "ray daemons"),
        (r"/site-packages/ray/", "ray workers and agents"),
        (r"redis-server|valkey-server", "redis"),
        (r"leeway\.services\.cli train |/leeway train ", "train"),
        (r"leeway\.services\.cli serve |/leeway serve ", "serve"),
        (r"leeway\.services\.processes\.ranks|torch/distributed/|torchrun", "learner"),
        (r"leeway\.services\.cli learn |/leeway learn ", "learner"),
        (r"leeway\.services\.cli api |/leeway api ", "api"),
    )
)


def role_of(command_line: str) -> str:
    """ "ray::SERVE_REPLICA::policy#PolicyServer#x" -> "policy replica"."""
    for pattern, role in _ROLES:
        if pattern.search(command_line):
            return role
    return OTHER
