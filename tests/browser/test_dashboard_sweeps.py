"""The sweeps beside the run: where they stand, and what they have found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from leeway.services.experiments.sweep_folder import SweepState
from tests.unit.sweep_results import arm, leave

from .looking import PHONE, looking, shows, state, until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

    from .conftest import Seen
    from .site import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")

POINTS = "#sweep-chart .point"


def swept(site: Site, name: str = "lags", phase: Any = "running", **more: Any) -> None:
    """Two objectives at 0 and 4 versions, two seeds; one arm has failed, one has collapsed."""
    results = [
        arm("grpo", 0, 0, 0.9), arm("grpo", 0, 1, 0.94), arm("grpo", 4, 0, 0.8, lags=[4.0] * 4),
        arm("grpo", 4, 1, 0.84, lags=[4.0] * 4), arm("ppo", 0, 0, 0.9), arm("ppo", 0, 1, 0.9),
        arm("ppo", 4, 0, 0.2, lags=[4.0] * 4, status="collapsed", collapse_step=2),
        arm("ppo", 4, 1, lags=[], status="failed", reason="CUDA out of memory, 1 GiB"),
    ]  # fmt: skip
    folder = leave(site.sweeps / name, results, {"grpo": 1e-4, "ppo": 5e-5})
    told = {"num_ended": 8, "num_failed": 1, "num_collapsed": 1, "running": ["x"]} | more
    folder.write_state(
        SweepState(
            name=name, phase=phase, num_arms=12, updated_at=time.time(),
            rates={"grpo": 1e-4, "ppo": 5e-5}, **told,
        )
    )  # fmt: skip


async def no_complaint(page: Page, seen: Seen) -> None:
    assert await page.evaluate("window.violations") == []
    # Redis may answer late on a busy machine, which is told elsewhere and tried again.
    console = [line for line in seen.console if "503" not in line]
    assert (console, seen.exceptions) == ([], [])


async def test_without_a_sweep_there_is_no_such_part(browser: Browser, site: Site):
    async with looking(browser, site) as (page, seen):
        await shows(page, "#trajectory h3", "Alvar")
        assert not await page.locator("#sweeps").is_visible()
        await no_complaint(page, seen)


async def test_a_sweep_shows_how_far_it_is_and_what_it_says(browser: Browser, site: Site):
    swept(site)
    async with looking(browser, site) as (page, seen):
        await shows(page, "#sweep-list", "8 of 12 runs ended · 1 collapsed · 1 failed")
        await shows(page, "#sweep-list .pill", "running")
        bar = page.locator("#sweep-list progress")
        assert [await bar.get_attribute(name) for name in ("value", "max")] == ["8", "12"]
        await shows(page, "#sweep h3", "lags")
        await shows(page, "#sweep .facts", "grpo 0.0001, ppo 0.00005")
        # 0.82 of 0.92 is 89 %.
        await shows(page, "#sweep .verdicts li", "grpo keeps 95% of its on-policy score (0.920) at")
        await no_complaint(page, seen)


async def test_the_chart_has_a_point_for_each_series_at_each_realised_staleness(
    browser: Browser, site: Site
):
    swept(site)
    async with looking(browser, site) as (page, _):
        await page.locator(POINTS).first.wait_for()
        labels = [await p.get_attribute("aria-label") for p in await page.locator(POINTS).all()]
        assert labels == [
            # 0.92 +- 12.706 * 0.0283 / sqrt(2) leaves 0 to 1 on both sides.
            "grpo at 0.0 versions: 0.920 (0.666 to 1.000), 2 runs",
            "grpo at 4.0 versions: 0.820 (0.566 to 1.000), 2 runs",
            "ppo at 0.0 versions: 0.900 (0.900 to 0.900), 2 runs",
            "ppo at 4.0 versions: 0.200, 2 runs, 1 failed, 1 collapsed",
        ]
        await page.locator(POINTS).nth(1).focus()
        await shows(page, "#sweep-point", "grpo at 4.0 versions: 0.820")


async def test_a_series_can_be_taken_out_of_the_chart_and_put_back(browser: Browser, site: Site):
    swept(site)
    async with looking(browser, site) as (page, _):
        key = page.locator(".keys button", has_text="ppo").last
        await key.click()
        assert await key.get_attribute("aria-pressed") == "false"
        assert await page.locator(POINTS).count() == 2
        await key.press("Enter")
        assert await page.locator(POINTS).count() == 4


async def test_every_run_is_a_row_and_a_failed_one_says_why(browser: Browser, site: Site):
    swept(site)
    async with looking(browser, site) as (page, _):
        await page.get_by_text("Every run that has ended (8)").click()
        rows = page.locator("#sweep-runs tbody tr")
        assert await rows.count() == 8
        first = await rows.first.locator("th, td").all_inner_texts()
        assert first[:4] == ["grpo, seed 0", "0.00", "0.900", "0.300"]
        await shows(page, "#sweep-runs td", "set to 4 versions; failed: CUDA out of memory, 1 GiB")
        await shows(page, "#sweep-runs th", "ppo, seed 0 collapsed at step 2")


async def test_it_follows_a_sweep_that_goes_on(browser: Browser, site: Site):
    swept(site)
    async with looking(browser, site) as (page, _):
        await page.clock.install()
        await page.reload()
        await state(page, "live")
        await shows(page, "#sweep-list .pill", "running")
        folder = site.sweeps / "lags"
        text = (folder / "sweep.json").read_text().replace('"running"', '"done"', 1)
        (folder / "sweep.json").write_text(text)
        await page.clock.fast_forward(11_000)
        await shows(page, "#sweep-list .pill", "done")


async def test_the_address_of_a_sweep_opens_it(browser: Browser, site: Site):
    swept(site, "one")
    swept(site, "two")
    async with looking(browser, site) as (page, _):
        link = page.locator("#sweep-list a", has_text="one")
        await link.click()
        await shows(page, "#sweep h3", "one")
        assert page.url.endswith("#sweep=one")
        assert await link.get_attribute("aria-current") == "true"
        await page.reload()
        await state(page, "live")
        await shows(page, "#sweep h3", "one")


async def test_a_sweep_without_an_ended_run_says_so(browser: Browser, site: Site):
    leave(site.sweeps / "begun", [])
    async with looking(browser, site) as (page, seen):
        await shows(page, "#sweep .empty", "No run of the grid has ended yet")
        await no_complaint(page, seen)


async def test_a_sweep_that_cannot_be_read_is_named(browser: Browser, site: Site):
    folder = site.sweeps / "broken"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    async with looking(browser, site) as (page, seen):
        await shows(page, "#sweep .empty", "The sweep broken cannot be read")
        assert seen.exceptions == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_phone_it_is_no_wider_than_the_screen(browser: Browser, site: Site, scheme: Any):
    swept(site, "a-sweep-whose-name-is-as-long-as-a-name-of-a-sweep-may-ever-be")
    async with looking(browser, site, color_scheme=scheme, **PHONE) as (page, seen):
        await page.locator(POINTS).first.wait_for()
        await page.locator("#sweep-runs summary").click()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        wide = "[...document.querySelectorAll('#sweeps :is(a, li, svg, button)')]"
        wide += ".filter(n => n.getBoundingClientRect().right > 360).map(n => n.outerHTML)"
        assert await page.evaluate(wide) == []
        await no_complaint(page, seen)


async def test_points_keys_and_rows_are_reached_with_the_keyboard(browser: Browser, site: Site):
    swept(site)
    async with looking(browser, site) as (page, _):
        await page.locator("#sweep-list a").focus()
        reached: list[str] = []
        for _ in range(10):
            await page.keyboard.press("Tab")
            what = "(e => e.getAttribute('class') || e.textContent)(document.activeElement)"
            reached.append(await page.evaluate(what))
        assert reached[:4] == ["point"] * 4
        assert reached[4:7] == ["key", "key", "Every run that has ended (8)"]
        await page.locator("#sweep-runs summary").press("Enter")
        await page.keyboard.press("Tab")
        await until(page, "document.activeElement.getAttribute('role') === 'region'")
