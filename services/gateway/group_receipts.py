"""The marks of a group's members, for who watches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.listing import Marks
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_RECEIPTS = statements(__file__)["receipts_of"]
_TIMEOUT_S = 5.0


async def receipts_of(pool: Pool, conversation_id: str, user_id: str) -> list[Marks]:
    """At most 500 members' marks but for the user's own. Raises `UnavailableError`."""
    with unavailable_if_away():
        rows = await pool.fetch(_RECEIPTS, conversation_id, user_id, timeout=_TIMEOUT_S)
    return [Marks(*row) for row in rows]
