"""How one client's connection lives and ends: its transport, its state, its timer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from services.gateway import outgoing
from shared.logging import logger

if TYPE_CHECKING:
    from services.gateway.listener import Listener

_FLUSH_BYTES = 16 * 1024
"""What is written in one turn of the loop is gathered up to this; it is joined, which for small frames is cheaper than
to give the kernel a list of them, and more would only be copied."""

OPENING, OPEN, CLOSING, ENDING, GONE = range(5)
"""The request is not answered yet; messages flow; our close frame is out and the client's is awaited; nothing is read
any more and the connection's end is awaited; it has come."""


class Handler(Protocol):
    """What a wire tells; one per accepted connection. None of it may block. A fault in it ends the connection, 4500."""

    def message(self, data: str | bytes) -> None:
        """A whole message: a text one is a `str`, a binary one `bytes`. Never while paused or after a close."""

    def writable(self) -> None:
        """Much of what congested the wire is written."""

    def gone(self, code: int) -> None:
        """Nothing comes or goes any more; told exactly once. ``code`` is the close code of who closed first.

        It is 1005 if the client gave none, 1006 if there was no close frame. After `Wire.close` it comes with the
        client's answer, or when the wait for it is over; after `Wire.abort` in the loop's next turn.
        """


class _Nobody:
    """Stands in before the handler is made, and after it was told of the end."""

    def message(self, data: str | bytes) -> None:
        """Nothing."""

    def writable(self) -> None:
        """Nothing."""

    def gone(self, code: int) -> None:
        """Nothing."""


_NOBODY: Handler = _Nobody()


class WireBase(asyncio.Protocol):
    """The part of a `Wire` that knows nothing of requests and frames."""

    __slots__ = (
        "__weakref__",
        "_code",
        "_handler",
        "_listener",
        "_loop",
        "_more",
        "_out",
        "_out_bytes",
        "_paused",
        "_reading",
        "_state",
        "_timer",
        "_transport",
        "congested",
        "counted",
        "peer",
    )

    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = ""
        """The client's address; through proxies that are trusted, what they say it is."""
        self.counted: str | None = None
        """The listener's: under which address this wire is counted."""
        self.congested = False
        """Whether more than the policy's ``buffer_bytes`` wait to be written; what is not urgent should come later."""
        self._listener = listener
        self._loop = loop
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._handler = _NOBODY
        self._state = OPENING
        self._code = 1006
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._more = False
        self._reading = True

    @property
    def open(self) -> bool:
        """Whether messages flow: the handshake is done, and nobody has closed."""
        return self._state == OPEN

    @property
    def waiting_bytes(self) -> int:
        """What this process holds that is not with the kernel yet."""
        return self._out_bytes + self._transport.get_write_buffer_size()

    def write(self, frames: bytes) -> None:
        """Send one or more `ready` frames. Never blocks; does nothing once the wire is closing."""
        if self._state == OPEN:
            out = self._out
            if not out:
                self._listener.has_output(self)
            out.append(frames)
            self._out_bytes += len(frames)
            if self._out_bytes >= _FLUSH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Give what was written to the transport now, and not in the loop's next turn."""
        out = self._out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            self._out_bytes = 0
            self._listener.bytes_written += len(data)
            self._transport.write(data)

    def abort(self) -> None:
        """Cut off; what waits to be written is lost. `Handler.gone` comes in the loop's next turn."""
        self._state = max(self._state, ENDING)
        self._drop()
        self._transport.abort()

    def _drop(self) -> None:
        self._out.clear()
        self._out_bytes = 0

    # For the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102 - asyncio's
        self._transport = cast("asyncio.Transport", transport)
        peername = transport.get_extra_info("peername")
        self.peer = peername[0] if isinstance(peername, tuple) else ""
        if self._listener.arrived(self):
            self._after(self._listener.policy.handshake_s)
        else:
            self.abort()

    def eof_received(self) -> None:  # noqa: D102 - asyncio's
        # The transport now closes itself, once it has written what waits: for which a client may let it wait.
        self.flush()
        self._state = ENDING
        self._after(self._listener.policy.close_s)
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, D102 - asyncio's
        self._state = GONE
        self._drop()
        self._cancel()
        self._listener.left(self)
        self._tell()

    def pause_writing(self) -> None:  # noqa: D102 - asyncio's
        self.congested = True

    def resume_writing(self) -> None:  # noqa: D102 - asyncio's
        self.congested = False
        try:
            self._handler.writable()
        except Exception:  # noqa: BLE001 - the next connection must not suffer from it
            self._broken()

    # The end.

    def _say_close(self, code: int, reason: str) -> None:
        self._code = code
        self.write(outgoing.close(code, reason))

    def _fail(self, code: int, reason: str) -> None:
        """What comes from the client makes no sense, or we can't go on: say so, and read no more."""
        if self._state == OPEN:
            self._say_close(code, reason)
        self._finish()

    def _broken(self) -> None:
        """A handler's fault, which is being handled."""
        logger(__name__).exception("a handler failed")
        if self._state < ENDING:
            self._fail(4500, "a fault of the server")

    def _finish(self) -> None:
        """Nothing more is read, what was written goes out, and the connection ends.

        By half: the client's last bytes, unread, would make the kernel reset the connection, and our last ones be lost.
        """
        self.flush()
        self._state = ENDING
        self._paused = self._more = False
        self._read_or_not()
        if not self._transport.can_write_eof():
            self._transport.close()
        elif not self._transport.is_closing():
            self._transport.write_eof()
        self._after(self._listener.policy.close_s)
        self._tell()

    def _tell(self) -> None:
        """Tell the handler of the end, and know it no more."""
        handler, self._handler = self._handler, _NOBODY
        try:
            handler.gone(self._code)
        except Exception:  # noqa: BLE001 - the next connection must not suffer from it
            logger(__name__).exception("a handler failed at its connection's end")

    def _read_or_not(self) -> None:
        """Have the transport read, unless the handler wants a pause or has not got all that was read yet."""
        wanted = not self._paused and not self._more
        if wanted != self._reading and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _after(self, seconds: float) -> None:
        """Cut off then, unless something else is decided before."""
        self._cancel()
        self._timer = self._loop.call_later(seconds, self.abort)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
