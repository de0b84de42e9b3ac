"""The publisher against a Kafka client that tests steer: what is handed over when, and what follows a failure."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import pytest
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, NotEnoughReplicasError
from aiokafka.producer.message_accumulator import BatchBuilder

from services.relay import publisher as module
from services.relay import session as session_module
from services.relay.batch import Queue
from services.relay.breaker import Limits
from services.relay.held import HeldShard
from services.relay.lease import Timing
from services.relay.parking import ParkedRow
from services.relay.producer import MissingTopicError
from services.relay.publisher import Publisher
from services.relay.retries import Retries
from services.relay.shards import Delivery, Park, Taken
from shared.kafka import MAX_RECORD_BYTES, Topics
from tests.waiting import until

TIMING = Timing(lease_s=60, delivery_s=5)
LIMITS = Limits(share=0.5, least=2, window_s=60)
AT = bytes(8)


class Placed(NamedTuple):
    offset: int


class Client:
    """Takes batches; the test confirms or fails them."""

    def __init__(self) -> None:
        self.producer = self
        self.known = ("events.v1", "receipts.v1")
        self.batch_bytes = MAX_RECORD_BYTES
        self.handed: list[tuple[str, int, int]] = []
        self.waiting: list[asyncio.Future[Placed]] = []
        self.discarded = False

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(MAX_RECORD_BYTES, 0)

    def hand_over(self, batch: BatchBuilder, topic: str, partition: int) -> asyncio.Future[Placed]:
        assert not self.discarded
        self.handed.append((topic, partition, batch.record_count()))
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]

    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> asyncio.Future[Placed]:
        return self.hand_over(batch, topic, partition)

    async def discard(self) -> None:
        self.discarded = True


class Cursors:
    def __init__(self) -> None:
        self.moves: list[tuple[int, int, list[tuple[Delivery, int]]]] = []
        self.parks: list[tuple[int, str, str | None]] = []

    def moved(
        self, shard: HeldShard, to_id: int, placed: Sequence[tuple[Delivery, int]], parks: Sequence[Park] = ()
    ) -> None:
        if placed:
            self.moves.append((shard.number, to_id, list(placed)))
        self.parks += [(park.id, park.outcome, park.error) for park in parks]

    async def flush(self, *_: object) -> bool:
        return True


class Parking:
    """What the lines ask of Postgres."""

    def __init__(self) -> None:
        self.stops: dict[int, str] = {}
        self.lease_ends: dict[int, float] = {}
        """When a queue is read next: a lease's end, by shard."""

    async def stopped(self, shard: HeldShard) -> str | None:
        return self.stops.get(shard.number)

    async def queues(self, _: HeldShard) -> set[Queue]:
        return set()

    async def stop(self, shard: HeldShard, reason: str) -> None:
        self.stops[shard.number] = reason

    async def go_on(self, shard: HeldShard) -> None:
        del self.stops[shard.number]

    async def queue(self, shard: HeldShard, *_: object) -> list[ParkedRow]:
        shard.trusted_until = self.lease_ends.pop(shard.number, shard.trusted_until)
        return []


class World:
    """A running publisher and everything that it touches."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.careful: list[Client] = []
        self.refusals = 0
        self.careful_refusals = 0
        self.parking = Parking()
        self.held: dict[int, HeldShard] = {}
        self.cursors = Cursors()
        self.publisher = Publisher(
            self.held,
            self.cursors,
            self.parking,
            timing=TIMING,
            retries=Retries(max_attempts=3, delay_ms=60_000, factor=4, cap_ms=60_000),
            bootstrap="",
            topics=Topics("t"),
            batch_size=3,
            client_id="",
        )

    async def open_client(self, *_: object, idempotent: bool = True, **__: object) -> Client:
        if not idempotent and self.careful_refusals:
            self.careful_refusals -= 1
            raise MissingTopicError("deleted just now")
        if not idempotent:
            self.careful.append(Client())
            return self.careful[-1]
        if self.refusals:
            self.refusals -= 1
            raise KafkaError("away")
        self.clients.append(Client())
        return self.clients[-1]

    def hold(self, number: int, trusted_s: float = 60) -> HeldShard:
        shard = self.held[number] = HeldShard(Taken(number, 1, 0), time.monotonic() + trusted_s, LIMITS)
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
                (shard.number, id_, uuid.UUID(int=1), id_, uuid.UUID(int=id_), topic, "type", "/s", None, b"{}", AT),
                strict=True,
            )
        )
        for id_ in ids
    ]
    shard.accept(shard.read_id, [Row(row) for row in rows], ids[-1])


class Row(dict[str, Any]):
    """Like asyncpg's records: iterates over its values, and knows them by name and by place."""

    def __missing__(self, place: int) -> Any:
        return list(self.values())[place]

    def __iter__(self) -> Any:
        return iter(self.values())


async def find_topic(_: Client, topic: str) -> set[int]:
    return set() if topic.endswith("nowhere") else set(range(64))


async def handed(client: Client, count: int) -> list[tuple[str, int, int]]:
    await until(lambda: len(client.handed) == count, timeout=5, what=f"{count} batches with the client")
    return client.handed


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "open_client", lambda *_, **options: made.open_client(**options))
    monkeypatch.setattr(session_module, "find_topic", find_topic)
    made = World()
    running = asyncio.create_task(made.publisher.run())
    yield made
    await made.publisher.finish(list(made.held.values()), 0.1)
    made.publisher.close()
    await asyncio.wait([running], timeout=0.2)
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


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


async def test_a_refused_batch_is_halved_with_care_until_the_row_to_blame_stands_alone(world: World) -> None:
    """The rows are of one conversation: what stands behind the refused one waits."""
    client = await world.client()
    bad, good = world.hold(1), world.hold(2)
    read(bad, 1, 2, 3)
    await handed(client, 1)
    client.waiting[0].set_exception(MessageSizeTooLargeError())
    again = await world.client(2)
    read(good, 9)
    assert await handed(again, 1) == [("t.events.v1", 2, 1)]
    read(bad, 1, 2, 3)
    await until(lambda: world.careful, timeout=5, what="the careful client")
    [careful] = world.careful
    await handed(careful, 1)
    careful.waiting[0].set_result(Placed(0))
    await handed(careful, 2)
    careful.waiting[1].set_exception(MessageSizeTooLargeError())
    if careful.handed[1][2] == 2:
        await handed(careful, 3)
        careful.waiting[2].set_exception(MessageSizeTooLargeError())
    await until(lambda: len(world.cursors.parks) == 2, timeout=5, what="what is parked")
    assert [(id_, outcome) for id_, outcome, _ in world.cursors.parks] == [(2, "failed"), (3, "waiting")]
    assert bad.acked_id == 3
    assert bad.parked == {(uuid.UUID(int=1), "events.v1")}
    assert len(world.clients) == 2, "the careful client's refusals end no session"
    read(bad, 4)
    await until(lambda: len(world.cursors.parks) == 3, timeout=5, what="a later row that waits, too")
    assert len(again.handed) == 1


async def test_a_careful_client_that_cannot_be_opened_is_waited_for(world: World) -> None:
    """A topic was deleted since the session began: that is no row's fault, and no reason to end."""
    client = await world.client()
    shard = world.hold(1)
    read(shard, 1)
    await handed(client, 1)
    world.careful_refusals = 1
    client.waiting[0].set_exception(MessageSizeTooLargeError())
    await world.client(2)
    read(shard, 1)
    await world.client(3)
    assert world.cursors.parks == []
    read(shard, 1)
    await until(lambda: world.careful, timeout=5, what="the careful client")
    assert await handed(world.careful[0], 1) == [("t.events.v1", 1, 1)]


async def test_a_row_of_an_unknown_topic_costs_no_client(world: World) -> None:
    client = await world.client()
    shard = world.hold(1)
    read(shard, 1)
    read(shard, 2, topic="nowhere")
    read(shard, 3)
    await handed(client, 1)
    client.waiting[0].set_result(Placed(0))
    assert (await handed(client, 2))[1] == ("t.events.v1", 1, 1), "the same conversation's other topic goes on"
    assert world.cursors.parks == [(2, "failed", "there is no topic nowhere")]
    assert not client.discarded


async def test_too_many_refused_rows_stop_the_shard_before_they_are_parked(world: World) -> None:
    await world.client()
    shard = world.hold(1)
    read(shard, 1, topic="nowhere")
    read(shard, 2, topic="nowhere.else.nowhere")
    read(shard, 3)
    await until(lambda: world.parking.stops, timeout=5, what="a stop")
    assert [park[0] for park in world.cursors.parks] == [1]
    assert shard.stopped == world.parking.stops[1]
    assert "2 of the last 2 rows were refused" in shard.stopped
    assert shard.rows[0]["id"] == 2
    assert shard.acked_id == 1


async def test_a_shard_that_another_relay_found_stopped_stands_still(world: World) -> None:
    client = await world.client()
    world.parking.stops[1] = "too many"
    shard = world.hold(1)
    await until(lambda: shard.stopped, timeout=5, what="what was found")
    assert shard.parked == set()
    assert client.handed == []


async def test_nothing_is_sent_under_a_lease_that_a_delivery_can_outlast(world: World) -> None:
    client = await world.client()
    shard = world.hold(1, trusted_s=TIMING.longest_s - 0.1)
    read(shard, 1)
    await asyncio.wait([asyncio.create_task(asyncio.sleep(0.1))])
    assert client.handed == []
    shard.trusted_until += 60
    await handed(client, 1)


async def test_nothing_is_sent_under_a_lease_that_ended_while_something_was_tried_again(world: World) -> None:
    client = await world.client()
    shard = world.hold(1)
    await until(lambda: shard.parked is not None, timeout=5, what="what was found")
    world.parking.lease_ends[1] = time.monotonic()
    shard.due_queues[uuid.UUID(int=2), "events.v1"] = None
    read(shard, 1)
    await until(lambda: not world.parking.lease_ends, timeout=5, what="a try")
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
