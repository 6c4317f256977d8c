"""Traces: whose child a span is, what is sampled, and that nothing is done while tracing is off."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from leeway.actors import serve_replicas
from leeway.actors.search.retriever import HttpRetriever
from leeway.replay import tracing
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import ConfigurationError
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.traced_replay import TracedReplay, traced
from leeway.replay.tracing import TracingConfig
from leeway.services.config import load
from leeway.services.experiments.in_process import run
from leeway.services.layout import RunDirectory
from leeway.services.wiring import actor_spec

ROOT = Path(__file__).parents[2]
ALL = TracingConfig(sample_ratio=1.0)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Everything is traced, into memory."""
    exporter = InMemorySpanExporter()
    tracing.start(ALL, "demo", "test", exporter)
    yield exporter
    tracing.stop()


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def path_of(span: ReadableSpan, spans: InMemorySpanExporter) -> list[str]:
    """Names from the first span of the trace down to this one."""
    by_id = {s.context.span_id: s for s in spans.get_finished_spans() if s.context}
    names = [span.name]
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        names.insert(0, span.name)
    return names


def test_off_a_span_is_nothing_and_no_library_is_loaded():
    code = (
        "import sys; from leeway.replay import tracing\n"
        "with tracing.span('a') as span, tracing.group_span('g'), tracing.training(['g'], 1):\n"
        "    assert span is None and tracing.traceparent() is None and not tracing.is_on()\n"
        "tracing.mark('a', ['g'], 0.0); tracing.stop()\n"
        "tracing.start(tracing.TracingConfig(), 'run', 'here')\n"
        "assert not tracing.is_on()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_off_the_buffer_is_itself():
    replay = MemoryReplay(ReplayConfig())
    assert traced(replay) is replay


def test_on_the_buffer_is_traced(spans: InMemorySpanExporter):
    assert isinstance(traced(MemoryReplay(ReplayConfig())), TracedReplay)


def test_a_request_to_another_process_goes_on_with_the_trace(spans: InMemorySpanExporter):
    with tracing.group_span("g1"), tracing.span("turn"):
        sent = tracing.traceparent()
    assert sent is not None
    with tracing.span("engine", parent=sent):
        pass
    found = by_name(spans)
    assert path_of(found["engine"], spans) == ["rollout.group", "turn", "engine"]


Deployed: Any = serve_replicas.RetrieverServer.func_or_class


class Replica(Deployed):
    """As Serve makes one, which awaits its beginning and its end. Collecting it would not."""

    def __del__(self) -> None: ...


async def test_the_search_of_the_index_is_part_of_the_turn_that_waits_for_it(
    tmp_path: Path, spans: InMemorySpanExporter
):
    with tracing.group_span("g1"), tracing.span("retriever.search"):
        sent = tracing.traceparent()
    spec = actor_spec(RunDirectory(tmp_path), load(None), "redis://nobody.invalid")
    replica = object.__new__(Replica)
    await replica.__init__(spec)
    assert await replica.search("Alvar Aalto", 2, sent)
    await Deployed.__del__(replica)
    found = by_name(spans)["retriever.index"]
    assert path_of(found, spans) == ["rollout.group", "retriever.search", "retriever.index"]


async def test_a_retriever_elsewhere_gets_the_trace_as_a_header(spans: InMemorySpanExporter):
    heads: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        heads.append(request.headers.get("traceparent", ""))
        return httpx.Response(200, json={"result": [[]]})

    retriever = HttpRetriever("http://r", 60.0, transport=httpx.MockTransport(answer))
    with tracing.group_span("g1"):
        await retriever.search("a", 1)
        assert heads == [tracing.traceparent()]
    await retriever.close()


def test_the_learner_finds_the_group_by_its_id_alone(spans: InMemorySpanExporter):
    with tracing.group_span("g1"):
        pass
    with tracing.training(["g1", "g2"], 3):
        pass
    group = by_name(spans)["rollout.group"].context
    trained = [s for s in spans.get_finished_spans() if s.name == "learner.train"]
    [mine] = [s for s in trained if s.context and s.context.trace_id == group.trace_id]
    assert mine.parent is not None and mine.parent.span_id == group.span_id
    step = by_name(spans)["learner.step"]
    assert step.parent is None
    assert [link.context.span_id for link in mine.links] == [step.context.span_id]
    assert group.span_id in {link.context.span_id for link in step.links}
    assert step.attributes == {"leeway.version": 3, "leeway.num_groups": 2}


def test_what_is_done_to_many_groups_shows_in_the_trace_of_each(spans: InMemorySpanExporter):
    tracing.mark("replay.draw", ["g1", "g2"], began=1000.0)
    drawn = spans.get_finished_spans()
    assert len({span.context.trace_id for span in drawn if span.context}) == 2
    assert {span.start_time for span in drawn} == {1000 * 10**9}


def test_groups_of_two_runs_have_traces_of_their_own():
    assert tracing._ids_of("one", "g1") != tracing._ids_of("two", "g1")
    assert tracing._ids_of("one", "g1") == tracing._ids_of("one", "g1")


def test_an_error_is_told_by_the_span_it_passes_through(spans: InMemorySpanExporter):
    with pytest.raises(ValueError), tracing.span("turn"):
        raise ValueError("broken")
    assert not by_name(spans)["turn"].status.is_ok


def test_a_group_is_traced_whole_or_not_at_all():
    exporter = InMemorySpanExporter()
    tracing.start(TracingConfig(sample_ratio=0.5), "demo", "test", exporter)
    ids = [f"g{i}" for i in range(200)]
    for group_id in ids:
        with tracing.group_span(group_id), tracing.span("turn"):
            sent = tracing.traceparent()
        with tracing.span("engine", parent=sent):
            pass
        with tracing.training([group_id], 1):
            pass
    tracing.stop()
    names = [span.name for span in exporter.get_finished_spans()]
    num = names.count("rollout.group")
    assert 60 < num < 140  # of 200 at one half; the ids are fixed, so this is no matter of luck
    for name in ("turn", "engine", "learner.train", "learner.step"):
        assert names.count(name) == num


def test_a_missing_package_is_refused_with_its_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    on = TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ConfigurationError, match=r'pip install "leeway-rl\[tracing\]"'):
        tracing.check_installed(on)
    tracing.check_installed(TracingConfig())


@pytest.mark.parametrize("endpoint", ["collector:4318", "", "grpc://collector"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str):
    with pytest.raises(ConfigurationError, match=r"tracing\.endpoint is"):
        load(None, [f'tracing.endpoint="{endpoint}"'])


class Collector(BaseHTTPRequestHandler):
    """Takes spans by OTLP over HTTP."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        type(self).bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_spans_reach_a_collector_before_the_process_ends():
    Collector.bodies = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        tracing.start(TracingConfig(endpoint=endpoint, sample_ratio=1.0), "demo", "rollout")
        with tracing.group_span("g1"):
            pass
        tracing.stop()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    body = b"".join(Collector.bodies)
    assert b"rollout.group" in body and b"leeway/demo" in body


def test_a_collector_that_is_away_holds_the_end_for_a_few_seconds_at_most():
    endpoint = "http://127.0.0.1:1/v1/traces"
    tracing.start(TracingConfig(endpoint=endpoint, sample_ratio=1.0), "demo", "rollout")
    with tracing.group_span("g1"):
        pass
    tracing.stop()  # the test's own deadline is what would be missed
    assert not tracing.is_on()


SMALL = (
    "replay.groups_per_step=1",
    "replay.max_staleness=1",
    "rollout.group_size=2",
    "rollout.max_groups_in_flight=2",
    "policy.max_num_seqs=8",
    "learner.objective=so-ppo",
    "learner.num_steps=3",
    "eval.num_questions=1",
)


async def test_one_trace_follows_a_group_from_the_worker_to_the_learner(
    tmp_path: Path, spans: InMemorySpanExporter
):
    config = load(ROOT / "deploy" / "configs" / "stability.toml", SMALL)
    await run(config, tmp_path)
    finished = spans.get_finished_spans()
    steps = [span for span in finished if span.name == "learner.step"]
    assert [(step.attributes or {})["leeway.version"] for step in steps] == [0, 1, 2]
    for step in steps:
        [link] = step.links
        trace = [s for s in finished if s.context and s.context.trace_id == link.context.trace_id]
        paths = {" > ".join(path_of(span, spans)) for span in trace}
        turn = "rollout.group > rollout.episode > rollout.turn"
        assert {
            "rollout.group",
            "rollout.group > rollout.episode",
            turn,
            f"{turn} > engine.complete",
            "rollout.group > replay.add",
            "rollout.group > replay.draw",
            "rollout.group > learner.train",
            "rollout.group > replay.acknowledge",
        } <= paths
        assert sum(span.name == "rollout.episode" for span in trace) == 2
    searches = [path_of(span, spans) for span in finished if span.name == "retriever.search"]
    assert ["rollout.group", "rollout.episode", "rollout.turn", "retriever.search"] in searches
