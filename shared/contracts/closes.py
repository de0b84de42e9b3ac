"""The socket's close codes: what each means, and what a client does then (protocol §3)."""

from __future__ import annotations

from typing import NamedTuple


class CloseCode(NamedTuple):
    """``client``: what it does, empty for nothing in particular."""

    meaning: str
    client: str = ""


CLOSE_CODES: dict[int, CloseCode] = {
    1000: CloseCode("normal"),
    1001: CloseCode("going away"),
    1002: CloseCode("not the WebSocket protocol", "stops: it has a bug"),
    1007: CloseCode("text that is not UTF-8", "stops: it has a bug"),
    1009: CloseCode("frame too large", "fixes itself"),
    1011: CloseCode("internal error", "reconnects"),
    4400: CloseCode("no valid hello", "stops: it has a bug"),
    4401: CloseCode("no, bad, expired or revoked token", "asks its app for a new token"),
    4403: CloseCode("not allowed", "stops"),
    4408: CloseCode("did not answer (heartbeat, or acks after all resends), or takes too little", "reconnects"),
    4409: CloseCode("replaced by a newer session of the same device", "stops"),
    4429: CloseCode("far over its rate", "reconnects, slower"),
    4500: CloseCode("internal error", "reconnects"),
    4503: CloseCode("the server drains or is not ready", "reconnects after `after_ms`"),
}
