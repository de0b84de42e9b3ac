"""What Kafka refuses: it is parked with its conversation, tried again, and given up; nobody else waits for it."""

import asyncio
import json
import random
import string
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from services.relay.held import HeldShard
from services.relay.parking import ParkingStore, Settled
from services.relay.shards import Move, Park, ShardStore
from shared.kafka import PARTITIONS, Topics, ensure_topics
from shared.postgres import open_pool
from tests.databases import Database
from tests.relays import (
    QUICK,
    Relay,
    Relays,
    Writer,
    add,
    all_records,
    conversation,
    drained,
    ids_of,
    make_topic,
    order_per_conversation,
    other_shard,
    relays,
    same_shard,
    shard_of,
)
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.long(90)]

SOON = {**QUICK, "WAYBILL_RELAY_MAX_ATTEMPTS": "3", "WAYBILL_RELAY_RETRY_DELAY_MS": "100"}
"""Dead after three tries, about 0.5 s."""

FAR = {**QUICK, "WAYBILL_RELAY_RETRY_DELAY_MS": "3600000", "WAYBILL_RELAY_RETRY_CAP_MS": "3600000"}
"""What is parked stays parked for the length of a test."""

REFUSED: dict[str, dict[str, Any]] = {
    "too large": {"payload": b"x" * 1_100_000},
    "there is no topic nowhere.v1": {"topic": "nowhere.v1"},
    "not serialisable": {"headers": ["half a pair"]},
    "can't be a topic": {"topic": "".join(random.Random(0).choices(string.ascii_letters, k=40_000))},
}


@pytest.fixture
async def admin(stores: Stores) -> AsyncIterator[AIOKafkaAdminClient]:
    made = AIOKafkaAdminClient(bootstrap_servers=stores.kafka)
    await made.start()
    yield made
    await made.close()


async def state_of(db: asyncpg.Connection, id_: int) -> str | None:
    return await db.fetchval("SELECT state FROM outbox_parked WHERE id = $1", id_)


async def parked_as(db: asyncpg.Connection, states: dict[int, str], *, timeout: float = 30) -> None:
    """Wait until these rows, and no others, are parked in these states."""

    async def agrees() -> bool:
        return dict(await db.fetch("SELECT id, state FROM outbox_parked")) == states

    try:
        await until(agrees, timeout=timeout, what=f"parked rows {states}")
    except TimeoutError:
        raise AssertionError(dict(await db.fetch("SELECT id, state FROM outbox_parked"))) from None


async def letters(db: asyncpg.Connection) -> list[asyncpg.Record]:
    return await db.fetch("SELECT * FROM outbox_dead ORDER BY outbox_id")


@pytest.mark.promise("I5")
@pytest.mark.parametrize("reason", REFUSED)
async def test_a_refused_row_dies_alone_and_nobody_else_waits(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays, reason: str
) -> None:
    neighbour = same_shard(1)
    changes = {"topic": "events.v1", **REFUSED[reason]}
    relay = fleet.start(settings=SOON)
    await add(owner_db, 1, seq=1)
    bad = await add(owner_db, 1, seq=2, **changes)
    behind = [await add(owner_db, 1, seq=3, topic=changes["topic"]) for _ in range(2)]
    await add(owner_db, neighbour, seq=1)
    if changes["topic"] == "events.v1":
        await parked_as(owner_db, {bad: "dead", behind[0]: "sent", behind[1]: "sent"})
    else:
        await parked_as(owner_db, {bad: "dead", behind[0]: "dead", behind[1]: "dead"})
    [letter, *_] = await letters(owner_db)
    assert (letter["outbox_id"], letter["state"], letter["attempts"]) == (bad, "dead", 3)
    assert reason in letter["error"]
    row = await owner_db.fetchrow("SELECT * FROM outbox WHERE id = $1", bad)
    assert row is not None
    for column in ("conversation_id", "seq", "event_id", "topic", "type", "source", "headers", "payload", "created_at"):
        assert letter[column] == row[column], column
    told = await owner_db.fetch("SELECT attempt, error, owner FROM outbox_attempt WHERE id = $1 ORDER BY attempt", bad)
    assert [one["attempt"] for one in told] == [1, 2, 3]
    assert all(reason in one["error"] for one in told)
    expected = [1, 3] if changes["topic"] == "events.v1" else [1]
    records = await all_records(stores.kafka, [relay_topics.events])
    assert order_per_conversation(records)[str(conversation(neighbour))] == [1]
    assert sorted({*order_per_conversation(records)[str(conversation(1))]}) == expected
    assert (await relay.metrics())["waybill_relay_stopped_shards"] == 0
    await relay.ready()


@pytest.mark.promise("I5", "I4")
async def test_one_oversized_record_in_the_middle_of_a_hot_conversation(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    """Rows keep coming while it is tried; what is behind it goes out in order, once it is dead."""
    hot, neighbours = Writer(owner_db, [1]), Writer(owner_db, [same_shard(1), other_shard(1)])
    relay = fleet.start(settings=SOON)
    await relay.ready()
    await hot.write(200)
    bad = await hot.write_one(payload=b"x" * 1_100_000)
    while await state_of(owner_db, bad) != "dead":
        await hot.write(20)
        await neighbours.write(10)
    await hot.write(200)
    await drained(owner_db, timeout=60)

    async def nothing_waits() -> bool:
        return not await owner_db.fetchval("SELECT count(*) FROM outbox_parked WHERE state IN ('waiting', 'failed')")

    await until(nothing_waits, timeout=60, what="the end of the queue")
    order = order_per_conversation(await all_records(stores.kafka, [relay_topics.events]))
    for writer in (hot, neighbours):
        for key, last in writer.last_seq.items():
            assert order[key] == [seq for seq in range(1, last + 1) if (writer, seq) != (hot, 201)]
    assert len(await letters(owner_db)) == 1


async def test_neighbours_go_out_while_a_conversation_is_parked(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    relay = fleet.start(settings=FAR)
    bad = await add(owner_db, 1, seq=1, headers=["odd"])
    behind = await add(owner_db, 1, seq=2)
    receipt = uuid.uuid4()
    await add(owner_db, 1, seq=None, topic="receipts.v1", type="waybill.receipt.read", event_id=receipt)
    await add(owner_db, same_shard(1), seq=1)
    await drained(owner_db, timeout=60)
    await parked_as(owner_db, {bad: "failed", behind: "waiting"})
    assert str(receipt) in ids_of(await all_records(stores.kafka, [relay_topics.receipts])), "parked is a topic, too"
    order = order_per_conversation(await all_records(stores.kafka, [relay_topics.events]))
    assert order == {str(conversation(same_shard(1))): [1]}
    metrics = await relay.metrics()
    assert metrics['waybill_relay_parked_rows_total{outcome="failed"}'] == 1
    assert metrics['waybill_relay_parked_rows_total{outcome="waiting"}'] == 1

    async def counted() -> bool:
        told = await relay.metrics()
        return told['waybill_dead_letters{state="parked"}'] == 2 and told["waybill_relay_parked_oldest_seconds"] > 0

    await until(counted, timeout=30, what="the gauges of what is parked")


async def test_what_heals_is_published_in_order(
    owner_db: asyncpg.Connection,
    stores: Stores,
    relay_topics: Topics,
    fleet: Relays,
    admin: AIOKafkaAdminClient,
) -> None:
    """A topic that somebody forgot to make: its rows wait in their order until it is there."""
    fleet.start(settings={**SOON, "WAYBILL_RELAY_MAX_ATTEMPTS": "100", "WAYBILL_RELAY_RETRY_CAP_MS": "200"})
    ids = [await add(owner_db, 1, seq=seq, topic="later.v1") for seq in range(1, 6)]
    await parked_as(owner_db, {ids[0]: "failed", **dict.fromkeys(ids[1:], "waiting")})
    topic = f"{relay_topics.prefix}.later.v1"
    await admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
    await parked_as(owner_db, dict.fromkeys(ids, "sent"), timeout=60)
    ids.append(await add(owner_db, 1, seq=6, topic="later.v1"))
    await drained(owner_db, timeout=60)
    records = await all_records(stores.kafka, [topic])
    assert order_per_conversation(records) == {str(conversation(1)): [1, 2, 3, 4, 5, 6]}
    offsets = [row[0] for row in await owner_db.fetch("SELECT kafka_offset FROM outbox_parked ORDER BY id")]
    assert offsets == [record.offset for record in records[:5]]
    assert await state_of(owner_db, ids[5]) is None, "the straight way again"


async def test_the_brokers_own_limit_is_found_by_halving(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays, admin: AIOKafkaAdminClient
) -> None:
    """Whole batches are over the topic's limit, and one of their rows is so by itself: that one alone is to blame."""
    topic = f"{relay_topics.prefix}.small.v1"
    await make_topic(admin, topic, {"max.message.bytes": "30000"})
    numbers = [number for number in range(2000) if shard_of(number) == shard_of(1)][:10]
    async with owner_db.transaction():
        for seq in range(1, 6):
            for number in numbers:
                await add(owner_db, number, seq=seq, topic="small.v1", payload=b"x" * 2_000)
        bad = await add(owner_db, numbers[0], seq=6, topic="small.v1", payload=b"x" * 40_000)
        for number in numbers[1:]:
            await add(owner_db, number, seq=6, topic="small.v1", payload=b"x" * 2_000)
    relay = fleet.start(settings=SOON)
    await parked_as(owner_db, {bad: "dead"}, timeout=60)
    await drained(owner_db, timeout=60)
    order = order_per_conversation(await all_records(stores.kafka, [topic]))
    whole = {str(conversation(number)): [1, 2, 3, 4, 5, 6] for number in numbers}
    assert order == {**whole, str(conversation(numbers[0])): [1, 2, 3, 4, 5]}
    [letter] = await letters(owner_db)
    assert "MessageSizeTooLarge" in letter["error"]
    assert (await relay.metrics())['waybill_relay_failed_batches_total{kind="permanent"}'] >= 1
    await relay.ready()


@pytest.mark.promise("I4")
async def test_a_killed_relays_parked_rows_are_the_next_ones(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    """The queue outlives its relay: later rows wait behind it, and go out in order when the first one is dead."""
    first = fleet.start(settings=FAR)
    bad = await add(owner_db, 1, seq=1, headers=["odd"])
    behind = [await add(owner_db, 1, seq=2)]
    await parked_as(owner_db, {bad: "failed", behind[0]: "waiting"})
    first.kill()
    behind.append(await add(owner_db, 1, seq=3))
    second = fleet.start(settings={**SOON, "WAYBILL_RELAY_MAX_ATTEMPTS": "2"})
    await second.ready()
    await parked_as(owner_db, {bad: "failed", behind[0]: "waiting", behind[1]: "waiting"})
    await owner_db.execute("UPDATE outbox_parked SET retry_at = now() WHERE id = $1", bad)
    await parked_as(owner_db, {bad: "dead", behind[0]: "sent", behind[1]: "sent"})
    await add(owner_db, 1, seq=4)
    await drained(owner_db, timeout=60)
    records = await all_records(stores.kafka, [relay_topics.events])
    assert order_per_conversation(records) == {str(conversation(1)): [2, 3, 4]}


async def test_a_topics_own_limit_holds_for_batches_and_rows(
    *,
    owner_db: asyncpg.Connection,
    database: Database,
    stores: Stores,
    topic_prefix: str,
    tmp_path: Path,
    admin: AIOKafkaAdminClient,
) -> None:
    """A limit that is known beforehand costs no refused batch."""
    topics = Topics(topic_prefix)
    await make_topic(admin, topics.events, {"max.message.bytes": "30000"})
    await ensure_topics(stores.kafka, topics)
    writer = Writer(owner_db, [1])
    await writer.write(300)
    bad = await add(owner_db, same_shard(1), seq=1, payload=b"x" * 31_000)
    with relays(database, stores.kafka, topic_prefix, tmp_path) as fleet:
        relay = fleet.start(settings=SOON)
        await parked_as(owner_db, {bad: "dead"})
        await drained(owner_db, timeout=30)
        order = order_per_conversation(await all_records(stores.kafka, [topics.events]))
        assert order == {key: list(range(1, 301)) for key in writer.last_seq}
        [letter] = await letters(owner_db)
        assert letter["error"].endswith("of 30000 bytes")
        assert (await relay.metrics())['waybill_relay_failed_batches_total{kind="permanent"}'] == 0


async def named(relay: Relay, check: str) -> str:
    async def failing() -> str | None:
        return ((await relay.readyz()) or {"failing": {}})["failing"].get(check)

    return await until(failing, timeout=60, what=f"readyz that names {check}")


@pytest.mark.promise("I5")
async def test_a_bad_deploy_stops_its_shard_and_kills_nothing(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    """Every row is refused: the shard stops after a few, keeps that over a restart, and goes on once told to."""
    limits = {"WAYBILL_RELAY_BREAKER_LEAST": "3", "WAYBILL_RELAY_BREAKER_SHARE": "0.5"}
    relay = fleet.start(settings={**FAR, **limits})
    await relay.ready()
    numbers = [number for number in range(2000) if shard_of(number) == shard_of(1)][:20]
    bad = [await add(owner_db, number, seq=1, headers=["odd"]) for number in numbers]
    fine = await add(owner_db, other_shard(1), seq=1)
    told = await named(relay, "shards")
    assert told.startswith(f"shard {shard_of(1)} stands still: 3 of the last 3 rows were refused")
    assert f"row {bad[2]}: not serialisable" in told
    await parked_as(owner_db, dict.fromkeys(bad[:2], "failed"))
    assert await owner_db.fetchval("SELECT cursor_id FROM outbox_shard WHERE shard = $1", shard_of(1)) == bad[1]
    assert (await relay.metrics())["waybill_relay_stopped_shards"] == 1

    async def sent() -> bool:
        cursor = await owner_db.fetchval(
            "SELECT cursor_id FROM outbox_shard WHERE shard = $1", shard_of(other_shard(1))
        )
        return bool(cursor == fine)

    await until(sent, timeout=30, what="the other shard's row")
    relay.kill()
    relay.start()
    assert await named(relay, "shards") == told, "a restart is no excuse"
    # The deployment was mended: what it wrote is fine now.
    await owner_db.execute("UPDATE outbox SET headers = '{}' WHERE id > $1", bad[1])
    assert await owner_db.fetchval("SELECT resume_shard($1)", shard_of(1))
    await drained(owner_db, timeout=60)
    await relay.ready()
    assert len(await all_records(stores.kafka, [relay_topics.events])) == len(bad) - 2 + 1
    assert await letters(owner_db) == []


async def test_a_stopped_shard_goes_on_by_itself_when_kafka_takes_its_rows(
    owner_db: asyncpg.Connection,
    stores: Stores,
    relay_topics: Topics,
    fleet: Relays,
    admin: AIOKafkaAdminClient,
) -> None:
    limits = {"WAYBILL_RELAY_BREAKER_LEAST": "3", "WAYBILL_RELAY_BREAKER_SHARE": "0.5"}
    relay = fleet.start(settings={**FAR, **limits})
    numbers = [number for number in range(2000) if shard_of(number) == shard_of(1)][:20]
    ids = [await add(owner_db, number, seq=1, topic="later.v1") for number in numbers]
    await named(relay, "shards")
    await parked_as(owner_db, dict.fromkeys(ids[:2], "failed"))
    await admin.create_topics([NewTopic(f"{relay_topics.prefix}.later.v1", PARTITIONS, 1)])
    await drained(owner_db, timeout=120)
    await relay.ready()
    assert await owner_db.fetchval("SELECT stopped_reason FROM outbox_shard WHERE shard = $1", shard_of(1)) is None
    await parked_as(owner_db, dict.fromkeys(ids[:2], "failed"))


# Dead letters.


async def dead_letter(db: asyncpg.Connection, number: int, seq: int = 1) -> tuple[int, int]:
    """A row that dies, mended afterwards; its ids in the outbox and as a letter."""
    bad = await add(db, number, seq=seq, headers=["odd"])

    async def died() -> int | None:
        return await db.fetchval("SELECT dead_id FROM outbox_dead WHERE outbox_id = $1 AND state = 'dead'", bad)

    dead_id = await until(died, timeout=30, what="the death of a row")
    return bad, dead_id


async def ask(db: asyncpg.Connection, dead_id: int, *, mended: bool) -> str:
    """Ask for another try, as the console does; the state that comes of it."""
    if mended:
        await db.execute("UPDATE dead_letter SET headers = '{}' WHERE dead_id = $1", dead_id)
    await db.execute("UPDATE dead_letter SET state = 'retrying' WHERE dead_id = $1", dead_id)

    async def settled() -> str | None:
        state = await db.fetchval("SELECT state FROM dead_letter WHERE dead_id = $1", dead_id)
        return None if state == "retrying" else str(state)

    return await until(settled, timeout=30, what="the letter's end")


@pytest.mark.promise("protocol.7.late")
async def test_a_letter_that_is_tried_again_comes_late_and_says_so(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    relay = fleet.start(settings={**SOON, "WAYBILL_RELAY_MAX_ATTEMPTS": "1"})
    bad, dead_id = await dead_letter(owner_db, 1)
    await add(owner_db, 1, seq=2)
    await drained(owner_db, timeout=30)
    assert await ask(owner_db, dead_id, mended=False) == "dead"
    assert await ask(owner_db, dead_id, mended=True) == "sent"
    await add(owner_db, 1, seq=3)
    await drained(owner_db, timeout=30)
    records = await all_records(stores.kafka, [relay_topics.events])
    headers = [dict(record.headers) for record in records]
    assert [(one["seq"], one.get("late")) for one in headers] == [(b"2", None), (b"1", b"1"), (b"3", None)]
    [letter] = await letters(owner_db)
    assert (letter["attempts"], letter["kafka_offset"]) == (3, records[1].offset)
    told = await owner_db.fetch(
        "SELECT attempt, error IS NULL AS went FROM outbox_attempt WHERE id = $1 ORDER BY 1", bad
    )
    assert [tuple(one) for one in told] == [(1, False), (2, False), (3, True)]
    assert await state_of(owner_db, bad) == "sent"
    assert (await relay.metrics())['waybill_relay_published_total{result="late",topic="events.v1"}'] == 1


async def test_while_everything_behind_it_waits_a_letter_takes_its_own_place(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    """Two rows in a row are refused: the first is dead, the second holds the queue; the first comes back before it."""
    relay = fleet.start(settings={**FAR, "WAYBILL_RELAY_MAX_ATTEMPTS": "2"})
    first = await add(owner_db, 1, seq=1, headers=["odd"])
    second = await add(owner_db, 1, seq=2, headers=["odd"])
    third = await add(owner_db, 1, seq=3)
    await parked_as(owner_db, {first: "failed", second: "waiting", third: "waiting"})
    await owner_db.execute("UPDATE outbox_parked SET retry_at = now() WHERE id = $1", first)
    await parked_as(owner_db, {first: "dead", second: "failed", third: "waiting"})
    [letter] = await letters(owner_db)
    assert not letter["passed"]
    assert await ask(owner_db, letter["dead_id"], mended=True) == "sent"
    await owner_db.execute("UPDATE outbox SET headers = '{}' WHERE id = $1", second)
    await owner_db.execute("UPDATE outbox_parked SET retry_at = now() WHERE id = $1", second)
    await parked_as(owner_db, {first: "sent", second: "sent", third: "sent"})
    records = await all_records(stores.kafka, [relay_topics.events])
    assert [dict(record.headers).get("late") for record in records] == [None, None, None]
    assert order_per_conversation(records) == {str(conversation(1)): [1, 2, 3]}
    assert (await relay.metrics())['waybill_relay_attempts_total{outcome="sent"}'] == 3


async def test_letters_are_redriven_in_their_window_each_once_and_not_too_many(
    owner_db: asyncpg.Connection, fleet: Relays
) -> None:
    """The window is open now, and the letters are of yesterday."""
    now = await owner_db.fetchval("SELECT extract(hour FROM now() AT TIME ZONE 'UTC')::int")
    window = f"{(now - 1) % 24:02}:00-{(now + 2) % 24:02}:00"
    relay = fleet.start(settings={**SOON, "WAYBILL_RELAY_MAX_ATTEMPTS": "1"})
    await relay.ready()
    for number in range(1, 6):
        await dead_letter(owner_db, number)
    relay.kill()
    await owner_db.execute("UPDATE dead_letter SET died_at = died_at - interval '1 day' * (6 - dead_id)")
    await owner_db.execute("UPDATE dead_letter SET headers = '{}' WHERE dead_id <> 2")
    redriving = {"WAYBILL_RELAY_REDRIVE_WINDOW": window, "WAYBILL_RELAY_REDRIVE_CAP": "3"}
    for owner in ("ann", "ben"):
        fleet.start(owner, settings={**SOON, "WAYBILL_RELAY_MAX_ATTEMPTS": "1", **redriving})

    async def states() -> list[str]:
        return [row[0] for row in await owner_db.fetch("SELECT state FROM dead_letter ORDER BY dead_id")]

    async def done() -> bool:
        return await states() == ["sent", "dead", "sent", "dead", "dead"]

    await until(done, timeout=60, what="three that are redriven")
    actions = await owner_db.fetch("SELECT dead_id, action FROM dead_letter_action ORDER BY dead_id")
    assert [tuple(action) for action in actions] == [(1, "redrive"), (2, "redrive"), (3, "redrive")]


async def test_rewound_rows_are_published_again_and_a_mended_one_with_them(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    relay = fleet.start(settings={**SOON, "WAYBILL_RELAY_MAX_ATTEMPTS": "1"})
    first = await add(owner_db, 1, seq=1)
    bad, dead_id = await dead_letter(owner_db, 1, seq=2)
    last = await add(owner_db, 1, seq=3)
    await drained(owner_db, timeout=30)
    with pytest.raises(asyncpg.RaiseError, match=f"has published up to id {last} only"):
        await owner_db.fetchval("SELECT rewind_shard($1, $2, 'me')", shard_of(1), last + 1)
    with pytest.raises(asyncpg.RaiseError, match=f"begins at id {first}"):
        await owner_db.fetchval("SELECT rewind_shard($1, $2, 'me')", shard_of(1), first - 1)
    await owner_db.execute("UPDATE outbox SET headers = '{}' WHERE id = $1", bad)
    assert await owner_db.fetchval("SELECT rewind_shard($1, $2, 'me')", shard_of(1), bad) == last
    assert await owner_db.fetchval("SELECT state FROM dead_letter WHERE dead_id = $1", dead_id) == "rewound"
    await drained(owner_db, timeout=30)
    records = await all_records(stores.kafka, [relay_topics.events])
    assert [int(dict(record.headers)["seq"]) for record in records] == [1, 3, 2, 3]
    placed = await owner_db.fetch("SELECT from_id, to_id, base_offset FROM outbox_delivery ORDER BY base_offset")
    assert [tuple(row) for row in placed] == [(first, first, 0), (bad, last, 2)]
    await relay.ready()


async def test_a_relay_that_is_switched_off_publishes_nothing(owner_db: asyncpg.Connection, fleet: Relays) -> None:
    off = fleet.start(settings={**QUICK, "WAYBILL_RELAY_ENABLED": "false"})
    await off.ready()
    await add(owner_db, 1)
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_shard WHERE owner IS NOT NULL") == 0
    assert json.dumps(await off.readyz()) == '{"status": "ok", "failing": {}}'
    fleet.start(settings=QUICK)
    await drained(owner_db, timeout=60)
    await asyncio.to_thread(off.process.terminate)
    assert await off.ended() == 0


async def test_what_is_told_twice_counts_once(owner_db: asyncpg.Connection, database: Database) -> None:
    """The answer to a first telling may be lost, and somebody may have acted upon the letter before the second one."""
    ids = [await add(owner_db, 1, seq=seq) for seq in (1, 2)]
    async with open_pool(database.url("relay"), size=1, name="tests") as pool:
        shards, parking = ShardStore(pool, "ann", 60), ParkingStore(pool, "ann")
        [taken] = [one for one in await shards.take(64) if one.shard == shard_of(1)]
        held, queue = HeldShard(taken, 0), (conversation(1), "events.v1")
        parks = [Park(id_, queue[0], queue[1], uuid.uuid4(), "waiting") for id_ in ids]
        parks[0] = parks[0]._replace(outcome="failed", error="no", wait_ms=5)
        dead = [Settled(ids[0], 1, "dead", None, "no again")]
        for _ in range(2):
            assert await shards.park(Move(held.number, held.epoch, ids[1], [], parks))
        for _ in range(2):
            assert await parking.settle(held, queue, dead) == 1
            await owner_db.execute("UPDATE dead_letter SET state = 'discarded'")
        assert [letter["state"] for letter in await letters(owner_db)] == ["discarded"]
        attempts = await owner_db.fetch("SELECT id, attempt, error FROM outbox_attempt ORDER BY id, attempt")
        assert [tuple(attempt) for attempt in attempts] == [(ids[0], 1, "no"), (ids[0], 2, "no again")]
        fenced = HeldShard(taken._replace(epoch=taken.epoch - 1), 0)
        assert await parking.settle(fenced, queue, [Settled(ids[1], 0, "sent", 7)]) is None
        assert not await shards.park(Move(fenced.number, fenced.epoch, ids[1], [], parks))
        assert await state_of(owner_db, ids[1]) == "waiting"


async def test_a_letters_result_told_late_ends_no_later_try(owner_db: asyncpg.Connection, database: Database) -> None:
    """A first answer was lost, and somebody asked for another try before it was told again."""
    bad = await add(owner_db, 1)
    async with open_pool(database.url("relay"), size=1, name="tests") as pool:
        shards, parking = ShardStore(pool, "ann", 60), ParkingStore(pool, "ann")
        [taken] = [one for one in await shards.take(64) if one.shard == shard_of(1)]
        held = HeldShard(taken, 0)
        park = Park(bad, conversation(1), "events.v1", uuid.uuid4(), "dead", "no")
        assert await shards.park(Move(held.number, held.epoch, bad, [], [park]))
        [letter] = await letters(owner_db)
        again = "UPDATE dead_letter SET state = 'retrying'"
        await owner_db.execute(again)
        assert await parking.settle_letter(held, letter["dead_id"], 1, None, "no again")
        await owner_db.execute(again)
        assert not await parking.settle_letter(held, letter["dead_id"], 1, None, "no again")
        assert [letter["state"] for letter in await letters(owner_db)] == ["retrying"]
        assert await parking.settle_letter(held, letter["dead_id"], 2, 7, None)
        assert [letter["state"] for letter in await letters(owner_db)] == ["sent"]
