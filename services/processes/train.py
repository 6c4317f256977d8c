"""`leeway train`: every process of a run on one machine, watched until it ends.

    Redis     embedded, unless replay.url names one
    serve     Ray and the Serve applications (policy, retriever, rollout workers)
    learner   torchrun with learner.num_processes ranks
    API       in this process, on a thread

They end in this order, and also when this process is told to stop: admission, learner (checkpoint),
serve, API, whatever a killed process left behind, Redis. Ctrl-C exits 130, SIGTERM exits 0; both
leave a run that `--resume` goes on with.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError, StoreUnavailable
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import connect_replay
from leeway.services import supervision
from leeway.services.api.app import connect_app, serve_in_thread
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory, RunState
from leeway.services.observability import Display, build_snapshot
from leeway.services.results import finish
from leeway.services.supervision import Child

REFRESH_S = 1.0
LEARNER_GRACE_S = 60.0
"""A step may be under way when the stop comes; it is finished and checkpointed."""
SERVE_GRACE_S = 30.0


def run(config: RunConfig, run_dir: RunDirectory, *, json_output: bool, resume: bool) -> int:
    """Train to the end. Returns the exit code; raises LeewayError when something failed."""
    return asyncio.run(Training(config, run_dir, json_output).run(resume))


class RunFailed(LeewayError):
    """A part of the run reported that it cannot go on."""


class Training:
    """The parent process of one run."""

    def __init__(self, config: RunConfig, run_dir: RunDirectory, json_output: bool) -> None:
        self._config = config
        self._run = run_dir
        self._json_output = json_output
        self._console = Console(stderr=json_output)
        self._began = time.time()
        self._stop = asyncio.Event()
        self._exit_code = 0
        # Engines, Ray and torchrun keep sockets and logs here; some end too late to tidy up.
        self._scratch = tempfile.mkdtemp(prefix="leeway-")
        self._redis: EmbeddedRedis | None = None
        self._children: dict[str, Child] = {}
        self._stop_api: Any = None
        self._events_seen = ""
        self._last_event: str | None = None

    async def run(self, resume: bool) -> int:
        """Start everything, watch it, end everything."""
        self._listen_for_signals()
        supervision.adopt_orphans()
        self._run.summary.unlink(missing_ok=True)
        try:
            url = self._start_redis()
            name = self._run.root.name
            self._board = RunBoard(url, name)
            self._replay = connect_replay(url, name, self._config.replay)
            try:
                await self._start(url, resume)
                await self._watch()
                wall_s = time.time() - self._began
            finally:
                await self._end()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._stop.is_set():
            self._say_how_to_resume()
            return self._exit_code
        finish(self._run, self._config, wall_s, self._console, self._json_output)
        return 0

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._asked_to_stop, 130)
        loop.add_signal_handler(signal.SIGTERM, self._asked_to_stop, 0)

    def _asked_to_stop(self, exit_code: int) -> None:
        if not self._stop.is_set():
            self._console.print("stopping; a step under way is finished first", style="yellow")
        self._exit_code = exit_code
        self._stop.set()

    def _start_redis(self) -> str:
        url = self._config.replay.url
        if url is None:
            self._redis = EmbeddedRedis.start(self._run.redis, self._run.root.name)
            url = self._redis.url
        self._run.write_redis_url(url)
        return url

    async def _start(self, url: str, resume: bool) -> None:
        config, board = self._config, self._board
        await board.clear_stop()
        await board.set_phase("starting")
        await board.put("run", self._run_section())
        await board.put("failure", {"reason": None})
        await self._replay.pause_admission(False)
        app = connect_app(
            url, self._run.root.name, config.replay, {"objective": config.learner.objective}
        )
        address, self._stop_api = serve_in_thread(app, config.api.host, config.api.port)
        # Engine and learner share the cores: a thread that waits must not spin.
        environment = {
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            # Large blocks are kept instead of being handed back and zeroed again each time.
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**31),
            "TMPDIR": self._scratch,
        }
        root = str(self._run.root)
        self._children["serve"] = await supervision.start(
            "serve", ["leeway.services.processes.serve", root], self._run.log("serve"), environment
        )
        learner = config.learner
        torchrun = [
            "torch.distributed.run",
            f"--nproc-per-node={learner.num_processes}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--max-restarts=0",
            f"--shutdown-timeout={LEARNER_GRACE_S - 5:.0f}",
            "--module",
            "leeway.services.processes.learn",
            root,
        ]
        self._children["learner"] = await supervision.start(
            "learner",
            torchrun,
            self._run.log("learner"),
            {**environment, "OMP_NUM_THREADS": str(learner.num_threads)},
        )
        self._write_state(address)
        verb = "resumed" if resume else "started"
        await board.append_event("run", f"{verb}; status at {address}/v1/status")
        self._console.print(
            f"run directory  {self._run.root}\nstatus         {address}/v1/status",
            soft_wrap=True,
            highlight=False,
        )

    def _run_section(self) -> dict[str, Any]:
        return {
            "name": self._run.root.name,
            "started_at": self._began,
            "num_steps": self._config.learner.num_steps,
            "bound": self._config.replay.max_staleness,
            "objective": self._config.learner.objective,
        }

    def _write_state(self, address: str) -> None:
        pids = {name: child.process.pid for name, child in self._children.items()}
        pids["train"] = os.getpid()
        if self._redis is not None:
            pids["redis"] = self._redis.pid
        before = self._run.read_state()
        self._run.write_state(
            RunState(
                name=self._config.name,
                started_at=before.started_at if before else self._began,
                pids=pids,
                api_address=address,
            )
        )

    async def _watch(self) -> None:
        """Until the run is done, is told to stop, or loses a process (ChildDied)."""
        ends = {name: asyncio.create_task(c.ended()) for name, c in self._children.items()}
        with Display(self._console) as display:
            while not self._stop.is_set():
                self._check_redis()
                phase = await self._refresh(display)
                if phase == "done":
                    break
                await self._check(ends)
                await self._sleep(REFRESH_S)
        for task in ends.values():
            task.cancel()

    async def _check(self, ends: dict[str, asyncio.Task[supervision.ChildDied]]) -> None:
        for name, task in ends.items():
            # A learner that is through ends the phase `training` first, so ask after it has ended.
            if task.done() and not (name == "learner" and await self._is_trained()):
                raise task.result()

    async def _is_trained(self) -> bool:
        return await self._board.phase() in ("evaluating-after", "done")

    def _check_redis(self) -> None:
        if self._redis is not None and not self._redis.is_running:
            raise StoreUnavailable(
                f"the embedded Redis ended; its log is {self._run.redis / 'redis.log'}"
            )

    async def _refresh(self, display: Display) -> str:
        sections = await self._board.get_all()
        if reason := sections.get("failure", {}).get("reason"):
            raise RunFailed(f"rollouts cannot go on: {reason}")
        phase = await self._board.phase() or "starting"
        sections.setdefault("run", {})["phase"] = phase
        last_event = await self._write_events()
        display.update(build_snapshot(sections, await self._replay.stats(), last_event=last_event))
        if "eval" in sections:
            self._run.eval.write_text(json.dumps(sections["eval"], indent=1))
        return phase

    async def _write_events(self) -> str | None:
        """Copy new events to events.jsonl; returns the text of the last one."""
        with self._run.events.open("a") as file:
            for event in await self._board.events(self._events_seen, 100):
                self._events_seen, self._last_event = event.event_id, event.text
                line = {"time": event.time_s, "kind": event.kind, "text": event.text}
                file.write(json.dumps(line) + "\n")
        return self._last_event

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return

    async def _end(self) -> None:
        """End every process in order. Runs on success, stop and failure alike."""
        if self._redis is None or self._redis.is_running:
            await self._quietly(self._replay.pause_admission(True))
            await self._quietly(self._board.request_stop("the run is ending"))
        for name, grace_s in (("learner", LEARNER_GRACE_S), ("serve", SERVE_GRACE_S)):
            if name in self._children:
                await self._children[name].stop(grace_s)
        if self._stop_api is not None:
            await asyncio.to_thread(self._stop_api)
        redis_pid = self._redis.pid if self._redis is not None else None
        left = [p for p in supervision.descendants(os.getpid()) if p.pid != redis_pid]
        await asyncio.to_thread(supervision.end_all, left)
        await self._quietly(self._replay.close())
        await self._quietly(self._board.close())
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)

    async def _quietly(self, step: Any) -> None:
        # Redis may be what failed; the processes are ended all the same.
        try:
            await step
        except LeewayError as error:
            self._console.print(f"while ending the run: {error}", style="yellow")

    def _say_how_to_resume(self) -> None:
        root = os.path.relpath(self._run.root, Path.cwd())
        self._console.print(
            f"\nstopped. Go on with: leeway train --resume {root}", soft_wrap=True, highlight=False
        )
