"""A script is sent with names made cheap, and with no function that it does not name."""

from __future__ import annotations

import pytest

from leeway.replay import scripts
from leeway.replay.keys import BoardKeys
from leeway.replay.scripts import LIMIT_FIELDS, STATE_FIELDS, named_by, script_source

BODIES = (
    *("acknowledge", "add", "admit", "draw", "drop", "pause", "put_back", "release"),
    *("restore_version", "stats", "update_priorities", "waited"),
)


def test_scripts_see_their_keys_by_name():
    source = script_source("engines", BoardKeys._fields)
    assert source.startswith("local key = {engines = KEYS[1], engine_version = KEYS[2], ")


def test_scripts_of_a_prefix_join_it_to_the_names_of_keys():
    lines = script_source("engines", None).splitlines()
    assert lines[:2] == ["local PREFIX = KEYS[1]", "local arg = cmsgpack.unpack(ARGV[1])"]
    assert any("(PREFIX .. 'engine_expiry')" in line for line in lines)
    assert not any("key." in line for line in lines)


def test_a_script_carries_what_it_names_and_what_that_names_in_the_order_of_the_files(
    tmp_path, monkeypatch
):
    library = """
-- A comment that names unused().
local ONE, TWO = 1, 2

local function unused() return TWO end

local function inner(n)
  return n + ONE
end

local function outer(n) return inner(n) end
"""
    for name, text in {"rule": "", "select": "", "library": library}.items():
        (tmp_path / f"{name}.lua").write_text(text)
    monkeypatch.setattr(scripts, "LUA_FOLDER", tmp_path)
    assert named_by("return outer(1) -- not unused") == (
        "local ONE, TWO = 1, 2\n"
        "local function inner(n)\n  return n + ONE\nend\n"
        "local function outer(n) return inner(n) end"
    )
    assert named_by("return 1") == ""


@pytest.mark.parametrize("name", BODIES)
def test_the_state_and_the_limits_are_places_of_arrays(name):
    source = script_source(name, None, True)
    assert not [line for line in source.splitlines() if "S." in line or " c." in line]


def test_the_layout_is_the_first_number_of_the_state_and_the_limits_are_the_last_text():
    assert STATE_FIELDS.index("layout") == 0
    assert STATE_FIELDS.index("room_signal") == 33
    assert STATE_FIELDS[-1] == "config"
    assert LIMIT_FIELDS.index("is_adaptive") == 13


def test_a_field_that_does_not_exist_is_refused_before_it_is_sent(tmp_path, monkeypatch):
    for name in ("base", "tidy", "rule", "select", "library"):
        (tmp_path / f"{name}.lua").write_text("")
    (tmp_path / "wrong.lua").write_text("S.num_slot = 1")
    monkeypatch.setattr(scripts, "LUA_FOLDER", tmp_path)
    with pytest.raises(ValueError):
        script_source.__wrapped__("wrong", None, True)
