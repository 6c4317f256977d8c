"""`leeway bench publish`: where it measures, what it refuses, and what its keys are made of."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.bench import publish
from leeway.services.bench.publish import Measured, Plan, run

KEYS = {
    "model", "transport", "pause_ms_p50", "pause_ms_p99", "gap_ms_p50", "usual_gap_ms_p50",
    "device_copy_ms", "bandwidth_ratio", "generation_ratio", "generation_ratio_without_break",
    "transfer_share", "native_pause_ms_p50", "logprob_gap_mean",
}  # fmt: skip


def measured(shape: str, **more: Any) -> Measured:
    """Pauses of 10, 20 and 30 ms; a transfer of 40 ms on the wire where the raw one takes 30."""
    return Measured(
        shape,
        num_bytes=2**30,
        transport="direct",
        pauses=[0.01, 0.03, 0.02],
        copies=[0.01],
        gaps=[0.05],
        wires=[0.04],
        transfers=[0.06],
        usual_gaps=[0.02],
        pairs=[(90, 100), (45, 50)],
        full_rates=[80.0],
        idle_rates=[100.0],
        transfer_share=0.5,
        raw_s=0.03,
        device_copy_s=0.004,
        **more,
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, Plan]]:
    """Model, whether on GPUs, and how much, of each measurement, none of which is made."""
    made: list[tuple[str, bool, Plan]] = []

    def measure(shape: str, plan: Plan, is_cuda: bool, transport: str) -> Measured:
        made.append((shape, is_cuda, plan))
        return measured(shape)

    monkeypatch.setattr(publish, "_measure", measure)
    return made


@pytest.mark.parametrize(
    ("num_gpus", "quick", "expected"),
    [
        (0, True, [("0.01B", False)]),
        (0, False, [("0.01B", False)]),
        (2, True, [("1.5B", True)]),
        (8, False, [("1.5B", True), ("7B", True)]),
    ],
)
def test_two_gpus_have_the_large_models_and_a_cpu_a_small_one(
    num_gpus: int,
    quick: bool,
    expected: list[tuple[str, bool]],
    asked: list[tuple[str, bool, Plan]],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(publish.torch.cuda, "device_count", lambda: num_gpus)
    run(quick=quick)
    assert [(shape, is_cuda) for shape, is_cuda, _ in asked] == expected
    assert all(plan.with_native == (num_gpus > 1 and not quick) for *_, plan in asked)


def test_one_gpu_is_refused_with_what_would_do(
    asked: list[tuple[str, bool, Plan]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publish.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"needs two GPUs.*CUDA_VISIBLE_DEVICES="):
        run(quick=True)
    assert asked == []


def test_staging_is_the_engine_s_of_two_gpus(
    asked: list[tuple[str, bool, Plan]], monkeypatch: pytest.MonkeyPatch
):
    for staging, words in (("sometimes", "take one of auto, always, never"), ("never", "torch's")):
        with pytest.raises(ConfigurationError, match=words):
            run(quick=True, staging=staging)
    monkeypatch.setattr(publish.torch.cuda, "device_count", lambda: 2)
    run(quick=True, staging="never")
    [(_, _, plan)] = asked
    assert plan.staging == "never"


def test_keys_are_those_of_the_largest_model_and_of_each_by_its_name():
    keys = publish._keys([measured("1.5B"), measured("7B", native_pauses=[0.1, 0.3, 0.2])])
    assert keys.keys() == {*KEYS, *(f"{key}@{m}" for key in KEYS for m in ("1.5B", "7B"))}
    assert keys["model"] == "7B"
    assert keys["pause_ms_p50"] == pytest.approx(20.0)
    assert keys["pause_ms_p99"] == pytest.approx(29.8)
    assert keys["device_copy_ms"] == pytest.approx(4.0)
    assert keys["bandwidth_ratio"] == pytest.approx(0.75)
    assert keys["generation_ratio"] == pytest.approx(0.9)
    assert keys["generation_ratio_without_break"] == pytest.approx(0.8)
    assert (keys["native_pause_ms_p50@7B"], keys["native_pause_ms_p50@1.5B"]) == (
        pytest.approx(200.0),
        publish.NOT_MEASURED,
    )


def test_an_engine_takes_versions_of_a_learner_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
):
    """The whole of it on the CPU, as short as it can be."""
    monkeypatch.setattr(publish, "WARM_S", 0.5)
    plan = Plan(("0.01B",), 2, 1, 0.5, 4, with_native=False, num_pairs=2)
    monkeypatch.setattr(publish, "_plan", lambda quick, is_cuda: plan)
    result = run(quick=True)
    assert result.keys.keys() == KEYS
    assert (result.keys["model"], result.keys["transport"]) == ("0.01B", "gloo")
    assert float(result.keys["logprob_gap_mean"]) < 1e-4
    assert all(float(result.keys[key]) > 0 for key in ("pause_ms_p50", "bandwidth_ratio"))
