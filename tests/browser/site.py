"""A run as the dashboard sees it: boards and a buffer in a Redis, written as the processes of a run
write them, and the API over them on a fixed port, which can be ended and started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from leeway.actors.config import model_dir
from leeway.actors.tokens import Tokens
from leeway.replay.run_board import RunBoard
from leeway.replay.schema import Action, Group, GroupId, PolicyVersion, Trajectory, Turn
from leeway.replay.sharded_store import connect_replay
from leeway.replay.store import Slot
from leeway.services.api.app import connect_app, serve_in_thread
from leeway.services.api.auth import Tokens as ApiTokens
from leeway.services.config import load

TurnText = tuple[Action, str, str]
"""Action, what was generated, what was observed."""

READ_TOKEN: Final = "read-token-of-a-test"
CONTROL_TOKEN: Final = "control-token-of-a-test"
CONFIG: Final = load(None, ["learner.num_steps=60", "replay.max_staleness=4"])
QUESTION, QUESTION_ID = "In what year was Alvar Aalto born?", "rf-0"
HOSTILE = "<img src=x onerror=alert(1)> 1898"
TURNS: list[TurnText] = [
    (
        "search",
        "<think>look him up</think><search>Alvar Aalto</search>",
        f'\n<information>\nDoc 1: "Alvar Aalto" {HOSTILE}\n</information>\n',
    ),
    ("answer", "<think>found it</think><answer>1898</answer>", ""),
]


class Site:
    """One run and its API. `url` stays the same over `stop` and `start`."""

    def __init__(self, folder: Path, redis_url: str, run: str, port: int = 0) -> None:
        """Port 0 takes a free one."""
        self.read_token, self.control_token = READ_TOKEN, CONTROL_TOKEN
        self.run, self.port = run, port
        self._folder, self._redis_url = folder / run, redis_url
        self._folder.mkdir()
        self._board = RunBoard(redis_url, run)
        self._replay = connect_replay(redis_url, run, CONFIG.replay)
        self._stop: Callable[[], None] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve, on the port of before."""
        tokens = ApiTokens(self.read_token, self.control_token)
        app = connect_app(self._redis_url, self._folder, CONFIG, tokens)
        address, self._stop = serve_in_thread(app, "127.0.0.1", self.port)
        self.port = int(address.rpartition(":")[2])

    def stop(self) -> None:
        """End the server; the run goes on."""
        stop, self._stop = self._stop, None
        if stop:
            stop()

    async def close(self) -> None:
        """End all."""
        self.stop()
        await self._board.close()
        await self._replay.close()

    # --- what the run does ---

    async def begin(self) -> None:
        section = {"name": self.run, "num_steps": 60, "bound": 4, "started_at": time.time()}
        await self._board.put("run", section)

    async def set_phase(self, phase: str) -> None:
        await self._board.set_phase(phase)

    async def learn(self, step: int, reward: float, ages: Mapping[int, int] | None = None) -> None:
        """The learner did a step; `ages`: trajectories by staleness."""
        line = metrics_line(step, reward, ages or {1: 8, 2: 8})
        section = {"step": step, "version": step, "metrics": line, "tokens_per_s": 400.0}
        await self._board.put("learner", {**section, "idle_share": 0.02})
        await self._board.append_step(line)

    async def evaluate(self, scores: Mapping[int, float]) -> None:
        """Held-out exact match by step; the one at 0 is before training."""
        entries = [{"step": n, "scores": {"exact_match": score}} for n, score in scores.items()]
        await self._board.put("eval", {"before": entries[0], "history": entries[1:]})

    async def report_engine(self, engine_id: str, version: int) -> None:
        numbers = {"pause_ms": 12.0, "transfer_ms": 345.0, "tokens_per_s": 498.0}
        await self._board.put(f"policy:{engine_id}", {"version": version, **numbers})

    async def report_worker(self, wait_share: float) -> None:
        await self._board.put("rollout:worker-0", {"wait_share": wait_share})

    async def watch(self, waits: str, verdict: str | None = None) -> None:
        """The watchdog looked, and a process told how late its event loop wakes."""
        stages = [{"name": "learner", "idle_s": 1200.0, "deadline_s": 3600.0}]
        await self._board.put("watchdog", {"waits": waits, "verdict": verdict, "stages": stages})
        await self._board.put("loop:serve", {"lag_s": 1.5, "pid": 7})

    async def note(self, kind: str, text: str) -> None:
        await self._board.append_event(kind, text)

    async def play(self, question_id: str, turns: list[TurnText]) -> str:
        """A worker played a group of one trajectory; its id."""
        [slot] = await self._replay.admit(1, PolicyVersion(0), timeout_s=5)
        await self._replay.add(slot, played(slot, question_id, turns))
        return f"{slot.slot_id}-0"

    async def admission_is_paused(self) -> bool:
        return (await self._replay.stats()).admission_paused

    @property
    def sweeps(self) -> Path:
        """Where the API looks for sweeps."""
        return self._folder.parent / "sweeps"

    async def settings(self) -> dict[str, float]:
        """What has been changed."""
        return dict((await self._board.settings()).values)

    async def change_settings(self, values: Mapping[str, float]) -> None:
        """Somebody else changes them."""
        assert await self._board.change_settings(values, await self._board.settings())

    async def apply_settings(self, revision: int) -> None:
        """Learner and worker go by a change."""
        await self._board.put("learner", {"step": 2, "version": 2, "settings_revision": revision})
        await self._board.put("rollout:worker-0", {"settings_revision": revision})

    async def requests(self) -> set[str]:
        """What the learner has been asked to do."""
        return set(await self._board.requests())


def metrics_line(step: int, reward: float, ages: Mapping[int, int]) -> dict[str, Any]:
    """What the learner writes of a step, as far as the page draws it."""
    return {
        "step": step,
        "version": step,
        "time": time.time(),
        "seconds": 2.0,
        "wait_s": 0.5,
        "num_tokens_trained": 1000,
        "reward_mean": reward,
        "score/exact_match": reward / 2,
        "clip_fraction_tokens": 0.021,
        "ctn_norm": 0.25,
        "generated_tokens_per_s": 498.0,
        "staleness_mean": 1.5,
        "staleness_max": 2,
        **{f"staleness_histogram/{k}": n for k, n in ages.items()},
    }


@cache
def tokens() -> Tokens:
    return Tokens.load(model_dir(CONFIG.model))


def played(slot: Slot, question_id: str, turns: list[TurnText]) -> Group:
    """The group of one trajectory with these texts, sampled by the slot's version."""
    ids = tokens().encode("Question: ?\n")
    records: list[Turn] = []
    num_generated = 0
    for action, generated, observed in turns:
        own, seen = tokens().encode(generated), tokens().encode(observed) if observed else []
        records.append(Turn(len(ids), len(own), len(seen), action))
        ids += own + seen
        num_generated += len(own)
    trajectory = Trajectory(
        trajectory_id=f"{slot.slot_id}-0",
        token_ids=np.array(ids, np.int32),
        turns=tuple(records),
        logprobs=np.full(num_generated, -0.5, np.float32),
        versions=np.full(num_generated, slot.version, np.int32),
        reward=1.0,
        stop_reason="answer",
        scores={"exact_match": 1.0},
        duration_s=2.0,
    )
    return Group(
        group_id=GroupId(slot.slot_id),
        question_id=question_id,
        worker_id="worker-0",
        trajectories=(trajectory,),
    )
