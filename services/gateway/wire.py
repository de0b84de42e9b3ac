"""One client's connection: the handshake, whole messages in, ready frames out, pings, and the end.

A `Wire` is an `asyncio.Protocol`: no task, no queue of its own, and a timer only while the handshake or the end is
under way. `upgrade.py` decides on the request, `incoming.py` reads frames, `outgoing.py` builds them, `listener.py`
knows all wires. What is written within one turn of the loop leaves with one system call, in the next turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway import outgoing, upgrade
from services.gateway.incoming import CLOSE, CONTINUATION, PING, PONG, Control, Fault, Reader, close_code
from services.gateway.outgoing import ready
from services.gateway.wire_base import CLOSING, ENDING, OPEN, OPENING, Handler, WireBase

if TYPE_CHECKING:
    import asyncio

    from services.gateway.listener import Listener

__all__ = ["Handler", "Wire", "ready"]

_FRAMES_PER_TURN = 64
"""After so many frames of one connection the loop looks at the others."""
_CONTROLS, _CONTROLS_S = 500, 10.0
"""Most frames of a connection in so many seconds that say nothing: pings, pongs, empty parts."""
_NO_HEADERS: list[str] = []


class Wire(WireBase):
    """A client's connection. Made by a `Listener`; its methods are a `Handler`'s to call, in the loop's thread."""

    __slots__ = ("_answered", "_controls", "_controls_since", "_head", "_pinged", "_reader", "authorization")

    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(listener, loop)
        self.authorization: list[str] = _NO_HEADERS
        """The values of `Authorization` in the request, until `forget_headers`."""
        self._head: bytearray | None = None
        self._reader = Reader(listener.policy.first_message_bytes)
        self._pinged = 0
        self._answered = 0
        self._controls = 0
        self._controls_since = 0.0

    @property
    def unanswered(self) -> int:
        """Pings without a pong so far. A pong answers its ping and those before it."""
        return self._pinged - self._answered

    def ping(self) -> None:
        """Send a ping. While reading is paused nothing is done: its pong would not be seen."""
        if self._state == OPEN and not self._paused:
            self._pinged += 1
            self.write(outgoing.ping(self._pinged))

    def limit(self, most: int) -> None:
        """The largest message from now on, in bytes. A larger one closes with 1009."""
        self._reader.most = most

    def forget_headers(self) -> None:
        """The request's headers are no longer needed."""
        self.authorization = _NO_HEADERS

    def pause(self) -> None:
        """Read no more; messages that have arrived wait, too. A client that goes on sees its own writes stall."""
        if self._state == OPEN:
            self._paused = True
            self._read_or_not()

    def resume(self) -> None:
        """Read again. What waited comes in the loop's next turn, not before this returns."""
        if self._paused:
            self._paused = False
            self._go_on()
            self._read_or_not()

    def close(self, code: int, reason: str = "") -> None:
        """Say why, wait for the client's close frame as long as the policy says, then cut off.

        ``reason`` is cut to 120 bytes of UTF-8. What was written before still goes out. The first code counts.
        """
        if self._state == OPEN:
            self._say_close(code, reason)
            self._state = CLOSING
            self._after(self._listener.policy.close_s)
            # Messages are dropped from here on, but the close frame behind them is to be seen.
            self.resume()

    # The handshake.

    def data_received(self, data: bytes) -> None:  # noqa: D102 - asyncio's
        self._listener.bytes_read += len(data)
        if self._state == OPENING:
            self._request(data)
        elif self._state < ENDING:
            self._reader.feed(data)
            if not self._more and not self._paused:
                self._deliver()

    def _request(self, data: bytes) -> None:
        if self._head is None:
            self._head = bytearray()
        head, before = self._head, len(self._head)
        head += data
        try:
            end = upgrade.split(head, before, self._listener.policy.head_bytes)
        except OverflowError:
            self._refuse(upgrade.answer(upgrade.TOO_LARGE))
            return
        if end is None:
            return
        answer = self._listener.decide(self, bytes(head[:end]))
        if isinstance(answer, upgrade.Answer):
            self._refuse(answer)
            return
        self._head = None
        self._cancel()
        self._state = OPEN
        self.authorization = answer.authorization
        self._transport.write(answer.response)
        self._transport.set_write_buffer_limits(high=self._listener.policy.buffer_bytes)
        try:
            self._handler = self._listener.factory(self)
        except Exception:  # noqa: BLE001 - the next connection must not suffer from it
            self._broken()
        if len(head) > end and self._state < ENDING:
            self._reader.feed(bytes(head[end:]))
            if not self._paused:
                self._deliver()

    def _refuse(self, answer: upgrade.Answer) -> None:
        self._listener.answered(answer.status)
        self._head = None
        self._transport.write(answer.response)
        self._finish()

    # Frames.

    def _deliver(self) -> None:
        """Give what has arrived to the handler, until it pauses, nothing is left, or others have waited long enough."""
        reader, handler = self._reader, self._handler
        try:
            for _ in range(_FRAMES_PER_TURN):
                frame = reader.take()
                if frame is None:
                    break
                if isinstance(frame, Control):
                    self._control(frame)
                elif self._state == OPEN:
                    handler.message(frame)
                if self._paused or self._state >= ENDING:
                    return
            else:
                self._go_on()
        except Fault as fault:
            self._fail(fault.code, fault.reason)
        except Exception:  # noqa: BLE001 - the next connection must not suffer from it
            self._broken()
        if not self._reading or self._more:
            self._read_or_not()

    def _go_on(self) -> None:
        """Deliver what is left in the loop's next turn."""
        if self._reader.waiting and not self._more:
            self._more = True
            self._loop.call_soon(self._deliver_rest)

    def _deliver_rest(self) -> None:
        self._more = False
        if not self._paused and OPENING < self._state < ENDING:
            self._deliver()

    def _control(self, frame: Control) -> None:
        opcode, payload = frame
        if opcode == CLOSE:
            self._closed(payload)
            return
        if opcode == CONTINUATION and payload:
            return
        now = self._loop.time()
        if now - self._controls_since > _CONTROLS_S:
            self._controls_since, self._controls = now, 0
        self._controls += 1
        if self._controls > _CONTROLS:
            self._fail(4429, "too many control frames")
        elif opcode == PING and self._state == OPEN and not self.congested:
            # A client that pings and does not read gets no pongs rather than costing memory.
            self.write(outgoing.pong(payload))
        elif opcode == PONG:
            behind = outgoing.behind(payload, self._pinged)
            if behind is not None and behind < self.unanswered:
                self._answered = self._pinged - behind

    def _closed(self, payload: bytes) -> None:
        """The client's close frame: the answer to ours, or to be answered."""
        code = close_code(payload)
        if self._state == OPEN:
            self._code = code
            self.write(outgoing.closed(payload))
        self._finish()

    def _finish(self) -> None:
        self._reader = Reader(0)
        super()._finish()
