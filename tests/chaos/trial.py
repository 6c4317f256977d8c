"""One run under faults: make one, and wait until the run has got over it."""

from __future__ import annotations

import sys
import time
from typing import Final

from tests.chaos import faults as kinds
from tests.chaos.faults import (
    Fault,
    Means,
    NobodyThere,
    applied,
    processes_of,
)
from tests.chaos.results import Outcome
from tests.chaos.run_ledger import AddedGroups
from tests.chaos.trained_run import TrainedRun

RECOVER_S: Final = 300.0
"""Who has not made a step by then, counts as not recovered."""
FIRST_STEP_S: Final = 600.0
END_S: Final = 1800.0
POLL_S: Final = 0.1
APPEAR_S: Final = 60.0
"""Who has just been started again is waited for, to be hit."""
LOADED: Final = ("engine", "serve")
"""Whose successor loads a model for an engine."""
MAX_RESUMES: Final = 20


class Trial:
    """One run and what was done to it."""

    def __init__(self, trained: TrainedRun, means: Means, added: AddedGroups) -> None:
        self._trained = trained
        self._means = means
        self._added = added
        self.outcomes: list[Outcome] = []
        self.deaths: list[str] = []
        """Why `leeway train` ended before its time."""

    def await_first_step(self) -> None:
        """The engine loads, and the policy is evaluated."""
        deadline = time.monotonic() + FIRST_STEP_S
        while not self._trained.last_step:
            if not self._trained.is_alive or time.monotonic() > deadline:
                raise RuntimeError(f"no first step: {self._trained.last_words()}")
            time.sleep(POLL_S)

    def disturb(self, fault: Fault) -> bool:
        """One fault, and the wait until the run has got over it. False when the run is through."""
        time.sleep(self._means.rng.uniform(0.5, 4.0))
        if not self._trained.is_alive and not self._is_through():
            self._resume(self._trained.last_words())
            self._await_progress()
        if not self._is_there(fault.target):
            return not self._is_through()
        before = {process.pid for process in processes_of(fault.target)}
        say(fault.name)
        try:
            with applied(fault, self._means) as seconds:
                began = time.monotonic()
                time.sleep(seconds)
        except NobodyThere:
            return True
        lifted, seen = time.monotonic(), self._progress()
        outcome = self._recovery(fault, before, seen, began, lifted)
        self.outcomes.append(outcome)
        say(f"{len(self.outcomes):3d} {outcome}")
        return True

    def _is_there(self, target: str) -> bool:
        """Whether there is somebody to hit; who has just been replaced is waited for."""
        if target in kinds.NO_PROCESS:
            return not self._is_through()
        deadline = time.monotonic() + APPEAR_S
        while not processes_of(target):
            if self._is_through() or not self._trained.is_alive or time.monotonic() > deadline:
                say(f"no {target} to be found")
                return False
            time.sleep(POLL_S)
        return not self._is_through()

    def _progress(self) -> tuple[str, int]:
        """The last optimizer step, and how many groups were added."""
        return self._trained.last_step, self._added.count()

    def _recovery(
        self, fault: Fault, before: set[int], seen: tuple[str, int], began: float, lifted: float
    ) -> Outcome:
        """A step has ended and a group has come since; who was killed has a successor."""
        died, recovered = "", False
        deadline = time.monotonic() + RECOVER_S
        while time.monotonic() < deadline and not recovered:
            if self._is_through():
                recovered = True
            elif not self._trained.is_alive:
                died = died or self._trained.last_words()
                self._resume(died)
                seen = self._progress()
            else:
                recovered = self.has_recovered(fault, before, seen)
            time.sleep(POLL_S)
        now = time.monotonic()
        if not recovered:
            self._trained.kill()
            died = died or f"no progress within {RECOVER_S:g} s, ended by its operator"
            self._resume(f"{fault.name}: {died}")
            self._await_progress()
        loads = bool(died) or (fault.kind == "kill" and fault.target in LOADED)
        return Outcome(
            backend=self._trained.backend,
            kind=fault.kind,
            target=fault.target,
            lasted_s=lifted - began,
            recovery_s=now - lifted,
            is_recovered=recovered,
            engine_start_s=self._trained.start_s(fault.target) if loads else 0.0,
            died=died,
        )

    def _await_progress(self) -> None:
        """Of a run that was resumed."""
        seen, deadline = self._progress(), time.monotonic() + FIRST_STEP_S
        while True:
            step, num_added = self._progress()
            if step != seen[0] and num_added > seen[1]:
                return
            if not self._trained.is_alive or time.monotonic() > deadline:
                raise RuntimeError(f"the run does not go on: {self._trained.last_words()}")
            time.sleep(POLL_S)

    def has_recovered(self, fault: Fault, before: set[int], seen: tuple[str, int]) -> bool:
        """Whether the run has got over it. `before`: who had the role; `seen`: step and groups at
        the end of the fault."""
        step, num_added = self._progress()
        if not step or step == seen[0] or num_added <= seen[1]:
            return False
        if fault.kind == "kill":
            there = {process.pid for process in processes_of(fault.target)}
            if not there - before:
                return False
        return fault.target != "api" or self._trained.answers()

    def _resume(self, why: str) -> None:
        """As an operator would, at once: what is left of the run is for `leeway train` to end."""
        self.deaths.append(why)
        say(f"leeway train ended: {why}")
        if len(self.deaths) > MAX_RESUMES:
            raise RuntimeError(f"the run does not go on: {why}")
        self._trained.resume()

    def await_end(self) -> None:
        """Undisturbed to the last step."""
        deadline = time.monotonic() + END_S
        while not self._is_through() or self._trained.is_alive:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run did not end: {self._trained.last_step[:200]}")
            if not self._trained.is_alive and not self._is_through():
                self._resume(self._trained.last_words())
            time.sleep(POLL_S)

    def _is_through(self) -> bool:
        return bool(self._trained.summary())


def say(text: str) -> None:
    """Progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
