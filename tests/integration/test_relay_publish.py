"""What a relay publishes: every row, on the right partition, with the headers that the protocol names."""

import json
import re
import uuid

import asyncpg
import pytest
from aiokafka import ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from shared.kafka import PARTITIONS, Topics
from tests.relays import (
    Relays,
    Writer,
    add,
    all_records,
    conversation,
    drained,
    ids_of,
    order_per_conversation,
    shard_of,
)
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

pytestmark = pytest.mark.timeout(300)

TIME = re.compile(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z")


async def test_a_backlog_is_published_whole_and_in_order(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    writer = Writer(owner_db, range(100))
    for _ in range(20):
        await writer.write(100)
    await fleet.start().ready()
    await drained(owner_db, timeout=60)
    records = await all_records(stores.kafka, [relay_topics.events])
    assert len(records) == 2000
    assert order_per_conversation(records) == {key: list(range(1, 21)) for key in writer.last_seq}
    assert {r.key.decode(): r.partition for r in records} == {str(conversation(n)): shard_of(n) for n in range(100)}


@pytest.mark.promise("protocol.7.events", "protocol.7.receipts", "protocol.9.kafka", "protocol.1.times")
async def test_records_have_exactly_the_protocols_headers(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    plain, traced, receipt = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    await add(owner_db, 1, event_id=plain, seq=7, payload='{"body":"é"}'.encode())
    await add(owner_db, 1, event_id=traced, seq=8, headers=["traceparent", trace])
    receipt_row = await add(
        owner_db,
        1,
        event_id=receipt,
        seq=None,
        topic="receipts.v1",
        type="waybill.receipt.read",
        source="/waybill/receipts",
        headers=["user_id", "ann", "kind", "read"],
    )
    await fleet.start().ready()
    await drained(owner_db, timeout=60)
    events = await all_records(stores.kafka, [relay_topics.events])
    receipts = await all_records(stores.kafka, [relay_topics.receipts])
    assert len(events) == 2
    assert len(receipts) == 1
    key = str(conversation(1))
    for record in (*events, *receipts):
        assert record.key == key.encode()
        assert record.partition == shard_of(1)
        assert TIME.match(dict(record.headers)["ce_time"].decode())

    def headers(record: ConsumerRecord[bytes, bytes]) -> list[tuple[str, str]]:
        return [(name, value.decode()) for name, value in record.headers if name != "ce_time"]

    common = [("ce_specversion", "1.0"), ("ce_subject", key), ("content-type", "application/json")]
    event = [*common, ("ce_source", "/waybill/ingest"), ("ce_type", "waybill.event.message")]
    assert events[0].value == '{"body":"é"}'.encode()
    assert sorted(headers(events[0])) == sorted([*event, ("ce_id", str(plain)), ("seq", "7")])
    assert sorted(headers(events[1])) == sorted([*event, ("ce_id", str(traced)), ("seq", "8"), ("traceparent", trace)])
    assert sorted(headers(receipts[0])) == sorted(
        [
            *common,
            ("ce_source", "/waybill/receipts"),
            ("ce_type", "waybill.receipt.read"),
            ("ce_id", str(receipt)),
            ("seq", str(receipt_row)),
            ("user_id", "ann"),
            ("kind", "read"),
        ]
    )


async def test_delivery_rows_give_the_true_offset_of_every_row(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    relay = fleet.start()
    await relay.ready()
    for turn in range(12):
        for number in range(6):
            await add(owner_db, number, seq=turn + 1)
            if turn % 3 == 0:
                await add(owner_db, number, seq=None, topic="receipts.v1", type="waybill.receipt.read")
    await drained(owner_db, timeout=60)
    told = await owner_db.fetch(
        """
        SELECT o.event_id, d.topic, d.partition,
               d.base_offset + count(*) OVER (PARTITION BY d.ctid ORDER BY o.id) - 1 AS at
        FROM outbox_delivery AS d
        JOIN outbox AS o ON o.shard = d.shard AND o.id BETWEEN d.from_id AND d.to_id AND d.topic = o.topic
        """
    )
    records = await all_records(stores.kafka, [relay_topics.events, relay_topics.receipts])
    assert len(records) == 96
    assert {(str(row[0]), row[1], row[2], row[3]) for row in told} == {
        (event_id, record.topic.removeprefix(f"{relay_topics.prefix}."), record.partition, record.offset)
        for event_id, record in zip(ids_of(records), records, strict=True)
    }
    metrics = await relay.metrics()
    assert metrics['waybill_relay_published_total{result="sent",topic="events.v1"}'] == 72
    assert metrics['waybill_relay_published_total{result="sent",topic="receipts.v1"}'] == 24


async def test_all_is_there_before_anything_happens(fleet: Relays) -> None:
    relay = fleet.start()
    await relay.ready()
    metrics = await relay.metrics()
    for name in (
        "waybill_outbox_oldest_unsent_seconds",
        'waybill_dead_letters{state="parked"}',
        'waybill_dead_letters{state="dead"}',
        'waybill_relay_published_total{result="sent",topic="events.v1"}',
        "waybill_relay_fenced_writes_total",
        "waybill_relay_stopped_shards",
    ):
        assert metrics[name] == 0
    assert metrics["waybill_relay_shards"] == 64


async def test_without_its_topics_a_relay_waits_and_says_so(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=stores.kafka)
    await admin.start()
    try:
        await admin.delete_topics([relay_topics.receipts])

        async def gone() -> bool:
            return relay_topics.receipts not in await admin.list_topics()

        await until(gone, timeout=30, what="the end of the topic")
        await add(owner_db, 1)
        relay = fleet.start()

        async def names_kafka() -> bool:
            return "kafka" in ((await relay.readyz()) or {"failing": {}})["failing"]

        await until(names_kafka, timeout=60, what="readyz that names Kafka")
        await admin.create_topics([NewTopic(relay_topics.receipts, PARTITIONS, 1)])
        await drained(owner_db, timeout=60)
        await relay.ready()
    finally:
        await admin.close()
    assert json.dumps(await relay.readyz()) == '{"status": "ok", "failing": {}}'
