"""The log of state changes: written in batches by gateways, kept in days, forgotten by the relay."""

import asyncio
import json
import secrets
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from deploy import migrate
from services.gateway.metrics import TRANSITIONS_DROPPED
from services.gateway.transitions import Refusal, Transitions
from services.relay.retention import DAYS_MADE_AHEAD, Periods, Retention
from shared.errors import UnavailableError
from shared.postgres import Pool, open_pool
from shared.ranges import EMPTY
from tests.databases import ROLE_PASSWORD, Database
from tests.stack import Stores
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


async def test_what_is_refused_again_and_again_is_one_row_a_second(
    database: Database, owner: asyncpg.Connection
) -> None:
    group, session = str(uuid.uuid4()), str(uuid.uuid4())
    async with open_pool(database.url("gateway"), size=1, name="tests") as pool:
        transitions = Transitions(pool)
        often = Refusal("sent", "refused:rate_limited", group, "ann", "phone", session)
        for _ in range(3):
            transitions.refused(often)
        transitions.refused(often._replace(trace_id="4bf92f"))
        transitions.refused(often._replace(kind="created", conversation_id=None))
        assert len(transitions) == 3
        await transitions.flush()
        transitions.refused(often)
        await transitions.flush()
    rows = await owner.fetch("SELECT kind, cause, conversation_id::text, trace_id, detail FROM transition ORDER BY at")
    assert [tuple(row) for row in rows] == [
        ("sent", "refused:rate_limited", group, None, '{"times":3}'),
        ("sent", "refused:rate_limited", group, "4bf92f", None),
        ("created", "refused:rate_limited", None, None, None),
        ("sent", "refused:rate_limited", group, None, None),
    ]


class Pushing:
    """A feed that is pushed to, of a user whom an array would take for nobody."""

    conversation_id = str(uuid.uuid4())
    repeated = EMPTY

    def __init__(self, device_id: str) -> None:
        self.owner = SimpleNamespace(user_id="NULL", device_id=device_id, session_id=str(uuid.uuid4()))
        self.unlogged, self.unlogged_at, self.position = 0, 0.0, 0

    def push(self, transitions: Transitions, last: int) -> None:
        if not self.unlogged:
            transitions.pushes.begin(cast("Any", self), self.position + 1, time.monotonic())
        self.position = last


async def test_pushes_are_written_folded_and_wait_for_postgres_without_growing(
    database: Database, owner: asyncpg.Connection
) -> None:
    feeds = [Pushing(f"d{number}") for number in range(5)]
    async with open_pool("postgres://nobody@127.0.0.1:1/none", size=1, name="tests", timeout_s=2) as away:
        transitions = Transitions(away, most_pushes=2)
        for last in (1, 4):
            for feed in feeds:
                feed.push(transitions, last)
            with pytest.raises(UnavailableError):
                await transitions.flush()
        assert len(transitions.pushes) == 7, "two were taken, and go on by themselves"
    async with open_pool(database.url("gateway"), size=1, name="tests") as pool:
        transitions._pool = pool
        await transitions.flush()
        assert not len(transitions)
    rows = await owner.fetch("SELECT * FROM transition ORDER BY device_id, from_seq")
    assert [(row["device_id"], row["from_seq"], row["to_seq"]) for row in rows] == [
        ("d0", 1, 1), ("d0", 2, 4), ("d1", 1, 1), ("d1", 2, 4), *((f"d{number}", 1, 4) for number in (2, 3, 4)),
    ]  # fmt: skip
    assert {(row["kind"], row["cause"], row["user_id"]) for row in rows} == {("pushed", "new", "NULL")}
    assert {str(row["session_id"]) for row in rows} == {feed.owner.session_id for feed in feeds}
    assert all(datetime.now(UTC) - row["at"] < timedelta(minutes=1) for row in rows)


async def indexes(owner: asyncpg.Connection) -> dict[str, set[str]]:
    """Of each partition, of which of the parent's indexes it has one that can be used."""
    rows = await owner.fetch(
        "SELECT c.relname AS name, array_agg(i.inhparent::regclass::text) FILTER (WHERE x.indisvalid) AS indexes"
        " FROM pg_inherits AS p JOIN pg_class AS c ON c.oid = p.inhrelid"
        " LEFT JOIN pg_index AS x ON x.indrelid = c.oid LEFT JOIN pg_inherits AS i ON i.inhrelid = x.indexrelid"
        " WHERE p.inhparent = 'transition'::regclass GROUP BY 1"
    )
    return {row["name"]: set(row["indexes"] or ()) - {None} for row in rows}


async def test_every_day_has_the_indexes(owner: asyncpg.Connection, relay: Pool) -> None:
    both = {"transition_by_seq", "transition_by_user"}
    before = await indexes(owner)
    assert len(before) == DAYS_MADE_AHEAD + 2
    assert set(map(frozenset, before.values())) == {frozenset(both)}
    last = max(name for name in before if name != "transition_default")
    await owner.execute(f"DROP TABLE {last}")
    assert await Retention(relay, PERIODS).look()
    assert await indexes(owner) == before
    valid = "SELECT bool_and(indisvalid) FROM pg_index WHERE indrelid = 'transition'::regclass"
    assert await owner.fetchval(valid)


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


async def test_the_indexes_are_made_beside_those_who_write(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of every day that there is, over, present and to come; nobody waits for longer than a moment, nor does it."""
    name = f"waybill_{secrets.token_hex(6)}"
    server = await asyncpg.connect(stores.postgres_url)
    url = urlunsplit(urlsplit(stores.postgres_url)._replace(path=f"/{name}"))
    before = tmp_path / "before"
    before.mkdir()
    for file in migrate.FOLDER.glob("*.sql"):
        if file.name[:4] <= "0014":
            shutil.copy(file, before)
    await server.execute(f"CREATE DATABASE {name}")
    try:
        with monkeypatch.context() as patched:
            patched.setattr(migrate, "FOLDER", before)
            await migrate.migrate_async(url, role_password=ROLE_PASSWORD)
        owner = await asyncpg.connect(url)
        await owner.execute(
            "CREATE TABLE old PARTITION OF transition FOR VALUES FROM ('2020-02-01 00:00+0') TO ('2020-02-02 00:00+0');"
            " UPDATE outbox_shard SET cursor_id = shard + 7"
        )
        longest, rows, done = 0.0, 0, asyncio.Event()

        async def write() -> None:
            nonlocal longest, rows
            async with open_pool(Database(name, url).url("gateway"), size=1, name="tests") as pool:
                while not done.is_set():
                    began = time.monotonic()
                    await pool.execute("INSERT INTO transition (service, kind, cause) VALUES ('s', 'k', 'c')")
                    longest, rows = max(longest, time.monotonic() - began), rows + 1

        writing = asyncio.create_task(write())
        await until(lambda: rows > 50, timeout=20, what="rows")
        await migrate.migrate_async(url, role_password=ROLE_PASSWORD)
        done.set()
        await writing
        found = await indexes(owner)
        assert len(found) == DAYS_MADE_AHEAD + 3
        assert set(map(frozenset, found.values())) == {frozenset({"transition_by_seq", "transition_by_user"})}
        assert await owner.fetchval("SELECT count(*) FROM transition") == rows
        assert longest < 3.0
        cursors = await owner.fetch("SELECT shard, cursor_id, sent_id FROM outbox_journal ORDER BY shard")
        assert [tuple(row) for row in cursors] == [(shard, shard + 7, shard + 7) for shard in range(64)]
        await owner.close()
    finally:
        await server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await server.close()
