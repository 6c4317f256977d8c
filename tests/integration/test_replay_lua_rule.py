"""The rule in Lua and the one in schedule.py are the same arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leeway.replay.limiter import Limiter
from leeway.replay.lookahead import Lookahead
from leeway.replay.schedule import admissible, drawable, is_engine_behind
from leeway.replay.scripts import lua_text
from leeway.replay.selection import Selector, draw_score, evict_score
from leeway.replay.server import EmbeddedRedis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


counts = st.dictionaries(st.integers(0, 8), st.integers(1, 12), max_size=5)
ASK_RULE = """
local arg = cmsgpack.unpack(ARGV[1])
local function table_of(flat)
  local counts = {}
  for i = 1, #flat, 2 do counts[flat[i]] = flat[i + 1] end
  return counts
end
local ready, playing = table_of(arg.ready), table_of(arg.playing)
local missing, first, forced = drawable(
  ready, playing, arg.again, arg.learner, arg.staleness, arg.step, arg.policy)
return {
  math.min(1000, admissible(ready, arg.version, arg.learner, arg.staleness, arg.step, arg.policy)),
  is_engine_behind(arg.version, arg.learner, arg.staleness, arg.policy) and 1 or 0,
  missing,
  first or -1,
  forced,
}
"""


@pytest.mark.parametrize("policy", ["pace", "drop", "exact"])
@given(
    counts,
    counts,
    st.integers(0, 3),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 4),
    st.integers(1, 6),
)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_lua_and_python_agree_on_the_rule(
    server, policy, ready, playing, again, version, learner, staleness, step
):
    arguments = {
        "ready": [x for pair in ready.items() for x in pair],
        "playing": [x for pair in playing.items() for x in pair],
        "again": again,
        "version": version,
        "learner": learner,
        "staleness": staleness,
        "step": step,
        "policy": policy,
    }
    with redis.Redis.from_url(server.admin_url) as client:
        script = lua_text("rule") + ASK_RULE
        reply = client.eval(script, 0, msgspec.msgpack.encode(arguments))
    window, is_behind, missing, first, forced = reply  # type: ignore[misc]
    plan = drawable(ready, playing, learner, staleness, step, policy, again)
    assert window == min(1000, admissible(ready, version, learner, staleness, step, policy))
    assert is_behind == is_engine_behind(version, learner, staleness, policy)
    assert missing == plan.missing
    awaited = {a: n for a, n in playing.items() if policy == "exact" or a + staleness >= learner}
    assert plan.blocking == {a: n for a, n in awaited.items() if a <= first}
    assert forced == plan.num_forced or not plan.is_ready


ASK_LIMITER = """
local arg = cmsgpack.unpack(ARGV[1])
return {
  math.min(1000, limiter_room(arg.limiter, arg.size, arg.inserts, arg.samples)),
  may_sample(arg.limiter, arg.n, arg.size, arg.inserts, arg.samples) and 1 or 0,
}
"""
limiters = st.builds(
    Limiter,
    st.integers(0, 6),
    st.sampled_from([0.1, 0.25, 1.0, 1.5, 3.0]),
    st.sampled_from([-math.inf, -2.0, 0.0, 1.5]),
    st.sampled_from([math.inf, 2.0, 6.5, 20.0]),
)
small = st.integers(0, 20)


@given(limiters, small, small, small, st.integers(1, 6))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_lua_and_python_agree_on_the_limiter(server, limiter, size, inserts, samples, n):
    arguments = {
        "limiter": limiter._asdict(),
        "size": size,
        "inserts": inserts,
        "samples": samples,
        "n": n,
    }
    with redis.Redis.from_url(server.admin_url) as client:
        script = lua_text("rule") + ASK_LIMITER
        room, may = client.eval(script, 0, msgspec.msgpack.encode(arguments))  # type: ignore[misc]
    assert room == min(1000, limiter.room(size, inserts, samples))
    assert bool(may) == limiter.may_sample(n, size, inserts, samples)


ASK_LOOKAHEAD = """
local arg = cmsgpack.unpack(ARGV[1])
local admitted, most_needed, num_draws, num_doublings, was_cut = unpack(arg.before)
local most = most_outstanding(admitted, arg.step, arg.window)
if arg.num_left < 0 then
  return cmsgpack.pack({most, short_of(
    admitted, num_doublings, was_cut, -arg.num_left, arg.step, arg.window)})
end
return cmsgpack.pack({most, after_draw(
  admitted, most_needed, num_draws, num_doublings, was_cut,
  arg.num_left, arg.outstanding, arg.was_blocked, arg.step, arg.window)})
"""


@given(
    st.builds(
        Lookahead,
        st.integers(-1, 40),
        st.integers(-40, 40),
        st.integers(-9, 130),
        st.integers(0, 4),
        st.booleans(),
    ),
    st.integers(-9, 40),
    st.integers(0, 40),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 40),
)
@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_lua_and_python_agree_on_the_lookahead(
    server, before, num_left, outstanding, was_blocked, step, more
):
    window = step + more
    arguments = {
        "before": [int(number) for number in msgspec.structs.astuple(before)],
        "num_left": num_left,
        "outstanding": outstanding,
        "was_blocked": was_blocked,
        "step": step,
        "window": window,
    }
    with redis.Redis.from_url(server.admin_url) as client:
        script = lua_text("rule") + ASK_LOOKAHEAD
        packed: bytes = client.eval(script, 0, msgspec.msgpack.encode(arguments))  # type: ignore
    most, *after = msgspec.msgpack.decode(packed)
    assert most == before.most_outstanding(step, window)
    if num_left < 0:
        admitted, num_doublings = after
        found = Lookahead(admitted, num_doublings=num_doublings)
        assert found == before.short_of(-num_left, step, window)
        return
    admitted, most_needed, num_draws, was_cut = after
    found = Lookahead(admitted, most_needed, num_draws, before.num_doublings, bool(was_cut))
    assert found == before.after_draw(num_left, outstanding, was_blocked, step, window)


ASK_SCORES = """
local arg = cmsgpack.unpack(ARGV[1])
local function ask(score)
  return string.format('%.17g', score(
    arg.selector, arg.version, arg.arrival, arg.priority, arg.from, arg.seed, arg.turn))
end
return {ask(draw_score), ask(evict_score)}
"""


@pytest.mark.parametrize("selector", get_args(Selector))
@given(
    st.integers(0, 5000), st.integers(1, 2**31), st.floats(0, 10), st.floats(0, 100), small, small
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_lua_and_python_agree_on_scores(
    server, selector, version, arrival, priority, start, seed, turn
):
    arguments = {
        "selector": selector,
        "version": version,
        "arrival": arrival,
        "priority": priority,
        "from": start,
        "seed": seed,
        "turn": turn,
    }
    with redis.Redis.from_url(server.admin_url) as client:
        script = lua_text("select") + ASK_SCORES
        scores = client.eval(script, 0, msgspec.msgpack.encode(arguments))
    of_group = (selector, version, arrival, priority, start, seed, turn)
    expected = [draw_score(*of_group), evict_score(*of_group)]
    assert [float(score) for score in scores] == pytest.approx(expected, rel=1e-12)  # type: ignore
