"""Storing cursors: what Kafka confirmed is gathered for a few milliseconds, then written for all shards at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.relay.metrics import FENCED_WRITES
from services.relay.shards import Delivery, Move, Park
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.relay.held import HeldShard
    from services.relay.shards import ShardStore

_GATHER_S = 0.2
"""How far stored cursors may lag. So much is sent again after a kill; but what comes together is one delivery per shard
in place of one per batch, which is most of what storing costs."""

_WRITE_S = 15.0

_log = logger(__name__)


class _Pending:
    """What is to be stored of one shard."""

    def __init__(self, shard: HeldShard) -> None:
        self.shard = shard
        self.to_id = 0
        self.deliveries: list[tuple[Delivery, int]] = []
        self.parks: list[Park] = []

    def add(self, to_id: int, placed: Sequence[tuple[Delivery, int]], parks: Sequence[Park]) -> None:
        self.to_id = to_id
        for delivery, rows in placed:
            self._add(delivery, rows)
        self.parks += parks

    def _add(self, new: Delivery, rows: int) -> None:
        # Batches that lie end to end in Kafka are one delivery: rank counts on.
        for at, (old, old_rows) in enumerate(self.deliveries):
            if old.topic == new.topic and old.base_offset + old_rows == new.base_offset:
                self.deliveries[at] = (old._replace(to_id=new.to_id), old_rows + rows)
                return
        self.deliveries.append((new, rows))

    def move(self) -> Move:
        return Move(
            self.shard.number, self.shard.epoch, self.to_id, [delivery for delivery, _ in self.deliveries], self.parks
        )


class Cursors:
    """Bounded: one entry per shard waits, and deliveries that lie end to end in Kafka are one."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._pending: dict[int, _Pending] = {}
        self._writing: dict[int, _Pending] = {}
        self._more = asyncio.Event()
        self._at_once = asyncio.Event()
        self._wrote = asyncio.Event()

    def moved(
        self, shard: HeldShard, to_id: int, placed: Sequence[tuple[Delivery, int]], parks: Sequence[Park] = ()
    ) -> None:
        """Rows up to ``to_id`` are in Kafka or parked; ``placed`` are deliveries, each with its number of rows."""
        pending = self._pending.get(shard.number)
        if pending is None or pending.shard is not shard:
            pending = self._pending[shard.number] = _Pending(shard)
        pending.add(to_id, placed, parks)
        self._more.set()

    async def flush(self, shards: Sequence[HeldShard], timeout_s: float) -> bool:
        """Wait until nothing of these shards is left to be stored; whether that was so in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(self._has(shard) for shard in shards):
                    self._at_once.set()
                    await self._wrote.wait()
        except TimeoutError:
            return False
        return True

    def _has(self, shard: HeldShard) -> bool:
        waiting = (self._pending.get(shard.number), self._writing.get(shard.number))
        return any(one is not None and one.shard is shard for one in waiting)

    async def run(self) -> None:
        """Store, until cancelled. While Postgres is away it tries again: leases end by themselves."""
        backoff = Backoff()
        while True:
            await self._more.wait()
            self._more.clear()
            self._writing, self._pending = self._pending, {}
            try:
                async with asyncio.timeout(_WRITE_S):
                    await self._store_all(self._writing)
            except RETRIABLE as error:
                self._put_back()
                LOOP_ERRORS.labels("cursors").inc()
                _log.warning("cursors not stored", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            self._writing = {}
            self._wrote.set()
            self._wrote = asyncio.Event()
            await self._gather()

    async def _gather(self) -> None:
        """Wait for more to be stored together, but not if somebody waits for it."""
        try:
            async with asyncio.timeout(_GATHER_S):
                await self._at_once.wait()
        except TimeoutError:
            pass
        self._at_once.clear()

    async def _store_all(self, pending: dict[int, _Pending]) -> None:
        moves = [one.move() for one in pending.values() if not one.shard.lost]
        straight = [move for move in moves if not move.parks]
        fenced = await self._store.advance(straight) if straight else set()
        for move in moves:
            if move.parks and not await self._store.park(move):
                fenced.add((move.shard, move.epoch))
        for number, _ in fenced:
            FENCED_WRITES.inc()
            pending[number].shard.lose()
        if fenced:
            _log.warning(
                "cursors fenced: another relay holds the shards", shards=sorted(number for number, _ in fenced)
            )

    def _put_back(self) -> None:
        writing, self._writing = self._writing, {}
        for number, old in writing.items():
            new = self._pending.get(number)
            if new is None:
                self._pending[number] = old
            elif new.shard is old.shard:
                old.add(new.to_id, new.deliveries, new.parks)
                self._pending[number] = old
        self._more.set()
