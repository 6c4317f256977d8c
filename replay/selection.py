"""Which group goes first, when one is drawn and when one is evicted.

Every selector is a score; the lowest goes first. `v` is a group's version, `a` its arrival number.

    fifo          (v, a)       oldest version first, of equals the first to arrive
    lifo          -a           the last to arrive
    freshest      (-v, -a)     newest version first, of equals the last to arrive
    uniform       now + E      every group with the same chance
    prioritised   now + E / p  drawn in proportion to the priority p; evicted lowest p first

E is an exponential variate, and `now` a virtual time that moves on to the score of whatever was
taken. Exponentials forget how long they have waited, so at every moment the next one to be taken is
group i with probability p_i / sum(p), without a sum being kept: P(E_i / p_i is the least) is just
that. E is made of the seed, the arrival number and how often the group was put in, so one seed and
one order of calls give one order of groups. lua/select.lua is the same arithmetic.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, Literal

Selector = Literal["fifo", "lifo", "uniform", "freshest", "prioritised"]

ARRIVALS: Final = 2**32
"""Scores hold version and arrival in one double, exact up to version 2^21."""
TIE: Final = 1e-9
"""Of equal priorities the first to arrive is evicted first."""
LEAST_PRIORITY: Final = 1e-6
"""A priority of 0 would never be drawn, and the buffer would fill with such groups."""


def draw_score(
    selector: Selector,
    version: int,
    arrival: int,
    priority: float,
    now: float,
    seed: int,
    turn: int,
) -> float:
    """Score of a group that comes in; `turn` counts how often it did before."""
    if selector == "uniform":
        return now + exponential(seed, arrival, turn)
    if selector == "prioritised":
        return now + exponential(seed, arrival, turn) / max(priority, LEAST_PRIORITY)
    return _fixed(selector, version, arrival)


def evict_score(
    selector: Selector,
    version: int,
    arrival: int,
    priority: float,
    now: float,
    seed: int,
    turn: int,
) -> float:
    """The same for evicting. Its random numbers are other ones than those of drawing."""
    if selector == "uniform":
        return now + exponential(seed, -arrival, turn)
    if selector == "prioritised":
        return priority + arrival * TIE
    return _fixed(selector, version, arrival)


def _fixed(selector: Selector, version: int, arrival: int) -> float:
    place = version * ARRIVALS + arrival
    return {"fifo": place, "lifo": -arrival, "freshest": -place}[selector]


def exponential(seed: int, arrival: int, turn: int) -> float:
    """-log(u), u in (0, 1] from the first 13 hexadecimal digits of a hash."""
    digest = hashlib.sha1(f"{seed}:{arrival}:{turn}".encode()).hexdigest()[:13]
    return -math.log((int(digest, 16) + 1) / 2**52)


def rescaled(score: float, before: float, after: float, now: float) -> float:
    """Score of a group whose priority changes from `before` to `after` at the virtual time `now`.

    What is left of its wait is shortened or lengthened: exponentials are memoryless, so that is as
    good as a new variate, and a group that is changed often is not put back each time.
    """
    return now + (score - now) * max(before, LEAST_PRIORITY) / max(after, LEAST_PRIORITY)
