"""One session: its loops, and what goes in and out between the socket and the pure `Session`."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from websockets.exceptions import ConnectionClosed

from services.gateway.acks import Device
from services.gateway.listing import conversations_of, list_conversations
from services.gateway.metrics import CLIENT_ERRORS, CURSOR_BREAKS, PUSHES, RESENDS
from services.gateway.session import Session
from shared.auth import LEEWAY_S
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.ranges import RangeSet

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection

    from services.gateway.acks import Acks
    from services.gateway.catchup import CatchUp
    from services.gateway.fanout import Fanout
    from services.gateway.listing import Listed
    from services.gateway.presence import Presence
    from services.gateway.sends import Sends
    from services.gateway.session import Feed, Read
    from services.gateway.settings import GatewaySettings
    from shared.auth import Claims, Verifier
    from shared.contracts.frames import Hello
    from shared.errors import WaybillError
    from shared.postgres import Pool
    from shared.ranges import Pair

_WRITE_S = 30.0
"""A socket that takes nothing for so long is closed; the client comes back and catches up."""

_MOST_FRAMES = 20_000
"""Most frames that wait for a socket: receipts and answers are not bounded by the window."""

_EXPIRING_S = 60.0
_MISSED_PINGS = 2
_LIST_AT_ONCE = 1_000


class Close(Exception):  # noqa: N818 - it is how a session ends, not always an error
    """The session ends with this close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True)
class Parts:
    """What every connection of this gateway shares."""

    settings: GatewaySettings
    pool: Pool
    verifier: Verifier
    fanout: Fanout
    catch_up: CatchUp
    acks: Acks
    sends: Sends
    presence: Presence


class Connection:
    """A session from its `hello` to its close code."""

    def __init__(self, socket: ServerConnection, parts: Parts, claims: Claims, hello: Hello, session_id: str) -> None:
        settings = parts.settings
        self.user_id = claims.subject
        self.device_id = hello.device_id
        self.session_id = session_id
        self.claims = claims
        self.parts = parts
        self.session = Session(
            window=settings.gateway_window,
            resend_s=settings.gateway_resend_s,
            resends=settings.gateway_resends,
            page=settings.gateway_page,
        )
        self.sends_waiting = 0
        self.listed = asyncio.Event()
        self._socket = socket
        self._hello = hello
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._some_outgoing = asyncio.Event()
        self._wake = asyncio.Event()
        self._clock_changed = asyncio.Event()
        self._to_load: dict[str, None] = {}
        self._held_receipts: dict[tuple[str, str], bytes] = {}
        self._said_expiring = False
        self._ended: Close | None = None

    # What the fan-out and the handling of frames call; none of it blocks.

    @property
    def congested(self) -> bool:
        """Whether so much waits to be written that events are better read later."""
        return self._outgoing_bytes > self.parts.settings.gateway_buffer_bytes

    def write(self, frame: bytes) -> None:
        """Queue a frame."""
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        self._some_outgoing.set()

    def say(self, frame: dict[str, object]) -> None:
        """Queue a frame that is not ready-made."""
        self.write(msgspec.json.encode(frame))

    def refuse(self, error: WaybillError, rid: str | None = None) -> None:
        """Queue an `error` frame."""
        CLIENT_ERRORS.labels(error.code).inc()
        self.say({"t": "error", **({} if rid is None else {"rid": rid}), **error.as_dict()})

    def wake(self) -> None:
        """Some feed is behind, or some conversation has to be loaded."""
        self._wake.set()

    def load(self, conversation_id: str) -> None:
        """Send the conversation's frame (again)."""
        self._to_load[conversation_id] = None
        self._wake.set()

    def hold_receipt(self, conversation_id: str, user_id: str, frame: bytes) -> None:
        """Keep a receipt until the conversation's frame is out; the newest of a user is enough."""
        self._held_receipts[conversation_id, user_id] = frame

    def hold(self, feed: Feed, ranges: RangeSet) -> None:
        """The device stores these: tell receipts."""
        self.parts.acks.hold(Device(feed.conversation_id, self.user_id, self.device_id), ranges)

    def end(self, close: Close) -> None:
        """End the session from outside (drain)."""
        self._ended = close
        self._clock_changed.set()

    def renew(self, claims: Claims) -> None:
        """The client brought a fresh token."""
        self.claims = claims
        self._said_expiring = False
        self._clock_changed.set()

    # The session's life.

    async def follow(self) -> None:
        """List the conversations, then keep every feed fed. Ends with `Close` only."""
        try:
            await self._list()
        except UnavailableError as error:
            after_ms = random.randint(500, 2000)
            self.say({"t": "reconnect", "after_ms": after_ms, "reason": error.message})
            raise Close(4503, error.message) from None
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                progress = await self._load_some() and await self._read_some()
            except UnavailableError:
                progress = False
            if progress:
                backoff.reset()
            else:
                asyncio.get_running_loop().call_later(backoff.next(), self._wake.set)

    async def writer(self) -> None:
        """Write queued frames. Ends with `Close` if the client is gone or takes nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some_outgoing.wait()
            self._some_outgoing.clear()
            was_congested = self.congested
            if len(self._outgoing) > _MOST_FRAMES:
                raise Close(4408, "too slow")
            try:
                async with asyncio.timeout(_WRITE_S) as patience:
                    while self._outgoing:
                        frame = self._outgoing.popleft()
                        await self._socket.send(frame, text=True)
                        self._outgoing_bytes -= len(frame)
                        patience.reschedule(loop.time() + _WRITE_S)
            except TimeoutError:
                raise Close(4408, "too slow") from None
            except ConnectionClosed:
                raise Close(1001, "the client is gone") from None
            if was_congested:
                self.wake()

    async def clock(self) -> None:
        """Pings, resends, the token's end. Ends with `Close`."""
        settings = self.parts.settings
        unanswered: deque[asyncio.Future[float]] = deque()
        next_ping = time.monotonic() + settings.gateway_heartbeat_s
        next_refresh = time.monotonic() + settings.gateway_ack_refresh_s
        while True:
            if self._ended is not None:
                raise self._ended
            now = time.monotonic()
            if now >= next_ping:
                while unanswered and unanswered[0].done():
                    unanswered.popleft()
                if len(unanswered) >= _MISSED_PINGS:
                    raise Close(4408, "no answer to pings")
                unanswered.append(await self._ping())
                next_ping = now + settings.gateway_heartbeat_s
            if now >= next_refresh:
                for feed in self.session.feeds.values():
                    self.hold(feed, feed.acked)
                next_refresh = now + settings.gateway_ack_refresh_s
            await self._resend(now)
            token_due = self._check_token()
            due = min(next_ping, next_refresh, self.session.next_due() or next_ping)
            wait = min(max(0.02, due - time.monotonic()), token_due, settings.gateway_resend_s)
            self._clock_changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._clock_changed.wait()
            except TimeoutError:
                continue

    async def flush(self, timeout_s: float) -> None:
        """Write what is queued, at the end of a session."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._outgoing:
                    await self._socket.send(self._outgoing.popleft(), text=True)
        except (TimeoutError, ConnectionClosed):
            self._outgoing.clear()

    async def _list(self) -> None:
        settings, fanout = self.parts.settings, self.parts.fanout
        self.say(
            {
                "t": "welcome",
                "session_id": self.session_id,
                "user_id": self.user_id,
                "device_id": self.device_id,
                "server_time": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
                "limits": {
                    "frame_bytes": settings.gateway_frame_bytes,
                    "window": settings.gateway_window,
                    "resend_s": settings.gateway_resend_s,
                    "heartbeat_s": settings.gateway_heartbeat_s,
                    "sends_per_s": None,
                },
            }
        )
        # Register first, read after: the user before its conversations are listed, each conversation before its head.
        fanout.register(self)
        ids = await conversations_of(self.parts.pool, self.user_id)
        for conversation_id in ids:
            if conversation_id not in self.session.feeds:
                fanout.enter(self, conversation_id)
        count = 0
        cursors = self._hello.positions()
        for start in range(0, len(ids), _LIST_AT_ONCE):
            some = ids[start : start + _LIST_AT_ONCE]
            for listed in await list_conversations(self.parts.pool, self.user_id, self.device_id, some):
                cursor = self._start(listed, cursors)
                if listed.member or cursor < listed.head:
                    self._loaded(listed, cursor)
                    count += 1
                else:
                    fanout.leave(self, listed.conversation_id)
        self.say({"t": "listed", "count": count})
        self.listed.set()

    def _start(self, listed: Listed, cursors: dict[str, int] | None) -> int:
        """Where pushing starts (protocol §3)."""
        if cursors is None:
            return listed.head if self._hello.sync == "live" else listed.record
        given = cursors.get(listed.conversation_id)
        if given is None:
            return listed.first_cursor
        if given > listed.head:
            CURSOR_BREAKS.labels("ahead_of_head").inc()
            return listed.head
        if given < listed.record:
            CURSOR_BREAKS.labels("behind").inc()
        elif given > listed.record:
            CURSOR_BREAKS.labels("ahead_of_record").inc()
        return given

    def _loaded(self, listed: Listed, cursor: int) -> None:
        """The first frame of a conversation, and from now on its events."""
        feed = self.session.feeds[listed.conversation_id]
        feed.direct = listed.kind == "direct"
        feed.keeps_history = listed.keeps_history
        feed.title = listed.title
        feed.known(listed.as_of, listed.visible, listed.role)
        feed.read_version = max(feed.read_version, listed.mine.read_version)
        feed.position = cursor
        self.write(listed.frame(cursor))
        self._tell_peer(listed)
        if listed.record > 0:
            feed.acked = RangeSet([(1, listed.record)])
        if cursor > listed.record and self._hello.cursors is not None:
            self.ack(feed, [(1, cursor)], listed.head)
        room = self.parts.fanout.rooms[listed.conversation_id]
        self.session.loaded(feed, room.know(listed.as_of))
        self._wake.set()

    def _tell_peer(self, listed: Listed) -> None:
        peer = listed.peer_frame()
        if peer is not None:
            self.write(peer)
        for key in [key for key in self._held_receipts if key[0] == listed.conversation_id]:
            frame = self._held_receipts.pop(key)
            if key[1] == self.user_id or listed.kind == "direct":
                self.write(frame)

    def ack(self, feed: Feed, ranges: list[Pair], head: int) -> int:
        """The device stores these; returns how many of the seqs do not count."""
        new, ignored = self.session.ack(feed, ranges, head)
        self.hold(feed, new)
        self._wake.set()
        return ignored

    async def _load_some(self) -> bool:
        """Send the `conversation` frames that are due. True: all are out."""
        while self._to_load:
            ids = list(self._to_load)[:_LIST_AT_ONCE]
            for conversation_id in ids:
                del self._to_load[conversation_id]
            try:
                rows = await list_conversations(self.parts.pool, self.user_id, self.device_id, ids)
            except UnavailableError:
                self._to_load.update(dict.fromkeys(ids))
                raise
            for listed in rows:
                feed = self.session.feeds.get(listed.conversation_id)
                if feed is None:
                    continue
                if feed.loading:
                    self._loaded(listed, listed.record)
                else:
                    feed.known(listed.as_of, listed.visible, listed.role)
                    feed.title = listed.title
                    feed.read_version = max(feed.read_version, listed.mine.read_version)
                    self.write(listed.frame(feed.position))
                    self._tell_peer(listed)
        return True

    async def _read_some(self) -> bool:
        """Read for feeds that are behind, in turn, as far as the window allows. False: nothing new was found."""
        while not self.congested and (read := self.session.next_read()):
            if not await self._read(read):
                return False
        return True

    async def _read(self, read: Read) -> bool:
        feed = read.feed
        try:
            found = await self.parts.catch_up.after(feed.conversation_id, self.user_id, feed.position, read.limit)
        except BaseException:
            self.session.read_failed(read)
            raise
        if found is None:
            self.session.read_done(read, [], complete=True, head=0, known_head=0, now=time.monotonic())
            self.parts.fanout.leave(self, feed.conversation_id)
            return True
        changed = (found.role, found.visible, found.title) != (feed.role, feed.visible, feed.title)
        if changed and found.head >= feed.as_of:
            feed.known(found.head, found.visible, found.role)
            self.load(feed.conversation_id)
        for _, frame in found.events:
            self.write(frame)
        PUSHES.inc(len(found.events))
        known_head = self.parts.fanout.rooms[feed.conversation_id].know(found.head)
        self.session.read_done(
            read,
            [seq for seq, _ in found.events],
            complete=len(found.events) < read.limit,
            head=found.head,
            known_head=known_head,
            now=time.monotonic(),
        )
        return bool(found.events) or feed.position >= known_head

    async def _resend(self, now: float) -> None:
        if self.session.overdue(now):
            raise Close(4408, "no acks")
        if self.congested:
            return
        for resend in self.session.resends_due(now):
            try:
                events = await self.parts.catch_up.at(resend.feed.conversation_id, self.user_id, resend.seqs)
            except UnavailableError:
                continue
            for seq, frame in events:
                if seq in resend.feed.unacked:
                    RESENDS.inc()
                    self.write(frame)

    async def _ping(self) -> asyncio.Future[float]:
        try:
            async with asyncio.timeout(self.parts.settings.gateway_heartbeat_s):
                return asyncio.ensure_future(await self._socket.ping())
        except TimeoutError:
            raise Close(4408, "too slow") from None
        except ConnectionClosed:
            raise Close(1001, "the client is gone") from None

    def _check_token(self) -> float:
        """Say `expiring` or end the session when it is time; returns the seconds until the next such time."""
        left = self.claims.expires_at - time.time()
        if left <= -LEEWAY_S:
            raise Close(4401, "the token has expired")
        if left <= _EXPIRING_S and not self._said_expiring:
            self._said_expiring = True
            self.say({"t": "expiring", "in_s": max(0, int(left))})
        return max(0.02, left + LEEWAY_S if self._said_expiring else left - _EXPIRING_S)
