"""Relays that are killed, again and again: nothing is lost, and nothing comes out of order."""

import asyncio
import random

import asyncpg
import pytest

from shared.kafka import Topics
from tests.databases import Database
from tests.history import LastingWriter, load, nothing_parked, read_history
from tests.relays import QUICK, Relay, Relays, Writer, all_records, drained, holders, order_per_conversation
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

pytestmark = pytest.mark.long(100)

KILLS = 20
EVENTS = 20_000
CONVERSATIONS = 200
ROWS = 50

DEAD_SOON = {**QUICK, "WAYBILL_RELAY_MAX_ATTEMPTS": "2", "WAYBILL_RELAY_RETRY_DELAY_MS": "1000"}
"""Slow enough that some rows are parked whenever a relay dies."""


@pytest.mark.timeout(600)
@pytest.mark.promise("I4")
async def test_twenty_kills_lose_and_disorder_nothing(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    """Each kill waits until the newest life of the relay has moved cursors, so that rows are in flight."""
    chance = random.Random(4)
    writer = Writer(owner_db, range(CONVERSATIONS))
    relay = fleet.start("slot-0")

    async def write(rows: int) -> None:
        for _ in range(rows // ROWS):
            await writer.write(ROWS)

    for life in range(1, KILLS + 1):
        await write(EVENTS // KILLS // 2)

        async def newest_moved(epoch: int = life) -> bool:
            return bool(await owner_db.fetchval("SELECT 1 FROM outbox_delivery WHERE epoch = $1 LIMIT 1", epoch))

        await until(newest_moved, timeout=60, what="a first cursor of the newest relay")
        writing = asyncio.create_task(write(EVENTS // KILLS // 2))
        await asyncio.wait([writing], timeout=chance.uniform(0, 0.2))
        relay.kill()
        await writing
        relay.start()
    await drained(owner_db, timeout=60)
    records = await all_records(stores.kafka, [relay_topics.events])
    expected = {key: list(range(1, EVENTS // CONVERSATIONS + 1)) for key in writer.last_seq}
    assert order_per_conversation(records) == expected
    assert len(records) > EVENTS, "a kill with rows in flight makes some come again"


@pytest.mark.promise("I4", "I5")
@pytest.mark.parametrize("relays", [1, 2, 3])
async def test_kills_among_relays_while_rows_are_parked(
    owner_db: asyncpg.Connection,
    database: Database,
    stores: Stores,
    relay_topics: Topics,
    fleet: Relays,
    *,
    relays: int,
) -> None:
    """Any of them dies, or several at once; each second time those that are left take over before they come back.

    What can't be published dies after its second attempt, once, whoever makes it; all else of its conversation comes.
    """
    chance = random.Random(relays)
    every = [fleet.start(f"slot-{number}", DEAD_SOON) for number in range(relays)]
    writers = [LastingWriter(database.owner_url, range(n, n + 50), odd_in=5) for n in (0, 50)]
    await asyncio.gather(*(relay.ready() for relay in every))
    async with load(writers):
        for kill in range(6):
            before = await owner_db.fetchval("SELECT clock_timestamp()")
            await moved_by(owner_db, [relay.environment["WAYBILL_RELAY_OWNER"] for relay in every], before)
            dying = chance.sample(every, chance.randint(1, max(1, relays - 1)))
            for relay in dying:
                relay.kill()
            if kill % 2 and len(dying) < relays:
                await taken_over(owner_db, [relay for relay in every if relay not in dying])
            for relay in dying:
                relay.start()
    await drained(owner_db, timeout=60)
    await until(lambda: nothing_parked(owner_db), timeout=30, what="the end of all queues")
    history = await read_history(owner_db, stores.kafka, relay_topics.prefix)
    history.hold()
    odd = {row[0] for row in await owner_db.fetch("SELECT event_id::text FROM outbox WHERE headers <> '{}'")}
    assert odd, "some could not be published"
    assert history.dead == odd
    letters = await owner_db.fetch("SELECT attempts, outbox_id FROM outbox_dead")
    assert len(letters) == len(odd)
    assert {letter["attempts"] for letter in letters} == {2}
    attempts = await owner_db.fetch(
        "SELECT id, array_agg(attempt ORDER BY attempt) FROM outbox_attempt AS a "
        "JOIN outbox_dead AS d ON d.shard = a.shard AND d.outbox_id = a.id GROUP BY id"
    )
    assert {tuple(row[1]) for row in attempts} == {(1, 2)}


async def moved_by(db: asyncpg.Connection, owners: list[str], since: object) -> None:
    """Wait until each of them has moved a cursor, and a row is parked with others behind it."""

    async def all_moved() -> bool:
        rows = await db.fetch("SELECT DISTINCT owner FROM outbox_delivery WHERE acked_at > $1", since)
        behind = "SELECT count(*) FROM outbox_parked WHERE parked_at > $1 AND state = 'waiting'"
        return {row[0] for row in rows} >= set(owners) and bool(await db.fetchval(behind, since))

    await until(all_moved, timeout=60, what=f"cursors moved by {owners}")


async def taken_over(db: asyncpg.Connection, living: list[Relay]) -> None:
    """Wait until these hold everything."""
    names = {relay.environment["WAYBILL_RELAY_OWNER"] for relay in living}

    async def all_is_theirs() -> bool:
        return set(await holders(db)) == names

    await until(all_is_theirs, timeout=60, what=f"all shards at {names}")
