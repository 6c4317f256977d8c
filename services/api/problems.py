"""Every error of the API as RFC 9457 application/problem+json, and how openapi.json tells of them.

What a part raises on purpose is translated here and nowhere else:

    InvalidRequest                   422, the sentence; see `validating`
    SlotExpired                      409, the sentence
    StoreUnavailable                 503, the sentence
    any other LeewayError            500, the sentence: files or Redis of this side are wrong
    anything else                    500, without a word of it: it may hold what is secret
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from leeway.replay.errors import (
    ConfigurationError,
    DataError,
    LeewayError,
    SlotExpired,
    StoreUnavailable,
)

log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"

TITLES: Final[dict[int, str]] = {
    400: "The request cannot be read",
    401: "No token",
    403: "The token may not do this",
    404: "There is no such thing",
    405: "The method is not allowed here",
    409: "Not now",
    412: "Changed meanwhile",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "The request is malformed",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available now",
}


_DETAILS: Final[dict[int, str]] = {
    401: "the header Authorization: Bearer TOKEN is missing",
    403: "this token may read; what changes the run needs the control token",
    409: "the run is in phase starting; the learner takes requests up in training",
    413: "a body may have 16777216 bytes (api.max_body_bytes)",
    422: "query.limit: Input should be less than or equal to 1000",
    429: "more than 500 requests a second (api.max_requests_per_s)",
    503: "Redis gave no answer within 5 s",
}
"""Examples."""


class InvalidRequest(LeewayError):
    """What a request says cannot be. The message is for who sent it."""


@contextmanager
def validating() -> Iterator[None]:
    """Around the check of what a request says: what is wrong is the fault of the request. Outside
    of it the same errors come from files or from Redis, of which the sender knows nothing.
    """
    try:
        yield
    except (ConfigurationError, DataError) as error:
        raise InvalidRequest(str(error)) from None


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    """An error answer; `more` are members besides type, title, status and detail."""
    title = TITLES.get(status, "Error")
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    # A request may hold half of a character, which no answer could carry.
    text = json.dumps(body, ensure_ascii=True)
    return Response(text, status, dict(headers or {}), media_type=MEDIA_TYPE)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may give these errors."""
    return {
        status: {"description": TITLES[status], "content": {MEDIA_TYPE: _shown(status)}}
        for status in statuses
    }


def _shown(status: int) -> dict[str, Any]:
    example = {"type": "about:blank", "title": TITLES[status], "status": status}
    detail = _DETAILS.get(status, "GET /v1/status: what went wrong, and what to do")
    return {
        "schema": {"$ref": "#/components/schemas/Problem"},
        "example": {**example, "detail": detail},
    }


def add_error_answers(app: FastAPI) -> None:
    """Translate everything that a route may raise."""

    @app.exception_handler(LeewayError)
    async def failed(request: Request, error: LeewayError) -> Response:
        return _of_ours(error)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return problem(error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return problem(422, _first_complaint(error))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return problem(500, f"{type(error).__name__}; see the log of the API")


def _of_ours(error: LeewayError) -> Response:
    if isinstance(error, InvalidRequest):
        return problem(422, str(error))
    if isinstance(error, SlotExpired):
        return problem(409, str(error))
    if isinstance(error, StoreUnavailable):
        return problem(503, str(error), {"Retry-After": "1"})
    log.error("answered 500", exc_info=error)
    return problem(500, str(error))


def _first_complaint(error: RequestValidationError) -> str:
    """`query.limit: Input should be less than or equal to 1000`; the input itself is not told."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"[:500]
