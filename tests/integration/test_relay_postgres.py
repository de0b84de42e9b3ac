"""Postgres stops and comes back under load: the relay waits for it, and goes on by itself."""

import asyncio
import signal

import asyncpg
import pytest

from shared.kafka import Topics
from tests.databases import Database
from tests.history import LastingWriter, load, read_history
from tests.own_stack import OwnStack
from tests.relays import Relays, drained
from tests.waiting import until

pytest_plugins = ["tests.own_fixtures"]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.promise("I4")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGQUIT, signal.SIGINT], ids=["killed", "at once", "clean"])
async def test_a_restarted_postgres_loses_and_disorders_nothing(
    own_stack: OwnStack, own_database: Database, own_topics: Topics, own_fleet: Relays, how: signal.Signals
) -> None:
    relays = [own_fleet.start("ann"), own_fleet.start("ben")]
    await asyncio.gather(*(relay.ready() for relay in relays))
    pids = [relay.process.pid for relay in relays]
    writers = [LastingWriter(own_database.owner_url, range(n, n + 25), every_s=0.02) for n in (0, 25, 50, 75)]
    async with load(writers):
        for _ in range(2):
            await all_sent(own_database, 1_000)
            own_stack.fault("postgres", how)
            await until(lambda: not own_stack.alive("postgres"), timeout=30, what="the end of Postgres")
            for relay in relays:
                assert "postgres" in ((await relay.readyz()) or {})["failing"]
            await asyncio.to_thread(own_stack.restart, "postgres")
            await asyncio.gather(*(relay.ready() for relay in relays))
        await all_sent(own_database, 1_000)
    db = await asyncpg.connect(own_database.owner_url)
    try:
        await drained(db, timeout=60)
        history = await read_history(db, own_stack.kafka, own_topics.prefix)
        history.hold()
        assert history.dead == set()
        assert await db.fetchval("SELECT count(*) FROM outbox_attempt") == 0
    finally:
        await db.close()
    assert min(writer.returns for writer in writers) >= 2
    assert [(relay.process.poll(), relay.process.pid) for relay in relays] == [(None, pid) for pid in pids]


async def all_sent(database: Database, more: int) -> None:
    """Wait until so many rows beyond those of now are written and sent."""
    db = await asyncpg.connect(database.owner_url)
    try:
        begun = await db.fetchval(
            "SELECT count(*) FROM outbox AS o JOIN outbox_shard AS s USING (shard) WHERE o.id <= s.cursor_id"
        )

        async def enough() -> bool:
            sent = "SELECT count(*) FROM outbox AS o JOIN outbox_shard AS s USING (shard) WHERE o.id <= s.cursor_id"
            return bool(await db.fetchval(sent) >= begun + more)

        await until(enough, timeout=60, what=f"{more} further rows")
    finally:
        await db.close()
