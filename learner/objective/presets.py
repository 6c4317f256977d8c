"""What each name in the literature means here: ratio x surrogate x ctn x advantage x reduce, as
data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from leeway.learner.config import LearnerConfig
from leeway.learner.objective.advantage import Advantage
from leeway.learner.objective.clip import Surrogate
from leeway.learner.objective.ctn import Ctn
from leeway.learner.objective.ratio import Ratio
from leeway.learner.objective.reduce import Reduce
from leeway.replay.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective. Ratios are taken against the policy that sampled each token."""

    ratio: Ratio
    surrogate: Surrogate
    advantage: Advantage
    reduce: Reduce
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
    ctn_c: float = 1.0
    ctn_raw: bool = False
    ctn_strength: float = 1.0
    """lambda of the penalty form."""

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

PRESETS: Final[Mapping[str, Objective]] = MappingProxyType(
    {
        # arXiv 2511.20718 v2, and the note's penalty in the place of its normalization.
        "so-grpo": _SO_GRPO,
        "so-grpo-penalty": replace(_SO_GRPO, ctn="penalty"),
        # arXiv 2402.03300
        "grpo": replace(_SO_GRPO, ratio="token", ctn="none"),
        # arXiv 2507.18071; averaged logs sit near 1, hence the small distances.
        "gspo": replace(_SO_GRPO, ratio="sequence", ctn="none", eps_low=3e-4, eps_high=4e-4),
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


_OVERRIDES: Final = ("ratio", "reduce", "eps_low", "eps_high", "dual_clip")


def resolve(config: LearnerConfig) -> Objective:
    """The preset that `config.objective` names, with the configured overrides.

    Raises ConfigurationError for an unknown name, and for an override that would do nothing.
    """
    preset = PRESETS.get(config.objective)
    if preset is None:
        raise ConfigurationError(
            f"learner.objective is {config.objective!r}; it must be one of "
            f"{', '.join(sorted(PRESETS))} (presets that need a critic are not built)"
        )
    useless = [key for key in _OVERRIDES if not _applies(key, config, preset)]
    if useless:
        raise ConfigurationError(
            f"learner.{useless[0]} does nothing under objective {config.objective}; leave it out"
        )
    chosen = {key: value for key in _OVERRIDES if (value := getattr(config, key)) is not None}
    return replace(
        preset,
        ctn_c=config.ctn_c,
        ctn_raw=config.ctn_raw,
        ctn_strength=config.ctn_strength,
        **chosen,
    )


def _applies(key: str, config: LearnerConfig, preset: Objective) -> bool:
    """Whether an override is absent or changes something."""
    if getattr(config, key) is None or key == "reduce":
        return True
    if key == "ratio":
        return preset.ratio not in ("none", "sequence-product")
    if key == "dual_clip":
        return preset.surrogate == "clip"
    return getattr(preset, key) is not None
