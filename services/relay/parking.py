"""Parked rows and dead letters in Postgres. What changes them asks for the shard's owner and epoch first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from services.relay.batch import Queue
    from services.relay.held import HeldShard
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_STOPPED, _QUEUES, _STOP, _GO_ON = _SQL["stopped"], _SQL["queues"], _SQL["stop"], _SQL["go_on"]
_DUE_QUEUES, _DUE_LETTERS = _SQL["due_queues"], _SQL["due_letters"]
_QUEUE, _SETTLE, _LETTER, _SETTLE_LETTER = _SQL["queue"], _SQL["settle"], _SQL["letter"], _SQL["settle_letter"]
_NOW, _REDRIVE = _SQL["now"], _SQL["redrive"]

_MOST_DUE = 1_000


class Settled(NamedTuple):
    """What became of an open row that had been tried ``attempts`` times: `sent` to ``offset``, or `failed`, `dead`.

    ``wait_ms``: until a failed one is tried again.
    """

    id: int
    attempts: int
    outcome: str
    offset: int | None = None
    error: str | None = None
    wait_ms: int | None = None


class ParkedRow(NamedTuple):
    """An open row of a queue: how often it was tried, whether it may be now, and the row as the tail reads it."""

    id: int
    attempts: int
    due: bool
    row: Record


class Letter(NamedTuple):
    """A dead letter to be tried again. ``passed``: a later record of its queue may be in Kafka."""

    queue: Queue
    passed: bool
    attempts: int
    row: Record

    def with_headers(self, further: tuple[str, ...]) -> Record:
        """The row with these further headers, names and values in turn."""
        *before, headers, payload, created_at = self.row
        return _as_row((*before, [*(headers or ()), *further], payload, created_at))


class ParkingStore:
    """As the owner ``owner`` sees it. Each method is one or two statements; all raise what asyncpg raises."""

    def __init__(self, pool: Pool, owner: str) -> None:
        self._pool = pool
        self._owner = owner

    async def stopped(self, shard: HeldShard) -> str | None:
        """Why the shard stands still; None if it does not."""
        reason: str | None = await self._pool.fetchval(_STOPPED, shard.number)
        return reason

    async def queues(self, shard: HeldShard) -> set[Queue]:
        """The conversations and topics of which rows wait."""
        return {(row[0], row[1]) for row in await self._pool.fetch(_QUEUES, shard.number)}

    async def stop(self, shard: HeldShard, reason: str) -> None:
        """Keep that the shard stands still, over take-overs."""
        await self._pool.execute(_STOP, shard.number, self._owner, shard.epoch, reason)

    async def go_on(self, shard: HeldShard) -> None:
        """Forget that it stood still."""
        await self._pool.execute(_GO_ON, shard.number, self._owner, shard.epoch)

    async def due_queues(self, shards: Collection[int]) -> list[tuple[int, Queue]]:
        """Queues whose first row is to be tried now, by shard."""
        return [(row[0], (row[1], row[2])) for row in await self._pool.fetch(_DUE_QUEUES, list(shards), _MOST_DUE)]

    async def due_letters(self, shards: Collection[int]) -> list[tuple[int, int]]:
        """Dead letters that somebody asked to try again: shard, dead_id."""
        return [(row[0], row[1]) for row in await self._pool.fetch(_DUE_LETTERS, list(shards), _MOST_DUE)]

    async def queue(self, shard: HeldShard, queue: Queue, at_most: int) -> list[ParkedRow]:
        """The first open rows of a queue."""
        rows = await self._pool.fetch(_QUEUE, shard.number, *queue, at_most)
        return [ParkedRow(row["id"], row["attempts"], row["due"], _as_row(tuple(row)[2:])) for row in rows]

    async def settle(self, shard: HeldShard, queue: Queue, settled: Sequence[Settled]) -> int | None:
        """Write down what became of rows. Returns how many are left open; None: fenced. Safe to repeat."""
        left: int | None = await self._pool.fetchval(
            _SETTLE, self._owner, shard.epoch, shard.number, *queue, *zip(*settled, strict=True)
        )
        return left

    async def letter(self, dead_id: int) -> Letter | None:
        """The letter, if it is still to be tried."""
        row = await self._pool.fetchrow(_LETTER, dead_id)
        if row is None:
            return None
        return Letter((row["conversation_id"], row["topic"]), row["passed"], row["attempts"], _as_row(tuple(row)[2:]))

    async def settle_letter(
        self, shard: HeldShard, dead_id: int, attempts: int, offset: int | None, error: str | None
    ) -> bool:
        """Write down what became of a letter that had been tried ``attempts`` times.

        False: it was not this relay's to say. Safe to repeat.
        """
        return bool(
            await self._pool.fetchval(
                _SETTLE_LETTER, self._owner, shard.epoch, shard.number, dead_id, attempts, offset, error
            )
        )

    async def now(self) -> datetime:
        """The database's time."""
        at: datetime = await self._pool.fetchval(_NOW)
        return at

    async def redrive(self, since: datetime, cap: int) -> int:
        """Ask for letters to be tried again: each once since then, and ``cap`` in all. Returns how many."""
        return int(await self._pool.fetchval(_REDRIVE, since, cap, f"redrive by {self._owner}"))


def _as_row(columns: tuple[object, ...]) -> Record:
    # Whoever builds a batch unpacks a row by the places of its columns.
    return cast("Record", columns)
