"""How long something had work: the time in which at least one piece of it was under way."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyClock:
    """Counts pieces that begin and end. Begun at 0 and 1, ended at 2 and 5: busy for 5 s."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._started_at = now()
        self._since = 0.0
        self._before_s = 0.0
        self.num_under_way = 0

    def begin(self) -> None:
        """One more."""
        if self.num_under_way == 0:
            self._since = self._now()
        self.num_under_way += 1

    def end(self) -> None:
        """One less."""
        self.num_under_way -= 1
        if self.num_under_way == 0:
            self._before_s += self._now() - self._since

    @property
    def busy_s(self) -> float:
        """Seconds with work."""
        return self._before_s + (self._now() - self._since if self.num_under_way else 0.0)

    @property
    def up_s(self) -> float:
        """Seconds since it was made."""
        return self._now() - self._started_at
