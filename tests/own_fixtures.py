"""Fixtures for tests that fault servers: a stack beside the one that all other tests share."""

import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from shared.kafka import Topics, ensure_topics
from tests.databases import Database, Databases
from tests.own_stack import OwnStack
from tests.relays import Relays, relays
from tests.stack import FOLDER_PREFIX


@pytest.fixture(scope="session")
def started_stack() -> Iterator[OwnStack]:
    """Shared by all tests that fault servers: a start takes seconds."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        # Postgres of a root's test run has another user, who must be able to reach its own folder below.
        Path(folder).chmod(0o711)
        with OwnStack(Path(folder)) as made:
            yield made


@pytest.fixture
def own_stack(started_stack: OwnStack) -> Iterator[OwnStack]:
    yield started_stack
    started_stack.mend()


@pytest.fixture
def own_database(own_stack: OwnStack) -> Iterator[Database]:
    made = Databases(own_stack.postgres_url)
    database = made.create()
    yield database
    own_stack.mend()
    made.drop(database)
    made.close()


@pytest.fixture
async def own_db(own_database: Database) -> AsyncIterator[asyncpg.Connection]:
    """The owner's connection to the test's database."""
    connection = await asyncpg.connect(own_database.owner_url)
    yield connection
    await connection.close(timeout=5)


@pytest.fixture
async def own_admin(own_stack: OwnStack) -> AsyncIterator[AIOKafkaAdminClient]:
    made = AIOKafkaAdminClient(bootstrap_servers=own_stack.kafka)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def own_topics(own_stack: OwnStack) -> AsyncIterator[Topics]:
    """Topics of the test's own, deleted at its end."""
    made = Topics(f"own-{secrets.token_hex(4)}")
    await ensure_topics(own_stack.kafka, made)
    yield made
    own_stack.mend()
    admin = AIOKafkaAdminClient(bootstrap_servers=own_stack.kafka)
    await admin.start()
    try:
        await admin.delete_topics([name for name in await admin.list_topics() if name.startswith(made.prefix)])
    finally:
        await admin.close()


@pytest.fixture
def own_fleet(own_stack: OwnStack, own_database: Database, own_topics: Topics, tmp_path: Path) -> Iterator[Relays]:
    """Starts relays on the own stack; none is left at the end."""
    with relays(own_database, own_stack.kafka, own_topics.prefix, tmp_path) as made:
        yield made
