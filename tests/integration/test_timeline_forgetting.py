"""What was deleted is gone from the outbox and from Kafka in time, and a topic that keeps longer is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import OffsetOutOfRangeError

from services.relay.metrics import TOPIC_KEEPS
from services.relay.retention import Periods, Retention
from services.relay.topics import TopicsWatch
from shared.kafka import PARTITIONS, Topics, ensure_topics
from shared.keeping import configs_of, keeping, kept_by
from tests.relay import Line
from tests.relays import all_records
from tests.timeline_stage import open_stage
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import asyncpg

    from tests.databases import Database
    from tests.own_stack import OwnStack
    from tests.relays import Relays
    from tests.stack import Stores

pytest_plugins = ["tests.own_fixtures", "tests.relay_fixtures"]

SECRET = "the body that is to be forgotten"
ERASE_WITHIN_S = 12.0


@pytest.fixture
async def admin(stores: Stores) -> AsyncIterator[AIOKafkaAdminClient]:
    made = AIOKafkaAdminClient(bootstrap_servers=stores.kafka)
    await made.start()
    yield made
    await made.close()


@pytest.mark.long(30)
@pytest.mark.promise("protocol.3.erase_within")
async def test_the_outbox_and_kafka_forget_a_deleted_body(
    own_stack: OwnStack, own_database: Database, own_db: asyncpg.Connection, own_admin: AIOKafkaAdminClient
) -> None:
    topics = Topics("test-forgetting")
    await ensure_topics(own_stack.kafka, topics, erase_within_s=ERASE_WITHIN_S)
    try:
        async with open_stage(own_database) as stage, Line(own_db, own_stack.kafka, topics.prefix) as line:

            async def in_kafka() -> bool:
                try:
                    records = await all_records(own_stack.kafka, [topics.events])
                except OffsetOutOfRangeError:
                    return True  # it is just going
                return any(SECRET.encode() in (record.value or b"") for record in records)

            async def in_outbox() -> bool:
                statement = "SELECT EXISTS (SELECT FROM outbox WHERE position(convert_to($1, 'UTF8') IN payload) > 0)"
                return bool(await own_db.fetchval(statement, SECRET))

            group = await stage.group("ann")
            seq = await stage.sent("ann", group, body={"text": SECRET})
            await stage.sent("ann", group, type="delete", target_seq=seq)
            await line.publish()
            await own_db.execute("UPDATE outbox_shard SET cursor_id = 1 << 40")
            assert await in_kafka(), "the record was published as it was written"
            assert await in_outbox()

            retention = Retention(stage.relay, Periods(0.0, 0.0, ERASE_WITHIN_S))
            await until(lambda: _looked(retention, in_outbox), timeout=30, what="an outbox that has forgotten")

            async def forgotten() -> bool:
                return not await in_kafka()

            await until(forgotten, timeout=60, what="a topic that has forgotten")
            assert (await stage.page("ann", group))[seq]["body"] is None
    finally:
        await own_admin.delete_topics(list(topics.all))


async def _looked(retention: Retention, in_outbox: object) -> bool:
    await retention.look()
    return not await in_outbox()  # type: ignore[operator]


async def test_topics_are_made_so_that_they_forget_in_time(
    stores: Stores, topic_prefix: str, admin: AIOKafkaAdminClient
) -> None:
    topics = Topics(topic_prefix)
    await ensure_topics(stores.kafka, topics, erase_within_s=86_400)

    async def known() -> dict[str, float]:
        kept = await kept_by(admin, topics.all)
        return kept if set(kept) == set(topics.all) else {}

    kept = await until(known, timeout=30, what="topics that are known")
    assert all(0 < seconds < 86_400 for seconds in kept.values())


async def test_a_topic_that_keeps_longer_is_changed_and_keeps_its_other_settings(
    stores: Stores, topic_prefix: str, admin: AIOKafkaAdminClient
) -> None:
    topics = Topics(topic_prefix)
    configs = {"max.message.bytes": "54321", "retention.ms": "-1"}
    own = NewTopic(topics.events, PARTITIONS, 1, topic_configs=configs)
    short = NewTopic(topics.acks, PARTITIONS, 1, topic_configs={"retention.ms": "1000", "segment.ms": "1000"})
    compacted = NewTopic(topics.dead, PARTITIONS, 1, topic_configs=keeping(60) | {"cleanup.policy": "compact"})
    await admin.create_topics([own, short, compacted])

    async def known() -> bool:
        return set(topics.all) - {topics.receipts} <= set(await admin.list_topics())

    await until(known, timeout=30, what="topics that are known")
    watch = TopicsWatch(stores.kafka, topics, 604_800)
    await watch.look()
    assert watch.warning is not None
    assert (topics.events in watch.warning, topics.dead in watch.warning, topics.acks in watch.warning) == (
        True,
        True,
        False,
    )
    assert TOPIC_KEEPS.labels("events.v1")._value.get() == float("inf")

    await ensure_topics(stores.kafka, topics)

    async def quiet() -> bool:
        await watch.look()
        return watch.warning is None

    await until(quiet, timeout=30, what="brokers that know of the change")
    assert TOPIC_KEEPS.labels("events.v1")._value.get() < 604_800
    found = await configs_of(admin, [topics.events, topics.acks])
    assert found[topics.events]["max.message.bytes"] == ("54321", True)
    assert found[topics.acks]["retention.ms"] == ("1000", True), "what forgets sooner is left alone"


async def test_a_relay_warns_and_is_ready(
    stores: Stores, fleet: Relays, relay_topics: Topics, admin: AIOKafkaAdminClient
) -> None:
    """Its topics are made for a week; it is told of a day."""
    settings = {"WAYBILL_ERASE_WITHIN_S": "86400"}
    short = {"WAYBILL_RELAY_OUTBOX_PERIOD_S": "3600", "WAYBILL_RELAY_OUTBOX_RETENTION_S": "80000"}
    relay = fleet.start(settings=settings | short)
    await relay.ready()

    async def warned() -> bool:
        return "topics" in ((await relay.readyz()) or {}).get("warnings", {})

    await until(warned, timeout=30, what="a warning")
    assert relay.logged("topics keep for too long what was erased")
    assert (await relay.metrics())['waybill_topic_keeps_seconds{topic="events.v1"}'] > 86_400
    refused = fleet.start(settings=settings)
    assert await refused.ended() == 2
    assert "WAYBILL_ERASE_WITHIN_S" in refused.log.read_text()
