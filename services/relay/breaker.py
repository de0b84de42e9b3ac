"""When too many rows of a shard are refused, something is wrong with what writes or takes them, not with the rows.

A bad deployment must not turn a day's messages into dead letters: the shard stops, keeps every row, and says so. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Trips when more than ``share`` of the last ``window_s`` seconds' rows are refused, and at least ``least``."""

    share: float = 0.2
    least: int = 10
    window_s: float = 60.0


class Breaker:
    """Counts one shard's rows. Times are seconds of a clock that never goes back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counts: deque[tuple[float, int, int]] = deque()
        self._seen = 0
        self._refused = 0
        self._proven = limits.least

    def sent(self, rows: int, now: float) -> None:
        """Count rows that Kafka took."""
        self._proven += rows
        self._count(now, rows, 0)

    def refused(self, now: float) -> str | None:
        """Count a refused row; the reason, if the shard has to stop before this row: then it isn't counted."""
        self._forget(now)
        if self._proven < self._limits.least:
            return f"a row was refused after only {self._proven} were taken since the shard stood still"
        seen, refused = self._seen + 1, self._refused + 1
        if refused >= self._limits.least and refused > self._limits.share * seen:
            return f"{refused} of the last {seen} rows were refused within {self._limits.window_s:g} s"
        self._count(now, 1, 1)
        return None

    def half_open(self) -> None:
        """Begin again after a stop: until as many rows are taken as would trip it, one refused row trips it."""
        self._counts.clear()
        self._seen = self._refused = self._proven = 0

    def _count(self, now: float, seen: int, refused: int) -> None:
        self._forget(now)
        second = float(int(now))
        if self._counts and self._counts[-1][0] == second:
            _, old_seen, old_refused = self._counts.pop()
            self._counts.append((second, old_seen + seen, old_refused + refused))
        else:
            self._counts.append((second, seen, refused))
        self._seen += seen
        self._refused += refused

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - self._limits.window_s:
            _, seen, refused = self._counts.popleft()
            self._seen -= seen
            self._refused -= refused
