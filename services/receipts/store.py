"""Marks and offsets in Postgres."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncpg

from services.receipts.batch import start
from services.receipts.metrics import RESTARTED
from shared.postgres import OF_A_ROW, RETRIABLE, to_multirange
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.receipts.batch import Span
    from services.receipts.fold import Changes
    from shared.dead_letter import BadRecord
    from shared.postgres import Pool

_SQL = statements(__file__)
_READ_OFFSETS = _SQL["read_offsets"]
_RESET_OFFSETS = _SQL["reset_offsets"]
_ADD_OFFSETS = _SQL["add_offsets"]
_APPLY_ACKS = _SQL["apply_acks"]
_FLUSH = _SQL["flush_receipts"]
_PING = _SQL["ping"]

ACKS = "acks.v1"
"""Where acks come from, as the desk of dead letters names it."""

_MOVED = "WB001"
_UNKNOWN = "WB002"

_NOWHERE: dict[int, Span] = {}

STORE_AWAY: tuple[type[BaseException], ...] = (*RETRIABLE, asyncpg.PostgresError)
"""Errors that let work wait. Those that do not pass by themselves do so, too: an ack is never skipped."""

NO_CONVERSATION = "conversation_id: there is no such conversation"
"""What is wrong with an ack of `UnknownConversationsError`."""


class OffsetsMovedError(Exception):
    """Another process owns one of the partitions: nothing was applied."""


class UnknownConversationsError(Exception):
    """Acks name conversations that are not there (``ids``): nothing was applied."""

    def __init__(self, ids: frozenset[str]) -> None:
        super().__init__(f"{len(ids)} unknown conversations")
        self.ids = ids


@dataclass(frozen=True, slots=True)
class Counted:
    """What `apply_acks` counted: ``reason`` is None for what was taken."""

    kind: str
    reason: str | None
    amount: int


class BadAckError(Exception):
    """The store does not take something in the batch: nothing was applied."""


def _lacks_partition(error: asyncpg.PostgresError) -> bool:
    """Whether a table has no partition for a row: that is nobody's fault who acks, and a person mends it."""
    return isinstance(error, asyncpg.CheckViolationError) and error.constraint_name is None


class Store:
    """The stored offsets of one topic, and what moves with them."""

    def __init__(self, pool: Pool, topic: str, *, origin: str = ACKS, large: int = 100) -> None:
        """``origin``: the topic's name on the desk of dead letters. ``large``: a group with more members is large."""
        self._pool = pool
        self._topic = topic
        self._origin = origin
        self._large = large

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

    async def apply(
        self, cluster: str, spans: Mapping[int, Span], changes: Changes, bad: Sequence[BadRecord] = ()
    ) -> list[Counted]:
        """Apply a batch with its offsets, and put its bad records on the desk; or nothing.

        Raises `OffsetsMovedError`, `UnknownConversationsError` and `BadAckError`. After any other error it is not known
        whether the batch is applied: call it again with the same arguments, until it returns or says that the offsets
        were moved.
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
                [m.partition for m in marks],
                [m.offset for m in marks],
                self._origin,
                [b.partition for b in bad],
                [b.offset for b in bad],
                [b.key for b in bad],
                [b.value for b in bad],
                [b.headers for b in bad],
                [b.error for b in bad],
                self._large,
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == _MOVED:
                raise OffsetsMovedError(str(error)) from None
            if error.sqlstate == _UNKNOWN:
                raise UnknownConversationsError(frozenset((error.detail or "").split(","))) from None
            if (error.sqlstate or "")[:2] in OF_A_ROW and not _lacks_partition(error):
                raise BadAckError(f"the store does not take it: {type(error).__name__}") from None
            raise
        return [Counted(row["kind"], row["reason"], row["amount"]) for row in rows]

    async def apply_again(self, changes: Changes) -> list[Counted]:
        """Apply acks that were put on the desk: as `apply`, without offsets."""
        return await self.apply("", _NOWHERE, changes)

    async def flush(self, partitions: Sequence[int], most: int) -> int:
        """Announce marks of large groups that wait, at most ``most``; how many."""
        return int(await self._pool.fetchval(_FLUSH, list(partitions), most))

    async def ping(self) -> None:
        """Raises what keeps Postgres from answering."""
        await self._pool.execute(_PING)
