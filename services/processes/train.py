"""`leeway train`: every process of a run on one machine, kept alive until it is done.

    Redis     embedded, unless replay.url names one
    API       `leeway api`: REST and dashboard
    serve     `leeway serve`: Ray and the Serve applications (policy, retriever, rollout workers)
    learner   `leeway learn`: learner.num_processes ranks; it writes the results

crew.py starts again who dies. All end in this order, also when this process is told to stop:
admission, learner (checkpoint), serve, API, whatever a killed process left behind, Redis. Ctrl-C
exits 130, SIGTERM exits 0; both leave a run that `--resume` goes on with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from rich.console import Console

from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError, StoreUnavailable, WaitTimeout
from leeway.replay.free_pages import keep_giving_back
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import check_shards, connect_replay
from leeway.replay.vigil import Vigil
from leeway.services import supervision
from leeway.services.api.auth import tokens_of
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory, RunState
from leeway.services.observability import Display, build_snapshot
from leeway.services.processes.commands import commands, end_leftovers
from leeway.services.processes.crew import Crew, full_disk
from leeway.services.processes.joining import run_section
from leeway.services.processes.members import Command, RedisMember
from leeway.services.records import Records
from leeway.services.results import show_results
from leeway.services.supervision import ChildDied, how_it_ended
from leeway.services.timeline import keep_timeline
from leeway.services.watch import Watchdog, evidence_of, until_one_ends

log = logging.getLogger(__name__)

REFRESH_S = 1.0
POLL_S = 0.1
API_START_S = 120.0
"""How long the API may take to listen; a machine that starts engines is busy."""
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
        self._crew = Crew(config.supervision, self._tell)
        self._crew.is_over = self._is_over
        self._is_settled = False
        self._crew.is_settled = lambda: self._is_settled
        self._crew.obstacle = lambda: full_disk(run_dir.root)
        self._api_address: str | None = None

    async def run(self, resume: bool) -> int:
        """Start everything, watch it, end everything."""
        self._listen_for_signals()
        supervision.adopt_orphans()
        self._run.summary.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(end_leftovers, self._run)
            url = self._start_redis()
            name = self._run.root.name
            self._board = RunBoard(url, name)
            self._replay = connect_replay(url, name, self._config.replay)
            try:
                await self._start(url, resume)
                await self._watch()
            finally:
                learner_code = await self._end()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._stop.is_set():
            self._check_stopped(learner_code)
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
            self._crew.add(RedisMember(self._redis))
            url = self._redis.url
        self._run.write_redis_url(url)
        return url

    async def _start(self, url: str, resume: bool) -> None:
        config, board = self._config, self._board
        await check_shards(url, self._run.root.name, config.replay.num_shards)
        await board.clear_stop()
        await board.set_phase("starting")
        await board.put("run", run_section(config, self._run.root.name, self._began))
        await self._replay.pause_admission(False)
        # Here, so that who started the run is told of new tokens, and no log is.
        tokens, are_new = tokens_of(self._run.root) if config.api.auth else (None, False)
        api, *others = commands(self._config, self._run, url, self._scratch)
        for command in (api, *others):
            await self._crew.start(command)
        self._api_address = address = await self._listening(api)
        if address is None:
            return
        # One that is started again is found where it was.
        api.arguments += ["--port", address.rpartition(":")[2]]
        self._write_state()
        verb = "resumed" if resume else "started"
        await board.append_event("run", f"{verb}; status at {address}/v1/status")
        # The fragment never leaves the browser; it is shown once, to a person: what is no terminal
        # may be a log that others read. It stays in the directory.
        is_shown = tokens is not None and are_new and self._console.is_terminal
        fragment = f"/#token={tokens.control}" if tokens is not None and is_shown else "/"
        self._console.print(
            f"run directory  {self._run.root}\ndashboard      {address}{fragment}",
            soft_wrap=True,
            highlight=False,
        )

    async def _listening(self, api: Command) -> str | None:
        """Address of the API, once it is there; None when the run is told to stop before. Raises
        ChildDied when it ends instead."""
        ended = asyncio.create_task(api.ended())
        deadline = time.monotonic() + API_START_S
        try:
            while not self._stop.is_set():
                if address := self._api_that_listens():
                    return address
                if ended.done():
                    raise ended.result()
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"the API did not listen within {API_START_S:g} s; "
                        f"its log is {self._run.log('api')}"
                    )
                await self._sleep(POLL_S)
            return None
        finally:
            ended.cancel()

    def _api_that_listens(self) -> str | None:
        state = self._run.read_state()
        is_it = state is not None and state.pids.get("api") == self._crew.pids["api"]
        return state.api_address if state is not None and is_it else None

    def _write_state(self) -> None:
        """For other commands; again whenever a process was started again."""
        before = self._run.read_state()
        state = RunState(
            name=self._config.name,
            started_at=before.started_at if before else self._began,
            pids={**self._crew.pids, "train": os.getpid()},
            api_address=self._api_address,
        )
        if state != before:
            self._run.write_state(state)

    async def _watch(self) -> None:
        """Until the run is done or is told to stop. Raises ChildDied when a process is lost for
        good, Standstill when nobody makes progress."""
        dog = Watchdog(self._board, self._replay, self._config, evidence_of(self._run))
        vigil = Vigil(self._board, "train")
        with Display(self._console) as display:
            until = [asyncio.create_task(w) for w in (self._until_done(display), self._stop.wait())]
            lasting = (self._crew.watch(), dog.keep(), keep_giving_back())
            watches = [asyncio.create_task(w) for w in lasting]
            try:
                await until_one_ends(until, watches)
            finally:
                await vigil.end()

    async def _until_done(self, display: Display) -> None:
        """Show the run until the learner has written its results."""
        deadline: float | None = None
        while True:
            phase = await self._try_to_refresh(display)
            if phase == "done":
                deadline = deadline or time.monotonic() + RESULTS_S
                if self._crew.has_finished("learner"):
                    return
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"the learner did not write the results within {RESULTS_S:g} s; "
                        f"its log is {self._run.log('learner')}"
                    )
            try:
                self._write_state()
            except OSError as error:  # a full disk; it is written again a second later
                log.warning("%s could not be written: %s", self._run.state, error)
            await asyncio.sleep(REFRESH_S)

    async def _try_to_refresh(self, display: Display) -> str | None:
        """The phase; None while an embedded Redis does not answer: the crew starts it again, or
        ends the run. Raises StoreUnavailable where Redis is another's."""
        try:
            return await self._refresh(display)
        except StoreUnavailable as error:
            if self._redis is None:
                raise
            log.warning("%s", error)
            return None

    def _is_over(self, name: str) -> bool:
        """The learner writes the results last, and ends; the others stay until they are ended."""
        return name == "learner" and self._run.summary.is_file()

    async def _tell(self, sentence: str) -> None:
        await self._board.append_event("supervision", sentence)

    async def _refresh(self, display: Display) -> str:
        sections = await self._board.get_all()
        phase = await self._board.phase() or "starting"
        self._is_settled |= phase not in ("starting", "evaluating-before")
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

    async def _end(self) -> int | None:
        """End every process in order. Runs on success, stop and failure alike. Returns the exit
        code of a learner that was ended here; None where it had ended before."""
        was_over = self._crew.has_finished("learner")
        if self._redis is None or self._redis.is_running:
            await self._quietly(self._replay.pause_admission(True))
            await self._quietly(self._board.request_stop("the run is ending"))
        codes = await self._crew.stop("learner", "serve")
        keep_timeline(self._run)  # a learner that was killed wrote none
        if self._redis is None or self._redis.is_running:
            await self._quietly(self._copy_records())
        await self._crew.stop("api")
        await self._crew.end_orphans()
        await self._quietly(self._replay.close())
        await self._quietly(self._board.close())
        await self._crew.stop("redis")
        return None if was_over else codes.get("learner")

    async def _copy_records(self) -> None:
        await Records(self._run, self._board).copy()

    async def _quietly(self, step: Awaitable[None]) -> None:
        # Redis may be what failed, or the disk be full; the processes are ended all the same.
        try:
            await step
        except (LeewayError, OSError, ValueError, LookupError) as error:
            words = f"while ending the run: {type(error).__name__}: {error}"
            self._console.print(words, style="yellow", soft_wrap=True)

    def _check_stopped(self, learner_code: int | None) -> None:
        """Raises ChildDied where a stop may have left steps without a checkpoint. SIGTERM ends only
        a learner that has not begun to work."""
        if self._is_settled and learner_code not in (None, 0, -signal.SIGTERM):
            raise ChildDied(
                f"the learner ended with {how_it_ended(learner_code)} when it was told to stop, so "
                "the last steps may lack a checkpoint, and are trained again by leeway train "
                f"--resume {self._run.root}; its log is {self._run.log('learner')}"
            )

    def _say_how_to_resume(self) -> None:
        root = os.path.relpath(self._run.root, Path.cwd())
        self._console.print(
            f"\nstopped. Go on with: leeway train --resume {root}", soft_wrap=True, highlight=False
        )
