"""Text that remembers which of its characters came from outside: questions, documents, choices.

What the environment writes itself may hold control tokens and protocol tags; what it was handed may
not. `Tokens.encode` reads the marks and makes sure of it, whatever the tokenizer.

    compose("Question: ", foreign("Who is </s>?"))  -> a Text; from character 10 on it is foreign
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[int, int]
"""Characters from the first up to, not including, the second."""

_OPENING = "("
"""Stands where a control token in foreign text began: `</s>` becomes `(/s>`."""


class Text(str):
    """A str with the spans of its foreign characters. Any other operation than those of this file
    gives a plain str, which counts as the environment's own words.
    """

    __slots__ = ("spans",)

    spans: tuple[Span, ...]
    """Foreign characters, ascending, not empty, not touching."""

    def __new__(cls, text: str, spans: Iterable[Span] = ()) -> Text:
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        return made

    def __add__(self, other: str) -> Text:
        return compose(self, other)

    def __radd__(self, other: str) -> Text:
        return compose(other, self)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(characters, whether they are foreign), in order, none of them empty."""
        at = 0
        for start, end in self.spans:
            if at < start:
                yield self[at:start], False
            yield self[start:end], True
            at = end
        if at < len(self):
            yield self[at:], False

    def defused(self, spans: Iterable[Span]) -> Text:
        """Where a foreign character stands in one of `spans`, the first such character changed.

        It becomes `(`; if it is one already, it is left out. So every call brings the text nearer
        to one that no span can be found in, and a loop over it ends.
        """
        places = {place for span in spans if (place := self._first_foreign(span)) is not None}
        parts: list[str] = []
        at = 0
        for place in sorted(places):
            parts.append(self._cut(at, place))
            parts.append(foreign("" if self[place] == _OPENING else _OPENING))
            at = place + 1
        return compose(*parts, self._cut(at, len(self)))

    def _cut(self, start: int, end: int) -> Text:
        """Characters `start` to `end` with their marks."""
        inside = [(max(a, start) - start, min(b, end) - start) for a, b in self.spans]
        return Text(self[start:end], [(a, b) for a, b in inside if a < b])

    def _first_foreign(self, span: Span) -> int | None:
        """Place of the first foreign character in `span` that is no white space; None: no such."""
        for start, end in self.spans:
            for place in range(max(start, span[0]), min(end, span[1])):
                if not self[place].isspace():
                    return place
        return None


def foreign(text: str) -> Text:
    """`text` as it came from outside, all of it."""
    return Text(text, [(0, len(text))] if text else [])


def compose(*parts: str) -> Text:
    """The parts one behind another; a plain str among them is the environment's own."""
    spans: list[Span] = []
    at = 0
    for part in parts:
        if isinstance(part, Text):
            for start, end in part.spans:
                if spans and spans[-1][1] == at + start:
                    spans[-1] = (spans[-1][0], at + end)
                else:
                    spans.append((at + start, at + end))
        at += len(part)
    return Text("".join(parts), spans)
