"""Configuration: what is read, what is refused, and in which words."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.config import (
    MASK,
    ApiConfig,
    RunConfig,
    check_environment,
    describe,
    dump,
    load,
    masked,
    remarks,
)
from leeway.services.config_text import known_keys
from leeway.services.redaction import redacted


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load(path, overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


# --- reading ---


def test_no_file_means_defaults():
    assert load(None) == RunConfig()


def test_a_file_sets_what_it_names(write):
    config = load(write("name = 'a'\n[learner]\nnum_steps = 3\n"))
    assert (config.name, config.learner.num_steps, config.learner.warmup_steps) == ("a", 3, 2)


def test_a_whole_number_is_a_number(write):
    assert load(write("[learner]\nlearning_rate = 1\n")).learner.learning_rate == 1.0


@pytest.mark.parametrize(
    ("text", "key", "right"),
    [
        ("[learner]\nnum_step = 3", "learner.num_step", "did you mean learner.num_steps?"),
        ("num_steps = 3", "num_steps", "did you mean learner.num_steps?"),
        ("[lerner]\nnum_steps = 3", "lerner", "did you mean learner?"),
        ("[eval]\nzzz = 3", "eval.zzz", "[eval] holds num_questions, every_steps"),
        ("learner = 3", "learner", "must be a table"),
        ('[learner]\nnum_steps = "3"', "learner.num_steps", "a whole number of at least 1"),
        ("[learner]\nnum_steps = true", "learner.num_steps", "a whole number of at least 1"),
        ("[learner]\nnum_steps = 0", "learner.num_steps", "a whole number of at least 1"),
        ("[learner]\nctn_raw = 1", "learner.ctn_raw", "true or false"),
        ("[learner]\nlearning_rate = inf", "learner.learning_rate", "a finite number"),
        ('[policy]\nbackend = "x"', "policy.backend", 'one of "vllm", "torch"'),
        (
            "[policy]\ngpu_memory_utilization = 2.0",
            "policy.gpu_memory_utilization",
            "greater than 0 and at most 1",
        ),
        ('name = "a b"', "name", "matches ^[a-zA-Z0-9]"),
        ('[search]\nprompt_template = "Q"', "search.prompt_template", "{question}"),
        (
            '[policy]\nbackend = "torch"\ntensor_parallel_size = 2',
            "policy.tensor_parallel_size",
            "set it to 1",
        ),
    ],
)
def test_a_refusal_names_file_key_and_what_is_right(write, text: str, key: str, right: str):
    path = write(text)
    message = refusal(path)
    assert message.startswith(f"{path}: {key} ")
    assert right in message


@pytest.mark.parametrize(
    ("text", "line"), [("name = 'a'\nseed = x\n", 2), ("\n\n[a\n", 3), ("name = 'a", 1)]
)
def test_a_syntax_error_names_the_line(write, text: str, line: int):
    path = write(text)
    assert refusal(path).startswith(f"{path}, line {line}: ")


def test_a_missing_file_is_named(tmp_path: Path):
    assert refusal(tmp_path / "no.toml") == (
        f"{tmp_path}/no.toml does not exist; give the path of a TOML file"
    )


def test_a_file_that_is_no_text_is_named(tmp_path: Path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refusal(tmp_path / "a.toml")


# --- overrides ---


def test_an_override_replaces_the_file(write):
    path = write("[learner]\nnum_steps = 3\n")
    assert load(path, ["learner.num_steps=5"]).learner.num_steps == 5


def test_an_override_of_text_needs_no_quotes():
    config = load(None, ["name=12", "learner.objective=grpo", "policy.backend=torch"])
    assert (config.name, config.learner.objective, config.policy.backend) == ("12", "grpo", "torch")


def test_none_unsets_an_optional_key(write):
    path = write("[learner]\neps_low = 0.3\n")
    assert load(path, ["learner.eps_low=none"]).learner.eps_low is None


def test_none_is_a_value_where_the_key_knows_it_as_one():
    assert load(None, ["learner.ctn=none"]).learner.ctn == "none"
    assert load(None, ["learner.ctn_target=none"]).learner.ctn_target is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.num_steps", "is not of the form key=value"),
        ("learner=3", "learner is a table; name a key in it, such as learner.objective"),
        ("learner.steps=3", "did you mean learner.num_steps?"),
        ("learner.num_steps=many", '--set learner.num_steps is "many", a string; it must be'),
        ("learner.learning_rate=nan", "must be a finite number"),
    ],
)
def test_a_bad_override_is_named(override: str, words: str):
    message = refusal(None, override)
    assert message.startswith("--set ")
    assert words in message


# --- checks that span parts ---


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["replay.groups_per_step=16", "replay.max_groups=8"],
            "the command line: [replay] max_groups = 8 must be at least groups_per_step = 16",
        ),
        (
            ["replay.max_staleness=0", "replay.groups_per_step=8", "rollout.num_workers=2"],
            "would keep 32 groups in flight, more than one step, but replay.max_staleness = 0 "
            "admits only the replay.groups_per_step = 8 groups of the current step; "
            "set rollout.max_groups_in_flight to at most 4, or raise replay.max_staleness",
        ),
        (
            ["replay.staleness_policy=exact", "replay.max_groups=79"],
            "[replay] max_groups = 79 must be at least (max_staleness + 1) x groups_per_step = 80 "
            'under staleness_policy = "exact"',
        ),
        (
            ["replay.staleness_policy=exact", "learner.num_steps=4"],
            'learner.num_steps = 4 ends within the ramp of replay.staleness_policy = "exact": the '
            "first replay.max_staleness = 4 steps train younger tokens",
        ),
        (
            ["search.max_turn_tokens=1024"],
            "leaves no room for a prompt within policy.max_model_len = 1024",
        ),
        (["search.max_turn_tokens=400"], "= 1120 tokens and the prompt, more than"),
        (["learner.micro_batch_tokens=512"], "raise it to at least 1024"),
        (["rollout.group_size=1"], "set rollout.group_size to at least 2"),
        (["learner.objective=sogrpo"], "did you mean so-grpo?"),
        (
            ["learner.objective=rloo", "learner.eps_low=0.1"],
            'learner.eps_low does nothing under learner.objective = "rloo"',
        ),
        (
            ["replay.slot_timeout_s=90"],
            "replay.slot_timeout_s = 90 does not outlast rollout.episode_timeout_s = 90",
        ),
        (["learner.draw_timeout_s=60"], "set learner.draw_timeout_s above 120"),
        (["replay.lease_timeout_s=60"], "set replay.lease_timeout_s above 60"),
        (["eval.num_questions=0", "eval.every_steps=5"], "eval.every_steps = 5 does nothing"),
        (["replay.url=localhost:6379"], "is not a Redis URL: it must begin with one of redis://"),
        (["search.retriever_url=localhost"], "must start with http:// or https://"),
    ],
)
def test_a_setting_that_would_deadlock_or_do_nothing_is_refused(overrides: list[str], words: str):
    assert words in refusal(None, *overrides)


def test_staleness_0_is_fine_with_one_step_in_flight():
    load(None, ["replay.max_staleness=0", "rollout.max_groups_in_flight=16"])


def test_exact_staleness_is_fine_with_a_window_that_fits_and_a_step_after_the_ramp():
    load(None, ["replay.staleness_policy=exact", "replay.max_groups=80", "learner.num_steps=5"])


def test_a_first_window_that_may_outlast_the_learner_is_said_not_refused():
    # 80 groups, 16 in flight: 5 times up to 90 s, more than 300 s
    (remark,) = remarks(load(None, ["replay.staleness_policy=exact"]))
    assert "waits for all 80 groups of the window before the first step, 5 times the 16" in remark
    assert "learner.draw_timeout_s = 300 leaves 60 s for each time" in remark


def test_one_trajectory_per_question_is_fine_with_a_batch_baseline():
    load(None, ["rollout.group_size=1", "learner.objective=reinforce"])


def test_a_window_wider_than_the_buffer_is_said_not_refused():
    # 16 x (4 + 1) = 80 > 40; (40 - 1) // 16 = 2
    (remark,) = remarks(load(None, ["replay.max_groups=40"]))
    assert "80 groups, replay.max_groups = 40 stops at fewer" in remark
    assert "reaches staleness 2, only stragglers reach 4" in remark


def test_a_bound_that_is_shorter_than_a_group_takes_is_remarked():
    # 64 groups at once are four steps of 16, and a bound of 4 lets the oldest be that old.
    (remark,) = remarks(load(None, ["rollout.max_groups_in_flight=64"]))
    assert "64 groups at once, 4 steps' worth" in remark
    assert "replay.max_staleness = 4 leaves slower ones no time" in remark
    more = ["rollout.max_groups_in_flight=64", "replay.max_staleness=5"]
    assert remarks(load(None, more)) == []
    assert remarks(load(None, ["replay.max_staleness=0"])) == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_engine_rounds_weights_as_its_learner_does(precision: str):
    config = load(None, [f"learner.precision={precision}"])
    assert (config.policy.dtype, config.engine.dtype) == ("auto", precision)
    assert remarks(config) == []


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_an_engine_that_rounds_otherwise_is_said_not_refused(dtype: str, precision: str):
    config = load(None, [f"policy.dtype={dtype}", f"learner.precision={precision}"])
    assert config.engine.dtype == dtype
    (remark,) = remarks(config)
    assert f'policy.dtype = "{dtype}" and learner.precision = "{precision}"' in remark
    assert 'leave policy.dtype at "auto"' in remark


def test_the_defaults_need_no_remark():
    assert remarks(RunConfig()) == []


# --- paths ---


def test_a_path_is_looked_for_beside_the_file_first(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for folder in (tmp_path, elsewhere):
        (folder / "c.jsonl").write_text("")
    (elsewhere / "q.jsonl").write_text("")
    config = load(write('[search]\ncorpus = "c.jsonl"\n[data]\ntrain = "q.jsonl"\n'))
    assert config.search.corpus == str(tmp_path / "c.jsonl")
    assert config.data.train == str(elsewhere / "q.jsonl")


@pytest.mark.parametrize("key", ["model", "search.corpus", "data.train", "data.held_out"])
def test_a_missing_file_or_folder_is_refused(key: str):
    message = refusal(None, f"{key}=/no/such")
    assert f'{key} = "/no/such" does not exist; give ' in message
    assert 'or "bundled"' in message


def test_a_model_folder_without_config_json_is_refused(tmp_path: Path):
    assert "holds no config.json" in refusal(None, f"model={tmp_path}")


def test_a_question_folder_is_refused(tmp_path: Path):
    assert "is a folder; give a JSON-lines file" in refusal(None, f"data.train={tmp_path}")


def test_training_on_the_held_out_questions_is_refused(tmp_path: Path):
    file = tmp_path / "q.jsonl"
    file.write_text("")
    message = refusal(None, f"data.train={file}", f"data.held_out={file}")
    assert "data.held_out is the same file as data.train" in message


# --- this machine ---


def test_a_port_in_use_is_refused_at_start_only():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load(None, [f"api.port={port}"])
        with pytest.raises(ConfigurationError, match=f"api.port = {port} cannot be used"):
            check_environment(config)


def test_a_free_port_is_fine():
    check_environment(RunConfig(api=ApiConfig(port=0)))


def test_a_redis_that_does_not_answer_is_refused():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{closed.getsockname()[1]}/0"
        with pytest.raises(ConfigurationError) as raised:
            check_environment(load(None, [f"replay.url={url}"]))
    assert "secret" not in str(raised.value)


# --- writing ---


def test_a_dump_reads_back_as_the_same_configuration(write):
    config = load(None, ["name=x", "learner.learning_rate=1e-5", "learner.eps_low=0.25"])
    assert load(write(dump(config))) == config


def test_a_dump_keeps_every_character(write):
    template = 'a "b" \\ \t\x7fé😀\n{question}'
    config = RunConfig.model_validate({"search": {"prompt_template": template}})
    assert load(write(dump(config))) == config


def test_a_dump_does_not_hold_the_redis_password():
    config = load(None, ["replay.url=redis://user:secret@host:6379/0"])
    assert f"redis://user:{MASK}@host:6379/0" in dump(config)
    assert "secret" not in dump(config) + masked(config).model_dump_json()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:p@ss/w@h", "redis://:***@h"),
        ("redis://h/0?password=p&a=1", "redis://h/0?password=***&a=1"),
        (
            "redis+sentinel://u:p@h:1,i:2/m?sentinel_password=q",
            "redis+sentinel://u:***@h:1,i:2/m?sentinel_password=***",
        ),
        ("redis://h:6379/0", "redis://h:6379/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str):
    assert redacted(url) == shown


@pytest.mark.parametrize(
    "overrides",
    [
        ["replay.ur=redis://:secret@h"],
        ["replay.url=rediss:/:secret@h", "replay.max_groups=x"],
        ["replay.url=redis://:secret@h", "replay.groups_per_step=0"],
        ["replay.url=http://:secret@h"],
    ],
)
def test_no_refusal_shows_a_password(overrides: list[str]):
    assert "secret" not in refusal(None, *overrides)


def test_the_reference_names_every_key_and_says_something_about_it():
    page = describe()
    for key, field in known_keys().items():
        assert f"| `{key.rpartition('.')[2]}` |" in page
        assert field.description, f"{key} has no docstring"
    assert not re.search(r"\| +\|$", page, re.MULTILINE)


def test_reading_a_configuration_imports_nothing_heavy():
    heavy = ["torch", "ray", "vllm", "transformers", "numpy", "matplotlib", "fastapi", "redis"]
    code = (
        "import sys; from leeway.services.config import load; load(None, ['name=x']); "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
