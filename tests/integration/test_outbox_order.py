"""The outbox by itself: whoever reads above a position per shard sees every row, however many write at once."""

import asyncio
import random
from collections import defaultdict

import asyncpg
import pytest

from services.relay.held import HeldShard
from services.relay.shards import Taken
from services.relay.tail import _READ, Tail
from shared.postgres import open_pool
from tests.databases import Database
from tests.relays import Writer

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

    async with open_pool(database.url("relay"), size=1, name="test") as pool:
        tail = Tail(pool, held, batch_size=100, longest_wait_s=0.001)

        async def read() -> None:
            while True:
                await tail.read_once()
                take()

        reading = asyncio.create_task(read())
        async with asyncio.timeout(60):
            await asyncio.gather(*(write(number) for number in range(WRITERS)))
        reading.cancel()
        await asyncio.wait([reading])
        # What was committed after the last read. A position never goes back, so a row passed over would stay missing.
        while (await tail.read_once())[0]:
            take()
    written = {key: list(range(1, last + 1)) for writer in writers for key, last in writer.last_seq.items()}
    assert seen == written


async def test_a_reader_stays_above_its_position_and_below_its_bounds(database: Database) -> None:
    connection = await asyncpg.connect(database.owner_url)
    try:
        writer = Writer(connection, [1])
        for _ in range(3):
            await writer.write(100)
    finally:
        await connection.close()
    async with open_pool(database.url("relay"), size=1, name="test") as pool:
        number = await pool.fetchval("SELECT min(shard) FROM outbox")
        shard = HeldShard(Taken(number, 1, 0), 0.0)
        tail = Tail(pool, {number: shard}, batch_size=60, longest_wait_s=0.001)
        assert await tail.read_once() == (120, True)
        assert await tail.read_once() == (1, False), "no room, no read"
        assert [row["seq"] for row in shard.rows] == list(range(1, 121))
        shard.rows.clear()
        assert await tail.read_once() == (120, True)
        shard.rows.clear()
        assert await tail.read_once() == (60, False)
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
            f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {_READ}", list(range(SHARDS)), [20000] * SHARDS, 100, 1_000_000
        )
    finally:
        await relay.close()
    plan = "\n".join(row[0] for row in rows)
    assert "Sort" not in plan
    assert "Bitmap" not in plan
    read = [line for line in plan.splitlines() if "Scan using outbox_p" in line and "never executed" not in line]
    assert len(read) == 1, f"later partitions are passed over:\n{plan}"
    assert "rows=100.00 loops=64" in read[0], "no row is read that is not wanted"
