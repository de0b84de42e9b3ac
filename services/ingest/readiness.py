"""What `/readyz` asks: does Postgres answer with our schema, and is there room for outbox ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.ingest.metrics import OUTBOX_IDS_LEFT
from shared.health import CHECK_S
from shared.logging import logger
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_ROOM = statements(__file__)["outbox_room"]

LEAST_PART = 0.1
"""Of the last partition that must be free."""

log = logger(__name__)


def out_of_room(last_id: int, low: int, high: int) -> str | None:
    """What is wrong with the room in the outbox, whose last partition is [low, high). Pure."""
    left = high - 1 - last_id
    if left < (high - low) * LEAST_PART:
        return f"the outbox has partitions for {max(left, 0)} more ids only"
    return None


class Readiness:
    """Checks for `shared.health.private_app`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def postgres(self) -> str | None:
        """Whether sends can be written. Logs a warning once the outbox is in its last partition."""
        async with self._pool.acquire(timeout=CHECK_S) as connection:
            row = await connection.fetchrow(_ROOM, timeout=CHECK_S)
        if row is None:
            return "the outbox has no partition"
        if not row["has_schema"]:
            return "the schema is not the one that this version needs"
        last_id, low, high = row["last_id"], row["low"], row["high"]
        OUTBOX_IDS_LEFT.set(high - 1 - last_id)
        if last_id >= low:
            log.warning("the outbox is in its last partition", ids_left=high - 1 - last_id)
        return out_of_room(last_id, low, high)
