"""What the dashboard serves: its headers, its files, its colours. tests/browser runs it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import product

import httpx
import pytest
from fastapi import FastAPI

from leeway.services.api.dashboard import CONTENT_SECURITY_POLICY, HEADERS, STATIC, add_dashboard

OWN = sorted(f for f in STATIC.rglob("*") if f.is_file() and "vendor" not in f.parts)
MODULES = [file for file in OWN if file.suffix == ".js"]
PAGE = (STATIC / "index.html").read_text(encoding="utf-8")

TEXT = ("ink", "muted", "good", "bad", "warn", "mark")
GROUNDS = ("paper", "card", "quiet-card")
LINES = ("line-a", "line-b", "line-c")
ON_WASH = (
    ("warn", "wash-warn"),
    ("bad", "wash-bad"),
    ("good", "wash-good"),
    ("mark", "wash-mark"),
    ("ink", "wash-mark"),
    ("muted", "wash-mark"),
    ("muted", "wash-warn"),
    ("on-mark", "mark"),
)


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    add_dashboard(app)
    return app


async def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        return await client.get(path, headers=headers)


# --- serving ---


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/static/page.css", "/static/icon.svg"])
async def test_every_file_carries_the_policy(app: FastAPI, path: str):
    answer = await get(app, path)
    assert answer.status_code == 200
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_the_policy_allows_no_inline_code_and_no_other_origin():
    directives = dict(part.strip().split(" ", 1) for part in CONTENT_SECURITY_POLICY.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == "'self'"
    assert directives["connect-src"] == "'self'"
    assert directives["frame-ancestors"] == "'none'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


async def test_a_module_is_served_as_javascript(app: FastAPI):
    answer = await get(app, "/static/main.js")
    assert answer.headers["content-type"].startswith("text/javascript")


async def test_a_file_that_has_not_changed_is_not_sent_again(app: FastAPI):
    first = await get(app, "/static/main.js")
    again = await get(app, "/static/main.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/none.js"])
async def test_nothing_outside_of_the_folder_is_served(app: FastAPI, path: str):
    assert (await get(app, path)).status_code == 404


def test_the_page_is_no_part_of_the_rest_interface(app: FastAPI):
    assert app.openapi()["paths"] == {}


# --- files ---


class _Inline(HTMLParser):
    """Collects what the policy would refuse, and what the page asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.wanted: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        handlers = [name for name in given if name.startswith("on")]
        self.inline += [f"{tag} {name}" for name in (*handlers, "style") if name in given]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        self.wanted += [given[key] or "" for key in ("src", "href") if key in given]


def test_the_page_holds_no_inline_style_and_no_inline_script():
    parser = _Inline()
    parser.feed(PAGE)
    assert parser.inline == []


def test_every_file_that_the_page_names_exists_and_has_a_relative_address():
    parser = _Inline()
    parser.feed(PAGE)
    files = [address for address in parser.wanted if not address.startswith("#")]
    assert files
    assert [a for a in files if not (STATIC.parent / a).is_file() or a.startswith("/")] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda file: file.name)
def test_every_import_of_a_module_exists(module):
    for target in re.findall(r"from '(.+?)'", module.read_text(encoding="utf-8")):
        assert target.startswith("./") and (module.parent / target).is_file(), target


@pytest.mark.parametrize("module", MODULES, ids=lambda file: file.name)
def test_text_never_becomes_markup(module):
    text = module.read_text(encoding="utf-8")
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function"
    )
    assert re.findall(banned, text) == []


def test_uplot_comes_with_its_licence():
    licence = (STATIC / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8")
    assert "MIT License" in licence and "Leon Sorokin" in licence


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_a_file_is_small_enough_to_be_read(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 300


# --- colours ---


def colours() -> dict[str, tuple[str, str]]:
    """Name -> its light and its dark value."""
    css = (STATIC / "page.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\(#(\w{6}), #(\w{6})\);", css)
    return {name: (light, dark) for name, light, dark in found}


def luminance(colour: str) -> float:
    """Relative luminance after WCAG 2: 0 for 000000, 1 for ffffff."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    """From 1 (the same) to 21 (black on white)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_has_a_contrast_of_21():
    assert contrast("000000", "ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("front", "ground"), [*product(TEXT, GROUNDS), *ON_WASH], ids=lambda name: name
)
def test_text_stands_out_from_its_ground(front: str, ground: str, theme: int):
    known = colours()
    assert contrast(known[front][theme], known[ground][theme]) >= 4.5


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_chart_stands_out_from_its_card(line: str, theme: int):
    known = colours()
    assert contrast(known[line][theme], known["card"][theme]) >= 3
