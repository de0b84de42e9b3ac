"""Which ids were drawn from the outbox's sequence and not read yet. Pure.

As long as none is, there is nothing to read, and asking for the sequence's last value costs a tenth of a read.
"""

from __future__ import annotations

FORGET_S = 10.0
"""Ids that nobody has seen for so long after the last one was drawn are not awaited any more: their transaction was
rolled back, or they are another relay's. Longer than a writer's transaction may last."""


class Drawn:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._last = 0
        self._moved_at = float("-inf")
        self._base = 0
        self._read = 0
        self._tops: dict[int, int] = {}

    def up_to(self, last: int, now: float) -> bool:
        """Every id up to ``last`` is drawn. Whether that is news."""
        if last <= self._last:
            return False
        self._last = last
        self._moved_at = now
        return True

    def read(self, shard: int, ids: list[int], now: float) -> None:
        """These ids of a shard, in their order, were read, for the first time or again."""
        top = max(self._tops.get(shard, 0), self._base)
        self._read += len(ids) if ids[0] > top else sum(id_ > top for id_ in ids)
        self._tops[shard] = max(self._tops.get(shard, 0), ids[-1])
        self.up_to(ids[-1], now)

    def all_read(self, now: float) -> bool:
        """Whether nothing that was drawn is awaited."""
        if self._read < self._last - self._base and now < self._moved_at + FORGET_S:
            return False
        self._base, self._read = self._last, 0
        return True
