"""The frame of a report that is one HTML file: head, colours and type, in light and dark.

A page adds rules of its own behind the common ones. Nothing refers to anything outside the file.
"""

from __future__ import annotations

from html import escape
from typing import Final


def framed(title: str, style: str, body: str) -> str:
    """A whole page. `title` is text; `style` are rules beside those of every page, `body` is HTML.

    Each goes into its place as it is: a `{body}` inside a title stays one.
    """
    head, middle, rest, end = _PAGE.split("{}")
    return f"{head}{escape(title)}{middle}{_STYLE}{style}{rest}{body}{end}"


_STYLE: Final = """
:root { color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1c2328; --muted: #5b646c; --rule: #e0ddd7;
  --good: #1a7f5a; --bad: #b3403a; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181b; --card: #1b2024; --ink: #e6e9eb; --muted: #a3adb5; --rule: #363d43;
  --good: #54c79a; --bad: #ee8079; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 40px 24px 64px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 30px; letter-spacing: -0.01em; }
.over { margin: 0; color: var(--muted); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); margin: 0;
  gap: 12px; border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule);
  padding: 13px 0; }
dt { color: var(--muted); font-size: 12px; }
dd { margin: 0; font-size: 19px; font-variant-numeric: tabular-nums; }
figure { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; }
figure svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; }
caption { text-align: left; }
pre { white-space: pre-wrap; }
"""

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{}</title>
<style>{}</style>
</head>
<body>
{}
</body>
</html>
"""
