"""The dashboard in a browser, over a run that goes on while it is looked at."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from leeway.replay.server import EmbeddedRedis

from .conftest import opened
from .looking import PHONE, looking, shows, state, tile, until
from .site import HOSTILE, QUESTION, TURNS, Site

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Browser

    from .conftest import NewSite

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER_QUESTION, OTHER_ID = "In what year was Kareem Abdul-Jabbar born?", "rf-4"


# --- a live run ---


async def test_it_shows_the_numbers_of_the_run(browser: Browser, site: Site):
    async with looking(browser, site) as (page, _):
        await shows(page, "#step-now", "Step 2")
        assert await tile(page, "Reward") == "0.500"
        assert await tile(page, "Exact match") == "0.250"
        assert await tile(page, "Clipped tokens") == "2.1 %"
        assert await tile(page, "Trained") == "400"
        await shows(page, "#phase", "training")
        await shows(page, "#engines td", "engine-1")
        await shows(page, "#engines td", "1 −1")
        await shows(page, "#loop .wait-label", "waits 71 %")
        await shows(page, "#events li", "started")
        assert await page.locator("#charts canvas").count() == 5


async def test_the_picture_says_who_waits_for_whom_in_the_words_of_the_watchdog(
    browser: Browser, site: Site
):
    await site.watch("learner waits for 12 groups; replay refuses slots: byte budget full")
    async with looking(browser, site) as (page, _):
        chain = "earner waits for 12 groups; replay refuses slots: byte budget full."
        await shows(page, "#chain", f"L{chain}")
        assert f"l{chain}" in str(await page.locator("#loop-text").text_content())
        await shows(page, "#stages dt", "learner without progress for")
        await shows(page, "#stages dd.behind", "20 m 00 s of 1 h 00 m")
        await shows(page, "#event-loops .behind", "1.50 s (serve)")
        assert await page.locator("#verdict").inner_text() == ""
        await site.watch("nobody waits", "no step ended for 3,601 s: nobody waits")
        await shows(page, "#verdict", "The watchdog ended the run: no step ended for 3,601 s")


async def test_every_chart_tells_the_numbers_of_the_last_step(browser: Browser, site: Site):
    await site.learn(3, reward=0.75, ages={0: 4, 3: 12})
    async with looking(browser, site) as (page, _):
        for card, text in (
            ("reward-and-exact-match", "reward 0.750"),
            ("staleness", "step 3 · 3: 75 %, 0: 25 %"),
            ("clipping", "clipped tokens 2.1 %"),
            ("clipping", "‖C‖ 0.25"),
            ("tokens-per-second", "generated 498"),
            ("tokens-per-second", "trained 400"),
        ):
            await shows(page, f".card:has(#chart-{card}) .legend", text)


async def test_a_step_shows_when_it_ends(browser: Browser, site: Site):
    async with looking(browser, site) as (page, _):
        await site.learn(3, reward=0.75)
        await shows(page, "#step-now", "Step 3")
        await shows(page, "#charts .legend", "reward 0.750")
        assert await tile(page, "Reward") == "0.750"


async def test_a_chart_tells_the_step_that_is_pointed_at(browser: Browser, site: Site):
    async with looking(browser, site) as (page, _):
        plot = page.locator("#charts .u-over").first
        await plot.hover(position={"x": 3, "y": 40})
        await shows(page, "#charts .legend", "reward 0.250")


async def test_held_out_scores_from_before_the_page_was_opened_are_drawn(
    browser: Browser, site: Site
):
    await site.learn(3, reward=0.75)
    await site.evaluate({0: 0.25, 1: 0.375, 3: 0.5})
    async with looking(browser, site) as (page, _):
        await shows(page, "#charts .legend", "held out 0.500")
        await page.locator("#charts .u-over").first.hover(position={"x": 3, "y": 40})
        await shows(page, "#charts .legend", "held out 0.375")
        await page.reload()
        await state(page, "live")
        await page.locator("#charts .u-over").first.hover(position={"x": 3, "y": 40})
        await shows(page, "#charts .legend", "held out 0.375")


async def test_a_trajectory_can_be_read_turn_by_turn(browser: Browser, site: Site):
    async with looking(browser, site) as (page, seen):
        await shows(page, "#trajectory h3", QUESTION)
        await shows(page, "#trajectory h4", "Turn 1: search")
        assert await page.locator("#trajectory mark.search").inner_text() == "Alvar Aalto"
        assert await page.locator("#trajectory mark.answer").inner_text() == "1898"
        thoughts = await page.locator("#trajectory mark.thought").all_inner_texts()
        assert thoughts == ["look him up", "found it"]
        await page.get_by_text("1 passage found").click()
        passage = await page.locator("#trajectory .observed").inner_text()
        # What a document says is text, whatever it looks like.
        assert passage == f"Alvar Aalto\n{HOSTILE}"
        assert await page.locator("#trajectory img").count() == 0
        assert seen.console == []


async def test_a_new_trajectory_heads_the_list(browser: Browser, site: Site):
    async with looking(browser, site) as (page, _):
        await site.play(OTHER_ID, TURNS)
        first = page.locator("#trajectory-list li").first
        await first.get_by_text(OTHER_QUESTION).wait_for()
        # The one that is being read stays.
        await shows(page, "#trajectory h3", QUESTION)
        await first.locator("button").click()
        await shows(page, "#trajectory h3", OTHER_QUESTION)


async def test_before_the_first_step_it_says_so(browser: Browser, new_site: NewSite):
    fresh = await new_site()
    async with looking(browser, fresh) as (page, seen):
        await shows(page, "#step-now", "No step yet")
        assert await page.locator("#charts .empty").all_inner_texts() == ["No step yet"] * 5
        assert await tile(page, "Reward") == "–"
        await shows(page, "#trajectory-list", "None yet")
        await shows(page, "#engines", "No engine has reported yet")
        assert seen.exceptions == []
        await fresh.learn(1, reward=0.25)
        await shows(page, "#step-now", "Step 1")


# --- the server goes and comes ---


async def test_it_survives_a_restart_of_the_server(browser: Browser, site: Site):
    async with looking(browser, site) as (page, seen):
        site.stop()
        await state(page, "gone")
        await shows(page, "#banner", "The API cannot be reached")
        await shows(page, "#step-now", "Step 2")
        await site.learn(3, reward=0.75)
        await site.note("checkpoint", "step 3 is on disk")
        site.start()
        await state(page, "live")
        await shows(page, "#step-now", "Step 3")
        await shows(page, "#events li", "step 3 is on disk")
        await page.locator("#banner").wait_for(state="hidden")
        assert await page.locator("#events li", has_text="started").count() == 1
        assert seen.exceptions == []


async def test_a_redis_that_is_away_is_named_until_it_is_back(browser: Browser, tmp_path: Path):
    server = EmbeddedRedis.start(tmp_path / "redis")
    site = Site(tmp_path, server.url, "run")
    try:
        await site.begin()
        await site.learn(1, reward=0.25)
        async with looking(browser, site) as (page, seen):
            server.stop()
            await page.reload()
            await shows(page, "#banner", "The API says: Redis gave no answer within")
            await state(page, "waiting")
            server = EmbeddedRedis.start(tmp_path / "redis")
            await state(page, "live")
            await shows(page, "#step-now", "Step 1")
            assert seen.exceptions == []
    finally:
        await site.close()
        server.stop()


async def test_another_run_at_the_same_address_shows_itself_and_nothing_of_the_one_before(
    browser: Browser, site: Site, new_site: NewSite
):
    other = await new_site()
    await other.note("run", "the other one")
    await other.learn(1, reward=0.125)
    other.stop()
    await site.note("run", "later than anything of the other one")
    async with looking(browser, site) as (page, _):
        await shows(page, "#events li", "later than anything")
        site.stop()
        await state(page, "gone")
        other.port = site.port
        other.start()
        await shows(page, "#run-name", other.run)
        await shows(page, "#charts .legend", "reward 0.125")
        await shows(page, "#events li", "the other one")
        assert await page.locator("#events li").count() == 1
        await shows(page, "#trajectory-list", "None yet")


async def test_a_page_that_nobody_looks_at_lets_go_and_catches_up_when_it_is_seen(
    browser: Browser, site: Site
):
    see = (
        "value => {"
        " Object.defineProperty(document, 'visibilityState', {value, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    async with looking(browser, site) as (page, _):
        await page.clock.install()
        await page.reload()
        await state(page, "live")
        await page.evaluate(see, "hidden")
        await page.clock.fast_forward(61_000)
        await site.learn(3, reward=0.75)
        await asyncio.sleep(0.5)
        await shows(page, "#step-now", "Step 2")
        await page.evaluate(see, "visible")
        await shows(page, "#step-now", "Step 3")


# --- tokens and control ---


async def test_without_a_token_it_asks_for_one(browser: Browser, site: Site):
    async with opened(browser, site.url) as (page, _):
        await page.locator("#token-dialog[open]").wait_for()
        await page.get_by_label("Token", exact=True).fill("wrong")
        await page.keyboard.press("Enter")
        await shows(page, "#token-problem", "The API refused that token")
        assert await page.evaluate("sessionStorage.getItem('leeway-token')") is None
        await page.get_by_label("Token", exact=True).fill(site.read_token)
        await page.keyboard.press("Enter")
        await state(page, "live")
        assert not await page.locator("#token-dialog").is_visible()
        await page.reload()
        await state(page, "live")
        assert site.read_token not in page.url


async def test_a_read_token_has_no_buttons(browser: Browser, site: Site):
    async with looking(browser, site) as (page, _):
        await shows(page, "#step-now", "Step 2")
        assert not await page.locator("#controls").is_visible()


async def test_a_control_token_steers_the_run_after_a_question(browser: Browser, site: Site):
    async with looking(browser, site, token=site.control_token) as (page, _):
        await page.get_by_role("button", name="Checkpoint").click()
        assert await page.evaluate("document.activeElement.id") == "confirm-no"
        await page.get_by_role("button", name="Leave it").click()
        assert await site.requests() == set()
        await page.get_by_role("button", name="Checkpoint").click()
        await page.get_by_role("button", name="Write it").click()
        await shows(page, "#control-answer", "the learner writes it after the step it is in")
        assert await site.requests() == {"checkpoint"}


async def test_a_paused_run_says_so_and_can_be_resumed(browser: Browser, site: Site):
    async with looking(browser, site, token=site.control_token) as (page, _):
        assert await page.get_by_role("button", name="Resume").is_disabled()
        await page.get_by_role("button", name="Pause").click()
        await page.locator("#confirm-yes").click()
        await shows(page, "#phase", "admission paused")
        assert await site.admission_is_paused()
        assert await page.get_by_role("button", name="Pause").is_disabled()
        await page.get_by_role("button", name="Resume").click()
        await page.locator("#confirm-yes").click()
        await page.locator("#phase:text-is('training')").wait_for()
        assert not await site.admission_is_paused()


# --- the browser ---


async def test_the_policy_is_kept_and_nothing_complains(browser: Browser, site: Site):
    async with looking(browser, site, token=site.control_token) as (page, seen):
        await page.locator("#charts .u-over").first.hover(position={"x": 5, "y": 30})
        await page.get_by_label("Theme").select_option("dark")
        await page.get_by_role("button", name="Pause").click()
        await page.keyboard.press("Escape")
        await page.locator("#trajectory-list button").first.click()
        await site.learn(3, reward=0.75)
        await shows(page, "#step-now", "Step 3")
        assert await page.evaluate("window.violations") == []
        assert (seen.console, seen.exceptions) == ([], [])


async def test_the_policy_refuses_inline_script_and_style(browser: Browser, site: Site):
    async with looking(browser, site) as (page, _):
        await page.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'window.bad = 1';"
            " document.body.append(s); document.body.setAttribute('style', 'color: red'); }"
        )
        await until(page, "window.violations.length === 2")
        assert await page.evaluate("window.bad") is None


async def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, site: Site):
    await site.report_engine("engine-with-a-name-that-is-rather-long-0123456789abcdef", version=1)
    await site.note("publish", "x" * 120)
    await site.play("W" * 90, [("answer", "<answer>" + "w" * 200 + "</answer>", "")])
    async with looking(browser, site, token=site.control_token, **PHONE) as (page, _):
        await shows(page, "#events li", "xxx")
        await page.locator("#trajectory-list button", has_text="WWW").click()
        await shows(page, "#trajectory h3", "WWW")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        wide = "[...document.querySelectorAll('button, select, h2, canvas, svg, dd, td, li')]"
        wide += (
            ".filter(node => node.getBoundingClientRect().right > 360).map(node => node.outerHTML)"
        )
        assert await page.evaluate(wide) == []
        cut = "[...document.querySelectorAll('.block')].filter(b => b.scrollWidth > b.clientWidth)"
        assert await page.evaluate(f"{cut}.length") == 0


async def test_it_can_be_used_with_the_keyboard_alone(browser: Browser, site: Site):
    async with looking(browser, site, token=site.control_token) as (page, _):
        await shows(page, "#trajectory h3", QUESTION)
        reached: list[str] = []
        for _ in range(14):
            await page.keyboard.press("Tab")
            reached.append(
                await page.evaluate(
                    "(e => e.id || (e.dataset.trajectory && 'trajectory') || e.textContent)"
                    "(document.activeElement)"
                )
            )
        assert reached[0] == "Skip to the run"
        for name in ("theme", "change-token", "Pause", "Checkpoint", "Publish", "trajectory"):
            assert name in reached, reached
        await page.locator("#trajectory-list button").focus()
        await page.keyboard.press("Enter")
        await until(page, "document.activeElement.id === 'trajectory'")


@pytest.mark.parametrize(
    ("scheme", "ground"), [("light", "rgb(247, 246, 243)"), ("dark", "rgb(18, 22, 26)")]
)
async def test_it_has_the_colours_of_the_system(
    browser: Browser, site: Site, scheme: Any, ground: str
):
    async with looking(browser, site, color_scheme=scheme) as (page, _):
        colour = "getComputedStyle(document.body).backgroundColor"
        assert await page.evaluate(colour) == ground


async def test_a_chosen_theme_goes_before_the_system_and_is_kept(browser: Browser, site: Site):
    async with looking(browser, site, color_scheme="light") as (page, _):
        line = "[...document.querySelector('#charts canvas').getContext('2d').getImageData(0, 0,"
        line += " 400, 200).data].reduce((sum, value) => sum + value)"
        before = await page.evaluate(line)
        await page.get_by_label("Theme").select_option("dark")
        assert await page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
        await until(page, f"{line} !== {before}")
        await page.reload()
        await state(page, "live")
        assert await page.get_by_label("Theme").input_value() == "dark"
