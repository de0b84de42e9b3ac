"""Which events were pushed to whom, folded by feed until the log of state changes takes them. Pure.

A feed that is pushed to enters the list of those to be logged, once, with the first seq; what is pushed to it later
costs a comparison. What was pushed since is what its position has moved over, since whatever else moves it cuts the
range first. While the log takes nothing the ranges just grow, so this needs no bound but that of the feeds; only what
ended feeds leave behind has one.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shared.ranges import EMPTY, RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.gateway.feed import Feed


class Pushed(NamedTuple):
    """Events ``first`` to ``last`` went to a session for the first time; ``at``: the first of them, by the clock."""

    at: float
    conversation_id: str
    user_id: str
    device_id: str
    session_id: str
    first: int
    last: int


class Pushes:
    """``most``: ranges of ended feeds that are kept; ``dropped`` is told of how many are given up over it."""

    def __init__(self, *, most: int = 100_000, dropped: Callable[[int], object] = lambda _: None) -> None:
        self._feeds: dict[Feed, None] = {}
        self._cut: deque[Pushed] = deque(maxlen=most)
        self._dropped = dropped

    def __len__(self) -> int:
        """At least so many ranges are to be logged."""
        return len(self._feeds) + len(self._cut)

    def begin(self, feed: Feed, first: int, now: float) -> None:
        """``first`` is just being pushed to a feed of which everything before is logged."""
        feed.unlogged = first
        feed.unlogged_at = now
        self._feeds[feed] = None

    def cut(self, feed: Feed) -> None:
        """The feed is about to end, or its position to move by something else than a push."""
        if feed.unlogged:
            del self._feeds[feed]
            self._keep(_ranges(feed))

    def take(self, most: int) -> list[Pushed]:
        """About ``most`` ranges, as far as there are any: they count as logged."""
        taken = [self._cut.popleft() for _ in range(min(most, len(self._cut)))]
        for feed in list(islice(self._feeds, most - len(taken))):
            del self._feeds[feed]
            taken += _ranges(feed)
        return taken

    def put_back(self, taken: list[Pushed]) -> None:
        """They were not logged."""
        room = (self._cut.maxlen or 0) - len(self._cut)
        if len(taken) > room:
            self._dropped(len(taken) - room)
        self._cut.extendleft(reversed(taken[max(0, len(taken) - room) :]))

    def _keep(self, ranges: Iterable[Pushed]) -> None:
        for one in ranges:
            if len(self._cut) == self._cut.maxlen:
                self._dropped(1)
            self._cut.append(one)


def _ranges(feed: Feed) -> list[Pushed]:
    """What was pushed to it since ``unlogged``, which is over with this."""
    owner, first, last = feed.owner, feed.unlogged, feed.position
    whose = (feed.unlogged_at, feed.conversation_id, owner.user_id, owner.device_id, owner.session_id)
    feed.unlogged = 0
    if not feed.repeated:
        return [Pushed(*whose, first, last)]
    ranges = RangeSet([(first, last)]) - feed.repeated
    if (feed.repeated.highest or 0) <= last:
        feed.repeated = EMPTY
    return [Pushed(*whose, low, high) for low, high in ranges]
