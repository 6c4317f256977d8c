"""Metrics of the buffer and the learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from leeway.replay.chain import Seconds, seconds_by_side
from leeway.replay.histogram import Histogram
from leeway.replay.store import Held, ReplayStats
from leeway.services.api.families import (
    Family,
    Point,
    Readings,
    counter,
    distribution,
    gauge,
    histogram,
    of_stats,
    one,
    total,
)

_TURNS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_STALENESS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def _groups(r: Readings) -> list[Point]:
    if r.stats is None:
        return []
    states = (
        ("playing", r.stats.num_slots),
        ("ready", r.stats.num_ready),
        ("leased", r.stats.num_leased),
    )
    return [Point((state,), num) for state, num in states]


def _dropped(r: Readings) -> Iterator[Point]:
    for reason, num in sorted(r.stats.dropped.items() if r.stats else ()):
        yield Point((reason,), num)


def _dropped_turns(r: Readings) -> Iterator[Point]:
    for reason, turns in sorted(r.stats.dropped_turns.items() if r.stats else ()):
        found = Histogram(bounds=_TURNS)
        for num_turns, num in turns.items():
            found.observe(num_turns, num)
        yield Point((reason,), found)


def _seconds(of: Callable[[Seconds], float]) -> Callable[[Readings], list[Point]]:
    def read(r: Readings) -> list[Point]:
        sides = {} if r.stats is None else seconds_by_side(r.stats)
        return [Point((side,), of(seconds)) for side, seconds in sorted(sides.items())]

    return read


def _waiting(r: Readings) -> Iterator[Point]:
    for wait in r.stats.waits if r.stats else ():
        yield Point((wait.side, wait.reason), wait.num)


def _longest_wait(r: Readings) -> Iterator[Point]:
    for wait in r.stats.waits if r.stats else ():
        yield Point((wait.side, wait.reason), wait.since_s)


def _outstanding(r: Readings) -> list[Point]:
    """Untrained groups by how old their tokens may be: learner at 10, {8: 4, 9: 2} -> 2 and 1."""
    if r.stats is None:
        return []
    counts = dict.fromkeys((*map(str, _STALENESS), "more"), 0)
    for version, num in r.stats.outstanding.items():
        staleness = max(0, r.stats.learner_version - version)
        counts[next((str(bound) for bound in _STALENESS if staleness <= bound), "more")] += num
    return [Point((staleness,), num) for staleness, num in counts.items()]


def _oldest(held: Callable[[ReplayStats], tuple[Held, ...]]) -> Callable[[Readings], list[Point]]:
    return of_stats(lambda stats: max((one.since_s for one in held(stats)), default=0.0))


REPLAY = (
    gauge("leeway_replay_groups", "Groups of the buffer, by state", _groups, "state"),
    gauge(
        "leeway_replay_bytes",
        "Size of buffered and leased groups, as stored",
        of_stats(lambda s: s.num_bytes),
    ),
    gauge(
        "leeway_replay_outstanding_groups",
        "Untrained groups by staleness of the version they were admitted at, at most so much",
        _outstanding,
        "staleness",
    ),
    gauge(
        "leeway_replay_admission_paused",
        "1 while no group is admitted",
        of_stats(lambda s: s.admission_paused),
    ),
    gauge(
        "leeway_replay_held_back_groups",
        "Groups of the window that an adaptive lookahead does not admit",
        of_stats(lambda s: s.num_held_back),
    ),
    gauge(
        "leeway_replay_waiting",
        "Callers that wait now, by side and by what holds them back",
        _waiting,
        "side",
        "reason",
    ),
    gauge(
        "leeway_replay_longest_wait_seconds",
        "How long the first of them has waited",
        _longest_wait,
        "side",
        "reason",
    ),
    counter(
        "leeway_replay_waiting_seconds_total",
        "Time waited, by side and summed over its callers",
        _seconds(lambda s: s.waiting_s),
        "side",
    ),
    counter(
        "leeway_replay_working_seconds_total",
        "Time in which slots were played, or leases trained",
        _seconds(lambda s: s.working_s),
        "side",
    ),
    counter(
        "leeway_replay_groups_admitted_total", "Slots granted", of_stats(lambda s: s.num_admitted)
    ),
    counter("leeway_replay_groups_added_total", "Groups taken in", of_stats(lambda s: s.num_added)),
    counter(
        "leeway_replay_groups_drawn_total",
        "Groups handed out, once for every draw",
        of_stats(lambda s: s.num_drawn),
    ),
    counter(
        "leeway_replay_groups_trained_total",
        "Groups acknowledged, once for every step that trained them",
        of_stats(lambda s: s.num_trained),
    ),
    counter("leeway_replay_groups_dropped_total", "Groups dropped, by reason", _dropped, "reason"),
    histogram(
        "leeway_replay_dropped_trajectory_turns",
        "Turns of the trajectories of dropped groups",
        _dropped_turns,
        "reason",
    ),
    gauge("leeway_replay_leases", "Leases held", of_stats(lambda s: len(s.leases))),
    gauge(
        "leeway_replay_oldest_lease_seconds",
        "How long the oldest lease has been held; 0 without one",
        _oldest(lambda s: s.leases),
    ),
    gauge(
        "leeway_replay_oldest_slot_seconds",
        "How long the oldest slot has been held, of the 64 that expire next; 0 without one",
        _oldest(lambda s: s.slots),
    ),
    counter(
        "leeway_replay_slots_expired_total",
        "Slots that nobody filled in time",
        of_stats(lambda s: s.num_slots_expired),
    ),
    counter(
        "leeway_replay_leases_expired_total",
        "Leases that nobody acknowledged in time",
        of_stats(lambda s: s.num_leases_expired),
    ),
)

LAST_STEP: Final[dict[str, tuple[str, str]]] = {
    "loss": ("loss", "What was minimised"),
    "learning_rate": ("learning_rate", "Of the optimizer"),
    "grad_norm": ("gradient_norm", "Norm of the gradient before it was bounded"),
    "grad_norm_applied": ("applied_gradient_norm", "Norm of what the optimizer saw"),
    "ctn_norm": ("clip_bias_norm", "Norm of what the clip removed from the gradient"),
    "ctn_divisor": ("clip_bias_divisor", "What gradient or learning rate was divided by"),
    "num_optimizer_steps": ("minibatches", "Optimizer steps that made the version"),
    "clip_fraction_tokens": ("clipped_tokens_ratio", "Tokens outside the clip"),
    "clip_fraction_turns": ("clipped_turns_ratio", "Turns with at least one such token"),
    "effective_sample_size": ("effective_sample_ratio", "Effective sample size by its tokens"),
    "log_ratio_abs_mean": ("log_ratio_abs_mean", "Absolute log-ratio to the sampler, mean"),
    "log_ratio_abs_p95": ("log_ratio_abs_p95", "Absolute log-ratio, 95th percentile"),
    "log_ratio_abs_max": ("log_ratio_abs_max", "Absolute log-ratio, largest"),
    "log_ratio_old_abs_mean": (
        "log_ratio_old_abs_mean",
        "Absolute log-ratio to the start of the step, mean",
    ),
    "log_ratio_old_abs_p95": (
        "log_ratio_old_abs_p95",
        "Absolute log-ratio to the start of the step, 95th percentile",
    ),
    "log_ratio_old_abs_max": (
        "log_ratio_old_abs_max",
        "Absolute log-ratio to the start of the step, largest",
    ),
    "kl_behaviour": ("kl_behaviour_nats", "KL (k3) to the policies that sampled"),
    "kl_old": ("kl_old_nats", "KL (k3) to the policy that ratios are taken against"),
    "masked_fraction": ("masked_tokens_ratio", "Tokens that M2PO left without a gradient"),
    "correction_mean": ("correction_mean", "Mean weight of a token outside the clip"),
    "correction_share": ("corrected_tokens_ratio", "Tokens of truncated or masked weight"),
    "value_loss": ("value_loss", "Of the critic at the start of the step"),
    "value_mean": ("value_mean", "Mean value at the start of the step"),
    "explained_variance": ("explained_variance_ratio", "Variance of returns the critic explains"),
    "value_clip_fraction": ("clipped_values_ratio", "Values whose loss was clipped"),
    "critic_grad_norm": ("critic_gradient_norm", "Norm of the critic's gradient"),
    "entropy": ("entropy_nats", "Entropy of the policy per trained token"),
    "gap_mean": ("engine_gap_mean_nats", "Log-prob of learner less that of engine, mean"),
    "gap_max": ("engine_gap_max_nats", "Log-prob of learner less that of engine, largest"),
    "staleness_mean": ("batch_staleness_mean_versions", "Staleness per trajectory, mean"),
    "staleness_p95": ("batch_staleness_p95_versions", "Staleness, 95th percentile"),
    "staleness_max": ("batch_staleness_max_versions", "Staleness, largest"),
    "reward_mean": ("reward_mean", "Reward per trajectory, mean"),
    "reward_std": ("reward_std", "Reward per trajectory, standard deviation"),
    "turns_per_trajectory": ("trajectory_turns_mean", "Turns per trajectory"),
    "trained_tokens_per_trajectory": (
        "trajectory_trained_tokens_mean",
        "Generated tokens per trajectory",
    ),
    "tokens_per_trajectory": (
        "trajectory_tokens_mean",
        "Prompt, generated and observed tokens per trajectory",
    ),
    "invalid_share": ("invalid_turns_ratio", "Turns whose action could not be parsed"),
    "num_zero_variance_groups": ("batch_zero_variance_groups", "Groups of equal rewards"),
    "num_groups": ("batch_groups", "Groups"),
    "num_trajectories": ("batch_trajectories", "Trajectories"),
    "num_tokens_trained": ("batch_trained_tokens", "Tokens trained"),
    "num_micro_batches": ("batch_micro_batches", "Forward passes of one rank"),
    "num_tokens_read": ("batch_read_tokens", "Positions that passes of one rank read"),
    "seconds": ("last_step_seconds", "Duration of the step"),
    "seconds_ctn": ("last_step_clip_bias_seconds", "Of these, on the norm of the clipping bias"),
}
"""Name in metrics.jsonl -> what follows `leeway_learner_`, and what it is."""


def _last_step(key: str) -> Family:
    name, text = LAST_STEP[key]
    read = one(lambda r: (r.section("learner").get("metrics") or {}).get(key))
    return gauge(f"leeway_learner_{name}", f"Last step: {text}", read)


def _scores(r: Readings) -> Iterator[Point]:
    for name, value in sorted((r.section("learner").get("metrics") or {}).items()):
        if name.startswith("score/"):
            yield Point((name.removeprefix("score/"),), value)


LEARNER = (
    gauge(
        "leeway_learner_version",
        "Newest policy version the learner made; it falls where a resumed run repeats steps",
        one(lambda r: r.section("learner").get("version", r.stats and r.stats.learner_version)),
    ),
    counter(
        "leeway_learner_steps_total", "Optimizer steps done, repeated ones again", total("steps")
    ),
    counter("leeway_learner_trained_tokens_total", "Tokens trained", total("tokens")),
    counter("leeway_learner_trajectories_total", "Trajectories trained", total("trajectories")),
    gauge(
        "leeway_learner_last_step_timestamp_seconds",
        "Unix time at which the last step ended",
        one(lambda r: r.section("totals").get("last_step_at")),
    ),
    histogram("leeway_learner_step_seconds", "Duration of a step", distribution("step_s")),
    histogram(
        "leeway_learner_wait_seconds", "Time a step waited for its groups", distribution("wait_s")
    ),
    histogram(
        "leeway_learner_staleness_versions",
        "Staleness of trained trajectories",
        distribution("staleness"),
    ),
    gauge(
        "leeway_learner_staleness_bound_versions",
        "The bound, replay.max_staleness",
        one(lambda r: r.section("run").get("bound")),
    ),
    gauge(
        "leeway_learner_idle_ratio",
        "Share of the last steps' time that the learner waited for groups",
        one(lambda r: r.section("learner").get("idle_share")),
    ),
    gauge("leeway_learner_score_mean", "Last step: mean of a score", _scores, "score"),
    *(_last_step(key) for key in LAST_STEP),
)
