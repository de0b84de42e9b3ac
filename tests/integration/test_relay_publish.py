"""What a relay publishes: every row once, on the right partition, with the headers that the protocol names."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from shared.kafka import Topics, ensure_topics
from tests.databases import Database
from tests.relays import Relays, Writer, all_records, conversation, drained, order_per_conversation, relays, shard_of
from tests.stack import Stores

Connection = asyncpg.Connection


@pytest.fixture
async def db(database: Database) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(database.owner_url)
    yield connection
    await connection.close()


@pytest.fixture
async def topics(stores: Stores, topic_prefix: str) -> Topics:
    made = Topics(topic_prefix)
    await ensure_topics(stores.kafka, made)
    return made


@pytest.fixture
def fleet(database: Database, stores: Stores, topics: Topics, tmp_path: Path) -> Iterator[Relays]:
    with relays(database, stores.kafka, topics.prefix, tmp_path) as made:
        yield made


async def test_every_row_is_published_in_order(db: Connection, stores: Stores, topics: Topics, fleet: Relays) -> None:
    writer = Writer(db, range(100))
    for _ in range(20):
        await writer.write(100)
    relay = fleet.start()
    await relay.ready()
    await drained(db, timeout=20)
    records = await all_records(stores.kafka, [topics.events])
    assert len(records) == 2000
    assert order_per_conversation(records) == {key: list(range(1, 21)) for key in writer.last_seq}
    assert {r.key.decode(): r.partition for r in records} == {str(conversation(n)): shard_of(n) for n in range(100)}
