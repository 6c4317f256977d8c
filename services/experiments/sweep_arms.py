"""The arms of a sweep: one configuration each, checked before anything runs.

An arm whose learning rate comes from the scan has none yet; `with_rate` gives it one, and with it
its name. Everything an arm's result depends on is in its overrides and the base.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from leeway.learner.objective.presets import PRESETS
from leeway.replay.errors import ConfigurationError
from leeway.services.config import RunConfig, load
from leeway.services.config_text import flatten
from leeway.services.experiments.sweep_file import CTN_FORMS, Sweep

CRITIC_KEYS: Final = (
    "learner.critic_learning_rate",
    "learner.critic_warmup_steps",
    "learner.critic_epochs",
    "learner.value_clip",
    "learner.gamma",
    "learner.gae_lambda",
)
"""In `[set]` they go to the objectives that have a critic; others would refuse them."""
RATE: Final = "learner.learning_rate"
MICRO: Final = "learner.micro_batch_tokens"
TOLD: Final = (
    "objective", "learner.objective", "staleness", "replay.max_staleness", "seed", "data.seed",
)  # fmt: skip
"""Axes that a report treats by name. All others make series."""


@dataclass(frozen=True)
class Arm:
    """One run of a sweep."""

    axes: Mapping[str, Any]
    """What the grid chose, by axis as written."""
    values: Mapping[str, Any]
    """Configuration keys beside the base."""
    objective: str
    staleness: int
    """As set. What came of it is in the result."""
    seed: int
    needs_rate: bool = False
    """Its learning rate comes from the scan."""
    is_scan: bool = False
    idle: frozenset[str] = frozenset()
    """Keys among `values` at which the base stands already: they make no other arm of it."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """key=value, as TOML."""
        return tuple(f"{key}={json.dumps(value)}" for key, value in self.values.items())

    @property
    def rate(self) -> float | None:
        """Learning rate that it was given; None: that of the base, or none yet."""
        return None if self.needs_rate or RATE not in self.values else float(self.values[RATE])

    @property
    def identity(self) -> str:
        """The same for two arms that train the same."""
        told = {key: value for key, value in self.values.items() if key not in self.idle}
        return json.dumps(sorted(told.items()))

    @property
    def name(self) -> str:
        """Its folder: what it is in words, and a digest of what it trains."""
        words = [self.objective, f"lag{self.staleness}"]
        words += [f"{k.rpartition('.')[2]}{v}" for k, v in self.variant.items()]
        words.append(f"seed{self.seed}")
        if RATE in self.values and not self.needs_rate:
            words.append(f"lr{self.values[RATE]:g}")
        slug = "_".join(re.sub(r"[^a-zA-Z0-9.-]+", "-", word).strip("-") for word in words)
        digest = hashlib.sha256(self.identity.encode()).hexdigest()[:8]
        return f"{slug[:90]}-{digest}"

    @property
    def variant(self) -> dict[str, Any]:
        """The axes beside objective, staleness and seeds: what tells two series apart."""
        return {key: value for key, value in self.axes.items() if key not in TOLD}

    def with_rate(self, rate: float) -> Arm:
        """With the rate that the scan found."""
        return replace(self, values={**self.values, RATE: rate}, needs_rate=False)


def series_label(objective: str, variant: Mapping[str, Any]) -> str:
    """so-grpo · eps 0.004 · ctn penalty"""
    parts = [f"{key.rpartition('.')[2]} {_show(value)}" for key, value in variant.items()]
    return " · ".join([objective, *parts])


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def grid_arms(sweep: Sweep) -> list[Arm]:
    """Every combination of every grid, in order.

    Raises ConfigurationError for a duplicate, for an objective that does not exist, for an axis
    that the resources decide, and for an arm whose configuration would be refused.
    """
    if sweep.file.resources.micro_batch_tokens and any(MICRO in grid for grid in sweep.file.grid):
        raise ConfigurationError(
            f"{MICRO} is an axis, and resources.micro_batch_tokens would decide it for every arm; "
            "leave one of them out"
        )
    arms: list[Arm] = []
    grid_of: dict[str, int] = {}
    for number, grid in enumerate(sweep.file.grid, 1):
        for combination in itertools.product(*grid.values()):
            arm = _arm(sweep, dict(zip(grid, combination, strict=True)))
            key = arm.identity
            if key in grid_of:
                raise ConfigurationError(
                    f"[[grid]] {number} repeats an arm of [[grid]] {grid_of[key]}: {_words(arm)}; "
                    "leave one of them out"
                )
            grid_of[key] = number
            arms.append(arm)
    return arms


def _words(arm: Arm) -> str:
    return ", ".join(f"{key} {value}" for key, value in arm.axes.items())


def scan_arms(sweep: Sweep, arms: list[Arm], ended: Collection[str] = ()) -> list[Arm]:
    """At staleness 0, each objective that needs a rate, at each rate and seed of the scan.

    One that trains what an arm of the grid does has that arm's axes and name, so that it runs once:
    draws = 1 is a word of the name, and changes nothing. One whose own name is among `ended` keeps
    it, or a folder would lose the scan that it holds under such names.
    """
    if sweep.file.scan is None:
        return []
    objectives = dict.fromkeys(arm.objective for arm in arms if arm.needs_rate)
    found: list[Arm] = []
    for name, rate, seed in itertools.product(
        objectives, sweep.file.scan.learning_rate, sweep.file.scan.seed
    ):
        axes = {"objective": name, "staleness": 0, "seed": seed}
        arm = _arm(sweep, axes).with_rate(rate)
        if arm.name not in ended:
            arm = _same_of_grid(arm, rate, arms)
        found.append(replace(arm, is_scan=True))
    return found


def _same_of_grid(arm: Arm, rate: float, grid: list[Arm]) -> Arm:
    """The arm of the grid that is `arm` if the scan chooses `rate`; `arm` where there is none."""
    beside = [one for one in grid if (one.objective, one.staleness) == (arm.objective, 0)]
    settled = [one.with_rate(rate) if one.needs_rate else one for one in beside]
    return next((one for one in settled if one.identity == arm.identity), arm)


def _arm(sweep: Sweep, axes: dict[str, Any]) -> Arm:
    chosen: dict[str, Any] = {}
    for axis, value in axes.items():
        chosen |= keys_of(axis, value)
    common = dict(_set_keys(sweep, chosen))
    values = common | chosen
    base = _base_config(sweep)
    objective = str(values.get("learner.objective", base.learner.objective))
    if objective not in PRESETS:
        names = ", ".join(sorted(PRESETS))
        raise ConfigurationError(f"the grid names the objective {objective}; there are {names}")
    if not PRESETS[objective].needs_critic:
        values = {k: v for k, v in values.items() if k not in CRITIC_KEYS or k in chosen}
    values |= _derived(sweep, values, base)
    needs_rate = sweep.file.scan is not None and RATE not in chosen
    seed = int(values.get("seed", base.seed))
    staleness = values.get("replay.max_staleness", base.replay.max_staleness)
    arm = Arm(axes, values, objective, staleness, seed, needs_rate, idle=_idle(values, base))
    _check(sweep, arm)
    return arm


def _idle(values: Mapping[str, Any], base: RunConfig) -> frozenset[str]:
    """Never the learning rate, which the scan may replace."""
    held = dict(flatten(base.model_dump(mode="json")))
    return frozenset(k for k, v in values.items() if k != RATE and k in held and held[k] == v)


def _set_keys(sweep: Sweep, chosen: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of `[set]`, where the command line does not say otherwise."""
    given = {override.partition("=")[0].strip() for override in sweep.overrides}
    for key in given & chosen.keys():
        raise ConfigurationError(f"--set {key} contradicts the grid, which varies it; leave it out")
    for axis, value in sweep.file.set.items():
        for key, of_key in keys_of(axis, value).items():
            if key in given:
                continue
            if key in chosen:
                raise ConfigurationError(
                    f"{key} is in [set] and in [[grid]]; leave it out of one of them"
                )
            yield key, of_key


def keys_of(axis: str, value: Any) -> dict[str, Any]:
    """Configuration keys that an axis at a value stands for."""
    if axis == "ctn":
        if value not in CTN_FORMS:
            raise ConfigurationError(
                f"ctn = {value!r} is no form; there are {', '.join(CTN_FORMS)}"
            )
        return CTN_FORMS[value]
    if axis == "eps":
        low, high = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
        return {"learner.eps_low": low, "learner.eps_high": high}
    short = {
        "objective": "learner.objective",
        "staleness": "replay.max_staleness",
        "draws": "replay.max_draws",
        "learning_rate": RATE,
    }
    return {short.get(axis, axis): value}


def _derived(sweep: Sweep, values: Mapping[str, Any], base: RunConfig) -> dict[str, Any]:
    """What follows from the mode: staleness policy, lookahead, a buffer that holds the window, as
    many draws as are named; and ||C|| is measured under every objective that clips."""
    found: dict[str, Any] = {}
    lookahead = values.get("replay.lookahead", base.replay.lookahead)
    if sweep.file.mode == "exact":
        found["replay.staleness_policy"] = "exact"
        if lookahead == "adaptive":  # of the base, for its own runs
            found["replay.lookahead"] = "full"
    elif values.get("replay.staleness_policy", base.replay.staleness_policy) == "exact":
        found["replay.staleness_policy"] = "pace"
    # What varies is the bound: arms that admit only what they need would all be equally stale.
    if sweep.file.mode == "bound" and lookahead is None:
        found["replay.lookahead"] = "full"
    lag = int(values.get("replay.max_staleness", base.replay.max_staleness))
    step = int(values.get("replay.groups_per_step", base.replay.groups_per_step))
    held = int(values.get("replay.max_groups", base.replay.max_groups))
    if held < (lag + 1) * step:
        found["replay.max_groups"] = (lag + 1) * step
    found |= _reused(values, base, step)
    preset = PRESETS[str(values.get("learner.objective", base.learner.objective))]
    uses = values.get("learner.ctn", base.learner.ctn or preset.ctn) == "gradient"
    if preset.clips and not uses:
        found["learner.measure_ctn"] = True
    return found


def _reused(values: Mapping[str, Any], base: RunConfig, step: int) -> dict[str, Any]:
    """A limiter that has every group trained as often as `replay.max_draws` allows, unless one is
    named: by the sweep, by --set or by the base; "none" is one.

    That key alone is a bound: rollouts that are quick fill the version window all the same, and
    most groups grow too old before their second step. The buffer of errors is twice the least that
    `limiter.deadlock` admits.
    """
    draws = int(values.get("replay.max_draws", base.replay.max_draws))
    if draws == 1 or "replay.limiter" in values or "limiter" in base.replay.model_fields_set:
        return {}
    return {
        "replay.limiter": "sample-to-insert",
        "replay.samples_per_insert": float(draws),
        "replay.min_size": step,
        "replay.error_buffer": float(step + draws),
    }


_BASES: dict[tuple[Any, ...], RunConfig] = {}


def _base_config(sweep: Sweep) -> RunConfig:
    key = (sweep.base, sweep.base_digest, sweep.overrides)
    if key not in _BASES:
        _BASES[key] = load(sweep.base, sweep.overrides)
    return _BASES[key]


def _check(sweep: Sweep, arm: Arm) -> None:
    config = arm_config(sweep, arm)
    if sweep.file.loop == "in-process" and config.policy.backend != "torch":
        raise ConfigurationError(
            'policy.backend = "vllm" cannot decode in the process of an arm; set policy.backend = '
            '"torch", or loop = "train"'
        )
    if config.eval.num_questions == 0:
        raise ConfigurationError("eval.num_questions = 0 gives an arm no score; set it above 0")


def arm_config(sweep: Sweep, arm: Arm) -> RunConfig:
    """The whole configuration. Raises ConfigurationError, which names the arm."""
    try:
        return load(sweep.base, (*sweep.overrides, *arm.overrides))
    except ConfigurationError as error:
        raise ConfigurationError(f"the arm {_words(arm)} cannot run: {error}") from None
