"""Who watches a group's receipts, and the rounds in which they are told: once a second, folded.

A round takes a step of the room's `Fold` and brings it to all who watch, a bounded number at a time. It is
level-triggered, as handing out events is: who takes nothing just now, or whose `conversation` frame is not out, stays
at its number, and a later round brings what is the newest by then. So nothing is queued for anybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.folding import Fold
from services.gateway.metrics import WATCH_RECEIPTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.feed import Feed
    from services.gateway.room import Room

FOLD_S = 1.0
"""From the end of a round to the next one of that room, at least (protocol §5)."""

_PORTION = 64
"""Sessions that are told before the loop looks at others."""


class Watchers:
    """Of a room that is or was watched. ``told``: by feed the number in ``fold`` up to which it was told.

    ``left``: whom the round under way has not come to. ``busy``: one is under way, or due. ``behind``: it left somebody
    with more to hear. ``not_before``: when the next one may begin.
    """

    __slots__ = ("behind", "busy", "fold", "left", "not_before", "told")

    def __init__(self) -> None:
        self.fold = Fold()
        self.told: dict[Feed, int] = {}
        self.left: list[Feed] = []
        self.busy = False
        self.behind = False
        self.not_before = 0.0

    def add(self, feed: Feed) -> None:
        """Before the marks so far are read: it hears of what comes from now on. Who is here already goes on."""
        self.told.setdefault(feed, self.fold.number)


class Watching:
    """``later`` calls back after so many seconds; ``clock`` gives seconds, as `time.monotonic` does.

    ``give_up``: of a session at which it failed, in the handler of that.
    """

    def __init__(self, clock: Callable[[], float], give_up: Callable[[Feed], None]) -> None:
        self.later: Callable[[float, Callable[[], None]], object] = lambda *_: None
        self._clock = clock
        self._give_up = give_up

    def watch(self, feed: Feed) -> None:
        """The session wants others' marks in this conversation."""
        feed.watching = True
        room = feed.room
        if room.watchers is None:
            room.watchers = Watchers()
        room.watchers.add(feed)

    def unwatch(self, feed: Feed) -> None:
        """No more of them."""
        feed.watching = False
        watchers = feed.room.watchers
        if watchers is not None:
            watchers.told.pop(feed, None)
            if not watchers.told:
                watchers.fold = Fold()

    def receipt(self, room: Room, user_id: str, frame: bytes) -> None:
        """A member's marks, for those who watch, if any do."""
        if room.watchers is not None and room.watched and not room.direct:
            room.watchers.fold.put(user_id, frame)
            self._soon(room, room.watchers)

    def _soon(self, room: Room, watchers: Watchers) -> None:
        if not watchers.busy:
            watchers.busy = True
            self.later(max(0.0, watchers.not_before - self._clock()), lambda: self._begin(room, watchers))

    def _begin(self, room: Room, watchers: Watchers) -> None:
        watchers.fold.step()
        watchers.behind = False
        watchers.left = list(watchers.told)
        self._go_on(room, watchers)

    def _go_on(self, room: Room, watchers: Watchers) -> None:
        if room.watchers is not watchers:
            return
        told = 0
        for feed in watchers.left[-_PORTION:]:
            try:
                told += self._tell(watchers, feed)
            except Exception:  # noqa: BLE001 - one recipient's fault stops nobody else
                self._give_up(feed)
        del watchers.left[-_PORTION:]
        WATCH_RECEIPTS.inc(told)
        if watchers.left:
            self.later(0.0, lambda: self._go_on(room, watchers))
            return
        watchers.fold.told(watchers.told.values())
        watchers.busy = False
        watchers.not_before = self._clock() + FOLD_S
        if watchers.behind or watchers.fold.waits:
            self._soon(room, watchers)

    def _tell(self, watchers: Watchers, feed: Feed) -> int:
        """Tell a session of what it was not told yet, as much as a round brings; of how many members."""
        number = watchers.told.get(feed)
        part = None if number is None else watchers.fold.part(number)
        if part is None:
            return 0
        owner = feed.owner
        if feed.loading or owner.congested:
            feed.wake()
            watchers.behind = True
            return 0
        if not feed.member:
            return 0  # It stays where it is, for the case that the user comes back.
        count = part.count(owner.user_id)
        if count:
            owner.write(part.buffer(owner.user_id))
        watchers.told[feed] = part.last
        watchers.behind = watchers.behind or part.last < watchers.fold.number
        return count
