"""The rule in Lua and the one in schedule.py are the same arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leeway.replay.connection import lua_text
from leeway.replay.schedule import admissible, drawable, is_engine_behind
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
local missing, first = drawable(ready, playing, arg.learner, arg.staleness, arg.step, arg.policy)
return {
  admissible(ready, arg.version, arg.learner, arg.staleness, arg.step, arg.policy),
  is_engine_behind(arg.version, arg.learner, arg.staleness, arg.policy) and 1 or 0,
  missing,
  first or -1,
}
"""


@pytest.mark.parametrize("policy", ["pace", "exact"])
@given(counts, counts, st.integers(0, 8), st.integers(0, 8), st.integers(0, 4), st.integers(1, 6))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_lua_and_python_agree_on_the_rule(
    server, policy, ready, playing, version, learner, staleness, step
):
    arguments = {
        "ready": [x for pair in ready.items() for x in pair],
        "playing": [x for pair in playing.items() for x in pair],
        "version": version,
        "learner": learner,
        "staleness": staleness,
        "step": step,
        "policy": policy,
    }
    with redis.Redis.from_url(server.url) as client:
        script = lua_text("rule") + ASK_RULE
        reply = client.eval(script, 0, msgspec.msgpack.encode(arguments))
    window, is_behind, missing, first = reply  # type: ignore[misc]
    plan = drawable(ready, playing, learner, staleness, step, policy)
    assert window == admissible(ready, version, learner, staleness, step, policy)
    assert is_behind == is_engine_behind(version, learner, staleness, policy)
    assert missing == plan.missing
    awaited = {a: n for a, n in playing.items() if policy == "exact" or a + staleness >= learner}
    assert plan.blocking == {a: n for a, n in awaited.items() if a <= first}
