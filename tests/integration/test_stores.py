"""Each store answers its own client, whichever source it comes from."""

import asyncio

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from redis.asyncio import Redis

from shared.kafka import reader, stop_reader
from tests.databases import Database
from tests.stack import Stores


async def test_postgres_is_a_durable_18_with_logical_wal(stores: Stores) -> None:
    connection = await asyncpg.connect(stores.postgres_url)
    try:
        assert connection.get_server_version().major == 18
        shown = {name: await connection.fetchval(f"SHOW {name}") for name in ("wal_level", "fsync", "max_connections")}
        assert shown == {"wal_level": "logical", "fsync": "on", "max_connections": "200"}
    finally:
        await connection.close()


async def test_kafka_takes_an_idempotent_record_and_gives_it_back(stores: Stores, topic_prefix: str) -> None:
    topic = f"{topic_prefix}.events.v1"
    admin = AIOKafkaAdminClient(bootstrap_servers=stores.kafka)
    await admin.start()
    await admin.create_topics([NewTopic(topic, num_partitions=4, replication_factor=1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=stores.kafka, enable_idempotence=True) as producer:
        sent = await producer.send_and_wait(topic, b"value", key=b"key")
    async with AIOKafkaConsumer(topic, bootstrap_servers=stores.kafka, auto_offset_reset="earliest") as consumer:
        record = await consumer.getone()
    assert (record.partition, record.offset) == (sent.partition, sent.offset)
    assert (record.key, record.value) == (b"key", b"value")


async def test_a_consumer_that_has_just_failed_takes_nobody_with_it(stores: Stores) -> None:
    """aiokafka awaits the tasks that it cancels: one that waits to try again ends its `stop` as cancelled."""
    consumer = reader(stores.kafka, client_id="tests")
    await consumer.start()
    trying_again = asyncio.create_task(asyncio.sleep(60))
    consumer._fetcher._pending_tasks.add(trying_again)
    await stop_reader(consumer, 5)
    assert trying_again.cancelled()
    assert consumer._client._sync_task is None, "it looks for brokers no more"


async def test_redis_starts_empty_and_keeps_a_value(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        assert await client.dbsize() == 0
        await client.set("key", "value")
        assert await client.get("key") == b"value"


async def test_each_database_is_migrated_and_its_own(database: Database, module_database: Database) -> None:
    assert database.name != module_database.name
    owner = await asyncpg.connect(database.owner_url)
    relay = await asyncpg.connect(database.url("relay"))
    try:
        assert await owner.fetchval("SELECT current_database()") == database.name
        assert await relay.fetchval("SELECT current_user") == "waybill_relay"
        assert await relay.fetchval("SELECT count(*) FROM outbox_shard") == 64
    finally:
        await relay.close()
        await owner.close()
