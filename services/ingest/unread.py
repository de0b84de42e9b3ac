"""What is unread of all conversations of a user (protocol §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.errors import TimedOutError
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_UNREAD = statements(__file__)["unread_in_all"]


class Unread(msgspec.Struct, frozen=True):
    """Events, and in how many conversations they are."""

    unread: int
    conversations: int


class Totals(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/unread`: of conversations that are not muted, and ``muted``: of those that are."""

    user_id: str
    unread: int
    conversations: int
    muted: Unread


async def unread_in_all(pool: Pool, user_id: str, *, timeout_s: float) -> Totals:
    """Of a user; all 0 for one of whom nothing is known. Raises `UnavailableError`, `TimedOutError`."""
    with unavailable_if_away():
        try:
            async with pool.acquire(timeout=timeout_s) as connection:
                row = await connection.fetchrow(_UNREAD, user_id, timeout=timeout_s)
        except TimeoutError:
            raise TimedOutError("the store did not answer in time") from None
    assert row is not None
    unread, conversations, *muted = row
    return Totals(user_id, unread, conversations, Unread(*muted))
