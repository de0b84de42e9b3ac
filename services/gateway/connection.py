"""One session: the frames that wait to be written, and what ties the pure `Session` to the socket and the stores."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from websockets.exceptions import ConnectionClosed

from services.gateway.acks import Device
from services.gateway.clock import Clock
from services.gateway.close import Close
from services.gateway.following import Following
from services.gateway.metrics import CLIENT_ERRORS
from services.gateway.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from websockets.asyncio.server import ServerConnection

    from services.gateway.acks import Acks
    from services.gateway.catchup import CatchUp
    from services.gateway.fanout import Fanout
    from services.gateway.presence import Presence
    from services.gateway.sends import Sends
    from services.gateway.session import Feed
    from services.gateway.settings import GatewaySettings
    from shared.auth import Claims, Verifier
    from shared.contracts.frames import Hello
    from shared.errors import WaybillError
    from shared.postgres import Pool
    from shared.ranges import Pair, RangeSet

_WRITE_S = 30.0
"""A socket that takes nothing for so long is closed; the client comes back and catches up."""

_MOST_FRAMES = 20_000
"""Most frames that wait for a socket: receipts are not bounded by the window. Over it the session ends."""


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
        self.following = Following(self, hello)
        self.clock = Clock(self, socket)
        self.socket = socket
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._some_outgoing = asyncio.Event()
        self._below_limit = asyncio.Event()
        self._sends_waiting = 0
        self._some_answered = asyncio.Event()
        self._end: Close | None = None

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
        if len(self._outgoing) > _MOST_FRAMES:
            self.end(Close(4408, "too slow"))

    def say(self, frame: dict[str, object]) -> None:
        """Queue a frame that is not ready-made."""
        self.write(msgspec.json.encode(frame))

    def refuse(self, error: WaybillError, rid: str | None = None) -> None:
        """Queue an `error` frame."""
        CLIENT_ERRORS.labels(error.code).inc()
        self.say({"t": "error", **({} if rid is None else {"rid": rid}), **error.as_dict()})

    def wake(self) -> None:
        """Some feed is behind."""
        self.following.wake()

    def load(self, conversation_id: str) -> None:
        """Send the conversation's frame (again)."""
        self.following.load(conversation_id)

    def hold_receipt(self, conversation_id: str, user_id: str, frame: bytes) -> None:
        """Keep a receipt until the conversation's frame is out."""
        self.following.hold_receipt(conversation_id, user_id, frame)

    def ack(self, feed: Feed, ranges: Iterable[Pair], head: int) -> int:
        """The device stores these; returns how many of the seqs do not count."""
        new, ignored = self.session.ack(feed, ranges, head)
        self.hold(feed, new)
        self.following.wake()
        return ignored

    def hold(self, feed: Feed, ranges: RangeSet) -> None:
        """The device stores these: tell receipts."""
        self.parts.acks.hold(Device(feed.conversation_id, self.user_id, self.device_id), ranges)

    def end(self, close: Close) -> None:
        """End the session from outside; the first reason counts."""
        if self._end is None:
            self._end = close
            self._some_outgoing.set()
            self.clock.wake()

    def check_end(self) -> None:
        """Raise the `Close` that `end` was given, if it was."""
        if self._end is not None:
            raise self._end

    def renew(self, claims: Claims) -> None:
        """The client brought a fresh token."""
        self.claims = claims
        self.clock.renewed()

    def sending(self) -> None:
        """A send waits for ingest."""
        self._sends_waiting += 1

    def answered(self) -> None:
        """A send has its answer."""
        self._sends_waiting -= 1
        self._some_answered.set()

    # Waiting, so that a client that sends much and reads little costs it time and us no memory.

    async def below_limit(self) -> None:
        """Wait while the session is congested. `writer` bounds it: it ends a session that takes nothing."""
        while self.congested:
            self._below_limit.clear()
            await self._below_limit.wait()

    async def turn_to_send(self) -> None:
        """Wait while too many sends of this session have no answer yet. Each gets one in bounded time."""
        while self._sends_waiting >= self.parts.settings.gateway_session_sends:
            self._some_answered.clear()
            await self._some_answered.wait()

    # The socket's side.

    async def writer(self) -> None:
        """Write queued frames. Ends with `Close` if the client is gone or takes nothing, or the session is ended."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some_outgoing.wait()
            self._some_outgoing.clear()
            self.check_end()
            try:
                async with asyncio.timeout(_WRITE_S) as patience:
                    while self._outgoing:
                        frame = self._outgoing.popleft()
                        await self.socket.send(frame, text=True)
                        self._outgoing_bytes -= len(frame)
                        if not self.congested:
                            self._below_limit.set()
                        patience.reschedule(loop.time() + _WRITE_S)
            except TimeoutError:
                raise Close(4408, "too slow") from None
            except ConnectionClosed:
                raise Close(1001, "the client is gone") from None

    async def flush(self, timeout_s: float) -> None:
        """Write what is queued, at the end of a session."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._outgoing:
                    await self.socket.send(self._outgoing.popleft(), text=True)
        except (TimeoutError, ConnectionClosed):
            self._outgoing.clear()
