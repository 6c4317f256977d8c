"""Trajectories as one HTML file that needs nothing else: style, script and data are in it.

Documents and questions are hostile until proven otherwise. Their text is data, never markup: it
stands in a JSON block in which no character that could end the block occurs, the script puts it on
the page as text nodes alone, and a content security policy forbids every other script, style and
request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from leeway.replay.errors import ConfigurationError
from leeway.services.trajectory_page import PAGE, SCRIPT, STYLE
from leeway.services.trajectory_view import (
    RATIO_EDGES,
    ColourBy,
    Episode,
    ratio_labels,
    version_bins,
)

NUM_VERSION_COLOURS: Final = 8


class Fact(msgspec.Struct, frozen=True):
    """A number of the head of the page."""

    label: str
    value: str


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """What the script draws."""

    title: str
    note: str
    """What is not on the page, such as that there are more; empty if nothing."""
    facts: list[Fact]
    colour_by: ColourBy
    episodes: Sequence[Episode]
    version_bins: list[tuple[int, int]]
    ratio_edges: tuple[float, ...] = RATIO_EDGES
    ratio_labels: list[str]


def write_html(
    path: Path,
    title: str,
    episodes: Sequence[Episode],
    *,
    colour_by: ColourBy = "turn",
    note: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the page, whole or not at all. Raises ConfigurationError where it cannot be."""
    if not path.name:
        raise ConfigurationError(f"{path} is a folder; name a file for the page")
    page = build_page(title, episodes, colour_by=colour_by, note=note, facts=facts)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror or error}; name another file"
        ) from None


def build_page(
    title: str,
    episodes: Sequence[Episode],
    *,
    colour_by: ColourBy = "turn",
    note: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page."""
    data = PageData(
        title=title,
        note=note,
        facts=[Fact(*fact) for fact in facts],
        colour_by=colour_by,
        episodes=episodes,
        version_bins=version_bins(episodes, NUM_VERSION_COLOURS),
        ratio_labels=ratio_labels(),
    )
    policy = (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)};"
        " base-uri 'none'; form-action 'none'"
    )
    # The data come last: what they hold is not searched for the names of the other parts.
    head, data_mark, tail = PAGE.partition("{data}")
    assert data_mark
    head = head.replace("{title}", escape(title)).replace("{policy}", escape(policy, quote=True))
    head = head.replace("{style}", STYLE)
    return head + embedded(data) + tail.replace("{script}", SCRIPT)


def embedded(data: PageData) -> str:
    """JSON that may stand inside a script element: `<`, `>` and `&` are written as escapes, so that
    neither `</script>` nor `<!--` can occur.
    """
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
