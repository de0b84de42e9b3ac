"""What sessions tell each other outside the timelines: presence, typing, that a newer one replaces an older one.

All of it goes through Redis to other gateways; without Redis it works among the sessions of this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from services.gateway.close import Close
from services.gateway.metrics import REPLACED, REVOKED
from services.gateway.revocations import Revocation, is_revoked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.gateway.connection import Connection
    from services.gateway.fanout import Fanout
    from services.gateway.kicks import Kicks
    from services.gateway.limits import Limits
    from services.gateway.presence import Presence
    from services.gateway.transitions import Transitions
    from services.gateway.typing import Typing
    from shared.hints import Revocation as Hint


class Social:
    """Made once per gateway; told of each session that begins and ends."""

    def __init__(
        self, fanout: Fanout, presence: Presence, typing: Typing, limits: Limits, transitions: Transitions
    ) -> None:
        self._fanout = fanout
        self._presence = presence
        self._typing = typing
        self._limits = limits
        self._transitions = transitions
        self.kicks: Kicks | None = None

    def opened(self, connection: Connection) -> None:
        """A session has its number, and is registered."""
        connection.rates = self._limits.session(connection.user_id)
        self._presence.opened(connection.session_id, connection.user_id)
        # Numbers may come from Postgres in another order than they were drawn in: a newer one may be here already.
        numbers = [one.number for one in self._sessions(connection.user_id) if one.device_id == connection.device_id]
        self.replaced(connection.user_id, connection.device_id, max([connection.number, *numbers]))
        if self.kicks is not None:
            self.kicks.opened(connection.user_id, connection.device_id, connection.number)

    def closed(self, connection: Connection) -> None:
        """A session has ended."""
        self._presence.closed(connection.session_id)
        if connection.rates is not None:
            self._limits.closed(connection.rates)
            connection.rates = None

    def replaced(self, user_id: str, device_id: str, number: int) -> None:
        """A session of this device has this number: older ones here end."""
        for connection in self._sessions(user_id):
            if connection.device_id == device_id and connection.number < number:
                REPLACED.inc()
                self._note("replaced", connection)
                connection.end(Close(4409, "replaced by a newer session of this device"))

    def revoke(self, rows: Iterable[Revocation]) -> None:
        """Tokens were revoked: sessions that were opened with them end.

        Rows may be told again, and must be: a session may have been opened just before, and be here only now.
        """
        for row in rows:
            self._end_revoked(row)

    def _end_revoked(self, row: Revocation) -> None:
        for connection in self._sessions(row.user_id):
            if connection.claims is not None and is_revoked(connection.claims, connection.device_id, (row,)):
                REVOKED.inc()
                self._note("revoked", connection)
                connection.end(Close(4401, "the token was revoked"))

    def hinted(self, hint: Hint) -> None:
        """Redis tells of a revocation; its row is found by the sweep."""
        row = Revocation(0, hint.user_id, hint.device_id, hint.jti, hint.before)
        self._end_revoked(row)

    def typed(self, connection: Connection, conversation_id: str) -> None:
        """A member is typing."""
        self._typing.typed(connection.session_id, connection.user_id, conversation_id)

    def watch(self, connection: Connection, users: list[str]) -> None:
        """A session wants to know who of these is online."""
        self._presence.watch(connection, users)

    def _note(self, cause: str, of: Connection) -> None:
        self._transitions.note("session", cause, user_id=of.user_id, device_id=of.device_id, session_id=of.session_id)

    def _sessions(self, user_id: str) -> list[Connection]:
        return cast("list[Connection]", list(self._fanout.users.get(user_id, ())))
