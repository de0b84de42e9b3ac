"""What comes with time: the wait for `hello`, pings, acks and marks that go out again, the end of a token, resends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.gateway.acks import Device, Mark
from services.gateway.close import Close
from services.gateway.resending import resend
from shared.auth import LEEWAY_S

if TYPE_CHECKING:
    from services.gateway.connection import Connection
    from services.gateway.feed import Feed

EXPIRING_S = 60.0
"""So long before its end a token is said to expire."""

NEVER = float("inf")

_WELCOME_S = 0.1
"""`welcome` comes before `expiring`: so long until that is tried again."""

_MISSED_PINGS = 2


def tick(connection: Connection, now: float) -> float:
    """Do what is due; returns when something is due again, in seconds of the monotonic clock."""
    if connection.ended:
        return NEVER
    settings, session = connection.parts.settings, connection.session
    if not connection.begun:
        hello_due = connection.opened_at + settings.gateway_hello_s
        if now >= hello_due and connection.state == "opening":
            connection.end(Close(4408, "no hello in time"))
        return hello_due if now < hello_due else NEVER
    if now >= connection.next_ping:
        if connection.wire.unanswered >= _MISSED_PINGS:
            connection.end(Close(4408, "no answer to pings"))
            return NEVER
        connection.wire.ping()
        connection.next_ping = now + settings.gateway_heartbeat_s
    if now >= connection.next_refresh:
        for feed in session.feeds.values():
            _say_again(connection, feed, now - settings.gateway_ack_refresh_s)
        connection.next_refresh = now + settings.gateway_ack_refresh_s
    if now >= connection.expiring_at and not _check_token(connection, now):
        return NEVER
    if now >= session.due and not resend(connection, now):
        return NEVER
    return min(connection.next_ping, connection.next_refresh, connection.expiring_at, session.due)


def _say_again(connection: Connection, feed: Feed, before: float) -> None:
    """What Kafka may have lost: all that was acked, and a mark that was proposed before then and has no answer."""
    acked, proposed = feed.acked(), feed.proposed
    device = Device(feed.conversation_id, connection.user_id, connection.device_id)
    if acked:
        connection.parts.acks.hold(device, acked)
    if proposed is not None and proposed.at <= before:
        connection.parts.acks.mark_again(Mark(device, proposed.kind, proposed.seq, proposed.version))


def _check_token(connection: Connection, now: float) -> bool:
    """Say `expiring`, or end the session; False if it is ended."""
    left = connection.claims.expires_at - time.time() if connection.claims else 0.0
    if left <= -LEEWAY_S:
        connection.end(Close(4401, "the token has expired"))
        return False
    if left <= EXPIRING_S and connection.state == "listing":
        connection.expiring_at = now + _WELCOME_S
    elif left <= EXPIRING_S:
        connection.say({"t": "expiring", "in_s": max(0, int(left))})
        connection.expiring_at = now + max(0.02, left + LEEWAY_S)
    else:
        connection.expiring_at = now + left - EXPIRING_S
    return True
