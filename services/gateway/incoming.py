"""What a client's bytes mean: WebSocket frames in, whole messages and control frames out. Pure.

RFC 6455 as a server without extensions reads it. `websockets`' Sans-I/O protocol does the same, with 4.5 KiB for each
connection and five times the time for each small frame; a property test holds this reader against it.
"""

from __future__ import annotations

import codecs
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from websockets.exceptions import ProtocolError
from websockets.frames import Close
from websockets.speedups import apply_mask

if TYPE_CHECKING:
    from collections.abc import Callable

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NO_CODE: Final = 1005
"""Stands for a close frame without a code; never on the wire."""

_FIN, _RESERVED, _OPCODE, _MASKED, _LENGTH = 0x80, 0x70, 0x0F, 0x80, 0x7F
_MASK_BYTES = 4
_SHORTEST = 2 + _MASK_BYTES
_MOST_CONTROL = 125
_TWO_BYTES, _EIGHT_BYTES = 126, 127
_U16, _U64 = Struct("!H"), Struct("!Q")
_WHOLE_TEXT, _WHOLE_BINARY = _FIN | TEXT, _FIN | BINARY
_WHOLE = frozenset({_WHOLE_TEXT, _WHOLE_BINARY})
_Decode = codecs.getincrementaldecoder("utf-8")


class Fault(Exception):  # noqa: N818 - what a client did, told to it as a close code
    """The client broke the protocol: the connection fails with this code and reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Control(NamedTuple):
    """A frame that is no whole message: `CLOSE`, `PING`, `PONG`, or, as a `CONTINUATION`, a part before the last."""

    opcode: int
    payload: bytes


class Reader:
    """Takes bytes as they come, and gives what they say, one at a time, so that its owner may stop in between.

    ``most`` is the largest message in bytes; what is longer is refused by its header, before its bytes are kept.
    """

    __slots__ = ("_at", "_check", "_data", "_message", "_need", "_opcode", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._data: bytes | bytearray = b""
        self._at = 0
        self._need = _SHORTEST
        self._message: bytearray | None = None
        self._opcode = CONTINUATION
        self._check: Callable[[bytes, bool], str] | None = None

    @property
    def waiting(self) -> bool:
        """Whether bytes are kept, of a part of a frame or of frames that nobody took yet."""
        return len(self._data) > self._at

    def feed(self, data: bytes) -> None:
        """Add what came from the network."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
        elif isinstance(self._data, bytearray):
            del self._data[: self._at]
            self._at = 0
            self._data += data
        else:
            # A growing buffer, since a frame that comes byte by byte must not be copied at each of them.
            self._data, self._at = bytearray(self._data[self._at :]) + data, 0

    def take(self) -> str | bytes | Control | None:
        """The next whole message, part of one, or control frame; None if more bytes are needed first.

        A text message is a `str`, a binary one `bytes`. Raises `Fault` (1002, 1007, 1009), after which nothing more
        may be asked.
        """
        data, at = self._data, self._at
        if at == len(data):
            self._data, self._at = b"", 0
            return None
        if self._message is None and len(data) - at >= _SHORTEST and data[at] == _WHOLE_TEXT:
            # What most frames are (a short text, whole) is read in one step.
            begin, length = at + _SHORTEST, data[at + 1] - _MASKED
            end = begin + length
            if 0 <= length <= _MOST_CONTROL and length <= self.most and end <= len(data):
                self._need, self._at = _SHORTEST, end
                return _text(apply_mask(data[begin:end], data[begin - _MASK_BYTES : begin]))
        return self._any()

    def _any(self) -> str | bytes | Control | None:
        frame = self._frame()
        if frame is None:
            if self._at:
                # Of what came in one piece, only the rest is kept.
                self._data, self._at = self._data[self._at :], 0
            return None
        first, payload = frame
        if first & _OPCODE >= CLOSE:
            return Control(first & _OPCODE, payload)
        if first in _WHOLE and self._message is None:
            return _text(payload) if first == _WHOLE_TEXT else payload
        return self._part(first, payload)

    def _frame(self) -> tuple[int, bytes] | None:
        """First byte and payload of the next frame, if all of it is there."""
        data, at = self._data, self._at
        have = len(data) - at
        if have < self._need:
            if have < _SHORTEST and have >= 1:
                self._check_first(data[at])
                if have >= 2:
                    self._check_second(data[at], data[at + 1])
            return None
        first, second = data[at], data[at + 1]
        length = second & _LENGTH
        begin = at + _SHORTEST
        if first not in _WHOLE:
            self._check_first(first)
        self._check_second(first, second)
        if length == _TWO_BYTES:
            begin += 2
            if have < begin - at:
                self._need = begin - at
                return None
            (length,) = _U16.unpack_from(data, at + 2)
        elif length == _EIGHT_BYTES:
            begin += 8
            if have < begin - at:
                self._need = begin - at
                return None
            (length,) = _U64.unpack_from(data, at + 2)
        if first & _OPCODE < CLOSE and length > self.most - (0 if self._message is None else len(self._message)):
            raise Fault(1009, f"more than {self.most} bytes")
        end = begin + length
        if have < end - at:
            self._need = end - at
            return None
        self._need, self._at = _SHORTEST, end
        return first, apply_mask(data[begin:end], data[begin - _MASK_BYTES : begin])

    def _check_first(self, first: int) -> None:
        """What may be said of a frame by its first byte, given what came before it."""
        opcode = first & _OPCODE
        if first & _RESERVED:
            raise Fault(1002, "a reserved bit")
        if CLOSE <= opcode <= PONG:
            if not first & _FIN:
                raise Fault(1002, "a fragmented control frame")
        elif opcode > BINARY:
            raise Fault(1002, "an unknown opcode")
        elif opcode == CONTINUATION and self._message is None:
            raise Fault(1002, "a continuation of nothing")

    def _check_second(self, first: int, second: int) -> None:
        opcode = first & _OPCODE
        if not second & _MASKED:
            raise Fault(1002, "a frame without a mask")
        if opcode >= CLOSE and second & _LENGTH > _MOST_CONTROL:
            raise Fault(1002, "a long control frame")
        if CONTINUATION < opcode < CLOSE and self._message is not None:
            raise Fault(1002, "a message inside a message")

    def _part(self, first: int, payload: bytes) -> str | bytes | Control:
        """A frame of a message in parts: the message, if it was the last one."""
        if self._message is None:
            self._message, self._opcode = bytearray(), first & _OPCODE
            self._check = _Decode().decode if self._opcode == TEXT else None
        final = bool(first & _FIN)
        if self._check is not None:
            try:
                # Read as it comes, so that what can't become text is refused with the part that shows it.
                self._check(payload, final)
            except UnicodeDecodeError:
                raise Fault(1007, "not UTF-8") from None
        self._message += payload
        if final:
            whole, self._message, self._check = bytes(self._message), None, None
            return whole.decode() if self._opcode == TEXT else whole
        return Control(CONTINUATION, payload)


def close_code(payload: bytes) -> int:
    """The code of a close frame, `NO_CODE` if it has none. Raises `Fault` if the frame may not be."""
    try:
        return int(Close.parse(payload).code)
    except ProtocolError as error:
        raise Fault(1002, str(error)) from None
    except UnicodeDecodeError:
        raise Fault(1007, "not UTF-8") from None


def _text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        raise Fault(1007, "not UTF-8") from None
