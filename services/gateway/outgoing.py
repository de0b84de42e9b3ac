"""Frames that a server sends, as bytes: unmasked, whole. Pure."""

from __future__ import annotations

from struct import Struct

from services.gateway.incoming import CLOSE, PING, PONG, TEXT

_FIN = 0x80
_SHORT = [bytes((_FIN | TEXT, length)) for length in range(126)]
_MEDIUM, _LONG = Struct("!BBH"), Struct("!BBQ")
_CODE, _NUMBER = Struct("!H"), Struct("!I")
_PING = bytes((_FIN | PING, _NUMBER.size))
_NUMBERS = 1 << 32
_REASON_BYTES = 120
"""A close frame has room for 123 bytes of reason."""


def ready(payload: bytes) -> bytes:
    """A text frame: header and payload (UTF-8). Built once, written to any number of wires."""
    length = len(payload)
    if length < 126:
        return _SHORT[length] + payload
    if length < 65536:
        return _MEDIUM.pack(_FIN | TEXT, 126, length) + payload
    return _LONG.pack(_FIN | TEXT, 127, length) + payload


def close(code: int, reason: str) -> bytes:
    """A close frame; the reason is cut to 120 bytes of UTF-8."""
    text = reason.encode()[:_REASON_BYTES].decode(errors="ignore").encode()
    return closed(_CODE.pack(code) + text)


def closed(payload: bytes) -> bytes:
    """The answer to a close frame with this payload."""
    return bytes((_FIN | CLOSE, len(payload))) + payload


def ping(number: int) -> bytes:
    """A connection's ping with this number, by which `behind` knows its pong."""
    return _PING + _NUMBER.pack(number % _NUMBERS)


def pong(payload: bytes) -> bytes:
    """The answer to a ping with this payload."""
    return bytes((_FIN | PONG, len(payload))) + payload


def behind(payload: bytes, number: int) -> int | None:
    """How many pings before ``number``, the last one, this pong's ping was sent; None if it is no such pong."""
    if len(payload) != _NUMBER.size:
        return None
    return int(number - _NUMBER.unpack(payload)[0]) % _NUMBERS
