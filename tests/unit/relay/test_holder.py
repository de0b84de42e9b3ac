"""Holding shards: what becomes of one that is taken while it is held."""

import asyncio
from collections.abc import Mapping

from services.relay.breaker import Limits
from services.relay.held import HeldShard
from services.relay.holder import Holder
from services.relay.lease import Timing
from services.relay.shards import Taken
from tests.waiting import until


class Store:
    """One relay's view of the lease rows: shard 5 is free at first, and once more when a test says so."""

    def __init__(self) -> None:
        self.free = [Taken(5, 1, 0)]
        self.own: list[Taken] = []

    async def take_own(self) -> list[Taken]:
        return self.own

    async def announce(self) -> None:
        pass

    async def live_owners(self) -> set[str]:
        return {"ann"}

    async def renew(self, epochs: Mapping[int, int]) -> set[int]:
        return set(epochs)

    async def take(self, _: int) -> list[Taken]:
        taken, self.free = self.free, []
        return taken


class Life:
    """The store's, and what was adopted."""

    def __init__(self) -> None:
        self.store = "first"
        self.adopted: list[str] = []

    async def now(self) -> str:
        return self.store

    def adopt(self, life: str) -> None:
        self.adopted.append(life)


class Publisher:
    def __init__(self) -> None:
        self.started: list[HeldShard] = []

    def start(self, shard: HeldShard) -> None:
        self.started.append(shard)


async def test_a_shard_that_is_taken_while_it_is_held_ends_its_earlier_epoch() -> None:
    """A rewind frees it before its holder knows. Its next line waits for the earlier one, which must end therefore."""
    store, publisher = Store(), Publisher()
    held: dict[int, HeldShard] = {}
    holder = Holder(store, Life(), held, publisher, None, timing=Timing(3, 1), limits=Limits(), owner="ann")
    running = asyncio.create_task(holder.run())
    await until(lambda: 5 in held, timeout=5, what="the shard")
    earlier = held[5]
    store.free = [Taken(5, 2, 0)]
    await until(lambda: held[5].epoch == 2, timeout=5, what="its next epoch")
    assert earlier.lost
    assert not held[5].ended
    assert publisher.started == [earlier, held[5]]
    running.cancel()
    await asyncio.wait([running])


async def test_in_another_life_of_the_store_all_is_taken_anew_with_its_cursors() -> None:
    store, life, publisher = Store(), Life(), Publisher()
    store.free = [Taken(5, 1, 90), Taken(6, 1, 80)]
    held: dict[int, HeldShard] = {}
    holder = Holder(store, life, held, publisher, None, timing=Timing(3, 1), limits=Limits(), owner="ann")
    running = asyncio.create_task(holder.run())
    await until(lambda: len(held) == 2, timeout=5, what="the shards")
    earlier = dict(held)
    # There, shard 6 is another's.
    life.store, store.own = "second", [Taken(5, 2, 70)]
    await until(lambda: 5 in held and held[5].epoch == 2, timeout=5, what="its next epoch")
    assert all(shard.lost for shard in earlier.values())
    assert held.keys() == {5}
    assert (held[5].read_id, held[5].acked_id) == (70, 70)
    assert life.adopted == ["first", "second"]
    running.cancel()
    await asyncio.wait([running])
