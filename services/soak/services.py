"""What Redis, Ray, the API and the disk say of a run, as figures of one sample."""

from __future__ import annotations

import os
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from leeway.replay.connection import Link
from leeway.replay.errors import LeewayError
from leeway.replay.keys import replay_prefix
from leeway.services.layout import RunDirectory
from leeway.services.soak.samples import Figure

ASK_S: Final = 10.0
HELD: Final = "allocated_bytes"
_FAMILIES: Final = {
    "added": "remembered_bytes",
    "acknowledged": "remembered_bytes",
    "board": "records_bytes",
}
"""By the word behind the run's prefix; every other key is of the buffer's groups."""


async def redis_figures(link: Link, run: str) -> list[Figure]:
    """Memory by family of keys, file and connections. Empty while Redis does not answer."""
    try:
        [raw] = await link.execute(("INFO",))
        sizes = await _family_bytes(link, run)
    except LeewayError:
        return []
    info = dict(line.split(":", 1) for line in raw.decode().splitlines() if ":" in line)
    figures = {
        "used_bytes": info["used_memory"],
        "append_only_bytes": info.get("aof_current_size", "0"),
        "connections": info["connected_clients"],
        **sizes,
    }
    return [Figure("redis", name, float(value)) for name, value in figures.items()]


async def _family_bytes(link: Link, run: str) -> dict[str, float]:
    """Bytes of the keys of one run, by what they are for, and how many there are."""
    sums: defaultdict[str, float] = defaultdict(float)
    prefix = replay_prefix(run)
    cursor: Any = b"0"
    while True:
        [(cursor, keys)] = await link.execute(("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 500))
        usage = await link.execute(*(("MEMORY", "USAGE", key) for key in keys)) if keys else []
        for key, size in zip(keys, usage, strict=True):
            word = key.decode().removeprefix(prefix).partition(":")[0]
            sums[_FAMILIES.get(word, "groups_bytes")] += size or 0
        sums["keys"] += len(keys)
        if int(cursor) == 0:
            return dict(sums)


def ray_figures(port: int) -> list[Figure]:
    """Living actors and the object store, from the metrics that Ray exports at a port."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ASK_S) as answer:
            text = answer.read().decode()
    except OSError:
        return []
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "ray_actors" and _is_alive(sample.labels):
                sums["actors"] += sample.value
            elif sample.name == "ray_object_store_num_local_objects":
                sums["objects"] += sample.value
            elif sample.name == "ray_object_store_used_memory":
                sums["object_bytes"] += sample.value
    return [Figure("ray", name, value) for name, value in sums.items()]


def _is_alive(labels: Mapping[str, str]) -> bool:
    """Ray counts each actor twice: where it is known, and where it runs."""
    return labels.get("Source") == "gcs" and labels.get("State") == "ALIVE"


def api_figures(address: str | None) -> list[Figure]:
    """How long /livez takes: it waits for the event loop of the API, and for nothing else."""
    if address is None:
        return []
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(f"{address}/livez", timeout=ASK_S) as answer:
            answer.read()
    except OSError:
        return []
    return [Figure("api", "livez_ms", 1e3 * (time.perf_counter() - began))]


def disk_figures(run: RunDirectory, scratch: set[str]) -> list[Figure]:
    """Bytes of the run directory by part, and of the temporary folders of its processes."""
    parts = {"checkpoint_bytes": run.checkpoints, "redis_disk_bytes": run.redis}
    sizes = {name: folder_bytes(folder) for name, folder in parts.items()}
    sizes["run_bytes"] = folder_bytes(run.root) - sum(sizes.values())
    sizes["scratch_bytes"] = sum(folder_bytes(Path(folder)) for folder in scratch)
    return [Figure("disk", name, float(size)) for name, size in sizes.items()]


def folder_bytes(folder: Path) -> int:
    """Space on disk of the files below, whatever is deleted meanwhile left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += 512 * (Path(parent) / name).lstat().st_blocks
            except OSError:
                continue
    return total


def step_figures(run: RunDirectory) -> list[Figure]:
    """The last optimizer step in metrics.jsonl, and what the learner held behind it."""
    try:
        line = msgspec.json.decode(run.metrics.read_bytes().splitlines()[-1])
        figures = {name: float(line[name]) for name in ("step", HELD) if name in line}
    except (OSError, IndexError, msgspec.DecodeError):
        return []
    return [Figure("learner", name, value) for name, value in figures.items()]
