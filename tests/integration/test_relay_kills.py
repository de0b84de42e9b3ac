"""A relay that is killed, again and again: nothing is lost, and nothing comes out of order."""

import asyncio
import random

import asyncpg
import pytest

from shared.kafka import Topics
from tests.relays import Relays, Writer, all_records, drained, order_per_conversation
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

KILLS = 20
EVENTS = 20_000
CONVERSATIONS = 200
ROWS = 50


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
