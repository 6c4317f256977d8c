"""`leeway bench stability` with real arms: its table, and a second call that has nothing to run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "deploy" / "configs" / "sweep-lags.toml"


@pytest.mark.timeout(500)
def test_quick_tabulates_four_objectives_and_a_second_call_runs_no_arm(tmp_path: Path):
    command = [sys.executable, "-m", "leeway.services.cli", "bench", "stability", "--quick"]
    command += ["--json", "--file", str(FILE), "--out", str(tmp_path / "out")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert first.returncode == 0, first.stderr
    line = json.loads(first.stdout)
    assert (line["num_arms"], line["num_ended"], line["num_failed"]) == (4, 4, 0)
    for objective in ("ppo", "grpo", "so-ppo", "so-grpo"):
        assert line[f"staleness/{objective}/2"] == 2.0
        assert 0 <= line[f"exact_match/{objective}/2"] <= 1
        assert line[f"ctn_norm/{objective}/2"] >= 0
    assert "says nothing about learning" in first.stderr

    second = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert json.loads(second.stdout) == line
    assert "beside each other" not in second.stderr
