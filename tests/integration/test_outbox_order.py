"""The outbox by itself: whoever reads above a position per shard sees every row, however many write at once."""

import asyncio
import random
from collections import defaultdict

import asyncpg
import pytest

from services.relay.held import HeldShard
from services.relay.shards import Taken
from services.relay.tail import _DRAWN, _READ, Tail
from shared.postgres import open_pool, to_array
from tests.databases import Database
from tests.relays import Writer, shard_of

WRITERS = 12
TRANSACTIONS = 60
SHARDS = 64


@pytest.mark.promise("I4")
async def test_a_reader_beside_many_writers_misses_no_row(database: Database) -> None:
    """Each writer has its own conversations, all share the shards, and each transaction lasts as chance wants."""
    held = {number: HeldShard(Taken(number, 1, 0), 0.0) for number in range(SHARDS)}
    seen: dict[str, list[int]] = defaultdict(list)
    writers: list[Writer] = []

    def take() -> None:
        for shard in held.values():
            for row in shard.rows:
                seen[str(row["conversation_id"])].append(row["seq"])
            shard.rows.clear()

    async def write(number: int) -> None:
        chance = random.Random(number)
        connection = await asyncpg.connect(database.owner_url)
        writer = Writer(connection, range(number * 20, number * 20 + 20))
        writers.append(writer)
        try:
            for _ in range(TRANSACTIONS):
                async with connection.transaction():
                    # Inside, the writer's own transaction is a savepoint: what it wrote is committed only here.
                    await writer.write(chance.randint(1, 5))
                    await connection.execute("SELECT pg_sleep($1)", chance.uniform(0, 0.004))
        finally:
            await connection.close()

    async with open_pool(database.url("relay"), size=1, name="test") as pool, pool.acquire() as connection:
        tail = Tail(pool, held, batch_size=100, longest_wait_s=0.001)

        async def read() -> None:
            while True:
                await tail.read_once(connection)
                take()

        reading = asyncio.create_task(read())
        async with asyncio.timeout(60):
            await asyncio.gather(*(write(number) for number in range(WRITERS)))
        reading.cancel()
        await asyncio.wait([reading])
        # What was committed after the last read. A position never goes back, so a row passed over would stay missing.
        while (await tail.read_once(connection))[0]:
            take()
    written = {key: list(range(1, last + 1)) for writer in writers for key, last in writer.last_seq.items()}
    assert seen == written


async def test_a_reader_stays_above_its_position_and_below_its_bounds(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    try:
        writer = Writer(owner, [1])
        for _ in range(3):
            await writer.write(100)
    finally:
        await owner.close()
    async with open_pool(database.url("relay"), size=1, name="test") as pool, pool.acquire() as connection:
        number = await connection.fetchval("SELECT min(shard) FROM outbox")
        shard = HeldShard(Taken(number, 1, 0), 0.0)
        tail = Tail(pool, {number: shard}, batch_size=60, longest_wait_s=0.001)
        assert await tail.read_once(connection) == (120, True)
        assert await tail.read_once(connection) == (1, False), "no room, no read"
        assert [row["seq"] for row in shard.rows] == list(range(1, 121))
        shard.rows.clear()
        assert await tail.read_once(connection) == (120, True)
        shard.rows.clear()
        assert await tail.read_once(connection) == (60, False)
        assert shard.rows[-1]["seq"] == 300


async def test_a_read_follows_the_index_past_a_position_in_the_middle_of_a_backlog(database: Database) -> None:
    """Gathering and sorting what lies above the position would make each read cost as much as the whole backlog."""
    owner = await asyncpg.connect(database.owner_url)
    try:
        await owner.execute(
            """
            INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
            SELECT g % 64, uuidv7(), 1, uuidv7(), 'events.v1', 'waybill.event.message', '/waybill/ingest', 'x', now()
            FROM generate_series(1, 50000) AS g
            """
        )
        await owner.execute("ANALYZE outbox")
    finally:
        await owner.close()
    relay = await asyncpg.connect(database.url("relay"))
    try:
        rows = await relay.fetch(
            f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {_READ}",
            to_array(range(SHARDS)),
            to_array([20000] * SHARDS),
            to_array([100] * SHARDS),
            1_000_000,
            20_000,
            50_000,
            await relay.fetchval("SELECT store_incarnation()"),
        )
    finally:
        await relay.close()
    plan = "\n".join(row[0] for row in rows)
    assert "Sort" not in plan
    assert "Bitmap" not in plan
    read = [line for line in plan.splitlines() if "Scan using outbox_p" in line and "never executed" not in line]
    assert len(read) == 1, f"later partitions are passed over:\n{plan}"
    assert "rows=100.00 loops=64" in read[0], "no row is read that is not wanted"


async def test_nothing_is_read_while_no_id_is_drawn(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    async with open_pool(database.url("relay"), size=1, name="test") as pool, pool.acquire() as connection:
        held = {number: HeldShard(Taken(number, 1, 0), 0.0) for number in range(SHARDS)}
        tail = Tail(pool, held, batch_size=60, longest_wait_s=0.001)
        await tail._life.known(connection)
        statements: list[str] = []
        connection.add_query_logger(lambda query: statements.append(query.query))

        async def read_and_tell() -> tuple[tuple[int, bool], list[str]]:
            answer = await tail.read_once(connection)
            await asyncio.sleep(0)  # the logger is called in the loop's next turn
            told = statements.copy()
            statements.clear()
            return answer, told

        try:
            await Writer(owner, [1]).write(3)
            assert await read_and_tell() == ((3, False), [_DRAWN, _READ])
            held[shard_of(1)].rows.clear()
            assert await read_and_tell() == ((0, False), [_DRAWN])
            held[shard_of(1)].rewind()
            assert await read_and_tell() == ((3, False), [_DRAWN, _READ]), "a position went back"
            held[shard_of(1)].rows.clear()
            await Writer(owner, [2]).write(1)
            assert await read_and_tell() == ((1, False), [_DRAWN, _READ])
            held[shard_of(2)].rows.clear()
            await owner.execute("SELECT nextval('outbox_id_seq')")
            assert await read_and_tell() == ((1, False), [_DRAWN, _READ]), "soon there will be a row"
            assert await read_and_tell() == ((0, False), [_DRAWN, _READ]), "an id that was drawn is awaited"
        finally:
            await owner.close()


async def test_large_payloads_come_by_the_way_and_are_bounded(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    async with open_pool(database.url("relay"), size=1, name="test") as pool, pool.acquire() as connection:
        held = {number: HeldShard(Taken(number, 1, 0), 0.0) for number in range(SHARDS)}
        tail = Tail(pool, held, batch_size=60, longest_wait_s=0.001)
        try:
            await owner.execute(
                """
                INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
                SELECT g % 2, uuidv7(), g, uuidv7(), 'events.v1', 'waybill.event.message', '/waybill/ingest',
                       convert_to(repeat('x', CASE WHEN g IN (3, 4, 5) THEN 200000 ELSE 10 END), 'UTF8'), now()
                FROM generate_series(0, 9) AS g
                """
            )
            seqs: dict[int, list[int]] = {0: [], 1: []}
            reads = 0
            more = True
            while more:
                _, more = await tail.read_once(connection)
                reads += 1
                for number, seen in seqs.items():
                    assert sum(len(row["payload"]) for row in held[number].rows) < 2 * 16 * 1024 * 1024 / SHARDS
                    seen += [row["seq"] for row in held[number].rows]
                    held[number].rows.clear()
            assert seqs == {0: [0, 2, 4, 6, 8], 1: [1, 3, 5, 7, 9]}
            assert reads == 3
        finally:
            await owner.close()


async def test_of_many_shards_that_are_behind_a_few_are_read_at_a_time_and_each_in_its_turn(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    async with open_pool(database.url("relay"), size=1, name="test") as pool, pool.acquire() as connection:
        held = {number: HeldShard(Taken(number, 1, 0), 0.0) for number in range(SHARDS)}
        tail = Tail(pool, held, batch_size=100, longest_wait_s=0.001)
        try:
            await owner.execute(
                """
                INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
                SELECT g % 64, uuidv7(), g / 64, uuidv7(), 'events.v1', 'waybill.event.message', '/waybill/ingest', 'x',
                       now()
                FROM generate_series(0, 64 * 300 - 1) AS g
                """
            )
            seqs: dict[int, list[int]] = {number: [] for number in held}
            read: list[int] = []
            more = True
            while more:
                _, more = await tail.read_once(connection)
                now = [number for number, shard in held.items() if shard.rows]
                read.append(len(now))
                for number in now:
                    seqs[number] += [row["seq"] for row in held[number].rows]
                    held[number].rows.clear()
            assert all(seen == list(range(300)) for seen in seqs.values())
            assert (read[0], max(read[1:])) == (SHARDS, 8)
        finally:
            await owner.close()


async def test_shards_that_stand_still_keep_no_other_from_being_read(database: Database) -> None:
    """They stood still in the middle of a backlog: what was read of them stays in memory meanwhile."""
    owner = await asyncpg.connect(database.owner_url)
    async with open_pool(database.url("relay"), size=1, name="test") as pool, pool.acquire() as connection:
        held = {number: HeldShard(Taken(number, 1, 0), 0.0) for number in range(SHARDS)}
        tail = Tail(pool, held, batch_size=500, longest_wait_s=0.001)
        try:
            await owner.execute(
                """
                INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
                SELECT g % 64, uuidv7(), g / 64, uuidv7(), 'events.v1', 'waybill.event.message', '/waybill/ingest', 'x',
                       now()
                FROM generate_series(0, 64 * 1000 - 1) AS g
                """
            )
            seqs: dict[int, list[int]] = {number: [] for number in held}
            for _ in range(300):
                await tail.read_once(connection)
                for number, shard in held.items():
                    if number < 16 and len(shard.rows) > 300:
                        shard.stopped = "too many"
                    if shard.stopped is None:
                        seqs[number] += [row["seq"] for row in shard.rows]
                        shard.rows.clear()
            assert sum(shard.stopped is not None for shard in held.values()) == 16
            assert all(seen == list(range(1000)) for number, seen in seqs.items() if number >= 16)
        finally:
            await owner.close()
