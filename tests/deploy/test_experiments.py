"""deploy/experiments/run.py: what it brings back, and what the next call goes on from."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest

from leeway.services.experiments.sweep_folder import SweepFolder
from leeway.services.experiments.sweep_report import write_report
from tests.unit.sweep_results import arm, leave

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load("run")


@pytest.fixture(scope="module")
def smollm2() -> ModuleType:
    return load("smollm2")


def load(name: str) -> ModuleType:
    file = ROOT / "deploy" / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def swept(root: Path) -> SweepFolder:
    results = [
        arm("grpo", 0, 0, 0.9, is_scan=True), arm("grpo", 0, 1, 0.94), arm("grpo", 2, 0, 0.6),
    ]  # fmt: skip
    failed = arm("ppo", 2, 0, lags=[], status="failed", reason="OutOfMemoryError: CUDA")
    results.append(msgspec.structs.replace(failed, curves={}))
    folder = leave(root / "sweep-a", results, {"grpo": 1e-4})
    step = folder.arm(results[1].spec.name) / "checkpoint" / "step-00000003"
    step.mkdir(parents=True)
    (step / "model.safetensors").write_bytes(b"large")
    write_report(folder)
    return folder


def test_an_archive_holds_what_a_later_call_needs_and_no_weights(
    program: ModuleType, tmp_path: Path
):
    folder = swept(tmp_path / "state")
    program._pack(folder.root, tmp_path / "sweep-a.tar.gz")
    with tarfile.open(tmp_path / "sweep-a.tar.gz") as packed:
        names = packed.getnames()
    assert {"sweep-a/plan.json", "sweep-a/rates.json", "sweep-a/grid.json"} <= set(names)
    assert sum(name.endswith("/result.json") for name in names) == 4
    assert "sweep-a/report/sweep.html" in names
    assert not [name for name in names if "checkpoint" in name]

    program._take_in(tmp_path, tmp_path / "elsewhere", "sweep-a")
    brought = SweepFolder(tmp_path / "elsewhere" / "sweep-a")
    assert brought.read_grid() == folder.read_grid()
    assert [r.spec.name for r in brought.results()] == [r.spec.name for r in folder.results()]


def test_what_has_ended_is_packed_while_a_sweep_still_runs(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(program, "PACK_EVERY_S", 0.1)
    folder, archive = swept(tmp_path / "state"), tmp_path / "sweep-a.tar.gz"
    until_packed = (
        "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).is_file(): time.sleep(0.01)"
    )
    command = [sys.executable, "-c", until_packed, str(archive)]
    assert program._ended(command, 60.0, folder.root, archive) == 0
    with tarfile.open(archive) as packed:
        assert sum(name.endswith("/result.json") for name in packed.getnames()) == 4


def test_a_sweep_that_does_not_end_in_time_is_killed(program: ModuleType, tmp_path: Path):
    started = tmp_path / "pid"
    sleeping = (
        f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))"
    )
    command = [sys.executable, "-c", f"{sleeping}\ntime.sleep(60)"]
    with pytest.raises(subprocess.TimeoutExpired):
        program._ended(command, 2.0, tmp_path / "none", tmp_path / "none.tar.gz")
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_what_a_machine_has_is_not_replaced_by_what_is_brought(program: ModuleType, tmp_path: Path):
    folder = swept(tmp_path / "state")
    program._pack(folder.root, tmp_path / "sweep-a.tar.gz")
    newer = folder.arm("newer") / "result.json"
    newer.parent.mkdir()
    newer.write_text("{}")
    program._take_in(tmp_path, tmp_path / "state", "sweep-a")
    assert newer.is_file()


def test_the_table_tells_scores_by_realised_staleness_and_what_failed(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = swept(tmp_path / "state")
    program._table(folder.root)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "scan grpo 0.0001 0.900 <" in lines
    assert "grpo 0.00 0.940 1 0" in lines
    assert "grpo 2.00 0.600 1 0" in lines
    assert "grpo 0.00 4 1 of 1 runs" in lines
    assert "grpo 2.00 none in 4 0 of 1 runs" in lines
    assert "ppo - - 0 1" in lines
    assert program._wants_memory(folder.root)


def test_a_sweep_without_an_ended_run_has_no_table(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program._table(leave(tmp_path / "begun", []).root)
    said = capsys.readouterr()
    assert said.out == "" and "no arm of" in said.err


def test_the_share_of_a_gpu_is_what_holds_so_many_gib_on_this_one(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 81920\n")  # MiB: 80 GiB
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert program._shares("sweep-a", is_cpu=False) == (0.1, 0.175, 0.25)
    assert program._shares("sweep-c", is_cpu=False) == (0.25, 0.375, 0.562)
    assert program._shares("sweep-c-critic", is_cpu=False) == (0.212, 0.375, 0.562)
    assert program._shares("sweep-a", is_cpu=True) == (0.0,)
    asked.write_text("#!/bin/sh\necho 10240\n")
    assert program._shares("sweep-a", is_cpu=False) == (0.8, 1.0, 1.0)


@pytest.mark.parametrize(("num_gpus", "is_run"), [(1, False), (2, True)])
def test_a_live_run_has_two_gpus_to_itself_or_is_left_out(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_gpus: int,
    is_run: bool,
):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "echo 81920\n" * num_gpus)
    (tmp_path / "nvidia-smi").chmod(0o755)
    told = mps(tmp_path, 0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(program, "NEEDS", {})
    asked: list[list[str]] = []

    def run(command: list[str], limit_s: float, folder: Path, archive: Path) -> int:
        asked.append(command)
        return 0

    monkeypatch.setattr(program, "_ended", run)
    out = ["--minutes", "9", "--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    monkeypatch.setattr("sys.argv", ["run.py", *out, "--only", "sweep-c-live"])
    assert program.main() == 0
    assert [command[command.index("--num-gpus") + 1] for command in asked] == ["2"] * is_run
    assert ("left out: it needs two GPUs" in capsys.readouterr().err) is not is_run
    assert not told.exists()  # each GPU has one process


def mps(folder: Path, exit_code: int) -> Path:
    """Stands in for nvidia-cuda-mps-control: it notes how it was called, where, and with what."""
    told = folder / "told.txt"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$* $CUDA_MPS_PIPE_DIRECTORY" >> {told}\n'
        f"cat >> {told}\n"
        f"exit {exit_code}\n"
    )
    program.chmod(0o755)
    return told


def test_runs_share_a_gpu_by_mps_of_their_own_which_is_ended(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = mps(tmp_path, 0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(program.MPS_PIPES, raising=False)
    with pytest.raises(KeyError), program.shared_gpu():
        pipes = os.environ[program.MPS_PIPES]
        assert told.read_text() == f"-d {pipes}\n"
        raise KeyError("a sweep failed")
    assert told.read_text() == f"-d {pipes}\n {pipes}\nquit\n"
    assert program.MPS_PIPES not in os.environ
    assert not Path(pipes).exists()


def test_without_mps_the_runs_take_turns(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    mps(tmp_path, 1)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(program.MPS_PIPES, raising=False)
    with program.shared_gpu():
        assert program.MPS_PIPES not in os.environ
    assert capsys.readouterr().err == "NVIDIA's MPS did not start; the runs take turns on the GPU\n"


def test_an_mps_that_somebody_runs_already_is_left_alone(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = mps(tmp_path, 0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(program.MPS_PIPES, "/elsewhere")
    with program.shared_gpu():
        assert os.environ[program.MPS_PIPES] == "/elsewhere"
    assert not told.exists()


# ---- the model of sweep-c


def test_the_halves_of_a_head_that_rotate_together_come_apart_again(smollm2: ModuleType):
    """Two heads of four rows, as llama.cpp keeps them: a0 b0 a1 b1."""
    kept = np.array([[0.0], [2], [1], [3], [10], [12], [11], [13]], np.float32)
    assert smollm2.unpermuted(kept, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_every_digit_is_a_token_and_no_text_is_a_control_token(smollm2: ModuleType):
    facts = {
        "tokenizer.ggml.tokens": ["<|end|>", "1", "9", "a", "b", "ab", "\u0120"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "1 9"],
    }
    facts["tokenizer.ggml.tokens"].append("19")
    facts["tokenizer.ggml.token_type"].append(1)
    tokenizer = smollm2.tokenizer_of(facts)
    assert tokenizer.encode("ab 19<|end|>").tokens == ["ab", "\u0120", "1", "9", "<|end|>"]
    assert tokenizer.decode([5, 6, 1, 2]) == "ab 19"


def test_questions_of_one_search_are_left(smollm2: ModuleType):
    one, two = ('{"id": "a", "metadata": {"hops": 1}}', '{"id": "b", "metadata": {"hops": 2}}')
    assert list(smollm2.of_one_hop([one, two])) == [f"{one}\n"]


def test_the_last_norm_alone_carries_the_factor_of_the_logits(
    smollm2: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    kept = SimpleNamespace(dequantize=lambda data, _: data)
    monkeypatch.setitem(sys.modules, "gguf", kept)
    one = np.array([1.5, -3.0], np.float32)
    names = ("output_norm.weight", "blk.0.attn_norm.weight", "token_embd.weight")
    reader = SimpleNamespace(
        tensors=[SimpleNamespace(name=n, data=one, tensor_type=0) for n in names]
    )
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    found = {name: weight.tolist() for name, weight in smollm2.weights_of(reader, heads)}
    assert found == {
        "model.norm.weight": [3.0, -6.0],
        "model.layers.0.input_layernorm.weight": [1.5, -3.0],
        "model.embed_tokens.weight": [1.5, -3.0],
    }
