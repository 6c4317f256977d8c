"""A whole small run in one process, noting what is looked up while a pickle is read.

Training with checkpoints, a resumption, the buffer in Redis, an exported archive. Prints one JSON
line: what was noted before the check at the end, and that check, which reads a pickle on purpose.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from leeway.actors.config import model_dir
from leeway.learner import checkpoint
from leeway.learner.checkpoint import Checkpoints
from leeway.learner.model import load_model
from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from leeway.replay.archive_buffer import OpenBuffer, export_groups, import_groups
from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group
from leeway.services.config import RunConfig, load
from leeway.services.experiments.in_process import run

CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "stability.toml"
SMALL = (
    "replay.groups_per_step=1",
    "replay.max_staleness=1",
    "rollout.group_size=2",
    "rollout.max_groups_in_flight=2",
    "policy.max_num_seqs=4",
    "learner.num_steps=2",
    "eval.num_questions=2",
)
noted: list[str] = []


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        at = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[-4:-1]]
        noted.append(f"{arguments[0]}.{arguments[1]} from {' < '.join(reversed(at))}")


def checkpoints_and_goes_on(config: RunConfig, folder: Path) -> None:
    base = model_dir("bundled")
    world = World(device=load_model(base).device)
    trainer = Trainer(load_model(base), config.learner, world)
    written = Checkpoints(folder, base, world)
    written.save(trainer, 0, {"epoch": 1})
    written.close()
    found = checkpoint.latest(folder)
    assert found is not None
    again = Trainer(load_model(found.path), config.learner, world)
    assert checkpoint.restore(found.path, again).extra == {"epoch": 1}


async def buffers_and_archives(folder: Path) -> None:
    limits = ReplayConfig(groups_per_step=1, max_staleness=1)
    with EmbeddedRedis.start(folder / "redis") as server:
        replay = RedisReplay(server.url, "run", limits)
        for _ in range(2):
            (slot,) = await replay.admit(1, PolicyVersion(0), 30.0)
            await replay.add(slot, build_group(slot))
        lease = await replay.draw(30.0)
        await replay.release(lease)
        await replay.close()
        source, target = (OpenBuffer(server.url, name, limits) for name in ("run", "other"))
        await export_groups(source, folder / "out.lwr")
        await import_groups(target, folder / "out.lwr")
        await source.replay.close()
        await target.replay.close()


def main(folder: Path) -> None:
    config = load(CONFIG, SMALL)
    sys.addaudithook(note)
    asyncio.run(run(config, folder / "run"))
    checkpoints_and_goes_on(config, folder / "checkpoints")
    asyncio.run(buffers_and_archives(folder))
    before = list(noted)
    pickle.loads(pickle.dumps(datetime.date(2026, 1, 1)))
    print(json.dumps({"noted": before, "check": noted[len(before) :]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
