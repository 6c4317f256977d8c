"""A headless Chromium for the dashboard: the one that is installed, driven by Playwright.

Playwright's own browsers are not downloaded. Without a Chromium these tests skip; `--browser`, as
`make browser` and CI run them, makes that a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from fastapi import FastAPI

from leeway.replay.server import EmbeddedRedis
from leeway.services.api.app import serve_in_thread
from leeway.services.api.dashboard import add_dashboard

from .site import QUESTION_ID, TURNS, Site

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_MS = 15_000
"""Longest wait for something to show on the page."""
RUNS = count()

NewSite = Callable[..., Awaitable[Site]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--browser", action="store_true", help="fail, do not skip, where Chromium is missing"
    )


@pytest.fixture(scope="session")
def chromium_path(pytestconfig: pytest.Config) -> str:
    """LEEWAY_CHROMIUM, or the first of NAMES on the PATH."""
    found = os.environ.get("LEEWAY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    has_driver = importlib.util.find_spec("playwright") is not None
    if found and has_driver:
        return found
    missing = "Chromium is not on the PATH" if has_driver else "playwright is not installed"
    leave = pytest.fail if pytestconfig.getoption("--browser", default=False) else pytest.skip
    leave(f"{missing}; CONTRIBUTING.md says how the tests of the dashboard get both")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium_path: str) -> AsyncIterator[Browser]:
    """One Chromium for the tests of a module."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path)
        yield browser
        await browser.close()


@dataclass
class Seen:
    """What a page complained about while it was open."""

    console: list[str] = field(default_factory=list)
    """Warnings and errors; Chromium reports a violation of the policy here."""
    exceptions: list[str] = field(default_factory=list)


@asynccontextmanager
async def opened(
    browser: Browser, url: str, *, init: str = "", **context: Any
) -> AsyncIterator[tuple[Page, Seen]]:
    """A page in a profile of its own. `init` runs before the page's own scripts; `context` is what
    Playwright's new_context takes.
    """
    profile = await browser.new_context(**context)
    page = await profile.new_page()
    if init:
        await page.add_init_script(init)
    page.set_default_timeout(WAIT_MS)
    seen = Seen()
    page.on(
        "console",
        lambda message: (
            seen.console.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: seen.exceptions.append(str(error)))
    try:
        await page.goto(url)
        yield page, seen
    finally:
        await profile.close()


@pytest.fixture(scope="module")
def static_site() -> Iterator[str]:
    """The page and its modules without a run behind them; the address."""
    app = FastAPI()
    add_dashboard(app)
    address, stop = serve_in_thread(app, "127.0.0.1", 0)
    yield address
    stop()


@pytest.fixture(scope="module")
def static_files() -> list[Path]:
    """Every file that is served below /static, less what is vendored."""
    from leeway.services.api.dashboard import STATIC

    return sorted(f for f in STATIC.rglob("*") if f.is_file() and "vendor" not in f.parts)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest_asyncio.fixture(loop_scope="module")
async def new_site(redis_url: str, tmp_path: Path) -> AsyncIterator[NewSite]:
    """Makes runs that have just started; ends them."""
    sites: list[Site] = []

    async def make(port: int = 0) -> Site:
        sites.append(Site(tmp_path, redis_url, f"run-{next(RUNS)}", port))
        await sites[-1].begin()
        return sites[-1]

    yield make
    for site in sites:
        await site.close()


@pytest_asyncio.fixture(loop_scope="module")
async def site(new_site: NewSite) -> Site:
    """A run at step 2."""
    site = await new_site()
    await site.set_phase("training")
    await site.note("run", "started")
    await site.report_engine("engine-1", version=1)
    await site.report_worker(wait_share=0.71)
    await site.learn(1, reward=0.25)
    await site.learn(2, reward=0.5)
    await site.play(QUESTION_ID, TURNS)
    return site
