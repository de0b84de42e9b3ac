"""What a session does because time has passed: pings, resends, acked ranges told again, the token's end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed

from services.gateway.close import Close
from services.gateway.metrics import RESENDS
from shared.auth import LEEWAY_S
from shared.errors import UnavailableError

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection

    from services.gateway.connection import Connection

_EXPIRING_S = 60.0
_MISSED_PINGS = 2
_LEAST_WAIT_S = 0.02
_CONGESTED_S = 0.25
"""How long a resend that cannot be written is put off."""


class Clock:
    """The clock of one session."""

    def __init__(self, connection: Connection, socket: ServerConnection) -> None:
        self._connection = connection
        self._settings = connection.parts.settings
        self._socket = socket
        self._changed = asyncio.Event()
        self._said_expiring = False

    def wake(self) -> None:
        """Something that it waits for has come."""
        self._changed.set()

    def renewed(self) -> None:
        """The connection has a fresh token."""
        self._said_expiring = False
        self._changed.set()

    async def run(self) -> None:
        """Ends with `Close` only."""
        settings, connection = self._settings, self._connection
        unanswered: deque[asyncio.Future[float]] = deque()
        next_ping = time.monotonic() + settings.gateway_heartbeat_s
        next_refresh = time.monotonic() + settings.gateway_ack_refresh_s
        while True:
            self._changed.clear()
            connection.check_end()
            now = time.monotonic()
            if now >= next_ping:
                while unanswered and unanswered[0].done():
                    unanswered.popleft()
                if len(unanswered) >= _MISSED_PINGS:
                    raise Close(4408, "no answer to pings")
                unanswered.append(await self._ping())
                next_ping = now + settings.gateway_heartbeat_s
            if now >= next_refresh:
                for feed in connection.session.feeds.values():
                    connection.hold(feed, feed.acked)
                next_refresh = now + settings.gateway_ack_refresh_s
            await self._resend()
            token_due = self._check_token()
            due = min(next_ping, next_refresh, connection.session.next_due() or next_ping)
            least = _CONGESTED_S if connection.congested else _LEAST_WAIT_S
            wait = min(max(least, due - time.monotonic()), token_due, settings.gateway_resend_s)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _resend(self) -> None:
        session = self._connection.session
        now = time.monotonic()
        if session.overdue(now):
            raise Close(4408, "no acks")
        if self._connection.congested:
            return
        for resend in session.resends_due(now):
            feed = resend.feed
            try:
                events = await self._connection.parts.catch_up.at(
                    feed.conversation_id, self._connection.user_id, resend.seqs
                )
            except UnavailableError:
                session.not_resent(resend)
                continue
            for seq, frame in events:
                if seq in feed.unacked:
                    RESENDS.inc()
                    self._connection.write(frame)

    async def _ping(self) -> asyncio.Future[float]:
        try:
            async with asyncio.timeout(self._settings.gateway_heartbeat_s):
                return asyncio.ensure_future(await self._socket.ping())
        except TimeoutError:
            raise Close(4408, "too slow") from None
        except ConnectionClosed:
            raise Close(1001, "the client is gone") from None

    def _check_token(self) -> float:
        """Say `expiring` or end the session when it is time; returns the seconds until the next such time."""
        left = self._connection.claims.expires_at - time.time()
        if left <= -LEEWAY_S:
            raise Close(4401, "the token has expired")
        if left <= _EXPIRING_S and not self._said_expiring:
            self._said_expiring = True
            self._connection.say({"t": "expiring", "in_s": max(0, int(left))})
        return max(_LEAST_WAIT_S, left + LEEWAY_S if self._said_expiring else left - _EXPIRING_S)
