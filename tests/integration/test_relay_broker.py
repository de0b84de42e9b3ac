"""A broker that freezes, dies, comes back, or refuses for a while: the relay holds, and then goes on by itself."""

import asyncio
import signal
from collections import defaultdict
from pathlib import Path

import asyncpg
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import TopicAuthorizationFailedError
from aiokafka.protocol.admin import CreateAclsRequest

from shared.kafka import PARTITIONS, Topics, ensure_topics, producer
from tests.databases import Database
from tests.history import LastingWriter, load, read_history
from tests.own_stack import OwnStack
from tests.relays import (
    QUICK,
    Relay,
    Relays,
    Writer,
    add,
    all_records,
    conversation,
    drained,
    make_topic,
    order_per_conversation,
    other_shard,
    relays,
    shard_of,
)
from tests.second_broker import second_broker
from tests.waiting import until

pytest_plugins = ["tests.own_fixtures"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.long(240)]

OUTAGE_S = 120.0


async def failing(relay: Relay, check: str) -> str | None:
    """What `readyz` says of this check; None if it is well."""
    return ((await relay.readyz()) or {"failing": {}})["failing"].get(check)


async def reported(relay: Relay, check: str, what: str = "") -> None:
    """Wait until `readyz` names this check, with this text in it."""

    async def told() -> bool:
        return what in (await failing(relay, check) or "\0")

    await until(told, timeout=30, what=f"readyz that names {check} {what}")


_SENT = "SELECT count(*) >= $1 FROM outbox AS o JOIN outbox_shard AS s USING (shard) WHERE o.id <= s.cursor_id"


async def nothing_held_against_a_row(db: asyncpg.Connection) -> None:
    """No row was parked, tried again or buried."""
    for table in ("outbox_parked", "outbox_attempt", "dead_letter"):
        assert await db.fetchval(f"SELECT count(*) FROM {table}") == 0, table


@pytest.mark.promise("I4", "I5", "I10")
async def test_two_minutes_without_a_broker_kill_no_row(
    own_stack: OwnStack, own_database: Database, own_db: asyncpg.Connection, own_topics: Topics, own_fleet: Relays
) -> None:
    """Writers go on meanwhile. Nothing is an attempt, nothing is lost, and all of it comes in order."""
    relays = [own_fleet.start("ann"), own_fleet.start("ben")]
    await asyncio.gather(*(relay.ready() for relay in relays))
    writers = [LastingWriter(own_database.owner_url, range(n, n + 50), every_s=0.2) for n in (0, 50)]
    async with load(writers):
        await until(lambda: own_db.fetchval("SELECT count(*) > 500 FROM outbox"), timeout=30, what="some rows")
        own_stack.fault("kafka", signal.SIGKILL)
        loop = asyncio.get_running_loop()
        over = loop.time() + OUTAGE_S
        for relay in relays:
            await reported(relay, "kafka", "no connection")
        sent = await own_db.fetchval("SELECT sum(cursor_id) FROM outbox_shard")
        await until(lambda: loop.time() > over, timeout=OUTAGE_S + 10, what="the end of the outage")
        assert await own_db.fetchval("SELECT sum(cursor_id) FROM outbox_shard") == sent
        for relay in relays:
            assert (await relay.metrics())["waybill_relay_shards"] == PARTITIONS / 2, "leases are kept"
        await asyncio.to_thread(own_stack.restart, "kafka")
        await asyncio.gather(*(relay.ready() for relay in relays))
    await drained(own_db, timeout=60)
    history = await read_history(own_db, own_stack.kafka, own_topics.prefix)
    history.hold()
    await nothing_held_against_a_row(own_db)


async def test_a_frozen_broker_holds_and_then_takes_all_in_order(
    own_stack: OwnStack, own_db: asyncpg.Connection, own_topics: Topics, own_fleet: Relays
) -> None:
    """Frozen, it answers nothing: batches end by their time-out, and the frozen ones are still written at the thaw."""
    relay = own_fleet.start("ann")
    await relay.ready()
    writer = Writer(own_db, range(100))
    await writer.write(500)
    own_stack.fault("kafka", signal.SIGSTOP)
    try:
        for _ in range(5):
            await writer.write(500)

        async def given_up() -> bool:
            return (await relay.metrics())['waybill_relay_failed_batches_total{kind="retriable"}'] > 0

        await until(given_up, timeout=30, what="a batch that is given up")
    finally:
        own_stack.fault("kafka", signal.SIGCONT)
    await writer.write(500)
    await drained(own_db, timeout=60)
    records = await all_records(own_stack.kafka, [own_topics.events])
    assert order_per_conversation(records) == {key: list(range(1, 36)) for key in writer.last_seq}
    await nothing_held_against_a_row(own_db)


@pytest.mark.promise("I4", "I10")
async def test_a_topic_that_was_deleted_and_made_again_gets_all_that_was_not_confirmed(
    own_stack: OwnStack,
    own_database: Database,
    own_db: asyncpg.Connection,
    own_topics: Topics,
    own_fleet: Relays,
    *,
    own_admin: AIOKafkaAdminClient,
) -> None:
    relay = own_fleet.start("ann")
    await relay.ready()
    async with load([LastingWriter(own_database.owner_url, range(50), every_s=0.02)]):
        await until(lambda: own_db.fetchval("SELECT count(*) > 500 FROM outbox"), timeout=30, what="some rows")
        await own_admin.delete_topics([own_topics.events])
        await reported(relay, "kafka", own_topics.events)
        cursors = dict(await own_db.fetch("SELECT shard, cursor_id FROM outbox_shard"))
        await ensure_topics(own_stack.kafka, own_topics)
        await relay.ready()
    await drained(own_db, timeout=60)
    records = await all_records(own_stack.kafka, [own_topics.events])
    expected: dict[str, list[int]] = defaultdict(list)
    for row in await own_db.fetch("SELECT shard, id, conversation_id::text, seq FROM outbox ORDER BY shard, id"):
        if row["id"] > cursors[row["shard"]]:
            expected[row["conversation_id"]].append(row["seq"])
    order = order_per_conversation(records)
    assert expected
    for key, seqs in expected.items():
        # What was sent last before the end may be there, too, from before its confirmation.
        assert order[key] == list(range(order[key][0], seqs[-1] + 1)), key
        assert order[key][0] <= seqs[0]
    await nothing_held_against_a_row(own_db)


@pytest.mark.promise("I4")
async def test_a_leaders_move_and_too_few_replicas_are_waited_for(
    own_stack: OwnStack, own_database: Database, own_db: asyncpg.Connection, tmp_path: Path
) -> None:
    """One of two brokers leaves in order, then without a word: whoever leads, and is enough by itself, goes on."""
    both, one = Topics(f"both-{tmp_path.name}"), Topics(f"one-{tmp_path.name}")
    with second_broker(own_stack) as second:
        await ensure_topics(own_stack.kafka, one, replication=2, min_insync=1)
        await ensure_topics(own_stack.kafka, both, replication=2, min_insync=2)
        with relays(own_database, own_stack.kafka, one.prefix, tmp_path) as fleet:
            relay = fleet.start("ann")
            await relay.ready()
            async with load([LastingWriter(own_database.owner_url, range(50), every_s=0.02)]):
                await until(lambda: own_db.fetchval(_SENT, 500), timeout=60, what="some rows sent")
                await asyncio.to_thread(second.stop)
                await until(lambda: own_db.fetchval(_SENT, 1500), timeout=60, what="rows sent to other leaders")
            await drained(own_db, timeout=60)
            await relay.ready()
        history = await read_history(own_db, own_stack.kafka, one.prefix)
        history.hold()
        assert len(history.rows) > 1500
        await nothing_held_against_a_row(own_db)
        await own_db.execute("UPDATE outbox_shard SET cursor_id = 0")
        await own_db.execute("TRUNCATE outbox, outbox_delivery")

        await asyncio.to_thread(second.restart)
        with relays(own_database, own_stack.kafka, both.prefix, tmp_path) as fleet:
            relay = fleet.start("ben")
            await relay.ready()
            async with load([LastingWriter(own_database.owner_url, range(50), every_s=0.02)]):
                await until(lambda: own_db.fetchval(_SENT, 500), timeout=60, what="some rows sent")
                second.kill()

                async def given_up(batches: int) -> bool:
                    return (await relay.metrics())['waybill_relay_failed_batches_total{kind="retriable"}'] >= batches

                await until(lambda: given_up(1), timeout=60, what="a batch for which there are too few replicas")
                sent = await own_db.fetchval("SELECT sum(cursor_id) FROM outbox_shard")
                await until(lambda: given_up(4), timeout=60, what="further ones")
                assert await own_db.fetchval("SELECT sum(cursor_id) FROM outbox_shard") == sent
                await asyncio.to_thread(second.restart)
                await relay.ready()
            await drained(own_db, timeout=60)
        history = await read_history(own_db, own_stack.kafka, both.prefix)
        history.hold()
        await nothing_held_against_a_row(own_db)


@pytest.mark.promise("I4")
async def test_nothing_overtakes_a_refused_batch(
    own_stack: OwnStack,
    own_db: asyncpg.Connection,
    own_topics: Topics,
    own_fleet: Relays,
    own_admin: AIOKafkaAdminClient,
) -> None:
    """The first batch of each shard is too large for the topic, though no row of it is; the next ones are not.

    A broker takes any batch as the first one of a client that is new to it, so also one that was handed over too early.
    """
    topic = f"{own_topics.prefix}.small.v1"
    await make_topic(own_admin, topic, {"max.message.bytes": "30000"})
    numbers = list({shard_of(number): number for number in range(200)}.values())[:10]
    async with own_db.transaction():
        for number in numbers:
            for seq in range(1, 21):
                await add(own_db, number, seq=seq, topic="small.v1", payload=b"x" * (8_000 if seq <= 5 else 10))
    own_fleet.start("ann", {**QUICK, "WAYBILL_RELAY_BATCH_SIZE": "5"})
    await drained(own_db, timeout=60)
    order = order_per_conversation(await all_records(own_stack.kafka, [topic]))
    assert order == {str(conversation(number)): list(range(1, 21)) for number in numbers}
    await nothing_held_against_a_row(own_db)


# Authorisation. The numbers are Kafka's own: resource type, pattern type, operation and permission of an entry.

PROBE = b"probe"
TOPIC, LITERAL, ALL, WRITE, DENY, ALLOW = 2, 3, 2, 4, 2, 3


async def entry(admin: AIOKafkaAdminClient, topic: str, operation: int, permission: int) -> None:
    request = CreateAclsRequest(TOPIC, topic, LITERAL, "User:*", "*", operation, permission)
    answer = await admin._send_to_controller(request)
    assert [error for error, _ in answer.creation_responses] == [0], answer


async def refused(bootstrap: str, topic: str) -> None:
    """Wait until the broker holds to its entries: it answers that it has one a little before that."""
    made = producer(bootstrap, client_id="tests-probe", idempotent=False)
    await made.start()
    try:

        async def is_refused() -> bool:
            try:
                await made.send_and_wait(topic, b"", key=PROBE, partition=0)
            except TopicAuthorizationFailedError:
                return True
            return False

        await until(is_refused, timeout=30, what="a refusal")
    finally:
        await made.stop()


@pytest.mark.promise("I5")
async def test_a_topic_that_the_relay_may_not_write_to_holds_nothing_else(
    own_stack: OwnStack,
    own_db: asyncpg.Connection,
    own_topics: Topics,
    own_fleet: Relays,
    own_admin: AIOKafkaAdminClient,
) -> None:
    """Its rows are parked with the reason, by conversation and topic; the same conversations' events go on."""
    await entry(own_admin, own_topics.receipts, ALL, ALLOW)
    await entry(own_admin, own_topics.receipts, WRITE, DENY)
    await refused(own_stack.kafka, own_topics.receipts)
    relay = own_fleet.start("ann", {**QUICK, "WAYBILL_RELAY_MAX_ATTEMPTS": "2", "WAYBILL_RELAY_RETRY_DELAY_MS": "200"})
    await relay.ready()
    numbers = [1, other_shard(1)]
    for seq in range(1, 6):
        for number in numbers:
            await add(own_db, number, seq=seq)
        await add(own_db, 1, seq=None, topic="receipts.v1", type="waybill.receipt.read")
    await drained(own_db, timeout=60)

    async def all_died() -> bool:
        return bool(await own_db.fetchval("SELECT count(*) = 5 FROM outbox_dead WHERE state = 'dead'"))

    await until(all_died, timeout=60, what="dead receipts")
    letters = await own_db.fetch("SELECT topic, attempts, error FROM outbox_dead")
    assert {(letter["topic"], letter["attempts"]) for letter in letters} == {("receipts.v1", 2)}
    assert all("TopicAuthorizationFailed" in letter["error"] for letter in letters)
    records = await all_records(own_stack.kafka, [own_topics.events])
    assert order_per_conversation(records) == {str(conversation(number)): [1, 2, 3, 4, 5] for number in numbers}
    assert {record.key for record in await all_records(own_stack.kafka, [own_topics.receipts])} <= {PROBE}
    await relay.ready()
