"""The doctor's judgements on numbers made by hand, and some of its checks on this very machine."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from leeway.actors.policy import Completion
from leeway.replay.board import EngineRecord
from leeway.replay.errors import TransferError
from leeway.replay.server import EmbeddedRedis
from leeway.services.config import load
from leeway.services.doctor import (
    command,
    configuration,
    equality,
    live,
    machine,
    redis_checks,
    transfer,
    transfer_rank,
    versions,
)
from leeway.services.doctor.examination import Subject, examine
from leeway.services.doctor.finding import Finding, Part, exit_code, worst
from leeway.services.layout import RunState, create_run

CONFIG = load(None)
PART = Part("redis")
FINE = PART.ok("version", "Redis 7.2")
NOTE = PART.note("role", "a note")
WARNING = PART.warning("appendonly", "no", "set it")
ERROR = PART.error("reachable", "no answer", "start it")


def named(findings: Any, name: str) -> Finding:
    [found] = [finding for finding in findings if finding.name == name]
    return found


# --- severity ---


@pytest.mark.parametrize(
    ("findings", "severity", "code"),
    [
        ([], "ok", 0),
        ([FINE, NOTE], "note", 0),
        ([FINE, WARNING, NOTE], "warning", 1),
        ([WARNING, ERROR, FINE], "error", 2),
    ],
)
def test_the_exit_code_is_that_of_the_gravest_finding(findings, severity, code: int):
    assert (worst(findings), exit_code(findings)) == (severity, code)


def test_a_line_says_what_is_wrong_and_what_to_do():
    assert command.plain_lines([FINE, ERROR]) == [
        "ok    redis  version: Redis 7.2",
        "FAIL  redis  reachable: no answer; start it",
        "1 error, 1 fine",
    ]


def test_the_summary_counts_in_words():
    assert command.summary([FINE, NOTE]) == "2 fine"
    assert command.summary([ERROR, ERROR, WARNING]) == "2 errors, 1 warning, 0 fine"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal_and_loses_no_word(width: int):
    import io

    from rich.console import Console

    long = PART.error("rights", "x " * 60, "do " * 60 + "end")
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    command.show([FINE, long], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in shown.splitlines()) <= width
    assert shown.count("do") == 60
    assert "…" not in shown


# --- versions ---


@pytest.mark.parametrize(
    ("vllm", "torch", "wanted", "severity"),
    [
        ("0.25.1", "2.11.0+cu130", "2.11.0", "ok"),
        ("0.32.0", "2.13.0+cpu", "2.13.0", "ok"),
        ("0.33.1", "2.14.0", None, "ok"),
        ("0.28.0", "2.12.0", "2.12.0", "error"),
        ("0.25.0", "2.11.0", "2.11.0", "error"),
        ("0.25.1", "2.13.0", "2.11.0", "error"),
    ],
)
def test_vllm_is_0_25_1_or_from_0_32_on_and_torch_the_one_it_was_built_for(
    vllm: str, torch: str, wanted: str | None, severity: str
):
    assert versions.vllm_finding(vllm, torch, wanted).severity == severity


@pytest.mark.parametrize(
    ("driver", "cuda", "severity"),
    [
        ("580.65.06", "13.0", "ok"),
        ("570.10", "13.0", "error"),
        ("525.60", "12.8", "ok"),
        ("580.65", None, "warning"),
    ],
)
def test_the_driver_is_new_enough_for_the_cuda_of_torch(driver: str, cuda: str | None, severity):
    assert versions.driver_finding(driver, cuda).severity == severity


def test_nvidia_smi_is_read_line_by_line():
    text = "NVIDIA H100 80GB HBM3, 580.65.06, 81920, 40960\nNo devices were found\n"
    assert versions.parse_smi(text) == [versions.Gpu("NVIDIA H100 80GB HBM3", "580.65.06", 80, 40)]


def test_an_engine_needs_its_share_of_the_device_free_unless_it_is_there_already():
    gpu = versions.Gpu("H100", "580", 80.0, 60.0)
    assert versions.memory_finding(0, gpu, 0.85, is_live=False).severity == "warning"
    assert versions.memory_finding(0, gpu, 0.85, is_live=True).severity == "ok"
    assert versions.memory_finding(0, gpu, 0.7, is_live=False).severity == "ok"


def test_a_missing_vllm_matters_as_much_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda p: None if "vllm" in p else real(p))
    torch = load(None, ["policy.backend=torch"])
    severities = [
        named(versions.check_versions(config, elsewhere), "vllm").severity
        for config, elsewhere in ((CONFIG, False), (CONFIG, True), (torch, False))
    ]
    assert severities == ["error", "warning", "note"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("0.32.0rc1", (0, 32, 0)), ("580", (580,)), ("?", (0,))],
)
def test_versions_are_read_as_numbers(text: str, numbers: tuple[int, ...]):
    assert versions.numbers(text) == numbers


# --- machine ---


def test_too_little_memory_is_a_warning_and_less_than_half_an_error(
    monkeypatch: pytest.MonkeyPatch,
):
    """4 GiB for the processes, 1 for the cache, a few MB of model: 5 and a little."""
    monkeypatch.setattr(machine, "_cgroup_free_gib", lambda: float("inf"))
    for free, severity in ((6.0, "ok"), (4.0, "warning"), (2.0, "error")):
        monkeypatch.setattr(machine, "_available_gib", lambda free=free: free)
        [found] = machine.check_memory(CONFIG, has_gpus=False)
        assert found.severity == severity
        assert found.facts == {"gib": free}


def test_what_a_container_may_still_use_is_its_limit_less_its_use_and_its_cache(tmp_path: Path):
    for name, text in (
        ("memory.max", f"{8 * 2**30}\n"),
        ("memory.current", f"{5 * 2**30}\n"),
        ("memory.stat", f"anon 3\ninactive_file {2**30}\nfile 9\n"),
    ):
        (tmp_path / name).write_text(text)
    assert machine._cgroup_free_gib(tmp_path) == 4.0
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._cgroup_free_gib(tmp_path) == float("inf")
    assert machine._cgroup_free_gib(tmp_path / "none") == float("inf")


def test_a_run_directory_that_cannot_be_written_is_an_error(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    config = load(None, [f"directory={tmp_path}/a/b"])
    found = named(machine.check_disk(config), "run directory")
    assert found.severity == "error"
    assert str(tmp_path) in found.text


def test_this_machine_is_read_without_a_fault():
    checks = (
        *machine.check_cores(),
        *machine.check_disk(CONFIG),
        *machine.check_shared_memory(),
        *machine.check_limits(),
    )
    assert {"cores", "disk free", "open files", "processes"} <= {found.name for found in checks}


# --- Redis ---

INFO = {
    "redis_version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory": "0",
    "used_memory": str(2**20),
    "aof_enabled": "1",
    "role": "master",
}


@pytest.mark.parametrize(
    ("change", "name", "severity"),
    [
        ({}, "memory", "ok"),
        ({"redis_version": "5.0.7"}, "version", "error"),
        ({"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy", "error"),
        ({"aof_enabled": "0"}, "appendonly", "warning"),
        ({"role": "slave"}, "role", "error"),
        ({"maxmemory": "1000", "used_memory": "990"}, "memory", "warning"),
        ({"maxmemory": "1000", "used_memory": "100"}, "memory", "ok"),
    ],
)
def test_what_redis_says_of_itself_is_judged(change: dict[str, str], name: str, severity: str):
    found = named(redis_checks.setting_findings(INFO | change, CONFIG), name)
    assert found.severity == severity


def test_a_buffer_larger_than_the_free_memory_of_redis_is_a_warning():
    config = load(None, ["replay.max_bytes=600"])
    info = INFO | {"maxmemory": "1000", "used_memory": "500"}
    assert named(redis_checks.setting_findings(info, config), "memory").severity == "warning"


@pytest.mark.parametrize(
    ("offset_s", "unsure_s", "severity"),
    [(0.2, 0.0, "ok"), (1.4, 0.5, "ok"), (-3.0, 0.5, "warning"), (20.0, 0.5, "error")],
)
def test_a_clock_may_be_off_by_a_second_and_never_by_fifteen(
    offset_s: float, unsure_s: float, severity: str
):
    assert redis_checks.skew_finding("Redis", offset_s, unsure_s).severity == severity


def test_the_direction_of_a_clock_is_said():
    assert redis_checks.skew_finding("w", 3.0, 0.0).text == "3,000 ms ahead of this machine"
    assert redis_checks.skew_finding("w", -3.0, 0.0).text == "3,000 ms behind this machine"


async def test_the_embedded_redis_is_fine(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        found = await redis_checks.check_redis(server.url, CONFIG)
    assert {finding.name for finding in found} == {
        "reachable", "version", "maxmemory-policy", "memory", "appendonly", "rights", "latency",
        "Redis",
    }  # fmt: skip
    assert worst(found) == "ok"


async def test_the_checks_leave_no_key_behind(tmp_path: Path):
    from leeway.replay.connection import Link

    with EmbeddedRedis.start(tmp_path / "redis") as server:
        await redis_checks.check_redis(server.url, CONFIG)
        link = Link(server.admin_url)
        assert await link.execute(("DBSIZE",)) == [0]
        await link.close()


async def test_a_user_without_rights_is_told_which_it_needs(tmp_path: Path):
    from leeway.replay.connection import Link

    with EmbeddedRedis.start(tmp_path / "redis") as server:
        link = Link(server.admin_url)
        rules = ("on", ">pw", "~other:*", "+@all")
        await link.execute(("ACL", "SETUSER", "weak", *rules))
        await link.close()
        place = server.url.rpartition("@")[2]
        weak = f"redis://weak:pw@{place}"
        found = await redis_checks.check_redis(weak, CONFIG)
        remedy = named(found, "rights").remedy or ""
        rights = remedy.partition(": ")[2].split()
        link = Link(server.admin_url)
        await link.execute(("ACL", "SETUSER", "weak", "reset", "on", ">pw", *rights))
        await link.close()
        mended = await redis_checks.check_redis(weak, CONFIG)
    assert named(found, "rights").severity == "error"
    assert "~leeway:*" in rights and "+@all" not in rights
    assert named(mended, "rights").severity == "ok", "what it says is enough"


@pytest.mark.parametrize("url", ["redis://127.0.0.1:9/0", "http://x"])
async def test_a_redis_that_is_not_there_is_one_finding(url: str):
    [found] = await redis_checks.check_redis(url, CONFIG)
    assert found.severity == "error"
    assert found.remedy


# --- run ---


def engine(engine_id: str, version: int) -> EngineRecord:
    return EngineRecord(engine_id, 1, "float32", [], version, "127.0.0.1")


def test_an_engine_far_behind_the_learner_is_a_warning():
    sections = {"learner": {"version": 7}, "run": {"bound": 2}}
    found = live.engine_findings([engine("a", 7), engine("b", 4)], sections, "training")
    assert [(each.name, each.severity) for each in found] == [
        ("alive", "ok"), ("a", "ok"), ("b", "warning"),
    ]  # fmt: skip


@pytest.mark.parametrize(("phase", "severity"), [("training", "error"), ("starting", "note")])
def test_no_engine_is_an_error_where_one_is_needed(phase: str, severity: str):
    [found] = live.engine_findings([], {}, phase)
    assert found.severity == severity


def test_members_are_judged_by_their_clocks_and_the_silent_are_named():
    heard = {"policy:e": 100.0, "learner": 100.0, "rollout:gone": 10.0}
    found = live.clock_findings(heard, {"policy:e": 0.01, "learner": -4.0}, 100.5)
    assert [(each.name, each.severity) for each in found] == [
        ("learner", "warning"), ("policy:e", "ok"), ("silent", "note"),
    ]  # fmt: skip
    assert "rollout:gone" in found[-1].text


async def test_a_member_with_a_wrong_clock_is_found_on_a_real_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from leeway.replay.connection import Link
    from leeway.replay.keys import board_keys

    monkeypatch.setattr(live, "LISTEN_S", 1.0)

    async def write(link: Link) -> None:
        """As a machine does whose clock is 5 s fast."""
        while True:
            section = json.dumps({"version": 0, "updated_at": time.time() + 5})
            await link.execute(("HSET", board_keys("demo").sections, "policy:e", section))
            await asyncio.sleep(0.2)

    with EmbeddedRedis.start(tmp_path / "redis") as server:
        link = Link(server.admin_url)
        await link.execute(("SET", board_keys("demo").phase, "starting"))
        writing = asyncio.create_task(write(link))
        found = await live.check_run(server.url, "demo")
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await link.close()
    assert named(found, "phase").text == "starting"
    assert named(found, "policy:e").severity == "warning"
    assert named(found, "policy:e").facts["offset_s"] > 3  # type: ignore[operator]


async def test_a_run_that_redis_does_not_know_is_an_error(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        [found] = await live.check_run(server.url, "demo")
    assert found.severity == "error"
    assert "demo" in found.text


def test_a_stopped_run_is_told_how_to_go_on(tmp_path: Path):
    run = create_run(load(None, [f"directory={tmp_path}"]))
    run.write_state(RunState(name="run", started_at=1.0, pids={"train": 2**22 - 1}))
    [found] = live.check_process(run)
    assert found.severity == "warning"
    assert found.remedy == f"leeway train --resume {run.root}"


# --- transfer ---


@pytest.mark.parametrize(
    ("backend", "speed", "severity"),
    [
        ("gloo", 2.0, "ok"),
        ("gloo", 0.1, "warning"),
        ("nccl", 300.0, "ok"),
        ("nccl", 2, "warning"),
        ("direct", 6.0, "ok"),
        ("direct", 0.5, "warning"),
    ],
)
def test_a_slow_transfer_is_a_warning(backend: str, speed: float, severity: str):
    report = transfer.Report(gib_per_s=speed)
    assert transfer.finding_of(report, backend, "two ends").severity == severity


def test_a_transfer_that_fails_is_an_error_with_its_reason():
    found = transfer.finding_of(transfer.Report(fault="no route"), "gloo", "two ends")
    assert (found.severity, found.text) == ("error", "no route")


def test_memory_out_of_reach_is_a_warning_because_weights_are_broadcast_then():
    found = transfer.finding_of(transfer.Report(fault="no such process"), "direct", "two ends")
    assert (found.severity, found.text) == ("warning", "no such process")


@pytest.mark.parametrize("backend", ["gloo", "direct"])
def test_two_processes_of_this_machine_send_to_each_other(backend: str):
    report = transfer.measure(backend)
    assert report.fault == ""
    assert report.gib_per_s > 0


@pytest.mark.parametrize(
    ("num_gpus", "choice", "ways"),
    [
        (0, "auto", ["gloo between two CPU processes"]),
        (0, "direct", ["gloo between two CPU processes", "direct between two CPU processes"]),
        (1, "auto", ["gloo between two CPU processes", "direct between two processes on one GPU"]),
        (2, "auto", ["nccl between two GPUs", "direct between two GPUs"]),
        (2, "collective", ["nccl between two GPUs"]),
    ],
)
def test_every_way_that_a_run_here_may_take_is_measured(
    num_gpus: int, choice: str, ways: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "measure", lambda *_: transfer.Report(gib_per_s=9.0))
    found = transfer.check_transfer(num_gpus, choice)
    assert [f"{each.name}{each.text.removeprefix('9.00 GiB/s')}" for each in found] == ways


def test_memory_that_an_engine_cannot_show_or_has_no_longer_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
):
    exposed = transfer_rank.Exposed(64, "cpu")
    gone = msgspec.structs.replace(exposed.handle(), token="another")
    with pytest.raises(TransferError, match="cannot be opened"):
        transfer_rank.write_into(gone, "cpu", 1)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(transfer_rank, "ExposedMemory", refuse)
    with pytest.raises(TransferError, match="no memory to be shown on cpu: out of memory"):
        transfer_rank.Exposed(64, "cpu")


# --- engine against learner ---


def test_the_gap_is_the_absolute_difference_over_all_tokens():
    gap = equality.Gap.of(np.array([-1.0, -2.0]), np.array([-1.1, -2.0]))
    assert gap.num_tokens == 2
    assert gap.mean == pytest.approx(0.05)
    assert gap.max == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("mean", "severity"), [(0.001, "ok"), (0.05, "warning"), (0.4, "error"), (math.nan, "error")]
)
def test_a_gap_is_judged_by_its_mean(mean: float, severity: str):
    gap = equality.Gap(100, mean, mean, mean)
    assert equality.gap_finding(gap, CONFIG).severity == severity


def test_a_completion_becomes_a_trajectory_of_one_turn():
    completion = Completion(
        token_ids=[7, 8, 9], logprobs=[-1.0, -2.0, -3.0], versions=[0, 0, 0], finish="length"
    )
    made = equality.as_trajectory([1, 2, 3, 4, 5], completion, "t")
    assert made.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert (made.turns[0].start, made.turns[0].num_generated) == (5, 3)


def test_engine_and_learner_agree_on_the_bundled_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(equality, "QUESTIONS", equality.QUESTIONS[:2])
    monkeypatch.setattr(equality, "NUM_TOKENS", 8)
    [found] = equality.check_equality(load(None, ["policy.backend=torch"]))
    assert found.severity == "ok", found.text
    assert found.facts["max"] < 1e-3  # type: ignore[operator]


def test_engine_and_learner_at_unequal_weights_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The learner reads what the engine sampled with a model that was scaled by two."""
    import shutil

    from safetensors.torch import load_file, save_file

    from leeway.actors.config import model_dir

    other = tmp_path / "model"
    shutil.copytree(model_dir("bundled"), other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    monkeypatch.setattr(equality, "QUESTIONS", equality.QUESTIONS[:1])
    monkeypatch.setattr(equality, "NUM_TOKENS", 8)
    real = equality.learner_logprobs
    changed = load(None, [f"model={other}", "policy.backend=torch"])
    monkeypatch.setattr(equality, "learner_logprobs", lambda _, found: real(changed, found))
    [found] = equality.check_equality(load(None, ["policy.backend=torch"]))
    assert found.severity == "error"


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_learner_reads_a_model_with_the_trust_that_a_run_gives_it(
    is_trusted: bool, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []

    def refuse(*_: Any, **more: Any) -> Any:
        asked.append(more.get("trust_remote_code"))
        raise OSError("enough")

    monkeypatch.setattr("leeway.learner.model.load_model", refuse)
    config = load(None, [f"policy.trust_remote_code={str(is_trusted).lower()}"])
    with pytest.raises(OSError, match="enough"):
        equality.learner_logprobs(config, [])
    assert asked == [is_trusted]


def test_a_model_that_cannot_be_loaded_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(equality.Tokens, "load", refuse)
    [found] = equality.check_equality(load(None, ["policy.backend=torch"]))
    assert found.severity == "error"
    assert "no such file" in found.text


# --- configuration ---


def test_a_port_that_is_taken_is_an_error_and_none_for_a_run_that_holds_it():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = load(None, [f"api.port={taken.getsockname()[1]}"])
        found = list(configuration.check_configuration(config, "a.toml", is_live=False))
        assert named(found, "api port").severity == "error"
        found = list(configuration.check_configuration(config, "a.toml", is_live=True))
        assert "api port" not in [finding.name for finding in found]


def test_a_bad_question_file_is_an_error_with_its_line(tmp_path: Path):
    bad = tmp_path / "questions.jsonl"
    bad.write_text('{"id": 1}\n')
    config = load(None, [f"data.train={bad}"])
    found = named(configuration.check_configuration(config, "a.toml", is_live=True), "files")
    assert found.severity == "error"
    assert "questions.jsonl" in found.text


# --- the whole ---


def test_a_check_that_breaks_hides_none_of_the_others(monkeypatch: pytest.MonkeyPatch):
    def break_down() -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(machine, "check_cores", break_down)
    monkeypatch.setattr(transfer, "measure", lambda *_: transfer.Report(gib_per_s=1.0))
    found = list(examine(Subject(CONFIG, "x", None), deep=False, progress=lambda _: None))
    assert named(found, "cores").severity == "error"
    assert named(found, "gloo").severity == "ok"


def test_the_doctor_itself_imports_no_torch_and_its_json_is_one_line():
    code = (
        "import sys\nfrom leeway.services import cli\n"
        "from leeway.services.doctor import transfer\n"
        "transfer.measure = lambda *_: transfer.Report(gib_per_s=1.0)\n"
        "code = cli.app(['doctor', '--json'], standalone_mode=False)\n"
        "print(code, [m for m in ('torch', 'vllm', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, last = done.stdout.splitlines()
    answer = json.loads(line)
    assert last == f"{answer['exit_code']} []"
    assert answer["severity"] == worst([Finding(**each) for each in answer["findings"]])


def test_a_run_directory_and_a_configuration_contradict_each_other(tmp_path: Path):
    from leeway.replay.errors import ConfigurationError

    run = create_run(load(None, [f"directory={tmp_path}"]))
    with pytest.raises(ConfigurationError, match="leave out --config and --set, or RUN_DIR"):
        command.subject_of(str(run.root), None, None, ["seed=1"])
