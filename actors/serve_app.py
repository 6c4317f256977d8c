"""The Ray Serve applications of a run: which there are, starting and ending them.

What runs in them is in serve_replicas.py, how they are called in serve_handles.py; no other file of
this part imports ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray import serve

from leeway.actors.config import PolicyConfig
from leeway.actors.failures import EngineError
from leeway.actors.serve_handles import READY_POLL_S, HandleRollouts, cause_of
from leeway.actors.serve_replicas import (
    DRAIN_S,
    ActorSpec,
    PolicyServer,
    RetrieverServer,
    RolloutServer,
)

log = logging.getLogger(__name__)

UNDEPLOY_S = 20.0
"""How long replicas may take to hand over what they hold."""
APPLICATIONS = ("policy", "retriever", "rollout")
"""Names of the applications of a run. A Ray cluster serves one run."""


def policy_application(spec: ActorSpec) -> serve.Application:
    """The engines."""
    return PolicyServer.options(
        num_replicas=spec.policy.num_replicas, ray_actor_options=_resources(spec.policy)
    ).bind(spec)


def retriever_application(spec: ActorSpec) -> serve.Application:
    """The index of `search.index` or `search.corpus`."""
    return RetrieverServer.options(ray_actor_options={"num_cpus": 0}).bind(spec)


def rollout_application(spec: ActorSpec) -> serve.Application:
    """The rollout workers; they look for the other two by name."""
    return RolloutServer.options(
        num_replicas=spec.rollout.num_workers, ray_actor_options={"num_cpus": 0}
    ).bind(spec)


async def deploy(spec: ActorSpec) -> HandleRollouts:
    """Start the applications and wait until every replica is ready; Ray must be up.

    Raises EngineError when a replica fails to start, or is not ready in policy.start_timeout_s. It
    may be cancelled at any time; `undeploy` then takes down what has been started.
    """
    began = time.monotonic()
    starting = asyncio.create_task(asyncio.to_thread(_start_applications, spec))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread goes on all the same, and would start what `undeploy` has just ended.
        await asyncio.gather(starting, return_exceptions=True)
        raise
    while waiting := await asyncio.to_thread(_not_ready):
        if time.monotonic() - began > spec.policy.start_timeout_s:
            raise EngineError(
                f"{', '.join(waiting)} not ready within policy.start_timeout_s = "
                f"{spec.policy.start_timeout_s:g}; raise it, or see why in the log"
            )
        await asyncio.sleep(READY_POLL_S)
    log.info("applications ready after %.0f s", time.monotonic() - began)
    return HandleRollouts(serve.get_app_handle("rollout"))


def _start_applications(spec: ActorSpec) -> None:
    serve.start(proxy_location="Disabled")
    targets = [_target(policy_application(spec), "policy")]
    if spec.search.retriever_url is None:
        targets.append(_target(retriever_application(spec), "retriever"))
    targets.append(_target(rollout_application(spec), "rollout"))
    serve.run_many(targets, wait_for_applications_running=False)


def _target(application: serve.Application, name: str) -> serve.RunTarget:
    # Without this every turn of every episode is a line in three logs.
    quiet = {"enable_access_log": False}
    return serve.RunTarget(application, name=name, route_prefix=None, logging_config=quiet)


def _not_ready() -> list[str]:
    """Applications that are still starting. Raises EngineError for one that cannot."""
    found = serve.status().applications
    applications = {name: found[name] for name in APPLICATIONS if name in found}
    for name, application in applications.items():
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [d.message for d in application.deployments.values() if d.message]
            reason = cause_of(RuntimeError(messages[0] if messages else application.message))
            raise EngineError(f"the application {name} did not start: {reason}")
    return [name for name, application in applications.items() if application.status != "RUNNING"]


def undeploy() -> None:
    """Take the applications down; engines and workers get their shutdown calls. What else the Ray
    cluster serves stays. Returns when they are gone, or after UNDEPLOY_S."""
    deadline = time.monotonic() + UNDEPLOY_S
    for name in _deployed():
        serve.delete(name, _blocking=False)
    while _deployed() and time.monotonic() < deadline:
        time.sleep(DRAIN_S)


def _deployed() -> list[str]:
    applications = serve.status().applications
    return [name for name in APPLICATIONS if name in applications]


def _resources(policy: PolicyConfig) -> dict[str, Any]:
    import torch

    if policy.backend == "vllm" and torch.cuda.is_available():
        return {"num_cpus": 0, "num_gpus": policy.tensor_parallel_size}
    return {"num_cpus": 0}
