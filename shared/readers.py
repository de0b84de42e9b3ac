"""Who has a seq of a conversation: as ingest answers it over HTTP and the gateway on the socket (protocol §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.errors import NotFoundError
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.contracts.words import State
    from shared.postgres import Pool

_RECEIPTS = statements(__file__)["message_receipts"]
_TIMEOUT_S = 5.0


class Reader(msgspec.Struct, frozen=True):
    """A user's marks in the conversation."""

    user_id: str
    delivered_seq: int
    read_seq: int
    read_version: int


class Readers(msgspec.Struct, frozen=True):
    """Of those who may see ``seq``, but for its sender: how many there are, hold it and have read it; a page of names.

    ``users`` are those of the state that was asked for, in order of user id; ``next``: the last of them, to go on
    above, or None if there are no more.
    """

    conversation_id: str
    seq: int
    members: int
    delivered: int
    read: int
    users: list[Reader]
    next: str | None


async def readers(
    pool: Pool,
    conversation_id: str,
    user_id: str | None,
    /,
    *,
    seq: int,
    state: State = "read",
    after: str | None = None,
    limit: int = 100,
) -> Readers:
    """Who has the event ``seq``: at most ``limit`` users above ``after``.

    ``user_id`` None: a service, which sees all. Raises `NotFoundError`: field `conversation_id` for a conversation that
    is not there and for one that the user was never a member of, alike; field `seq` for one above the head and for one
    that the user may not see, alike. `UnavailableError`.
    """
    with unavailable_if_away():
        async with pool.acquire(timeout=_TIMEOUT_S) as connection:
            rows = await connection.fetch(
                _RECEIPTS, conversation_id, user_id, seq, state, after or "", limit + 1, timeout=_TIMEOUT_S
            )
    if not rows:
        raise NotFoundError("no such conversation", field="conversation_id")
    members, delivered, read = rows[0]["members"], rows[0]["delivered"], rows[0]["read"]
    if members is None:
        raise NotFoundError("no such event", field="seq")
    users = [Reader(*tuple(row)[3:]) for row in rows[:limit] if row["user_id"] is not None]
    more = users[-1].user_id if len(rows) > limit else None
    return Readers(conversation_id, seq, members, delivered, read, users, more)
