"""A user's conversations as one device sees them: what a `conversation` frame says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shared.postgres import from_multirange, unavailable_if_away
from shared.ranges import OPEN, RangeSet
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_CONVERSATIONS_OF = _SQL["conversations_of"]
_LIST = _SQL["list_conversations"]


@dataclass(frozen=True, slots=True)
class Marks:
    """A user's receipt marks in a conversation."""

    user_id: str
    delivered_seq: int
    read_seq: int
    read_version: int

    def frame(self, conversation_id: str) -> bytes:
        """The `receipt` frame."""
        return msgspec.json.encode(
            {
                "t": "receipt",
                "conversation_id": conversation_id,
                "user_id": self.user_id,
                "delivered_seq": self.delivered_seq,
                "read_seq": self.read_seq,
                "read_version": self.read_version,
            }
        )


@dataclass(frozen=True, slots=True)
class Listed:
    """One conversation in one snapshot. ``as_of`` is its head for everybody, ``head`` what this user sees of it.

    ``record``: the device's cursor as its acks tell it. ``peer``: the other one's marks in a direct chat.
    """

    conversation_id: str
    kind: str
    title: str | None
    keeps_history: bool
    as_of: int
    role: str
    visible: RangeSet
    head: int
    record: int
    mine: Marks
    unread: int
    updated_at: str | None
    peer: Marks | None

    @property
    def member(self) -> bool:
        """Whether the user is a member now."""
        return self.visible.highest == OPEN

    @property
    def first_cursor(self) -> int:
        """One below the first visible seq."""
        return (self.visible.lowest or 1) - 1

    def frame(self, cursor: int) -> bytes:
        """The `conversation` frame."""
        return msgspec.json.encode(
            {
                "t": "conversation",
                "conversation_id": self.conversation_id,
                "kind": self.kind,
                "title": self.title,
                "role": self.role,
                "head": self.head,
                "visible": [[low, None if high == OPEN else high] for low, high in self.visible],
                "cursor": cursor,
                "delivered_seq": self.mine.delivered_seq,
                "read_seq": self.mine.read_seq,
                "read_version": self.mine.read_version,
                "unread": self.unread,
                "updated_at": self.updated_at,
            }
        )

    def peer_frame(self) -> bytes | None:
        """The peer's `receipt` frame that follows a direct chat, if there is one."""
        return None if self.peer is None else self.peer.frame(self.conversation_id)


async def conversations_of(pool: Pool, user_id: str) -> list[str]:
    """The ids of every conversation that the user is or was a member of. Raises `UnavailableError`."""
    with unavailable_if_away():
        return [row["conversation_id"] for row in await pool.fetch(_CONVERSATIONS_OF, user_id)]


async def list_conversations(pool: Pool, user_id: str, device_id: str, ids: Sequence[str]) -> list[Listed]:
    """These conversations as the device sees them, those with unread events first, newest first.

    One that the user was never a member of is left out. Raises `UnavailableError`.
    """
    with unavailable_if_away():
        rows = await pool.fetch(_LIST, user_id, device_id, ids)
    found = [_listed(row, user_id) for row in rows]
    found.sort(key=newest_first, reverse=True)
    return found


def newest_first(listed: Listed) -> tuple[bool, str]:
    """What conversations are sorted by, descending: those with unread events first, newest first."""
    return listed.unread > 0, listed.updated_at or ""


def _listed(row: Record, user_id: str) -> Listed:
    peer = None
    if row["peer_id"] is not None:
        peer = Marks(row["peer_id"], row["peer_delivered_seq"], row["peer_read_seq"], row["peer_read_version"])
    return Listed(
        conversation_id=row["conversation_id"],
        kind=row["kind"],
        title=row["title"],
        keeps_history=row["history"] == "all",
        as_of=row["last_seq"],
        role=row["role"],
        visible=from_multirange(row["visible"]),
        head=row["head"],
        record=row["record"],
        mine=Marks(user_id, row["delivered_seq"], row["read_seq"], row["read_version"]),
        unread=row["unread"],
        updated_at=row["updated_at"],
        peer=peer,
    )
