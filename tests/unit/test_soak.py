"""A soak: what is sampled, and when a figure counts as growing."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from leeway.replay.config import ReplayConfig
from leeway.replay.connection import Link
from leeway.replay.errors import ConfigurationError, DataError
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group
from leeway.services import cli
from leeway.services.config import load
from leeway.services.layout import RunDirectory, create_run
from leeway.services.soak import run as runs
from leeway.services.soak.judging import RULES, as_keys, judge_file, worst_first
from leeway.services.soak.processes import process_figures
from leeway.services.soak.roles import role_of
from leeway.services.soak.run import SoakedRunEnded, check_times, code_words, soak
from leeway.services.soak.samples import Figure, SampleFile, read_samples
from leeway.services.soak.services import disk_figures, ray_figures, redis_figures, step_figures
from leeway.services.soak.slopes import Slope, block_medians, slope_of, verdict_of

HOUR = 3600.0
MB = 2**20


def every(step_s: float, num: int) -> list[float]:
    return [n * step_s for n in range(num)]


# --- slopes ---


def test_blocks_are_their_medians():
    times, values = block_medians([0, 10, 20, 30, 40, 50], [1, 5, 2, 8, 100, 9], 2)
    assert (times, values) == ([10, 40], [2, 9])


def test_a_straight_rise_has_its_slope_and_no_doubt():
    seconds = every(60, 60)
    slope = slope_of(seconds, [100 + 2 * s / HOUR for s in seconds])
    assert slope is not None
    assert slope.per_hour == pytest.approx(2)
    assert slope.upper_per_hour == pytest.approx(2)
    assert slope.p < 1e-9


def test_eight_rising_points_have_the_p_of_the_normal_approximation():
    # 28 pairs rise, variance 8 * 7 * 21 / 18 = 65.33, z = 27 / 8.083 = 3.3405.
    slope = slope_of(every(1, 8), [float(n) for n in range(8)])
    assert slope is not None
    assert slope.p == pytest.approx(
        0.5 * math.erfc(27 / math.sqrt(65.3333) / math.sqrt(2)), rel=1e-4
    )


def test_a_constant_is_flat_with_p_1():
    slope = slope_of(every(10, 100), [7.0] * 100)
    assert slope == Slope(0.0, 0.0, 1.0, 7.0, 0.0)


def test_peaks_do_not_move_the_slope():
    values = [1000.0] * 300
    for n in range(0, 300, 20):
        values[n] = 5000.0
    slope = slope_of(every(10, 300), values)
    assert slope is not None
    assert (slope.per_hour, slope.upper_per_hour) == (0.0, 0.0)


def test_a_jump_that_stays_is_no_peak():
    slope = slope_of(every(36, 100), [1000.0] * 85 + [1400.0] * 15)
    assert slope is not None
    assert (slope.per_hour, slope.upper_per_hour) == (0.0, 0.0)
    # Six of thirty blocks at either end, of which the last hold 1400 in their middle; 80 % of the
    # hour lies between the two middles.
    assert slope.rise_per_hour == pytest.approx(400 / 0.8, rel=0.02)
    assert verdict_of(slope, 10.0) == "undecided"


def test_noise_around_a_level_is_flat_within_a_hundredth_per_hour():
    rng = random.Random(1)
    slope = slope_of(every(10, 540), [1000 + rng.gauss(0, 5) for _ in range(540)])
    assert slope is not None
    assert verdict_of(slope, 10.0) == "flat"


def test_a_leak_below_the_noise_of_one_sample_is_seen_over_time():
    rng = random.Random(1)
    seconds = every(10, 540)
    slope = slope_of(seconds, [1000 + 20 * s / HOUR + rng.gauss(0, 5) for s in seconds])
    assert slope is not None
    assert verdict_of(slope, 10.0) == "grows"
    assert slope.per_hour == pytest.approx(20, rel=0.2)


@given(st.lists(st.floats(0, 1e6), min_size=8, max_size=60), st.floats(-1e6, 1e6))
def test_adding_a_level_changes_no_slope(values: list[float], level: float):
    seconds = every(10, len(values))
    plain, raised = slope_of(seconds, values), slope_of(seconds, [v + level for v in values])
    assert plain is not None and raised is not None
    assert raised.per_hour == pytest.approx(plain.per_hour, rel=1e-6, abs=1e-3)
    assert plain.upper_per_hour >= plain.per_hour


@pytest.mark.parametrize(
    ("slope", "verdict"),
    [
        (Slope(2.0, 9.9, 0.0, 1000, 2.0), "flat"),
        (Slope(11.0, 15.0, 0.001, 1000, 11.0), "grows"),
        (Slope(11.0, 15.0, 0.02, 1000, 11.0), "undecided"),
        (Slope(5.0, 15.0, 0.001, 1000, 5.0), "undecided"),
        (Slope(0.0, 0.0, 0.1, 1000, 50.0), "undecided"),
    ],
)
def test_flat_needs_the_bound_and_grows_needs_slope_and_p(slope: Slope, verdict: str):
    assert verdict_of(slope, 10.0) == verdict


def test_fewer_than_eight_points_have_no_slope():
    assert slope_of(every(10, 7), [1.0] * 7) is None


# --- the file ---


def write(path: Path, num: int, figures_of) -> Path:
    file = SampleFile(path)
    for n in range(num):
        file.append(10.0 * n, figures_of(n))
    return path


def learner_and_disk(n: int) -> list[Figure]:
    """A learner that gains 36 MB an hour upon 1,000, and a run directory that grows by design."""
    return [
        Figure("learner", "own_bytes", (1000 + n * 36 / 360) * MB),
        Figure("learner", "threads", 5),
        Figure("disk", "run_bytes", n * 1000),
    ]


def test_a_learner_is_judged_by_what_it_holds_between_steps(tmp_path: Path):
    def figures(n: int) -> list[Figure]:
        swings = Figure("learner", "own_bytes", (1000 + 500 * (n % 7) + n) * MB)
        # 72 MB an hour upon 600, and as much as nothing elsewhere.
        held = Figure("learner", "allocated_bytes", (600 + n * 72 / 360) * MB)
        return [swings, held, Figure("train", "own_bytes", 80 * MB)]

    report = judge_file(write(tmp_path / "samples.csv", 480, figures), None)
    assert {(j.subject, j.measure): j.verdict for j in report.judged} == {
        ("learner", "allocated_bytes"): "grows",
        ("train", "own_bytes"): "flat",
    }
    [swings] = report.observed
    assert (swings.subject, swings.measure) == ("learner", "own_bytes")


def test_what_leaks_is_told_from_what_is_flat_and_from_what_grows_by_design(tmp_path: Path):
    report = judge_file(write(tmp_path / "samples.csv", 480, learner_and_disk), None)
    by_measure = {found.measure: found for found in report.judged}
    assert by_measure["own_bytes"].verdict == "grows"
    assert by_measure["own_bytes"].slope.per_hour == pytest.approx(36 * MB, rel=1e-3)
    # One hundredth of the median, which is 1,030 MB over the last three quarters.
    assert by_measure["own_bytes"].limit_per_hour == pytest.approx(10.3 * MB, rel=1e-3)
    assert by_measure["threads"].verdict == "flat"
    assert [found.measure for found in report.observed] == ["run_bytes"]
    assert not report.is_flat
    assert worst_first(report.judged)[0].measure == "own_bytes"
    keys = as_keys(report)
    assert (keys["num_grows"], keys["num_flat"], keys["warm_up_minutes"]) == (1, 1, 20.0)


def everything(n: int, **values: float) -> list[Figure]:
    """One constant figure of each measure that is judged; some replaced."""
    whose = {"allocated_bytes": "learner"}
    return [
        Figure(whose.get(r.measure, "engine"), r.measure, values.get(r.measure, 5.0)) for r in RULES
    ]


def test_growth_during_the_warm_up_is_not_judged(tmp_path: Path):
    def settles(n: int) -> list[Figure]:
        return everything(n, own_bytes=min(n, 100) * 10 * MB)

    path = write(tmp_path / "samples.csv", 480, settles)
    assert judge_file(path, None).is_flat
    assert not judge_file(path, 0.0).is_flat


def test_what_was_never_measured_is_not_flat(tmp_path: Path):
    def without_actors(n: int) -> list[Figure]:
        return [figure for figure in everything(n) if figure.measure != "actors"]

    report = judge_file(write(tmp_path / "samples.csv", 480, without_actors), None)
    assert (report.missing, report.is_flat) == (["actors"], False)
    assert as_keys(report)["missing"] == ["actors"]


def test_a_line_that_is_still_written_is_left_out(tmp_path: Path):
    path = write(tmp_path / "samples.csv", 3, learner_and_disk)
    with path.open("a") as file:
        file.write("30.0,learner,own_by")
    series = {(s.subject, s.measure): s for s in read_samples(path)}
    assert series["learner", "own_bytes"].seconds == [0.0, 10.0, 20.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "does not begin with seconds,subject,measure,value"),
        ("seconds,subject,measure,value\n1,learner,threads\n", "line 2 is not"),
        ("seconds,subject,measure,value\n1,learner,threads,many\n", "line 2 is not"),
        ("seconds,subject,measure,value\n1,learner,threads,4\n", "too few samples"),
    ],
)
def test_what_is_not_a_soak_is_refused_in_a_sentence(tmp_path: Path, text: str, message: str):
    path = tmp_path / "samples.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        judge_file(path, None)


def test_a_soak_that_is_gone_on_with_keeps_one_header(tmp_path: Path):
    path = tmp_path / "samples.csv"
    SampleFile(path).append(0.0, [Figure("redis", "used_bytes", 1)])
    SampleFile(path).append(10.0, [Figure("redis", "used_bytes", 2)])
    assert path.read_text().splitlines() == [
        "seconds,subject,measure,value",
        "0.0,redis,used_bytes,1",
        "10.0,redis,used_bytes,2",
    ]


# --- figures ---


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        ("VLLM::EngineCore", "engine"),
        (
            "ray::SERVE_REPLICA::policy#PolicyServer#x:ServeReplica:policy:P.__init__",
            "policy replica",
        ),
        ("ray::ServeReplica:policy:PolicyServer", "policy replica"),
        ("ray::ServeReplica:retriever:RetrieverServer", "retriever"),
        ("ray::ServeReplica:rollout:RolloutServer", "rollout worker"),
        ("ray::ServeController", "ray serve controller"),
        ("ray::DashboardAgent", "ray workers and agents"),
        ("/v/lib/python3.11/site-packages/ray/core/src/ray/gcs/gcs_server --x", "ray daemons"),
        (
            "python -u /v/lib/python3.11/site-packages/ray/autoscaler/monitor.py",
            "ray workers and agents",
        ),
        ("/v/bin/redis-server 127.0.0.1:36473", "redis"),
        ("python -m leeway.services.cli train --resume runs/a --json", "train"),
        ("python -m leeway.services.cli serve runs/a/config.toml", "serve"),
        ("python -m leeway.services.cli learn runs/a/config.toml", "learner"),
        ("python -m leeway.services.cli api runs/a/config.toml --run-dir runs/a", "api"),
        ("python -c from multiprocessing.resource_tracker import main", "other"),
    ],
)
def test_processes_are_known_by_their_command_lines(command_line: str, role: str):
    assert role_of(command_line) == role


def test_a_process_is_measured_with_its_children_by_role():
    code = "import subprocess, sys; b = bytearray(2**26); p = subprocess.Popen(['sleep', '60']);"
    code += "print(flush=True); sys.stdin.read(); p.kill()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        figures = {(f.subject, f.measure): f.value for f in process_figures(parent.pid)}
        parent.communicate()
    assert figures["train", "processes"] == 1
    assert figures["other", "processes"] == 1
    assert figures["train", "own_bytes"] > 2**26
    assert figures["other", "own_bytes"] < 2**24
    assert figures["train", "open_files"] >= 3
    assert figures["train", "threads"] == 1


async def test_redis_tells_groups_from_what_it_remembers(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path / "redis", "first") as server:
        replay = RedisReplay(server.url, "first", ReplayConfig(groups_per_step=2))
        for slot in await replay.admit(2, PolicyVersion(0), 5.0):
            await replay.add(slot, build_group(slot, num_tokens=4000))
        link = Link(server.url)
        figures = {f.measure: f.value for f in await redis_figures(link, "first")}
        other = {f.measure: f.value for f in await redis_figures(link, "second")}
        await link.close()
        await replay.close()
    assert figures["groups_bytes"] > figures["remembered_bytes"] > 0
    assert figures["used_bytes"] > figures["groups_bytes"] + figures["remembered_bytes"]
    assert figures["append_only_bytes"] > 4000
    assert figures["connections"] >= 1
    assert figures["keys"] >= 4
    assert "groups_bytes" not in other


async def test_a_redis_that_is_gone_gives_no_figures(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path / "redis", "first") as server:
        link = Link(server.url, retry_s=0.1)
    assert await redis_figures(link, "first") == []
    await link.close()


RAY = """# HELP ray_actors x
# TYPE ray_actors gauge
ray_actors{Source="gcs",State="ALIVE",Name="a"} 3.0
ray_actors{Source="gcs",State="ALIVE",Name="b"} 1.0
ray_actors{Source="gcs",State="DEAD",Name="a"} 7.0
ray_actors{Source="executor",State="ALIVE_IDLE",Name="a"} 3.0
# TYPE ray_object_store_num_local_objects gauge
ray_object_store_num_local_objects{NodeAddress="n"} 5.0
# TYPE ray_object_store_used_memory gauge
ray_object_store_used_memory{NodeAddress="n"} 4096.0
"""


@pytest.fixture
def ray_port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(RAY.encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_actors_are_counted_where_ray_knows_them_and_only_the_living(ray_port: int):
    assert sorted(ray_figures(ray_port)) == [
        Figure("ray", "actors", 4.0),
        Figure("ray", "object_bytes", 4096.0),
        Figure("ray", "objects", 5.0),
    ]


def test_disk_is_told_by_part(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    for name, size in (("checkpoints/1/w", 40_000), ("redis/a", 20_000), ("logs/l", 10_000)):
        (run.root / name).parent.mkdir(parents=True, exist_ok=True)
        (run.root / name).write_bytes(b"x" * size)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    figures = {f.measure: f.value for f in disk_figures(run, {str(scratch), "/nowhere"})}
    assert figures["checkpoint_bytes"] >= 40_000
    assert 20_000 <= figures["redis_disk_bytes"] < 40_000
    assert 10_000 <= figures["run_bytes"] < 20_000
    assert figures["scratch_bytes"] == 0


def test_the_step_is_that_of_the_last_whole_line(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert step_figures(run) == []
    run.metrics.write_text('{"step": 4}\n{"step": 5}\n')
    assert step_figures(run) == [Figure("learner", "step", 5.0)]
    with run.metrics.open("a") as lines:
        lines.write('{"step": 6, "allocated_bytes": 1024}\n')
    assert step_figures(run) == [
        Figure("learner", "step", 6.0), Figure("learner", "allocated_bytes", 1024.0),
    ]  # fmt: skip


# --- the command ---


def test_judging_a_leak_prints_a_line_and_exits_with_1(tmp_path: Path):
    path = write(tmp_path / "samples.csv", 480, learner_and_disk)
    done = CliRunner().invoke(cli.app, ["soak", "--judge", str(path), "--json"])
    assert done.exit_code == 1
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["is_flat"] is False
    assert {e["measure"]: e["verdict"] for e in line["judged"]}["own_bytes"] == "grows"
    assert "memory of its own" in done.stderr


def test_judging_what_is_flat_exits_with_0(tmp_path: Path):
    path = write(tmp_path / "s.csv", 480, everything)
    done = CliRunner().invoke(cli.app, ["soak", "--judge", str(path)])
    assert done.exit_code == 0
    assert f"{len(RULES)} flat, 0 grow, 0 undecided" in done.stdout


def test_judging_what_was_not_measured_exits_with_1_and_names_it(tmp_path: Path):
    path = write(tmp_path / "s.csv", 480, lambda n: everything(n)[1:])
    done = CliRunner().invoke(cli.app, ["soak", "--judge", str(path)])
    assert done.exit_code == 1
    assert "not measured, so undecided: memory of its own" in done.stdout


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit code 3"), (-9, "ended with signal SIGKILL"), (None, "it was killed")],
)
def test_how_a_soaked_run_ended_is_told(code: int | None, words: str):
    assert words in code_words(code)


async def test_a_run_that_fails_when_it_is_stopped_is_no_good_soak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Watch:
        def __init__(self, *_: object) -> None: ...

        async def until_first_step(self) -> None: ...

        async def for_minutes(self, *_: object) -> None: ...

    monkeypatch.setattr(runs, "Watch", Watch)
    monkeypatch.setattr(runs, "_end", lambda child: child.kill() or child.wait())
    made = create_run(load(None, [f'directory="{tmp_path}"']))
    with pytest.raises(SoakedRunEnded, match=r"stopped after the soak and ended with signal"):
        await soak(load(None, []), made, 1.0, 1.0)


def test_a_file_and_samples_are_not_given_together(tmp_path: Path):
    done = CliRunner().invoke(cli.app, ["soak", "run.toml", "--judge", "samples.csv"])
    assert done.exit_code == 2


def test_a_soak_that_could_not_be_judged_is_not_begun():
    with pytest.raises(ConfigurationError, match="fewer than 20 samples"):
        check_times(minutes=3, every_s=10)
    check_times(minutes=4, every_s=10)
