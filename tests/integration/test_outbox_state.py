"""Where a row is, and the documented statements that tell the way of an event: each has a known answer here."""

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from services.relay.shards import Delivery, Move, ShardStore
from shared.kafka import Topics
from shared.postgres import Pool, open_pool
from shared.statements import statements
from tests.databases import Database
from tests.relays import Relays, Writer, all_records, conversation, drained, shard_of
from tests.stack import Stores

pytest_plugins = ["tests.relay_fixtures"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations" / "tracing.md"
TRACING = statements(str(DOCUMENT))

SHARD = shard_of(1)

INSERT = """
    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
    VALUES ($1, $2, $3, uuidv7(), $4, 'waybill.event.message', '/waybill/ingest', '', clock_timestamp())
    RETURNING id
"""


@pytest.fixture
async def console(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.url("console"))
    yield connection
    await connection.close()


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=2, name="test") as made:
        yield made


async def rows(owner_db: asyncpg.Connection, *topics: str) -> list[int]:
    """A row of conversation 1 for each of these topics, in this order; their ids."""
    return [
        await owner_db.fetchval(INSERT, SHARD, conversation(1), number, topic)
        for number, topic in enumerate(topics, start=1)
    ]


async def advance(pool: Pool, owner_db: asyncpg.Connection, to_id: int, *deliveries: Delivery) -> None:
    await owner_db.execute("UPDATE outbox_shard SET owner = 'ann', epoch = 3 WHERE shard = $1", SHARD)
    assert await ShardStore(pool, "ann", 60).advance([Move(SHARD, 3, to_id, deliveries)]) == set()


async def park(owner_db: asyncpg.Connection, id_: int, state: str, errors: list[str | None], **columns: object) -> None:
    """Park a row that was tried with these errors, None for the try that succeeded."""
    values = {"retry_at": None, "kafka_offset": None, "settled_at": None, **columns}
    await owner_db.execute(
        "INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state, attempts, retry_at,"
        " kafka_offset, settled_at)"
        " SELECT shard, id, conversation_id, topic, event_id, $2, $3, $4, $5, $6 FROM outbox WHERE id = $1",
        id_,
        state,
        len(errors),
        *values.values(),
    )
    await owner_db.execute(
        "INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)"
        " SELECT $1, $2, n, e, 'ben', n FROM unnest($3::text[]) WITH ORDINALITY AS t (e, n)",
        SHARD,
        id_,
        errors,
    )


async def states(console: asyncpg.Connection) -> dict[int, dict[str, Any]]:
    return {row["id"]: dict(row) for row in await console.fetch("SELECT * FROM outbox_state")}


async def test_above_the_cursor_a_row_waits_or_is_being_sent(
    pool: Pool, owner_db: asyncpg.Connection, console: asyncpg.Connection
) -> None:
    [id_] = await rows(owner_db, "events.v1")

    async def state() -> tuple[Any, ...]:
        found = (await states(console))[id_]
        return tuple(found[name] for name in ("state", "owner", "epoch", "attempts", "partition", "kafka_offset"))

    nothing = ("PENDING", None, None, 0, None, None)
    assert await state() == nothing
    await owner_db.execute(
        "UPDATE outbox_shard SET owner = 'ann', epoch = 4, lease_until = clock_timestamp() + interval '1 minute'"
    )
    assert await state() == ("SENDING", "ann", 4, 0, None, None)
    await owner_db.execute("UPDATE outbox_shard SET stopped_at = clock_timestamp(), stopped_reason = 'too many'")
    assert (await state())[0] == "PENDING"
    await owner_db.execute("UPDATE outbox_shard SET stopped_at = NULL, lease_until = clock_timestamp()")
    assert await state() == nothing


async def test_parked_rows_have_states_of_their_own(
    pool: Pool, owner_db: asyncpg.Connection, console: asyncpg.Connection
) -> None:
    now = await owner_db.fetchval("SELECT clock_timestamp()")
    sent, dead, failed, first, second = ids = await rows(owner_db, *["events.v1"] * 5)
    await advance(pool, owner_db, ids[-1])
    await park(owner_db, sent, "sent", ["too large", None], kafka_offset=70, settled_at=now)
    await park(owner_db, dead, "dead", ["too large", "still too large"], settled_at=now)
    await park(owner_db, failed, "failed", ["no such topic"], retry_at=now)
    await park(owner_db, first, "waiting", [])
    await park(owner_db, second, "waiting", [])
    found = await states(console)
    names = (
        "state",
        "attempts",
        "error",
        "retry_at",
        "waits_for",
        "partition",
        "kafka_offset",
        "acked_at",
        "owner",
        "epoch",
    )
    assert {id_: tuple(row[name] for name in names) for id_, row in found.items()} == {
        sent: ("SENT", 2, "too large", None, None, SHARD, 70, now, "ben", 2),
        dead: ("DEAD", 2, "still too large", None, None, None, None, None, "ben", 2),
        failed: ("FAILED", 1, "no such topic", now, None, None, None, None, "ben", 1),
        first: ("PENDING", 0, None, None, failed, None, None, None, None, None),
        second: ("PENDING", 0, None, None, failed, None, None, None, None, None),
    }


@pytest.mark.promise("I4")
async def test_an_offset_is_the_rank_among_what_the_delivery_holds(
    pool: Pool, owner_db: asyncpg.Connection, console: asyncpg.Connection
) -> None:
    """Ids have holes, topics mix, and parked rows are counted out."""
    e, r = "events.v1", "receipts.v1"
    ids = await rows(owner_db, e, r, e, e, r, e, e, e)
    await owner_db.execute("UPDATE outbox_shard SET cursor_id = 0")
    await park(owner_db, ids[2], "dead", ["too large"])
    await park(owner_db, ids[6], "sent", ["too large", None], kafka_offset=900)
    await advance(pool, owner_db, ids[4], Delivery(ids[0], ids[3], e, 100), Delivery(ids[1], ids[4], r, 50))
    await advance(pool, owner_db, ids[7], Delivery(ids[5], ids[7], e, 200))
    found = await states(console)
    assert [found[id_]["kafka_offset"] for id_ in ids] == [100, 50, None, 101, 51, 200, 900, 201]
    assert [found[id_]["partition"] for id_ in ids] == [SHARD, SHARD, None, *[SHARD] * 5]
    assert {found[id_]["state"] for id_ in ids} == {"SENT", "DEAD"}
    assert (found[ids[0]]["owner"], found[ids[0]]["epoch"]) == ("ann", 3)
    assert found[ids[0]]["acked_at"] is not None


async def test_offsets_outlive_the_partition_that_their_delivery_began_in(
    pool: Pool, owner_db: asyncpg.Connection, console: asyncpg.Connection
) -> None:
    e, r = "events.v1", "receipts.v1"
    before = await rows(owner_db, e, r, e, e)
    await owner_db.execute("SELECT close_outbox_partition('0 s')")
    after = await rows(owner_db, r, e, r, e)
    await park(owner_db, before[2], "dead", ["too large"])
    placed = [
        Delivery(before[0], after[1], e, 10),
        Delivery(before[1], after[2], r, 50),
        Delivery(after[3], after[3], e, 90),
    ]
    await advance(pool, owner_db, after[-1], *placed)

    async def offsets() -> dict[int, int | None]:
        return {id_: row["kafka_offset"] for id_, row in (await states(console)).items()}

    expected = dict(zip(before + after, [10, 50, None, 11, 51, 12, 52, 90], strict=True))
    assert await offsets() == expected
    assert await owner_db.fetchval("SELECT drop_outbox_partition('0 s')") == "dropped"
    assert await offsets() == {id_: expected[id_] for id_ in after}


async def test_a_rank_that_cannot_be_counted_is_not_told(
    pool: Pool, owner_db: asyncpg.Connection, console: asyncpg.Connection
) -> None:
    ids = await rows(owner_db, *["events.v1"] * 3)
    await advance(pool, owner_db, ids[-1], Delivery(ids[0], ids[-1], "events.v1", 10))
    await owner_db.execute("DELETE FROM outbox WHERE id = $1", ids[0])
    found = await states(console)
    assert {(row["state"], row["kafka_offset"]) for row in found.values()} == {("SENT", None)}


@pytest.mark.promise("I4")
async def test_every_row_is_where_the_view_says(
    fleet: Relays, owner_db: asyncpg.Connection, console: asyncpg.Connection, stores: Stores, relay_topics: Topics
) -> None:
    """Published by relays of which one is killed, over the bound of a partition."""
    writer = Writer(owner_db, range(8))
    for number in range(3):
        relay = fleet.start()
        for _ in range(20):
            await writer.write(100)
        if number:
            await owner_db.execute("SELECT close_outbox_partition('0 s')")
        await relay.ready()
        await drained(owner_db, timeout=60)
        relay.kill()
    found = {str(row["event_id"]): row for row in await console.fetch("SELECT * FROM outbox_state")}
    assert len(found) == 6000
    assert {row["state"] for row in found.values()} == {"SENT"}
    copies: dict[str, set[tuple[int, int]]] = {}
    for record in await all_records(stores.kafka, [relay_topics.events]):
        copies.setdefault(dict(record.headers)["ce_id"].decode(), set()).add((record.partition, record.offset))
    wrong = {
        event_id for event_id, row in found.items() if (row["partition"], row["kafka_offset"]) not in copies[event_id]
    }
    assert wrong == set()


# The documented statements.


@pytest.fixture
async def chat(owner_db: asyncpg.Connection) -> uuid.UUID:
    """Six events of anna and ben. cleo came at seq 3, dora left at seq 4, and this is what devices hold.

    anna: all; ben: 1 to 4, read up to 2, not yet his own 6; cleo: nothing; dora: 1.
    """
    id_ = conversation(1)
    await owner_db.execute(
        "INSERT INTO conversation (conversation_id, shard, kind, history, creator_id, last_seq, created_at)"
        " VALUES ($1, $2, 'group', 'joined', 'anna', 6, clock_timestamp())",
        id_,
        SHARD,
    )
    await owner_db.execute(
        "INSERT INTO member (conversation_id, user_id, role, visible) VALUES ($1, 'anna', 'admin', '{[1,)}'),"
        " ($1, 'ben', 'member', '{[1,)}'), ($1, 'cleo', 'member', '{[3,)}'), ($1, 'dora', 'member', '{[1,5)}')",
        id_,
    )
    await owner_db.execute(
        "INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, body, created_at)"
        " SELECT $1, n, uuidv7(), 'message', CASE WHEN n % 2 = 1 THEN 'anna' ELSE 'ben' END, 'c' || n, '', '{}',"
        " clock_timestamp() - make_interval(hours => 7 - n) FROM generate_series(1, 6) AS n",
        id_,
    )
    await owner_db.execute(
        "INSERT INTO receipt (conversation_id, user_id, delivered, delivered_seq, read_seq) VALUES"
        " ($1, 'anna', '{[1,7)}', 6, 6), ($1, 'ben', '{[1,5)}', 4, 2), ($1, 'dora', '{[1,2)}', 1, 0)",
        id_,
    )
    await owner_db.execute(
        "INSERT INTO device_cursor (conversation_id, user_id, device_id, delivered) VALUES"
        " ($1, 'ben', 'phone', '{[1,5)}'), ($1, 'ben', 'desk', '{[1,3)}'), ($1, 'dora', 'phone', '{[1,2)}')",
        id_,
    )
    return id_


@pytest.fixture
async def event_4(owner_db: asyncpg.Connection, pool: Pool, chat: uuid.UUID) -> uuid.UUID:
    """The event at seq 4, whose row was refused once and then sent, between others of its conversation."""
    await owner_db.execute(
        "INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)"
        " SELECT $2, conversation_id, seq, event_id, 'events.v1', 'waybill.event.message', '/waybill/ingest', '',"
        " created_at FROM event WHERE conversation_id = $1 ORDER BY seq",
        chat,
        SHARD,
    )
    ids = [row[0] for row in await owner_db.fetch("SELECT id FROM outbox ORDER BY id")]
    await park(owner_db, ids[3], "sent", ["too large", None], kafka_offset=77)
    await advance(pool, owner_db, ids[5], Delivery(ids[0], ids[5], "events.v1", 40))
    found: uuid.UUID = await owner_db.fetchval("SELECT event_id FROM outbox WHERE id = $1", ids[3])
    return found


def told(rows: list[asyncpg.Record], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.usefixtures("event_4")
async def test_an_event_is_found_by_what_people_know_of_it(
    console: asyncpg.Connection, chat: uuid.UUID, event_4: uuid.UUID
) -> None:
    assert await console.fetchval(TRACING["event_by_seq"], chat, 4) == event_4
    assert await console.fetchval(TRACING["event_by_client_id"], chat, "ben", "c4") == event_4


async def test_who_sent_it(console: asyncpg.Connection, chat: uuid.UUID, event_4: uuid.UUID) -> None:
    found = await console.fetch(TRACING["who_sent_it"], event_4)
    assert told(found, "conversation_id", "seq", "sender_id", "client_msg_id") == [(chat, 4, "ben", "c4")]


async def test_to_whom(console: asyncpg.Connection, chat: uuid.UUID, event_4: uuid.UUID) -> None:
    names = ("user_id", "is_sender", "still_member", "delivered", "read", "devices")
    assert told(await console.fetch(TRACING["to_whom"], event_4), *names) == [
        ("anna", False, True, True, True, []),
        ("ben", True, True, True, False, ["phone"]),
        ("cleo", False, True, False, False, []),
        ("dora", False, False, False, False, []),
    ]
    event_2 = await console.fetchval(TRACING["event_by_seq"], chat, 2)
    assert [row["user_id"] for row in await console.fetch(TRACING["to_whom"], event_2)] == ["anna", "ben", "dora"]


async def test_how_often_and_why(console: asyncpg.Connection, chat: uuid.UUID, event_4: uuid.UUID) -> None:
    assert told(await console.fetch(TRACING["how_often_tried"], event_4), "state", "attempts") == [("SENT", 2)]
    assert told(await console.fetch(TRACING["why_it_failed"], event_4), "attempt", "error") == [
        (1, "too large"),
        (2, None),
    ]
    event_5 = await console.fetchval(TRACING["event_by_seq"], chat, 5)
    assert told(await console.fetch(TRACING["how_often_tried"], event_5), "state", "attempts") == [("SENT", 1)]
    assert await console.fetch(TRACING["why_it_failed"], event_5) == []


async def test_where_in_kafka(console: asyncpg.Connection, chat: uuid.UUID, event_4: uuid.UUID) -> None:
    names = ("topic", "partition", "kafka_offset")
    assert told(await console.fetch(TRACING["where_in_kafka"], event_4), *names) == [("events.v1", SHARD, 77)]
    event_5 = await console.fetchval(TRACING["event_by_seq"], chat, 5)
    assert told(await console.fetch(TRACING["where_in_kafka"], event_5), *names) == [("events.v1", SHARD, 43)]


async def test_a_letter_tells_more_when_the_outbox_is_gone(
    console: asyncpg.Connection, owner_db: asyncpg.Connection, event_4: uuid.UUID
) -> None:
    dead_id = await owner_db.fetchval(
        "INSERT INTO dead_letter (origin, shard, outbox_id, conversation_id, seq, event_id, topic, type, source,"
        " headers, payload, created_at, state, attempts, error, settled_at)"
        " SELECT 'outbox', shard, id, conversation_id, seq, event_id, topic, type, source,"
        " headers, payload, created_at, 'discarded', 2, 'too large', clock_timestamp()"
        " FROM outbox WHERE event_id = $1 RETURNING dead_id",
        event_4,
    )
    await owner_db.execute("INSERT INTO dead_letter_action VALUES ($1, now(), 'discard', 'olga', 'spam')", dead_id)
    await owner_db.execute("DELETE FROM outbox_parked; DROP TABLE outbox_p0")
    assert await console.fetch(TRACING["how_often_tried"], event_4) == []
    assert len(await console.fetch(TRACING["why_it_failed"], event_4)) == 2
    found = await console.fetch(TRACING["what_became_of_its_letter"], event_4)
    assert told(found, "dead_id", "state", "error", "action", "who", "reason") == [
        (dead_id, "discarded", "too large", "discard", "olga", "spam")
    ]


async def test_what_is_not_delivered_by_user_and_age(console: asyncpg.Connection, chat: uuid.UUID) -> None:
    """One's own events do not count, nor what one may not read; a former member still may."""

    async def missing(first: str, users: int, age: timedelta, events: int) -> list[tuple[Any, ...]]:
        found = await console.fetch(TRACING["not_yet_delivered"], first, users, age, events)
        return told(found, "user_id", "seq")

    everything = [("ben", 5), ("cleo", 3), ("cleo", 4), ("cleo", 5), ("cleo", 6), ("dora", 2), ("dora", 3), ("dora", 4)]
    assert await missing("", 10, timedelta(0), 10) == everything
    assert await missing("", 2, timedelta(0), 10) == [("ben", 5)]
    assert await missing("ben" + chr(1), 1, timedelta(0), 2) == [("cleo", 3), ("cleo", 4)]
    assert await missing("", 10, timedelta(hours=3, minutes=30), 10) == [("cleo", 3), ("dora", 2), ("dora", 3)]
    ages = [row["age"] for row in await console.fetch(TRACING["not_yet_delivered"], "cleo", 1, timedelta(0), 10)]
    assert ages == sorted(ages, reverse=True)


def test_every_statement_stands_in_the_document() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in TRACING if f"`{name}`" not in document] == []
