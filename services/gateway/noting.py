"""What a session adds to the log of state changes beside its pushes. Each call notes, and does nothing else."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from services.gateway.transitions import Refusal
from shared.contracts import frames
from shared.logging import trace_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.gateway.connection import Connection
    from shared.errors import WaybillError
    from shared.ranges import Pair

_KINDS: dict[type, str] = {
    frames.Send: "sent",
    frames.Create: "created",
    frames.Read: "read",
    frames.Unread: "unread",
    frames.Settings: "settings",
}
"""What would have happened, had a frame not been refused."""

_UNKNOWN = frozenset(("internal", "timeout", "unavailable"))
"""Codes that leave open whether it happened."""

_END = itemgetter(1)


def opened(connection: Connection) -> None:
    """The session has its number."""
    _session(connection, "opened", {"number": connection.number})


def ended(connection: Connection, code: int) -> None:
    """The session is over, with this close code."""
    if connection.number:
        _session(connection, "ended", {"code": code})


def revoked(connection: Connection) -> None:
    """The token that the session came with, or brought since, is void."""
    _session(connection, "revoked" if connection.number else "refused:revoked")


def resent(connection: Connection, conversation_id: str, ranges: Iterable[Pair]) -> None:
    """Events were written again, since no ack of them came."""
    for first, last in ranges:
        connection.parts.transitions.note(
            "resent",
            "no_ack",
            conversation_id=conversation_id,
            user_id=connection.user_id,
            device_id=connection.device_id,
            session_id=connection.session_id,
            from_seq=first,
            to_seq=last,
        )


def refused(connection: Connection, frame: frames.Known | None, error: WaybillError) -> None:
    """The frame was refused before ingest or receipts heard of it."""
    _refused(connection, frame, f"refused:{error.code}")


def unanswered(connection: Connection, frame: frames.Known | None, error: WaybillError) -> None:
    """The frame was handed on, and what became of it was not told. What was refused there was logged there."""
    if error.code in _UNKNOWN:
        _refused(connection, frame, f"unanswered:{error.code}")


def acked_in_vain(connection: Connection, conversation_id: str, ranges: Sequence[Pair], head: int | None) -> None:
    """Some of what was acknowledged does not count. ``head``: None if the session follows no such conversation."""
    reason = "not_found" if head is None else "beyond_head" if max(ranges, key=_END)[1] > head else "invisible"
    _note(connection, "delivered", f"refused:{reason}", conversation_id)


def _refused(connection: Connection, frame: frames.Known | None, cause: str) -> None:
    kind = _KINDS.get(type(frame))
    if kind is None:
        return
    conversation_id: str | None = getattr(frame, "conversation_id", None)
    trace = trace_id(getattr(frame, "traceparent", None))
    _note(connection, kind, cause, None if conversation_id is None else conversation_id.lower(), trace)


def _note(connection: Connection, kind: str, cause: str, conversation_id: str | None, trace: str | None = None) -> None:
    connection.parts.transitions.refused(
        Refusal(kind, cause, conversation_id, connection.user_id, connection.device_id, connection.session_id, trace)
    )


def _session(connection: Connection, cause: str, detail: dict[str, object] | None = None) -> None:
    connection.parts.transitions.note(
        "session",
        cause,
        user_id=connection.user_id,
        device_id=connection.device_id,
        session_id=connection.session_id,
        detail=detail,
    )
