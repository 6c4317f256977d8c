"""`GET /metrics`: the Snapshot in Prometheus' text format. The only file that imports its client.

Every name is in the tables below; what is not known yet is left out of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from leeway.services.snapshot import EngineView, ReplayView, Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

GAUGES: Final[dict[str, tuple[str, Callable[[Snapshot], float | None]]]] = {
    "leeway_step": ("Optimizer steps done", lambda s: s.run.step),
    "leeway_num_steps": ("Optimizer steps of the whole run", lambda s: s.run.num_steps),
    "leeway_policy_version": (
        "Newest policy version the learner made",
        lambda s: s.run.policy_version,
    ),
    "leeway_elapsed_seconds": ("Seconds since the run started", lambda s: s.run.elapsed_s),
    "leeway_reward": ("Mean reward of the last batch", lambda s: s.learning.reward),
    "leeway_exact_match": ("Exact match of the last batch", lambda s: s.learning.exact_match),
    "leeway_held_out_exact_match": ("Latest held-out exact match", lambda s: s.eval.latest),
    "leeway_held_out_exact_match_before": (
        "Held-out exact match before training",
        lambda s: s.eval.before,
    ),
    "leeway_entropy": ("Entropy of the policy on the last batch", lambda s: s.learning.entropy),
    "leeway_kl": ("KL (k3) to the policies that sampled the batch", lambda s: s.learning.kl),
    "leeway_gradient_norm": ("Gradient norm of the last step", lambda s: s.learning.grad_norm),
    "leeway_clip_fraction": (
        "Share of the last batch's tokens that were clipped",
        lambda s: s.learning.clip_fraction,
    ),
    "leeway_clip_bias_norm": (
        "Norm of what the clip removed from the gradient",
        lambda s: s.learning.clip_bias_norm,
    ),
    "leeway_staleness_mean": (
        "Mean staleness of the last batch, in policy versions",
        lambda s: s.staleness.mean,
    ),
    "leeway_staleness_max": (
        "Largest staleness of the last batch, in policy versions",
        lambda s: s.staleness.max,
    ),
    "leeway_staleness_bound": ("replay.max_staleness", lambda s: s.staleness.bound),
    "leeway_generated_tokens_per_second": (
        "Tokens generated per second, over all engines",
        lambda s: s.generated_tokens_per_s,
    ),
    "leeway_trained_tokens_per_second": (
        "Tokens trained per second",
        lambda s: s.learning.tokens_per_s,
    ),
    "leeway_learner_wait_share": (
        "Share of the time the learner waited for groups",
        lambda s: s.waits.learner_for_data,
    ),
    "leeway_rollout_wait_share": (
        "Share of the time a rollout worker waited for admission",
        lambda s: s.waits.rollouts_for_room,
    ),
}

REPLAY_GAUGES: Final[dict[str, tuple[str, Callable[[ReplayView], float]]]] = {
    "leeway_replay_slots": ("Groups being played", lambda r: r.num_slots),
    "leeway_replay_ready": ("Groups buffered and free to be drawn", lambda r: r.num_ready),
    "leeway_replay_leased": ("Groups at the learner", lambda r: r.num_leased),
    "leeway_replay_bytes": ("Bytes of buffered and leased groups", lambda r: r.num_bytes),
    "leeway_replay_admission_paused": (
        "1 while no group is admitted",
        lambda r: r.admission_paused,
    ),
}

ENGINE_GAUGES: Final[dict[str, tuple[str, Callable[[EngineView], float | None]]]] = {
    "leeway_engine_version": ("Policy version the engine samples from", lambda e: e.version),
    "leeway_engine_pause_seconds": (
        "How long the engine's last publish stopped generation",
        lambda e: None if e.pause_ms is None else e.pause_ms / 1e3,
    ),
    "leeway_engine_transfer_seconds": (
        "How long the engine's last publish took to arrive",
        lambda e: None if e.transfer_ms is None else e.transfer_ms / 1e3,
    ),
    "leeway_engine_tokens_per_second": (
        "Tokens the engine generates per second",
        lambda e: e.tokens_per_s,
    ),
}


def exposition(snapshot: Snapshot) -> bytes:
    """The snapshot as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)


class _SnapshotCollector(Collector):
    """Hands one snapshot to the client library, which knows the format."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        info = GaugeMetricFamily("leeway_run_info", "1, labelled", labels=["name", "phase"])
        info.add_metric([snapshot.run.name, snapshot.run.phase], 1)
        yield info
        for name, (text, read) in GAUGES.items():
            value = read(snapshot)
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        yield from _engine_metrics(snapshot.engines)
        if snapshot.replay is not None:
            yield from _replay_metrics(snapshot.replay)


def _engine_metrics(engines: list[EngineView]) -> Iterator[Metric]:
    for name, (text, read) in ENGINE_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["engine"])
        for engine in engines:
            value = read(engine)
            if value is not None:
                family.add_metric([engine.engine_id], value)
        if family.samples:
            yield family


def _replay_metrics(replay: ReplayView) -> Iterator[Metric]:
    for name, (text, read) in REPLAY_GAUGES.items():
        yield GaugeMetricFamily(name, text, value=read(replay))
    yield CounterMetricFamily("leeway_groups_trained", "Groups trained", value=replay.num_trained)
    dropped = CounterMetricFamily(
        "leeway_groups_dropped", "Groups dropped, by reason", labels=["reason"]
    )
    for reason, count in sorted(replay.dropped.items()):
        dropped.add_metric([reason], count)
    yield dropped
