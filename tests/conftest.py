"""Fixtures for every test. Each starts what it needs only when a test asks for it."""

import itertools
import os
import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import hypothesis
import pytest
import redis
from aiokafka.admin import AIOKafkaAdminClient

from deploy.local import ports
from tests.databases import Database, Databases, run
from tests.stack import Stores, open_stores
from tests.workers import share

# Redis has 16 databases unless told otherwise; the first is left to whoever else uses the server.
_redis_numbers = itertools.cycle(share(range(1, 16)))

_sources = pytest.StashKey[set[str]]()

# How long an example takes says more of what runs beside it than of the code.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Give this process, and the stacks that it starts, ports of its own."""
    config.stash[_sources] = set()
    free = share(ports.FREE)
    os.environ[ports.FREE_VARIABLE] = f"{free[0]}-{free[-1]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: beside one that begins last, nothing would be left to run."""
    seconds = {item.path: mark.args[0] for item in items if (mark := item.get_closest_marker("long"))}
    items.sort(key=lambda item: -seconds.get(item.path, 0))


@pytest.fixture(scope="session")
def stores(pytestconfig: pytest.Config) -> Iterator[Stores]:
    """The three servers, shared by all tests of the run."""
    with open_stores() as found:
        pytestconfig.stash[_sources].add(f"stores: {found.source} {found.note}".rstrip())
        yield found


@pytest.fixture(scope="session")
def databases(stores: Stores) -> Iterator[Databases]:
    """Makes migrated databases, for a test that needs more than one or keeps one for its whole module."""
    found = Databases(stores.postgres_url)
    yield found
    found.close()


@pytest.fixture
def database(databases: Databases) -> Iterator[Database]:
    """A migrated database of the test's own."""
    made = databases.create()
    yield made
    databases.drop(made)


@pytest.fixture(scope="module")
def module_database(databases: Databases) -> Iterator[Database]:
    """A migrated database that the tests of one module share."""
    made = databases.create()
    yield made
    databases.drop(made)


@pytest.fixture
def topic_prefix(stores: Stores) -> Iterator[str]:
    """A prefix for the test's own topics. Whatever topics are under it at the end are deleted."""
    prefix = f"test-{secrets.token_hex(4)}"
    yield prefix
    run(_delete_topics(stores.kafka, prefix))


@pytest.fixture
def redis_url(stores: Stores) -> str:
    """A database of Redis that holds nothing. Its number comes round again after some tests; channels are not apart."""
    url = urlunsplit(urlsplit(stores.redis_url)._replace(path=f"/{next(_redis_numbers)}"))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which servers the tests ran against."""
    for source in sorted(config.stash[_sources]):
        terminalreporter.write_line(source)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker: hand the servers' names to the process that writes the summary."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["sources"] = sorted(session.config.stash[_sources])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take them from a worker that has ended; one that died brings none."""
    node.config.stash[_sources].update(getattr(node, "workeroutput", {}).get("sources", ()))


async def _delete_topics(bootstrap: str, prefix: str) -> None:
    # A broker holds files and mapped memory for each of a topic's 64 partitions, and a run makes hundreds of topics.
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        if topics := [topic for topic in await admin.list_topics() if topic.startswith(prefix)]:
            await admin.delete_topics(topics)
    finally:
        await admin.close()
