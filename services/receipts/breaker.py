"""When too many records cannot be read, something is wrong with the topic, not with the records."""

from __future__ import annotations

from collections import deque


class BreakerTrippedError(Exception):
    """More than the set share of the last records could not be read; nobody should go past them without a look."""


class Breaker:
    """Counts over about the last ``window`` records.

    Trips once more than ``share`` of them, and at least ``least``, could not be read: one bad record among few is no
    reason to stop.
    """

    def __init__(self, *, share: float, least: int, window: int) -> None:
        self._share = share
        self._least = least
        self._window = window
        self._batches: deque[tuple[int, int]] = deque()
        self._seen = 0
        self._bad = 0

    def judge(self, seen: int, bad: int) -> None:
        """Count a batch before anything is done with it; without ``seen`` more bad ones of the last batch.

        Raises `BreakerTrippedError`; then it is not counted.
        """
        all_seen, all_bad = self._seen + seen, self._bad + bad
        if bad and all_bad >= self._least and all_bad > self._share * all_seen:
            raise BreakerTrippedError(f"{all_bad} of the last {all_seen} records could not be read")
        if not seen and self._batches:
            last_seen, last_bad = self._batches.pop()
            seen, bad = last_seen, last_bad + bad
        self._batches.append((seen, bad))
        self._seen, self._bad = all_seen, all_bad
        while self._seen - self._batches[0][0] >= self._window:
            old_seen, old_bad = self._batches.popleft()
            self._seen -= old_seen
            self._bad -= old_bad

    def undo(self) -> None:
        """Count the last batch no more: its records are judged one by one instead."""
        seen, bad = self._batches.pop()
        self._seen -= seen
        self._bad -= bad
