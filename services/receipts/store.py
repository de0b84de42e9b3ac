"""Marks and offsets in Postgres."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncpg

from services.receipts.batch import start
from services.receipts.metrics import RESTARTED
from shared.postgres import to_multirange
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.receipts.batch import Span
    from services.receipts.fold import Changes
    from shared.postgres import Pool

_SQL = statements(__file__)
_READ_OFFSETS = _SQL["read_offsets"]
_RESET_OFFSETS = _SQL["reset_offsets"]
_ADD_OFFSETS = _SQL["add_offsets"]
_APPLY_ACKS = _SQL["apply_acks"]
_PING = _SQL["ping"]

_MOVED = "WB001"


class OffsetsMovedError(Exception):
    """Another process owns one of the partitions: nothing was applied."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What `apply_acks` counted: ``reason`` is None for what was taken."""

    kind: str
    reason: str | None
    amount: int


class Store:
    """The stored offsets of one topic, and what moves with them."""

    def __init__(self, pool: Pool, topic: str) -> None:
        self._pool = pool
        self._topic = topic

    async def stored(self, cluster: str, partitions: list[int]) -> dict[int, int]:
        """The next offset by partition, where there is one for this cluster."""
        rows = await self._pool.fetch(_READ_OFFSETS, self._topic, cluster, partitions)
        return {row["partition"]: row["next"] for row in rows}

    async def place(
        self, cluster: str, stored: Mapping[int, int], begin: Mapping[int, int], end: Mapping[int, int]
    ) -> dict[int, int]:
        """The offset to read each partition of ``begin`` from.

        ``stored`` has to be older than ``end``, else an offset that another process moved in between would look as if
        it were out of range. A partition without a usable offset gets its beginning.
        """
        missing = [p for p in begin if p not in stored]
        useless = [p for p, offset in stored.items() if start(offset, begin[p], end[p]) != offset]
        if useless:
            firsts = [begin[p] for p in useless]
            await self._pool.execute(
                _RESET_OFFSETS, self._topic, cluster, useless, [stored[p] for p in useless], firsts
            )
            RESTARTED.labels("out_of_range").inc(len(useless))
        if missing:
            await self._pool.execute(_ADD_OFFSETS, self._topic, cluster, missing, [begin[p] for p in missing])
            RESTARTED.labels("new").inc(len(missing))
        return await self.stored(cluster, list(begin))

    async def apply(self, cluster: str, spans: Mapping[int, Span], changes: Changes) -> list[Counted]:
        """Apply a batch with its offsets, or nothing.

        Raises `OffsetsMovedError`. After any other error it is not known whether the batch is applied: call it again
        with the same arguments, until it returns or says that the offsets were moved.
        """
        parts = sorted(spans)
        held, marks = changes.held, changes.marks
        try:
            rows = await self._pool.fetch(
                _APPLY_ACKS,
                self._topic,
                cluster,
                parts,
                [spans[p].since for p in parts],
                [spans[p].upto for p in parts],
                [h.conversation_id for h in held],
                [h.user_id for h in held],
                [h.device_id for h in held],
                [to_multirange(h.ranges) for h in held],
                [m.conversation_id for m in marks],
                [m.user_id for m in marks],
                [m.device_id for m in marks],
                [m.kind for m in marks],
                [m.version for m in marks],
                [m.seq for m in marks],
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == _MOVED:
                raise OffsetsMovedError(str(error)) from None
            raise
        return [Counted(row["kind"], row["reason"], row["amount"]) for row in rows]

    async def ping(self) -> None:
        """Raises what keeps Postgres from answering."""
        await self._pool.execute(_PING)
