"""Environments of the user's own: built in one place, refused in a sentence, played to the end."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from leeway.actors.config import EnvironmentConfig, RewardConfig, SearchConfig
from leeway.actors.environment import EnvironmentContext, Outcome, Question, Step
from leeway.actors.environment_factory import build_environment, check_factory
from leeway.actors.rollout import Limits, check_limits, play
from leeway.actors.scripted_policy import ScriptedPolicy
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.retriever import Passage
from leeway.actors.tokenizer_facts import TokenizerFacts
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import Group, GroupId, Trajectory, check_group

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


class NoPassages:
    async def search(self, query: str, top_k: int) -> list[Passage]:
        return []

    async def close(self) -> None: ...


class Good:
    stop = ("</answer>",)
    observation_end = ""

    def prompt(self, question: Question) -> str:
        return "?"

    async def step(self, question: Question, generated: str, turns_left: int) -> Step:
        return Step(action="answer", observation="", is_terminal=True)

    def score(self, question: Any, turns: Any, steps: Any, stop_reason: Any) -> Outcome:
        return Outcome(reward=0.0, scores={"exact_match": 0.0})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module of the user's, called mine."""
    made = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", made)
    return made


def build(factory: str = "mine:build", reward: str = "auto", **options: object) -> Any:
    return build_environment(
        EnvironmentConfig(factory=factory, options=options),
        SearchConfig(),
        RewardConfig(answer=reward, format_penalty=0.3),
        NoPassages(),
        TokenizerFacts(),
    )


def refusal(factory: str = "mine:build", **keys: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        build(factory, **keys)
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def test_search_is_the_default_and_gets_the_reward_table():
    game = build("search")
    assert isinstance(game, SearchEnvironment)
    question = Question(id="q", question="?", golden_answers=("a",))
    step = await game.step(question, "hello", 0)
    assert game.score(question, ["hello"], [step], "invalid").reward == pytest.approx(-0.3)


def test_the_factory_gets_one_context_with_everything(module: ModuleType):
    seen: list[EnvironmentContext] = []
    module.build = lambda context: seen.append(context) or Good()  # type: ignore[attr-defined]
    assert isinstance(build(level=3), Good)
    [context] = seen
    assert context.options == {"level": 3}
    assert (context.search.top_k, context.reward.format_penalty) == (2, 0.3)
    assert isinstance(context.retriever, NoPassages)
    assert context.tokenizer == TokenizerFacts()


def test_a_module_that_is_not_there_is_named_with_the_remedy():
    assert refusal("nowhere.to_be:build") == (
        'environment.factory = "nowhere.to_be:build": there is no module nowhere; install its'
        " package, or put its folder on PYTHONPATH"
    )


def test_a_name_that_is_not_there_is_named(module: ModuleType):
    assert refusal() == 'environment.factory = "mine:build": mine has no build'


def test_a_module_that_fails_is_refused_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_module.py").write_text("import json\n1 / 0\n")
    (tmp_path / "lacking_module.py").write_text("import nowhere_else\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported: ZeroDivisionError" in refusal("broken_module:build")
    assert "No module named 'nowhere_else'" in refusal("lacking_module:build")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop": "</answer>"}, "stop must be a tuple of texts"),
        ({"stop": ("",)}, "stop must be a tuple of texts"),
        ({"observation_end": None}, "observation_end must be a text"),
        ({"prompt": None}, "it has no method prompt"),
        ({"prompt": lambda self: "?"}, "prompt must take 1 arguments beside self"),
        ({"step": lambda self, a, b, c: None}, "step must be an async function"),
        ({"score": lambda self, a: None}, "score must take 4 arguments beside self"),
    ],
)
def test_an_object_that_breaks_the_protocol_is_refused(module: ModuleType, changes, words: str):
    module.build = lambda context: type("Mine", (Good,), changes)()  # type: ignore[attr-defined]
    message = refusal()
    assert "returned a Mine, which is no Environment: " in message
    assert words in message


def test_a_factory_that_fails_or_is_none_is_refused(module: ModuleType):
    module.build = lambda context: context.options["level"]  # type: ignore[attr-defined]
    assert "failed: KeyError: 'level'" in refusal()
    module.build = 3  # type: ignore[attr-defined]
    assert "is no function" in refusal()


def test_a_factory_may_not_search_while_it_is_checked(module: ModuleType):
    def build(context: EnvironmentContext) -> Good:
        context.retriever.search("a", 1).send(None)  # type: ignore[attr-defined]
        return Good()

    module.build = build  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="search in step, not in the factory"):
        check_factory(
            EnvironmentConfig(factory="mine:build"),
            SearchConfig(),
            RewardConfig(),
            TokenizerFacts(),
        )


async def test_a_reward_function_of_the_users_is_paid(module: ModuleType):
    module.length = lambda answer, question: len(answer or "") / 10  # type: ignore[attr-defined]
    game = build("search", reward="mine:length")
    question = Question(id="q", question="?", golden_answers=("a",))
    turn = "<answer>krone</answer>"
    step = await game.step(question, turn, 0)
    assert game.score(question, [turn], [step], "answer").reward == pytest.approx(0.5)


def test_a_reward_function_that_is_not_there_is_refused(module: ModuleType):
    assert refusal("search", reward="mine:none") == 'reward.answer = "mine:none": mine has no none'


# --- the page ---


@pytest.fixture
def page(module: ModuleType) -> dict[str, Any]:
    text = PAGE.read_text(encoding="utf-8")
    for body in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(body, str(PAGE), "exec"), vars(module))
    return vars(module)


def test_the_reward_of_the_page_pays_half_for_a_neighbouring_year(page: dict[str, Any]):
    question = Question(id="q", question="?", golden_answers=("1703",))
    paid = [page["close_year"](a, question) for a in ("1703", " 1704", "1705", "May 1703", None)]
    assert paid == [1.0, 0.5, 0.0, 0.0, 0.0]


async def play_sum(game: Any, script: dict[str, str], folder: Path) -> tuple[Trajectory, str]:
    write_byte_tokenizer(folder)
    tokens = Tokens.load(folder)
    limits = Limits(max_turns=3, max_turn_tokens=60, max_observation_tokens=80, max_model_len=600)
    check_limits(limits, game, tokens)
    question = Question(id="q", question="What is 12 times 12?", golden_answers=("144",))
    trajectory = await play(question, ScriptedPolicy(tokens, script), game, tokens, limits, "g-0")
    group = Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=(trajectory,))
    check_group(group)
    return trajectory, tokens.decode(trajectory.token_ids.tolist())


async def test_the_calculator_of_the_page_is_played_to_its_end(
    page: dict[str, Any], tmp_path: Path
):
    script = {
        "12?\n": "<calculate>12 * 12</calculate>",
        "144</result>\n": "<answer>144</answer>",
    }
    played, text = await play_sum(build("mine:build", turn_cost=0.01), script, tmp_path)
    assert text.endswith("<calculate>12 * 12</calculate><result>144</result>\n<answer>144</answer>")
    assert [turn.action for turn in played.turns] == ["search", "answer"]
    assert played.turn_rewards == pytest.approx((-0.01, 0.99))
    assert (played.stop_reason, played.reward) == ("answer", pytest.approx(0.98))
    assert played.scores["exact_match"] == 1.0


async def test_the_calculator_of_the_page_corrects_and_gives_up(
    page: dict[str, Any], tmp_path: Path
):
    played, text = await play_sum(build(), {"": "<calculate>x</calculate>"}, tmp_path)
    assert text.count("I can add, subtract and multiply") == 2
    assert (played.stop_reason, played.reward) == ("turns", 0.0)
    other, _ = await play_sum(build(), {"": "144"}, tmp_path)
    assert (other.stop_reason, other.reward) == ("invalid", 0.0)
