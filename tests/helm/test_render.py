"""Lint, schemas and semantics, in this order, over every ci/*-values.yaml with Helm 3 and 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import schemas, semantics
from tests.helm.chart import CHART, CI_NAMES, HELMS, helm, objects, render

every_helm = pytest.mark.parametrize("program", HELMS)
every_ci = pytest.mark.parametrize("ci", CI_NAMES)


@every_ci
@every_helm
def test_lint_finds_nothing(ci: str, program: str):
    values = CHART / "ci" / f"{ci}-values.yaml"
    said = helm("lint", "--strict", str(CHART), "--values", str(values), program=program)
    assert "1 chart(s) linted, 0 chart(s) failed" in said


@pytest.mark.parametrize("version", schemas.VERSIONS)
@every_ci
@every_helm
def test_every_object_fits_its_schema(ci: str, program: str, version: str, crd_folder: Path):
    custom = schemas.custom_schemas(crd_folder)
    documents = objects(ci, program)
    assert [f for d in documents for f in schemas.faults(d, version, custom)] == []


@every_ci
@every_helm
def test_the_objects_fit_each_other(ci: str, program: str):
    assert semantics.faults(objects(ci, program)) == []


SWITCHES = {
    "no API": {"api": {"enabled": False}},
    "no learner": {"learner": {"enabled": False}},
    "no Ray": {"serve": {"enabled": False}},
    "no Redis": {
        "redis": {"enabled": False, "url": "redis://redis:6379/0"},
        "serve": {"gcsFaultTolerance": {"enabled": False}},
    },
    "no claims": {"storage": {"runs": {"enabled": False}, "redis": {"enabled": False}}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "no test": {"tests": {"enabled": False}},
    "no budget": {part: {"podDisruptionBudget": {"enabled": False}} for part in ("api", "learner")},
    "no account": {"serviceAccount": {"create": False}},
    "another name": {"nameOverride": "search", "serviceAccount": {"name": "rel-account"}},
    "no retriever": {"serve": {"retriever": {"enabled": False}}},
}


@pytest.mark.parametrize("switch", SWITCHES)
@every_helm
def test_the_objects_fit_each_other_with_a_part_turned_off(
    switch: str, program: str, crd_folder: Path
):
    documents = render(SWITCHES[switch], program=program)
    assert semantics.faults(documents) == []
    custom = schemas.custom_schemas(crd_folder)
    assert [f for d in documents for f in schemas.faults(d, schemas.VERSIONS[-1], custom)] == []


@every_ci
def test_both_helms_render_the_same_objects(ci: str):
    ours, theirs = ({str(d): d for d in objects(ci, program)} for program in HELMS)
    assert ours == theirs
