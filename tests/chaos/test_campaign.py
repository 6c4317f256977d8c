"""The tools of `make chaos`: a fault does what it says, and a ledger finds what it is there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from leeway.replay.config import ReplayConfig
from leeway.services.layout import RunDirectory
from tests.chaos import faults
from tests.chaos import trial as trials
from tests.chaos.faults import Fault, NobodyThere, all_faults, applied
from tests.chaos.replay_ledger import Ledgers
from tests.chaos.results import Outcome, Results, RunResult, least_score
from tests.chaos.run_ledger import Account, AddedGroups, Weights, account
from tests.chaos.shim import Shim
from tests.chaos.stage import NoStage, _unshare
from tests.chaos.trained_run import TrainedRun
from tests.chaos.trial import Trial

ROOT = Path(__file__).parents[2]
CONFIG = ReplayConfig(groups_per_step=2, max_staleness=1)


# --- the ledger ---


class Stats:
    """Of a buffer that has dropped so many groups."""

    def __init__(self, **dropped: int) -> None:
        self.dropped = {reason.replace("_", "-"): n for reason, n in dropped.items()}


def judged(lines: list[str], stored: tuple[str, ...] = (), **dropped: int) -> Account:
    ledgers = Ledgers()
    for line in lines:
        ledgers.take(*line.split())
    weights = Weights(frozenset(), [])
    kept: Any = dict.fromkeys(stored)
    stats: Any = Stats(**dropped)
    return account(CONFIG, ledgers, stats, kept, [], weights)


def added(*names: str) -> list[str]:
    return [line for name in names for line in (f"add {name}", f"added {name}")]


def test_what_is_trained_stored_or_dropped_with_a_reason_is_not_lost():
    lines = [*added("a", "b", "c", "d"), "acknowledge L a", "acknowledged L a"]
    assert judged(lines, stored=("b",), overdue=2).num_lost == 0
    assert judged(lines, stored=("b",), overdue=1).num_lost == 1


def test_what_was_added_and_is_nowhere_is_lost():
    found = judged([*added("a", "b")], stored=("b",))
    assert (found.num_lost, found.is_clean) == (1, False)


def test_what_callers_drop_covers_no_lost_group():
    assert judged(added("a"), timeout=5).num_lost == 1


def test_a_group_of_a_lost_version_is_dropped_and_no_other():
    newer, older = ["granted a 10", "add a", "added a 5"], ["granted b 10", "add b", "added b 4"]
    found = judged([*newer, *older, "restored 4 20"], lost_version=2)
    assert (found.num_dropped, found.num_lost) == (1, 1)


def test_slots_of_lost_versions_hide_no_lost_group():
    assert judged(added("a"), lost_version=7).num_lost == 1


def test_going_back_explains_nothing_that_began_afterwards():
    assert judged(["granted a 30", "add a", "added a 5", "restored 4 20"]).num_lost == 1
    assert judged(["granted a 10", "restored 4 20", "add a", "added a 5"]).num_lost == 0


def test_an_acknowledgement_without_a_reply_may_have_trained_its_group():
    assert judged([*added("a"), "acknowledge L a"]).is_clean


def test_a_group_that_was_trained_twice_is_overdrawn():
    twice = ["acknowledge L a", "acknowledged L a", "acknowledge M a", "acknowledged M a"]
    assert judged([*added("a"), *twice]).num_overdrawn == 1


def test_a_group_that_was_drawn_too_old_is_stale():
    assert judged(["drawn L 0 1 2"]).num_stale == 1


def test_a_step_that_trained_tokens_too_old_is_stale():
    stats: Any = Stats()
    steps: Any = [{"staleness_max": 1}, {"staleness_max": 2}]
    found = account(CONFIG, Ledgers(), stats, {}, steps, Weights(frozenset(), []))
    assert found.num_stale == 1


def test_weights_that_nobody_announced_are_unverified(tmp_path: Path):
    (tmp_path / "learner").write_text("announced 1 aa\nannounced 2 bb\n")
    (tmp_path / "engine").write_text("committed 1 aa e\ncommitted 2 aa e\n")
    stats: Any = Stats()
    found = account(CONFIG, Ledgers(), stats, {}, [], Weights.read(tmp_path))
    assert (found.num_taken, found.num_unverified) == (2, 1)


def test_added_groups_are_counted_as_whole_lines_appear(tmp_path: Path):
    counted = AddedGroups(tmp_path)
    ledger = tmp_path / "worker"
    ledger.write_text("add a\nadded a\nadd b\nadd")
    assert counted.count() == 1
    with ledger.open("a") as file:
        file.write("ed b\n")
    assert counted.count() == 2


def test_the_hook_writes_a_line_around_each_call(tmp_path: Path):
    code = """
import asyncio, sys
from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group

async def main():
    with EmbeddedRedis.start(sys.argv[1]) as server:
        replay = RedisReplay(server.url, "run", ReplayConfig(groups_per_step=2))
        for slot in await replay.admit(2, PolicyVersion(0), 5.0):
            await replay.add(slot, build_group(slot))
        await replay.acknowledge(await replay.draw(5.0), PolicyVersion(1))
        await replay.restore_version(PolicyVersion(1))
        await replay.close()

asyncio.run(main())
"""
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).with_name("hook")),
        "LEEWAY_CHAOS_LEDGERS": str(ledgers),
    }
    command = [sys.executable, "-c", code, str(tmp_path / "redis")]
    subprocess.run(command, env=environment, check=True, timeout=60)
    (ledger,) = ledgers.iterdir()
    words = Counter(line.split()[0] for line in ledger.read_text().splitlines())
    assert words.pop("granted") == 2
    assert words.pop("restored") == 1
    assert words == {"add": 2, "added": 2, "drawn": 1, "acknowledge": 1, "acknowledged": 1}
    found = Ledgers.read(ledgers)
    assert (found.num_trained_of.total(), len(found.newest_of)) == (2, 2)
    assert [version for version, _ in found.restored] == [1]


# --- results ---

CLEAN = Account(8, 8, 0, 0, {}, 0, 0, 0, 4, 0)


def outcome(**values: Any) -> Outcome:
    plain = Outcome("torch", "kill", "learner", 0.0, 4.0, True, 0.0, "")
    return replace(plain, **values)


def result(score: float | None, num_faults: int, **values: Any) -> RunResult:
    summary = {} if score is None else {"exact_match_after": score}
    plain = RunResult(1, "torch", num_faults, 100, summary, CLEAN, [], 0, [])
    return replace(plain, **values)


def test_noise_is_three_deviations_of_seeds_and_questions():
    # Mean 0.62, variance 0.0008 + 2 * 0.62 * 0.38 / 100 = 0.005512: 0.62 - 3 * 0.07424 = 0.3973.
    assert least_score([result(0.60, 0), result(0.64, 0)]) == pytest.approx(0.3973, abs=1e-4)
    assert least_score([result(0.60, 0)]) is None


def test_a_score_below_noise_makes_a_campaign_unclean():
    calm = [result(0.60, 0), result(0.64, 0)]
    assert Results([outcome()], [*calm, result(0.40, 5)]).is_clean
    assert not Results([outcome()], [*calm, result(0.39, 5)]).is_clean


@pytest.mark.parametrize(
    "spoilt",
    [
        {"account": replace(CLEAN, num_lost=1)},
        {"account": replace(CLEAN, num_overdrawn=1)},
        {"account": replace(CLEAN, num_stale=1)},
        {"account": replace(CLEAN, num_unverified=1)},
        {"left": ["raylet"]},
        {"failure": "no first step"},
        {"exit_code": 1},
    ],
)
def test_one_spoilt_run_makes_a_campaign_unclean(spoilt: dict[str, Any]):
    assert Results([outcome()], [result(None, 3)]).is_clean
    assert not Results([outcome()], [result(None, 3, **spoilt)]).is_clean


def test_a_fault_that_was_not_survived_makes_a_campaign_unclean():
    assert not Results([outcome(is_recovered=False)], [result(None, 3)]).is_clean


def test_only_a_killed_leeway_train_may_be_resumed_by_its_operator():
    died = outcome(died="exit code 1")
    assert not Results([died], [result(None, 3)]).is_clean
    assert Results([replace(died, target="train")], [result(None, 3)]).is_clean
    assert Results([outcome()], [result(None, 3, deaths=["killed"], num_killed=1)]).is_clean
    assert not Results([outcome()], [result(None, 3, deaths=["between two faults"])]).is_clean


def test_a_campaign_goes_on_with_the_file_of_an_earlier_one(tmp_path: Path):
    path = tmp_path / "build" / "chaos.json"
    Results([outcome()], [result(0.5, 1)], ["abc"]).write(path)
    assert Results.read(path, "abc") == Results([outcome()], [result(0.5, 1)], ["abc"])
    assert Results.read(tmp_path / "none.json", "abc") == Results(revisions=["abc"])


def test_what_other_code_has_survived_counts_for_none(tmp_path: Path):
    path = tmp_path / "chaos.json"
    Results([outcome()], [result(0.5, 1)], ["abc"]).write(path)
    both = Results.read(path, "def", any_revision=True)
    assert (len(both.outcomes), both.revisions) == (1, ["abc", "def"])
    assert Results.read(path, "def") == Results(revisions=["def"])
    assert Results.read(tmp_path / "chaos-abc.json", "abc").outcomes == [outcome()]


def test_a_victim_that_is_gone_counts_as_nobody(monkeypatch: pytest.MonkeyPatch):
    gone = types.SimpleNamespace()

    def kill() -> None:
        raise psutil.NoSuchProcess(1)

    gone.kill = kill
    monkeypatch.setattr(faults, "victim", lambda role, rng: gone)
    means: Any = types.SimpleNamespace(rng=None)
    with pytest.raises(NobodyThere), applied(Fault("kill", "learner"), means):
        pass


# --- faults ---


def test_every_kind_of_fault_of_the_suite_is_there():
    names = {fault.name for fault in all_faults()}
    parts = ("rollout worker", "engine", "retriever", "learner", "redis", "api")
    assert {f"{kind} {part}" for kind in ("kill", "stop") for part in parts} <= names
    assert {"starve learner", "cut off everybody", "fill disk", "set clock", "slow disk"} <= names


SERVE_LOG = """\
2026-11-28 17:23:04,608 leeway.services.processes.joining waiting up to 300 s for Redis
(ServeController pid=9) INFO 2026-11-28 17:23:10,503 controller 976 -- Adding 1 replica to \
Deployment(name='PolicyServer', app='policy').
2026-11-28 17:23:34,608 leeway.actors.serve_app applications ready after 27 s
(ServeController pid=9) INFO 2026-11-28 17:30:10,503 controller 976 -- Adding 1 replica to \
Deployment(name='PolicyServer', app='policy').
"""


def test_the_start_of_an_engine_is_read_from_the_first_lines_of_the_log(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    run.log("serve").write_text(SERVE_LOG)
    trained = TrainedRun(tmp_path, tmp_path / "log", {})
    trained.run = run
    assert (trained.start_s("engine"), trained.start_s("serve")) == (24.0, 30.0)
    run.log("serve").write_text("")
    assert (trained.start_s("engine"), trained.start_s("serve")) == (0.0, 0.0)


class Followed:
    """Stands for a run: what its last step is, and whether the API answers."""

    backend, is_alive = "torch", True
    last_step, answering = "1", True

    def summary(self) -> dict[str, Any]:
        return {}

    def answers(self) -> bool:
        return self.answering


class Counted:
    num = 0

    def count(self) -> int:
        return self.num


def trial_of(run: Any, added: Any) -> Trial:
    nothing: Any = None
    return Trial(run, nothing, added)


def alive(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    found = [types.SimpleNamespace(pid=pid) for pid in pids]
    monkeypatch.setattr(trials, "processes_of", lambda role: found)


def test_a_run_has_got_over_a_stop_with_a_step_and_a_group(monkeypatch: pytest.MonkeyPatch):
    run, added, stop = Followed(), Counted(), Fault("stop", "learner")
    trial = trial_of(run, added)
    alive(monkeypatch, 1)
    assert not trial.has_recovered(stop, {1}, ("1", 0))
    run.last_step = "2"
    assert not trial.has_recovered(stop, {1}, ("1", 0)), "a step from what was buffered"
    added.num = 1
    assert trial.has_recovered(stop, {1}, ("1", 0))


def test_who_was_killed_needs_a_successor(monkeypatch: pytest.MonkeyPatch):
    run, added = Followed(), Counted()
    run.last_step, added.num = "2", 1
    trial, kill = trial_of(run, added), Fault("kill", "engine")
    alive(monkeypatch, 1)
    assert not trial.has_recovered(kill, {1}, ("1", 0))
    alive(monkeypatch, 2)
    assert trial.has_recovered(kill, {1}, ("1", 0))


def test_the_api_is_back_when_it_answers(monkeypatch: pytest.MonkeyPatch):
    run, added = Followed(), Counted()
    run.last_step, added.num, run.answering = "2", 1, False
    trial, stop = trial_of(run, added), Fault("stop", "api")
    alive(monkeypatch, 1)
    assert not trial.has_recovered(stop, {1}, ("1", 0))
    run.answering = True
    assert trial.has_recovered(stop, {1}, ("1", 0))


needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler"
)


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    return Shim(tmp_path)


def told(shim: Shim, code: str, mark: str = "leeway.services.cli") -> float:
    """What a process prints that is one of ours by its command line."""
    command = [sys.executable, "-c", code, mark]
    environment = {**os.environ, **shim.environment}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    return float(done.stdout)


@needs_compiler
def test_the_clock_of_our_processes_is_set_and_the_monotonic_one_is_not(shim: Shim):
    shim.set_clock(86400)
    import time

    assert told(shim, "import time; print(time.time())") - time.time() > 80_000
    assert abs(told(shim, "import time; print(time.monotonic())") - time.monotonic()) < 3600
    shim.set_clock(-86400)
    assert told(shim, "import time; print(time.time())") - time.time() < -80_000


@needs_compiler
def test_processes_of_others_keep_their_clock(shim: Shim):
    shim.set_clock(86400)
    import time

    assert abs(told(shim, "import time; print(time.time())", "raylet") - time.time()) < 3600


@needs_compiler
def test_writes_to_files_take_longer_while_the_disk_is_slow(shim: Shim, tmp_path: Path):
    code = f"""
import time
file, began = open({str(tmp_path / "file")!r}, "wb", 0), time.monotonic()
for _ in range(5):
    file.write(b"x")
print(time.monotonic() - began)
"""
    shim.slow_disk(0.1)
    assert told(shim, code) > 0.5


def on_stage(code: str) -> str:
    """What Python code prints on a stage, with `stage` in reach."""
    try:
        command = _unshare()
    except NoStage as error:
        pytest.skip(str(error))
    prelude = (
        "import os, sys, pathlib, socket, tempfile\n"
        "from tests.chaos import stage as staging\n"
        "stage = staging.Stage(pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1])))\n"
    )
    arguments = [sys.executable, "-c", prelude + code]
    done = subprocess.run(
        [*command, *arguments, os.environ.get("TMPDIR", "/tmp")],
        env={**os.environ, "LEEWAY_CHAOS_INSIDE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_full_disk_takes_no_byte_until_it_is_emptied():
    code = """
file = open(stage.disk / "file", "wb", 0)
stage.fill_disk()
try:
    os.posix_fallocate(file.fileno(), 0, 8192)
    print("fits")
except OSError as error:
    print(error.errno)
stage.empty_disk()
file.write(b"x" * 100_000)
print((stage.disk / "file").stat().st_size)
"""
    assert on_stage(code).split() == ["28", "100000"]


def test_a_network_that_is_cut_off_comes_back():
    code = """
server = socket.create_server(("127.0.0.1", 0))
def reach():
    try:
        socket.create_connection(server.getsockname(), timeout=1).close()
        return "up"
    except OSError:
        return "down"
said = [reach()]
staging.set_loopback(is_up=False)
said.append(reach())
staging.set_loopback(is_up=True)
print(*said, reach())
"""
    assert on_stage(code).split() == ["up", "down", "up"]


def test_nobody_else_is_seen_on_a_stage():
    assert on_stage("import psutil; print(len(psutil.pids()))") == "1"
