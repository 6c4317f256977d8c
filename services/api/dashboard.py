"""`GET /`: the dashboard, one page with its modules and styles. They hold no data and need no
token; what the page shows it reads from /v1 with the token of who looks.

The files are served as they lie in `static/`: there is no build step.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

STATIC: Final = Path(__file__).parent / "static"

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A page and its modules belong together: after an update of the server none may be an old one.
    "Cache-Control": "no-cache",
}


def add_dashboard(app: FastAPI) -> None:
    """Serve the page at `/` and its files below `/static`; neither is part of the REST interface,
    so openapi.json leaves them out.
    """
    # The machine's own table may call a module text/plain, which no browser runs.
    mimetypes.add_type("text/javascript", ".js")

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    app.mount("/static", _Static(directory=STATIC), name="static")


class _Static(StaticFiles):
    """Adds the headers to every file, and to the answer that it has not changed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers.update(HEADERS)
        return answer
