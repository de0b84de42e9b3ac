"""Gauges that are counted now and then rather than kept at each change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.gateway.metrics import BEHIND_SECONDS, RING_BYTES, ROOMS, SESSIONS, SESSIONS_BY_STATE, SOCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection

    from services.gateway.connection import Connection
    from services.gateway.fanout import Fanout
    from services.gateway.listener import Listener

_STATES = ("opening", "listing", "live", "behind", "stalled")


class Gauges:
    """``listener`` is set once the port is open."""

    def __init__(self, sessions: Collection[Connection], fanout: Fanout) -> None:
        self.listener: Listener | None = None
        self._sessions = sessions
        self._fanout = fanout
        self._behind_since: dict[Connection, float] = {}
        self._bytes = {"in": 0, "out": 0}

    def set(self) -> None:
        """Count."""
        now = time.monotonic()
        counts = dict.fromkeys(_STATES, 0)
        behind: dict[Connection, float] = {}
        for connection in self._sessions:
            state = _state(connection)
            counts[state] += 1
            if state in ("behind", "stalled"):
                behind[connection] = self._behind_since.pop(connection, now)
        for connection, since in self._behind_since.items():
            if not connection.ended:
                BEHIND_SECONDS.observe(now - since)
        self._behind_since = behind
        for state, count in counts.items():
            SESSIONS_BY_STATE.labels(state).set(count)
        SESSIONS.set(len(self._sessions))
        ROOMS.set(len(self._fanout.rooms))
        RING_BYTES.set(self._fanout.ring_bytes)
        if self.listener is not None:
            for direction, total in (("in", self.listener.bytes_read), ("out", self.listener.bytes_written)):
                SOCKET_BYTES.labels(direction).inc(total - self._bytes[direction])
                self._bytes[direction] = total


def _state(connection: Connection) -> str:
    if connection.state in ("opening", "listing"):
        return connection.state
    session = connection.session
    if not (session.behind or session.reads or session.reading):
        return "live"
    return "stalled" if session.room == 0 or connection.congested else "behind"
