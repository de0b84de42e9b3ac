"""Who follows which conversation, and what Kafka brings to it.

An event raises its room's ring, and `handout` brings it to the room's sessions; `telling` brings them receipts, and
`watching` those of groups.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from services.gateway.events import CONVERSATION, EVENT_TYPE, MEMBER, entry
from services.gateway.handout import HandOut
from services.gateway.metrics import CURSOR_BREAKS, DROPPED_RECORDS
from services.gateway.rings import Rings
from services.gateway.room import Came, Room
from services.gateway.telling import Telling
from services.gateway.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.gateway.events import Change, Entry
    from services.gateway.feed import Feed
    from services.gateway.follower import Follower

ALWAYS = (EVENT_TYPE + MEMBER, EVENT_TYPE + CONVERSATION)
"""What may bring a local user into a conversation."""


class Fanout:
    """All local sessions, by user and by conversation.

    ``ring``, ``ring_bytes``: most events, and about how many bytes, that a room's ring holds; ``rings_bytes``: that all
    rings hold. ``linger_s``: how long a room is kept after its last session, ready for those who come back, but never
    more than ``most_idle``. ``clock`` gives seconds, as `time.monotonic` does. ``out``: what hands events out; its ways
    to do so are this one's, too. ``gap`` is told of a hole in what Kafka brought: conversation, first and last missing
    seq; ``other_store``, that a seq belongs to another event than before; ``membership``, of whom an event brings into
    a conversation or takes out of it.
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
        self.gap: Callable[[str, int, int], None] = lambda *_: None
        self.other_store: Callable[[], None] = lambda: None
        self.membership: Callable[[str], None] = lambda _: None
        self.out = out = HandOut(clock)
        self.turn, self.hand_out, self.give, self.give_up = out.turn, out.hand_out, out.give, out.give_up
        self._linger_s = linger_s
        self._most_idle = most_idle
        self._idle: OrderedDict[Room, float] = OrderedDict()
        self._rings = Rings(ring=ring, ring_bytes=ring_bytes, rings_bytes=rings_bytes)
        self.watching = Watching(clock, out.give_up)
        self._telling = Telling(self.users, self.watching, out.give_up)

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
            self.watching.unwatch(feed)
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
        """Close rooms that nobody came back to, and drop what is old. ``now``: as `time.monotonic` tells."""
        self._rings.age(now)
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
            room.watchers = None
            for feed in room.feeds.values():
                feed.owner.session.halt(feed)
        # Not emptied but left to those feeds: a read of the old store may still end, and would fill them again.
        self.rooms.clear()
        self._idle.clear()
        self._rings.clear()
        self.out.clear()

    def _close(self, room: Room) -> None:
        self._idle.pop(room, None)
        self._rings.empty(room)
        del self.rooms[room.conversation_id]

    @property
    def ring_bytes(self) -> int:
        """What all rings hold, about."""
        return self._rings.bytes

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
        self._rings.changed(room, size)
        if rose:
            self.out.visit(room)

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
        self._rings.changed(room, size)
        self.out.visit(room)

    def receipt(self, conversation_id: str, value: bytes) -> None:
        """A receipt came. Raises `msgspec.MsgspecError` if somebody may have to hear of it and it cannot be read."""
        room = self.rooms.get(conversation_id)
        if room is not None and room.feeds:
            self._telling.receipt(room, value)

    def _bring_in(self, conversation_id: str, change: Change) -> None:
        for user_id in change.added:
            self.belongs(user_id, conversation_id)
            self.membership(user_id)
        if change.action in ("remove", "leave") and change.user_id is not None:
            self.membership(change.user_id)
