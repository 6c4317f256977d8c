"""Lists of tables, free tables and the keys of environment, reward and data in a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from leeway.replay.errors import ConfigurationError, DataError
from leeway.services.config import RunConfig, check_files, describe, dump, load


@pytest.fixture
def run_file(tmp_path: Path):
    def _write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load(path, overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def questions(path: Path, *ids: str, **fields: object) -> Path:
    lines = (
        json.dumps({"id": i, "question": f"{path.stem} {i}?", "golden_answers": ["x"], **fields})
        for i in ids
    )
    path.write_text("\n".join(lines))
    return path


# --- sources ---

SOURCES = """
[[data.sources]]
path = "a.jsonl"
weight = 2

[[data.sources]]
path = "b.jsonl"
weight = 0.5
name = "second"
"""


def test_sources_are_read_and_their_paths_made_absolute(run_file, tmp_path: Path):
    questions(tmp_path / "a.jsonl", "1")
    questions(tmp_path / "b.jsonl", "2")
    first, second = load(run_file(SOURCES)).data.sources
    assert (first.path, first.weight, first.name) == (str(tmp_path / "a.jsonl"), 2.0, None)
    assert (second.path, second.weight, second.name) == (
        str(tmp_path / "b.jsonl"),
        0.5,
        "second",
    )


def test_sources_are_one_value_on_the_command_line(tmp_path: Path):
    path = questions(tmp_path / "a.jsonl", "1")
    config = load(
        None, [f'data.sources=[{{path="{path}", weight=1}}, {{path="bundled", weight=3}}]']
    )
    assert [(s.path, s.weight) for s in config.data.sources] == [(str(path), 1), ("bundled", 3)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[{path=3}]", "data.sources[0].path is 3; it must be a string"),
        (
            '[{path="bundled", weight=0}]',
            "data.sources[0].weight is 0; it must be a number greater",
        ),
        ('[{path="bundled", wieght=1}]', "data.sources[0].wieght is not a key; a table of data."),
        ("[{weight=1}]", "data.sources[0] has no path; a table of data.sources holds path, weight"),
        ('["a.jsonl"]', 'data.sources[0] is "a.jsonl", a string; it must be a table with path'),
        ('"a.jsonl"', 'data.sources is "a.jsonl", a string; it must be a list of tables with path'),
        ('[{path="bundled", weight=inf}]', "data.sources is inf; it must be a finite number"),
        ('[{path="bundled", weight=1}, {path="b"}]', "a weight to some sources only"),
        ('[{path="no.jsonl"}]', 'data.sources[0].path = "no.jsonl" does not exist'),
        ('[{path="bundled"}, {path="bundled"}]', "data.sources[1] is the same file as"),
    ],
)
def test_a_wrong_source_is_named_by_its_place(value: str, words: str):
    assert words in refusal(None, f"data.sources={value}")


def test_one_path_and_sources_together_are_refused(run_file, tmp_path: Path):
    path = questions(tmp_path / "a.jsonl", "1")
    message = refusal(None, f"data.train={path}", 'data.sources=[{path="bundled"}]')
    assert "data.train is not read beside data.sources" in message


def test_a_source_that_is_also_held_out_is_refused(tmp_path: Path):
    path = questions(tmp_path / "a.jsonl", "1")
    message = refusal(None, f'data.sources=[{{path="{path}"}}]', f"data.held_out={path}")
    assert "data.held_out is the same file as data.sources[0]" in message


def test_a_held_out_question_is_looked_for_in_every_source(tmp_path: Path):
    one, two = questions(tmp_path / "a.jsonl", "1"), questions(tmp_path / "b.jsonl", "2")
    held_out = questions(tmp_path / "h.jsonl", "3", question="B  2?")
    config = load(
        None,
        [f'data.sources=[{{path="{one}"}}, {{path="{two}"}}]', f"data.held_out={held_out}"],
    )
    with pytest.raises(DataError, match="'3' has the text of training question '2'"):
        check_files(config)


# --- free tables ---


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", made)
    return made


OPTIONS = """
[environment]
factory = "mine:build"

[environment.options]
level = 3
tools = [{ name = "a b", cost = 0.5 }, { name = "c" }]
"deep er" = { on = true }
"""


def test_options_are_handed_on_as_they_are_written(run_file):
    assert load(run_file(OPTIONS)).environment.options == {
        "level": 3,
        "tools": [{"name": "a b", "cost": 0.5}, {"name": "c"}],
        "deep er": {"on": True},
    }


def test_an_option_is_set_on_the_command_line_by_its_own_key(run_file):
    config = load(
        run_file(OPTIONS),
        ["environment.options.level=4", "environment.options.inner.word=yes", "name=x"],
    )
    options = config.environment.options
    assert (options["level"], options["inner"]) == (4, {"word": "yes"})


def test_an_option_may_not_be_infinite(run_file):
    assert "environment.options is nan" in refusal(
        run_file(OPTIONS), "environment.options.level=nan"
    )


def test_tables_are_dumped_as_they_are_read(run_file, tmp_path: Path):
    questions(tmp_path / "a.jsonl", "1")
    questions(tmp_path / "b.jsonl", "2")
    config = load(run_file(SOURCES + OPTIONS))
    assert load(run_file(dump(config))) == config


def test_options_of_the_search_environment_are_refused():
    assert "not read by the search environment" in refusal(None, "environment.options.a=1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment.factory=mine", "neither search nor of the form package.module:function"),
        ("reward.answer=bleu", "must be one of auto, exact-match, f1, substring, multiple-choice"),
        ("rollout.format_penalty=0.2", "did you mean reward.format_penalty?"),
        ("search.max_trajectory_tokens=2000", "does nothing above policy.max_model_len = 1024"),
        ("search.max_trajectory_tokens=64", "no room for a prompt within search.max_trajectory"),
    ],
)
def test_a_setting_that_does_nothing_is_refused(override: str, words: str):
    assert words in refusal(None, override)


@pytest.mark.parametrize("prompt", ["data", "instructions"])
def test_other_words_and_a_template_together_are_refused(prompt: str):
    message = refusal(None, f"search.prompt={prompt}", "search.prompt_template={question}")
    assert "search.prompt_template is not read" in message


# --- before anything starts ---


def test_a_broken_factory_is_refused_with_the_files(factory: ModuleType):
    factory.build = lambda context: object()  # type: ignore[attr-defined]
    config = load(None, ["environment.factory=mine:build"])
    with pytest.raises(ConfigurationError, match="returned an object, which is no Environment"):
        check_files(config)


def test_a_reward_that_cannot_be_imported_is_refused_with_the_files():
    config = load(None, ["reward.answer=no_such_module:f"])
    with pytest.raises(ConfigurationError, match="there is no module no_such_module"):
        check_files(config)


def test_a_chat_template_that_the_model_lacks_is_refused_with_the_files():
    with pytest.raises(ConfigurationError, match="the model has no chat template"):
        check_files(load(None, ["search.chat_template=on"]))


def test_questions_without_messages_are_refused_where_they_are_wanted(tmp_path: Path):
    path = questions(tmp_path / "a.jsonl", "1")
    config = load(None, [f"data.train={path}", "search.prompt=data"])
    with pytest.raises(DataError, match="'1' carries no messages"):
        check_files(config)
    with pytest.raises(DataError, match="carries no messages"):
        check_files(load(None, ["search.prompt=data"]))


def test_the_default_configuration_passes_every_check():
    check_files(RunConfig())


def test_the_reference_has_a_section_for_a_table_of_a_list():
    page = describe()
    assert "## `[[data.sources]]`" in page
    assert "| `path` | a string | none: it must be given |" in page
