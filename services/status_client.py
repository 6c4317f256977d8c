"""The REST API of a run as `leeway status` reads it: once, or as a stream that reconnects.

Everything httpx raises becomes a sentence here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, NamedTuple, Self

import httpx
import httpx_sse
from pydantic import ValidationError

from leeway.replay.errors import LeewayError, WaitTimeout
from leeway.services.api.auth import FILE, READ_VARIABLE
from leeway.services.api.models import Status
from leeway.services.layout import RunDirectory

TOKEN: Final = "LEEWAY_API_TOKEN"
"""Environment variable that holds the bearer token of a run without a directory here."""

ANSWER_TIMEOUT_S: Final = 10.0
SILENCE_S: Final = 30.0
"""A stream from which nothing comes for so long, not even a sign of life, is opened anew."""
RECONNECT_S: Final = 60.0
"""How long a watcher tries an API that went away before it gives up."""
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 5.0


class NotAnswering(LeewayError):
    """Nobody listens at the address, or the connection broke off."""


class NotNow(NotAnswering):
    """Somebody answers: that it cannot at the moment."""


class Heard(NamedTuple):
    """One message of a watched run: a state, or why there is none at the moment."""

    snapshot: Status | None
    note: str = ""
    body: str = ""
    """The state as it was sent."""


class StatusClient:
    """`/v1/status` and `/v1/events` at one address, with one token."""

    def __init__(self, address: str, token: str | None) -> None:
        """`address` is http://host:port; `token` None sends none."""
        self._address = address.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(
                base_url=self._address, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise LeewayError(f"{address} is not a URL ({error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def read(self, path: str = "/v1/status") -> str:
        """The body of a GET. Raises NotAnswering, and LeewayError for any answer but 200."""
        with self._translated():
            answer = self._http.get(path)
        self._check(answer)
        return answer.text

    def status(self) -> Heard:
        """The state now."""
        return _heard(self.read())

    def watch(self) -> Iterator[Heard]:
        """Every state the API sends; reconnects. Before each pause in which nobody answers it
        yields a note. WaitTimeout when that lasts RECONNECT_S; a refusal ends it: LeewayError."""
        deadline, pause_s = None, FIRST_PAUSE_S
        while True:
            reason = "the stream ended"
            try:
                for heard in self._stream():
                    deadline, pause_s = None, FIRST_PAUSE_S
                    yield heard
            except NotAnswering as error:
                reason = str(error)
            deadline = deadline or time.monotonic() + RECONNECT_S
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WaitTimeout(
                    f"{reason}, for {RECONNECT_S:g} s now; is the run still on? "
                    "Its processes write to logs/ in the run directory"
                )
            yield Heard(None, f"{reason}; trying again for {left_s:.0f} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _stream(self) -> Iterator[Heard]:
        silence = httpx.Timeout(ANSWER_TIMEOUT_S, read=SILENCE_S)
        with (
            self._translated(),
            httpx_sse.connect_sse(self._http, "GET", "/v1/events", timeout=silence) as source,
        ):
            if not source.response.is_success:
                source.response.read()
            self._check(source.response)
            for event in source.iter_sse():
                if event.event == "status":
                    yield _heard(event.data)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise LeewayError(f"{self._address} is not a URL ({error})") from None
        except httpx_sse.SSEError as error:
            raise LeewayError(f"{self._address}/v1/events is no event stream ({error})") from None
        except httpx.TransportError:
            raise NotAnswering(f"nobody answers at {self._address}") from None

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        detail = _detail(answer)
        if answer.status_code in (429, 503):
            raise NotNow(f"{self._address} answers, but {detail}")
        if answer.status_code in (401, 403):
            raise LeewayError(
                f"{self._address} refused the token ({answer.status_code}: {detail}); give the run "
                f"directory, whose {FILE} holds one, or set {TOKEN}"
            )
        raise LeewayError(f"{self._address} answered {answer.status_code}: {detail}")


def _detail(answer: httpx.Response) -> str:
    """What a problem+json says; else the reason phrase."""
    try:
        body = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    found = body.get("detail") if isinstance(body, dict) else None
    return found if isinstance(found, str) else answer.reason_phrase


def _heard(body: str) -> Heard:
    try:
        return Heard(Status.model_validate_json(body), body=body)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise LeewayError(f"the answer is not the status of a leeway run ({reason})") from None


def token_of(run: RunDirectory | None) -> str | None:
    """LEEWAY_API_TOKEN; else the read token that the run directory keeps, or that the API of this
    environment takes; None without any."""
    given = os.environ.get(TOKEN)
    if given or run is None:
        return given or None
    try:
        found = json.loads((run.root / FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        found = None
    token = found.get("read") if isinstance(found, dict) else None
    return token if isinstance(token, str) else os.environ.get(READ_VARIABLE)
