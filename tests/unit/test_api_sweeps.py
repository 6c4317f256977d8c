"""`/v1/sweeps`: what lies in the folder of sweeps, and nothing outside it."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from msgspec import structs

from leeway.services.api.sweeps import sweeps_router
from leeway.services.experiments.sweep_folder import SweepFolder, SweepState

from .sweep_results import arm, leave


def client(folder: Path) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(sweeps_router(folder))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    folder = tmp_path / "sweeps"
    demo = leave(folder / "demo", [arm(lag=lag, seed=s) for lag in (0, 2) for s in (0, 1)])
    demo.write_state(
        SweepState(
            name="demo", phase="running", num_arms=6, num_ended=4, num_failed=0, num_collapsed=0,
            running=["x"], rates={"grpo": 1e-4}, updated_at=1.0,
        )
    )  # fmt: skip
    leave(folder / "begun", [])
    leave(tmp_path / "secret", [arm()])
    return folder


async def test_every_sweep_is_listed_and_a_silent_one_is_interrupted(sweeps: Path):
    async with client(sweeps) as api:
        found = (await api.get("/v1/sweeps")).json()
    found = found["items"]
    assert {one["name"]: one["phase"] for one in found} == {
        "begun": "stopped",
        "demo": "interrupted",
    }
    demo = next(one for one in found if one["name"] == "demo")
    assert (demo["num_arms"], demo["num_ended"], demo["running"]) == (6, 4, [])


async def test_a_folder_that_does_not_exist_holds_no_sweep(tmp_path: Path):
    async with client(tmp_path / "nowhere") as api:
        answer = await api.get("/v1/sweeps")
    assert (answer.status_code, answer.json()) == (200, {"items": [], "next": None})


async def test_sweeps_come_in_pages_each_once(sweeps: Path):
    async with client(sweeps) as api:
        first = (await api.get("/v1/sweeps", params={"limit": 1})).json()
        more = {"limit": 1, "cursor": first["next"]}
        second = (await api.get("/v1/sweeps", params=more)).json()
    assert {page["items"][0]["name"] for page in (first, second)} == {"begun", "demo"}
    assert second["next"] is None


async def test_a_sweep_that_changes_between_two_pages_comes_once(sweeps: Path):
    state = SweepFolder(sweeps / "demo").read_state()
    assert state is not None
    async with client(sweeps) as api:
        first = (await api.get("/v1/sweeps", params={"limit": 1})).json()
        SweepFolder(sweeps / "begun").write_state(structs.replace(state, updated_at=9e9))
        more = {"limit": 1, "cursor": first["next"]}
        second = (await api.get("/v1/sweeps", params=more)).json()
    assert [page["items"][0]["name"] for page in (first, second)] == ["begun", "demo"]


@pytest.mark.parametrize("state", ["{", '{"name": 3}'])
async def test_a_sweep_that_cannot_be_read_hides_no_other(sweeps: Path, state: str):
    (sweeps / "begun" / "sweep.json").write_text(state)
    async with client(sweeps) as api:
        found = (await api.get("/v1/sweeps")).json()["items"]
    assert [one["name"] for one in found] == ["demo"]


async def test_one_sweep_says_what_it_has_found(sweeps: Path):
    async with client(sweeps) as api:
        found = (await api.get("/v1/sweeps/demo")).json()
        begun = (await api.get("/v1/sweeps/begun")).json()
    assert (found["mode"], found["retention"]) == ("exact", 0.95)
    assert found["verdicts"][0]["kept_staleness"] == 2.0
    assert "at every staleness tried" in found["verdicts"][0]["sentence"]
    assert begun["verdicts"] == begun["points"] == []


async def test_a_sweep_has_a_point_for_each_series_and_realised_staleness(sweeps: Path):
    async with client(sweeps) as api:
        points = (await api.get("/v1/sweeps/demo")).json()["points"]
    shown = [(one["series"], one["staleness"], one["mean"], one["num_arms"]) for one in points]
    # Behind the ramp of steps 0, 1, 2, 2 every token is two versions old.
    assert shown == [("grpo", 0.0, 0.9, 2), ("grpo", 2.0, 0.9, 2)]
    assert [one["num_failed"] for one in points] == [0, 0]


async def test_rows_come_in_pages_each_once(sweeps: Path):
    names, cursor = [], None
    async with client(sweeps) as api:
        for _ in range(2):
            parameters = {"limit": 3} | ({"cursor": cursor} if cursor else {})
            page = (await api.get("/v1/sweeps/demo/rows", params=parameters)).json()
            names += [row["arm"] for row in page["items"]]
            cursor = page["next"]
    assert cursor is None
    assert len(names) == len(set(names)) == 4 and names == sorted(names)


@pytest.mark.parametrize("name", ["nowhere", "..", "%2e%2e%2fsecret", "..%2Fsecret", "a%00b"])
async def test_a_sweep_that_is_not_there_is_404(sweeps: Path, name: str):
    async with client(sweeps) as api:
        assert (await api.get(f"/v1/sweeps/{name}/rows")).status_code == 404


async def test_a_page_has_a_size(sweeps: Path):
    async with client(sweeps) as api:
        for limit in ("0", "1001", "many"):
            answer = await api.get("/v1/sweeps/demo/rows", params={"limit": limit})
            assert answer.status_code == 422
