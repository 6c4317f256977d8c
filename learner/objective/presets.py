"""What each name in the literature means here: ratio x surrogate x ctn x advantage x reduce, as
data. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from leeway.learner.objective.kinds import (
    CRITIC_ADVANTAGES,
    SIBLING_ADVANTAGES,
    Advantage,
    Correction,
    Ctn,
    CtnTarget,
    Old,
    Ratio,
    Reduce,
    Surrogate,
)
from leeway.replay.errors import ConfigurationError

if TYPE_CHECKING:
    from leeway.learner.config import LearnerConfig


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective."""

    ratio: Ratio
    surrogate: Surrogate
    advantage: Advantage
    reduce: Reduce
    old: Old = "behaviour"
    correction: Correction = "none"
    """Weight exp(proximal - behaviour) of a token, outside the clip; only where `old` is
    proximal."""
    max_correction: float = 2.0
    """truncate: its upper bound. mask: a token whose weight lies outside [1 / this, this] has no
    gradient."""
    ctn: Ctn = "none"
    eps_low: float | None = None
    """Lower clip distance; None where nothing is clipped."""
    eps_high: float | None = None
    """Upper clip distance; None where nothing is clipped."""
    dual_clip: float | None = None
    """c of the dual clip; None leaves it out."""
    max_weight: float = 2.0
    """Upper bound of the `truncate` surrogate."""
    max_second_moment: float = 0.04
    """Bound of the `second-moment` surrogate."""
    ctn_target: CtnTarget = "gradient"
    ctn_c: float = 1.0
    ctn_raw: bool = False
    ctn_strength: float = 1.0
    """lambda of the penalty form."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten: bool = False
    """Advantages get mean 0 and standard deviation 1 over the batch's tokens."""

    @property
    def needs_critic(self) -> bool:
        """Whether advantages need a value function."""
        return self.advantage in CRITIC_ADVANTAGES

    @property
    def compares_siblings(self) -> bool:
        """Whether advantages compare the trajectories of one group."""
        return self.advantage in SIBLING_ADVANTAGES

    @property
    def clips(self) -> bool:
        """Whether eps_low and eps_high are read."""
        return self.eps_low is not None and self.eps_high is not None

    @property
    def needs_first_pass(self) -> bool:
        """Whether a number of the whole batch (a clip fraction, a mask) enters every token's
        loss."""
        return self.ctn == "penalty" or self.surrogate == "second-moment"

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a trajectory of zero advantage has no gradient, so that its backward can be left
        out."""
        return self.ctn != "penalty"


_SO_GRPO: Final = Objective(
    ratio="turn",
    surrogate="clip",
    advantage="group",
    reduce="trajectory",
    ctn="gradient",
    eps_low=0.2,
    eps_high=0.2,
)
_GRPO: Final = replace(_SO_GRPO, ratio="token", ctn="none")
_PPO: Final = replace(_GRPO, advantage="gae")
_SO_PPO: Final = replace(_SO_GRPO, advantage="gae-turn")

PRESETS: Final[Mapping[str, Objective]] = MappingProxyType(
    {
        # arXiv 2511.20718: v1 has s-ppo, turn-ppo and st-ppo, v2 so-ppo and so-grpo; the penalty
        # forms are a second-hand note's.
        "ppo": _PPO,  # arXiv 1707.06347
        "s-ppo": replace(_PPO, ctn="gradient"),
        "turn-ppo": replace(_PPO, ratio="turn"),
        "st-ppo": replace(_PPO, ratio="turn", ctn="gradient"),
        "so-ppo": _SO_PPO,
        "so-ppo-penalty": replace(_SO_PPO, ctn="penalty"),
        "so-grpo": _SO_GRPO,
        "so-grpo-penalty": replace(_SO_GRPO, ctn="penalty"),
        # arXiv 2402.03300
        "grpo": _GRPO,
        # arXiv 2507.18071; ratios of averaged logs sit near 1, hence the small distances.
        "gspo": replace(_GRPO, ratio="sequence", eps_low=3e-4, eps_high=4e-4),
        # arXiv 2505.24298 (AReaL)
        "decoupled-ppo": replace(_PPO, old="proximal", correction="truncate"),
        "decoupled-grpo": replace(_GRPO, old="proximal", correction="truncate"),
        "reinforce": Objective(ratio="none", surrogate="plain", advantage="batch", reduce="token"),
        # arXiv 2402.14740
        "rloo": Objective(
            ratio="none", surrogate="plain", advantage="leave-one-out", reduce="token"
        ),
        "tis": Objective(ratio="token", surrogate="truncate", advantage="group", reduce="token"),
        # arXiv 2506.13585: no lower bound; the upper one is large, as in its implementations.
        "cispo": Objective(
            ratio="token",
            surrogate="cispo",
            advantage="group",
            reduce="token",
            eps_low=1.0,
            eps_high=4.0,
        ),
        "m2po": Objective(
            ratio="token", surrogate="second-moment", advantage="group", reduce="token"
        ),
        # Both weigh a trajectory by its whole product ratio.
        "vespo": Objective(
            ratio="sequence-product", surrogate="vespo", advantage="group", reduce="token"
        ),
        "topr": Objective(
            ratio="sequence-product", surrogate="topr", advantage="group", reduce="token"
        ),
    }
)

PARTS: Final = (
    "ratio",
    "advantage",
    "reduce",
    "old",
    "ctn",
    "ctn_target",
    "ctn_c",
    "ctn_raw",
    "ctn_strength",
    "correction",
    "max_correction",
    "eps_low",
    "eps_high",
    "dual_clip",
    "gamma",
    "gae_lambda",
    "whiten",
)
"""Keys of the learner's configuration that replace a part of the preset where they are set."""

_CRITIC_KEYS: Final = (
    "critic_learning_rate",
    "critic_warmup_steps",
    "critic_epochs",
    "value_clip",
)


def resolve(config: LearnerConfig) -> Objective:
    """The preset that `config.objective` names, with the configured parts in place of its own.

    Raises ConfigurationError for an unknown name, for parts that contradict each other, and for a
    part that would do nothing.
    """
    for problem in problems(config):
        raise ConfigurationError(problem)
    return _composed(config)


def problems(config: LearnerConfig) -> Iterator[str]:
    """What `resolve` refuses, one sentence each."""
    name = config.objective
    preset = PRESETS.get(name)
    if preset is None:
        close = get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]}? There are" if close else "there are"
        yield f'learner.objective = "{name}" is not a preset; {hint} {", ".join(sorted(PRESETS))}'
        return
    objective = _composed(config)
    yield from _contradictions(name, preset, objective)
    yield from _never_off_policy(config, objective)
    under = f'under learner.objective = "{name}"'
    for key, reason in _idle(config, objective):
        yield f"learner.{key} does nothing {under}, {reason}; leave it out"


def _composed(config: LearnerConfig) -> Objective:
    chosen: dict[str, Any] = {
        key: value for key in PARTS if (value := getattr(config, key)) is not None
    }
    return replace(PRESETS[config.objective], **chosen)


def _contradictions(name: str, preset: Objective, objective: Objective) -> Iterator[str]:
    where = f'learner.objective = "{name}"'
    kind = objective.advantage
    if objective.needs_critic and not preset.needs_critic:
        yield (
            f'learner.advantage = "{kind}" needs a critic, and {where} trains none; '
            "take an objective of the PPO family, such as so-ppo"
        )
    if preset.needs_critic and not objective.needs_critic:
        yield (
            f'learner.advantage = "{kind}" leaves the critic of {where} without use; '
            "take an objective of the GRPO family, such as so-grpo"
        )
    if objective.ctn != "none" and objective.surrogate != "clip":
        yield (
            f'learner.ctn = "{objective.ctn}" is triggered by the clip, and {where} has none; '
            "leave it out, or take an objective that clips, such as grpo"
        )
    if objective.surrogate == "second-moment" and objective.ratio != "token":
        yield (
            f'learner.ratio = "{objective.ratio}" would let single tokens that {where} masks move '
            "the policy through the ratio of others; leave it out"
        )
    if objective.old == "proximal" and preset.surrogate in ("truncate", "topr", "vespo"):
        yield (
            f'learner.old = "proximal" would undo {where}, whose weight is the ratio to the policy '
            "that sampled; leave it out"
        )
    if objective.correction != "none" and objective.old == "behaviour":
        yield (
            f'learner.old = "behaviour" leaves learner.correction = "{objective.correction}" under '
            f"{where} without a weight exp(proximal - behaviour); "
            'set learner.old = "proximal", or learner.correction = "none"'
        )


def _has_ratios_of_one(config: LearnerConfig, objective: Objective) -> bool:
    return objective.old == "proximal" and config.num_minibatches == 1


def _never_off_policy(config: LearnerConfig, objective: Objective) -> Iterator[str]:
    """One optimizer step from the policy that ratios are taken against: every ratio is 1.

    The correction alone is left then, as in decoupled-grpo by itself.
    """
    if not _has_ratios_of_one(config, objective):
        return
    where = f'learner.objective = "{config.objective}"'
    why = (
        'with learner.old = "proximal" and learner.num_minibatches = 1, since every ratio is 1; '
        "set learner.num_minibatches to at least 2"
    )
    if objective.ctn != "none":
        also = ' and learner.correction = "truncate"' if objective.correction == "none" else ""
        yield (
            f'learner.ctn = "{objective.ctn}" never finds a clipped token under {where} {why}, '
            f'learner.old = "behaviour", or learner.ctn = "none"{also}'
        )
    elif objective.surrogate == "second-moment":
        yield f'{where} never masks a token {why}, or learner.old = "behaviour"'
    elif objective.correction == "none" and objective.surrogate != "plain":
        yield (
            f'learner.correction = "none" leaves stale tokens uncorrected under {where} {why}, '
            'learner.old = "behaviour", or learner.correction = "truncate"'
        )


def _idle(config: LearnerConfig, objective: Objective) -> Iterator[tuple[str, str]]:
    """Configured keys that would change nothing, each with the reason."""
    is_read = {
        "ratio": (objective.surrogate != "plain", "which weighs by no ratio"),
        "old": (
            objective.surrogate != "plain"
            or objective.correction != "none"
            or config.old != "proximal",
            "which takes no ratio; learner.correction would weigh by it",
        ),
        "eps_low": (objective.clips, "which does not clip"),
        "eps_high": (objective.clips, "which does not clip"),
        "dual_clip": (objective.surrogate == "clip", "which does not clip"),
        "ctn_target": (objective.ctn == "gradient", "whose ctn is not gradient"),
        "ctn_c": (
            objective.ctn == "gradient" and not objective.ctn_raw,
            "whose ctn is not the safe gradient form",
        ),
        "ctn_raw": (objective.ctn == "gradient", "whose ctn is not gradient"),
        "ctn_strength": (objective.ctn == "penalty", "whose ctn is not penalty"),
        "measure_ctn": (
            objective.surrogate == "clip" and objective.ctn != "gradient",
            "which measures it anyway or does not clip",
        ),
        "max_correction": (objective.correction != "none", "which corrects nothing"),
        "gamma": (objective.needs_critic, "which has no critic"),
        "gae_lambda": (objective.needs_critic, "which has no critic"),
    }
    is_read |= dict.fromkeys(_CRITIC_KEYS, (objective.needs_critic, "which has no critic"))
    if objective.needs_critic:
        is_read["value_clip"] = (
            (config.critic_epochs or 1) > 1,
            "whose critic goes over each batch once, from the very values that the clip is around "
            "(learner.critic_epochs of at least 2 would move them)",
        )
    if objective.clips and _has_ratios_of_one(config, objective):
        reason = (
            "whose ratios are all 1, taken against the start of a step of one optimizer step "
            "(learner.num_minibatches of at least 2 would clip)"
        )
        is_read |= dict.fromkeys(("eps_low", "eps_high", "dual_clip"), (False, reason))
    for key, (reads, reason) in is_read.items():
        if getattr(config, key) is not None and not reads:
            yield key, reason
    if config.ratio is not None and PRESETS[config.objective].ratio == "sequence-product":
        yield "ratio", "which weighs by the product over the trajectory"
