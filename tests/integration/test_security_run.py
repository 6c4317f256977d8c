"""What a whole run shows: its secrets, where it listens, and what it unpickles."""

from __future__ import annotations

import ipaddress
import json
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from leeway.services.layout import RunDirectory
from leeway.services.redaction import PRIVATE_FILES

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

CANARIES = {
    "LEEWAY_API_READ_TOKEN": "canary-read-7f3a9c51d2e84b06",
    "LEEWAY_API_CONTROL_TOKEN": "canary-control-b1c64d0e95f7a238",
    "RAY_AUTH_TOKEN": "c0ffee5d8e2f7190ab43c6e1f4c0ffee5d8e2f7190ab43c6e1f4c0ffee12345678",
    "WANDB_API_KEY": "canary-wandb-0a9b8c7d6e5f4031",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20canary-otlp-42d1e0f9a8b7c6",
}
PAGES = ("/", "/livez", "/readyz", "/v1/status", "/v1/events", "/v1/settings", "/v1/rollouts")
PAGES += ("/v1/policy", "/v1/learner", "/v1/learner/steps", "/v1/replay", "/v1/runs", "/v1/sweeps")
PAGES += ("/v1/trajectories", "/v1/openapi.json", "/metrics")
LOOK_S = 2.0
"""Between two looks: they cost the run time."""
HOOK = """
import os, sys
def _noted(event, arguments, folder=os.environ.get("PICKLE_NOTES"), open=os.open, write=os.write):
    if event == "pickle.find_class" and folder:
        file = open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        write(file, f"{arguments[0]}.{arguments[1]}\\n".encode())
        os.close(file)
sys.addaudithook(_noted)
"""


@dataclass
class Seen:
    """What a run showed to a process beside it while it lasted, and what it left."""

    run: RunDirectory
    secrets: dict[str, str]
    arguments: dict[int, str] = field(default_factory=dict)
    listeners: set[tuple[str, str]] = field(default_factory=set)
    """Process and address."""
    answers: dict[str, str] = field(default_factory=dict)
    scratch: dict[str, bytes] = field(default_factory=dict)
    unpickled: dict[str, set[str]] = field(default_factory=dict)
    """Role of a process -> what it looked up while it read a pickle."""
    modes: set[str | None] = field(default_factory=set)
    """RAY_AUTH_MODE of every replica."""
    out: str = ""
    err: str = ""


@pytest.fixture(scope="module")
def seen(leeway: Any, tiny: Callable[[], Path], tmp_path_factory: Any) -> Iterator[Seen]:
    notes, hook = tmp_path_factory.mktemp("notes"), tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(HOOK)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CANARIES, "PICKLE_NOTES": str(notes)}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(hook))
        with leeway(tiny(), "train", "tiny.toml", "--json") as command:
            found = Seen(command.run, {})
            address = command.state(found.run).api_address
            found.secrets = dict(CANARIES) | _generated(found.run)
            found.secrets["OTEL_EXPORTER_OTLP_HEADERS"] = "canary-otlp-42d1e0f9a8b7c6"
            environment = psutil.Process(found.run.read_state().pids["serve"]).environ()
            command.until(lambda: _look(found, command, address), 400)
            found.scratch = _contents(Path(environment["TMPDIR"]))
            ended = command.end(120, found.run)
        found.out, found.err = ended.out, ended.err
        assert ended.code == 0, ended.err
    for note in notes.iterdir():
        role = _role(found.arguments.get(int(note.name), "unseen"))
        found.unpickled.setdefault(role, set()).update(note.read_text().split())
    yield found


def _generated(run: RunDirectory) -> dict[str, str]:
    """Passwords of the embedded Redis: of the run's user, and of its administrator."""
    text = (run.redis / "redis.conf").read_text()
    found = dict(re.findall(r"^user (\S+) on >(\S+)", text, re.MULTILINE))
    assert found["leeway"] == urlsplit(run.read_redis_url()).password
    return {f"redis-{user}": password for user, password in found.items()}


def _look(seen: Seen, command: Any, address: str) -> bool:
    """One look at arguments, listeners and answers; True when the run is at its end."""
    time.sleep(LOOK_S)
    for process in _family(command.process.pid):
        try:
            seen.arguments[process.pid] = " ".join(process.cmdline())
            if _role(seen.arguments[process.pid]) == "replica":
                seen.modes.add(process.environ().get("RAY_AUTH_MODE"))
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    where = (_role(seen.arguments[process.pid]), connection.laddr.ip)
                    seen.listeners.add(where)
        except psutil.Error:
            continue
    token = CANARIES["LEEWAY_API_CONTROL_TOKEN"]
    phase = ""
    for page in PAGES:
        try:
            with httpx.stream(
                "GET", f"{address}{page}", headers={"authorization": f"Bearer {token}"}, timeout=3
            ) as answer:
                first = next(answer.iter_text(), "") if page == "/v1/events" else None
                text = first if first is not None else answer.read().decode()
                seen.answers[page] = text + str(dict(answer.headers))
                if page == "/v1/status" and answer.status_code == 200:
                    phase = json.loads(text)["run"]["phase"]
        except httpx.TransportError:
            continue
    return phase == "done"


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _role(arguments: str) -> str:
    roles = {
        r"redis-server|valkey-server": "redis",
        r"ray::\S*Replica": "replica",
        r"ray::|/ray/|raylet|gcs_server": "ray",
        r"leeway\S* (?:\S+ )*?serve |services\.cli serve|cli serve": "serve",
        r" learn ": "learn",
        r" api ": "api",
        r" train ": "train",
    }
    return next((role for form, role in roles.items() if re.search(form, arguments)), arguments)


def _contents(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                found[str(path)] = path.read_bytes()
        except OSError:
            continue
    return found


def _with_secret(seen: Seen, texts: dict[str, bytes]) -> list[tuple[str, str]]:
    return [
        (where, name)
        for where, text in texts.items()
        for name, secret in seen.secrets.items()
        if secret.encode() in text
    ]


def test_only_the_private_files_of_a_run_directory_hold_its_secrets(seen: Seen):
    root = seen.run.root
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    texts = {name: path.read_bytes() for name, path in files.items()}
    holding = {where for where, _ in _with_secret(seen, texts)}
    assert holding <= set(PRIVATE_FILES)
    assert "redis_url" in holding and "redis/redis.conf" in holding
    assert {stat.S_IMODE(files[name].stat().st_mode) for name in holding} == {0o600}


def test_neither_output_nor_logs_of_ray_hold_a_secret(seen: Seen):
    texts = {"stdout": seen.out.encode(), "stderr": seen.err.encode(), **seen.scratch}
    assert _with_secret(seen, texts) == []
    assert len(seen.scratch) > 5


def test_no_answer_of_the_api_holds_a_secret(seen: Seen):
    texts = {page: text.encode() for page, text in seen.answers.items()}
    assert {"/v1/status", "/metrics", "/v1/events"} <= set(texts)
    assert _with_secret(seen, texts) == []


def test_no_process_shows_a_secret_in_its_arguments(seen: Seen):
    assert {"redis", "ray", "serve", "learn"} <= {_role(text) for text in seen.arguments.values()}
    arguments = {f"{pid} {text[:40]}": text.encode() for pid, text in seen.arguments.items()}
    assert _with_secret(seen, arguments) == []


def test_a_run_of_one_machine_listens_on_loopback_only(seen: Seen):
    assert {"redis", "ray"} <= {role for role, _ in seen.listeners}
    open_to_others = {
        (role, ip)
        for role, ip in seen.listeners
        if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback
    }
    # Torch, where weights travel, and Serve, in each replica, leave no choice: docs/security.md.
    assert {role for role, _ in open_to_others} <= {"learn", "replica"}, open_to_others
    assert seen.modes == {"token"}  # which is what a replica's port asks for


def test_nothing_but_ray_reads_a_pickle(seen: Seen):
    assert seen.unpickled.get("ray"), "the hook sees nothing"
    # Otherwise nothing would be asked of them below.
    assert {"learn", "api", "train"} <= {_role(text) for text in seen.arguments.values()}
    for role in ("learn", "api", "train"):
        assert seen.unpickled.get(role, set()) == set(), role
