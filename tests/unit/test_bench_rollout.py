"""The bench of the rollout worker: both sides play the same lengths, and a turn has its size."""

import asyncio
import json
import sys
import types

import numpy as np
import pytest
from typer.testing import CliRunner

from leeway.actors.config import SearchConfig
from leeway.actors.environment import Question
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.tokens import Tokens
from leeway.replay.errors import ConfigurationError, WaitTimeout
from leeway.replay.schema import PolicyVersion, Trajectory, Turn
from leeway.replay.synthetic import build_group
from leeway.services import cli
from leeway.services.bench import rollout, rollout_engine, rollout_overhead
from leeway.services.bench.loop_lag import loop_lags, percentile_ms
from leeway.services.bench.result import BenchResult
from leeway.services.bench.rollout_load import NUM_TURNS, Load, Script, next_prompts, waves
from leeway.services.bench.rollout_pieces import CodecOnly, InstantRetriever

QUESTION = Question(id="q", question="Which?", golden_answers=("krone",))
TINY = Load(num_in_flight=8, num_episodes=16, turn_tokens=2, observation_tokens=40)


def test_a_turn_has_100_generated_about_300_observed_and_a_prompt_of_about_150_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rollout_overhead, "NUM_EPISODES", 16)
    measured = rollout_overhead.measure(num_windows=2, turns_per_window=60)
    assert measured.turn_tokens == 100
    assert 250 <= measured.observation_tokens <= 400
    assert 120 <= measured.prompt_tokens <= 180
    assert measured.num_turns >= 120
    assert 8 <= measured.num_in_flight <= 16
    assert measured.cpu_ms_per_turn > 0
    assert measured.lag_max_ms >= measured.lag_p99_ms


def trajectory() -> Trajectory:
    """2 prompt, 1 generated, 3 observed, 2 generated."""
    return Trajectory(
        trajectory_id="g-0",
        token_ids=np.asarray([1, 2, 10, 21, 22, 23, 11, 12], np.int32),
        turns=(Turn(2, 1, 3, "search"), Turn(6, 2, 0, "answer")),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        reward=0.0,
        stop_reason="answer",
        scores={},
        duration_s=0.0,
    )


def test_a_script_is_a_trajectory_without_what_the_model_said():
    assert Script.of(trajectory()) == Script([1, 2], [[21, 22, 23]])


def test_a_renamed_script_has_another_first_token_only():
    assert Script([1, 2], [[3]]).renamed(9) == Script([9, 2], [[3]])


def test_the_next_prompt_is_the_last_one_its_tokens_and_its_observation():
    script = Script([1, 2], [[21, 22, 23]])
    second = next_prompts([[1, 2]], [[15]], [script], 0)
    assert second == [[1, 2, 15, 21, 22, 23]]
    assert next_prompts(second, [[16, 17]], [script], 1) == [[1, 2, 15, 21, 22, 23, 16, 17]]


def test_a_wave_has_as_many_episodes_as_the_engine_has_rows():
    scripts = [Script([i], []) for i in range(20)]
    assert [len(wave) for wave in waves(scripts, TINY)] == [8, 8, 4]


class Seven:
    """A policy that answers every request with max_tokens times the token 7."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.prompts.append(request.prompt_ids)
        num = request.max_tokens
        return Completion(
            token_ids=[7] * num, logprobs=[-1.0] * num, versions=[0] * num, finish="length"
        )

    async def version(self) -> PolicyVersion:
        return PolicyVersion(0)

    async def close(self) -> None: ...


async def test_rollout_and_waves_send_prompts_of_the_same_lengths():
    rolled, waved = Seven(), Seven()
    played, scripts = await rollout_engine.RolloutSide(rolled, TINY).play()
    renamed = [script.renamed(0) for script in scripts]
    waited = await rollout_engine.in_waves(waved, renamed, TINY)
    assert len(rolled.prompts) == TINY.num_episodes * NUM_TURNS
    assert sorted(map(len, waved.prompts)) == sorted(map(len, rolled.prompts))
    # But for their first token they are the same prompts, as this model always says the same.
    assert sorted(p[1:] for p in waved.prompts) == sorted(p[1:] for p in rolled.prompts)
    assert {prompt[0] for prompt in waved.prompts} == {0}
    assert all(len(ids) == 40 for script in scripts for ids in script.observations)
    assert played.wall_s > 0
    assert waited.wall_s > 0


async def test_an_action_is_decided_by_the_turn_and_not_by_the_model():
    environment = rollout_engine.FixedTurns(
        SearchEnvironment(SearchConfig(), 0.1, InstantRetriever([]))
    )
    environment._search._retriever = Once()  # pyright: ignore
    said = "<answer>krone</answer>"
    steps = [await environment.step(QUESTION, said, turns_left) for turns_left in (2, 1, 0)]
    assert [step.action for step in steps] == ["search", "search", "answer"]
    assert [step.is_terminal for step in steps] == [False, False, True]


class Once:
    async def search(self, query: str, top_k: int) -> list[object]:
        return []


def test_the_endless_model_has_no_end_of_sequence_token():
    with rollout_engine.endless_model() as folder:
        assert Tokens.load(folder).eos_id is None
        # Left out, transformers and vLLM would take the architecture's own.
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None
    assert not folder.exists()


async def test_the_last_slot_filled_sets_the_event_and_more_are_refused():
    replay = CodecOnly(2)
    version = Seven().version
    slots = await replay.admit(5, version, 0.01)
    assert len(slots) == 2
    with pytest.raises(WaitTimeout):
        await replay.admit(1, version, 0.01)
    await replay.add(slots[0], build_group(slots[0], None, 1, 8))
    assert not replay.filled.is_set()
    await replay.add(slots[1], build_group(slots[1], None, 1, 8))
    assert replay.filled.is_set()
    # build_group: 2 prompt, 2 generated, 2 observed, 2 generated
    assert (replay.num_turns, replay.num_generated, replay.num_observed) == (4, 8, 4)
    assert (replay.num_prompt, replay.num_observations, replay.groups) == (4, 2, [])


def test_the_ratio_is_over_the_faster_of_the_engine_s_own_ways():
    sides = [rollout.Side("", speed, None, []) for speed in (95, 80, 100)]
    assert rollout.engine_ratio(sides) == 0.95


def test_the_99th_percentile_of_1_to_100_is_99():
    assert percentile_ms([i / 1e3 for i in range(100, 0, -1)], 0.99) == pytest.approx(99)
    assert percentile_ms([], 0.99) == 0


async def test_a_loop_that_was_busy_for_20_ms_lags_as_long():
    async def busy() -> None:
        await asyncio.sleep(0.001)
        ends = asyncio.get_running_loop().time() + 0.02
        while asyncio.get_running_loop().time() < ends:
            pass

    task = asyncio.create_task(busy())
    async for lag_s in loop_lags():
        assert lag_s > 0.015
        break
    await task


def test_the_bench_runs_on_the_torch_engine_and_has_its_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_overhead, "NUM_EPISODES", 16)
    plan = rollout.Plan(num_windows=1, turns_per_window=32, load=TINY, repeats=1)
    result = rollout.measure_all(plan, "torch")
    assert {
        *("turns_per_s", "cpu_ms_per_turn", "engine_ratio", "lag_p99_ms", "lag_max_ms"),
        *("rollout_tokens_per_s", "engine_tokens_per_s", "num_in_flight"),
    } <= set(result.keys)
    assert result.keys["engine"] == "torch"
    assert [len(row) for row in result.rows] == [len(result.columns)] * 3


# --- the command ---

RESULT = BenchResult("fake", ("case", "ms"), (("small", "1.5"),), {"engine_ratio": 0.97})


def test_the_command_hands_on_its_options_and_ends_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[tuple[bool, str]] = []
    module = types.ModuleType("leeway.services.bench.rollout")
    module.__dict__["run"] = lambda *, quick, backend: seen.append((quick, backend)) or RESULT
    monkeypatch.setitem(sys.modules, module.__name__, module)
    done = CliRunner().invoke(
        cli.app, ["bench", "rollout", "--json", "--quick", "--backend", "torch"]
    )
    assert (done.exit_code, seen) == (0, [(True, "torch")])
    assert json.loads(done.stdout)["engine_ratio"] == 0.97
    assert CliRunner().invoke(cli.app, ["bench", "rollout", "--backend", "tpu"]).exit_code == 2


def test_vllm_where_it_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="--backend torch"):
        rollout.run(quick=True, backend="vllm")


@pytest.mark.parametrize(
    ("quick", "is_installed", "expected"),
    [(False, True, "vllm"), (True, True, "torch"), (False, False, "torch")],
)
def test_auto_takes_vllm_where_there_is_time_and_a_vllm(
    monkeypatch: pytest.MonkeyPatch, quick: bool, is_installed: bool, expected: str
):
    seen: list[str] = []
    monkeypatch.setattr(rollout, "find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(rollout, "measure_all", lambda plan, name: seen.append(name) or RESULT)
    rollout.run(quick=quick)
    assert seen == [expected]
