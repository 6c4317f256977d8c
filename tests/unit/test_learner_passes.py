"""How the second pass of clipping-triggered normalization parts its rows."""

from __future__ import annotations

import pytest

from leeway.learner.passes import narrowed


@pytest.mark.parametrize(
    ("lengths", "pass_tokens", "parts"),
    [
        # One part: 3 + 4 * 9 = 39. Two: 3 + 2 * 9 + 3 + 2 * 2 = 28.
        ([9, 8, 2, 2], 3, [slice(0, 2), slice(2, 4)]),
        # A pass that costs 20 is not worth the 14 padded tokens it saves.
        ([9, 8, 2, 2], 20, [slice(0, 4)]),
        ([], 3, []),
    ],
)
def test_rows_are_parted_where_it_costs_least(
    lengths: list[int], pass_tokens: int, parts: list[slice]
):
    assert narrowed(lengths, pass_tokens) == parts
