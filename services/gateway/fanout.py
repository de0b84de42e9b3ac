"""From a conversation to the sessions that follow it.

An event raises its room's ring and queues the room; `turn` then visits the feeds of queued rooms, a bounded number at a
time and rooms in turn, so that a conversation with 100,000 members keeps nobody waiting for longer than such a portion.
A visit is level-triggered: it hands out whatever of the ring follows the feed's position. So it does not matter how
many events came meanwhile, nor whether a feed was visited already.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from services.gateway.events import CONVERSATION, EVENT_TYPE, MEMBER, entry
from services.gateway.metrics import (
    CURSOR_BREAKS,
    DROPPED_RECORDS,
    PUSH_COMMIT_SECONDS,
    PUSH_SECONDS,
    PUSHES,
    WINDOW_STALLS,
)
from services.gateway.room import Came, Room
from services.gateway.wire import ready
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.gateway.events import Change, Entry
    from services.gateway.feed import Feed
    from services.gateway.room import Run
    from services.gateway.session import Session

ALWAYS = (EVENT_TYPE + MEMBER, EVENT_TYPE + CONVERSATION)
"""What may bring a local user into a conversation."""

_LOOP = LOOP_ERRORS.labels("fan-out")
_DIRECT = 8
"""More sessions than this in a conversation of unknown kind, and it is taken for a group."""

_REST_S = 50e-6
"""How long a large room rests for each session that a round wrote to, some four times what such a write costs: events
that come meanwhile leave in one write, and others have most of the loop."""

_LARGE = 100
"""Sessions in a round, below which no room rests."""

_PORTION = 128
"""Feeds of one room that are visited before other rooms get their turn."""


class Follower(Protocol):
    """What the fan-out needs of a session's connection. Nothing of it blocks."""

    user_id: str
    device_id: str
    number: int
    session: Session

    @property
    def congested(self) -> bool:
        """Whether too much waits to be written."""

    def write(self, frames: bytes) -> None:
        """Write ready frames."""

    def handed_out(self) -> None:
        """Events were written: they may be due again earlier than anything else."""

    def wake(self) -> None:
        """Some feed is behind."""

    def load(self, conversation_id: str) -> None:
        """Send the `conversation` frame (again), and follow the conversation from then on if it is new."""

    def receipt(self, feed: Feed, user_id: str, value: bytes) -> None:
        """Tell of a user's marks, once the `conversation` frame is out."""

    def broken(self) -> None:
        """End: something at this session failed, which must not be others' fault."""


class _Receipt(msgspec.Struct, frozen=True):
    user_id: str
    read_version: int
    device_id: str | None = None


_RECEIPT = msgspec.json.Decoder(_Receipt)


class Fanout:
    """All local sessions, by user and by conversation.

    ``queued`` is called when `turn` has something to do; ``later`` calls back after so many seconds. ``ring``,
    ``ring_bytes``: most events, and about how many bytes, that a room's ring holds; ``rings_bytes``: that all rings
    hold. ``linger_s``: how long a room is kept after its last session, ready for those who come back, but never more
    than ``most_idle``. ``clock`` gives seconds, as `time.monotonic` does. ``gap`` is told of a hole in what Kafka
    brought: conversation, first and last missing seq; ``other_store``, that a seq belongs to another event than before;
    ``membership``, of whom an event brings into a conversation or takes out of it.
    """

    def __init__(
        self,
        *,
        ring: int = 256,
        ring_bytes: int = 1024 * 1024,
        rings_bytes: int = 64 * 1024 * 1024,
        linger_s: float = 120.0,
        most_idle: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.rooms: dict[str, Room] = {}
        self.users: dict[str, set[Follower]] = {}
        self.queued: Callable[[], None] = lambda: None
        self.gap: Callable[[str, int, int], None] = lambda *_: None
        self.other_store: Callable[[], None] = lambda: None
        self.membership: Callable[[str], None] = lambda _: None
        self._ring = ring
        self._ring_bytes = ring_bytes
        self._rings_bytes = rings_bytes
        self._linger_s = linger_s
        self._most_idle = most_idle
        self._bytes = 0
        self._filled: OrderedDict[Room, None] = OrderedDict()
        self._idle: OrderedDict[Room, float] = OrderedDict()
        self._queue: deque[Room] = deque()
        self._rounds: dict[Room, tuple[list[Feed], int, int]] = {}
        self.later: Callable[[float, Callable[[], None]], object] = lambda _, then: then()

    # Who follows what.

    def register(self, follower: Follower) -> None:
        """Before its conversations are listed: from now on an event that adds the user to one is not missed."""
        self.users.setdefault(follower.user_id, set()).add(follower)

    def enter(self, follower: Follower, conversation_id: str) -> Feed:
        """Before anything of the conversation is read: from now on its known head rises with every event."""
        room = self.rooms.get(conversation_id)
        if room is None:
            room = self.rooms[conversation_id] = Room(conversation_id)
        self._idle.pop(room, None)
        feed = follower.session.join(room, follower)
        room.feeds[follower] = feed
        room.order = None
        return feed

    def leave(self, follower: Follower, conversation_id: str) -> None:
        """Stop following one conversation."""
        follower.session.drop(conversation_id)
        room = self.rooms.get(conversation_id)
        feed = None if room is None else room.feeds.pop(follower, None)
        if room is not None and feed is not None:
            room.order = None
            if room.watchers is not None:
                room.watchers.pop(feed, None)
            if not room.feeds:
                self._idle[room] = self.clock()
                if len(self._idle) > self._most_idle:
                    self._close(next(iter(self._idle)))

    def unregister(self, follower: Follower) -> None:
        """The session has ended."""
        for conversation_id in list(follower.session.feeds):
            self.leave(follower, conversation_id)
        followers = self.users.get(follower.user_id, set())
        followers.discard(follower)
        if not followers:
            self.users.pop(follower.user_id, None)

    def tidy(self, now: float) -> None:
        """Close rooms that nobody came back to. ``now``: as `time.monotonic` tells."""
        while self._idle:
            room, since = next(iter(self._idle.items()))
            if now - since < self._linger_s:
                return
            self._close(room)

    def forget(self) -> None:
        """Drop everything that was read or heard of: the store is not the one that it was.

        Sessions get no event any more: what they hold may be another timeline's, which only a new `hello` tells.
        """
        for room in self.rooms.values():
            for feed in room.feeds.values():
                feed.owner.session.halt(feed)
        # Not emptied but left to those feeds: a read of the old store may still end, and would fill them again.
        self.rooms.clear()
        self._idle.clear()
        self._filled.clear()
        self._queue.clear()
        self._rounds.clear()
        self._bytes = 0

    def _close(self, room: Room) -> None:
        self._idle.pop(room, None)
        self._empty(room)
        del self.rooms[room.conversation_id]

    def _empty(self, room: Room) -> None:
        if room in self._filled:
            del self._filled[room]
            self._bytes -= room.size
        room.forget()

    @property
    def ring_bytes(self) -> int:
        """What all rings hold, about."""
        return self._bytes

    # What is known from elsewhere.

    def heads(self, heads: Mapping[str, int]) -> int:
        """The heads of conversations as they are in the store: who is below reads. Returns how many sessions."""
        found = 0
        for conversation_id, head in heads.items():
            room = self.rooms.get(conversation_id)
            if room is None:
                continue
            room.know(head)
            for feed in list(room.feeds.values()):
                if feed.position >= head or feed.behind or (feed.held and not feed.asleep):
                    continue
                found += 1
                if feed.asleep:
                    feed.wake()
                else:
                    feed.owner.session.fall_behind(feed)
                    feed.owner.wake()
        return found

    def belongs(self, user_id: str, conversation_id: str) -> None:
        """The user is or was a member: its sessions follow the conversation if they do not yet."""
        for follower in list(self.users.get(user_id, ())):
            if conversation_id not in follower.session.feeds:
                self.enter(follower, conversation_id)
                follower.load(conversation_id)

    def committed(self, user_id: str, conversation_id: str, seq: int) -> None:
        """The user was told that the conversation has reached this seq: from now on it may be acked and marked."""
        self.belongs(user_id, conversation_id)
        room = self.rooms.get(conversation_id)
        if room is not None and seq > room.committed:
            room.committed = seq

    def seen(self, room: Room, told: int, head: int, entries: list[Entry]) -> None:
        """A read that began when the known head was ``told`` saw ``head`` and, in a row, ``entries``."""
        if self.rooms.get(room.conversation_id) is not room:
            return
        size = room.size
        room.seen(told, head)
        rose = bool(entries) and room.fill(entries, head)
        self._kept(room, size)
        if rose:
            self._visit(room)

    # What Kafka brings.

    def wants(self, conversation_id: str, type_: str) -> bool:
        """Whether a record has to be looked at: a look-up, before any JSON is touched."""
        if conversation_id in self.rooms or type_ in ALWAYS:
            return True
        DROPPED_RECORDS.inc()
        return False

    def event(
        self, conversation_id: str, seq: int, type_: str, value: bytes, *, stamped: float = 0.0, committed: float = 0.0
    ) -> None:
        """An event came; ``stamped``, ``committed``: when to Kafka and to Postgres, in seconds since the epoch.

        Raises `msgspec.MsgspecError` if it has to be looked into and cannot be read.
        """
        made = entry(seq, type_.removeprefix(EVENT_TYPE), value, stamped, committed)
        if made.change is not None:
            self._bring_in(conversation_id, made.change)
        room = self.rooms.get(conversation_id)
        if room is None:
            return
        head, size = room.head, room.size
        came = room.came(made)
        if came is Came.OTHER:
            self.other_store()
        if came in (Came.OLD, Came.OTHER):
            return
        if came is Came.GAP and head and seq > head + 1:
            CURSOR_BREAKS.labels("gap").inc()
            self.gap(conversation_id, head + 1, seq - 1)
        self._kept(room, size)
        self._visit(room)

    def _kept(self, room: Room, size: int) -> None:
        room.shorten(self._ring, self._ring_bytes)
        self._bytes += room.size - size
        if room.size:
            self._filled[room] = None
            self._filled.move_to_end(room)
            while self._bytes > self._rings_bytes and len(self._filled) > 1:
                self._empty(next(iter(self._filled)))
        else:
            self._filled.pop(room, None)

    def _visit(self, room: Room) -> None:
        if room.feeds and not room.queued:
            room.queued = True
            self._queue.append(room)
            self.queued()

    def receipt(self, conversation_id: str, value: bytes) -> None:
        """A receipt came: for all sessions of its user, and in a direct chat, or for who watches, the others'.

        One with a ``device_id`` answers a refused mark and is for that device alone. Raises `msgspec.MsgspecError`.
        """
        room = self.rooms.get(conversation_id)
        if room is None or not room.feeds:
            return
        receipt = _RECEIPT.decode(value)
        frame = ready(value)
        for follower in list(self.users.get(receipt.user_id, ())):
            feed = room.feeds.get(follower)
            if feed is not None and receipt.device_id in (None, follower.device_id):
                feed.read_version = max(feed.read_version, receipt.read_version)
                self._tell(feed, receipt.user_id, frame)
        if receipt.device_id is not None:
            return
        for feed in self._concerned(room):
            if feed.owner.user_id != receipt.user_id and (feed.member or feed.fresh):
                self._tell(feed, receipt.user_id, frame)

    def _concerned(self, room: Room) -> list[Feed]:
        """Who hears of others' marks: all of a direct chat, in a group who watches."""
        if room.direct is None and len(room.feeds) > _DIRECT:
            # It is a group, most likely, whose sessions all sleep. To wake them all would be the burst they avoid.
            next(iter(room.feeds.values())).wake()
        elif room.direct is not False:
            return room.listed()
        return list(room.watchers or ())

    def _tell(self, feed: Feed, user_id: str, frame: bytes) -> None:
        try:
            feed.owner.receipt(feed, user_id, frame)
        except Exception:  # noqa: BLE001 - one recipient's fault stops nobody else
            self.give_up(feed)

    def _bring_in(self, conversation_id: str, change: Change) -> None:
        for user_id in change.added:
            self.belongs(user_id, conversation_id)
            self.membership(user_id)
        if change.action in ("remove", "leave") and change.user_id is not None:
            self.membership(change.user_id)

    # Handing out.

    def turn(self, until: float) -> bool:
        """Visit feeds of queued rooms until the clock shows ``until``; whether there is more to do."""
        pushed = 0
        now = self.clock()
        while self._queue:
            room = self._queue.popleft()
            pushed += self._portion(room, now)
            now = self.clock()
            if now >= until:
                break
        if pushed:
            PUSHES.inc(pushed)
        return bool(self._queue)

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
            self._queue.append(room)
        elif wrote >= _LARGE:
            self.later(wrote * _REST_S, lambda: self._rested(room))
        else:
            self._round_ends(room)
        return pushed

    def _rested(self, room: Room) -> None:
        self._round_ends(room)
        if self._queue:
            self.queued()

    def _round_ends(self, room: Room) -> None:
        if room.told < room.top:
            self._queue.append(room)
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
