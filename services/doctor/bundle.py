"""The evidence of a run in one archive: what a person who was not there needs to see.

    evidence-20261128-180000.tar.gz
        contents.txt    every file with its size, and what it is
        verdict.txt     why it was made
        config.toml, run.json, metrics.jsonl, events.jsonl, ...
        logs/           the ends of the logs, Redis's included
        stacks/         what every process of the run is doing now, by py-spy
        replay.json     numbers of the buffer, and the chain of waits
        board.json      every section of the run board
        versions.json, machine.json

Secrets are taken out of every file (redaction.py). Each file keeps its last MAX_FILE_BYTES, and all
together MAX_BYTES; contents.txt says what was cut. Nothing of it needs a run that still lives.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.services import supervision
from leeway.services.redaction import known_secrets, redacted, redacted_environment, redacted_values

if TYPE_CHECKING:
    from leeway.services.layout import RunDirectory

MAX_FILE_BYTES: Final = 2 * 2**20
MAX_BYTES: Final = 32 * 2**20
STACK_S: Final = 20.0
"""A process that is stuck in the kernel cannot be looked into."""
STACKS_S: Final = 90.0
"""For all of them: the run ends when the evidence is there (services/watch.py)."""
MAX_STACKS: Final = 64
NUM_LOOKERS: Final = 4
REDIS_S: Final = 5.0

PLAIN: Final = {
    "config.toml": "the configuration of the run",
    "run.json": "its processes and addresses",
    "metrics.jsonl": "one line for each optimizer step",
    "publishes.jsonl": "one line for each published version",
    "events.jsonl": "one line for each event",
    "eval.json": "evaluations",
    "summary.json": "final numbers, of a run that has ended",
    "redis/redis.log": "log of the embedded Redis",
}
"""Files of a run directory. redis_url, api-tokens.json and redis.conf are never read into it."""


class Entry(NamedTuple):
    """One file of the archive."""

    name: str
    what: str
    text: str


class Bundle(msgspec.Struct, frozen=True):
    """An archive that was written."""

    path: str
    num_bytes: int
    files: list[str]


def write_bundle(run: RunDirectory, verdict: str | None = None) -> Bundle:
    """Collect the evidence of `run` into its directory. Raises ConfigurationError where that cannot
    be written to.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = run.root / f"evidence-{stamp}.tar.gz"
    entries = fitted(collect(run, verdict), known_secrets(run.root))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        run.root.mkdir(parents=True, exist_ok=True)  # a machine of a cluster may not have it
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for entry in entries:
                _add(tar, f"{path.name.removesuffix('.tar.gz')}/{entry.name}", entry.text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{path} cannot be written ({error.strerror}); make room or write permission there"
        ) from None
    return Bundle(str(path), path.stat().st_size, [entry.name for entry in entries])


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
    tar.addfile(info, io.BytesIO(data))


def collect(run: RunDirectory, verdict: str | None) -> Iterator[Entry]:
    """Every file, what matters most first. A part that fails leaves the reason in its place."""
    if verdict is not None:
        yield Entry("verdict.txt", "why this was collected", verdict + "\n")
    for part in (_plain, _stacks, _redis, _logs, _surroundings):
        try:
            yield from part(run)
        except Exception as error:  # whatever it is: the other parts are wanted all the more
            name = part.__name__.strip("_")
            yield Entry(f"{name}.failed.txt", f"why {name} is not complete", f"{error!r}\n")


def _plain(run: RunDirectory) -> Iterator[Entry]:
    for name, what in PLAIN.items():
        if (run.root / name).is_file():
            yield Entry(name.replace("redis/", "logs/"), what, tail(run.root / name))


def _logs(run: RunDirectory) -> Iterator[Entry]:
    for log in sorted(run.logs.glob("*.log")):
        yield Entry(f"logs/{log.name}", f"log of {log.stem}", tail(log))


def _surroundings(run: RunDirectory) -> Iterator[Entry]:
    yield Entry("versions.json", "versions of all that is installed", _json(versions()))
    yield Entry("machine.json", "the machine and the environment", _json(machine(run)))


def fitted(entries: Iterator[Entry], secrets: frozenset[str]) -> list[Entry]:
    """The table of contents and the entries, without secrets, as many as MAX_BYTES holds."""
    kept: list[Entry] = []
    lines: list[str] = []
    left = MAX_BYTES
    for entry in entries:
        text = redacted(entry.text, secrets)
        size = len(text.encode())
        if size > left:
            lines.append(f"{'left out':>12}  {entry.name}: no room within {MAX_BYTES:,} bytes")
            continue
        left -= size
        kept.append(entry._replace(text=text))
        lines.append(f"{size:12,}  {entry.name}: {entry.what}")
    head = f"{'bytes':>12}  file: what it is; a longer one keeps its last {MAX_FILE_BYTES:,}\n"
    contents = head + "\n".join(lines) + "\n"
    return [Entry("contents.txt", "this list", contents), *kept]


def tail(path: Path, num_bytes: int = MAX_FILE_BYTES) -> str:
    """The last bytes of a file, from the beginning of a line on; why it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            data = file.read(num_bytes)
    except OSError as error:
        return f"it cannot be read: {error}\n"
    if size > num_bytes:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")


# ---- processes


def _stacks(run: RunDirectory) -> Iterator[Entry]:
    """What each process of the run is doing, several looked into at once, within STACKS_S."""
    pool = ThreadPoolExecutor(NUM_LOOKERS)
    try:
        looks = [(pid, name, pool.submit(stack_of, pid)) for pid, name in processes_of(run)]
        wait([look for _, _, look in looks], STACKS_S)
        for pid, name, look in looks:
            late = f"it was not looked into within {STACKS_S:g} s\n"
            text = look.result() if look.done() else late
            yield Entry(f"stacks/{name}-{pid}.txt", f"stack of process {pid}, {name}", text)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def processes_of(run: RunDirectory) -> list[tuple[int, str]]:
    """Living processes that run.json names, then all below them: id, and a word for a file name."""
    state = run.read_state()
    named: dict[int, str] = {}
    below: dict[int, str] = {}
    for name, pid in (state.pids if state else {}).items():
        family = supervision.family_of(pid)
        # An id may be another's by now.
        if not family or not _is_of(run, name, family[0][1]):
            continue
        named[pid] = name
        below |= {child: _word(line) for child, line in family[1:]}
    return [*named.items(), *(pair for pair in below.items() if pair[0] not in named)][:MAX_STACKS]


def _is_of(run: RunDirectory, name: str, line: list[str]) -> bool:
    text = " ".join(line)
    return str(run.root) in text or (name == "train" and "leeway" in text)


def _word(line: list[str]) -> str:
    """["/usr/bin/python3", "-m"] -> "python3"; ["ray::SERVE_REPLICA"] -> "ray--SERVE-REPLICA"."""
    kept = "".join(c if c.isalnum() else "-" for c in line[0].rpartition("/")[2])
    return kept.strip("-")[:40] or "process"


def stack_of(pid: int) -> str:
    """By py-spy; for what is no Python or may not be looked into, why."""
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
    try:
        done = supervision.run_spared(command, STACK_S)
    except FileNotFoundError:
        return "py-spy is not installed; pip install py-spy\n"
    except subprocess.TimeoutExpired:
        return f"it could not be looked into within {STACK_S:g} s\n"
    return done.stdout + done.stderr


# ---- Redis


def _redis(run: RunDirectory) -> Iterator[Entry]:
    try:
        stats, board = asyncio.run(_look(run))
    except (LeewayError, OSError) as error:
        yield Entry("replay.json", "numbers of the buffer", _json({"error": str(error)}))
        return
    yield Entry("replay.json", "numbers of the buffer, and the chain of waits", _json(stats))
    yield Entry("board.json", "every section of the run board", _json(redacted_values(board)))


async def _look(run: RunDirectory) -> tuple[Any, Any]:
    from leeway.replay.archive_buffer import OpenBuffer
    from leeway.replay.chain import chain
    from leeway.replay.run_board import RunBoard

    url, name = run.read_redis_url(), run.root.name
    board = RunBoard(url, name, REDIS_S)
    buffer = OpenBuffer(url, name, run.read_config().replay, REDIS_S)
    try:
        stats = await buffer.replay.stats()
        numbers = {"stats": stats, "chain": chain(stats), "groups": await buffer.replay.group_ids()}
        said = {"phase": await board.phase(), "stop": await board.stop_requested()}
        return msgspec.to_builtins(numbers, str_keys=True), said | await board.get_all()
    finally:
        await buffer.close()
        await board.close()


# ---- versions and machine


def versions() -> dict[str, str]:
    """Python, and every installed distribution."""
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"python": sys.version, **dict(sorted(found.items()))}


def machine(run: RunDirectory) -> dict[str, Any]:
    """Cores, load, memory, disk, GPUs, and the environment of this process."""
    from leeway.services.doctor.versions import list_gpus

    disk = shutil.disk_usage(run.root if run.root.is_dir() else Path.cwd())
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": Path("/proc/meminfo").read_text().splitlines(),
        "disk_bytes": {"total": disk.total, "free": disk.free},
        "gpus": [str(gpu) for gpu in list_gpus()],
        "environment": redacted_environment(os.environ),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"
