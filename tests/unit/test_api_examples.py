"""openapi.json: an example of each answer, which its model accepts, and errors as problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from leeway.services.api import models, resources, submission_models, sweeps
from leeway.services.api.app import create_app
from leeway.services.api.examples import EXAMPLES, SENT
from leeway.services.config import load
from leeway.services.experiments.sweep_rows import Row

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
    "sweeps": resources.Page[sweeps.SweepStatus],
    "sweep": sweeps.SweepDetail,
    "rows": resources.Page[Row],
    "ok": models.Health,
    "not-ready": models.Health,
}
SENT_MODELS: dict[str, type[BaseModel]] = {
    "slots": submission_models.SlotRequest,
    "returned": submission_models.SlotReturn,
    "settings": resources.SettingsChange,
    "group": submission_models.GroupSubmission,
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


@pytest.mark.parametrize("name", SENT)
def test_an_example_of_a_body_is_taken_and_says_all_that_may_be_said(name: str):
    taken = SENT_MODELS[name].model_validate(SENT[name])
    assert taken.model_dump(mode="json") == SENT[name]


def test_every_answer_and_every_error_has_an_example(schema: dict[str, Any]):
    missing = [
        f"{name} {status}"
        for name, operation in operations(schema)
        for status, answer in operation["responses"].items()
        if status != "304" and not all("example" in one for one in answer["content"].values())
    ]
    assert missing == []


def test_every_body_that_is_sent_has_an_example(schema: dict[str, Any]):
    bodies = [o["requestBody"]["content"] for _, o in operations(schema) if "requestBody" in o]
    assert len(bodies) == len(SENT)
    assert all(body["application/json"]["examples"] for body in bodies)


def test_every_parameter_says_what_it_is_with_an_example_that_fits(schema: dict[str, Any]):
    found = [(name, one) for name, o in operations(schema) for one in o.get("parameters", ())]
    assert len(found) > 15
    for name, one in found:
        assert one["description"].endswith("."), (name, one["name"])
        [example] = one["schema"]["examples"]
        jsonschema.validate(example, {k: v for k, v in one["schema"].items() if k != "examples"})


def test_what_is_polled_says_that_it_may_be_unchanged(schema: dict[str, Any]):
    for name, operation in operations(schema):
        is_json = "application/json" in operation["responses"]["200"].get("content", {})
        # The settings have a tag of their own, which says less than the answer does.
        is_polled = name.startswith("GET /v1/") and is_json and name != "GET /v1/settings"
        assert ("304" in operation["responses"]) == is_polled, name
        asked = {one["name"] for one in operation.get("parameters", ())}
        assert ("If-None-Match" in asked) == is_polled, name
        has_tag = "headers" in operation["responses"]["200"]
        assert has_tag == (is_polled or name.endswith("/v1/settings")), name
    assert "if-match" in [p["name"] for p in schema["paths"]["/v1/settings"]["patch"]["parameters"]]


def test_every_list_is_read_on_in_the_same_way(schema: dict[str, Any]):
    lists = [
        (name, operation)
        for name, operation in operations(schema)
        if any(one["name"] == "limit" for one in operation.get("parameters", ()))
    ]
    assert [name for name, _ in lists] == [
        "GET /v1/runs", "GET /v1/learner/steps", "GET /v1/trajectories", "GET /v1/sweeps",
        "GET /v1/sweeps/{name}/rows",
    ]  # fmt: skip
    for name, operation in lists:
        assert "cursor" in [one["name"] for one in operation["parameters"]], name
        body = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        page = schema["components"]["schemas"][body.rpartition("/")[2]]
        assert set(page["properties"]) == {"items", "next"}, name


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
