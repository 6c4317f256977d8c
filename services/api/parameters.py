"""What the parameters of the routes mean, with an example of each, as openapi.json shows them."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Header, Path, Query

MAX_ID_LENGTH: Final = 100


def limit(most: int) -> Any:
    """The size of a page."""
    return Query(ge=1, le=most, description="How many at most.", examples=[20])


def cursor(example: int | str, **bounds: Any) -> Any:
    """Where a page begins. `bounds` are those of Query, such as le=9."""
    text = "`next` of the page before this one; the list begins without it."
    return Query(description=text, examples=[example], **bounds)


def name(example: str, text: str, **bounds: Any) -> Any:
    """What a path names."""
    return Path(description=text, examples=[example], **bounds)


WaitS = Annotated[
    float,
    Query(
        ge=0,
        le=30,
        description="Seconds to wait for the answer of the learner; it comes with 202 when late.",
        examples=[5],
    ),
]
StreamS = Annotated[
    float | None,
    Query(
        ge=0,
        le=86400,
        description="Seconds after which the stream ends; it stays open without it.",
        examples=[5],
    ),
]
LastEventId = Annotated[
    str | None,
    Header(
        max_length=MAX_ID_LENGTH,
        description="Id of the last message that was read; the stream goes on behind it.",
        examples=["1795870000000-0.7"],
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        description="ETag of the answer that the change was made from; 412 where it is old.",
        examples=['"revision-3"'],
    ),
]
After = Annotated[
    str | None,
    Query(
        max_length=MAX_ID_LENGTH,
        description="The same as Last-Event-ID, which goes before it. `0-0.0` is the beginning.",
        examples=["0-0.0"],
    ),
]
