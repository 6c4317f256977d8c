"""Children: their own session, an end in time, nothing left below them."""

import asyncio
import os
from pathlib import Path

import psutil

from leeway.services import supervision


async def start(tmp_path: Path, name: str, code: str) -> supervision.Child:
    (tmp_path / f"{name}.py").write_text(code)
    return await supervision.start(
        name, [name], tmp_path / f"{name}.log", {"PYTHONPATH": str(tmp_path)}
    )


async def ready(child: supervision.Child) -> list[int]:
    """Pids that the child printed once it was up."""
    while "up" not in child.log.read_text():
        await asyncio.sleep(0.02)
    return [int(word) for word in child.log.read_text().split() if word.isdigit()]


async def test_a_child_leads_a_session_of_its_own(tmp_path: Path):
    code = "import time; print('up', flush=True); time.sleep(60)"
    child = await start(tmp_path, "lead_session", code)
    await ready(child)
    assert os.getsid(child.process.pid) == child.process.pid
    await child.stop(5)


async def test_an_end_by_itself_is_an_error_that_names_process_code_and_log(tmp_path: Path):
    child = await start(tmp_path, "fails_alone", "raise SystemExit('no such model')")
    died = await child.ended()
    assert "fails_alone process ended with exit code 1" in str(died)
    assert str(child.log) in str(died)
    assert "no such model" in child.log.read_text()


async def test_a_child_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path: Path):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grand = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(grand.pid, 'up', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = await start(tmp_path, "stubborn", code)
    (grandchild,) = await ready(child)
    await child.stop(grace_s=0.3)
    assert child.process.returncode == -9
    assert not psutil.pid_exists(grandchild)


def test_the_sentence_of_a_command_is_the_cause_where_its_log_ends_with_one(tmp_path: Path):
    log = tmp_path / "learner.log"
    log.write_text("leeway.learner.errors.NonFiniteError: nan\nleeway: the loss is nan\n")
    assert supervision.last_error(log) == "the loss is nan"
