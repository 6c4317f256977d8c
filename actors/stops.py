"""Finding stop strings in what is being generated, without decoding text at every token."""

from __future__ import annotations

from typing import Final, NamedTuple

from leeway.actors.tokens import Tokens

BROKEN: Final = "\ufffd"
"""What the tokenizer makes of bytes that are no whole character."""
MARGIN_TOKENS: Final = 4
"""Tokens read before a stop string: the first one read may begin within a character."""


class _Watch(NamedTuple):
    ids: frozenset[int]
    """Tokens that can complete a stop string."""
    num_tokens: int
    """Tokens to read: a token has at least one byte, so a stop string spans no more."""


class StopFinder:
    """Says whether the last token completed a stop string.

    A token completes a string only if it brings the string's last character, or the last bytes of
    it. Which tokens could is worked out once per set of stop strings; text is decoded behind those
    only: "</answer>" is looked for behind every token with a ">".
    """

    def __init__(self, tokens: Tokens, num_ids: int) -> None:
        self._tokens = tokens
        # Twice, because a tokenizer may drop the space before the first word of a text.
        self._texts = [tokens.decode([i, i]) for i in range(num_ids)]
        self._watches: dict[tuple[str, ...], _Watch] = {}

    def is_complete(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether any of `stop` ends within the last token; earlier tokens had none."""
        watch = self._watch(stop)
        if token_ids[-1] not in watch.ids:
            return False
        tail = self._tokens.decode(token_ids[-watch.num_tokens :])
        return any(string in tail for string in stop)

    def could_complete(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Ids behind which `is_complete` can be true."""
        return self._watch(stop).ids

    def _watch(self, stop: tuple[str, ...]) -> _Watch:
        if stop not in self._watches:
            self._watches[stop] = self._build_watch(stop)
        return self._watches[stop]

    def _build_watch(self, stop: tuple[str, ...]) -> _Watch:
        endings = {string[-1:] for string in stop} | {BROKEN} if stop else set[str]()
        ids = frozenset(
            i for i, text in enumerate(self._texts) if any(ending in text for ending in endings)
        )
        longest = max((len(string.encode()) for string in stop), default=0)
        return _Watch(ids, longest + MARGIN_TOKENS)
