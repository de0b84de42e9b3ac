"""Events on their way from a room's ring to its sessions.

`turn` visits the feeds of queued rooms, a bounded number at a time and rooms in turn, so that a conversation with
100,000 members keeps nobody waiting for longer than such a portion. A visit is level-triggered: it hands out whatever
of the ring follows the feed's position. So it does not matter how many events came meanwhile, nor whether a feed was
visited already.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from services.gateway.metrics import PUSH_COMMIT_SECONDS, PUSH_SECONDS, PUSHES, WINDOW_STALLS
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.feed import Feed
    from services.gateway.room import Room, Run
    from services.gateway.session import Session

_LOOP = LOOP_ERRORS.labels("fan-out")

_REST_S = 50e-6
"""How long a large room rests for each session that a round wrote to, some four times what such a write costs: events
that come meanwhile leave in one write, and others have most of the loop."""

_LARGE = 100
"""Sessions in a round, below which no room rests."""

_PORTION = 128
"""Feeds of one room that are visited before other rooms get their turn."""


class HandOut:
    """``queued`` is called when `turn` has something to do; ``later`` calls back after so many seconds.

    ``clock`` gives seconds, as `time.monotonic` does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.queued: Callable[[], None] = lambda: None
        self.later: Callable[[float, Callable[[], None]], object] = lambda _, then: then()
        self.queue: deque[Room] = deque()
        self._rounds: dict[Room, tuple[list[Feed], int, int]] = {}

    def visit(self, room: Room) -> None:
        """Its ring has grown."""
        if room.feeds and not room.queued:
            room.queued = True
            self.queue.append(room)
            self.queued()

    def clear(self) -> None:
        """Visit none of the rooms that are queued now."""
        self.queue.clear()
        self._rounds.clear()

    def turn(self, until: float) -> bool:
        """Visit feeds of queued rooms until the clock shows ``until``; whether there is more to do."""
        pushed = 0
        now = self.clock()
        while self.queue:
            room = self.queue.popleft()
            pushed += self._portion(room, now)
            now = self.clock()
            if now >= until:
                break
        if pushed:
            PUSHES.inc(pushed)
        return bool(self.queue)

    def _portion(self, room: Room, now: float) -> int:
        feeds, at, wrote = self._rounds.pop(room, (room.listed(), 0, 0))
        if at == 0:
            self._observe(room)
        pushed = 0
        end = min(len(feeds), at + _PORTION)
        while at < end:
            feed = feeds[at]
            at += 1
            if feed.position < room.top:
                if feed.asleep:
                    feed.wake()
                elif not (feed.behind or feed.loading or feed.halted):
                    try:
                        events = self.hand_out(feed, now)
                        pushed += events
                        wrote += events > 0
                    except Exception:  # noqa: BLE001 - one recipient's fault stops nobody else
                        self.give_up(feed)
        if at < len(feeds):
            self._rounds[room] = feeds, at, wrote
            self.queue.append(room)
        elif wrote >= _LARGE:
            self.later(wrote * _REST_S, lambda: self._rested(room))
        else:
            self._round_ends(room)
        return pushed

    def _rested(self, room: Room) -> None:
        self._round_ends(room)
        if self.queue:
            self.queued()

    def _round_ends(self, room: Room) -> None:
        if room.told < room.top:
            self.queue.append(room)
        else:
            room.queued = False

    def _observe(self, room: Room) -> None:
        run = room.run(room.told)
        room.told = room.top
        if run is not None:
            wall = time.time()
            for one in run.entries:
                if one.stamped:
                    PUSH_SECONDS.observe(max(0.0, wall - one.stamped))
                if one.committed:
                    PUSH_COMMIT_SECONDS.observe(max(0.0, wall - one.committed))

    def give_up(self, feed: Feed) -> None:
        """End a session at which something failed, in the handler of that."""
        _LOOP.inc()
        logger(__name__).exception("a session could not be served")
        feed.owner.broken()

    def hand_out(self, feed: Feed, now: float, *, fresh: bool = False) -> int:
        """Write to the session what of the ring follows the feed's position; how many events.

        ``fresh``: only what a read would find now, for a feed that is behind. A feed that cannot be brought to the
        ring's end here is behind afterwards.
        """
        follower = feed.owner
        session: Session = follower.session
        room = feed.room
        pushed = 0
        while feed.position < room.top and not feed.held:
            run = room.fresh_run(feed.position) if fresh else room.run(feed.position)
            if run is None or follower.congested:
                session.fall_behind(feed)
                break
            pushed += self.give(feed, run, now)
            if feed.position < run.last:
                break
        if feed.behind and not fresh:
            WINDOW_STALLS.inc()
            follower.wake()
        return pushed

    def give(self, feed: Feed, run: Run, now: float) -> int:
        """Write to the session what of ``run``, which follows the feed's position, may go out now; how many events."""
        follower = feed.owner
        taken = follower.session.take(feed, run, now)
        if taken.frames:
            follower.write(taken.frames)
            follower.handed_out()
        if taken.load:
            follower.load(feed.conversation_id)
        return taken.events
