"""A standby that was promoted is another life of the store, as far as clients' cursors go."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local import postgres
from deploy.local.ports import free_port
from deploy.local.process import Child, Command
from deploy.migrate import migrate, url_of_role
from services.gateway.listing import changed_since, store_incarnation
from services.gateway.since import known_since
from shared.errors import UnavailableError
from shared.postgres import open_pool
from tests.databases import ROLE_PASSWORD
from tests.stack import FOLDER_PREFIX
from tests.standby import copied, standby
from tests.waiting import until


@contextmanager
def running(command: Command) -> Iterator[None]:
    server = Child(command)
    try:
        server.wait_ready(threading.Event())
        yield
    finally:
        server.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        # Postgres of a root's test run has another user, who must be able to reach its own folder below.
        Path(name).chmod(0o711)
        yield Path(name)


async def test_a_promoted_standby_is_another_store(folder: Path) -> None:
    ports = [free_port(), free_port()]
    urls = [url_of_role(postgres.url(port), "gateway", ROLE_PASSWORD) for port in ports]
    first = postgres.prepare(folder / "first", folder / "first.log", ports[0])
    with running(first):
        await asyncio.to_thread(migrate, postgres.url(ports[0]), role_password=ROLE_PASSWORD)
        copied(first, postgres.url(ports[0]), folder / "first" / "copy")
        home = (folder / "first" / "copy").rename(folder / "second")
        with standby(home, folder / "second.log", ports[1]):
            async with open_pool(urls[0], size=1, name="t") as one, open_pool(urls[1], size=1, name="t") as two:
                told = (await changed_since(one, [("ann", None)])).since
                for read in (store_incarnation(two), changed_since(two, [("ann", None)])):
                    with pytest.raises(UnavailableError):
                        await read
            async with open_pool(postgres.url(ports[1]), size=1, name="t") as owner:
                assert await owner.fetchval("SELECT pg_promote()")
            async with open_pool(urls[1], size=1, name="t") as two:
                now = await until(lambda: store_incarnation(two), timeout=10, what="the promoted store")
            async with open_pool(urls[0], size=1, name="t") as one:
                assert await store_incarnation(one) == told.incarnation
    assert now.rpartition("-")[0] == told.incarnation.rpartition("-")[0]
    assert (told.incarnation[-8:], now[-8:]) == ("00000001", "00000002")
    assert known_since(str(told), told.incarnation) == told.xmin
    assert known_since(str(told), now) is None
