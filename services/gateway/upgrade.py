"""What is answered to a handshake request, as far as the request alone decides it. Pure."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from websockets.exceptions import NegotiationError
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from websockets.http11 import Response

    from services.gateway.addresses import Network

_LOGGER = logging.getLogger("websockets.server")
_END = b"\r\n\r\n"

_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])[ \t]*")
_KEY = re.compile(rb"[0-9A-Za-z+/]{21}[AQgw]==")
_CONNECTION = ([b"upgrade"], [b"keep-alive, upgrade"])
_UNUSUAL = frozenset({b"content-length", b"transfer-encoding"})
_HEADERS, _LINE_BYTES = 100, 8000
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_ACCEPTED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: %b\r\n%b\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Who may open a socket, and what each may cost. A limit of 0 is none."""

    path: str = "/v1/socket"
    subprotocol: str = "waybill.v1"
    origins: tuple[str, ...] = ()
    """Allowed values of `Origin`; empty: all. A request without one comes from no browser and is allowed."""
    trusted_proxies: tuple[Network, ...] = ()
    """Peers whose `X-Forwarded-For` is believed."""
    handshake_s: float = 10.0
    """From the connection to the complete request (with TLS: for each of its two parts)."""
    close_s: float = 2.0
    """From our close frame, or the end of what is read, to the end of the connection."""
    head_bytes: int = 16 * 1024
    """Largest request. One line may have 8 KiB, and there may be 128 of them."""
    first_message_bytes: int = 1024 * 1024
    """Largest message until `Wire.limit` says otherwise."""
    buffer_bytes: int = 64 * 1024
    """What may wait in this process to be written to a connection before it is congested."""
    send_buffer_bytes: int = 36 * 1024
    """The same in the kernel, as `SO_SNDBUF`: Linux doubles it for its own needs. 0 leaves it to the kernel."""
    most_connections: int = 0
    most_per_address: int = 0
    """An IPv6 address counts as its /64."""
    most_opening: int = 16_384
    """Connections that have not completed their request. The next one is cut off."""
    retry_after_s: int = 5
    """What a client is told to wait that was refused for a limit or a drain."""


class Refusal(NamedTuple):
    """A request is not accepted."""

    status: HTTPStatus
    text: str
    headers: tuple[tuple[str, str], ...] = ()


class Asked(NamedTuple):
    """A request that may be accepted: the response to it, and what it said."""

    response: bytes
    authorization: list[str]
    forwarded: list[str]


class Answer(NamedTuple):
    """The response to a request that is not accepted."""

    status: int
    response: bytes


def split(head: bytearray, since: int, most: int) -> int | None:
    """Where the request ends, looked for from ``since``; None if it is not complete.

    Raises `OverflowError` if it is longer than ``most``.
    """
    end = head.find(_END, max(0, since - len(_END) + 1))
    if (len(head) if end < 0 else end + len(_END)) > most:
        raise OverflowError
    return None if end < 0 else end + len(_END)


def read(head: bytes, policy: Policy) -> Asked | Answer:
    """What is answered to a complete request (ending in an empty line)."""
    return usual(head, policy) or unusual(head, policy)


def usual(head: bytes, policy: Policy) -> Asked | None:
    """The answer to a request as nearly every client sends it; None for any other, be it fine or not.

    It is the one to `unusual`, for a tenth of the time, which a mass reconnect is made of.
    """
    first, *lines = head[: -len(_END)].split(b"\r\n")
    found: dict[bytes, list[bytes]] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None or len(line) > _LINE_BYTES:
            return None
        found.setdefault(match[1].lower(), []).append(match[2])
    offered = found.get(b"sec-websocket-protocol", [])
    plain = (
        len(lines) <= _HEADERS
        and first == b"GET %b HTTP/1.1" % policy.path.encode()
        and [each.lower() for each in found.get(b"upgrade", [])] == [b"websocket"]
        and [each.lower() for each in found.get(b"connection", [])] in _CONNECTION
        and found.get(b"sec-websocket-version") == [b"13"]
        and len(found.get(b"host", [])) == 1
        and offered in ([], [policy.subprotocol.encode()])
        and found.keys().isdisjoint(_UNUSUAL)
        and len(origins := found.get(b"origin", [])) <= 1
        and (not origins or not policy.origins or origins[0].decode("latin-1") in policy.origins)
    )
    (key, *more) = found.get(b"sec-websocket-key", [b""])
    if not plain or more or _KEY.fullmatch(key) is None:
        return None
    accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())  # noqa: S324 - as the protocol has it
    subprotocol = b"Sec-WebSocket-Protocol: %b\r\n" % offered[0] if offered else b""
    return Asked(
        _ACCEPTED % (accept, subprotocol),
        [each.decode("latin-1") for each in found.get(b"authorization", [])],
        [each.decode("latin-1") for each in found.get(b"x-forwarded-for", [])],
    )


def unusual(head: bytes, policy: Policy) -> Asked | Answer:
    """The answer to any request."""
    subprotocol = policy.subprotocol

    def select(_: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
        for name in offered:
            if name == subprotocol:
                return name
        if offered:
            raise NegotiationError(f"only {subprotocol} is spoken here")
        return None

    protocol = ServerProtocol(
        origins=[*map(Origin, policy.origins), None] if policy.origins else None,
        select_subprotocol=select,
        logger=_LOGGER,
    )
    protocol.receive_data(head)
    events = protocol.events_received()
    if not events:
        # Of what is too long in its parts the library says so itself, of what is no request at all it does not.
        response = b"".join(protocol.data_to_send())
        return Answer(int(response.split(b" ", 2)[1]), response) if response else answer(_NO_REQUEST)
    request = events[0]
    assert isinstance(request, Request)
    if (refusal := _refusal(request, policy)) is not None:
        return answer(refusal)
    accepted = protocol.accept(request)
    if accepted.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
        return _answer(accepted)
    headers = request.headers
    return Asked(accepted.serialize(), headers.get_all("Authorization"), headers.get_all("X-Forwarded-For"))


def answer(refusal: Refusal) -> Answer:
    """The response that says it."""
    response = _REFUSING.reject(refusal.status, f"{refusal.text}\n")
    for name, value in refusal.headers:
        response.headers[name] = value
    return _answer(response)


def _answer(response: Response) -> Answer:
    return Answer(response.status_code, response.serialize())


def _refusal(request: Request, policy: Policy) -> Refusal | None:
    if request.path.partition("?")[0] != policy.path:
        return Refusal(HTTPStatus.NOT_FOUND, "not found")
    if len(request.headers.get_all("Host")) != 1:
        return Refusal(HTTPStatus.BAD_REQUEST, "one Host header is needed")
    versions = request.headers.get_all("Sec-WebSocket-Version")
    if versions and versions != ["13"]:
        return Refusal(HTTPStatus.UPGRADE_REQUIRED, "only version 13", (("Sec-WebSocket-Version", "13"),))
    return None


def later(status: HTTPStatus, text: str, policy: Policy) -> Refusal:
    """Not now: come back after the policy's time."""
    return Refusal(status, text, (("Retry-After", str(policy.retry_after_s)),))


_REFUSING = ServerProtocol(logger=_LOGGER)
_NO_REQUEST = Refusal(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1.1")
TOO_LARGE = Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too large")
BROKEN = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the server")
