"""Alert rules and the Grafana dashboard name what is exposed, and alerts fire when they should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from leeway.services.api.metrics import FAMILIES
from tests.tools.promtool import promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "leeway.json"
ROWS = [
    "Learning",
    "Staleness",
    "Flow",
    "Watchdog",
    "Publishing",
    "Replay",
    "Rollouts",
    "Engines",
    "API",
]


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions() -> Iterator[tuple[str, str]]:
    """(whose, PromQL) of every alert and panel."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def exposed() -> set[str]:
    """Every name that a query may ask for."""
    names: set[str] = set()
    for family in FAMILIES:
        is_histogram = family.kind == "histogram"
        ends = ("_bucket", "_count", "_sum") if is_histogram else ("",)
        names |= {family.name + end for end in ends}
    return names


def named(expression: str, prefix: str) -> set[str]:
    return set(re.findall(rf"\b{prefix}_\w+", re.sub(r'"[^"]*"', "", expression)))


def test_every_expression_names_metrics_that_are_exposed():
    known = exposed()
    for whose, expression in expressions():
        names = named(expression, "leeway") | named(expression, "ray")
        assert names, f"{whose}: {expression} names no metric"
        assert named(expression, "leeway") <= known, whose


def test_labels_are_those_of_the_metric():
    labels = {family.name: {"run", "le", *family.labels} for family in FAMILIES}
    for whose, expression in expressions():
        for name, matchers in re.findall(r"\b(leeway_\w+)\{([^}]*)\}", expression):
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            found = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert found <= labels.get(name, labels.get(family, set())), whose


def test_every_metric_of_a_run_is_on_the_dashboard_or_in_an_alert():
    shown = set[str]()
    for _, expression in expressions():
        shown |= {re.sub(r"_(bucket|count|sum)$", "", n) for n in named(expression, "leeway")}
    hidden = {family.name for family in FAMILIES if not family.name.startswith("leeway_learner_")}
    assert hidden - shown == {
        "leeway_engine_last_transfer_seconds",
        "leeway_publish_last_timestamp_seconds",
        "leeway_publish_last_version",
        "leeway_retriever_last_success_timestamp_seconds",
        "leeway_rollout_groups_added_total",
        "leeway_rollout_playing_seconds_total",
        "leeway_rollout_admission_wait_seconds_total",
        "leeway_rollout_tokens_total",
        "leeway_rollout_turns_total",
    }


def test_what_vllm_and_ray_are_asked_for_is_what_their_sources_name():
    sources = (
        ("vllm", "v1/metrics/loggers.py", r'name="(vllm:\w+)"'),
        ("ray", "serve/_private/*.py", r'"(serve_\w+)"'),
        ("ray", "dashboard/modules/reporter/*.py", r'"(node_\w+)"'),
    )
    known = set[str]()
    for package, files, pattern in sources:
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations, f"{package}: make setup"
        for file in Path(spec.submodule_search_locations[0]).glob(files):
            known |= {"ray_" + re.sub(r"\W", "_", n) for n in re.findall(pattern, file.read_text())}
    for whose, expression in expressions():
        for name in named(expression, "ray"):
            assert {name, re.sub(r"_(total|bucket)$", "", name)} & known, whose


def test_promtool_accepts_the_rules():
    checked = promtool("check", "rules", RULES / "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_rules_fire_when_they_should_and_only_then():
    tested = promtool("test", "rules", RULES / "alerts_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_tested_to_fire():
    tests = yaml.safe_load((RULES / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules()}


def test_every_alert_says_what_and_what_to_do():
    page = (ROOT / "docs" / "metrics.md").read_text()
    headings = {line.removeprefix("### ").lower() for line in page.splitlines() if "### " in line}
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["runbook_url"] == (f"docs/metrics.md#{rule['alert'].lower()}")
        assert rule["alert"].lower() in headings


def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path):
    variables = {"$__rate_interval": "5m", "$run": ".*"}
    recorded = []
    for i, (_, expression) in enumerate(expressions()):
        for name, stand_in in variables.items():
            expression = expression.replace(name, stand_in)
        recorded.append({"record": f"query:{i}", "expr": expression})
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_accepts_what_the_page_tells_to_scrape(tmp_path: Path):
    page = (ROOT / "docs" / "metrics.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        file = tmp_path / "prometheus.yaml"
        file.write_text(block)
        checked = promtool("check", "config", "--syntax-only", file)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_dashboard_has_its_rows_and_two_variables():
    found = dashboard()
    assert [panel["title"] for panel in found["panels"] if panel["type"] == "row"] == ROWS
    assert [variable["name"] for variable in found["templating"]["list"]] == ["datasource", "run"]
    for panel in found["panels"]:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert {t["datasource"]["uid"] for t in panel["targets"]} == {"${datasource}"}


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells = set[tuple[int, int]]()
    for panel in panels:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not mine & cells, panel["title"]
        cells |= mine
    tops = [panel["gridPos"]["y"] for panel in panels]
    assert all(above <= below for above, below in pairwise(tops))
