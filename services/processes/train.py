"""`leeway train`: every process of a run on one machine, watched until it ends.

    Redis     embedded, unless replay.url names one
    serve     `leeway serve`: Ray and the Serve applications (policy, retriever, rollout workers)
    learner   `leeway learn`: learner.num_processes ranks; it writes the results
    API       in this process, on a thread

They end in this order, and also when this process is told to stop: admission, learner (checkpoint),
serve, API, whatever a killed process left behind, Redis. Ctrl-C exits 130, SIGTERM exits 0; both
leave a run that `--resume` goes on with.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError, StoreUnavailable, WaitTimeout
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import connect_replay
from leeway.services import supervision
from leeway.services.api.app import connect_app, serve_in_thread
from leeway.services.api.auth import tokens_of
from leeway.services.config import REDIS_URL, RunConfig
from leeway.services.layout import LogName, RunDirectory, RunState
from leeway.services.observability import Display, build_snapshot
from leeway.services.processes.devices import split_gpus, visible_gpus
from leeway.services.processes.joining import run_section
from leeway.services.records import Records
from leeway.services.results import show_results
from leeway.services.supervision import Child

REFRESH_S = 1.0
LEARNER_GRACE_S = 60.0
"""A step may be under way when the stop comes; it is finished and checkpointed."""
SERVE_GRACE_S = 30.0
RESULTS_S = 300.0
"""How long the learner may take, after the last evaluation, to write model and report."""


def run(config: RunConfig, run_dir: RunDirectory, *, json_output: bool, resume: bool) -> int:
    """Train to the end. Returns the exit code; raises LeewayError when something failed."""
    return asyncio.run(Training(config, run_dir, json_output).run(resume))


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
            finally:
                await self._end()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._stop.is_set():
            self._say_how_to_resume()
            return self._exit_code
        show_results(self._run, self._console, self._json_output)
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
        await board.put("run", run_section(config, self._run.root.name, self._began))
        await self._replay.pause_admission(False)
        tokens, are_new = tokens_of(self._run.root) if config.api.auth else (None, False)
        app = connect_app(url, self._run.root, config, tokens)
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
            REDIS_URL: url,
        }
        policy = config.policy
        num_engine_gpus = policy.num_replicas * policy.tensor_parallel_size
        devices = split_gpus(visible_gpus(), config.learner.num_processes, num_engine_gpus)
        commands: tuple[tuple[LogName, str], ...] = (("serve", "serve"), ("learner", "learn"))
        for (name, command), own in zip(commands, devices, strict=True):
            self._children[name] = await supervision.start(
                name, self._command(command), self._run.log(name), {**environment, **own}
            )
        self._write_state(address)
        verb = "resumed" if resume else "started"
        await board.append_event("run", f"{verb}; status at {address}/v1/status")
        # The fragment never leaves the browser; it is shown once, and stays in the directory.
        fragment = f"/#token={tokens.control}" if tokens is not None and are_new else "/"
        self._console.print(
            f"run directory  {self._run.root}\ndashboard      {address}{fragment}",
            soft_wrap=True,
            highlight=False,
        )

    def _command(self, name: str) -> list[str]:
        """What anybody would type, with this run's own configuration."""
        run = self._run
        return ["leeway.services.cli", name, str(run.config), "--run-dir", str(run.root)]

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
            if not self._stop.is_set():
                await self._await_results(ends["learner"])
        for task in ends.values():
            task.cancel()

    async def _await_results(self, learner: asyncio.Task[supervision.ChildDied]) -> None:
        """The learner writes them when the run is done, and ends."""
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait(
            {learner, stopped}, timeout=RESULTS_S, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        if self._stop.is_set():
            return
        if not learner.done():
            raise WaitTimeout(
                f"the learner did not write the results within {RESULTS_S:g} s; "
                f"its log is {self._run.log('learner')}"
            )
        if not self._run.summary.is_file():
            raise learner.result()

    async def _check(self, ends: dict[str, asyncio.Task[supervision.ChildDied]]) -> None:
        for name, task in ends.items():
            # A learner that is through ends the phase `training` first, so ask after it has ended.
            if task.done() and not (name == "learner" and await self._is_trained()):
                raise task.result()

    async def _is_trained(self) -> bool:
        return await self._board.phase() == "done"

    def _check_redis(self) -> None:
        if self._redis is not None and not self._redis.is_running:
            raise StoreUnavailable(
                f"the embedded Redis ended; its log is {self._run.redis / 'redis.log'}"
            )

    async def _refresh(self, display: Display) -> str:
        sections = await self._board.get_all()
        phase = await self._board.phase() or "starting"
        sections.setdefault("run", {})["phase"] = phase
        events = await self._board.events(count=1)
        last_event = events[-1].text if events else None
        display.update(build_snapshot(sections, await self._replay.stats(), last_event=last_event))
        return phase

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
        if self._redis is None or self._redis.is_running:
            await self._quietly(Records(self._run, self._board).copy())
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
