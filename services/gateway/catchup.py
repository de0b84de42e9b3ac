"""Reads from Postgres for sessions that are behind, a bounded number at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.metrics import CATCH_UP_READS
from shared.postgres import from_multirange, unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.postgres import Pool
    from shared.ranges import RangeSet

_SQL = statements(__file__)
_AFTER = _SQL["events_after"]
_AT = _SQL["events_at"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a read saw, in one snapshot. ``events``: (seq, frame), ascending; ``head``: the conversation's last seq."""

    head: int
    title: str | None
    role: str
    visible: RangeSet
    events: list[tuple[int, bytes]]


class CatchUp:
    """Reads timelines for sessions; at most ``at_once`` reads run at a time, in the order in which they were asked."""

    def __init__(self, pool: Pool, at_once: int) -> None:
        self._pool = pool
        self._turns = asyncio.Semaphore(at_once)

    async def after(self, conversation_id: str, user_id: str, position: int, limit: int) -> Found | None:
        """Events above ``position`` that the user may see, at most ``limit``; None if never a member.

        Raises `UnavailableError`.
        """
        async with self._turns:
            CATCH_UP_READS.inc()
            with unavailable_if_away():
                rows = await self._pool.fetch(_AFTER, conversation_id, user_id, position, limit)
        if not rows:
            return None
        first = rows[0]
        return Found(
            head=first["last_seq"],
            title=first["title"],
            role=first["role"],
            visible=from_multirange(first["visible"]),
            events=[(row["seq"], row["frame"].encode()) for row in rows if row["seq"] is not None],
        )

    async def at(self, conversation_id: str, user_id: str, seqs: Sequence[int]) -> list[tuple[int, bytes]]:
        """These events as (seq, frame), ascending, without those the user may not see. Raises `UnavailableError`."""
        async with self._turns:
            CATCH_UP_READS.inc()
            with unavailable_if_away():
                rows = await self._pool.fetch(_AT, conversation_id, user_id, seqs)
        return [(row["seq"], row["frame"].encode()) for row in rows]
