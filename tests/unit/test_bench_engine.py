"""What `leeway bench engine` measures and prints."""

from __future__ import annotations

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.bench import engine
from leeway.services.bench.engine import Plan, Speed


def test_keys_are_of_the_case_with_most_rows():
    ours = [Speed(500.0, 12.0), Speed(3000.0, 10.0)]
    plain = [Speed(400.0, 30.0), Speed(1500.0, 40.0)]
    result = engine.result(Plan((16, 64), 128, 3), ours, plain)
    assert result.rows[0] == ("16 rows", "500", "400", "1.25", "12.0", "30.0")
    assert result.keys == {
        "speedup": 2.0,
        "tokens_per_s": 3000.0,
        "plain_tokens_per_s": 1500.0,
        "cpu_us_per_token": 10.0,
        "plain_cpu_us_per_token": 40.0,
        "num_rows": 64,
    }


async def test_every_row_is_asked_at_once_with_a_prompt_of_its_own():
    asked: list[tuple[str, tuple[int, ...]]] = []

    async def ask(name: str, ids: list[int]) -> int:
        asked.append((name, tuple(ids)))
        return 8

    speed = await engine._speed(ask, Plan((4,), 8, 2), 4)
    assert speed.tokens_per_s > 0
    assert len({name for name, _ in asked}) == 12
    assert len({ids for _, ids in asked[:4]}) == 4
    assert {len(ids) for _, ids in asked} == {engine.PROMPT_TOKENS}


async def test_a_turn_without_its_log_probs_is_no_result():
    async def ask(name: str, ids: list[int]) -> int:
        return 7

    with pytest.raises(AssertionError, match="log-probs"):
        await engine._speed(ask, Plan((4,), 8, 1), 4)


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"vllm is not installed here; install"):
        engine.run(quick=True)
