"""The publisher against a Kafka client that tests steer: what is handed over when, and what follows a failure."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, NotEnoughReplicasError, UnknownTopicOrPartitionError
from aiokafka.producer.message_accumulator import BatchBuilder

from services.relay import publisher as module
from services.relay.held import HeldShard
from services.relay.lease import Timing
from services.relay.publisher import Publisher
from services.relay.shards import Delivery, Taken
from shared.kafka import MAX_RECORD_BYTES, Topics
from tests.waiting import until

TIMING = Timing(lease_s=60, delivery_s=5)
AT = datetime(2026, 11, 29, tzinfo=UTC)


class Placed(NamedTuple):
    offset: int


class Client:
    """Takes batches; the test confirms or fails them."""

    def __init__(self) -> None:
        self.producer = self
        self.handed: list[tuple[str, int, int]] = []
        self.waiting: list[asyncio.Future[Placed]] = []
        self.discarded = False

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(MAX_RECORD_BYTES, 0)

    async def partitions_for(self, topic: str) -> set[int]:
        if topic.endswith("nowhere"):
            raise UnknownTopicOrPartitionError
        return set(range(64))

    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> asyncio.Future[Placed]:
        assert not self.discarded
        self.handed.append((topic, partition, batch.record_count()))
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]

    async def discard(self) -> None:
        self.discarded = True


class Cursors:
    def __init__(self) -> None:
        self.moves: list[tuple[int, int, list[tuple[Delivery, int]]]] = []

    def moved(self, shard: HeldShard, to_id: int, placed: Sequence[tuple[Delivery, int]]) -> None:
        self.moves.append((shard.number, to_id, list(placed)))


class World:
    """A running publisher and everything that it touches."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.refusals = 0
        self.held: dict[int, HeldShard] = {}
        self.cursors = Cursors()
        self.publisher = Publisher(
            self.held,
            self.cursors,
            timing=TIMING,
            bootstrap="",
            topics=Topics("t"),
            batch_size=3,
            client_id="",
        )

    async def open_client(self, *_: object, **__: object) -> Client:
        if self.refusals:
            self.refusals -= 1
            raise KafkaError("away")
        self.clients.append(Client())
        return self.clients[-1]

    def hold(self, number: int, trusted_s: float = 60) -> HeldShard:
        shard = self.held[number] = HeldShard(Taken(number, 1, 0), time.monotonic() + trusted_s)
        self.publisher.start(shard)
        return shard

    async def client(self, count: int = 1) -> Client:
        await until(lambda: len(self.clients) == count, timeout=5, what="a client")
        return self.clients[-1]


def read(shard: HeldShard, *ids: int, topic: str = "events.v1") -> None:
    """Rows as the tail hands them on."""
    rows = [
        dict(
            zip(
                (
                    "shard",
                    "id",
                    "conversation_id",
                    "seq",
                    "event_id",
                    "topic",
                    "type",
                    "source",
                    "headers",
                    "payload",
                    "at",
                ),
                (shard.number, id_, uuid.UUID(int=1), id_, uuid.UUID(int=id_), topic, "type", "/s", [], b"{}", AT),
                strict=True,
            )
        )
        for id_ in ids
    ]
    shard.accept(shard.read_id, [Row(row) for row in rows], ids[-1])


class Row(dict[str, Any]):
    """Like asyncpg's records: iterates over its values."""

    def __iter__(self) -> Any:
        return iter(self.values())


async def handed(client: Client, count: int) -> list[tuple[str, int, int]]:
    await until(lambda: len(client.handed) == count, timeout=5, what=f"{count} batches with the client")
    return client.handed


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World()
    monkeypatch.setattr(module, "open_client", made.open_client)
    running = asyncio.create_task(made.publisher.run())
    yield made
    await made.publisher.finish(list(made.held.values()), 0.1)
    made.publisher.close()
    await asyncio.wait([running], timeout=0.2)
    running.cancel()
    await asyncio.wait([running])


async def test_the_next_batch_waits_for_its_predecessors_confirmation(world: World) -> None:
    client = await world.client()
    shard = world.hold(7)
    read(shard, 1, 2, 4, 5)
    assert await handed(client, 1) == [("t.events.v1", 7, 3)]
    read(shard, 8)
    await settle()
    assert len(client.handed) == 1
    client.waiting[0].set_result(Placed(100))
    assert (await handed(client, 2))[1] == ("t.events.v1", 7, 2)
    assert shard.acked_id == 4
    assert world.cursors.moves == [(7, 4, [(Delivery(1, 4, "events.v1", 100), 3)])]


async def test_a_batch_of_two_topics_moves_the_cursor_when_both_are_confirmed(world: World) -> None:
    client = await world.client()
    shard = world.hold(7)
    read(shard, 1)
    read(shard, 2, topic="receipts.v1")
    await handed(client, 2)
    client.waiting[1].set_result(Placed(50))
    await settle()
    assert world.cursors.moves == []
    client.waiting[0].set_result(Placed(10))
    await until(lambda: world.cursors.moves, timeout=5, what="the move")
    placed = [(Delivery(1, 1, "events.v1", 10), 1), (Delivery(2, 2, "receipts.v1", 50), 1)]
    assert world.cursors.moves == [(7, 2, placed)]


async def test_a_failed_batch_ends_its_client_and_all_begin_again_at_what_is_confirmed(world: World) -> None:
    client = await world.client()
    one, other = world.hold(1), world.hold(2)
    read(one, 1, 2)
    read(other, 3, 4, 5, 6)
    await handed(client, 2)
    client.waiting[1].set_result(Placed(0))
    await handed(client, 3)
    client.waiting[0].set_exception(NotEnoughReplicasError())
    again = await world.client(2)
    assert client.discarded
    assert (one.read_id, list(one.rows)) == (0, [])
    assert (other.read_id, list(other.rows)) == (5, []), "what was confirmed is not sent again"
    read(one, 1, 2)
    read(other, 6)
    assert sorted(await handed(again, 2)) == [("t.events.v1", 1, 2), ("t.events.v1", 2, 1)]


async def test_what_is_permanent_stops_its_shard_only(world: World) -> None:
    client = await world.client()
    bad, good = world.hold(1), world.hold(2)
    read(bad, 1)
    await handed(client, 1)
    client.waiting[0].set_exception(MessageSizeTooLargeError())
    again = await world.client(2)
    assert bad.refused is not None
    assert bad.refused.id == 1
    read(good, 2)
    assert await handed(again, 1) == [("t.events.v1", 2, 1)]
    read(bad, 3)
    await settle()
    assert len(again.handed) == 1


async def test_an_unknown_topic_costs_no_client(world: World) -> None:
    client = await world.client()
    shard = world.hold(1)
    read(shard, 1)
    read(shard, 2, topic="nowhere")
    read(shard, 3)
    await handed(client, 1)
    client.waiting[0].set_result(Placed(0))
    await until(lambda: shard.refused, timeout=5, what="a stop")
    assert shard.refused is not None
    assert shard.refused.id == 2
    assert not client.discarded


async def test_nothing_is_sent_under_a_lease_that_a_delivery_can_outlast(world: World) -> None:
    client = await world.client()
    shard = world.hold(1, trusted_s=TIMING.longest_s - 0.1)
    read(shard, 1)
    await asyncio.wait([asyncio.create_task(asyncio.sleep(0.1))])
    assert client.handed == []
    shard.trusted_until += 60
    await handed(client, 1)


async def test_a_lost_shard_sends_nothing_more_and_its_next_epoch_waits_for_the_batch_under_way(world: World) -> None:
    client = await world.client()
    shard = world.hold(1)
    read(shard, 1, 2, 3, 4)
    await handed(client, 1)
    shard.lose()
    after = world.hold(1)
    read(after, 1)
    await settle()
    assert len(client.handed) == 1
    client.waiting[0].set_result(Placed(0))
    assert (await handed(client, 2))[1] == ("t.events.v1", 1, 1)


async def test_finishing_waits_for_what_is_under_way(world: World) -> None:
    client = await world.client()
    shard = world.hold(1)
    read(shard, 1, 2, 3, 4)
    await handed(client, 1)
    finishing = asyncio.create_task(world.publisher.finish([shard], 5))
    await settle()
    assert not finishing.done()
    client.waiting[0].set_result(Placed(0))
    await finishing
    assert shard.acked_id == 3
    assert len(client.handed) == 1


async def test_while_no_client_can_be_opened_it_says_so_and_goes_on(world: World) -> None:
    world.refusals = 2
    client = await world.client()
    assert world.publisher.trouble is None
    shard = world.hold(1)
    read(shard, 1)
    await handed(client, 1)


async def test_a_batch_that_the_client_cancels_is_a_failed_one(world: World) -> None:
    client = await world.client()
    shard = world.hold(1)
    read(shard, 1)
    await handed(client, 1)
    client.waiting[0].cancel()
    again = await world.client(2)
    read(shard, 1)
    await handed(again, 1)
