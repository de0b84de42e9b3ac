"""Keeping this process's share of the shards: take, renew, rebalance, give back."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from services.relay.held import HeldShard
from services.relay.lease import plan
from services.relay.metrics import LEASE_CHANGES, SHARDS_HELD
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE

if TYPE_CHECKING:
    from services.relay.breaker import Limits
    from services.relay.cursors import Cursors
    from services.relay.lease import Timing
    from services.relay.life import Life
    from services.relay.publisher import Publisher
    from services.relay.shards import ShardStore, Taken

_RETRY_S = 0.1

_log = logger(__name__)


class Holder:
    """The only one who puts shards into ``held`` and takes them out."""

    def __init__(
        self,
        store: ShardStore,
        life: Life,
        held: dict[int, HeldShard],
        publisher: Publisher,
        cursors: Cursors,
        *,
        timing: Timing,
        limits: Limits,
        owner: str,
    ) -> None:
        self._store = store
        self._life = life
        self._held = held
        self._publisher = publisher
        self._cursors = cursors
        self._timing = timing
        self._limits = limits
        self._owner = owner
        self._renewed_at = float("-inf")
        self._trusted_until = float("-inf")
        self._in_life: str | None = None

    @property
    def trouble(self) -> str | None:
        """What keeps this process from holding leases; None if nothing does."""
        return None if time.monotonic() < self._trusted_until else "no lease is kept"

    async def run(self) -> None:
        """Hold the share until cancelled. While Postgres is away the leases run out, and nothing is sent."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    async with asyncio.timeout(self._timing.lease_s):
                        await self._look(group)
                except RETRIABLE as error:
                    LOOP_ERRORS.labels("leases").inc()
                    _log.warning("leases not kept", error=repr(error))
                    await asyncio.sleep(_RETRY_S)
                else:
                    self._trusted_until = self._timing.trusted_until(self._renewed_at)
                    await asyncio.sleep(self._timing.look_every_s)

    async def give_back(self, grace_s: float) -> None:
        """Store the cursors and free all shards, each for at most ``grace_s``; nothing is published any more."""
        shards = list(self._held.values())
        await self._cursors.flush(shards, grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self._free(shards)
                await self._store.leave()
        except RETRIABLE as error:
            _log.warning("shards not given back: they are free when their leases end", error=repr(error))

    async def _look(self, group: asyncio.TaskGroup) -> None:
        life = await self._life.now()
        if life != self._in_life:
            await self._begin(life)
        self._drop_lost()
        if time.monotonic() >= self._renewed_at + self._timing.renew_every_s:
            await self._renew()
        staying = [number for number, shard in self._held.items() if not shard.leaving]
        todo = plan(self._owner, await self._store.live_owners(), staying)
        if todo.take:
            sent_at = time.monotonic()
            self._hold(await self._store.take(todo.take), sent_at)
        if todo.give_up:
            leaving = [self._held[number] for number in todo.give_up]
            for shard in leaving:
                shard.leave()
            group.create_task(self._give_up(leaving), name="give-up")

    async def _begin(self, life: str) -> None:
        """Take what stands under the own name, with the cursors that the store has."""
        if self._in_life is not None:
            _log.warning("the store is another one, or an earlier state of it: all shards are taken anew")
            for shard in self._held.values():
                shard.lose()
            self._drop_lost()
        sent_at = time.monotonic()
        taken = await self._store.take_own()
        # Not before: what was meant for the life before is fenced by the raised epochs from here on.
        self._life.adopt(life)
        self._in_life = life
        self._hold(taken, sent_at)

    async def _renew(self) -> None:
        epochs = {shard.number: shard.epoch for shard in self._held.values()}
        sent_at = time.monotonic()
        await self._store.announce()
        renewed = await self._store.renew(epochs)
        self._renewed_at = sent_at
        for number, epoch in epochs.items():
            shard = self._held.get(number)
            if shard is None or shard.epoch != epoch:
                continue
            if number in renewed:
                shard.trusted_until = self._timing.trusted_until(sent_at)
            else:
                shard.lose()
        self._drop_lost()

    def _hold(self, taken: list[Taken], sent_at: float) -> None:
        for one in taken:
            # Somebody made it free before its lease ended (a rewind); its next line waits until this one has ended.
            if (earlier := self._held.get(one.shard)) is not None:
                earlier.lose()
        self._drop_lost()
        for one in taken:
            shard = self._held[one.shard] = HeldShard(one, self._timing.trusted_until(sent_at), self._limits)
            self._publisher.start(shard)
        if taken:
            LEASE_CHANGES.labels("taken").inc(len(taken))
            _log.info("shards taken", shards=sorted(one.shard for one in taken))
        SHARDS_HELD.set(len(self._held))

    async def _give_up(self, shards: list[HeldShard]) -> None:
        await self._publisher.finish(shards, self._timing.longest_s)
        await self._cursors.flush(shards, self._timing.longest_s)
        while True:
            try:
                async with asyncio.timeout(self._timing.lease_s):
                    return await self._free(shards)
            except RETRIABLE:
                LOOP_ERRORS.labels("leases").inc()
                await asyncio.sleep(_RETRY_S)

    async def _free(self, shards: list[HeldShard]) -> None:
        kept = [shard for shard in shards if self._held.get(shard.number) is shard]
        await self._store.give_back({shard.number: shard.epoch for shard in kept})
        for shard in kept:
            self._remove(shard)
        LEASE_CHANGES.labels("given_back").inc(len(kept))
        _log.info("shards given back", shards=sorted(shard.number for shard in kept))

    def _drop_lost(self) -> None:
        lost = [shard for shard in self._held.values() if shard.lost]
        for shard in lost:
            self._remove(shard)
        if lost:
            LEASE_CHANGES.labels("lost").inc(len(lost))
            _log.warning("shards lost to another relay", shards=sorted(shard.number for shard in lost))

    def _remove(self, shard: HeldShard) -> None:
        if self._held.get(shard.number) is shard:
            del self._held[shard.number]
        SHARDS_HELD.set(len(self._held))
