"""Imports point down, and each outside library has its place."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("actors", "learner", "replay", "services")
FILES = sorted(file.relative_to(ROOT) for part in PARTS for file in (ROOT / part).rglob("*.py"))

BELOW = {
    "replay": {"replay"},
    "actors": {"actors", "replay"},
    "learner": {"learner", "replay"},
    "services": {"actors", "learner", "replay", "services"},
}
ANYWHERE = {"msgspec", "numpy", "pydantic", "tenacity"}
PLACES = {
    "Stemmer": ["actors/search/words.py"],
    "bm25s": ["actors/search/words.py", "services/bench/retriever.py"],
    "faiss": ["actors/search/dense.py"],
    "fastapi": [
        "actors/search/retriever_app.py",
        "actors/search/retriever_server.py",
        "services/api/*",
    ],
    "httpx": ["actors/search/retriever.py", "services/status_client.py"],
    "httpx_sse": ["services/status_client.py"],
    "jinja2": ["actors/chat_template.py"],
    "matplotlib": [
        "services/experiments/sweep_canvas.py",
        "services/experiments/sweep_plots.py",
        "services/report_plots.py",
    ],
    "opentelemetry": ["replay/tracing.py"],
    "prometheus_client": ["services/api/metrics.py", "services/soak/services.py"],
    "psutil": ["services/supervision.py"],
    "pydantic_core": ["services/config_text.py"],
    "pyarrow": [
        "actors/search/documents.py",
        "actors/search/question_parquet.py",
        "services/evaluation/samples.py",
        "services/experiments/sweep_tables.py",
    ],
    "ray": [
        "actors/serve_*.py",
        "services/experiments/ray_launcher.py",
        "services/serve_application.py",
        "services/wiring.py",
    ],
    "redis": [
        "replay/connection.py",
        "replay/redis_clients.py",
        "replay/wire.py",
        "services/bench/replay_baselines.py",
    ],
    "rich": ["services/*"],
    "safetensors": ["learner/*"],
    "starlette": ["actors/search/retriever_app.py", "services/api/*"],
    "tokenizers": ["actors/*", "services/processes/warmstart.py"],
    "torch": [
        "actors/*_policy.py",
        "actors/copy_plan.py",
        "actors/decode_graphs.py",
        "actors/decode_kernels.py",
        "actors/decoder.py",
        "actors/search/encoder.py",
        "actors/serve_app.py",
        "actors/serve_replicas.py",
        "actors/vllm_worker.py",
        "actors/weight_receiver.py",
        "learner/*",
        "replay/exposed_memory.py",
        "replay/flat_weights.py",
        "replay/transfer.py",
        "services/bench/*",
        "services/doctor/transfer_rank.py",
        "services/experiments/*",
        "services/learning.py",
        "services/processes/ranks.py",
        "services/processes/warmstart.py",
        "services/sinks/tensorboard_sink.py",
    ],
    "trackio": ["services/sinks/trackio_sink.py"],
    "transformers": [
        "actors/*",
        "learner/*",
        "services/bench/*",
        "services/processes/warmstart.py",
    ],
    "triton": ["actors/decode_kernels.py"],
    "typer": [
        "services/arguments.py",
        "services/bench/commands.py",
        "services/cli.py",
        "services/cli_help.py",
        "services/config_commands.py",
        "services/doctor/command.py",
        "services/dry_run.py",
        "services/evaluation/commands.py",
        "services/export.py",
        "services/process_commands.py",
        "services/replay_commands.py",
        "services/retriever_commands.py",
        "services/soak/command.py",
        "services/status_command.py",
        "services/sweep_commands.py",
        "services/timeline_command.py",
        "services/train_command.py",
        "services/trajectory_commands.py",
        "services/warmstart_command.py",
    ],
    "uvicorn": ["actors/search/retriever_server.py", "services/api/*"],
    "vllm": [
        "actors/vllm_*.py",
        "services/bench/engine.py",
        "services/bench/publish_native.py",
        "services/bench/rollout_offline.py",
    ],
    "wandb": ["services/sinks/wandb_sink.py"],
    "xxhash": ["replay/codec.py"],
    "zstandard": ["actors/search/documents.py", "replay/archive.py"],
}
VAGUE = {"common", "core", "helpers", "misc", "shared", "tools", "util", "utils"}


def imports(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, inside functions too; type-stub modules left out."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and file.parts[0] == "tests":
                continue  # a helper beside the test
            assert node.level == 0 and node.module, f"{file}: relative import"
            # `from leeway import replay` counts as leeway.replay.
            bare = node.module == "leeway"
            yield from (f"leeway.{alias.name}" for alias in node.names) if bare else [node.module]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_down(file: Path):
    allowed = BELOW[file.parts[0]]
    parts = {name.split(".")[1] for name in imports(file) if name.startswith("leeway.")}
    assert parts <= allowed, f"{file} may import from {sorted(allowed)} only"


def test_each_outside_library_is_imported_only_where_it_belongs():
    strays = [
        f"{file} imports {library}"
        for file in FILES
        for library in {name.partition(".")[0] for name in imports(file)}
        if library not in sys.stdlib_module_names | ANYWHERE | {"leeway", "_typeshed"}
        and not any(fnmatch(file.as_posix(), place) for place in PLACES.get(library, []))
    ]
    assert strays == []


def test_a_part_is_never_imported_by_its_bare_name():
    tests = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py")]
    roots = {file: {name.partition(".")[0] for name in imports(file)} for file in FILES + tests}
    assert [file for file, names in roots.items() if names & set(PARTS)] == []


def test_nothing_is_pickled():
    pickles = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
    found = [str(file) for file in FILES if pickles & set(imports(file))]
    # A baseline, which does as others do.
    assert found == ["services/bench/replay_baselines.py"]


def test_no_file_has_a_name_that_says_nothing():
    files = [file for part in PARTS for file in (ROOT / part).rglob("*")]
    assert [file for file in files if file.stem in VAGUE] == []
