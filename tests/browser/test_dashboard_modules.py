"""The modules of the dashboard, one rule at a time, in the browser that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from .conftest import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(browser: Browser, static_site: str) -> AsyncIterator[Page]:
    async with opened(browser, static_site) as (page, _):
        yield page


async def run(page: Page, module: str, body: str, argument: Any = None) -> Any:
    """The value of `body`, in which `m` is the module and `x` the argument."""
    script = f"async x => {{ const m = await import('/static/{module}'); return {body}; }}"
    return await page.evaluate(script, argument)


# --- numbers ---


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("m.fixed(0.74479)", "0.745"),
        ("m.fixed(null)", "–"),
        ("m.fixed(NaN)", "–"),
        ("m.whole(1234567)", "1,234,567"),
        ("m.percent(0.7111)", "71 %"),
        ("m.percent(0.0213)", "2.1 %"),
        ("m.percent(0)", "0 %"),
        ("m.percent(0.0001)", "0 %"),
        ("m.percent(0.0996)", "10 %"),
        ("m.significant(0.00123456)", "0.00123"),
        ("m.significant(0)", "0"),
        ("m.duration(59.6)", "1 m 00 s"),
        ("m.duration(12)", "12 s"),
        ("m.duration(65)", "1 m 05 s"),
        ("m.duration(3700)", "1 h 01 m"),
        ("m.milliseconds(291.017)", "291 ms"),
        ("m.milliseconds(4.2)", "4.2 ms"),
        ("m.milliseconds(12345)", "12.3 s"),
        ("m.bytes(0)", "0 B"),
        ("m.bytes(1536)", "1.5 KiB"),
        ("m.bytes(5 * 2 ** 30)", "5.0 GiB"),
        ("m.plural(1, 'group')", "1 group"),
        ("m.plural(3, 'group')", "3 groups"),
    ],
)
async def test_a_number_is_written_as_people_read_it(page: Page, call: str, text: str):
    assert await run(page, "format.js", call) == text


# --- text of a turn ---


async def pieces(page: Page, text: str) -> list[tuple[str, str]]:
    found = await run(page, "text.js", "m.piecesOf(x)", text)
    return [(piece["kind"], piece["text"]) for piece in found]


async def test_a_turn_is_cut_into_thought_and_action(page: Page):
    assert await pieces(page, "<think>so</think><search>a</search>") == [
        ("thought", "so"),
        ("search", "a"),
    ]


async def test_a_thought_that_the_prompt_opened_ends_with_a_lone_tag(page: Page):
    assert await pieces(page, "so</think> <answer>b</answer>\n") == [
        ("thought", "so"),
        ("answer", "b"),
    ]


async def test_an_action_inside_an_open_thought_counts(page: Page):
    assert await pieces(page, "<think>so <search>a</search>") == [
        ("thought", "so"),
        ("search", "a"),
    ]


async def test_what_stands_outside_of_tags_stays(page: Page):
    assert await pieces(page, "hello <answer>b</answer> bye") == [
        ("plain", "hello"),
        ("answer", "b"),
        ("plain", "bye"),
    ]


async def test_an_observation_is_cut_into_its_passages(page: Page):
    observed = (
        '\n<information>\nDoc 1: "Norway" Capital: Oslo\nDoc 2: "Oslo" a city\n</information>\n'
    )
    assert await run(page, "text.js", "m.passagesOf(x)", observed) == [
        {"title": "Norway", "text": "Capital: Oslo"},
        {"title": "Oslo", "text": "a city"},
    ]


async def test_a_correction_is_one_entry_without_a_title(page: Page):
    observed = "\n<information>\nThat was no action.\n</information>\n"
    assert await run(page, "text.js", "m.passagesOf(x)", observed) == [
        {"title": None, "text": "That was no action."}
    ]


# --- the stream ---


async def parsed(page: Page, *parts: str) -> list[dict[str, Any]]:
    body = "(() => { const out = []; const p = new m.EventParser(e => out.push(e));"
    body += " x.forEach(part => p.push(part)); return out; })()"
    return await run(page, "stream.js", body, list(parts))


async def test_an_event_is_read_wherever_the_network_cuts_it(page: Page):
    text = 'id: 7-0\r\nevent: step\r\ndata: {"a":\r\ndata: 1}\r\n\r\n: still here\n\n'
    whole = [{"id": "7-0", "type": "step", "data": '{"a":\n1}'}]
    for place in range(1, len(text)):
        assert await parsed(page, text[:place], text[place:]) == whole


async def test_an_event_that_has_not_ended_is_not_handed_on(page: Page):
    assert await parsed(page, "id: 7-0\ndata: 1\n") == []


async def test_pauses_double_up_to_the_longest(page: Page):
    pauses = await run(page, "stream.js", "[0, 1, 2, 3, 4, 5, 6, 50].map(m.pauseOf)")
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15, 15]


FOLLOW = """(async () => {
  const end = new AbortController();
  const asked = [], shown = [], states = [];
  const before = window.fetch;
  const text = 'id: 1-0.1\\ndata: bad\\n\\nid: 2-0.1\\ndata: good\\n\\n';
  window.fetch = async (path, options) => {
    // The page has a session of its own, which goes on meanwhile.
    if (path !== 'v1/events') return before(path, options);
    const {headers} = options;
    asked.push(headers['Last-Event-ID'] ?? null);
    if (x.isBroken && asked.length === 1) return {ok: true, body: null};
    return new Response(text);
  };
  try {
    await m.follow({
      client: {headers: more => more},
      lastId: '',
      signal: end.signal,
      onEvent: ({data}) => {
        if (data === 'bad') throw new TypeError('no such panel');
        shown.push(data);
        if (asked.length === 2) end.abort();
      },
      onState: (state, {error}) => states.push(error ? error.message : state),
    });
  } finally {
    window.fetch = before;
  }
  return {asked, shown, states};
})()"""


async def test_an_event_that_cannot_be_shown_does_not_stop_those_behind_it(page: Page):
    found = await run(page, "stream.js", FOLLOW, {"isBroken": False})
    assert found["shown"] == ["good", "good"]
    assert found["asked"] == [None, "2-0.1"]


async def test_a_stream_that_breaks_for_any_reason_is_opened_again(page: Page):
    found = await run(page, "stream.js", FOLLOW, {"isBroken": True})
    assert found["shown"] == ["good"]
    assert any("the stream broke" in state for state in found["states"])


async def test_records_that_cannot_be_read_after_a_break_are_asked_for_again(page: Page):
    body = """(async () => {
      const {ApiError} = await import('/static/client.js');
      let count = 0;
      const s = new m.Session('t', {
        load: async () => {
          count += 1;
          if (count === 1) throw new ApiError(503, 'not now', 0.01);
          if (count === 2) throw new TypeError('no such panel');
        },
      });
      s.following = new AbortController();
      await s.reload();
      return count;
    })()"""
    assert await run(page, "session.js", body) == 3


# --- what is known of a run ---


async def steps(page: Page, *lines: tuple[int, float, float]) -> list[list[float]]:
    """(step, reward) that are known after lines of (step, time, reward)."""
    body = "(() => { const s = new m.Store();"
    body += " for (const [step, time, reward] of x) s.takeStep({step, time, reward_mean: reward});"
    body += " return s.steps.map(line => [line.step, line.reward]); })()"
    return await run(page, "store.js", body, lines)


async def test_lines_stand_in_the_order_of_their_steps_each_once(page: Page):
    lines = [(1, 10, 0.1), (3, 30, 0.3), (2, 20, 0.2), (3, 30, 0.3)]
    assert await steps(page, *lines) == [[1, 0.1], [2, 0.2], [3, 0.3]]


async def test_a_step_that_is_trained_again_replaces_those_behind_it(page: Page):
    lines = [(1, 10, 0.1), (2, 20, 0.2), (3, 30, 0.3), (4, 40, 0.4), (2, 50, 0.9)]
    assert await steps(page, *lines) == [[1, 0.1], [2, 0.9]]


async def test_only_the_newest_steps_are_kept(page: Page):
    body = "(() => { const s = new m.Store();"
    body += " for (let i = 1; i <= m.MAX_STEPS + 2; i += 1) s.takeStep({step: i});"
    body += " return [s.steps.length, s.steps[0].step]; })()"
    assert await run(page, "store.js", body) == [4096, 3]


async def test_a_histogram_is_read_out_of_a_line_in_ascending_order(page: Page):
    line = {"step": 1, "staleness_histogram/10": 3, "staleness_histogram/2": 5, "staleness_max": 10}
    assert await run(page, "store.js", "m.pointOf(x).staleness", line) == [[2, 5], [10, 3]]


async def test_tokens_trained_per_second_include_the_wait(page: Page):
    line = {"num_tokens_trained": 100, "seconds": 3, "wait_s": 1}
    assert await run(page, "store.js", "m.pointOf(x).trained", line) == 25


# --- the token ---


async def test_a_token_of_the_address_is_kept_and_taken_out_of_it(
    browser: Browser, static_site: str
):
    async with opened(browser, f"{static_site}/#token=abc") as (page, _):
        assert await page.evaluate("location.href") == f"{static_site}/"
        assert await run(page, "token.js", "m.readToken()") == "abc"
