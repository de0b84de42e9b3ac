"""One session: ties the pure `Session` to its wire and to what all sessions of this gateway share.

It has no task of its own. What a client says is handled as it arrives; what has to wait runs as a task of the gateway
with the wire paused, so that frames are answered in order and a client that asks for much costs itself time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

import msgspec

from services.gateway import hello, noting, requests
from services.gateway.acks import Device
from services.gateway.close import Close
from services.gateway.held import OTHERS, OWN, PEER, Held
from services.gateway.metrics import CLIENT_ERRORS, DROPPED, IGNORED_ACKS, SESSIONS_ENDED
from services.gateway.session import Session
from services.gateway.ticking import EXPIRING_S, NEVER, tick
from services.gateway.wire import ready
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from services.gateway.feed import Feed
    from services.gateway.limits import Rates
    from services.gateway.parts import Parts
    from services.gateway.wire import Wire
    from shared.auth import Claims
    from shared.errors import WaybillError
    from shared.ranges import Pair

_MOST_COUNTED = 1_000_000
"""Most ignored seqs that one frame counts for: a range may end at 2⁶³."""

_MOST_WAITING = 2 * 1024 * 1024
"""What may wait to be written to a client that goes on to ask for answers. Events are never more than the buffer."""

_DRAINED_S = 30.0
"""A client that asked for something, or is listed, and takes nothing for so long is closed."""

_NOBODY = Session("", window=1, resend_s=1.0, resends=0)
"""Of a connection that has not said `hello`."""

_encode = msgspec.json.Encoder().encode


class Connection:
    """A session from its `hello` to its close code: the handler of its wire."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "_loads",
        "_send_bytes",
        "_sends_waiting",
        "_waits",
        "claims",
        "device_id",
        "expiring_at",
        "held",
        "next_ping",
        "next_refresh",
        "number",
        "opened_at",
        "parts",
        "rates",
        "reads_again",
        "scheduled",
        "session",
        "session_id",
        "state",
        "user_id",
        "wire",
        "write",
    )

    def __init__(self, wire: Wire, parts: Parts) -> None:
        self.wire = wire
        self.write = wire.write
        """Write ready frames; never blocks."""
        self.parts = parts
        self.user_id = ""
        self.device_id = ""
        self.session_id = str(uuid.uuid4())
        self.number = 0
        self.claims: Claims | None = None
        self.session = _NOBODY
        self.rates: Rates | None = None
        self.state = "opening"
        self.scheduled = NEVER
        self._ended = False
        self.held: Held | None = None
        self._loads: dict[str, bool] | None = None
        self.reads_again = False
        self._sends_waiting = self._send_bytes = 0
        self._waits: list[Callable[[], None]] | None = None
        now = time.monotonic()
        self.opened_at = now
        self.next_ping = now + parts.settings.gateway_heartbeat_s
        self.next_refresh = now + parts.settings.gateway_ack_refresh_s
        self.expiring_at = NEVER
        parts.sessions.add(self)
        parts.clock.at(self, now + parts.settings.gateway_hello_s)

    # The wire's handler.

    def message(self, data: str | bytes) -> None:
        """A whole message of the client."""
        if self._ended:
            return
        try:
            if self.state == "opening":
                self.state = "listing"
                self.wire.pause()
                self.parts.spawn(hello.greet(self, data))
            else:
                requests.handle(self, data)
        except Close as close:
            self.end(close)

    def writable(self) -> None:
        """Much of what was congested is written."""
        self.release()
        waits, self._waits = self._waits, None
        for wait in waits or ():
            wait()
        if self.begun:
            self.wake()

    def gone(self, code: int) -> None:
        """The wire is dead."""
        self._finish(code)

    # What the fan-out, catch-up and the handling of frames call; none of it blocks.

    @property
    def congested(self) -> bool:
        """Whether so much waits to be written that events are better read later."""
        return self.wire.congested

    def say(self, frame: dict[str, object]) -> None:
        """Write a frame that is not ready-made."""
        self.wire.write(ready(_encode(frame)))
        if self.wire.congested and self.wire.waiting_bytes > _MOST_WAITING:
            DROPPED.labels("too_slow").inc()
            self.end(Close(4408, "too slow"))

    def refuse(self, error: WaybillError, rid: str | None = None) -> None:
        """Write an `error` frame."""
        CLIENT_ERRORS.labels(error.code).inc()
        self.say({"t": "error", **({} if rid is None else {"rid": rid}), **error.as_dict()})

    def handed_out(self) -> None:
        """Events were written: they may be due again before anything else is."""
        if self.session.due < self.scheduled:
            self.parts.clock.at(self, self.session.due)

    def wake(self) -> None:
        """Some feed is behind, or there is room again."""
        if not self._ended:
            self.parts.catch_up.wake(self)

    def load(self, conversation_id: str) -> None:
        """Send the conversation's frame (again); while the session is listed, after that, unless it was listed then."""
        if self._ended:
            return
        if self.state != "listing":
            self.parts.loader.want(self, conversation_id)
            return
        # `welcome` comes first, and where pushing starts is for the listing to say, which knows the `hello`.
        if self._loads is None:
            self._loads = {}
        feed = self.session.feeds.get(conversation_id)
        told = feed is not None and not feed.fresh
        self._loads[conversation_id] = told or self._loads.get(conversation_id, False)

    def receipt(self, feed: Feed, user_id: str, frame: bytes) -> None:
        """Tell of the user's own marks, or of the peer's: once the `conversation` frame is out and there is room."""
        if feed.loading or self.wire.congested:
            # Which kind of conversation it is may not be known yet. Of a group, whose others are many, none is told.
            self._hold(feed, OWN if user_id == self.user_id else PEER, frame)
        else:
            self.wire.write(frame)

    def so_far(self, feed: Feed, frames: bytes) -> None:
        """Tell a watcher of a group of the others' marks so far, once the `conversation` frame is out."""
        if feed.loading:
            self._hold(feed, OTHERS, frames)
        else:
            self.wire.write(frames)

    def _hold(self, feed: Feed, whose: int, frames: bytes) -> None:
        if self.held is None:
            self.held = Held()
        self.held.keep(feed, whose, frames)

    def release(self) -> None:
        """Write the receipts that were held and may go out now."""
        if self.held is not None and not self.wire.congested:
            frames = self.held.take(self.session.feeds)
            if not self.held:
                self.held = None
            if frames:
                self.wire.write(frames)

    def ack(self, feed: Feed, ranges: Sequence[Pair], head: int) -> None:
        """The device stores these: tell receipts, and use the room that this makes in the window."""
        if self.take_ack(feed, ranges, head):
            noting.acked_in_vain(self, feed.conversation_id, ranges, head)
        if self.session.behind or self.session.reads:
            self.wake()

    def take_ack(self, feed: Feed, ranges: Sequence[Pair], head: int) -> int:
        """As `ack`, while nothing may be handed out; returns how many seqs do not count."""
        new, ignored = self.session.ack(feed, ranges, head)
        if new:
            device = Device(feed.conversation_id, self.user_id, self.device_id)
            self.parts.acks.hold(device, new, later=not feed.direct)
        if ignored:
            IGNORED_ACKS.inc(min(ignored, _MOST_COUNTED))
        return ignored

    def renew(self, claims: Claims) -> None:
        """The client brought a fresh token."""
        self.claims = claims
        self.expiring_at = time.monotonic() + claims.expires_at - time.time() - EXPIRING_S
        self.parts.clock.at(self, self.expiring_at)

    def sending(self, size: int) -> None:
        """A send with a body of ``size`` bytes waits for ingest; too much of it stops the reading of further frames."""
        self._sends_waiting += 1
        self._send_bytes += size
        if self._sends_enough:
            self.wire.pause()

    def answered(self, size: int) -> None:
        """A send has its answer."""
        enough = self._sends_enough
        self._sends_waiting -= 1
        self._send_bytes -= size
        if enough and not self._sends_enough and self.state == "open":
            self.wire.resume()

    @property
    def _sends_enough(self) -> bool:
        settings = self.parts.settings
        return (
            self._sends_waiting >= settings.gateway_session_sends
            or self._send_bytes >= settings.gateway_session_send_bytes
        )

    async def drained(self) -> None:
        """Wait until the session takes more, or is over. Raises `Close` if it takes nothing for long."""
        if not self.wire.congested or self._ended:
            return
        writable = asyncio.Event()
        if self._waits is None:
            self._waits = []
        self._waits.append(writable.set)
        try:
            async with asyncio.timeout(_DRAINED_S):
                await writable.wait()
        except TimeoutError:
            DROPPED.labels("too_slow").inc()
            raise Close(4408, "too slow") from None

    def do(self, work: Coroutine[None, None, None]) -> None:
        """Do something that has to wait; the client's next frames are handled after it."""
        self.wire.pause()
        self.state = "busy"
        self.parts.spawn(self._done(work))

    async def _done(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Close as close:
            self.end(close)
        except Exception:  # noqa: BLE001 - one session's fault is not the service's
            logger(__name__).exception("a request failed")
            self.broken()
        finally:
            if not self._ended:
                self.open()

    def open(self) -> None:
        """Handle frames from now on."""
        self.state = "open"
        loads, self._loads = self._loads, None
        for conversation_id, again in (loads or {}).items():
            feed = self.session.feeds.get(conversation_id)
            if feed is not None and (again or feed.fresh):
                self.load(conversation_id)
        if not self._sends_enough:
            self.wire.resume()

    # The end.

    @property
    def ended(self) -> bool:
        """Whether the session is over."""
        return self._ended

    @property
    def begun(self) -> bool:
        """Whether the client has said who it is."""
        return self.session is not _NOBODY

    def end(self, close: Close) -> None:
        """End the session; the first reason counts."""
        if not self._ended:
            self.wire.close(close.code, close.reason)
            self._finish(close.code)

    def broken(self) -> None:
        """Something failed that is ours: the client begins anew."""
        self.end(Close(4500, "a fault of the server"))

    def _finish(self, code: int) -> None:
        if self._ended:
            return
        self._ended = True
        SESSIONS_ENDED.labels(str(code) if 1000 <= code < 5000 and code in _CODES else "other").inc()
        self.parts.sessions.discard(self)
        noting.ended(self, code)
        if self.begun:
            for conversation_id, feed in self.session.feeds.items():
                if not feed.direct:
                    self.parts.acks.hurry(Device(conversation_id, self.user_id, self.device_id))
            self.parts.fanout.unregister(self)
            self.parts.social.closed(self)
        self.held = self._loads = None
        waits, self._waits = self._waits, None
        for wait in waits or ():
            wait()

    # Time passes.

    def begin(self, device_id: str, claims: Claims) -> None:
        """The client has said who it is."""
        settings = self.parts.settings
        self.user_id = claims.subject
        self.device_id = device_id
        self.session = Session(
            self.user_id,
            window=settings.gateway_window,
            resend_s=settings.gateway_resend_s,
            resends=settings.gateway_resends,
            pushes=self.parts.transitions.pushes if settings.transition_log else None,
        )
        self.wire.forget_headers()
        self.wire.limit(settings.gateway_frame_bytes)
        self.renew(claims)
        self.parts.clock.at(self, self.next_ping)

    def tick(self, now: float) -> float:
        """Do what is due; returns when something is due again, in seconds of the monotonic clock."""
        return tick(self, now)


_CODES = frozenset((1000, 1001, 1005, 1006, 1009, 1011, 4400, 4401, 4403, 4408, 4409, 4429, 4500, 4503))
