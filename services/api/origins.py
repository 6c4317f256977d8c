"""Pages of other sites, kept from an API that asks nobody for a token.

A browser sends requests for whatever page is open in it. A token stops them, since only the
dashboard has it. Without one, two checks take its place: what changes the run must not come from
another site, and an API on a loopback address answers only to names of this machine, since a page
may have its own name resolved to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN: Final = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site: the dashboard, and a person who typed the address."""


def complaint(method: str, headers: Mapping[str, str], bound_to: str) -> str | None:
    """Why a request without a token is refused; None if it is not. `bound_to` is api.host."""
    host = headers.get("host", "")
    name = _name(f"//{host}")
    if _is_loopback(bound_to) and not _is_loopback(name) and name != bound_to.lower():
        return f"this API listens on {bound_to}; open it as http://localhost, not as {host[:100]!r}"
    if method in READING:
        return None
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site", "none")
    if site in _OWN and (origin is None or urlsplit(origin).netloc.lower() == host.lower()):
        return None
    return f"a page of another site ({(origin or site)[:100]}) may not change the run"


def _name(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
