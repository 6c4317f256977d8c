"""OpenTelemetry traces of a group, from the rollout worker to the learner. Only this file knows the
library, and it imports it when a run turns tracing on; off, a span is one test of a variable.

    rollout.group                      worker
    ├── rollout.episode                worker, one for each sibling
    │   └── rollout.turn
    │       ├── policy.complete        worker; what the turn waited for
    │       │   └── engine.complete    engine
    │       └── retriever.search       worker
    │           └── retriever.index    retriever
    ├── replay.add                     worker
    ├── replay.draw                    learner
    ├── learner.train                  learner; linked to the step's own trace, learner.step
    └── replay.acknowledge             learner

The ids of a group's trace and of its first span follow from the run and the group id, so the buffer
carries no context: the learner knows whose child its span is, and whether the group was sampled.
Between processes of one request a W3C `traceparent` travels with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import Field, model_validator

from leeway.replay.config import FrozenModel
from leeway.replay.errors import ConfigurationError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

EXPORT_TIMEOUT_S: Final = 5.0
"""Seconds the collector may take to accept spans, and a process to hand over its last ones."""

GROUP: Final = "rollout.group"
STEP: Final = "learner.step"

Attributes = Mapping[str, str | int | float]

UNSAMPLED: Final = "-00"
"""How the traceparent of a group ends that is not sampled."""
INSTALL: Final = 'pip install "leeway-rl[tracing]"'


class TracingConfig(FrozenModel):
    """OpenTelemetry traces. Keys of the `[tracing]` table."""

    endpoint: str | None = None
    """Where spans are sent by OTLP over HTTP, such as http://collector:4318/v1/traces. None: no
    tracing. Headers, such as a token, come from OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: float = Field(default=0.01, gt=0, le=1)
    """Share of groups that are traced, all of their spans or none."""

    @model_validator(mode="after")
    def _endpoint_is_url(self) -> Self:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f'tracing.endpoint is "{self.endpoint}"; it must be an address such as '
                "http://127.0.0.1:4318/v1/traces"
            )
        return self


def check_installed(config: TracingConfig) -> None:
    """Raise ConfigurationError when tracing is on and its packages are missing."""
    if config.endpoint is None:
        return
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise ConfigurationError(
                f"tracing.endpoint is set, but {package} is not installed: {INSTALL}"
            )


class _Active:
    """What a traced process holds."""

    def __init__(self, run: str, provider: TracerProvider) -> None:
        from opentelemetry.trace import get_current_span

        self.run = run
        self.provider = provider
        self.tracer = provider.get_tracer("leeway")
        self._current_span = get_current_span

    @property
    def around(self) -> SpanContext:
        """The span around the caller; not `is_valid` where there is none."""
        return self._current_span().get_span_context()


_active: _Active | None = None
_next_ids: ContextVar[tuple[int, int] | None] = ContextVar("leeway-trace-ids", default=None)
"""Trace id and span id that the next root span takes; None draws random ones."""
_NOTHING: Final = nullcontext()


def start(
    config: TracingConfig, run: str, process: str, exporter: SpanExporter | None = None
) -> None:
    """Trace from now on, where `config` says so; once for each process, again is harmless.

    `process` is the `service.name` of its spans. `exporter` replaces OTLP; tests keep spans in
    memory with it. Raises ConfigurationError where the packages are missing.
    """
    global _active
    if _active is not None or (config.endpoint is None and exporter is None):
        return
    check_installed(config)
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_NAMESPACE, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    provider = TracerProvider(
        sampler=_sampler(config.sample_ratio),
        resource=Resource.create({SERVICE_NAME: process, SERVICE_NAMESPACE: f"leeway/{run}"}),
        id_generator=_id_generator(),
        shutdown_on_exit=False,  # stop() has a deadline
    )
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        otlp = OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(otlp))
    else:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    _active = _Active(run, provider)


def stop() -> None:
    """Hand over the last spans, in EXPORT_TIMEOUT_S or so at most, and trace no more."""
    global _active
    active, _active = _active, None
    if active is not None:
        from threading import Thread

        # The library's own deadline does not bound an export that is under way.
        ending = Thread(target=active.provider.shutdown, daemon=True, name="leeway-tracing-end")
        ending.start()
        ending.join(EXPORT_TIMEOUT_S)


def is_on() -> bool:
    """Whether this process traces."""
    return _active is not None


def span(
    name: str, attributes: Attributes | None = None, *, parent: str | None = None
) -> AbstractContextManager[Any]:
    """A span around what follows: a child of `parent`, a traceparent from another process, else of
    the span around it; a trace of its own where there is neither."""
    if _active is None:
        return _NOTHING
    # Of a group that is not sampled nothing need be made but its first span, which says so.
    around = _active.around
    if parent.endswith(UNSAMPLED) if parent else around.is_valid and not around.trace_flags.sampled:
        return _NOTHING
    context = None if parent is None else _context_of(parent)
    return _active.tracer.start_as_current_span(name, context, attributes=dict(attributes or {}))


def group_span(group_id: str, attributes: Attributes | None = None) -> AbstractContextManager[Any]:
    """The first span of a group's trace, which all others of the group descend from."""
    if _active is None:
        return _NOTHING
    return _root(_active, group_id, attributes or {})


@contextmanager
def _root(active: _Active, group_id: str, attributes: Attributes) -> Generator[Any]:
    from opentelemetry.context import Context

    token = _next_ids.set(_ids_of(active.run, group_id))
    try:
        found = active.tracer.start_span(
            GROUP, Context(), attributes={"leeway.group": group_id, **attributes}
        )
    finally:
        _next_ids.reset(token)
    from opentelemetry.trace import use_span

    with use_span(found, end_on_exit=True) as current:
        yield current


def traceparent() -> str | None:
    """The span around this, in W3C's form, to be sent along with a request; None while there is
    none, or tracing is off."""
    if _active is None:
        return None
    around = _active.around
    if not around.is_valid:
        return None
    return f"00-{around.trace_id:032x}-{around.span_id:016x}-{around.trace_flags:02x}"


def mark(name: str, group_ids: Sequence[str], began: float) -> None:
    """A span in the trace of each group, of something that was done to all of them at once: from
    `began`, of time.time(), until now."""
    if _active is None:
        return
    start_ns, end_ns = int(began * 1e9), time.time_ns()
    for group_id in group_ids:
        child = _active.tracer.start_span(
            name, _group_context(_active, group_id), start_time=start_ns
        )
        child.end(end_ns)


def training(group_ids: Sequence[str], version: int) -> AbstractContextManager[Any]:
    """One step of the learner at `version`: `learner.step`, a trace of its own that links to every
    group, and in the trace of each group a `learner.train` that links back."""
    if _active is None:
        return _NOTHING
    return _training(_active, group_ids, version)


@contextmanager
def _training(active: _Active, group_ids: Sequence[str], version: int) -> Generator[None]:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, get_current_span, use_span

    contexts = [_group_context(active, group_id) for group_id in group_ids]
    groups = [get_current_span(context).get_span_context() for context in contexts]
    if not any(group.trace_flags.sampled for group in groups):
        yield
        return
    attributes = {"leeway.version": version, "leeway.num_groups": len(group_ids)}
    links = [Link(group) for group in groups if group.trace_flags.sampled]
    step = active.tracer.start_span(STEP, Context(), attributes=attributes, links=links)
    back = [Link(step.get_span_context())]
    children = [
        active.tracer.start_span("learner.train", context, attributes=attributes, links=back)
        for context in contexts
    ]
    try:
        with use_span(step, end_on_exit=True):
            yield
    finally:
        for child in children:
            child.end()


def _group_context(active: _Active, group_id: str) -> Context:
    """As if this process had been called from the group's first span."""
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.sampling import Decision
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    trace_id, span_id = _ids_of(active.run, group_id)
    decision = active.provider.sampler.should_sample(Context(), trace_id, GROUP).decision
    flags = TraceFlags(TraceFlags.SAMPLED if decision is Decision.RECORD_AND_SAMPLE else 0)
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _context_of(parent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())


def _ids_of(run: str, group_id: str) -> tuple[int, int]:
    """Trace id and first span id of a group, the same in every process; neither is 0."""
    digest = hashlib.blake2b(f"{run}/{group_id}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


def _sampler(ratio: float) -> Any:
    from opentelemetry.sdk.trace import sampling

    class Roots(sampling.TraceIdRatioBased):
        """A share of the groups; and every step that is begun: only one that trains such a group
        is."""

        def should_sample(
            self,
            parent_context: Context | None,
            trace_id: int,
            name: str,
            kind: Any = None,
            attributes: Any = None,
            links: Any = None,
            trace_state: Any = None,
        ) -> sampling.SamplingResult:
            if name == STEP:
                return sampling.SamplingResult(sampling.Decision.RECORD_AND_SAMPLE, attributes)
            return super().should_sample(
                parent_context, trace_id, name, kind, attributes, links, trace_state
            )

    return sampling.ParentBased(Roots(ratio))


def _id_generator() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random ids, but for the first span of a group."""

        def generate_trace_id(self) -> int:
            ids = _next_ids.get()
            return super().generate_trace_id() if ids is None else ids[0]

        def generate_span_id(self) -> int:
            ids = _next_ids.get()
            return super().generate_span_id() if ids is None else ids[1]

    return Ids()
