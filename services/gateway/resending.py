"""Events that nobody acknowledged in time go out again: from memory, else by one read at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.gateway import noting
from services.gateway.close import Close
from services.gateway.metrics import RESENDS
from shared.errors import UnavailableError
from shared.logging import logger
from shared.ranges import RangeSet

if TYPE_CHECKING:
    from services.gateway.connection import Connection
    from services.gateway.session import Resend

_CONGESTED_S = 0.25
"""How long a resend that cannot be written is put off."""


def resend(connection: Connection, now: float) -> bool:
    """Send again what is due; False if the session has ended, since it was sent often enough."""
    session = connection.session
    if session.overdue(now):
        connection.end(Close(4408, "no acks"))
        return False
    reads: list[Resend] = []
    room = session.window
    for one in session.resends_due(now):
        if not connection.congested and _from_ring(connection, one):
            continue
        count = one.seqs.count()
        if connection.congested or connection.reads_again or (reads and count > room):
            session.not_resent(one, now, _CONGESTED_S)
        else:
            room -= count
            reads.append(one)
    if reads:
        connection.reads_again = True
        connection.parts.spawn(_read(connection, reads))
    return True


def _from_ring(connection: Connection, one: Resend) -> bool:
    frames: list[bytes] = []
    feed = one.feed
    for low, high in one.seqs:
        entries = feed.room.entries(low, high)
        if entries is None or not all(entry.target == 0 or feed.may_see(entry.target) for entry in entries):
            return False
        frames += [entry.frame for entry in entries]
    RESENDS.inc(len(frames))
    connection.write(b"".join(frames))
    noting.resent(connection, feed.conversation_id, one.seqs)
    return True


async def _read(connection: Connection, resends: list[Resend]) -> None:
    """One read for all feeds, and one at a time: what is due meanwhile is put off."""
    wanted = [(one.feed.conversation_id, list(one.seqs.seqs())) for one in resends]
    try:
        found = await connection.parts.catch_up.at(connection.user_id, wanted)
    except UnavailableError:
        _not_resent(connection, resends, connection.parts.settings.gateway_resend_s)
        return
    except Exception:  # noqa: BLE001 - one session's fault is not the service's
        logger(__name__).exception("events could not be read again")
        connection.broken()
        return
    finally:
        connection.reads_again = False
    if connection.ended:
        return
    if connection.congested:
        _not_resent(connection, resends, _CONGESTED_S)
        return
    frames: list[bytes] = []
    for one in resends:
        unacked = connection.session.unacked(one.feed)
        some = [(seq, frame) for seq, frame in found[one.feed.conversation_id] if seq in unacked]
        frames += [frame for _, frame in some]
        noting.resent(connection, one.feed.conversation_id, RangeSet((seq, seq) for seq, _ in some))
    RESENDS.inc(len(frames))
    connection.write(b"".join(frames))


def _not_resent(connection: Connection, resends: list[Resend], again_s: float) -> None:
    if not connection.ended:
        for one in resends:
            connection.session.not_resent(one, time.monotonic(), again_s)
        connection.handed_out()
