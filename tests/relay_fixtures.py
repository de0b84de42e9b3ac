"""Fixtures for tests of relay processes."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from shared.kafka import Topics, ensure_topics
from tests.databases import Database
from tests.relays import Relays, relays
from tests.stack import Stores


@pytest.fixture
async def owner_db(database: Database) -> AsyncIterator[asyncpg.Connection]:
    """The owner's connection to the test's database."""
    connection = await asyncpg.connect(database.owner_url)
    yield connection
    await connection.close()


@pytest.fixture
async def relay_topics(stores: Stores, topic_prefix: str) -> Topics:
    """Topics of the test's own, made."""
    made = Topics(topic_prefix)
    await ensure_topics(stores.kafka, made)
    return made


@pytest.fixture
def fleet(database: Database, stores: Stores, relay_topics: Topics, tmp_path: Path) -> Iterator[Relays]:
    """Starts relays; none is left at the end."""
    with relays(database, stores.kafka, relay_topics.prefix, tmp_path) as made:
        yield made
