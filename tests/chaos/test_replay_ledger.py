"""The ledger of the buffer's kills finds what it is there for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from tests.chaos.history import History
from tests.chaos.replay_ledger import Ledgers

CONFIG = ReplayConfig(groups_per_step=1, max_staleness=1)
S = 10**9


def ledgers(*lines: str) -> Ledgers:
    found = Ledgers()
    for line in lines:
        found.take(*line.split())
    return found


def stats(num_added: int, num_trained: int, **dropped: int) -> Any:
    """Of a buffer that is empty, where every slot was filled."""
    return SimpleNamespace(
        num_added=num_added,
        num_trained=num_trained,
        num_drawn=num_trained,
        num_admitted=num_added,
        dropped=dropped,
        **dict.fromkeys(("num_slots_expired", "num_bytes", "num_slots", "num_leased"), 0),
        slots=(),
        leases=(),
    )


TWO_ADDED_ONE_TRAINED = (
    *("add a", "added a", "add b", "added b"),
    *("drawn L 0", "acknowledge L a", "acknowledged L a"),
)


def test_a_group_that_was_dropped_is_not_lost():
    found = ledgers(*TWO_ADDED_ONE_TRAINED)
    found.check(CONFIG, stats(2, 1, overdue=1), {}, {"b": "overdue"})


def test_a_lost_group_does_not_hide_behind_another_that_was_dropped():
    found = ledgers(*TWO_ADDED_ONE_TRAINED)
    with pytest.raises(AssertionError, match="neither trained nor stored nor dropped"):
        found.check(CONFIG, stats(2, 1, overdue=1), {}, {"c": "overdue"})


@pytest.mark.parametrize(
    ("second_s", "ends_s", "is_two"),
    [(2, 3, True), (3, 2, False), (11, None, False), (9, None, True)],
    ids=["let go later", "let go before", "killed and expired", "killed and live"],
)
def test_a_group_is_under_one_live_lease(second_s: int, ends_s: int | None, is_two: bool):
    """The first lease is asked for at 0 s, comes at 1 s and lasts for 10 s at most."""
    lines = ["draw 0", f"holds L 0 {S} a", f"draw {S}", f"holds M {S} {second_s * S} a"]
    found = ledgers(*lines, *([f"lets-go L {ends_s * S}"] if ends_s else []))
    if not is_two:
        return found.check_holds(10)
    with pytest.raises(AssertionError, match="a was under two leases"):
        found.check_holds(10)


def test_a_draw_that_was_killed_stays_open():
    found = ledgers("draw 1", f"holds L 1 {S} a", "draw 2", "undrawn 2", "draw 3")
    assert found.open_draws == {"3"}


def appended(*commands: str) -> bytes:
    """As in an append-only file."""
    data = b""
    for words in (command.encode().split() for command in commands):
        data += b"*%d\r\n" % len(words)
        data += b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return data


def test_the_file_names_the_groups_that_were_dropped_and_not_the_slots(tmp_path: Path):
    gone = ("HDEL p:groups a", "UNLINK p:payload:a", "HINCRBY p:dropped overdue 1")
    trained = ("HDEL p:groups b", "UNLINK p:payload:b", "SET p:state x")
    slot = ("ZREM p:slots c", "HINCRBY p:dropped test 1")
    text = appended("MULTI", *gone, "EXEC", "MULTI", *trained, *slot, "EXEC")
    (tmp_path / "appendonly.aof").write_bytes(text)
    assert History.read(tmp_path, "p:").dropped == {"a": "overdue"}
