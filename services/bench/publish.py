"""How long generation stops when an engine takes new weights, and what it costs otherwise.

    publish    the real publisher and the real engine with requests in flight: learner on one GPU,
               engine on another
    transfer   the same bytes sent again and again, without taking them into use, against a while
               without: what the engine still generates
    raw        a broadcast of as many bytes by torch.distributed alone, and a copy of as many bytes
               on the engine's device: the limits
    native     vLLM's own weight transfer (packed NCCL) with the same model and load

The pause is the time from the moment when the engine has nothing under way any longer until it goes
on. The gap is seen from outside: the longest time without a token around a publish.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import torch

from leeway.actors.config import PolicyConfig
from leeway.actors.membership import Membership
from leeway.actors.policy import CompletionRequest
from leeway.replay.board import PolicyBoard
from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.services.bench.publish_learner import RUN, Learner
from leeway.services.bench.publish_load import SHAPES, Load, Meter, build_network, write_model
from leeway.services.bench.publish_raw import measure
from leeway.services.bench.result import BenchResult

WARM_S: Final = 4.0
PAIR_REST_S: Final = 0.25
"""Without a publish, before one whose time is compared with the time before it."""
TRANSPORTS: Final = ("auto", "direct", "collective")
STAGINGS: Final = ("auto", "always", "never")
NOT_MEASURED: Final = -1.0
"""What a key holds where the machine has no such path."""


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    shapes: tuple[str, ...]
    num_publishes: int
    num_windows: int
    window_s: float
    num_in_flight: int
    with_native: bool
    num_pairs: int = 60
    staging: Any = "auto"
    """policy.staging."""


@dataclass
class Measured:
    """One model; times in seconds."""

    shape: str
    num_bytes: int = 0
    transport: str = ""
    pauses: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    wires: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)
    usual_gaps: list[float] = field(default_factory=list)
    """The same without a publish."""
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Tokens while a version was received, and in as long a time right before."""
    full_rates: list[float] = field(default_factory=list)
    """Tokens a second while one version is published after the other."""
    idle_rates: list[float] = field(default_factory=list)
    """Tokens a second otherwise."""
    transfer_share: float = 0.0
    """Of the time in which one version is published after the other, that of receiving."""
    gap_logprob: float = 0.0
    """Mean difference of log-probs between engine and learner after the last publish."""
    raw_s: float = 0.0
    device_copy_s: float = 0.0
    native_pauses: list[float] = field(default_factory=list)

    @property
    def generated(self) -> float:
        """Tokens while versions were received, over those in as long a time before each."""
        return sum(during for during, _ in self.pairs) / sum(before for _, before in self.pairs)


def run(
    *, quick: bool, shapes: tuple[str, ...] = (), transport: str = "auto", staging: str = "auto"
) -> BenchResult:
    """On two GPUs 1.5B and 7B; on CPUs a model of a few million parameters. `transport` is
    learner.transport, `staging` policy.staging.

    Raises ConfigurationError for a size, a transport or a staging that there is not, and for a
    machine with one GPU.
    """
    for what, given, known in (
        ("model of size", shapes, tuple(SHAPES)),
        ("transport", (transport,), TRANSPORTS),
        ("staging", (staging,), STAGINGS),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigurationError(
                f"there is no {what} {unknown[0]}; take one of {', '.join(known)}"
            )
    is_cuda = _is_on_gpus(torch.cuda.device_count())
    if not is_cuda and staging != "auto":
        raise ConfigurationError(
            f"--staging {staging} is of vLLM's engine, and without two GPUs torch's is measured; "
            "leave it out"
        )
    plan = replace(_plan(quick, is_cuda), staging=staging)
    found = [_measure(shape, plan, is_cuda, transport) for shape in shapes or plan.shapes]
    columns = ("model", "what", "p50 ms", "p99 ms", "note")
    rows = tuple(row for measured in found for row in _rows(measured))
    return BenchResult("publish", columns, rows, _keys(found))


def _is_on_gpus(num_gpus: int) -> bool:
    """Two or more: learner and engine each have one. Raises ConfigurationError for one, which
    would be neither a figure of GPUs nor one of CPUs."""
    if num_gpus == 1:
        raise ConfigurationError(
            "leeway bench publish needs two GPUs, one for the learner and one for the engine, and "
            "this machine has one; with CUDA_VISIBLE_DEVICES= before it, it measures on the CPU"
        )
    return num_gpus > 1


def _plan(quick: bool, is_cuda: bool) -> Plan:
    if is_cuda and quick:
        return Plan(("1.5B",), 12, 2, 2.0, 64, with_native=False, num_pairs=20)
    if is_cuda:
        return Plan(("1.5B", "7B"), 30, 3, 4.0, 64, with_native=True)
    return Plan(
        *(("0.01B",), 5 if quick else 20, 1 if quick else 3, 2.0, 8),
        with_native=False,
        num_pairs=10 if quick else 30,
    )


def _measure(shape: str, plan: Plan, is_cuda: bool, transport: str) -> Measured:
    measured = Measured(shape)
    shared = "/dev/shm" if is_cuda and os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="leeway-publish-", dir=shared) as directory:
        folder = Path(directory, "model")
        folder.mkdir()
        device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
        write_model(build_network(shape, device), folder)
        if is_cuda:
            torch.cuda.empty_cache()
        with EmbeddedRedis.start(Path(directory, "redis")) as server:
            learner = Learner(shape, server.url, is_cuda, transport)
            try:
                asyncio.run(_both_ways(measured, plan, learner, folder, server.url, is_cuda))
            finally:
                learner.close()
    measured.raw_s, measured.device_copy_s = measure(measured.num_bytes, is_cuda)
    return measured


async def _both_ways(
    measured: Measured, plan: Plan, learner: Learner, folder: Path, redis_url: str, is_cuda: bool
) -> None:
    await learner.ready()
    await _publish(measured, plan, learner, folder, redis_url, is_cuda)
    if plan.with_native:
        await _native(measured, plan, learner, folder)


# ---- ours


async def _publish(
    measured: Measured, plan: Plan, learner: Learner, folder: Path, redis_url: str, is_cuda: bool
) -> None:
    config = PolicyConfig(max_model_len=1024, max_num_seqs=plan.num_in_flight, staging=plan.staging)
    vocab_size = int(SHAPES[measured.shape]["vocab_size"])
    board = PolicyBoard(redis_url, RUN)
    async with _engine(folder, config, is_cuda) as (policy, meter):
        membership = Membership(board, policy, "engine", "here")
        serving = asyncio.create_task(membership.run())
        load = Load(policy.complete, vocab_size, plan.num_in_flight)
        try:
            while not await board.engines():
                await asyncio.sleep(0.1)
            await asyncio.sleep(WARM_S)
            await _publishes(measured, plan, learner, meter, load)
            await _windows(measured, plan, learner, membership, meter)
            load.check()
            await load.stop()
            measured.gap_logprob = await _logprob_gap(learner, policy)
        finally:
            await load.stop()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await board.close()


async def _publishes(
    measured: Measured, plan: Plan, learner: Learner, meter: Meter, load: Load
) -> None:
    # The first forms the group and finds out how the engine loads.
    for _ in range(2):
        await learner.publish()
    await asyncio.sleep(WARM_S)
    for _ in range(plan.num_publishes):
        await asyncio.sleep(0.3)
        began = time.monotonic()
        published = await learner.publish()
        await asyncio.sleep(0.2)
        ended = time.monotonic()
        load.check()
        measured.num_bytes = published.num_bytes
        measured.transport = published.transport
        measured.pauses += published.pause_s
        measured.copies += published.copy_s
        measured.wires.append(published.wire_s)
        measured.transfers.append(published.transfer_s)
        measured.gaps.append(meter.longest_gap(began, ended))
        # As long a while without a publish, for what a client sees anyway.
        quiet = time.monotonic()
        await asyncio.sleep(ended - began)
        measured.usual_gaps.append(meter.longest_gap(quiet, time.monotonic()))


async def _windows(
    measured: Measured,
    plan: Plan,
    learner: Learner,
    membership: Membership,
    meter: Meter,
) -> None:
    """Turn and turn about: a while without transfers, a while full of them.

    What the engine generates goes up and down by itself, as requests come and end together, so the
    time in which a version is received is compared with as long a time right before it.
    """
    for _ in range(plan.num_windows):
        began = time.monotonic()
        await asyncio.sleep(plan.window_s)
        measured.idle_rates.append(meter.rate(began, time.monotonic()))
        began, receiving_s = time.monotonic(), 0.0
        while time.monotonic() - began < plan.window_s:
            await learner.publish()
            receiving_s += membership.receiving[1] - membership.receiving[0]
        ended = time.monotonic()
        measured.full_rates.append(meter.rate(began, ended))
        measured.transfer_share = receiving_s / (ended - began)
    for _ in range(plan.num_pairs):
        await asyncio.sleep(PAIR_REST_S)
        await learner.publish()
        began, ended = membership.receiving
        measured.pairs.append(
            (meter.count(began, ended), meter.count(2 * began - ended, began)),
        )


async def _logprob_gap(learner: Learner, policy: Any) -> float:
    prompt_ids = list(range(100, 200))
    completion = await policy.complete(
        CompletionRequest(request_id="gap", prompt_ids=prompt_ids, max_tokens=200)
    )
    expected = await learner.ask("logprobs", (prompt_ids, completion.token_ids))
    pairs = zip(completion.logprobs, expected, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(expected)


@asynccontextmanager
async def _engine(
    folder: Path, config: PolicyConfig, is_cuda: bool
) -> AsyncIterator[tuple[Any, Meter]]:
    """The engine on the second GPU; on a CPU the torch one, which starts in a second."""
    meter = Meter()
    if not is_cuda:
        from leeway.actors.torch_policy import TorchPolicy

        policy: Any = await TorchPolicy.start(folder, config, seed=0, version=PolicyVersion(0))
        counting = asyncio.create_task(_count(policy, meter))
        try:
            yield policy, meter
        finally:
            counting.cancel()
            await policy.close()
        return
    from leeway.actors.vllm_policy import VllmPolicy
    from leeway.actors.vllm_versions import watch_outputs

    with _second_gpu():
        policy = await VllmPolicy.start(folder, config, seed=0, version=PolicyVersion(0))
    watch_outputs(policy.engine, meter.saw)
    try:
        yield policy, meter
    finally:
        await policy.close()


async def _count(policy: Any, meter: Meter) -> None:
    seen = policy.num_sampled
    while True:
        await asyncio.sleep(0.001)
        now = policy.num_sampled
        meter.saw(now - seen)
        seen = now


@contextmanager
def _second_gpu() -> Iterator[None]:
    """Processes that start meanwhile see it alone. This one has seen both already."""
    torch.cuda.init()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = (before or "0,1").split(",")[1]
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


# ---- vLLM's


async def _native(measured: Measured, plan: Plan, learner: Learner, folder: Path) -> None:
    from leeway.services.bench.publish_native import NativeEngine

    config = PolicyConfig(max_model_len=1024, max_num_seqs=plan.num_in_flight)
    with _second_gpu():
        engine = NativeEngine.start(folder, config)
    vocab_size = int(SHAPES[measured.shape]["vocab_size"])
    load = Load(engine.complete, vocab_size, plan.num_in_flight)
    try:
        await asyncio.sleep(WARM_S)
        await engine.join(learner)
        await engine.publish(learner)
        for _ in range(plan.num_publishes // 2):
            await asyncio.sleep(0.3)
            measured.native_pauses.append(await engine.publish(learner))
            load.check()
    finally:
        await load.stop()
        engine.close()


# ---- what is shown


def _rows(m: Measured) -> list[tuple[str, ...]]:
    gib = m.num_bytes / 2**30
    rows = [
        _row(m, "pause", m.pauses, f"{gib:.2f} GiB taken into use"),
        _row(m, "of it the copy", m.copies, "measured in the worker, waiting included"),
        _row(m, "longest gap seen by a client", m.gaps, "between two outputs, around a publish"),
        _row(m, "the same without a publish", m.usual_gaps, "in as long a while"),
        _row(m, "device-local copy alone", [m.device_copy_s], "the limit of the pause"),
        _row(
            m,
            "on the wire",
            m.wires,
            f"{m.transport}, {gib / median(m.wires):.0f} GiB/s, engine generating",
        ),
        _row(m, "raw broadcast", [m.raw_s], f"{gib / m.raw_s:.0f} GiB/s, nothing else going on"),
        _row(m, "transfer, all of it", m.transfers, "from ready until received and summed"),
    ]
    if m.native_pauses:
        rows.append(_row(m, "pause, vLLM's own path", m.native_pauses, "packed NCCL"))
    idle, full = median(m.idle_rates), median(m.full_rates)
    note = f"of as long a time before; {idle:.0f} tokens/s, {full:.0f} publishing without a break"
    rows.append((m.shape, "generated while receiving", f"{100 * m.generated:.0f} %", "", note))
    note = f"{m.gap_logprob:.4f} mean difference of log-probs to the learner after the last one"
    return [*rows, (m.shape, "same weights", "", "", note)]


def _row(m: Measured, what: str, seconds: list[float], note: str) -> tuple[str, ...]:
    return (m.shape, what, f"{1e3 * median(seconds):.2f}", f"{1e3 * _p99(seconds):.2f}", note)


def _p99(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return seconds[0]
    return quantiles(seconds, n=100, method="inclusive")[98]


def _keys(found: list[Measured]) -> dict[str, float | int | str]:
    """The largest model's under the plain names, every model's under its own."""
    keys: dict[str, float | int | str] = _model_keys(found[-1])
    for measured in found if len(found) > 1 else ():
        keys |= {f"{name}@{measured.shape}": v for name, v in _model_keys(measured).items()}
    return keys


def _model_keys(m: Measured) -> dict[str, float | int | str]:
    native = m.native_pauses
    return {
        "model": m.shape,
        "transport": m.transport,
        "pause_ms_p50": 1e3 * median(m.pauses),
        "pause_ms_p99": 1e3 * _p99(m.pauses),
        "gap_ms_p50": 1e3 * median(m.gaps),
        "usual_gap_ms_p50": 1e3 * median(m.usual_gaps),
        "device_copy_ms": 1e3 * m.device_copy_s,
        "bandwidth_ratio": m.raw_s / median(m.wires),
        "generation_ratio": m.generated,
        "generation_ratio_without_break": median(m.full_rates) / median(m.idle_rates),
        "transfer_share": m.transfer_share,
        "native_pause_ms_p50": 1e3 * median(native) if native else NOT_MEASURED,
        "logprob_gap_mean": m.gap_logprob,
    }
