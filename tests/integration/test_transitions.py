"""The log of state changes: written in batches by gateways, kept in days, forgotten by the relay."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from services.gateway.metrics import TRANSITIONS_DROPPED
from services.gateway.transitions import Transitions
from services.relay.retention import DAYS_MADE_AHEAD, Periods, Retention
from shared.errors import UnavailableError
from shared.postgres import Pool, open_pool
from tests.databases import Database
from tests.waiting import until

DAY_S = 86_400.0
PERIODS = Periods(DAY_S, 7 * DAY_S, 30 * DAY_S, 3 * DAY_S)


@pytest.fixture
async def owner(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.owner_url)
    yield connection
    await connection.close()


@pytest.fixture
async def relay(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=2, name="tests") as made:
        yield made


async def days(owner: asyncpg.Connection) -> list[datetime]:
    rows = await owner.fetch("SELECT low, high FROM transition_partitions() ORDER BY low")
    assert all(row["high"] - row["low"] == timedelta(days=1) for row in rows)
    return [row["low"] for row in rows]


async def test_what_is_noted_is_written(database: Database, owner: asyncpg.Connection) -> None:
    session = str(uuid.uuid4())
    async with open_pool(database.url("gateway"), size=2, name="tests") as pool:
        transitions = Transitions(pool, flush_s=60.0, most=3)
        running = asyncio.create_task(transitions.run())
        try:
            transitions.note(
                "cursor", "behind", conversation_id=session, user_id="ann", device_id="phone", session_id=session,
                from_seq=3, to_seq=9, trace_id="4bf92f", detail={"told": 'a "b"'},
            )  # fmt: skip
            transitions.note("session", "replaced")
            transitions.note("session", "revoked")
            await until(lambda: not len(transitions), timeout=5, what="a full batch")

            async def count() -> bool:
                return bool(await owner.fetchval("SELECT count(*) = 3 FROM transition"))

            await until(count, timeout=5, what="rows")
            transitions.note("session", "late")
            await transitions.flush()
        finally:
            running.cancel()
            await asyncio.wait([running])
    rows = await owner.fetch("SELECT * FROM transition ORDER BY at")
    assert [(row["service"], row["kind"], row["cause"]) for row in rows] == [
        ("gateway", kind, cause)
        for kind, cause in (("cursor", "behind"), ("session", "replaced"), ("session", "revoked"), ("session", "late"))
    ]
    first = dict(rows[0])
    assert datetime.now(UTC) - first.pop("at") < timedelta(minutes=1)
    assert json.loads(first.pop("detail")) == {"told": 'a "b"'}
    assert [str(value) for value in first.values()] == [
        "3", "9", session, session, "gateway", "cursor", "behind", "ann", "phone", "4bf92f",
    ]  # fmt: skip
    assert dict(rows[1])["user_id"] is None
    assert await owner.fetchval("SELECT count(*) FROM transition_default") == 0


async def test_while_postgres_is_away_the_newest_are_kept() -> None:
    async with open_pool("postgres://nobody@127.0.0.1:1/none", size=1, name="tests", timeout_s=2) as away:
        transitions = Transitions(away, most=2, most_waiting=5)
        before = TRANSITIONS_DROPPED._value.get()
        for cause in "abcdefg":
            transitions.note("session", cause)
        assert TRANSITIONS_DROPPED._value.get() == before + 2
        with pytest.raises(UnavailableError):
            await transitions.flush()
        assert [entry.cause for entry in transitions._waiting] == ["c", "d", "e", "f", "g"]


async def test_a_row_that_cannot_be_written_holds_up_no_other(database: Database, owner: asyncpg.Connection) -> None:
    async with open_pool(database.url("gateway"), size=1, name="tests") as pool:
        transitions = Transitions(pool, most=1)
        transitions.note("session", "odd", session_id="no uuid")
        transitions.note("session", "good")
        await transitions.flush()
    assert [row["cause"] for row in await owner.fetch("SELECT cause FROM transition")] == ["good"]


async def test_days_are_made_ahead_and_dropped_behind(owner: asyncpg.Connection, relay: Pool) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert await days(owner) == [today + timedelta(days=n) for n in range(DAYS_MADE_AHEAD + 1)]
    for name in ("transition_p" + (today + timedelta(days=n)).strftime("%Y%m%d") for n in (0, 3)):
        await owner.execute(f"DROP TABLE {name}")
    await owner.execute(
        "CREATE TABLE old PARTITION OF transition FOR VALUES FROM ('2020-02-01 00:00+0') TO ('2020-02-02 00:00+0')"
    )
    for at in ("2020-02-01 12:00+0", "2020-02-05 12:00+0", today.isoformat()):
        await owner.execute(f"INSERT INTO transition (at, service, kind, cause) VALUES ('{at}', 's', 'k', 'c')")
    await owner.execute(
        "INSERT INTO revocation (user_id, expires_at) VALUES ('a', now() - interval '1 s'), ('b', NULL)"
    )

    assert await Retention(relay, PERIODS).look()
    made = [today + timedelta(days=n) for n in range(1, DAYS_MADE_AHEAD + 1)]
    assert await days(owner) == made, "today has begun elsewhere and stays there"
    assert await owner.fetchval("SELECT count(*) FROM transition") == 1
    assert await owner.fetch("SELECT user_id FROM revocation") == [("b",)]
    assert await Retention(relay, PERIODS).look()
    assert await days(owner) == made
    await owner.execute("DELETE FROM transition")
    assert await Retention(relay, PERIODS).look()
    assert await days(owner) == [today, *made]


async def test_making_and_dropping_days_wait_for_nobody(
    database: Database, owner: asyncpg.Connection, relay: Pool
) -> None:
    await owner.execute(
        "CREATE TABLE old PARTITION OF transition FOR VALUES FROM ('2020-02-01 00:00+0') TO ('2020-02-02 00:00+0')"
    )
    writer = await asyncpg.connect(database.owner_url)
    try:
        async with writer.transaction():
            await writer.execute("INSERT INTO transition (service, kind, cause) VALUES ('s', 'k', 'c')")
            async with asyncio.timeout(5):
                assert not await Retention(relay, PERIODS).look()
            assert len(await days(owner)) == DAYS_MADE_AHEAD + 2
    finally:
        await writer.close()
    assert await Retention(relay, PERIODS).look()
    assert len(await days(owner)) == DAYS_MADE_AHEAD + 1
