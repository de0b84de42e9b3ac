"""The relay: every row of the outbox to Kafka, in order, by whichever relay holds the row's shard."""

from __future__ import annotations

import asyncio
import functools
import gc
from typing import TYPE_CHECKING

from services.relay.backlog import Backlog
from services.relay.cursors import Cursors
from services.relay.due import Due
from services.relay.erasing import Erasing
from services.relay.holder import Holder
from services.relay.journal import Journal
from services.relay.life import Life
from services.relay.metrics import STOPPED_SHARDS
from services.relay.parking import ParkingStore
from services.relay.publisher import Publisher
from services.relay.redrive import Redrive
from services.relay.retention import Retention
from services.relay.settings import RelaySettings
from services.relay.shards import ShardStore
from services.relay.tail import Tail
from services.relay.topics import TopicsWatch
from shared.health import private_app
from shared.kafka import Topics
from shared.postgres import open_pool
from shared.runtime import http, run
from shared.settings import load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from services.relay.held import HeldShard
    from shared.postgres import Pool

_GRACE_S = 5.0
_CLOSE_S = 2.0
_LEASE_CONNECTIONS = 2
_BUSY_S = 1.0
"""Rows that wait for so long are what the relay has to do first."""


class Relay:
    """The relay's loops and what they share.

    ``leases`` and ``reading`` are pools of their own, so that no load delays a renewal or a look at the outbox.
    """

    def __init__(self, settings: RelaySettings, pool: Pool, leases: Pool, reading: Pool) -> None:
        self._pool = pool
        self._unsent_limit_s = settings.relay_unsent_limit_ms / 1000
        self._grace_s = min(_GRACE_S, settings.timing.longest_s)
        self._enabled = settings.relay_enabled
        timing, owner = settings.timing, settings.relay_owner
        self._held: dict[int, HeldShard] = {}
        STOPPED_SHARDS.set_function(lambda: sum(shard.stopped is not None for shard in self._held.values()))
        life = Life(leases)
        self._cursors = Cursors(ShardStore(pool, owner, timing.lease_s, life))
        parking = ParkingStore(pool, owner)
        self._publisher = Publisher(
            self._held,
            self._cursors,
            parking,
            timing=timing,
            retries=settings.retries,
            bootstrap=settings.kafka_bootstrap,
            topics=Topics(settings.topic_prefix),
            batch_size=settings.relay_batch_size,
            client_id=f"waybill-relay-{owner}",
        )
        self._tail = Tail(
            reading,
            self._held,
            batch_size=settings.relay_batch_size,
            longest_wait_s=settings.relay_fixed_delay_ms / 1000,
            life=life,
        )
        self._backlog = Backlog(pool)
        self._retention = Retention(pool, settings.periods)
        self._erasing = Erasing(pool, settings.erase_within_s)
        self._topics = TopicsWatch(settings.kafka_bootstrap, Topics(settings.topic_prefix), settings.erase_within_s)
        self._due = Due(parking, self._held)
        self._journal = (
            Journal(pool, owner, self._held, lambda: self._backlog.oldest_s > _BUSY_S)
            if settings.transition_log
            else None
        )
        self._redrive = Redrive(parking, settings.redrive, settings.relay_redrive_cap) if settings.redrive else None
        self._holder = Holder(
            ShardStore(leases, owner, timing.lease_s, life),
            life,
            self._held,
            self._publisher,
            self._cursors,
            timing=timing,
            limits=settings.limits,
            owner=owner,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until ``stop`` is set; then finish what is under way and give the shards back, within seconds."""
        async with asyncio.TaskGroup() as group:

            def start(name: str, loop: Coroutine[None, None, None]) -> asyncio.Task[None]:
                return group.create_task(_never_ending(name, loop, stop), name=name)

            background = [
                start("backlog", self._backlog.run()),
                start("retention", self._retention.run()),
                start("erasing", self._erasing.run()),
                start("topics", self._topics.run()),
            ]
            if not self._enabled:
                await stop.wait()
                for task in background:
                    task.cancel()
                return
            holder, tail = start("leases", self._holder.run()), start("tail", self._tail.run())
            publisher, cursors = start("publish", self._publisher.run()), start("cursors", self._cursors.run())
            background.append(start("due", self._due.run()))
            if self._journal is not None:
                background.append(start("journal", self._journal.run()))
            if self._redrive is not None:
                background.append(start("redrive", self._redrive.run()))
            await stop.wait()
            tail.cancel()
            holder.cancel()
            await asyncio.wait([tail, holder])
            await self._publisher.finish(list(self._held.values()), self._grace_s)
            self._publisher.close()
            await asyncio.wait([publisher], timeout=_CLOSE_S)
            publisher.cancel()
            await asyncio.wait([publisher])
            await self._holder.give_back(self._grace_s)
            cursors.cancel()
            for task in background:
                task.cancel()

    def checks(self) -> dict[str, Callable[[], Awaitable[str | None]]]:
        """What `readyz` asks."""
        if not self._enabled:
            return {"postgres": self._postgres}
        return {
            "postgres": self._postgres,
            "kafka": self._kafka,
            "leases": self._leases,
            "unsent": self._unsent,
            "shards": self._shards,
        }

    def warnings(self) -> dict[str, Callable[[], Awaitable[str | None]]]:
        """What `readyz` tells beside it."""

        async def topics() -> str | None:
            return self._topics.warning

        return {"topics": topics}

    async def _postgres(self) -> str | None:
        await self._pool.fetchval("SELECT 1")
        return None

    async def _kafka(self) -> str | None:
        return self._publisher.trouble

    async def _leases(self) -> str | None:
        return self._holder.trouble

    async def _unsent(self) -> str | None:
        oldest = self._backlog.oldest_s
        return f"the oldest unsent row is {oldest:.1f} s old" if oldest > self._unsent_limit_s else None

    async def _shards(self) -> str | None:
        stopped = {shard.number: shard.stopped for shard in self._held.values() if shard.stopped is not None}
        named = (f"shard {number} stands still: {reason}" for number, reason in sorted(stopped.items()))
        return "; ".join(named) or None


class LoopEndedError(Exception):
    """A loop without which nothing is relayed has ended by itself."""


async def _never_ending(name: str, loop: Coroutine[None, None, None], stop: asyncio.Event) -> None:
    # A task group does not mind a task that ends, nor one that a library's own cancellation ended: a relay without one
    # of its loops would stand still in silence. So the process ends, aloud, and is started again.
    try:
        await loop
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise LoopEndedError(f"{name} was cancelled from within") from None
    if not stop.is_set():
        raise LoopEndedError(f"{name} ended")


async def serve(settings: RelaySettings, stop: asyncio.Event) -> None:
    """Run a relay with its private port until ``stop`` is set."""
    url = str(settings.postgres_url)
    async with (
        open_pool(url, size=settings.postgres_pool, name="waybill-relay") as pool,
        open_pool(url, size=_LEASE_CONNECTIONS, name="waybill-relay-leases", timeout_s=5.0) as leases,
        open_pool(url, size=1, name="waybill-relay-tail") as reading,
    ):
        relay = Relay(settings, pool, leases, reading)
        private = private_app(relay.checks(), warnings=relay.warnings())
        async with http(private, settings.private_host, settings.relay_private_port):
            await relay.run(stop)


def main() -> None:
    """Start from the environment."""
    settings = load(RelaySettings)
    # Rows and records live for milliseconds and hold no cycles: looking for some after every 700 finds none.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    run("relay", settings.log_level, functools.partial(serve, settings))


if __name__ == "__main__":
    main()
