"""Every symptom of the runbook can occur: it is an alert that exists, or words of a message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from leeway.services.config_text import known_keys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy" / "RUNBOOK.md").read_text()
HEADINGS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
MESSAGES = [found[1] for heading in HEADINGS if (found := re.fullmatch(r"`(.+)`", heading))]
ALERTS = [found[1] for heading in HEADINGS if (found := re.fullmatch(r"Alert `(\w+)`", heading))]
SPANS = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))


def source() -> str:
    """All code, with the pieces of a string that is broken over lines put together."""
    parts = ("actors", "learner", "replay", "services")
    files = (file for part in parts for file in (ROOT / part).rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\n\s*f?r?"', "", text)


def test_every_alert_that_exists_is_in_the_runbook_and_no_other():
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert sorted(ALERTS) == sorted(names)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_is_one_of_the_code(message: str):
    # A number or name stands for what the code puts in.
    pieces = [piece for piece in re.split(r"\d+|SIGTERM", message) if len(piece) > 4]
    pattern = r"[^\n]{0,60}?".join(re.escape(piece) for piece in pieces)
    assert re.search(pattern, source()), message


def test_every_metric_that_is_named_exists():
    named = {span for span in SPANS if span.startswith("leeway_")}
    metrics = (ROOT / "services" / "api").rglob("*.py")
    text = "\n".join(file.read_text(encoding="utf-8") for file in metrics)
    assert [name for name in named if f'"{name.removesuffix("_total")}"' not in text] == []


def test_every_key_that_is_named_exists():
    tables = {key.partition(".")[0] for key in known_keys() if "." in key}
    pattern = rf"(?:{'|'.join(tables)})\.[a-z_]+"
    named = {span for span in SPANS if re.fullmatch(pattern, span)}
    assert named - set(known_keys()) == set()
    assert len(named) > 5


def test_every_value_of_the_chart_that_is_named_exists():
    values = yaml.safe_load((ROOT / "helm" / "leeway" / "values.yaml").read_text())
    named = {span for span in SPANS if re.fullmatch(r"learner\.[a-z]+[A-Z]\w+", span)}
    assert named
    assert [name for name in named if name.partition(".")[2] not in values["learner"]] == []


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)", PAGE)
    assert [link for link in links if not (ROOT / "deploy" / link).exists()] == []
