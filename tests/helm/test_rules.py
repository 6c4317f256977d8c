"""The PrometheusRule is the file of deploy/ for one run, the dashboard is its file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, HELMS, find, objects, render
from tests.helm.tools import ROOT
from tests.tools.promtool import promtool

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
RUN = 'run="search-rel-leeway"'
API = 'job="rel-leeway-api", namespace="search"'
DASHBOARD = ROOT / "deploy" / "grafana" / "leeway.json"


def unscoped(spec: dict[str, Any], run: str) -> dict[str, Any]:
    """Rendered rules with `run` in the place of the release's matcher, such as "" for none."""
    for group in spec["groups"]:
        for rule in group["rules"]:
            expr = rule["expr"].replace(API, 'job=~".*leeway.*"')
            expr = re.sub(RUN + "(, )?", lambda m: run + (m[1] or "") * bool(run), expr)
            rule["expr"] = expr.replace("{}", "")
    return spec


@pytest.mark.parametrize("program", HELMS)
def test_the_rules_but_for_the_run_are_those_of_the_file_to_the_letter(program: str):
    """Their own braces included, which are Prometheus' and not Helm's."""
    spec = unscoped(find(objects("full", program), "PrometheusRule")["spec"], "")
    assert spec == yaml.safe_load(ALERTS.read_text())
    assert "{{ $labels.run }}" in json.dumps(spec)


def test_every_alert_is_about_the_run_of_its_release():
    """Two releases would each fire for both."""
    spec = find(objects("full"), "PrometheusRule")["spec"]
    found = [rule["expr"] for group in spec["groups"] for rule in group["rules"]]
    scoped = '{run="search-rel-leeway"'
    metrics = [m for e in found for m in re.finditer(r"\bleeway_\w+", e)]
    assert len(metrics) > 10
    assert all(m.string[m.end() :].startswith(scoped) for m in metrics)
    assert all(scoped + '"}{' not in e and "}{" not in e for e in found)
    (missing,) = [e for e in found if "up{" in e]
    assert 'up{job="rel-leeway-api", namespace="search"}' in missing


@pytest.mark.parametrize("program", HELMS)
def test_the_dashboard_is_that_of_the_file(program: str):
    data = find(objects("full", program), "ConfigMap", "rel-leeway-dashboard")["data"]
    assert json.loads(data["leeway.json"]) == json.loads(DASHBOARD.read_text())


@pytest.mark.parametrize(
    ("copy", "source"),
    [("alerts.yaml", ALERTS), ("leeway.json", DASHBOARD)],
    ids=["alerts", "dashboard"],
)
def test_the_copy_in_the_chart_is_the_file(copy: str, source: Path):
    assert (CHART / "files" / copy).read_bytes() == source.read_bytes(), (
        "copy it again: python helm/generate.py"
    )


def test_promtool_takes_the_rendered_rules(tmp_path: Path):
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(find(objects("full"), "PrometheusRule")["spec"]))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_rendered_rules_fire_as_the_tests_of_the_file_say(tmp_path: Path):
    """deploy/prometheus/alerts_test.yaml, with the rendered rules for any run in its place."""
    spec = unscoped(find(objects("full"), "PrometheusRule")["spec"], 'run=~".+"')
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(spec))
    cases = (ALERTS.parent / "alerts_test.yaml").read_text()
    (tmp_path / "alerts_test.yaml").write_text(cases)
    tested = promtool("test", "rules", tmp_path / "alerts_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_finds_a_rule_that_is_wrong(tmp_path: Path):
    spec = find(objects("full"), "PrometheusRule")["spec"]
    spec["groups"][0]["rules"][0]["expr"] = "rate(leeway_up[5m"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    assert promtool("check", "rules", tmp_path / "rules.yaml").returncode != 0


def test_prometheus_scrapes_with_the_reading_token():
    (endpoint,) = find(objects("full"), "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    token = {"name": "rel-leeway", "key": "api-read-token"}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": token}


def test_what_needs_the_prometheus_operator_is_off_by_default():
    kinds = {document["kind"] for document in render({"serve": {"enabled": False}}, kinds=())}
    assert kinds & {"ServiceMonitor", "PrometheusRule", "RayService"} == set()
