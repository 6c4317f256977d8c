"""Values that would install something that cannot work are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.chart import CUSTOM_KINDS, HELMS, Refused, render

OUTSIDE = {"enabled": False, "url": "redis://redis.example.org:6379/0"}
NO_RAY_REDIS = {"serve": {"gcsFaultTolerance": {"enabled": False}}}
SHARED = {"storage": {"runs": {"accessModes": ["ReadWriteMany"]}}}


def refusal(values: dict[str, Any], **options: Any) -> str:
    with pytest.raises(Refused) as refused:
        render(values, **options)
    (line,) = [text for text in str(refused.value).splitlines() if "execution error" in text]
    return line


@pytest.mark.parametrize("program", HELMS)
def test_without_kuberay_it_says_what_to_install_and_how_to_go_on(program: str):
    said = refusal({}, kinds=(), program=program)
    assert "install the KubeRay operator first, or set serve.enabled=false" in said
    assert "--api-versions ray.io/v1/RayService" in said


@pytest.mark.parametrize(
    "values", [{"serve": {"enabled": False}}, {"crdCheck": False}], ids=["no serve", "no check"]
)
def test_without_kuberay_it_renders_when_told(values: dict[str, Any]):
    assert render(values, kinds=())


@pytest.mark.parametrize("part", ["serviceMonitor", "prometheusRule"])
def test_without_the_prometheus_operator_it_says_so(part: str):
    peers = {"networkPolicy": {"metricsFrom": [{"podSelector": {}}]}}
    values = {"metrics": {part: {"enabled": True}}, **peers}
    assert f"metrics.{part}.enabled needs" in refusal(values, kinds=CUSTOM_KINDS[:1])
    assert render(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"redis": {"url": OUTSIDE["url"]}}, "set redis.enabled=false"),
        ({"redis": {"enabled": False}}, "set redis.url, or redis.existingSecret"),
        ({"redis": OUTSIDE}, "serve.gcsFaultTolerance.redisAddress=HOST:PORT"),
        *(
            (
                {"serve": {"gcsFaultTolerance": {name: value}}},
                "clear them, or set redis.enabled=false",
            )
            for name, value in (
                ("redisAddress", "other:6379"),
                ("username", "other"),
                ("existingSecret", "other"),
                ("passwordKey", "other"),
            )
        ),
        ({"learner": {"replicas": 2}}, "storage.runs.accessModes={ReadWriteMany}"),
        (
            {
                "learner": {"replicas": 2},
                "storage": {"runs": {"enabled": False, "accessModes": ["ReadWriteMany"]}},
            },
            "needs storage.runs",
        ),
        ({"serve": {"mountRuns": True}}, "storage.runs.accessModes={ReadWriteMany}"),
        (
            {"api": {"podDisruptionBudget": {"minAvailable": 1}}},
            "minAvailable or maxUnavailable, not both",
        ),
        (
            {"api": {"podDisruptionBudget": {"maxUnavailable": ""}}},
            "needs minAvailable or maxUnavailable",
        ),
        (
            {"api": {"autoscaling": {"enabled": True, "minReplicas": 5}}},
            "minReplicas is above",
        ),
        ({"api": {"ingress": {"enabled": True}}}, "networkPolicy.apiFrom"),
        ({"api": {"ingress": {"enabled": True}, "enabled": False}}, "set api.enabled=true"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "networkPolicy.metricsFrom"),
        ({"sweep": {"enabled": True}}, "needs sweep.config"),
        (
            {"config": "[policy]\ntensor_parallel_size = 2"},
            "set serve.policy.actorOptions.num_gpus=2",
        ),
        (
            {"serve": {"policy": {"actorOptions": {"num_gpus": 2}}}},
            "set serve.policy.actorOptions.num_gpus=1",
        ),
        ({"serve": {"policyWorkers": {"replicas": 9}}}, "serve.policyWorkers needs minReplicas"),
        ({"serve": {"actorWorkers": {"minReplicas": 2}}}, "serve.actorWorkers needs minReplicas"),
    ],
    ids=str,
)
def test_it_says_what_would_be_right(values: dict[str, Any], words: str):
    assert words in refusal(values)


@pytest.mark.parametrize(
    "values",
    [
        {"redis": OUTSIDE, **NO_RAY_REDIS},
        {"redis": OUTSIDE, "serve": {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}},
        {"learner": {"replicas": 2}, **SHARED},
        {"learner": {"replicas": 2}, "storage": {"runs": {"existingClaim": "runs"}}},
        {"serve": {"mountRuns": True}, **SHARED},
        {
            "config": "[policy]\ntensor_parallel_size = 2",
            "serve": {"policy": {"actorOptions": {"num_gpus": 2}}},
        },
        {"serve": {"policy": {"actorOptions": {"num_gpus": 0}}}},
        {"api": {"podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": ""}}},
        {"api": {"ingress": {"enabled": True}}, "networkPolicy": {"enabled": False}},
    ],
    ids=str,
)
def test_and_what_would_be_right_is_taken(values: dict[str, Any]):
    assert render(values)
