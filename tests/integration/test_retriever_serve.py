"""`leeway retriever index` and `leeway retriever serve` as a person runs them, on real sockets."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from leeway.actors.search.retriever import HttpRetriever

WAIT_S = 60
CORPUS = [
    {"id": "no", "contents": '"Norway"\nIts capital is Oslo.'},
    {"id": "se", "contents": '"Sweden"\nIts capital is Stockholm.'},
]


def leeway(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "leeway.services.cli", "retriever", *map(str, arguments)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, CORPUS)))
    return file


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    folder = corpus.parent / "index"
    command = leeway("index", corpus, "--out", folder, "--json")
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S)
    built = json.loads(done.stdout)
    assert (built["kind"], built["num_documents"], built["encoder"]) == ("bm25", 2, None)
    return folder


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and its address; ended by its process id if a test has not."""
    command = leeway("serve", *arguments, "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)/retrieve", process.stdout.readline())
        assert found is not None, process.communicate(timeout=WAIT_S)
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WAIT_S)


def test_every_shape_is_answered_and_sigterm_ends_it_with_0(index: Path):
    with serving(index) as (process, url), httpx.Client(base_url=url, timeout=WAIT_S) as http:
        norway = {"id": "no", "contents": '"Norway"\nIts capital is Oslo.'}
        body = {"queries": ["oslo", "zebra"], "topk": 1, "return_scores": True}
        [[first], none] = http.post("/retrieve", json=body).json()["result"]
        assert (first["document"], none) == (norway, [])
        assert first["score"] > 0
        plain = http.post("/retrieve", json={"queries": ["oslo"]}).json()
        assert plain == http.post("/retrieve", json={"query": "oslo"}).json()
        assert plain == {"result": [[norway]]}
        assert http.post("/retrieve", content=b"{").status_code == 422
        assert http.get("/healthz").json()["num_documents"] == 2
        assert http.get("/healthz/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


async def test_the_client_of_a_run_finds_the_passages(corpus: Path):
    with serving(corpus) as (_, url):
        retriever = HttpRetriever(url, timeout_s=WAIT_S)
        [passage] = await retriever.search("stockholm", 3)
        assert (passage.id, passage.title, passage.text) == (
            "se",
            "Sweden",
            "Its capital is Stockholm.",
        )
        await retriever.close()


def test_too_many_queries_at_once_get_429_and_later_an_answer(index: Path):
    with serving(index, "--max-queue", "3") as (_, url), httpx.Client(base_url=url) as http:
        refused = http.post("/retrieve", json={"queries": ["a", "b", "c", "d"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "at most 3 may" in refused.json()["detail"]
        assert http.post("/retrieve", json={"queries": ["a", "b", "c"]}).status_code == 200
        assert http.get("/healthz").json()["num_refused"] == 4


def test_many_clients_at_once_are_all_answered_and_counted(index: Path):
    with serving(index) as (_, url), httpx.Client(base_url=url, timeout=WAIT_S) as http:

        def ask(number: int) -> str:
            body = {"query": f"oslo {number % 10}"}
            return http.post("/retrieve", json=body).json()["result"][0][0]["id"]

        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(ask, range(200))) == {"no"}
        health = http.get("/healthz").json()
        # ten different queries, each searched once and then kept
        assert (health["num_queries"], health["num_searched"]) == (200, 10)


def test_ctrl_c_ends_it_as_it_ends_every_command(index: Path):
    with serving(index) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=WAIT_S) == 130


@pytest.mark.parametrize("what", ["port", "folder", "line"])
def test_bad_input_is_one_sentence_and_exit_code_2(index: Path, tmp_path: Path, what: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "bad.jsonl").write_text('{"id": 1}')
        arguments, sentence = {
            "port": ([index, "--port", taken.getsockname()[1]], "name another --port"),
            "folder": ([tmp_path], "holds no .parquet or .arrow or .feather file"),
            "line": ([tmp_path / "bad.jsonl"], "line 1: Object missing required field `contents`"),
        }[what]
        command = leeway("serve", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
