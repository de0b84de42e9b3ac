"""Conversations as they are read for sessions: their frames, and where each feed goes on.

Register first, read after: a feed is entered before its conversation is read. What the stream brings meanwhile raises
the room's known head; a feed below it is behind from the start.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from services.gateway import noting
from services.gateway.listing import Wanted, list_conversations
from services.gateway.metrics import CURSOR_BREAKS
from services.gateway.wire import ready
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.ranges import EMPTY, RangeSet

if TYPE_CHECKING:
    from services.gateway.connection import Connection
    from services.gateway.feed import Feed
    from services.gateway.listing import Listed
    from shared.contracts.frames import Hello
    from shared.postgres import Pool

_LOOP = LOOP_ERRORS.labels("loading")
_AT_ONCE = 1_000
_GATHER_S = 0.002
_BREATHE = 100


class Begin(NamedTuple):
    """What a `hello` says about where pushing starts. ``cursors``: by conversation a seq and the event held there."""

    sync: str = "full"
    cursors: dict[str, tuple[int, str | None]] | None = None
    since: bool = False

    @classmethod
    def of(cls, hello: Hello) -> Begin:
        """Of this `hello`."""
        return cls(hello.sync, hello.cursor_ids(), hello.since is not None)

    def wanted(self, connection: Connection, conversation_id: str) -> Wanted:
        """The conversation, to be read for this device."""
        seq, event_id = (self.cursors or {}).get(conversation_id, (None, None))
        return Wanted(connection.user_id, connection.device_id, conversation_id, seq, event_id)

    def cursor(self, listed: Listed) -> tuple[int, str | None]:
        """Where pushing starts (protocol §3), and the kind of break if the client's cursor is not as it should be."""
        given = (self.cursors or {}).get(listed.conversation_id)
        if given is None:
            return self._not_given(listed), None
        seq, _ = given
        if listed.mismatch:
            return seq, "reset"
        if seq > listed.head:
            return listed.head, "ahead_of_head"
        if seq != listed.record:
            low, high = sorted((seq, listed.record))
            if listed.visible & RangeSet([(low + 1, high)]):
                return seq, "behind" if seq < listed.record else "ahead_of_record"
        return seq, None

    def _not_given(self, listed: Listed) -> int:
        if self.since:
            return listed.record
        if self.cursors is not None:
            return listed.first_cursor
        return listed.head if self.sync == "live" else listed.record


LATER = Begin()
"""Of a conversation that comes after `listed`: it starts at what the device has acked."""


def loaded(connection: Connection, feed: Feed, listed: Listed, begin: Begin = LATER) -> list[bytes]:
    """Take a conversation as it was read; returns the ready frames that tell the client of it.

    There is nothing to tell of a conversation that the user has left and that this device holds to the end. It is
    still followed: the user may be added again.
    """
    session, room = connection.session, feed.room
    if listed.as_of < feed.as_of:
        connection.load(feed.conversation_id)  # it changed while it was read
        return []
    fresh, asleep = feed.fresh, feed.position > 0
    feed.asleep = False
    feed.direct = room.direct = listed.kind == "direct"
    feed.keeps_history = listed.keeps_history
    feed.marked(listed.mine.read_version, listed.mine.read_seq)
    session.known(feed, listed.as_of, listed.visible, listed.role)
    kind = None
    if fresh and not asleep:
        cursor, kind = begin.cursor(listed)
    else:
        cursor = feed.position
    feed.fresh = False
    frames: list[bytes] = []
    if not fresh or listed.member or cursor < listed.head or kind in ("ahead_of_head", "reset"):
        # Who has left may be added to all of it again: a client must not pass over what it cannot see now.
        told = cursor if listed.member else min(cursor, listed.head)
        frames.append(ready(listed.frame(told, reset=kind == "reset")))
        peer = listed.peer_frame()
        if peer is not None:
            frames.append(ready(peer))
    if kind is not None:
        CURSOR_BREAKS.labels(kind).inc()
        connection.parts.transitions.note(
            "cursor",
            kind,
            conversation_id=listed.conversation_id,
            user_id=connection.user_id,
            device_id=connection.device_id,
            session_id=connection.session_id,
            from_seq=begin.cursors[listed.conversation_id][0] if begin.cursors else cursor,
            to_seq=listed.record if kind in ("behind", "ahead_of_record") else listed.head,
        )
    if fresh:
        feed.begin(cursor if cursor < listed.head or kind == "reset" else max(cursor, listed.as_of), listed.record)
    room.know(listed.as_of)
    if kind == "reset":
        feed.halted = True
    elif fresh and begin.cursors is not None and cursor > listed.record:
        connection.take_ack(feed, [(1, cursor)], listed.head)
    feed.early, early = EMPTY, feed.early
    if early:
        ranges, head = tuple(early), max(room.ackable, listed.as_of)
        if connection.take_ack(feed, ranges, head):
            noting.acked_in_vain(connection, feed.conversation_id, ranges, head)
    session.loaded(feed)
    return frames


class Loader:
    """Reads conversations for open sessions, many at a time: new ones, and those that changed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._wanted: dict[tuple[Connection, str], None] = {}
        self._some = asyncio.Event()

    def want(self, connection: Connection, conversation_id: str) -> None:
        """Send this session the conversation's frame."""
        self._wanted[connection, conversation_id] = None
        self._some.set()

    async def run(self) -> None:
        """Read until cancelled."""
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S)
            wanted = list(self._wanted)[:_AT_ONCE]
            for key in wanted:
                del self._wanted[key]
            try:
                await self._load([key for key in wanted if key[1] in _feeds(key[0])])
                backoff.reset()
            except UnavailableError:
                _LOOP.inc()
                self._wanted.update(dict.fromkeys(wanted))
                await asyncio.sleep(backoff.next())
            except Exception:  # noqa: BLE001 - other sessions' conversations are still to be read
                _LOOP.inc()
                logger(__name__).exception("conversations could not be read")
                for connection, _ in wanted:
                    connection.broken()  # else they would never hear of the conversation again
                await asyncio.sleep(backoff.next())
            if not self._wanted:
                self._some.clear()

    async def _load(self, wanted: list[tuple[Connection, str]]) -> None:
        if not wanted:
            return
        listing = await list_conversations(
            self._pool, [LATER.wanted(connection, conversation_id) for connection, conversation_id in wanted]
        )
        for number, ((connection, conversation_id), listed) in enumerate(zip(wanted, listing.rows, strict=True), 1):
            try:
                self._take(connection, conversation_id, listed)
            except Exception:  # noqa: BLE001 - one session's fault is none of the others'
                _LOOP.inc()
                logger(__name__).exception("a conversation could not be told", session_id=connection.session_id)
                connection.broken()
            if number % _BREATHE == 0:
                await asyncio.sleep(0)

    def _take(self, connection: Connection, conversation_id: str, listed: Listed | None) -> None:
        feed = _feeds(connection).get(conversation_id)
        if feed is None:
            return
        if listed is None:
            connection.parts.fanout.leave(connection, conversation_id)
            return
        frames = loaded(connection, feed, listed)
        if frames:
            connection.write(b"".join(frames))
        connection.release()
        connection.wake()


def _feeds(connection: Connection) -> dict[str, Feed]:
    return {} if connection.ended else connection.session.feeds
