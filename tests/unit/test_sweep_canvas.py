"""Names and lines in the pictures of a sweep."""

from itertools import product

import pytest

from leeway.services.experiments.sweep_canvas import line_look, panels, short_names, wrapped


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["so-grpo · eps 0.2", "so-grpo · eps 0.004"], ["eps 0.2", "eps 0.004"]),
        (["so-grpo · a · x", "so-grpo · b · x"], ["a", "b"]),
        (["grpo", "so-grpo"], ["grpo", "so-grpo"]),
        (["so-grpo", "so-grpo · eps 0.2"], ["so-grpo", "so-grpo · eps 0.2"]),
        (["so-grpo · eps 0.2"], ["so-grpo · eps 0.2"]),
        ([], []),
    ],
    ids=["objective", "first and last", "nothing", "one would be empty", "single", "none"],
)
def test_what_all_series_have_is_left_out_of_their_names(names: list[str], short: list[str]):
    assert short_names(names) == dict(zip(names, short, strict=True))


def test_a_name_is_broken_between_parts_only():
    assert wrapped("ratio turn · ctn raw · eps 0.2", 20) == "ratio turn · ctn raw\neps 0.2"
    assert wrapped("ratio turn-arithmetic · eps 0.2", 10) == "ratio turn-arithmetic\neps 0.2"
    assert wrapped("grpo", 2) == "grpo"


def test_no_two_of_thirty_lines_look_alike():
    looks = [tuple(line_look(number).items()) for number in range(30)]
    assert len(set(looks)) == 30
    assert line_look(0)["linestyle"] == "-"
    assert line_look(10)["color"] == line_look(0)["color"]


def test_titles_of_panels_do_not_reach_into_the_next_one():
    axes_of = ("grpo", "so-grpo"), ("token", "turn-arithmetic"), ("penalty", "learning-rate")
    names = [f"{o} · ratio {r} · ctn {c} · eps 0.004" for o, r, c in product(*axes_of)]
    names += [name.replace("0.004", "0.2") for name in names]
    figure, axes = panels(names)
    figure.draw_without_rendering()
    width = axes[1].get_position().x0 - axes[0].get_position().x0
    for one in axes:
        title = one._left_title
        extent = title.get_window_extent().transformed(figure.transFigure.inverted())
        assert extent.width < width, title.get_text()
