"""The conversations of one session: listed at `hello`, brought in and changed later, and read while they are behind."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from services.gateway.close import Close
from services.gateway.listing import conversations_of, list_conversations, newest_first
from services.gateway.metrics import CURSOR_BREAKS, IGNORED_ACKS, PUSHES
from shared.clock import Backoff, wire_time
from shared.errors import UnavailableError
from shared.ranges import EMPTY, OPEN, RangeSet

if TYPE_CHECKING:
    from services.gateway.connection import Connection
    from services.gateway.listing import Listed
    from services.gateway.session import Feed, Read
    from shared.contracts.frames import Hello

_LIST_AT_ONCE = 1_000
_BREATHE = 100
"""Frames of a listing between two turns of the event loop."""


class Following:
    """Keeps every feed of a session fed. Its loop is the only one that lists, loads and reads for the session."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self._connection = connection
        self._fanout = connection.parts.fanout
        self._sync = hello.sync
        self._cursors = hello.positions()
        self._names_cursors = hello.cursors is not None
        self._wake = asyncio.Event()
        self._to_load: dict[str, None] = {}
        self._held_receipts: dict[str, dict[str, bytes]] = {}
        self.listed = asyncio.Event()

    def wake(self) -> None:
        """Some feed is behind, or some conversation has to be loaded."""
        self._wake.set()

    def load(self, conversation_id: str) -> None:
        """Send the conversation's frame (again)."""
        self._to_load[conversation_id] = None
        self._wake.set()

    def hold_receipt(self, conversation_id: str, user_id: str, frame: bytes) -> None:
        """Keep a receipt until the conversation's frame is out; the newest of a user is enough."""
        self._held_receipts.setdefault(conversation_id, {})[user_id] = frame

    async def run(self) -> None:
        """List the conversations, then keep every feed fed. Ends with `Close` only."""
        try:
            await self._list()
        except UnavailableError as error:
            after_ms = random.randint(500, 2000)
            self._connection.say({"t": "reconnect", "after_ms": after_ms, "reason": error.message})
            raise Close(4503, error.message) from None
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._load_some()
                progress = await self._read_some()
            except UnavailableError:
                progress = False
            if progress:
                backoff.reset()
            else:
                self._wake.set()
                await asyncio.sleep(backoff.next())

    async def _list(self) -> None:
        connection, session = self._connection, self._connection.session
        connection.say(self._welcome())
        # Register first, read after: the user before its conversations are listed, each conversation before its head.
        self._fanout.register(connection)
        ids = await conversations_of(connection.parts.pool, connection.user_id)
        for conversation_id in ids:
            if conversation_id not in session.feeds:
                self._fanout.enter(connection, conversation_id)
        rows: list[Listed] = []
        for start in range(0, len(ids), _LIST_AT_ONCE):
            rows += await self._rows(ids[start : start + _LIST_AT_ONCE])
        rows.sort(key=newest_first, reverse=True)
        count = 0
        for number, listed in enumerate(rows, 1):
            self._to_load.pop(listed.conversation_id, None)  # brought in meanwhile, and read after that
            count += self._loaded(listed)
            if number % _BREATHE == 0:
                await connection.below_limit()
                await asyncio.sleep(0)
        self._cursors = None
        connection.say({"t": "listed", "count": count})
        self.listed.set()

    def _welcome(self) -> dict[str, object]:
        connection, settings = self._connection, self._connection.parts.settings
        return {
            "t": "welcome",
            "session_id": connection.session_id,
            "user_id": connection.user_id,
            "device_id": connection.device_id,
            "server_time": wire_time(datetime.now(UTC)),
            "limits": {
                "frame_bytes": settings.gateway_frame_bytes,
                "window": settings.gateway_window,
                "resend_s": settings.gateway_resend_s,
                "heartbeat_s": settings.gateway_heartbeat_s,
                "sends_per_s": None,
            },
        }

    async def _rows(self, ids: list[str]) -> list[Listed]:
        connection = self._connection
        return await list_conversations(connection.parts.pool, connection.user_id, connection.device_id, ids)

    def _start(self, listed: Listed) -> int:
        """Where pushing starts (protocol §3). One that comes after `listed` starts at what the device has acked."""
        if not self._names_cursors:
            return listed.head if self._sync == "live" and not self.listed.is_set() else listed.record
        given = (self._cursors or {}).get(listed.conversation_id)
        if given is None:
            return listed.first_cursor
        if given > listed.head:
            CURSOR_BREAKS.labels("ahead_of_head").inc()
            return listed.head
        if given != listed.record:
            low, high = sorted((given, listed.record))
            if listed.visible & RangeSet([(low + 1, high)]):
                CURSOR_BREAKS.labels("behind" if given < listed.record else "ahead_of_record").inc()
        return given

    def _loaded(self, listed: Listed) -> bool:
        """Take a conversation as it was read, and tell the client of it; whether there was something to tell.

        There is nothing to tell of a conversation that the user has left and that this device holds to the end. It is
        still followed: the user may be added again.
        """
        connection = self._connection
        feed = connection.session.feeds[listed.conversation_id]
        fresh, feed.fresh = feed.fresh, False
        feed.direct = listed.kind == "direct"
        feed.keeps_history = listed.keeps_history
        feed.title = listed.title
        feed.known(listed.as_of, listed.visible, listed.role)
        feed.read_version = max(feed.read_version, listed.mine.read_version)
        cursor = self._start(listed) if fresh else feed.position
        tells = not fresh or listed.member or cursor < listed.head
        if tells:
            connection.write(listed.frame(cursor))
        self._tell_receipts(listed, tells=tells)
        if fresh:
            feed.position = cursor if cursor < listed.head else listed.as_of
            feed.acked = RangeSet([(1, listed.record)]) if listed.record else feed.acked
            if self._names_cursors and cursor > listed.record:
                connection.ack(feed, [(1, cursor)], listed.head)
        room = self._fanout.rooms[listed.conversation_id]
        if feed.early:
            IGNORED_ACKS.inc(connection.ack(feed, feed.early, max(room.ackable, listed.as_of)))
            feed.early = EMPTY
        connection.session.loaded(feed, room.know(listed.as_of))
        self._wake.set()
        return tells

    def _tell_receipts(self, listed: Listed, *, tells: bool) -> None:
        peer = listed.peer_frame()
        if tells and peer is not None:
            self._connection.write(peer)
        for user_id, frame in self._held_receipts.pop(listed.conversation_id, {}).items():
            if user_id == self._connection.user_id or listed.kind == "direct":
                self._connection.write(frame)

    async def _load_some(self) -> None:
        """Send the `conversation` frames that are due."""
        feeds = self._connection.session.feeds
        while self._to_load:
            ids = list(self._to_load)[:_LIST_AT_ONCE]
            for conversation_id in ids:
                del self._to_load[conversation_id]
            try:
                rows = await self._rows(ids)
            except UnavailableError:
                self._to_load.update(dict.fromkeys(ids))
                raise
            for listed in rows:
                if listed.conversation_id in feeds:
                    self._loaded(listed)
            for conversation_id in set(ids) - {listed.conversation_id for listed in rows}:
                self._fanout.leave(self._connection, conversation_id)
                self._held_receipts.pop(conversation_id, None)

    async def _read_some(self) -> bool:
        """Read for feeds that are behind, in turn, as far as the window allows. False: nothing new was found."""
        new = False
        short: set[Feed] = set()
        while True:
            await self._connection.below_limit()
            read = self._connection.session.next_read()
            if read is None:
                return new or not short
            if read.feed in short:
                self._connection.session.read_failed(read)
                if new:
                    self._wake.set()
                return new
            if await self._read(read):
                new = True
            else:
                short.add(read.feed)

    async def _read(self, read: Read) -> bool:
        """Do a read; False if it brought nothing although more is known."""
        connection, session, feed = self._connection, self._connection.session, read.feed
        room = self._fanout.rooms[feed.conversation_id]
        told = room.head
        try:
            found = await connection.parts.catch_up.after(
                feed.conversation_id, connection.user_id, feed.position, read.limit
            )
        except BaseException:
            session.read_failed(read)
            raise
        if found is None:
            session.read_failed(read)
            self._fanout.leave(connection, feed.conversation_id)
            return True
        if feed.loading:
            session.read_failed(read)
            return True
        if found.head >= feed.as_of and found.visible != feed.visible:
            # First the `conversation` frame: without it the client takes what it may not see for a gap.
            session.read_failed(read)
            session.reload(feed)
            self.load(feed.conversation_id)
            return True
        member = found.visible.highest == OPEN
        if found.role != feed.role or (member and found.title != feed.title):
            self.load(feed.conversation_id)
        feed.known(found.head, found.visible, found.role)
        for _, frame in found.events:
            connection.write(frame)
        PUSHES.inc(len(found.events))
        known_head = room.seen(told, found.head)
        session.read_done(
            read,
            [seq for seq, _ in found.events],
            complete=len(found.events) < read.limit,
            head=found.head,
            known_head=known_head,
            now=time.monotonic(),
        )
        return bool(found.events) or feed.position >= known_head
