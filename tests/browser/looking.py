"""What the tests of the page look with: the page over a run, live, and waits for what it shows."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .conftest import WAIT_MS, opened
from .site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

    from .conftest import Seen

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
VIOLATIONS = """
window.violations = [];
addEventListener('securitypolicyviolation', event =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


@asynccontextmanager
async def looking(
    browser: Browser, site: Site, *, token: str | None = None, **context: Any
) -> AsyncIterator[tuple[Page, Seen]]:
    """The page, live."""
    async with opened(
        browser, f"{site.url}/#token={token or site.read_token}", init=VIOLATIONS, **context
    ) as (page, seen):
        await state(page, "live")
        yield page, seen


async def state(page: Page, name: str) -> None:
    await page.locator(f"#connection[data-state='{name}']").wait_for()


async def tile(page: Page, label: str) -> str:
    row = page.locator("#tiles .tile", has=page.locator(f"dt:text-is('{label}')"))
    return await row.locator("dd").inner_text()


async def until(page: Page, expression: str) -> None:
    """Wait until it is true. Playwright's own wait_for_function needs what the policy refuses."""
    async with asyncio.timeout(WAIT_MS / 1000):
        while not await page.evaluate(expression):
            await asyncio.sleep(0.05)


async def shows(page: Page, selector: str, text: str) -> None:
    """Wait until an element that the selector finds contains the text."""
    await page.locator(selector, has_text=text).first.wait_for()
