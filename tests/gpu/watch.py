"""A line a second about a run that goes on, and stacks of all its processes when nothing comes out.

    python tests/gpu/watch.py /tmp/leeway-pipeline --out watch &      # waits for a run below it
    leeway bench pipeline --out /tmp/leeway-pipeline

For machines that are lent for minutes: a run that stood still there cannot be looked at again. It
needs py-spy for the stacks, and ends with the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

EVERY_S = 1.0
STILL_S = 4.0
"""So long no turn ended while requests were with an engine: the stacks are taken."""
MOST_DUMPS = 4
OURS = ("ServeReplica", "EngineCore", "leeway", "redis-server")


def main() -> int:
    """0, also where there was no run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="run directories lie somewhere below it")
    parser.add_argument("--out", type=Path, required=True, help="receives seconds.jsonl, stacks")
    parser.add_argument("--minutes", type=float, default=9.5, help="at most")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * given.minutes
    started = time.time()
    num_tokens, since, num_dumps = 0, time.monotonic(), 0
    with (given.out / "seconds.jsonl").open("a", encoding="utf-8") as lines:
        while time.monotonic() < ends_at:
            time.sleep(EVERY_S)
            run = _newest(given.folder, started)
            if run is None:
                continue
            if (run / "summary.json").is_file():
                return 0
            second = _second(run)
            if second is None:
                continue
            print(json.dumps(second), file=lines, flush=True)
            if second["num_tokens"] != num_tokens or not second["in_flight"]:
                num_tokens, since = second["num_tokens"], time.monotonic()
            elif time.monotonic() - since > STILL_S and num_dumps < MOST_DUMPS:
                num_dumps, since = num_dumps + 1, time.monotonic()
                _dump(given.out / f"stacks-{num_dumps}.txt")
    return 0


def _newest(folder: Path, started: float) -> Path | None:
    """The run directory that was made last, and after this program."""
    found = [file for file in folder.glob("**/run.json") if file.stat().st_mtime > started]
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def _second(run: Path) -> dict[str, Any] | None:
    """What engines, buffer and learner say now; None while they do not answer."""
    try:
        address = json.loads((run / "run.json").read_text())["api_address"]
        token = json.loads((run / "api-tokens.json").read_text())["read"]
        policy, replay, status = (
            _get(f"{address}/v1/{part}", token) for part in ("policy", "replay", "status")
        )
    except (OSError, KeyError, ValueError):
        return None
    engines = policy["engines"]
    return {
        "time": time.time(),
        "step": status["run"].get("step"),
        "num_tokens": sum(engine["num_tokens"] or 0 for engine in engines),
        "num_cached": sum(engine["num_cached_tokens"] or 0 for engine in engines),
        "num_prompt": sum(engine["num_prompt_tokens"] or 0 for engine in engines),
        "in_flight": sum(engine["num_in_flight"] or 0 for engine in engines),
        **{name: replay.get(name) for name in ("num_ready", "num_slots", "num_held_back")},
    }


def _get(url: str, token: str) -> dict[str, Any]:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=2) as answer:
        return json.load(answer)


def _dump(file: Path) -> None:
    """Stacks of every process of ours, and how busy each is."""
    spy = shutil.which("py-spy")
    listed = subprocess.run(["ps", "-eo", "pid,pcpu,stat,args"], capture_output=True, text=True)
    rows = [row for row in listed.stdout.splitlines() if any(word in row for word in OURS)]
    with file.open("w", encoding="utf-8") as sink:
        print(time.time(), *rows, sep="\n", file=sink)
        for row in rows if spy else ():
            pid = row.split()[0]
            command = [spy, "dump", "--nonblocking", "--pid", pid]
            try:
                told = subprocess.run(command, capture_output=True, text=True, timeout=20)
            except subprocess.TimeoutExpired:
                continue
            print(f"\n==== {row[:150]}\n{told.stdout}", file=sink)


if __name__ == "__main__":
    sys.exit(main())
