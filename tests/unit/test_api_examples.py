"""openapi.json: an example of each answer, which its model accepts, and errors as problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from leeway.services.api import models, resources, submission_models
from leeway.services.api.app import create_app
from leeway.services.api.examples import EXAMPLES
from leeway.services.config import load

MODELS: dict[str, type[BaseModel]] = {
    "status": models.Status,
    "runs": resources.Page[resources.RunItem],
    "run": resources.RunItem,
    "rollouts": resources.Rollouts,
    "policy": resources.Policy,
    "replay": resources.ReplayDetail,
    "learner": resources.LearnerDetail,
    "steps": resources.Page[dict[str, Any]],
    "trajectories": resources.Page[resources.TrajectoryItem],
    "trajectory": resources.TrajectoryDetail,
    "control": resources.ControlAnswer,
    "paused": resources.ControlAnswer,
    "settings": resources.Settings,
    "slots": submission_models.Slots,
    "returned": submission_models.SlotReturned,
    "group": submission_models.GroupAnswer,
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    nothing: Any = None
    app = create_app(
        nothing, nothing, nothing, nothing, run=Path("x"), config=load(None), tokens=None
    )
    return app.openapi()


def test_every_example_has_a_model():
    assert set(EXAMPLES) == set(MODELS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_all_that_its_model_has_and_nothing_else(name: str):
    found = MODELS[name].model_validate(EXAMPLES[name])
    assert found.model_dump(mode="json") == EXAMPLES[name]


def operations(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_answer_of_v1_has_an_example(schema: dict[str, Any]):
    missing = [
        name
        for name, operation in operations(schema)
        if "/v1/" in name and "/v1/sweeps" not in name
        if not any("example" in one for one in operation["responses"]["200"]["content"].values())
    ]
    assert missing == []


def test_every_route_says_what_it_does_and_which_errors_it_gives(schema: dict[str, Any]):
    for name, operation in operations(schema):
        assert operation["description"], name
        for status in ("401", "403", "404", "405", "413", "422", "429", "503"):
            content = operation["responses"][status]["content"]
            kinds = {"application/problem+json", "application/json"}
            assert set(content) <= kinds and content, (name, status)
            if "/v1" in name:
                assert "application/problem+json" in content, (name, status)


def test_what_needs_a_token_says_so(schema: dict[str, Any]):
    assert schema["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for name, operation in operations(schema):
        is_open = name.split()[1] in ("/livez", "/readyz", "/startupz")
        assert ("security" in operation) != is_open, name
