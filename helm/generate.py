"""Write what the chart holds of other files: `python helm/generate.py` (`--check` only compares).

README.md is README.head.md and a table of the comments in values.yaml. files/ are copies of the
alerts and the dashboard in deploy/, since Helm reads nothing outside a chart, and the users of
Redis, whose rights are in the code; those go into deploy/, too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "leeway"
HEAD = ROOT / "helm" / "README.head.md"
COPIES = {
    ROOT / "deploy" / "prometheus" / "alerts.yaml": CHART / "files" / "alerts.yaml",
    ROOT / "deploy" / "grafana" / "leeway.json": CHART / "files" / "leeway.json",
}
USERS = CHART / "files" / "redis-users.conf"
COMPOSE_USERS = ROOT / "deploy" / "redis-users.conf"
MANIFEST_USERS = ROOT / "deploy" / "kuberay" / "redis-users.yaml"
RAY_USER = (
    "user ray on #HASH ~RAY* ~DUMMY resetchannels -@all +@read +@write +@connection -@dangerous "
    "+info"
)
"""Ray's own state, where serve.gcsFaultTolerance keeps it; it deletes DUMMY to find its server."""
MAX_DEFAULT = 60
KEY = re.compile(r"( *)([A-Za-z][\w.-]*):(?: (.*))?$")


class Value(NamedTuple):
    """One row of the table."""

    path: str
    """Dotted, such as api.service.port."""
    default: Any
    text: str


def values(source: str) -> Iterator[Value]:
    """Every described value of a values.yaml: a comment of `# -- TEXT` and the key below it."""
    defaults = yaml.safe_load(source)
    parents: list[tuple[int, str]] = []
    comment: list[str] | None = None
    block_depth: int | None = None
    for line in source.splitlines():
        depth = len(line) - len(line.lstrip())
        if block_depth is not None and (not line.strip() or depth > block_depth):
            continue
        block_depth = None
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("#"):
            if comment is not None:
                comment.append(stripped.removeprefix("# "))
        elif found := KEY.match(line):
            parents = [parent for parent in parents if parent[0] < depth]
            path = [*(name for _, name in parents), found[2]]
            parents.append((depth, found[2]))
            if found[3] in ("|", "|-"):
                block_depth = depth
            if comment is not None:
                yield Value(".".join(path), _at(defaults, path), " ".join(comment))
            comment = None


def _at(tree: Any, path: list[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def readme() -> str:
    """README.md as it should be."""
    rows = "\n".join(_row(value) for value in values(_read(CHART / "values.yaml")))
    return f"{_read(HEAD).rstrip()}\n\n| value | default | |\n|---|---|---|\n{rows}\n"


def _row(value: Value) -> str:
    default = json.dumps(value.default)
    default = "see values.yaml" if len(default) > MAX_DEFAULT else f"`{default}`"
    return f"| `{value.path}` | {default} | {value.text} |"


def redis_users() -> str:
    """Lines of redis.conf: what each user may do, with HASH for the SHA-256 of the password."""
    from leeway.replay.redis_acl import user_line

    no_hash = "#" + "0" * 64
    leeway = user_line(no_hash).replace(no_hash, "#HASH")
    return f"user default off\n{leeway}\n{RAY_USER}\n"


def users_manifest() -> str:
    """The same as a ConfigMap for deploy/kuberay."""
    lines = "".join(f"    {line}\n" for line in redis_users().splitlines())
    return f"""\
# Written by helm/generate.py. HASH becomes the SHA-256 of the password when Redis starts.
apiVersion: v1
kind: ConfigMap
metadata:
  name: leeway-redis-users
  labels: {{app.kubernetes.io/name: leeway, app.kubernetes.io/component: redis}}
data:
  users.conf: |
{lines}"""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def wanted() -> dict[Path, str]:
    """Every generated file and its text."""
    files = {target: _read(source) for source, target in COPIES.items()}
    users = dict.fromkeys((USERS, COMPOSE_USERS), redis_users())
    return {CHART / "README.md": readme(), MANIFEST_USERS: users_manifest(), **users, **files}


def main() -> int:
    """Exit code 1 when --check finds a file that differs."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="write nothing")
    is_check = options.parse_args().check
    stale = [p for p, text in wanted().items() if not p.is_file() or _read(p) != text]
    for path in stale:
        if is_check:
            print(f"{path.relative_to(ROOT)} is stale: python helm/generate.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted()[path], encoding="utf-8")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
