"""Lease rows in Postgres: taking, renewing and giving back shards, and the cursor that only their holder moves.

Every time is the database's. A shard is held under a name and an epoch that each taking raises: whoever still acts
under an older one is fenced, since each statement here asks for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from services.relay.life import Life
from shared.postgres import to_array
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from shared.postgres import Pool

_SQL = statements(__file__)
_ANNOUNCE, _LEAVE, _LIVE = _SQL["announce"], _SQL["leave"], _SQL["live_owners"]
_TAKE, _TAKE_OWN, _RENEW = _SQL["take"], _SQL["take_own"], _SQL["renew"]
_GIVE_BACK, _ADVANCE, _PARK = _SQL["give_back"], _SQL["advance"], _SQL["park"]


class Taken(NamedTuple):
    """A shard just taken: its epoch from now on, and the id up to which its rows are in Kafka."""

    shard: int
    epoch: int
    cursor_id: int


class Delivery(NamedTuple):
    """Rows ``from_id`` to ``to_id`` of a shard and a topic (as `outbox` names it) are in Kafka from ``base_offset``."""

    from_id: int
    to_id: int
    topic: str
    base_offset: int


class Park(NamedTuple):
    """A row that leaves the straight way: `failed` or `dead` with its error, or `waiting` behind one of its queue.

    ``wait_ms``: until a failed one is tried again.
    """

    id: int
    conversation_id: UUID
    topic: str
    event_id: UUID
    outcome: str
    error: str | None = None
    wait_ms: int = 0


class Move(NamedTuple):
    """Up to ``to_id`` every row of a shard is in Kafka, ``deliveries`` say where, or is parked."""

    shard: int
    epoch: int
    to_id: int
    deliveries: Sequence[Delivery]
    parks: Sequence[Park] = ()


class ShardStore:
    """The lease rows as the owner ``owner`` sees them. Each method is one statement; all raise what asyncpg raises.

    ``life``: what was taken is of; by default that of the store as it is when it is first asked for.
    """

    def __init__(self, pool: Pool, owner: str, lease_s: float, life: Life | None = None) -> None:
        self._pool = pool
        self._owner = owner
        self._lease_s = lease_s
        self._life = life or Life(pool)

    async def announce(self) -> None:
        """Say that this owner lives, for the length of a lease."""
        await self._pool.execute(_ANNOUNCE, self._owner, self._lease_s)

    async def leave(self) -> None:
        """Take that back, so that the others' shares grow at once."""
        await self._pool.execute(_LEAVE, self._owner)

    async def live_owners(self) -> set[str]:
        """Who said so, and not too long ago."""
        return {row[0] for row in await self._pool.fetch(_LIVE)}

    async def take(self, at_most: int) -> list[Taken]:
        """Take shards that are free or whose lease has ended."""
        return [Taken(*row) for row in await self._pool.fetch(_TAKE, self._owner, self._lease_s, at_most)]

    async def take_own(self) -> list[Taken]:
        """Take whatever stands under the own name, from an earlier life of it."""
        return [Taken(*row) for row in await self._pool.fetch(_TAKE_OWN, self._owner, self._lease_s)]

    async def renew(self, epochs: Mapping[int, int]) -> set[int]:
        """Renew the leases of these shards (shard → epoch). What is missing in the result belongs to another by now."""
        life = await self._life.known()
        rows = await self._pool.fetch(_RENEW, self._owner, self._lease_s, list(epochs), list(epochs.values()), life)
        return {row[0] for row in rows}

    async def give_back(self, epochs: Mapping[int, int]) -> None:
        """Make these shards free, as far as they are still held."""
        await self._pool.fetch(_GIVE_BACK, self._owner, list(epochs), list(epochs.values()))

    async def advance(self, moves: Sequence[Move]) -> set[tuple[int, int]]:
        """Move cursors and keep where the rows went. Returns what was fenced, as (shard, epoch): nothing of it moved.

        A shard stands in ``moves`` once. Safe to repeat when the answer was lost.
        """
        placed = [(move.shard, *delivery) for move in moves for delivery in move.deliveries]
        shard, from_id, to_id, topic, base = zip(*placed, strict=True) if placed else ((), (), (), (), ())
        life = await self._life.known()
        rows = await self._pool.fetch(
            _ADVANCE,
            self._owner,
            to_array(move.shard for move in moves),
            to_array(move.epoch for move in moves),
            to_array(move.to_id for move in moves),
            to_array(shard),
            to_array(from_id),
            to_array(to_id),
            topic,
            to_array(base),
            life,
        )
        moved = {row[0] for row in rows}
        return {(move.shard, move.epoch) for move in moves if move.shard not in moved}

    async def park(self, move: Move) -> bool:
        """Move one cursor past rows of which some are parked. False: fenced, and nothing moved. Safe to repeat."""
        deliveries = zip(*move.deliveries, strict=True) if move.deliveries else ((), (), (), ())
        parks = zip(*move.parks, strict=True) if move.parks else ((),) * len(Park._fields)
        life = await self._life.known()
        return bool(
            await self._pool.fetchval(_PARK, self._owner, move.epoch, move.shard, move.to_id, *deliveries, *parks, life)
        )
