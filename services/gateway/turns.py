"""Who is behind, what each misses, and in which turn it is read. Pure: the reading itself is `catchup`'s.

A feed that is behind takes what the room's ring holds. What the ring does not hold is read from Postgres, once for all
feeds that stand at the same place of a conversation (single-flight); a session waits for one read at a time, and reads
are done in the order in which they were asked for. A page that reaches the ring lengthens it, so that others who come
back need no read.

What a read saw is never more than a step: a feed that is still below what is known afterwards goes on. So a read that
began before the feed needed it, or that others asked for, does no harm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.gateway.metrics import CATCH_UP_RING, PUSHES
from services.gateway.room import Run
from shared.ranges import OPEN, RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.events import Entry
    from services.gateway.fanout import Fanout
    from services.gateway.feed import Feed
    from services.gateway.follower import Follower
    from services.gateway.room import Room


class Key(NamedTuple):
    """A place in a conversation. ``version``: the ring's; ``user_id``: if the read is for one user alone."""

    room: Room
    position: int
    version: int
    user_id: str | None


@dataclass(slots=True)
class Need:
    """A read to be done for ``feeds``. ``told``, ``version``: the room's known head and version when it began."""

    key: Key
    feeds: list[Feed] = field(default_factory=list)
    told: int = 0
    version: int = 0


class Own(NamedTuple):
    """What a read for one user saw, in one snapshot. ``events``: (seq, ready frame), ascending."""

    head: int
    role: str
    visible: RangeSet
    events: list[tuple[int, bytes]]


class Turns:
    """``page``: most events of a read.

    ``queued`` is called for each read that `next` will give; ``later`` calls back in a while, for a session whose read
    brought nothing although more is known.
    """

    def __init__(self, fanout: Fanout, *, page: int) -> None:
        self.queued: Callable[[], None] = lambda: None
        self.later: Callable[[Callable[[], None]], None] = lambda _: None
        self._fanout = fanout
        self._page = page
        self._needs: dict[Key, Need] = {}
        self._queue: deque[Need] = deque()

    def __len__(self) -> int:
        return len(self._needs)

    def wake(self, follower: Follower) -> None:
        """Hand out what the rings hold, and ask for the rest: when a feed fell behind, or there is room again."""
        session = follower.session
        now = self._fanout.clock()
        pushed = 0
        while not follower.congested:
            feed = session.next_behind()
            if feed is None:
                break
            pushed += self._fanout.hand_out(feed, now, fresh=True)
            if feed.held or session.settle(feed):
                continue
            if session.room == 0 or follower.congested:
                session.fall_behind(feed)
            else:
                session.needs_read(feed)
        if pushed:
            PUSHES.inc(pushed)
            CATCH_UP_RING.inc()
        if not follower.congested:
            self._ask(follower)

    def _ask(self, follower: Follower) -> None:
        feed = follower.session.next_read(self._page)
        if feed is None:
            return
        shared = feed.open_from <= feed.position + 1 and not feed.own
        key = Key(feed.room, feed.position, feed.room.version, None if shared else follower.user_id)
        need = self._needs.get(key)
        if need is None:
            need = self._needs[key] = Need(key)
            self._queue.append(need)
            self.queued()
        need.feeds.append(feed)

    def next(self) -> Need | None:
        """The next read to do. It ends with `shared`, `own`, `gone` or `failed`. None: it is not needed any more."""
        need = self._queue.popleft()
        need.feeds = [feed for feed in need.feeds if not self._helped(feed)]
        if not need.feeds:
            self._needs.pop(need.key, None)
            return None
        need.told, need.version = need.key.room.head, need.key.room.version
        return need

    def _helped(self, feed: Feed) -> bool:
        """Whether the ring holds by now what the feed waits for, or it waits no more."""
        session = feed.owner.session
        try:
            if not (feed.held or feed.own or feed.owner.congested):
                PUSHES.inc(self._fanout.hand_out(feed, self._fanout.clock(), fresh=True))
            waits = feed.behind and not feed.held and not session.settle(feed)
            if waits and session.room > 0 and not feed.owner.congested:
                return False
            session.read_done(feed)
            feed.owner.wake()
        except Exception:  # noqa: BLE001 - one session's fault keeps the read from nobody else
            self._fanout.give_up(feed)
        return True

    def failed(self, need: Need) -> None:
        """It could not be read: it is done again, behind the others."""
        self._queue.append(need)
        self.queued()

    def broken(self, need: Need) -> None:
        """It cannot be read: its feeds begin anew in a while."""
        self._needs.pop(need.key, None)
        for feed in need.feeds:
            self._end(feed, short=True)

    def gone(self, need: Need) -> None:
        """There is no such conversation, or the user was never a member of it."""
        self._needs.pop(need.key, None)
        for feed in need.feeds:
            feed.owner.session.read_done(feed)
            self._fanout.leave(feed.owner, feed.conversation_id)

    def shared(self, need: Need, head: int, entries: list[Entry]) -> Run | None:
        """A read saw ``head`` and, from the position on, ``entries``; then call `hand_out` until it is done."""
        self._needs.pop(need.key, None)
        room = need.key.room
        # What changed since it began does not get into the ring: others are served from there.
        self._fanout.seen(room, need.told, head, entries if need.version == room.version else [])
        return Run(entries) if entries else None

    def hand_out(self, need: Need, run: Run | None, most: int) -> bool:
        """Give a page to the next ``most`` feeds; whether there are more."""
        some, need.feeds = need.feeds[:most], need.feeds[most:]
        for feed in some:
            try:
                if run is not None and _takes(feed) and feed.position == run.entries[0].seq - 1:
                    PUSHES.inc(self._fanout.give(feed, run, self._fanout.clock()))
                self._end(feed, short=run is None)
            except Exception:  # noqa: BLE001 - one session's fault keeps the page from nobody else
                self._fanout.give_up(feed)
        return bool(need.feeds)

    def own(self, need: Need, found: Own) -> None:
        """A read for one user."""
        self._needs.pop(need.key, None)
        self._fanout.seen(need.key.room, need.told, found.head, [])
        for feed in need.feeds:
            try:
                if _takes(feed) and feed.position == need.key.position:
                    self._take_own(feed, found)
                self._end(feed, short=not found.events)
            except Exception:  # noqa: BLE001 - another device of the user waits for it, too
                self._fanout.give_up(feed)

    def _take_own(self, feed: Feed, found: Own) -> None:
        follower, session = feed.owner, feed.owner.session
        if found.visible != feed.visible:
            # What an older read passed over may be visible by now. A newer one is told of first: without the
            # `conversation` frame the client takes what it may not see for a gap.
            if found.head >= feed.as_of:
                session.reload(feed)
                follower.load(feed.conversation_id)
            return
        if found.role != feed.role:
            follower.load(feed.conversation_id)
        session.known(feed, found.head, found.visible, found.role)
        some = found.events[: session.room]
        if some:
            session.took(feed, [seq for seq, _ in some], self._fanout.clock())
            PUSHES.inc(len(some))
            follower.write(b"".join([frame for _, frame in some]))
            follower.handed_out()
        if len(some) == len(found.events):
            feed.own = False
            left = (found.visible & RangeSet([(feed.position + 1, OPEN)])).up_to(found.head).lowest
            if left is None or not some:
                session.passed(feed, found.head)
            else:
                session.passed(feed, left - 1)

    def _end(self, feed: Feed, *, short: bool) -> None:
        feed.owner.session.read_done(feed)
        if short and feed.behind:
            self.later(feed.owner.wake)  # what is known to be there was not there yet
        else:
            feed.owner.wake()


def _takes(feed: Feed) -> bool:
    return not (feed.held or feed.owner.congested)
