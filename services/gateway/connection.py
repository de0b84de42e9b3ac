"""One session: ties the pure `Session` to its wire and to what all sessions of this gateway share.

It has no task of its own. What a client says is handled as it arrives; what has to wait runs as a task of the gateway
with the wire paused, so that frames are answered in order and a client that asks for much costs itself time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from services.gateway import hello, noting, requests
from services.gateway.acks import Device
from services.gateway.close import Close
from services.gateway.metrics import CLIENT_ERRORS, DROPPED, IGNORED_ACKS, RESENDS, SESSIONS_ENDED
from services.gateway.session import Session
from services.gateway.wire import ready
from shared.auth import LEEWAY_S
from shared.errors import UnavailableError, WaybillError
from shared.logging import logger
from shared.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from services.gateway.acks import Acks
    from services.gateway.catchup import CatchUp
    from services.gateway.clock import Clock
    from services.gateway.fanout import Fanout
    from services.gateway.feed import Feed
    from services.gateway.group_receipts import SoFar
    from services.gateway.hello import Greeter
    from services.gateway.limits import Rates
    from services.gateway.loading import Loader
    from services.gateway.sends import Sends
    from services.gateway.session import Resend
    from services.gateway.settings import GatewaySettings
    from services.gateway.social import Social
    from services.gateway.transitions import Transitions
    from services.gateway.wire import Wire
    from shared.auth import Claims, Verifier
    from shared.postgres import Pool
    from shared.ranges import Pair

_EXPIRING_S = 60.0
_WELCOME_S = 0.1
"""`welcome` comes before `expiring`: so long until that is tried again."""

_MISSED_PINGS = 2
_CONGESTED_S = 0.25
"""How long a resend that cannot be written is put off."""

_OWN, _PEER, _OTHERS = range(3)
"""Whose marks wait: the newest of each is held, and so three at most of a conversation."""

_MOST_COUNTED = 1_000_000
"""Most ignored seqs that one frame counts for: a range may end at 2⁶³."""

_MOST_WAITING = 2 * 1024 * 1024
"""What may wait to be written to a client that goes on to ask for answers. Events are never more than the buffer."""

_DRAINED_S = 30.0
"""A client that asked for something, or is listed, and takes nothing for so long is closed."""

_NEVER = float("inf")
_NOBODY = Session("", window=1, resend_s=1.0, resends=0)
"""Of a connection that has not said `hello`."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Parts:
    """What every connection of this gateway shares.

    ``asking``: held by each read of Postgres that a client's frame asks for, so that they leave a share of the pool to
    catch-up, to those who come, and to readiness. ``spawn`` starts a task that the gateway owns.
    """

    settings: GatewaySettings
    pool: Pool
    verifier: Verifier
    fanout: Fanout
    catch_up: CatchUp
    asking: asyncio.Semaphore
    acks: Acks
    sends: Sends
    clock: Clock
    greeter: Greeter
    loader: Loader
    social: Social
    transitions: Transitions
    so_far: SoFar
    spawn: Callable[[Coroutine[None, None, None]], object]
    sessions: set[Connection]


class Connection:
    """A session from its `hello` to its close code: the handler of its wire."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "_expiring_at",
        "_held",
        "_loads",
        "_next_ping",
        "_next_refresh",
        "_opened_at",
        "_reads_again",
        "_send_bytes",
        "_sends_waiting",
        "_waits",
        "claims",
        "device_id",
        "number",
        "parts",
        "rates",
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
        self.scheduled = _NEVER
        self._ended = False
        self._held: dict[tuple[str, int], bytes] | None = None
        self._loads: dict[str, bool] | None = None
        self._reads_again = False
        self._sends_waiting = self._send_bytes = 0
        self._waits: list[Callable[[], None]] | None = None
        now = time.monotonic()
        self._opened_at = now
        self._next_ping = now + parts.settings.gateway_heartbeat_s
        self._next_refresh = now + parts.settings.gateway_ack_refresh_s
        self._expiring_at = _NEVER
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
        if self.session is not _NOBODY:
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
            self._hold(feed, _OWN if user_id == self.user_id else _PEER, frame)
        else:
            self.wire.write(frame)

    def so_far(self, feed: Feed, frames: bytes) -> None:
        """Tell a watcher of a group of the others' marks so far, once the `conversation` frame is out."""
        if feed.loading:
            self._hold(feed, _OTHERS, frames)
        else:
            self.wire.write(frames)

    def _hold(self, feed: Feed, whose: int, frames: bytes) -> None:
        if self._held is None:
            self._held = {}
        self._held[feed.conversation_id, whose] = frames
        feed.wake()

    def release(self) -> None:
        """Write the receipts that were held and may go out now."""
        if self._held is None or self.wire.congested:
            return
        left: dict[tuple[str, int], bytes] = {}
        frames: list[bytes] = []
        for (conversation_id, whose), held in self._held.items():
            feed = self.session.feeds.get(conversation_id)
            if feed is None:
                continue
            if feed.loading:
                left[conversation_id, whose] = held
            elif whose == _OWN or (feed.direct if whose == _PEER else feed.watching and feed.member):
                frames.append(held)
        self._held = left or None
        if frames:
            self.wire.write(b"".join(frames))

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
        self._expiring_at = time.monotonic() + claims.expires_at - time.time() - _EXPIRING_S
        self.parts.clock.at(self, self._expiring_at)

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
        if self.session is not _NOBODY:
            for conversation_id, feed in self.session.feeds.items():
                if not feed.direct:
                    self.parts.acks.hurry(Device(conversation_id, self.user_id, self.device_id))
            self.parts.fanout.unregister(self)
            self.parts.social.closed(self)
        self._held = self._loads = None
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
        self.parts.clock.at(self, self._next_ping)

    def tick(self, now: float) -> float:
        """Do what is due; returns when something is due again, in seconds of the monotonic clock."""
        if self._ended:
            return _NEVER
        settings = self.parts.settings
        if self.session is _NOBODY:
            hello_due = self._opened_at + settings.gateway_hello_s
            if now >= hello_due and self.state == "opening":
                self.end(Close(4408, "no hello in time"))
            return hello_due if now < hello_due else _NEVER
        if now >= self._next_ping:
            if self.wire.unanswered >= _MISSED_PINGS:
                self.end(Close(4408, "no answer to pings"))
                return _NEVER
            self.wire.ping()
            self._next_ping = now + settings.gateway_heartbeat_s
        if now >= self._next_refresh:
            for feed in self.session.feeds.values():
                acked = feed.acked()
                if acked:
                    self.parts.acks.hold(Device(feed.conversation_id, self.user_id, self.device_id), acked)
            self._next_refresh = now + settings.gateway_ack_refresh_s
        if now >= self._expiring_at and not self._check_token(now):
            return _NEVER
        if now >= self.session.due and not self._resend(now):
            return _NEVER
        return min(self._next_ping, self._next_refresh, self._expiring_at, self.session.due)

    def _check_token(self, now: float) -> bool:
        """Say `expiring`, or end the session; False if it is ended."""
        left = self.claims.expires_at - time.time() if self.claims else 0.0
        if left <= -LEEWAY_S:
            self.end(Close(4401, "the token has expired"))
            return False
        if left <= _EXPIRING_S and self.state == "listing":
            self._expiring_at = now + _WELCOME_S
        elif left <= _EXPIRING_S:
            self.say({"t": "expiring", "in_s": max(0, int(left))})
            self._expiring_at = now + max(0.02, left + LEEWAY_S)
        else:
            self._expiring_at = now + left - _EXPIRING_S
        return True

    def _resend(self, now: float) -> bool:
        session = self.session
        if session.overdue(now):
            self.end(Close(4408, "no acks"))
            return False
        reads: list[Resend] = []
        room = session.window
        for resend in session.resends_due(now):
            if not self.wire.congested and self._resend_from_ring(resend):
                continue
            count = resend.seqs.count()
            if self.wire.congested or self._reads_again or (reads and count > room):
                session.not_resent(resend, now, _CONGESTED_S)
            else:
                room -= count
                reads.append(resend)
        if reads:
            self._reads_again = True
            self.parts.spawn(self._resend_read(reads))
        return True

    def _resend_from_ring(self, resend: Resend) -> bool:
        frames: list[bytes] = []
        feed = resend.feed
        for low, high in resend.seqs:
            entries = feed.room.entries(low, high)
            if entries is None or not all(entry.target == 0 or feed.may_see(entry.target) for entry in entries):
                return False
            frames += [entry.frame for entry in entries]
        RESENDS.inc(len(frames))
        self.wire.write(b"".join(frames))
        noting.resent(self, feed.conversation_id, resend.seqs)
        return True

    async def _resend_read(self, resends: list[Resend]) -> None:
        """One read for all feeds, and one at a time: what is due meanwhile is put off."""
        wanted = [(resend.feed.conversation_id, list(resend.seqs.seqs())) for resend in resends]
        try:
            found = await self.parts.catch_up.at(self.user_id, wanted)
        except UnavailableError:
            self._not_resent(resends, self.parts.settings.gateway_resend_s)
            return
        except Exception:  # noqa: BLE001 - one session's fault is not the service's
            logger(__name__).exception("events could not be read again")
            self.broken()
            return
        finally:
            self._reads_again = False
        if self._ended:
            return
        if self.wire.congested:
            self._not_resent(resends, _CONGESTED_S)
            return
        frames: list[bytes] = []
        for resend in resends:
            unacked = self.session.unacked(resend.feed)
            some = [(seq, frame) for seq, frame in found[resend.feed.conversation_id] if seq in unacked]
            frames += [frame for _, frame in some]
            noting.resent(self, resend.feed.conversation_id, RangeSet((seq, seq) for seq, _ in some))
        RESENDS.inc(len(frames))
        self.wire.write(b"".join(frames))

    def _not_resent(self, resends: list[Resend], again_s: float) -> None:
        if not self._ended:
            for resend in resends:
                self.session.not_resent(resend, time.monotonic(), again_s)
            self.handed_out()


_CODES = frozenset((1000, 1001, 1005, 1006, 1009, 1011, 4400, 4401, 4403, 4408, 4409, 4429, 4500, 4503))
