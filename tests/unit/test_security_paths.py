"""Names that come from outside never lead to a file or a key that was not meant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leeway.replay.errors import ConfigurationError
from leeway.replay.keys import replay_prefix
from leeway.services.config import RunConfig

from .test_api import TOKENS, ask, bearer, build

PIECES = ("..", ".", "/", "\\", "%2e%2e", "%2f", "%00", "\0", "~", "outside", "runs", "config.toml")
PIECES += ("{", "}", "*", "\n", ";", "$(x)", "C:", "file://", "é", "a" * 50, "-", " ")
hostile = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
routes = st.sampled_from(["/v1/runs/{}", "/v1/trajectories/{}", "/v1/sweeps/{}", "/static/{}"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/demo, and beside `runs` a folder that looks like a run and that nobody asked for."""
    root = tmp_path_factory.mktemp("root")
    for folder in (root / "runs" / "demo", root / "outside"):
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text("canary = 1\n")
        (folder / "summary.json").write_text('{"canary": 1}')
    return root / "runs"


@pytest.fixture(scope="module")
def get(runs: Path) -> Iterator[Callable[[str], httpx.Response]]:
    """GET of a path with the read token; one application, since making it takes long."""
    app = build(tokens=TOKENS, run=runs / "demo")
    with asyncio.Runner() as runner:
        yield lambda path: runner.run(ask(app, path, headers=bearer(TOKENS.read)))


@given(route=routes, name=hostile, is_quoted=st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_name_in_a_path_leads_out_of_the_folder(
    get: Callable[[str], httpx.Response], route: str, name: str, is_quoted: bool
):
    written = quote(name, safe="" if is_quoted else "/%.~{}*;$():")
    answer = get(route.format(written))
    assert answer.status_code < 500
    assert "canary" not in answer.text


@pytest.mark.parametrize("name", ["..", "../outside", "..%2foutside", "%2e%2e%2foutside", "%00"])
@pytest.mark.parametrize("route", ["/v1/runs/{}", "/v1/trajectories/{}", "/static/{}"])
def test_a_way_out_is_not_found(get: Callable[[str], httpx.Response], route: str, name: str):
    answer = get(route.format(name))
    is_the_page = answer.text.startswith("<!doctype html>")  # clients take /static/.. for /
    assert answer.status_code in (404, 405) or is_the_page or answer.json().get("items") == []


@given(hostile)
def test_a_hostile_name_is_no_run_and_no_key(name: str):
    is_plain = all(c.isascii() and (c.isalnum() or c in "._-") for c in name) and name[0].isalnum()
    if is_plain and len(name) <= 100:
        return
    with pytest.raises(ConfigurationError):
        replay_prefix(name)
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"name": name})


async def test_a_token_in_the_address_is_no_token():
    app = build(tokens=TOKENS)
    for name in ("token", "access_token", "authorization", "api_key"):
        answer = await ask(app, f"/v1/status?{name}={TOKENS.control}")
        assert answer.status_code == 401
