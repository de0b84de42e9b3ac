"""A broker that freezes, dies and comes back, and what aiokafka makes of it: on a stack of its own."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from aiokafka.errors import KafkaError, OutOfOrderSequenceNumber

from deploy.local.stack import Stack
from services.relay.lease import CLOSE_S
from services.relay.producer import Client, open_client
from shared.kafka import Topics, ensure_topics
from tests.databases import Database, Databases
from tests.relays import Relays, Writer, all_records, drained, order_per_conversation, relays
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="waybill-relay-") as folder:
        # Postgres of a root's test run has another user, who must be able to reach its own folder below.
        Path(folder).chmod(0o711)
        with Stack(Path(folder)) as made:
            yield made


@pytest.fixture
def own_database(stack: Stack) -> Iterator[Database]:
    made = Databases(stack.postgres_url)
    database = made.create()
    yield database
    made.drop(database)
    made.close()


@pytest.fixture
async def topics(stack: Stack, request: pytest.FixtureRequest) -> Topics:
    made = Topics(f"t{abs(hash(request.node.name))}")
    await ensure_topics(stack.kafka, made)
    return made


@pytest.fixture
def fleet(stack: Stack, own_database: Database, topics: Topics, tmp_path: Path) -> Iterator[Relays]:
    with relays(own_database, stack.kafka, topics.prefix, tmp_path) as made:
        yield made


@pytest.fixture
async def owner_db(own_database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(own_database.owner_url)
    yield connection
    await connection.close()


async def opened(stack: Stack, topics: Topics) -> Client:
    """A client; a broker that has just been thawed may need its time to know a new topic."""

    async def attempt() -> Client | None:
        try:
            return await open_client(stack.kafka, topics, client_id="tests", timeout_s=10)
        except (KafkaError, TimeoutError):
            return None

    return await until(attempt, timeout=60, what="a client")


@pytest.mark.promise("I4", "I10")
async def test_a_broker_that_dies_and_comes_back_loses_nothing(
    stack: Stack, owner_db: asyncpg.Connection, topics: Topics, fleet: Relays
) -> None:
    relay = fleet.start("ann")
    await relay.ready()
    writer = Writer(owner_db, range(100))
    for _ in range(10):
        await writer.write(100)
    os.kill(stack.pids["kafka"], signal.SIGKILL)
    for _ in range(10):
        await writer.write(100)

    async def reported() -> str | None:
        return ((await relay.readyz()) or {"failing": {}})["failing"].get("kafka")

    assert await until(reported, timeout=30, what="readyz that names Kafka")
    for _ in range(10):
        await writer.write(100)
    await asyncio.to_thread(stack.restart, "kafka")
    await drained(owner_db, timeout=60)
    await relay.ready()
    records = await all_records(stack.kafka, [topics.events])
    assert order_per_conversation(records) == {key: list(range(1, 31)) for key in writer.last_seq}
    assert (await relay.metrics())["waybill_relay_stopped_shards"] == 0


async def test_a_frozen_broker_holds_and_then_takes_all_in_order(
    stack: Stack, owner_db: asyncpg.Connection, topics: Topics, fleet: Relays
) -> None:
    """Frozen, it answers nothing: batches end by their time-out, and the frozen ones are still written at the thaw."""
    relay = fleet.start("ann")
    await relay.ready()
    writer = Writer(owner_db, range(100))
    await writer.write(500)
    os.kill(stack.pids["kafka"], signal.SIGSTOP)
    try:
        for _ in range(5):
            await writer.write(500)

        async def given_up() -> bool:
            return (await relay.metrics())['waybill_relay_failed_batches_total{kind="retriable"}'] > 0

        await until(given_up, timeout=30, what="a batch that is given up")
    finally:
        os.kill(stack.pids["kafka"], signal.SIGCONT)
    await writer.write(500)
    await drained(owner_db, timeout=60)
    records = await all_records(stack.kafka, [topics.events])
    assert order_per_conversation(records) == {key: list(range(1, 36)) for key in writer.last_seq}


async def test_a_client_is_discarded_in_time_while_its_broker_is_frozen(stack: Stack, topics: Topics) -> None:
    """`stop` of aiokafka would wait for the batch for ever."""
    client = await opened(stack, topics)
    before = asyncio.all_tasks()
    os.kill(stack.pids["kafka"], signal.SIGSTOP)
    try:
        builder = client.producer.create_batch()
        builder.append(timestamp=None, key=b"k", value=b"v", headers=[])
        confirmed = await client.producer.send_batch(builder, topics.events, partition=0)
        await asyncio.wait([confirmed], timeout=0.3)
        assert not confirmed.done()
        begun = time.monotonic()
        await client.discard()
        assert time.monotonic() - begun < CLOSE_S + 0.5
    finally:
        os.kill(stack.pids["kafka"], signal.SIGCONT)
    confirmed.cancel()
    await asyncio.wait([confirmed], timeout=1)
    assert asyncio.all_tasks() <= before, "no task of the client is left"
    await client.discard()


async def send(client: Client, topic: str, partition: int, value: bytes) -> int:
    batch = client.producer.create_batch()
    batch.append(timestamp=None, key=b"k", value=value, headers=[])
    placed = await (await client.producer.send_batch(batch, topic, partition=partition))
    return int(placed.offset)


async def test_a_failed_batch_burns_its_sequence_numbers(stack: Stack, topics: Topics) -> None:
    """Why a client with a failed batch is thrown away, and why no second batch may wait behind one."""
    client = await opened(stack, topics)
    try:
        assert await send(client, topics.events, 1, b"first") == 0
        with pytest.raises(KafkaError, match="MessageSizeTooLarge"):
            await send(client, topics.events, 1, b"x" * 1_100_000)
        with pytest.raises(OutOfOrderSequenceNumber):
            await send(client, topics.events, 1, b"refused from now on")
        # On a partition where this producer is new, the broker takes what comes behind the failed one.
        with pytest.raises(KafkaError, match="MessageSizeTooLarge"):
            await send(client, topics.events, 2, b"x" * 1_100_000)
        assert await send(client, topics.events, 2, b"before its predecessor") == 0
    finally:
        await client.discard()


async def test_no_client_is_left_when_none_can_be_opened(stack: Stack) -> None:
    before = asyncio.all_tasks()
    with pytest.raises(KafkaError):
        await open_client("127.0.0.1:1", Topics("nowhere"), client_id="tests", timeout_s=2)
    with pytest.raises((KafkaError, TimeoutError)):
        await open_client(stack.kafka, Topics("nowhere"), client_id="tests", timeout_s=2)
    assert asyncio.all_tasks() <= before
