"""Which ids were drawn from the outbox's sequence and not read yet. Pure.

As long as none is, there is nothing to read, and asking for the sequence's last value costs a tenth of a read.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGET_S = 10.0
"""Ids that nobody has seen for so long are not awaited any more: their transaction was rolled back, or they are another
relay's. Longer than a writer's transaction may last."""

_JUMP = 1 << 20
"""Ids that go on so much higher were not drawn one by one: a partition was closed."""


@dataclass(slots=True)
class _Span:
    """Ids above ``base``, up to the next span's: how many were read."""

    base: int
    began: float
    read: int = 0


class Drawn:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._moved_at = float("-inf")
        self._spans = [_Span(0, 0.0)]
        self._tops: dict[int, int] = {}

    def up_to(self, last: int, now: float) -> bool:
        """Every id up to ``last`` is drawn. Whether that is news; nothing of what was drawn before the start is."""
        if self._last is not None and last < self._last:
            # Another store, or an earlier state of it: its ids are drawn again.
            self._last = None
            self._tops.clear()
        if self._last is None or last > self._last + _JUMP:
            news = self._last is not None
            self._spans = [_Span(last, now)]
        else:
            news = last > self._last
            if news:
                self._divide(self._last, now)
        if news or self._last is None:
            self._last = last
            self._moved_at = now
        return news

    def _divide(self, last: int, now: float) -> None:
        """Let a new span begin now and then, so that what never comes is forgotten while others are drawn."""
        if now >= self._spans[-1].began + FORGET_S:
            self._spans.append(_Span(last, now))
        while len(self._spans) > 1 and now >= self._spans[1].began + FORGET_S:
            del self._spans[0]

    def read(self, shard: int, ids: list[int], now: float) -> None:
        """These ids of a shard, in their order, were read, for the first time or again."""
        top = self._tops.get(shard, 0)
        newest = self._spans[-1]
        if ids[0] > max(top, newest.base):
            newest.read += len(ids)
        elif ids[-1] > self._spans[0].base:
            for id_ in ids:
                if id_ > top:
                    self._count(id_)
        self._tops[shard] = max(top, ids[-1])
        self.up_to(max(ids[-1], self._last or 0), now)

    def _count(self, id_: int) -> None:
        for span in reversed(self._spans):
            if id_ > span.base:
                span.read += 1
                return

    def all_read(self, now: float) -> bool:
        """Whether nothing that was drawn is awaited."""
        ends = [span.base for span in self._spans[1:]] + [self._last or 0]
        missing = any(span.read < end - span.base for span, end in zip(self._spans, ends, strict=True))
        if missing and now < self._moved_at + FORGET_S:
            return False
        self._spans = [_Span(self._last or 0, now)]
        return True
