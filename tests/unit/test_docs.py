"""The documentation names only what exists: commands, options, keys, files, links, metrics."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import lzma
import re
import shlex
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
from typer.testing import CliRunner

from leeway.learner.objective.presets import PRESETS
from leeway.services import cli
from leeway.services.config import load
from leeway.services.config_text import describe, flatten, known_keys
from leeway.services.experiments.sweep_file import load_sweep
from leeway.services.layout import RunDirectory
from leeway.services.processes.warmstart import care_mix

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "actors" / "bundle"
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(BUNDLE.glob("*.md")),
]
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
TABLES = "policy|search|data|environment|reward|rollout|replay|learner|eval|api|metrics|tracing"
FOLDERS = {
    "actors",
    "deploy",
    "docs",
    "helm",
    "learner",
    "replay",
    "requirements",
    "services",
    "tests",
}
every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, body) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """Every `code span` of the prose."""
    prose = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(page: Path) -> Iterator[list[str]]:
    """Every command line as its words: `leeway ...`, `make ...` and `python -m ...`."""
    lines = [line for _, body in blocks(page) for line in body.splitlines()] + spans(page)
    for line in lines:
        if re.match(r"(\.venv/bin/)?(leeway|make|python -m) \S", line):
            words = shlex.split(line.removeprefix(".venv/bin/").partition(" > ")[0], comments=True)
            yield words[1:] if words[0] == "python" else words


def column(page: Path, heading: str) -> set[str]:
    """The code spans in the first column of the table below a heading."""
    section = read(page).partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


# --- commands ---


@every_page
def test_every_leeway_command_parses(page: Path):
    for name, *words in commands(page):
        if name == "leeway":
            check_leeway(words)


def check_leeway(words: list[str]) -> None:
    command, path = typer.main.get_command(cli.app), ["leeway"]
    if words[0].startswith("-"):
        names = {name for param in command.params for name in param.opts}
        assert words[0] in names | {"-h", "--help"}
        return
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words[0])
        command = command.commands[words.pop(0)]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(path) > 1, f"leeway {words} is no command"
    if path[1:] == ["warmstart"] and not words:
        return  # a bare name in a sentence has no options
    found = command.make_context(" ".join(path), list(words)).params
    if path[1:] == ["warmstart"]:
        care_mix(found["mix"], found["care"])
    assert CliRunner().invoke(cli.app, [*path[1:], "--help"]).exit_code == 0
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    files = [ROOT / word for word in words if word.endswith(".toml") and (ROOT / word).is_file()]
    if path[1] == "sweep":
        for file in files:
            load_sweep(file, overrides)
        return
    load(files[0] if files else None, overrides)


@every_page
def test_every_module_that_is_run_exists(page: Path):
    for option, *words in commands(page):
        if option == "-m":
            assert importlib.util.find_spec(words[0]), words[0]


@every_page
def test_every_make_target_exists(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    named = {words[1] for words in commands(page) if words[0] == "make"}
    assert named <= targets


@every_page
def test_every_import_of_a_python_block_works(page: Path):
    for language, body in blocks(page):
        for node in ast.walk(ast.parse(body)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


# --- keys ---


@every_page
def test_every_key_in_a_code_span_is_a_key(page: Path):
    pattern = rf"(?<![\w./])(?:{TABLES})\.[a-z_]+(?![\w/])"
    named = {key for span in spans(page) for key in re.findall(pattern, span)}
    files = {key for key in named if re.search(r"\.(json|jsonl|log|md|py|toml)$", key)}
    assert named - files <= set(known_keys())


@every_page
def test_every_toml_block_holds_keys_alone(page: Path):
    for language, body in blocks(page):
        if language == "toml":
            assert {key for key, _ in flatten(tomllib.loads(body))} <= set(known_keys())


def test_the_reference_of_keys_is_what_the_code_generates():
    assert read(ROOT / "docs" / "configuration.md") == describe(), (
        "write it again: leeway config schema --markdown > docs/configuration.md"
    )


def test_the_page_of_objectives_lists_every_preset_with_its_parts():
    page = read(ROOT / "docs" / "objectives.md")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    table = {row[0].strip("`"): row[1:] for row in rows if len(row) == 8 and row[0][0] == "`"}
    parts = {
        name: [
            *(p.ratio, p.surrogate, p.ctn, p.advantage, p.reduce, p.old),
            f"{p.eps_low:g} / {p.eps_high:g}" if p.clips else "",
        ]
        for name, p in PRESETS.items()
    }
    assert table == parts


def test_the_readme_names_every_objective():
    sentence = read(ROOT / "README.md").partition("The objectives are ")[2].partition(".")[0]
    assert set(re.findall(r"`([^`]+)`", sentence)) == set(PRESETS)


# --- files and links ---


@every_page
def test_every_relative_link_resolves(page: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", read(page))
    relative = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in relative if link and not (page.parent / link).exists()] == []


@every_page
def test_every_path_in_a_code_span_exists(page: Path):
    paths = [span for span in spans(page) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?|\w+/", span)]
    ours = [path for path in paths if path.partition("/")[0] in FOLDERS]
    assert [path for path in ours if not (ROOT / path).exists()] == []


@every_page
def test_every_test_in_a_code_span_exists(page: Path):
    source = "\n".join(read(file) for file in (ROOT / "tests").rglob("test_*.py"))
    named = {span for span in spans(page) if re.fullmatch(r"test_\w+", span)}
    assert [name for name in sorted(named) if f"def {name}(" not in source] == []


@every_page
def test_a_page_speaks_of_no_machine_and_no_package_host(page: Path):
    local = r"(?<![\w.~>])/(?:home|mnt|opt|root|srv|tmp|work)\b"
    hosts = r"pypi|pythonhosted|huggingface\.co|anaconda|artifactory|download\.pytorch|\bmirror"
    assert re.findall(f"{local}|{hosts}", read(page), re.IGNORECASE) == []


def test_the_readme_names_every_file_of_a_run():
    run = RunDirectory(Path("run"))
    paths = [getattr(run, n) for n, p in vars(RunDirectory).items() if isinstance(p, property)]
    named = {span.rstrip("/") for span in spans(ROOT / "README.md")}
    assert {path.name for path in paths} <= named


def test_the_picture_is_well_formed_named_and_has_a_dark_side():
    picture = ROOT / "docs" / "images" / "loop.svg"
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).getroot()]
    assert tags[:2] == ["title", "desc"]
    assert "prefers-color-scheme: dark" in read(picture)


# --- metrics and endpoints ---

METRICS = ROOT / "docs" / "metrics.md"


def test_the_page_names_every_metric_of_a_step():
    from leeway.learner.critic import CriticMetrics
    from leeway.learner.metrics import DataMetrics, PolicyMetrics, StepMetrics
    from leeway.services.step_records import ENGINE_TOTALS

    parts = (StepMetrics, PolicyMetrics, DataMetrics, CriticMetrics)
    fields = {name for part in parts for name in part.__struct_fields__}
    flat = fields - {"policy", "data", "critic", "scores", "staleness_histogram"}
    mappings = {"score/NAME", "staleness_histogram/K", "wait_s/REASON"}
    mappings |= {"dropped/REASON", "dropped_trajectories/REASON"}
    expected = flat | mappings | set(ENGINE_TOTALS) | set(names_written_by_the_learner())
    assert column(METRICS, "`metrics.jsonl`") == expected


def names_written_by_the_learner() -> Iterator[str]:
    """Keys of `line` in services/step_records.py, beside those of StepMetrics."""
    tree = ast.parse(read(ROOT / "services" / "step_records.py"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "line":
            yield ast.literal_eval(node.slice)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign) else targets
        names = {ast.unparse(target) for target in targets}
        if names & {"line", "numbers"} and isinstance(node.value, ast.Dict):
            yield from (ast.literal_eval(key) for key in node.value.keys if key is not None)


def test_the_page_names_every_number_of_a_publish():
    from leeway.learner.weights.publisher import Published

    assert column(METRICS, "`publishes.jsonl`") == set(Published.__struct_fields__)


def test_the_page_tells_every_prometheus_metric_with_its_kind_and_labels():
    from leeway.services.api.metrics import FAMILIES

    section = read(METRICS).partition("\n## Prometheus")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `leeway_")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    told = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels, _ in rows}
    assert len(told) == len(rows)
    assert told == {f"`{f.name}`": (f.kind, list(f.labels)) for f in FAMILIES}


def test_the_page_names_every_score():
    from leeway.actors.config import SearchConfig
    from leeway.actors.environment import Question
    from leeway.actors.search.environment import SearchEnvironment
    from leeway.actors.search.index import Bm25Index, Document
    from leeway.actors.search.retriever import LocalRetriever

    retriever = LocalRetriever(Bm25Index([Document("1", "Oslo", "a town")]))
    question = Question(id="q", question="?", golden_answers=("a",))
    outcome = SearchEnvironment(SearchConfig(), 0.1, retriever).score(question, [], [], "turns")
    named = {span.removeprefix("score/") for span in spans(METRICS) if span.startswith("score/")}
    assert named - {"NAME"} == {*outcome.scores, "think_tokens"}


def test_the_readme_names_endpoints_that_exist():
    from leeway.services.api.app import create_app

    nothing: Any = None  # only its routes are looked at
    app = create_app(nothing, nothing, nothing, nothing, run=ROOT, config=load(None), tokens=None)
    named = {span.removeprefix("GET ") for span in spans(ROOT / "README.md") if "GET /" in span}
    assert named == {"/livez", "/v1/status", "/metrics", "/v1/openapi.json"}
    assert named - {app.openapi_url} <= set(app.openapi()["paths"])


# --- cards ---


def test_the_data_card_counts_what_is_bundled():
    corpus = lzma.decompress((BUNDLE / "corpus.jsonl.xz").read_bytes()).decode()
    titles = lzma.decompress((BUNDLE / "titles.txt.xz").read_bytes()).decode()
    lines = [corpus, titles, read(BUNDLE / "train.jsonl"), read(BUNDLE / "held_out.jsonl")]
    counts = [f"{len(text.splitlines()):,}" for text in lines]
    assert [count for count in counts if count not in read(BUNDLE / "DATA_CARD.md")] == []


def test_the_model_card_counts_the_parameters():
    with (BUNDLE / "model" / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        size = 1
        for extent in tensor.get("shape", []):
            size *= extent
        total += size if name != "__metadata__" else 0
    assert f"{total:,}" in read(BUNDLE / "MODEL_CARD.md")
