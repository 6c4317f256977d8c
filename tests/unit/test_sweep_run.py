"""Running a sweep: what has ended is kept, what failed is a row, limits are kept."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.experiments import launchers, sweep_run
from leeway.services.experiments.arm import memory_fraction
from leeway.services.experiments.arm_result import ArmResult, ArmSpec, write_result
from leeway.services.experiments.collapse import Evaluated
from leeway.services.experiments.launchers import Job, places, run_process
from leeway.services.experiments.ray_launcher import num_places
from leeway.services.experiments.sweep_file import Resources, load_sweep
from leeway.services.experiments.sweep_folder import SweepFolder, SweepState
from leeway.services.experiments.sweep_report import findings
from leeway.services.experiments.sweep_run import Limits, run_sweep

ROOT = Path(__file__).parents[2]
TEXT = f"""
name = "s"
base = "{ROOT / "deploy" / "configs" / "stability.toml"}"
[scan]
learning_rate = [1e-4, 2e-4]
[[grid]]
objective = ["grpo"]
staleness = [0, 4]
seed = [0, 1]
"""

Play = Callable[[ArmSpec], float | str]
"""The score of an arm, or why it dies."""


class FakeLauncher:
    """Plays arms at once, two beside each other."""

    num_places = 2

    def __init__(self, play: Play, seconds: float = 0.0) -> None:
        self._play = play
        self._seconds = seconds
        self.started: list[str] = []
        self.arguments: list[tuple[str, ...]] = []
        self.beside = 0
        self.most = 0

    async def run(self, job: Job) -> str | None:
        spec = msgspec.json.decode((job.folder / "arm.json").read_bytes(), type=ArmSpec)
        self.started.append(spec.name)
        self.arguments.append(job.arguments)
        self.beside += 1
        self.most = max(self.most, self.beside)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.beside -= 1
        found = self._play(spec)
        if isinstance(found, str):
            return found
        evaluations = [Evaluated(0, 0.0, 0.3), Evaluated(4, 1.0, found)]
        write_result(job.folder, ArmResult(spec=spec, status="finished", evaluations=evaluations))
        return None


def rate(spec: ArmSpec) -> float:
    return float(spec.overrides[-1].removeprefix("learner.learning_rate="))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeLauncher], FakeLauncher]:
    def install(fake: FakeLauncher) -> FakeLauncher:
        @asynccontextmanager
        async def launcher(resources: Resources) -> AsyncIterator[FakeLauncher]:
            yield fake

        monkeypatch.setattr(sweep_run, "launcher_of", launcher)
        return fake

    return install


def run(folder: Path, text: str = TEXT, **limits: float) -> SweepState:
    file = folder / "sweep.toml"
    file.write_text(text)
    found = Limits(**limits)  # pyright: ignore[reportArgumentType]
    return asyncio.run(
        run_sweep(load_sweep(file), SweepFolder(folder / "out"), found, lambda line: None)
    )


def test_the_scan_comes_first_and_the_grid_takes_its_rate(tmp_path: Path, use):
    fake = use(FakeLauncher(lambda spec: 0.9 if rate(spec) == 2e-4 else 0.5))
    state = run(tmp_path)
    # Two of the scan; of the grid's four, the one at lag 0 and seed 0 is the scan's.
    assert (state.phase, state.num_arms, state.num_ended) == ("done", 5, 5)
    assert state.rates == {"grpo": 2e-4}
    assert [("lr0.0001" in name, "lag0_seed0" in name) for name in fake.started[:2]] == [
        (True, True),
        (False, True),
    ]
    assert all("lr0.0002" in name for name in fake.started[2:])
    assert fake.most == 2


def test_a_run_of_the_scan_is_one_of_the_grid_where_an_axis_is_at_its_value_in_the_base(
    tmp_path: Path, use
):
    fake = use(FakeLauncher(lambda spec: 0.9 if rate(spec) == 2e-4 else 0.5))
    text = TEXT.replace("[scan]", 'mode = "bound"\n[scan]').replace("[0, 4]", "[0, 4]\ndraws = [1]")
    state = run(tmp_path, text)
    # Two of the scan, and the grid's four less the one that the scan has run.
    assert (state.num_arms, state.num_ended, len(fake.started)) == (5, 5, 5)
    cells = findings(SweepFolder(tmp_path / "out")).cells
    assert [(cell.series, cell.scores) for cell in cells] == [("grpo · draws 1", [0.9, 0.9])] * 2


def test_what_has_ended_is_not_run_again(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5))
    run(tmp_path)
    fake = use(FakeLauncher(lambda spec: pytest.fail("it was run again")))
    assert run(tmp_path).phase == "done"
    assert fake.started == []


def test_the_size_of_micro_batches_is_no_part_of_an_arm(tmp_path: Path, use):
    first = use(FakeLauncher(lambda spec: 0.5))
    run(tmp_path, TEXT + "[resources]\nmicro_batch_tokens = 4096\n")
    for arguments in first.arguments:
        assert arguments[arguments.index("--micro-batch-tokens") + 1] == "4096"
    again = use(FakeLauncher(lambda spec: pytest.fail("it was run again")))
    assert run(tmp_path, TEXT + "[resources]\nmicro_batch_tokens = 8192\n").phase == "done"
    assert again.started == []


def test_an_arm_that_dies_is_a_row_with_its_reason_and_the_others_go_on(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: "ended by signal 9" if spec.staleness == 4 else 0.5))
    state = run(tmp_path)
    assert (state.phase, state.num_ended, state.num_failed) == ("done", 5, 2)
    failed = [r for r in SweepFolder(tmp_path / "out").results() if r.status == "failed"]
    assert {(r.spec.staleness, r.reason) for r in failed} == {(4, "ended by signal 9")}


def test_failed_arms_are_run_again_when_asked(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: "no memory" if spec.staleness == 4 else 0.5))
    run(tmp_path)
    fake = use(FakeLauncher(lambda spec: 0.5))
    assert run(tmp_path).num_failed == 2
    state = run(tmp_path, retry_failed=True)
    assert (state.num_failed, len(fake.started)) == (0, 2)


def test_a_scan_that_was_retried_leaves_no_arm_of_the_rate_before(tmp_path: Path, use):
    # At first 2e-4 fails, so 1e-4 is taken; when it is run again it is the better one.
    use(FakeLauncher(lambda spec: "no memory" if rate(spec) == 2e-4 else 0.5))
    assert run(tmp_path).rates == {"grpo": 1e-4}
    use(FakeLauncher(lambda spec: 0.9))
    state = run(tmp_path, retry_failed=True)
    assert state.rates == {"grpo": 2e-4}
    # Two of the scan and three more of the grid; the folder still holds three at 1e-4.
    assert (state.num_arms, state.num_ended) == (5, 5)
    folder = SweepFolder(tmp_path / "out")
    assert len(folder.results()) == 8
    cells = findings(folder).cells
    assert [cell.scores for cell in cells] == [[0.9, 0.9], [0.9, 0.9]]


def test_the_grid_is_written_with_its_rates_once_the_scan_is_done(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.9 if rate(spec) == 2e-4 else 0.5, seconds=0.4))
    run(tmp_path, max_s=0.2)
    folder = SweepFolder(tmp_path / "out")
    assert folder.read_grid() == {}
    use(FakeLauncher(lambda spec: 0.9 if rate(spec) == 2e-4 else 0.5))
    run(tmp_path)
    grid = folder.read_grid()
    assert list(grid.values()) == [2e-4] * 4
    assert grid.keys() < {result.spec.name for result in folder.results()}


def test_an_objective_whose_scan_failed_is_a_row_for_each_of_its_arms(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: "no memory"))
    state = run(tmp_path)
    assert (state.phase, state.num_failed) == ("done", 6)
    reasons = {r.reason for r in SweepFolder(tmp_path / "out").results()}
    assert reasons == {"no memory", sweep_run.NO_RATE}


def test_a_time_limit_ends_what_runs_and_the_next_call_goes_on(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5, seconds=60))
    began = time.monotonic()
    state = run(tmp_path, max_s=0.2)
    assert time.monotonic() - began < 30
    assert (state.phase, state.num_ended) == ("stopped", 0)
    use(FakeLauncher(lambda spec: 0.5))
    assert run(tmp_path).num_ended == 5


def test_no_arm_begins_that_the_limit_would_end(tmp_path: Path, use):
    # Each takes 0.4 s, so after the two of the scan none fits into what is left of 0.6 s.
    fake = use(FakeLauncher(lambda spec: 0.5, seconds=0.4))
    state = run(tmp_path, max_s=0.6)
    assert (state.phase, len(fake.started)) == ("stopped", 2)


def test_two_commands_do_not_run_one_sweep(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5))
    folder = SweepFolder(tmp_path / "out")
    folder.root.mkdir()
    with folder.locked(), pytest.raises(ConfigurationError, match="another command runs the sweep"):
        run(tmp_path)


def test_a_changed_file_is_refused_before_anything_runs(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5))
    run(tmp_path)
    fake = use(FakeLauncher(lambda spec: 0.5))
    with pytest.raises(ConfigurationError, match="begun with another grid"):
        run(tmp_path, TEXT.replace("[0, 4]", "[0, 5]"))
    assert fake.started == []


def what_is_found(
    tmp_path: Path, use: Callable[[FakeLauncher], FakeLauncher]
) -> list[tuple[str, bool]]:
    """Arms in the order in which they start, and whether each finds an earlier call's metrics."""
    seen: list[tuple[str, bool]] = []
    fake = FakeLauncher(lambda spec: 0.5)
    original = fake.run

    async def look(job: Job) -> str | None:
        seen.append((job.folder.name, (job.folder / "metrics.jsonl").exists()))
        return await original(job)

    fake.run = look  # type: ignore[method-assign]
    use(fake)
    run(tmp_path)
    assert len(seen) == 5
    return seen


def test_an_arm_that_was_ended_finds_what_it_left(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5, seconds=60))
    run(tmp_path, max_s=0.2)
    begun = sorted(arm.name for arm in (tmp_path / "out" / "arms").iterdir())
    for name in begun:
        (tmp_path / "out" / "arms" / name / "metrics.jsonl").write_text('{"step": 1}\n')
    assert sorted(name for name, found in what_is_found(tmp_path, use) if found) == begun


def test_what_an_arm_left_that_was_told_otherwise_is_not_taken_for_its_own(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5, seconds=60))
    run(tmp_path, max_s=0.2)
    for arm in (tmp_path / "out" / "arms").iterdir():
        (arm / "metrics.jsonl").write_text('{"step": 1}\n')
        told = (arm / "arm.json").read_text()
        (arm / "arm.json").write_text(told.replace('"exact"', '"bound"'))
    assert not any(found for _, found in what_is_found(tmp_path, use))


def test_arms_with_a_checkpoint_go_first(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5))
    run(tmp_path)
    arms = sorted((tmp_path / "out" / "arms").iterdir())
    for arm in arms:
        (arm / "result.json").unlink()
    last = next(arm for arm in arms if "lag4_seed1" in arm.name)
    (last / "checkpoint" / "step-00000003").mkdir(parents=True)
    # The two of the scan come before the grid whatever there is.
    assert what_is_found(tmp_path, use)[2][0] == last.name


def test_a_failed_arm_begins_anew_when_it_is_tried_again(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: "no memory" if spec.staleness else 0.5))
    run(tmp_path)
    for arm in (tmp_path / "out" / "arms").glob("*lag4*"):
        (arm / "metrics.jsonl").write_text('{"step": 1}\n')
    fake = use(FakeLauncher(lambda spec: 0.5))
    state = run(tmp_path, retry_failed=True)
    assert (state.num_failed, len(fake.started)) == (0, 2)
    assert not list((tmp_path / "out" / "arms").glob("*lag4*/metrics.jsonl"))


def test_a_silent_sweep_counts_as_interrupted():
    state = SweepState(
        name="s", phase="running", num_arms=1, num_ended=0, num_failed=0, num_collapsed=0,
        running=[], rates={}, updated_at=time.time(),
    )  # fmt: skip
    assert not state.is_interrupted
    silent = msgspec.structs.replace(state, updated_at=time.time() - 61)
    assert silent.is_interrupted
    assert not msgspec.structs.replace(silent, phase="done").is_interrupted


# --- places


@pytest.mark.parametrize(
    ("resources", "cores", "gpus", "expected"),
    [
        ({}, 4, [], [None] * 4),
        ({"num_cpus": 2}, 5, [], [None, None]),
        ({"max_parallel": 3}, 16, [], [None] * 3),
        ({"num_gpus": 0.5}, 16, ["0", "1"], ["0", "1", "0", "1"]),
        ({"num_gpus": 0.1}, 16, ["0"], ["0"] * 10),
        # Cores bound the arms of a GPU too.
        ({"num_gpus": 0.1}, 3, ["0"], ["0"] * 3),
        ({"num_gpus": 2}, 16, ["0", "1", "2", "3", "4"], ["0,1", "2,3"]),
    ],
)
def test_places_follow_cores_and_gpus(
    resources: dict[str, float], cores: int, gpus: list[str], expected: list[str | None]
):
    assert places(Resources.model_validate(resources), cores, gpus) == expected


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [({"num_cpus": 8}, "more than the 4 cores"), ({"num_gpus": 0.5}, "more than the 0 GPUs")],
)
def test_an_arm_that_fits_nowhere_is_refused(resources: dict[str, float], sentence: str):
    with pytest.raises(ConfigurationError, match=sentence):
        places(Resources.model_validate(resources), 4, [])


def test_ray_places_as_many_as_the_scarcest_resource_holds():
    resources = Resources(num_cpus=2, num_gpus=0.25)
    assert num_places(resources, {"CPU": 64.0, "GPU": 2.0}) == 8
    assert num_places(resources, {"CPU": 8.0, "GPU": 2.0}) == 4
    with pytest.raises(ConfigurationError, match="but Ray offers 0; lower it"):
        num_places(resources, {"CPU": 8.0})


def test_an_arm_gets_its_part_of_the_gpu_less_the_drivers():
    # An eighth of 80 GiB is 10 GiB, less 600 MiB.
    assert memory_fraction(0.125, 80 * 2**30) == pytest.approx((10 - 600 / 1024) / 80)


# --- processes


async def test_a_process_that_is_killed_says_by_which_signal(tmp_path: Path):
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 9)\n")
    job = Job(tmp_path, ("dies",), 30.0)
    found = await run_process(job, {"PYTHONPATH": str(tmp_path)})
    assert found == "it was ended by signal 9"


async def test_a_process_that_takes_too_long_is_ended(tmp_path: Path):
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)\n")
    job = Job(tmp_path, ("sleeps",), 1.0)
    found = await run_process(job, {"PYTHONPATH": str(tmp_path)})
    assert found is not None and "longer than resources.arm_timeout_s = 1 s" in found


async def test_a_process_that_fails_says_why(tmp_path: Path):
    (tmp_path / "fails.py").write_text("raise ValueError('out of cheese')\n")
    job = Job(tmp_path, ("fails",), 30.0)
    found = await run_process(job, {"PYTHONPATH": str(tmp_path)})
    assert found is not None and "out of cheese" in found


async def test_arms_see_the_gpu_of_their_place_and_give_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []

    async def record(job: Job, environment: dict[str, str]) -> None:
        seen.append(environment["CUDA_VISIBLE_DEVICES"])
        await asyncio.sleep(0.01)

    monkeypatch.setattr(launchers, "run_process", record)
    launcher = launchers.Processes(Resources(num_gpus=1), 8, ["4", "5"])
    await asyncio.gather(*(launcher.run(Job(tmp_path, (), 1.0)) for _ in range(6)))
    assert sorted(seen) == ["4", "4", "4", "5", "5", "5"]


def test_arms_that_take_no_gpu_see_none():
    # The worker of Ray chooses none; `processes` gives a place without one.
    assert launchers.environment_of(Resources(num_gpus=0))["CUDA_VISIBLE_DEVICES"] == ""
    # What Ray has set for a task with a part of a GPU stays.
    assert "CUDA_VISIBLE_DEVICES" not in launchers.environment_of(Resources(num_gpus=0.5))
    assert launchers.environment_of(Resources(num_gpus=1), "3")["CUDA_VISIBLE_DEVICES"] == "3"


async def test_the_process_of_an_arm_without_a_gpu_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "looks.py").write_text("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = launchers.Processes(Resources(), 1, [])
    assert await launcher.run(Job(tmp_path, ("looks",), 30.0)) is None
    assert (tmp_path / "log.txt").read_text() == "''\n"


def test_the_state_lies_in_a_file(tmp_path: Path, use):
    use(FakeLauncher(lambda spec: 0.5))
    state = run(tmp_path)
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["num_ended"] == 5
    assert SweepFolder(tmp_path / "out").read_state() == state
