"""Partitions made ahead, closed by time and dropped behind, beside writers that never wait for it."""

import asyncio
import random
import secrets
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from deploy import migrate
from services.ingest.readiness import Readiness
from services.relay import shards
from services.relay.held import HeldShard
from services.relay.life import Life
from services.relay.metrics import (
    LETTERS_EXPIRED,
    OLDEST_LETTER,
    PARTITIONS_AHEAD,
    PARTITIONS_BEHIND,
    RETENTION_PUT_OFF,
)
from services.relay.retention import PARTITIONS_MADE_AHEAD, Periods, Retention
from services.relay.shards import Delivery, Move, ShardStore, Taken
from services.relay.tail import Tail
from shared.postgres import Pool, open_pool
from tests.databases import ROLE_PASSWORD, Database
from tests.relays import Writer, conversation, shard_of
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

SIZE = 1 << 26
DAY_S = 86_400.0
PERIODS = Periods(DAY_S, 7 * DAY_S, 30 * DAY_S)

CLOSE = "SELECT close_outbox_partition('1 day')"
CLOSE_NOW = "SELECT close_outbox_partition('0 s')"
DROP = "SELECT drop_outbox_partition('7 days')"
DROP_NOW = "SELECT drop_outbox_partition('0 s')"


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=4, name="test") as made:
        yield made


@pytest.fixture
async def writer(owner_db: asyncpg.Connection) -> Writer:
    return Writer(owner_db, [1, 2])


async def bounds(connection: asyncpg.Connection | Pool, table: str = "outbox") -> list[tuple[int, int]]:
    """Of the table's partitions, as numbers of partitions."""
    rows = await connection.fetch("SELECT low, high FROM outbox_partitions($1::text::regclass) ORDER BY low", table)
    return [(row["low"] // SIZE, row["high"] // SIZE) for row in rows]


async def age(owner_db: asyncpg.Connection, days: int) -> None:
    """Let the rows that there are be so old."""
    await owner_db.execute("UPDATE outbox SET created_at = clock_timestamp() - make_interval(days => $1)", days)


async def publish_all(owner_db: asyncpg.Connection) -> None:
    """And log it."""
    for table in ("outbox_shard", "outbox_journal"):
        await owner_db.execute(
            f"UPDATE {table} AS s SET cursor_id = o.last"
            " FROM (SELECT shard, max(id) AS last FROM outbox GROUP BY shard) AS o WHERE o.shard = s.shard"
        )


async def closed_partition(owner_db: asyncpg.Connection, writer: Writer, *, days: int = 8) -> None:
    """A first partition of published rows that are so old, and nothing after it."""
    await writer.write(6)
    await age(owner_db, days)
    await publish_all(owner_db)
    assert await owner_db.fetchval(CLOSE_NOW) == SIZE


async def park(owner_db: asyncpg.Connection, state: str, *, letter: bool = False) -> int:
    """Park the first row of conversation 1, tried twice; its id."""
    row = await owner_db.fetchrow(
        "SELECT * FROM outbox WHERE conversation_id = $1 ORDER BY id LIMIT 1", conversation(1)
    )
    assert row is not None
    await owner_db.execute(
        "INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state, attempts)"
        " VALUES ($1, $2, $3, $4, $5, $6, 2)",
        *(row[name] for name in ("shard", "id", "conversation_id", "topic", "event_id")),
        state,
    )
    await owner_db.execute(
        "INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)"
        " SELECT $1, $2, n, 'no', 'ann', 1 FROM generate_series(1, 2) AS n",
        row["shard"],
        row["id"],
    )
    if letter:
        await die(owner_db, row["id"], "dead", days=0)
    return int(row["id"])


async def die(
    owner_db: asyncpg.Connection, outbox_id: int, state: str, *, days: int, action_days: int | None = None
) -> int:
    """A letter of shard 1 or of the row's, that died, and was settled if the state says so, so many days ago."""
    dead_id: int = await owner_db.fetchval(
        "INSERT INTO dead_letter (origin, shard, outbox_id, conversation_id, event_id, topic, type, source, headers,"
        " payload, created_at, state, attempts, error, died_at, settled_at)"
        " SELECT 'outbox', coalesce((SELECT shard FROM outbox WHERE id = $1), 1), $1, gen_random_uuid(), uuidv7(),"
        " 'events.v1', 't', 's', '{}', '', t, $2, 2, 'too large', t,"
        " CASE WHEN $2 NOT IN ('dead', 'retrying') THEN t END"
        " FROM (SELECT clock_timestamp() - make_interval(days => $3) AS t) AS x RETURNING dead_id",
        outbox_id,
        state,
        days,
    )
    await owner_db.execute(
        "INSERT INTO dead_letter_action (dead_id, at, action, who)"
        " SELECT $1, clock_timestamp() - make_interval(days => $2), 'retry', 'ann'",
        dead_id,
        days if action_days is None else action_days,
    )
    return dead_id


@asynccontextmanager
async def held(database: Database, statement: str) -> AsyncIterator[asyncpg.Connection]:
    """Somebody who has run a statement in a transaction that stays open."""
    connection = await asyncpg.connect(database.owner_url)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(statement)
    try:
        yield connection
    finally:
        await transaction.rollback()
        await connection.close()


WAITING = """
    SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
    WHERE NOT l.granted AND d.datname = current_database()
"""
CLOSINGS = 12
NEAR_THE_BOUND = """
    SELECT setval('outbox_id_seq', greatest(last_value, (last_value / (1 << 26) + 1) * (1 << 26) - 40))
    FROM outbox_id_seq
    WHERE (SELECT count(*) FROM outbox_partitions('outbox') WHERE low > last_value) > 2
"""

A_WRITE = (
    "INSERT INTO outbox (shard, conversation_id, event_id, topic, type, source, payload, created_at)"
    " VALUES (1, gen_random_uuid(), uuidv7(), 'events.v1', '', '', '', clock_timestamp())"
)


async def writes_beside(database: Database, pool: Pool, statement: str) -> None:
    """The statement does not get its lock; a write that came while it waited is done once it has given up."""
    other = await asyncpg.connect(database.url("ingest"))
    try:
        asking = asyncio.create_task(pool.fetchval(statement))
        await until(lambda: other.fetchval(WAITING), timeout=5, what="waiting for the lock")
        await other.execute(A_WRITE, timeout=5)
        with pytest.raises(asyncpg.LockNotAvailableError):
            await asking
    finally:
        await other.close()


# Made ahead.


async def test_partitions_are_made_ahead_for_rows_and_deliveries(pool: Pool, owner_db: asyncpg.Connection) -> None:
    assert await bounds(pool) == [(n, n + 1) for n in range(16)]
    assert await bounds(pool, "outbox_delivery") == [(0, 2), *((n, n + 1) for n in range(2, 16))]
    await owner_db.execute("SELECT setval('outbox_id_seq', $1)", 3 * SIZE + 5)
    assert await pool.fetchval("SELECT make_outbox_partitions($1)", 14) == 2
    assert await pool.fetchval("SELECT make_outbox_partitions($1)", 14) == 0
    assert (await bounds(pool))[-1] == (await bounds(pool, "outbox_delivery"))[-1] == (17, 18)
    await owner_db.execute("SELECT setval('outbox_id_seq', $1)", 17 * SIZE)
    await Writer(owner_db, [1]).write(1)
    indexes = "SELECT count(*) FROM pg_index WHERE indrelid = $1::text::regclass AND indisvalid"
    for table in ("outbox", "outbox_delivery"):
        assert await owner_db.fetchval(indexes, f"{table}_p17") == await owner_db.fetchval(indexes, f"{table}_p3")


async def test_making_waits_for_nobody_and_nobody_for_it(database: Database, pool: Pool, writer: Writer) -> None:
    async with held(database, f"{A_WRITE}; SELECT FROM outbox; SELECT FROM outbox_delivery"):
        making = pool.fetchval("SELECT make_outbox_partitions(20)")
        assert await making == 5
    async with pool.acquire() as relay, relay.transaction():
        assert await relay.fetchval("SELECT make_outbox_partitions(25)") == 5
        await asyncio.wait_for(writer.write(3), 5)


async def test_one_relay_at_a_time(database: Database, pool: Pool) -> None:
    async with held(database, "SELECT make_outbox_partitions(16)"):
        for statement in (
            "SELECT make_outbox_partitions(20)", CLOSE_NOW, DROP_NOW, "SELECT drop_delivery_partition()",
            "SELECT forget_parked(10)", "SELECT summarise_outbox()",
        ):  # fmt: skip
            assert await pool.fetchval(statement) is None
        assert await pool.fetch("SELECT expire_letters('0 s', 10)") == []


# Closed by time.


async def test_a_partition_is_closed_once_its_first_row_is_old(
    pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    assert await pool.fetchval(CLOSE_NOW) is None, "an empty one stays"
    await writer.write(5)
    await age(owner_db, 2)
    await writer.write(5)
    assert await pool.fetchval("SELECT close_outbox_partition('3 days')") is None
    assert await pool.fetchval(CLOSE) == SIZE
    assert await pool.fetchval(CLOSE_NOW) is None, "the next one is empty"
    shown = await pool.fetchval("SELECT last_value FROM outbox_id_seq")
    await writer.write(1)
    assert await pool.fetchval("SELECT max(id) FROM outbox") == SIZE, "no id is left out"
    assert await pool.fetchval("SELECT last_value FROM outbox_id_seq") > shown, "who looks at it sees each id drawn"
    assert await pool.fetchval(CLOSE) is None, "its first row is young"
    assert await pool.fetchval(CLOSE_NOW) == 2 * SIZE


async def test_no_partition_is_closed_before_the_next_one_is_there(pool: Pool, owner_db: asyncpg.Connection) -> None:
    await owner_db.execute("SELECT setval('outbox_id_seq', $1)", 15 * SIZE)
    await Writer(owner_db, [1]).write(1)
    assert await pool.fetchval(CLOSE_NOW) is None
    assert await pool.fetchval("SELECT make_outbox_partitions(1)") == 1
    assert await pool.fetchval(CLOSE_NOW) == 16 * SIZE


@pytest.mark.promise("I4")
async def test_a_writer_that_has_drawn_an_id_puts_the_closing_off(
    database: Database, pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    await writer.write(5)
    async with held(database, A_WRITE):
        await writes_beside(database, pool, CLOSE_NOW)
        assert await owner_db.fetchval("SELECT last_value FROM outbox_id_seq") < SIZE - 1
    assert await pool.fetchval(CLOSE_NOW) == SIZE


@pytest.mark.promise("I4")
async def test_closing_beside_writers_loses_no_row_and_keeps_the_order(
    database: Database, owner_db: asyncpg.Connection
) -> None:
    """Each closing begins with few ids left, so that writers pass the bound by themselves, too."""
    shards = {number: HeldShard(Taken(number, 1, 0), 0.0) for number in range(64)}
    seen: dict[str, list[int]] = defaultdict(list)
    writers: list[Writer] = []
    closings = 0

    def take() -> None:
        for shard in shards.values():
            for row in shard.rows:
                seen[str(row["conversation_id"])].append(row["seq"])
            shard.rows.clear()

    async def write(number: int) -> None:
        chance = random.Random(number)
        connection = await asyncpg.connect(database.owner_url)
        own = Writer(connection, range(number * 20, number * 20 + 20))
        writers.append(own)
        try:
            while closings < CLOSINGS:
                async with connection.transaction():
                    await own.write(chance.randint(1, 5))
                    await connection.execute("SELECT pg_sleep($1)", chance.uniform(0, 0.004))
        finally:
            await connection.close()

    async def close(pool: Pool) -> None:
        nonlocal closings
        while closings < CLOSINGS:
            try:
                await pool.fetchval("SELECT make_outbox_partitions(5)")
                closings += await pool.fetchval(CLOSE_NOW) is not None
            except asyncpg.LockNotAvailableError:
                continue

    async def near_the_bound() -> None:
        while closings < CLOSINGS:
            async with owner_db.transaction():
                await owner_db.execute("LOCK TABLE ONLY outbox IN SHARE ROW EXCLUSIVE MODE")
                await owner_db.execute(NEAR_THE_BOUND)
            await owner_db.execute("SELECT pg_sleep(0.02)")

    async with open_pool(database.url("relay"), size=3, name="test") as pool, pool.acquire() as connection:
        tail = Tail(pool, shards, batch_size=100, longest_wait_s=0.001)

        async def read() -> None:
            while True:
                await tail.read_once(connection)
                take()

        reading = asyncio.create_task(read())
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(
                    close(pool), close(pool), near_the_bound(), *(write(number) for number in range(8))
                )
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        while (await tail.read_once(connection))[0]:
            take()
    assert seen == {key: list(range(1, last + 1)) for own in writers for key, last in own.last_seq.items()}
    assert await owner_db.fetchval("SELECT count(DISTINCT id >> 26) FROM outbox") > CLOSINGS


async def test_ingest_sees_room_before_and_after(
    database: Database, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    async with open_pool(database.url("ingest"), size=1, name="test") as ingest:
        ready = Readiness(ingest)
        assert await ready.postgres() is None
        await writer.write(1)
        await owner_db.execute(CLOSE_NOW)
        assert await ready.postgres() is None
        await owner_db.execute("SELECT setval('outbox_id_seq', $1, false)", 15 * SIZE)
        assert await ready.postgres() is None, "nothing of the last one is used"
        await owner_db.execute("SELECT setval('outbox_id_seq', $1)", 16 * SIZE - 5)
        assert "more ids only" in (await ready.postgres() or "")
        await owner_db.execute("SELECT make_outbox_partitions(1)")
        assert await ready.postgres() is None


# Dropped behind.


async def test_what_is_old_and_published_is_dropped(pool: Pool, owner_db: asyncpg.Connection, writer: Writer) -> None:
    await closed_partition(owner_db, writer)
    await writer.write(2)
    assert await pool.fetchval(DROP) == "dropped"
    assert (await bounds(pool))[0] == (1, 2)
    assert await pool.fetchval("SELECT count(*) FROM outbox") == 2
    assert await pool.fetchval(DROP) == "none", "the one that ids are drawn in stays"


async def test_an_open_partition_is_never_dropped(pool: Pool, owner_db: asyncpg.Connection, writer: Writer) -> None:
    await writer.write(6)
    await age(owner_db, 100)
    await publish_all(owner_db)
    assert await pool.fetchval(DROP_NOW) == "none"


async def test_what_is_young_stays(pool: Pool, owner_db: asyncpg.Connection, writer: Writer) -> None:
    await closed_partition(owner_db, writer)
    await owner_db.execute("UPDATE outbox SET created_at = clock_timestamp() WHERE id = (SELECT max(id) FROM outbox)")
    assert await pool.fetchval(DROP) == "young"
    assert await pool.fetchval(DROP_NOW) == "dropped"


@pytest.mark.promise("I4")
async def test_what_one_cursor_has_not_passed_stays(pool: Pool, owner_db: asyncpg.Connection, writer: Writer) -> None:
    await closed_partition(owner_db, writer)
    await owner_db.execute("UPDATE outbox_shard SET cursor_id = cursor_id - 1 WHERE shard = $1", shard_of(2))
    assert await pool.fetchval(DROP_NOW) == "unresolved"
    await publish_all(owner_db)
    assert await pool.fetchval(DROP_NOW) == "dropped"


@pytest.mark.promise("I4")
@pytest.mark.parametrize("state", ["waiting", "failed"])
async def test_what_an_open_queue_holds_stays(
    pool: Pool, owner_db: asyncpg.Connection, writer: Writer, state: str
) -> None:
    await closed_partition(owner_db, writer)
    await park(owner_db, state)
    assert await pool.fetchval(DROP_NOW) == "unresolved"
    await owner_db.execute("UPDATE outbox_parked SET state = 'sent'")
    assert await pool.fetchval(DROP_NOW) == "dropped"


async def test_a_rewind_beside_it_goes_first(
    database: Database, pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    await closed_partition(owner_db, writer)
    first = await owner_db.fetchval("SELECT min(id) FROM outbox WHERE shard = $1", shard_of(1))
    rewinding = await asyncpg.connect(database.owner_url)
    outcome = None
    try:
        while outcome is None:
            await publish_all(owner_db)
            transaction = rewinding.transaction()
            await transaction.start()
            await rewinding.execute("SELECT rewind_shard($1, $2, 'ann')", shard_of(1), first)
            dropping = asyncio.create_task(pool.fetchval(DROP_NOW))
            await until(lambda: owner_db.fetchval(WAITING), timeout=5, what="waiting for the lock")
            await transaction.commit()
            with suppress(asyncpg.LockNotAvailableError):
                outcome = await dropping
    finally:
        await rewinding.close()
    assert outcome == "unresolved"


async def test_a_long_reader_puts_the_drop_off_and_no_writer_waits(
    database: Database, pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    await closed_partition(owner_db, writer)
    async with held(database, "SELECT FROM outbox LIMIT 1"):
        await writes_beside(database, pool, DROP)
    async with held(database, "LOCK TABLE ONLY outbox_p0 IN SHARE UPDATE EXCLUSIVE MODE"):
        with pytest.raises(asyncpg.LockNotAvailableError):
            await pool.fetchval(DROP)
    assert await pool.fetchval(DROP) == "dropped"


async def test_deliveries_go_with_the_last_of_their_rows(
    pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    store = ShardStore(pool, "ann", 60)
    [one] = await store.take(1)
    place = [Delivery(1, 5, "events.v1", 0), Delivery(2 * SIZE, 2 * SIZE + 5, "events.v1", 9)]
    assert await store.advance([Move(one.shard, one.epoch, 2 * SIZE + 5, place)]) == set()
    assert await pool.fetchval("SELECT drop_delivery_partition()") is False
    for _ in range(2):
        await writer.write(6)
        await age(owner_db, 8)
        await publish_all(owner_db)
        await owner_db.execute(CLOSE_NOW)
    assert await pool.fetchval(DROP) == "dropped"
    assert await pool.fetchval("SELECT drop_delivery_partition()") is False, "its bound is that of the second one"
    assert await pool.fetchval(DROP) == "dropped"
    assert await pool.fetchval("SELECT drop_delivery_partition()") is True
    assert await pool.fetchval("SELECT drop_delivery_partition()") is False
    assert [row["from_id"] for row in await pool.fetch("SELECT from_id FROM outbox_delivery")] == [2 * SIZE]


@pytest.mark.parametrize("letter", [True, False])
async def test_parked_rows_are_forgotten_and_attempts_stay_with_a_letter(
    pool: Pool, owner_db: asyncpg.Connection, writer: Writer, letter: bool
) -> None:
    await closed_partition(owner_db, writer)
    await park(owner_db, "dead", letter=letter)
    assert await pool.fetchval("SELECT forget_parked(10)") == 0, "its row is there"
    assert await pool.fetchval(DROP) == "dropped"
    assert await pool.fetchval("SELECT forget_parked(10)") == 1
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_parked") == 0
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_attempt") == (2 if letter else 0)
    if letter:
        await pool.execute("SELECT expire_letters('0 s', 10)")
        assert await owner_db.fetchval("SELECT count(*) FROM outbox_attempt") == 0


async def test_forgetting_goes_in_steps(pool: Pool, owner_db: asyncpg.Connection) -> None:
    await owner_db.execute("DROP TABLE outbox_p0")
    await owner_db.execute(
        "INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state)"
        " SELECT n % 64, n, gen_random_uuid(), 'events.v1', gen_random_uuid(), 'sent' FROM generate_series(1, 250) AS n"
    )
    assert [await pool.fetchval("SELECT forget_parked(100)") for _ in range(4)] == [100, 100, 50, 0]


# Dead letters.


async def test_letters_expire_when_settled_or_left_alone_for_long(pool: Pool, owner_db: asyncpg.Connection) -> None:
    kept = {
        await die(owner_db, 1, "dead", days=29),
        await die(owner_db, 2, "sent", days=29),
        await die(owner_db, 3, "retrying", days=40, action_days=1),
    }
    gone = {
        await die(owner_db, number, state, days=31)
        for number, state in enumerate(("dead", "retrying", "sent", "discarded", "rewound"), 10)
    }
    rows = await pool.fetch("SELECT * FROM expire_letters('30 days', 100)")
    assert {row["dead_id"] for row in rows} == gone
    assert {row[0] for row in await owner_db.fetch("SELECT dead_id FROM dead_letter")} == kept
    assert {row[0] for row in await owner_db.fetch("SELECT dead_id FROM dead_letter_action")} == kept


async def test_a_letter_that_somebody_is_changing_is_left_for_the_next_time(
    database: Database, pool: Pool, owner_db: asyncpg.Connection
) -> None:
    await die(owner_db, 1, "dead", days=31)
    async with held(database, "UPDATE dead_letter SET state = 'retrying'"):
        assert await pool.fetch("SELECT expire_letters('30 days', 100)") == []
    assert len(await pool.fetch("SELECT expire_letters('30 days', 100)")) == 1


async def test_attempts_stay_while_the_outbox_has_the_row(
    pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    await closed_partition(owner_db, writer)
    await park(owner_db, "dead", letter=True)
    assert len(await pool.fetch("SELECT expire_letters('0 s', 100)")) == 1
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_attempt") == 2
    assert await pool.fetchval(DROP) == "dropped"
    await pool.execute("SELECT forget_parked(10)")
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_attempt") == 0


# The loop.


async def test_a_look_does_all_of_it(pool: Pool, owner_db: asyncpg.Connection, writer: Writer) -> None:
    await writer.write(6)
    await age(owner_db, 8)
    await publish_all(owner_db)
    await park(owner_db, "sent")
    await die(owner_db, 900, "dead", days=31)
    await die(owner_db, 901, "dead", days=3)
    retention = Retention(pool, PERIODS)
    expired = LETTERS_EXPIRED.labels("dead")._value.get()
    with capture_logs() as logs:
        assert await retention.look()
    assert (await bounds(pool))[0] == (1, 2)
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_parked") == 0
    assert LETTERS_EXPIRED.labels("dead")._value.get() == expired + 1
    [told] = [entry for entry in logs if entry["log_level"] == "error"]
    assert told["error"] == "too large"
    assert told["dead_id"] == 1
    assert {"event_id", "conversation_id"} <= told.keys()
    assert OLDEST_LETTER._value.get() == pytest.approx(3 * DAY_S, rel=0.01)
    assert await retention.look()
    assert PARTITIONS_AHEAD._value.get() == PARTITIONS_MADE_AHEAD
    assert PARTITIONS_BEHIND._value.get() == 0


async def test_a_step_without_its_lock_is_counted_and_the_others_are_done(
    database: Database, pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    await closed_partition(owner_db, writer)
    await die(owner_db, 900, "sent", days=31)
    retention = Retention(pool, PERIODS)
    before = RETENTION_PUT_OFF.labels("drop")._value.get()
    async with held(database, "SELECT FROM outbox LIMIT 1"):
        assert not await retention.look()
    assert RETENTION_PUT_OFF.labels("drop")._value.get() == before + 1
    assert await owner_db.fetchval("SELECT count(*) FROM dead_letter") == 0
    assert await retention.look()
    assert (await bounds(pool))[0] == (1, 2)


async def test_the_loop_tries_again_what_was_put_off(
    database: Database, pool: Pool, owner_db: asyncpg.Connection, writer: Writer
) -> None:
    await closed_partition(owner_db, writer)
    before = RETENTION_PUT_OFF.labels("drop")._value.get()
    running = asyncio.create_task(Retention(pool, PERIODS, look_every_s=0.05).run())
    try:
        async with held(database, "SELECT FROM outbox LIMIT 1"):
            await until(
                lambda: RETENTION_PUT_OFF.labels("drop")._value.get() > before, timeout=10, what="a step put off"
            )

        async def dropped() -> bool:
            return (await bounds(owner_db))[0] == (1, 2)

        await until(dropped, timeout=10, what="dropped partition")
    finally:
        running.cancel()
        await asyncio.wait([running])


# The rest of the relay beside it.


async def test_a_rewind_reaches_over_a_bound(pool: Pool, owner_db: asyncpg.Connection, writer: Writer) -> None:
    await writer.write(6)
    await owner_db.execute(CLOSE_NOW)
    await writer.write(6)
    shard = shard_of(1)
    await owner_db.execute("UPDATE outbox_shard SET owner = 'ann', epoch = 1 WHERE shard = $1", shard)
    ids = [row[0] for row in await owner_db.fetch("SELECT id FROM outbox WHERE shard = $1 ORDER BY id", shard)]
    placed = [Delivery(ids[0], ids[2], "events.v1", 0), Delivery(ids[3], ids[-1], "events.v1", 3)]
    assert await ShardStore(pool, "ann", 60).advance([Move(shard, 1, ids[-1], placed)]) == set()
    await owner_db.execute("SELECT rewind_shard($1, $2, 'ann')", shard, ids[1])
    left = await owner_db.fetch("SELECT from_id, to_id FROM outbox_delivery")
    assert [tuple(row) for row in left] == [(ids[0], ids[1] - 1)]


# The migration.


async def test_deliveries_become_partitioned_beside_relays_that_write_them(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"waybill_{secrets.token_hex(6)}"
    server = await asyncpg.connect(stores.postgres_url)
    url = urlunsplit(urlsplit(stores.postgres_url)._replace(path=f"/{name}"))
    everything = sorted(migrate.FOLDER.glob("*.sql"))
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, newest in ((before, "0007"), (after, "9999")):
        folder.mkdir()
        for file in everything:
            if file.name[:4] <= newest:
                shutil.copy(file, folder)
    await server.execute(f"CREATE DATABASE {name}")
    try:
        monkeypatch.setattr(migrate, "FOLDER", before)
        await migrate.migrate_async(url, role_password=ROLE_PASSWORD)
        monkeypatch.setattr(migrate, "FOLDER", after)
        # A relay of that time asks for no life of the store.
        asks, asks_not = "(SELECT store_incarnation()) = $10", "$10::text IS NOT NULL"
        monkeypatch.setattr(shards, "_ADVANCE", shards._ADVANCE.replace(asks, asks_not))
        async with open_pool(Database(name, url).url("relay"), size=1, name="test") as pool:
            written = await _advance_beside(pool, lambda: migrate.migrate_async(url, role_password=ROLE_PASSWORD))
            assert await pool.fetchval("SELECT count(*) FROM outbox_delivery") == written
            assert (await bounds(pool, "outbox_delivery"))[:2] == [(0, 2), (2, 3)]
            await migrate.migrate_async(url, role_password=ROLE_PASSWORD)
    finally:
        await server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await server.close()


async def _advance_beside(pool: Pool, work: Callable[[], Awaitable[Any]]) -> int:
    """Write deliveries all the time while the work is done; how many."""
    life = Life(pool)
    life.adopt("any")
    store = ShardStore(pool, "ann", 60, life)
    [one] = await store.take(1)
    written = 0
    done = asyncio.Event()

    async def advance() -> None:
        nonlocal written
        while not done.is_set():
            written += 1
            move = Move(one.shard, one.epoch, written, [Delivery(written, written, "events.v1", written)])
            assert await store.advance([move]) == set()

    advancing = asyncio.create_task(advance())
    await until(lambda: written > 50, timeout=10, what="deliveries")
    await work()
    seen = written
    await until(lambda: written > seen + 50, timeout=10, what="deliveries afterwards")
    done.set()
    await advancing
    return written
