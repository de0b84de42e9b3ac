"""What aiokafka's producer does to whoever keeps it after a failure, on a real broker: why it is thrown away then."""

import asyncio
import signal
import time
from pathlib import Path

import asyncpg
import pytest
from aiokafka.errors import KafkaConnectionError, KafkaError, OutOfOrderSequenceNumber

from services.relay.lease import CLOSE_S
from services.relay.producer import Client, MissingTopicError, find_topic, open_client
from shared.kafka import Topics
from tests.databases import Database
from tests.forwarder import PRODUCE, forwarder
from tests.history import event_of, read_history
from tests.own_stack import OwnStack
from tests.relays import Writer, drained, relays
from tests.waiting import until

pytest_plugins = ["tests.own_fixtures"]

pytestmark = pytest.mark.timeout(300)


async def opened(address: str, topics: Topics) -> Client:
    """A client; a broker may need its time to know a new topic."""

    async def attempt() -> Client | None:
        try:
            return await open_client(address, topics, client_id="tests", timeout_s=10)
        except (KafkaError, TimeoutError, MissingTopicError):
            return None

    return await until(attempt, timeout=60, what="a client")


async def hand_over(client: Client, topic: str, partition: int, value: bytes) -> asyncio.Future[object]:
    batch = client.producer.create_batch()
    batch.append(timestamp=None, key=b"k", value=value, headers=[])
    confirmed: asyncio.Future[object] = await client.producer.send_batch(batch, topic, partition=partition)
    return confirmed


async def send(client: Client, topic: str, partition: int, value: bytes) -> int:
    placed = await (await hand_over(client, topic, partition, value))
    return int(placed.offset)


async def test_a_client_is_discarded_in_time_while_its_broker_is_frozen(
    own_stack: OwnStack, own_topics: Topics
) -> None:
    """`stop` of aiokafka would wait for the batch for ever."""
    client = await opened(own_stack.kafka, own_topics)
    before = asyncio.all_tasks()
    own_stack.fault("kafka", signal.SIGSTOP)
    try:
        confirmed = await hand_over(client, own_topics.events, 0, b"v")
        await asyncio.wait([confirmed], timeout=0.3)
        assert not confirmed.done()
        begun = time.monotonic()
        await client.discard()
        assert time.monotonic() - begun < CLOSE_S + 5
    finally:
        own_stack.fault("kafka", signal.SIGCONT)
    confirmed.cancel()
    await asyncio.wait([confirmed], timeout=10)
    assert asyncio.all_tasks() <= before, "no task of the client is left"
    await client.discard()


async def test_a_failed_batch_burns_its_sequence_numbers(own_stack: OwnStack, own_topics: Topics) -> None:
    """Why a client with a failed batch is thrown away, and why no second batch may wait behind one."""
    client = await opened(own_stack.kafka, own_topics)
    try:
        assert await send(client, own_topics.events, 1, b"first") == 0
        with pytest.raises(KafkaError, match="MessageSizeTooLarge"):
            await send(client, own_topics.events, 1, b"x" * 1_100_000)
        with pytest.raises(OutOfOrderSequenceNumber):
            await send(client, own_topics.events, 1, b"refused from now on")
        # On a partition where this producer is new, the broker takes what comes behind the failed one.
        with pytest.raises(KafkaError, match="MessageSizeTooLarge"):
            await send(client, own_topics.events, 2, b"x" * 1_100_000)
        assert await send(client, own_topics.events, 2, b"before its predecessor") == 0
    finally:
        await client.discard()


async def test_no_client_is_left_when_none_can_be_opened(own_stack: OwnStack) -> None:
    before = asyncio.all_tasks()
    with pytest.raises(KafkaError):
        await open_client("127.0.0.1:1", Topics("nowhere"), client_id="tests", timeout_s=2)
    with pytest.raises(MissingTopicError):
        await open_client(own_stack.kafka, Topics("nowhere"), client_id="tests", timeout_s=2)
    assert asyncio.all_tasks() <= before


async def test_a_batch_without_an_answer_is_never_resolved(own_stack: OwnStack, own_topics: Topics) -> None:
    """An idempotent client sends it again without end, long past its time-outs, so that the relay needs its own."""
    timeout_s = 0.4
    async with forwarder(own_stack.ports["kafka"]) as way:
        way.advertised = way.port
        client = await opened(way.address, own_topics)
        client.producer.client._request_timeout_ms = round(timeout_s * 1000)
        try:
            assert await send(client, own_topics.events, 0, b"answered") == 0
            way.silent.add(PRODUCE)
            confirmed = await hand_over(client, own_topics.events, 0, b"not answered")
            await until(lambda: way.swallowed >= 4, timeout=30, what="the fourth try")
            assert not confirmed.done()
        finally:
            await client.discard()
        confirmed.cancel()


@pytest.mark.promise("I5")
async def test_no_topic_is_missing_while_no_broker_answers(own_stack: OwnStack, own_topics: Topics) -> None:
    """An attempt would be counted for each look, and an outage would kill the row."""
    nowhere = f"{own_topics.prefix}.nowhere.v1"
    async with forwarder(own_stack.ports["kafka"]) as way:
        way.advertised = way.port
        client = await opened(way.address, own_topics)
        try:
            assert await find_topic(client.producer, nowhere) == set()
            await way.close()
            with pytest.raises(KafkaConnectionError):
                await find_topic(client.producer, nowhere)
        finally:
            await client.discard()


async def test_metadata_is_never_refreshed_once_no_known_broker_answers(
    own_stack: OwnStack, own_topics: Topics
) -> None:
    """The broker is at another address by now, which its bootstrap address would tell."""
    async with forwarder(own_stack.ports["kafka"]) as bootstrap, forwarder(own_stack.ports["kafka"]) as first:
        bootstrap.advertised = first.advertised = first.port
        client = await opened(bootstrap.address, own_topics)
        try:
            assert await send(client, own_topics.events, 0, b"at its first address") == 0
            async with forwarder(own_stack.ports["kafka"]) as second:
                bootstrap.advertised = second.advertised = second.port
                await first.close()
                confirmed = await hand_over(client, own_topics.events, 0, b"for the first address")
                await asyncio.wait([confirmed], timeout=3)
                assert not confirmed.done()
                other = await opened(bootstrap.address, own_topics)
                assert await send(other, own_topics.events, 0, b"at its second address") == 1
                await other.discard()
        finally:
            await client.discard()
        confirmed.cancel()


@pytest.mark.promise("I4")
async def test_a_broker_that_moves_behind_its_bootstrap_address_is_found_again(
    own_stack: OwnStack, own_database: Database, own_db: asyncpg.Connection, own_topics: Topics, tmp_path: Path
) -> None:
    target = own_stack.ports["kafka"]
    async with forwarder(target) as bootstrap, forwarder(target) as first, forwarder(target) as second:
        bootstrap.advertised = first.advertised = first.port
        with relays(own_database, bootstrap.address, own_topics.prefix, tmp_path) as fleet:
            relay = fleet.start("ann")
            await relay.ready()
            writer = Writer(own_db, range(100))
            await writer.write(500)
            await drained(own_db, timeout=30)
            bootstrap.advertised = second.advertised = second.port
            await first.close()
            await writer.write(500)
            await drained(own_db, timeout=30)
            await relay.ready()
    history = await read_history(own_db, own_stack.kafka, own_topics.prefix)
    history.hold()
    assert history.dead == set()


@pytest.mark.promise("I4")
async def test_batches_whose_answers_are_lost_come_again_in_order(
    own_stack: OwnStack, own_database: Database, own_db: asyncpg.Connection, own_topics: Topics, tmp_path: Path
) -> None:
    """They are in Kafka, and nobody says so."""
    async with forwarder(own_stack.ports["kafka"]) as way:
        way.advertised = way.port
        with relays(own_database, way.address, own_topics.prefix, tmp_path) as fleet:
            relay = fleet.start("ann")
            await relay.ready()
            writer = Writer(own_db, range(100))
            way.silent.add(PRODUCE)
            for _ in range(5):
                await writer.write(200)

            async def given_up() -> bool:
                return (await relay.metrics())['waybill_relay_failed_batches_total{kind="retriable"}'] >= 2

            await until(given_up, timeout=60, what="batches that are given up")
            assert await own_db.fetchval("SELECT sum(cursor_id) FROM outbox_shard") == 0
            way.silent.clear()
            await drained(own_db, timeout=60)
            await relay.ready()
    history = await read_history(own_db, own_stack.kafka, own_topics.prefix)
    history.hold()
    assert len(history.records) > len({event_of(record) for record in history.records}) == 1_000
    assert await own_db.fetchval("SELECT count(*) FROM outbox_attempt") == 0
