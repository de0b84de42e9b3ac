import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from services.relay.cursors import Cursors
from services.relay.held import HeldShard
from services.relay.shards import Delivery, Move, Park, Taken
from tests.waiting import until


class Store:
    """Keeps moves, or fails."""

    def __init__(self) -> None:
        self.moves: list[Sequence[Move]] = []
        self.parked: list[Move] = []
        self.failures = 0
        self.fences: set[tuple[int, int]] = set()

    async def advance(self, moves: Sequence[Move]) -> set[tuple[int, int]]:
        fails = self.failures > 0
        await asyncio.sleep(0)
        if fails:
            self.failures -= 1
            raise OSError
        self.moves.append(moves)
        return self.fences & {(move.shard, move.epoch) for move in moves}

    async def park(self, move: Move) -> bool:
        self.parked.append(move)
        return (move.shard, move.epoch) not in self.fences


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def cursors(store: Store) -> AsyncIterator[Cursors]:
    made = Cursors(store)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.wait([task])


def shard(number: int = 1, epoch: int = 1) -> HeldShard:
    return HeldShard(Taken(number, epoch, 0), 0.0)


async def test_what_lies_end_to_end_in_kafka_is_one_delivery(store: Store, cursors: Cursors) -> None:
    held = shard()
    cursors.moved(held, 5, [(Delivery(1, 5, "events", 10), 4), (Delivery(2, 2, "receipts", 3), 1)])
    cursors.moved(held, 9, [(Delivery(7, 9, "events", 14), 3)])
    cursors.moved(held, 12, [(Delivery(12, 12, "events", 18), 1)])
    assert await cursors.flush([held], 1)
    [[move]] = store.moves
    assert move.to_id == 12
    assert list(move.deliveries) == [
        Delivery(1, 9, "events", 10),
        Delivery(2, 2, "receipts", 3),
        Delivery(12, 12, "events", 18),
    ]


async def test_all_shards_that_moved_go_in_one_write(store: Store, cursors: Cursors) -> None:
    shards = [shard(number) for number in range(5)]
    for held in shards:
        cursors.moved(held, 1, [])
    assert await cursors.flush(shards, 1)
    assert len(store.moves) == 1
    assert sorted(move.shard for move in store.moves[0]) == list(range(5))


async def test_a_failed_write_is_done_again_with_what_came_since(store: Store, cursors: Cursors) -> None:
    held = shard()
    store.failures = 1_000
    cursors.moved(held, 5, [(Delivery(1, 5, "events", 10), 4)])
    await until(lambda: store.failures < 1_000, timeout=10, what="a first failure")
    assert not await cursors.flush([held], 0)
    cursors.moved(held, 9, [(Delivery(7, 9, "events", 14), 3)])
    store.failures = 0
    assert await cursors.flush([held], 5)
    [[move]] = store.moves
    assert (move.to_id, list(move.deliveries)) == (9, [Delivery(1, 9, "events", 10)])


async def test_a_fenced_shard_is_lost(store: Store, cursors: Cursors) -> None:
    fenced, fine = shard(1), shard(2)
    store.fences = {(1, 1)}
    cursors.moved(fenced, 5, [])
    cursors.moved(fine, 5, [])
    assert await cursors.flush([fenced, fine], 1)
    assert (fenced.lost, fine.lost) == (True, False)
    cursors.moved(fenced, 6, [])
    assert await cursors.flush([fenced], 1)
    assert len(store.moves) == 1, "nothing more is tried for it"


async def test_a_new_epoch_replaces_the_older_ones_moves(store: Store, cursors: Cursors) -> None:
    cursors.moved(shard(1, epoch=1), 5, [])
    newer = shard(1, epoch=2)
    cursors.moved(newer, 3, [])
    assert await cursors.flush([newer], 1)
    [[move]] = store.moves
    assert (move.epoch, move.to_id) == (2, 3)


async def test_flushing_does_not_wait_for_other_shards(store: Store, cursors: Cursors) -> None:
    leaving, busy = shard(1), shard(2)
    cursors.moved(leaving, 5, [])
    flushing = asyncio.create_task(cursors.flush([leaving], 5))
    while not flushing.done():
        cursors.moved(busy, busy.acked_id + 1, [])
        await asyncio.sleep(0)
    assert flushing.result()


async def test_moves_that_park_rows_go_one_by_one_after_the_others(store: Store, cursors: Cursors) -> None:
    parking, straight = shard(1), shard(2)
    park = Park(5, uuid.UUID(int=1), "events", uuid.UUID(int=5), "failed", "too large", 100)
    store.failures = 1_000
    cursors.moved(parking, 4, [(Delivery(1, 4, "events", 10), 4)])
    cursors.moved(straight, 9, [])
    await until(lambda: store.failures < 1_000, timeout=10, what="a first failure")
    cursors.moved(parking, 5, [], [park])
    cursors.moved(parking, 6, [], [park._replace(id=6, outcome="waiting", error=None)])
    store.failures = 0
    assert await cursors.flush([parking, straight], 5)
    [[move]] = store.moves
    assert move.shard == 2
    [parked] = store.parked
    assert (parked.to_id, list(parked.deliveries)) == (6, [Delivery(1, 4, "events", 10)])
    assert [(one.id, one.outcome) for one in parked.parks] == [(5, "failed"), (6, "waiting")]


async def test_a_fenced_move_that_parks_loses_the_shard(store: Store, cursors: Cursors) -> None:
    fenced = shard(1)
    store.fences = {(1, 1)}
    cursors.moved(fenced, 5, [], [Park(5, uuid.UUID(int=1), "events", uuid.UUID(int=5), "waiting")])
    assert await cursors.flush([fenced], 1)
    assert fenced.lost
