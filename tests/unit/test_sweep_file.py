"""A sweep file becomes arms, or one sentence that says what is wrong with it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leeway.replay.errors import ConfigurationError
from leeway.services import cli
from leeway.services.experiments.sweep_arms import arm_config, grid_arms, scan_arms
from leeway.services.experiments.sweep_file import load_sweep
from leeway.services.experiments.sweep_folder import SweepFolder

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "deploy" / "configs"
HEAD = f'name = "s"\nbase = "{CONFIGS / "stability.toml"}"\n'
GRID = '[[grid]]\nobjective = ["grpo"]\nstaleness = [0, 4]\nseed = [0, 1]\n'


def write(folder: Path, text: str) -> Path:
    file = folder / "sweep.toml"
    file.write_text(text)
    return file


def test_a_grid_is_every_combination_of_its_axes(tmp_path: Path):
    arms = grid_arms(load_sweep(write(tmp_path, HEAD + GRID)))
    assert [(a.objective, a.staleness, a.seed) for a in arms] == [
        ("grpo", 0, 0),
        ("grpo", 0, 1),
        ("grpo", 4, 0),
        ("grpo", 4, 1),
    ]
    assert len({arm.name for arm in arms}) == 4


def test_an_arm_is_exact_holds_its_window_and_measures_the_clipping_bias(tmp_path: Path):
    text = HEAD + '[[grid]]\nobjective = ["grpo"]\nstaleness = [32]\nseed = [3]\n'
    sweep = load_sweep(write(tmp_path, text.replace('"s"\n', '"s"\n')))
    config = arm_config(sweep, grid_arms(sweep)[0])
    assert (config.replay.staleness_policy, config.replay.max_staleness) == ("exact", 32)
    assert config.replay.max_groups == 1024
    assert (config.seed, config.data.seed, config.learner.measure_ctn) == (3, 0, True)


def test_the_buffer_grows_with_the_window(tmp_path: Path):
    text = HEAD + "[set]\nlearner.num_steps = 300\n[[grid]]\nstaleness = [200]\n"
    sweep = load_sweep(write(tmp_path, text))
    # (200 + 1) x 8 groups a step.
    assert arm_config(sweep, grid_arms(sweep)[0]).replay.max_groups == 1608


def test_bound_is_the_live_loop_with_a_full_window(tmp_path: Path):
    sweep = load_sweep(write(tmp_path, HEAD + 'mode = "bound"\n' + GRID))
    buffers = [arm_config(sweep, arm).replay for arm in grid_arms(sweep)]
    assert {(b.staleness_policy, b.lookahead) for b in buffers} == {("pace", "full")}


def test_the_lookahead_of_a_bound_may_be_varied(tmp_path: Path):
    text = HEAD + 'mode = "bound"\n[[grid]]\nreplay.lookahead = ["full", "adaptive"]\n'
    sweep = load_sweep(write(tmp_path, text))
    kinds = {arm_config(sweep, arm).replay.lookahead for arm in grid_arms(sweep)}
    assert kinds == {"full", "adaptive"}


def test_draws_come_with_a_limiter_that_has_groups_trained_so_often(tmp_path: Path):
    text = HEAD + 'mode = "bound"\n[[grid]]\nstaleness = [16]\ndraws = [1, 4]\n'
    sweep = load_sweep(write(tmp_path, text))
    once, four_times = (arm_config(sweep, arm).replay for arm in grid_arms(sweep))
    assert once.limiter == "none"
    assert (four_times.limiter, four_times.samples_per_insert) == ("sample-to-insert", 4.0)
    # A step's 8 groups and one insert's 4 samples.
    assert (four_times.min_size, four_times.error_buffer) == (8, 12.0)


def test_a_limiter_of_ones_own_stays_beside_draws(tmp_path: Path):
    text = HEAD + 'mode = "bound"\n[set]\nreplay.limiter = "min-size"\n[[grid]]\ndraws = [2]\n'
    sweep = load_sweep(write(tmp_path, text))
    assert {arm_config(sweep, arm).replay.limiter for arm in grid_arms(sweep)} == {"min-size"}


@pytest.mark.parametrize("place", ["set", "grid", "command line", "base"])
def test_no_limiter_is_a_limiter_of_ones_own(tmp_path: Path, place: str):
    line = 'replay.limiter = "none"\n'
    base = (CONFIGS / "stability.toml").read_text()
    named = base.replace("[replay]\n", '[replay]\nlimiter = "none"\n')
    (tmp_path / "base.toml").write_text(named if place == "base" else base)
    text = 'name = "s"\nbase = "base.toml"\nmode = "bound"\n'
    text += f"[set]\n{line}" if place == "set" else ""
    text += "[[grid]]\ndraws = [2]\n" + (line if place == "grid" else "")
    overrides = ["replay.limiter=none"] if place == "command line" else []
    sweep = load_sweep(write(tmp_path, text), overrides)
    assert [arm_config(sweep, arm).replay.limiter for arm in grid_arms(sweep)] == ["none"]


def test_an_adaptive_base_is_no_matter_where_every_lag_is_exact(tmp_path: Path):
    (tmp_path / "base.toml").write_text('[replay]\nlookahead = "adaptive"\n')
    head = HEAD.replace(str(CONFIGS / "stability.toml"), "base.toml")
    text = head + '[set]\npolicy.backend = "torch"\n' + GRID
    sweep = load_sweep(write(tmp_path, text))
    assert {arm_config(sweep, arm).replay.lookahead for arm in grid_arms(sweep)} == {"full"}


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("eps = [4e-3]", {"eps_low": 4e-3, "eps_high": 4e-3}),
        ("eps = [[0.1, 0.3]]", {"eps_low": 0.1, "eps_high": 0.3}),
        ('ctn = ["raw"]', {"ctn": "gradient", "ctn_raw": True}),
        ('ctn = ["learning-rate"]', {"ctn": "gradient", "ctn_target": "learning-rate"}),
        ('ctn = ["penalty"]', {"ctn": "penalty", "measure_ctn": True}),
        ('learner.ratio = ["turn-arithmetic"]', {"ratio": "turn-arithmetic"}),
    ],
)
def test_short_names_stand_for_keys(tmp_path: Path, axis: str, values: dict[str, object]):
    sweep = load_sweep(
        write(tmp_path, HEAD + f'[[grid]]\nobjective = ["so-grpo"]\nstaleness = [4]\n{axis}\n')
    )
    learner = arm_config(sweep, grid_arms(sweep)[0]).learner
    assert {key: getattr(learner, key) for key in values} == values


def test_keys_of_the_critic_go_to_objectives_that_have_one(tmp_path: Path):
    text = HEAD + "[set]\nlearner.critic_learning_rate = 3e-4\n"
    text += '[[grid]]\nobjective = ["ppo", "grpo"]\nstaleness = [0]\n'
    sweep = load_sweep(write(tmp_path, text))
    rates = [arm_config(sweep, arm).learner.critic_learning_rate for arm in grid_arms(sweep)]
    assert rates == [3e-4, None]


def test_the_command_line_goes_before_set_and_not_before_the_grid(tmp_path: Path):
    file = write(tmp_path, HEAD + "[set]\nlearner.num_steps = 30\n" + GRID)
    sweep = load_sweep(file, ["learner.num_steps=9"])
    assert arm_config(sweep, grid_arms(sweep)[0]).learner.num_steps == 9
    with pytest.raises(ConfigurationError, match="contradicts the grid"):
        grid_arms(load_sweep(file, ["replay.max_staleness=9"]))


SCAN = "[scan]\nlearning_rate = [1e-4, 2e-4]\nseed = [0, 1]\n"


def test_the_scan_is_every_objective_at_every_rate_without_staleness(tmp_path: Path):
    text = HEAD + SCAN + '[[grid]]\nobjective = ["ppo", "grpo"]\nstaleness = [4, 8]\n'
    sweep = load_sweep(write(tmp_path, text))
    grid = grid_arms(sweep)
    found = [
        (arm.objective, arm.staleness, arm.values["learner.learning_rate"], arm.seed)
        for arm in scan_arms(sweep, grid)
    ]
    assert all(arm.needs_rate for arm in grid)
    assert found == [
        (objective, 0, rate, seed)
        for objective in ("ppo", "grpo")
        for rate in (1e-4, 2e-4)
        for seed in (0, 1)
    ]


def test_an_arm_of_the_grid_that_the_scan_has_run_is_the_same_arm(tmp_path: Path):
    text = HEAD + SCAN + '[[grid]]\nseed = [0, 1]\nstaleness = [0, 4]\nobjective = ["grpo"]\n'
    sweep = load_sweep(write(tmp_path, text))
    grid = grid_arms(sweep)
    at_rate = {arm.with_rate(2e-4).name for arm in grid}
    # The order in which axes are written changes nothing.
    assert len(at_rate & {arm.name for arm in scan_arms(sweep, grid)}) == 2


def test_a_key_at_its_value_in_the_base_makes_no_other_arm(tmp_path: Path):
    axes = '[[grid]]\nseed = [0]\ndata.seed = [DATA]\nstaleness = [0]\nobjective = ["grpo"]\n'
    names: list[set[str]] = []
    for value in ("0", "1"):
        sweep = load_sweep(write(tmp_path, HEAD + SCAN + axes.replace("DATA", value)))
        grid = grid_arms(sweep)
        scan = {arm.name for arm in scan_arms(sweep, grid)}
        names.append({arm.with_rate(2e-4).name for arm in grid} & scan)
    # data.seed is 0 without the axis; at 1 the questions come in another order.
    assert [len(found) for found in names] == [1, 0]


DRAWS = 'mode = "bound"\n' + SCAN + '[[grid]]\nobjective = ["grpo"]\nstaleness = [0]\n'


@pytest.mark.parametrize("axis", ["draws = [1, 2]", "learning_rate = [2e-4]\nseed = [1]"])
def test_an_arm_of_the_scan_has_the_name_of_the_one_of_the_grid_that_trains_the_same(
    tmp_path: Path, axis: str
):
    # One that needs the scan's rate, so that there is a scan.
    text = HEAD + DRAWS + axis + '\n[[grid]]\nobjective = ["grpo"]\nstaleness = [4]\n'
    sweep = load_sweep(write(tmp_path, text))
    grid = grid_arms(sweep)
    settled = {arm.with_rate(2e-4).name for arm in grid}
    scan = scan_arms(sweep, grid)
    assert (len(scan), len(settled & {arm.name for arm in scan})) == (4, 1)
    assert all(arm.is_scan for arm in scan)


def test_an_arm_of_the_scan_that_ended_under_its_own_name_keeps_it(tmp_path: Path):
    sweep = load_sweep(write(tmp_path, HEAD + DRAWS + "draws = [1]\n"))
    grid = grid_arms(sweep)
    # As without the grid's word for it.
    own = [arm.name for arm in scan_arms(sweep, [replace(grid[0], staleness=4)])]
    assert [arm.name for arm in scan_arms(sweep, grid, own)] == own
    assert "draws1" not in own[0] and "draws1" in scan_arms(sweep, grid)[0].name


def test_an_arm_that_two_grids_name_is_refused_also_by_a_default(tmp_path: Path):
    one = '[[grid]]\nobjective = ["grpo"]\nstaleness = [0]\nseed = [0]\n'
    sweep = load_sweep(write(tmp_path, HEAD + one + one + "data.seed = [0]\n"))
    with pytest.raises(ConfigurationError, match=r"2 repeats an arm of \[\[grid\]\] 1"):
        grid_arms(sweep)


def test_the_scan_of_the_sweep_of_section_1_is_part_of_its_grid():
    sweep = load_sweep(CONFIGS / "sweep-lags.toml")
    grid = grid_arms(sweep)
    scan = scan_arms(sweep, grid)
    settled = {arm.with_rate(1e-4).name for arm in grid}
    assert (len(settled), len(settled | {arm.name for arm in scan})) == (24, 32)


def test_an_axis_of_learning_rates_needs_no_scan(tmp_path: Path):
    text = HEAD + SCAN + "[[grid]]\nlearning_rate = [1e-3]\nstaleness = [0]\n"
    sweep = load_sweep(write(tmp_path, text))
    grid = grid_arms(sweep)
    assert (grid[0].needs_rate, scan_arms(sweep, grid)) == (False, [])


@pytest.mark.parametrize(
    "name",
    [
        *("sweep-a", "sweep-a-rate", "sweep-a-clip", "sweep-a-mean", "sweep-a-ctn", "sweep-a-64"),
        *(
            "sweep-b",
            "sweep-b-fresh",
            "sweep-b-reuse",
            "sweep-c",
            "sweep-c-critic",
            "sweep-c-live",
            "sweep-lags",
        ),
    ],
)
def test_the_sweeps_of_the_findings_can_run(name: str, tmp_path: Path):
    file = CONFIGS / f"{name}.toml"
    if name.startswith("sweep-c"):
        # Its model is the user's.
        text = (CONFIGS / "sweep-c-base.toml").read_text()
        base = re.sub('models/SmolLM2-135M-Instruct[^"]*', "bundled", text)
        (tmp_path / "sweep-c-base.toml").write_text(base)
        file = tmp_path / file.name
        file.write_text((CONFIGS / f"{name}.toml").read_text())
    sweep = load_sweep(file)
    grid = grid_arms(sweep)
    expected = {
        "sweep-a": (240, 30),
        "sweep-a-rate": (78, 0),
        "sweep-a-clip": (54, 0),
        "sweep-a-mean": (45, 0),
        "sweep-a-ctn": (30, 0),
        "sweep-a-64": (64, 0),
        "sweep-c-live": (2, 0),
        "sweep-b": (60, 0),
        "sweep-b-fresh": (60, 3),
        "sweep-b-reuse": (24, 6),
        "sweep-c": (10, 6),
        "sweep-c-critic": (10, 6),
        "sweep-lags": (24, 12),
    }
    assert (len(grid), len(scan_arms(sweep, grid))) == expected[name]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD, "holds no [[grid]]"),
        (HEAD + "[[grid]]\n", "[[grid]] 1 is empty"),
        (HEAD + "[[grid]]\nseed = []\n", "seed has no value"),
        (HEAD + "[[grid]]\nlearner.num_step = [1]\n", "did you mean learner.num_steps?"),
        (HEAD + "[set]\nlearner.bogus = 1\n" + GRID, "learner.bogus is not a key"),
        (HEAD + '[[grid]]\nobjective = ["gropo"]\n', "names the objective gropo; there are"),
        (HEAD + "[[grid]]\nseed = [0, 0]\n", "[[grid]] 1 repeats an arm of [[grid]] 1: seed 0"),
        (HEAD + GRID + GRID, "[[grid]] 2 repeats an arm of [[grid]] 1"),
        (HEAD + '[[grid]]\nctn = ["soft"]\n', "ctn = 'soft' is no form; there are none, gradient"),
        (HEAD + "[[grid]]\nstaleness = [64]\n", "the arm staleness 64 cannot run"),
        (HEAD + '[[grid]]\nname = ["a"]\n', "the sweep names its arms"),
        (
            HEAD
            + "[resources]\nmicro_batch_tokens = 4096\n"
            + "[[grid]]\nlearner.micro_batch_tokens = [512, 1024]\n",
            "learner.micro_batch_tokens is an axis, and resources.micro_batch_tokens would decide",
        ),
        (HEAD + "[set]\nseed = 1\n" + GRID, "seed is in [set] and in [[grid]]"),
        (HEAD + "[resources]\nnum_cpu = 1\n" + GRID, "[resources] holds executor, num_cpus"),
        (HEAD + "[collapse]\nshare = 2.0\n" + GRID, "collapse.share is 2.0; input should be less"),
        (HEAD + "[set]\neval.num_questions = 0\n" + GRID, "gives an arm no score"),
        (HEAD + '[set]\npolicy.backend = "vllm"\n' + GRID, "cannot decode in the process"),
        (HEAD + "[[grid]]\nstaleness = [0]\ndraws = [2]\n", "draw_by"),
        ('name = "s"\nbase = "nowhere.toml"\n' + GRID, "base = 'nowhere.toml' does not exist"),
        (HEAD + 'mode = "loose"\n' + GRID, "mode is 'loose'"),
        (HEAD + "colour = 1\n" + GRID, "colour is not a key; a sweep holds name, base"),
        (GRID, "name is missing"),
        ("name = [", "is not TOML"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, text: str, sentence: str):
    result = CliRunner().invoke(cli.app, ["sweep", str(write(tmp_path, text)), "--dry-run"])
    assert isinstance(result.exception, ConfigurationError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_sweep_goes_on_only_as_it_was_begun(tmp_path: Path):
    folder = SweepFolder(tmp_path / "out")
    folder.begin(load_sweep(write(tmp_path, HEAD + GRID)).identity())
    # Other resources are the same sweep.
    more = HEAD + "[resources]\nnum_cpus = 2\n" + GRID
    folder.begin(load_sweep(write(tmp_path, more)).identity())
    changed = load_sweep(write(tmp_path, HEAD + GRID.replace("4]", "8]")))
    with pytest.raises(ConfigurationError, match="was begun with another grid; name another"):
        folder.begin(changed.identity())
    with pytest.raises(ConfigurationError, match="another --set"):
        folder.begin(load_sweep(write(tmp_path, HEAD + GRID), ["seed=1"]).identity())


def test_a_changed_base_is_another_sweep(tmp_path: Path):
    base = tmp_path / "base.toml"
    base.write_text((CONFIGS / "stability.toml").read_text())
    file = write(tmp_path, 'name = "s"\nbase = "base.toml"\n' + GRID)
    folder = SweepFolder(tmp_path / "out")
    folder.begin(load_sweep(file).identity())
    base.write_text(base.read_text() + "\n# changed\n")
    with pytest.raises(ConfigurationError, match="another base"):
        folder.begin(load_sweep(file).identity())


def test_dry_run_prints_the_arms_and_makes_nothing(tmp_path: Path):
    file = write(tmp_path, HEAD + SCAN + GRID)
    out = tmp_path / "out"
    result = CliRunner().invoke(cli.app, ["sweep", str(file), "--dry-run", "--out", str(out)])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert sum(line.startswith("scan  ") for line in lines) == 4
    assert sum(line.startswith("grid  ") for line in lines) == 4
    assert not out.exists()
