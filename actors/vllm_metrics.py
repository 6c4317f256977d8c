"""vLLM's own metrics, through Ray: `ray_vllm_num_requests_running` and so on.

The engine is part of a Serve replica, so its numbers leave through the agent that exports Ray's own
on every machine. A registry of prometheus_client in the replica would need a port for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.actors.config import PolicyConfig

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import StatLoggerFactory


def stat_loggers(config: PolicyConfig) -> list[StatLoggerFactory]:
    """Where `policy.engine_metrics` is on, the logger that writes to Ray; it then takes the place
    of vLLM's own, whose lines nobody reads."""
    if not config.engine_metrics:
        return []
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]
