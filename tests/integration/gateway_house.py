"""Fixtures for tests of gateways: one database and one set of topics for all of them, all else per test.

No user or conversation is in two tests, and a gateway reads topics from their end, so they do not meet there.
"""

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.kafka import Topics, ensure_topics
from tests.conftest import _delete_topics
from tests.databases import Database, Databases, run
from tests.gateways import Gateway, House, house
from tests.stack import Stores


@pytest.fixture(scope="session")
def shared_database(databases: Databases) -> Iterator[Database]:
    made = databases.create()
    yield made
    databases.drop(made)


@pytest.fixture(scope="session")
def shared_prefix(stores: Stores) -> Iterator[str]:
    prefix = f"test-{secrets.token_hex(4)}"
    run(ensure_topics(stores.kafka, Topics(prefix)))
    yield prefix
    run(_delete_topics(stores.kafka, prefix))


@pytest.fixture
async def home(shared_database: Database, stores: Stores, shared_prefix: str, redis_url: str) -> AsyncIterator[House]:
    async with house(shared_database, stores, shared_prefix, redis_url) as made:
        yield made


@pytest.fixture
async def gateway(home: House) -> Gateway:
    return await home.gateway()
