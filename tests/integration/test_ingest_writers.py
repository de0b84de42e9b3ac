"""Group commit: dense seqs, ids in the order of commits, few transactions, by index only."""

import asyncio
import random
import uuid
from collections import Counter, defaultdict
from contextlib import suppress

import asyncpg
import pytest

from services.ingest.admission import Send
from services.ingest.writer import BadRowError, Writer, Written
from shared.contracts import body as bodies
from shared.contracts.sends import Draft
from shared.errors import UnavailableError
from shared.kafka import partition_of
from shared.postgres import open_pool
from tests.databases import Database
from tests.ingest import DIGEST_KEY, Json, new_id, running
from tests.waiting import until

BODY = bodies.parse(b'{"text":"hello"}')


def message(conversation_id: str, client_msg_id: str | None = None, text: str = BODY.text) -> Send:
    draft = Draft(
        conversation_id=conversation_id,
        client_msg_id=client_msg_id or new_id(),
        sender_id="ann",
        type="message",
        body=bodies.Body(text, {}, text.encode()),
        target_seq=None,
        traceparent=None,
    )
    return Send(draft=draft, as_service=False, digest=bodies.digest(DIGEST_KEY.encode(), "message", None, draft.body))


async def make_groups(connection: asyncpg.Connection, count: int, *members: str) -> list[str]:
    made = [str(uuid.uuid4()) for _ in range(count)]
    for group in made:
        outcome = await connection.fetchval(
            "SELECT create_conversation($1, $2, 'group', NULL, 'joined', 'ann', $3, '{}', '')",
            group,
            partition_of(group),
            ["ann", *members],
        )
        assert outcome == "created"
    return made


@pytest.mark.promise("I3", "I4")
async def test_32_writers_number_densely_and_commit_in_the_order_of_ids(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    groups = await make_groups(owner, 24)
    chance = random.Random(32)
    seen: dict[int, list[int]] = defaultdict(list)
    stop = asyncio.Event()

    async def tail() -> None:
        """Read each shard above the highest id seen so far: an id that commits late is missed here."""
        cursors: dict[int, int] = {}
        reader = await asyncpg.connect(database.owner_url)
        shards = sorted({partition_of(group) for group in groups})
        ending = False
        while True:
            rows = await reader.fetch(
                "SELECT o.shard, o.id FROM unnest($1::smallint[], $2::bigint[]) AS c (shard, after) "
                "JOIN outbox AS o ON o.shard = c.shard AND o.id > c.after ORDER BY o.id",
                shards,
                [cursors.get(shard, 0) for shard in shards],
            )
            for row in rows:
                seen[row["shard"]].append(row["id"])
                cursors[row["shard"]] = row["id"]
            if ending:
                break
            ending = stop.is_set()
        await reader.close()

    async def write(writer: Writer) -> int:
        written = 0
        for _ in range(25):
            batch = [message(chance.choice(groups)) for _ in range(chance.randint(1, 12))]
            answers = await writer.write(batch)
            assert all(isinstance(answer, Written) for answer in answers)
            written += len(batch)
        return written

    async with open_pool(database.url("ingest"), size=32, name="test", timeout_s=30) as pool:
        tailing = asyncio.create_task(tail())
        total = sum(await asyncio.gather(*(write(Writer(pool, 30)) for _ in range(32))))
        stop.set()
        await asyncio.wait_for(tailing, 20)
    heads = dict(await owner.fetch("SELECT conversation_id::text, last_seq FROM conversation"))
    rows = await owner.fetch("SELECT id, shard, conversation_id::text AS conversation, seq FROM outbox ORDER BY id")
    await owner.close()
    assert len(rows) == total + len(groups)
    by_conversation: dict[str, list[int]] = defaultdict(list)
    by_shard: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_conversation[row["conversation"]].append(row["seq"])
        by_shard[row["shard"]].append(row["id"])
    for group in groups:
        assert by_conversation[group] == list(range(1, heads[group] + 1))
    assert seen == by_shard


@pytest.mark.promise("I3")
async def test_a_batch_that_fails_leaves_no_hole(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    (group,) = await make_groups(owner, 1)
    async with open_pool(database.url("ingest"), size=2, name="test") as pool:
        writer = Writer(pool, 5)
        good = [message(group) for _ in range(3)]
        with pytest.raises(BadRowError):
            await writer.write([*good, message(group, text="not json")])
        answers = await writer.write(good)
    await owner.close()
    assert [answer.seq for answer in answers if isinstance(answer, Written)] == [2, 3, 4]


async def test_a_send_that_the_store_refuses_fails_alone(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    await owner.execute("ALTER TABLE event ADD CHECK (client_msg_id <> 'bad')")
    await owner.close()
    async with running(database, ingest_gather_ms=20) as ingest:
        group = await ingest.create("ann")
        events: list[Json] = [
            {"conversation_id": group, "client_msg_id": "bad" if n == 5 else str(n), "body": {}} for n in range(16)
        ]
        results = await ingest.send_all("ann", events)
        assert [result["status"] for result in results] == [201] * 5 + [500] + [201] * 10
        assert results[5]["error"]["code"] == "internal"
        assert [result["event"]["seq"] for n, result in enumerate(results) if n != 5] == list(range(2, 17))


async def _commits(server: asyncpg.Connection, database: Database) -> int:
    """The database's commits, once nobody is connected: a backend that lives may keep its last counts to itself."""

    async def nobody() -> bool:
        query = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = $1 AND backend_type = 'client backend'"
        return bool(await server.fetchval(query, database.name))

    await until(nobody, timeout=15, what="the end of every connection")
    return int(await server.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = $1", database.name))


async def test_2000_concurrent_sends_take_fewer_than_200_transactions(database: Database) -> None:
    server = await asyncpg.connect(database.owner_url.replace(f"/{database.name}", "/postgres"))
    async with running(database) as ingest:
        groups = await asyncio.gather(*(ingest.create("ann") for _ in range(200)))
    before = await _commits(server, database)
    async with running(database, ingest_lanes=4) as ingest:
        sends = [
            [{"conversation_id": groups[(n + 20 * k) % 200], "client_msg_id": new_id(), "body": {}} for n in range(50)]
            for k in range(40)
        ]
        results = await asyncio.gather(*(ingest.send_all("ann", batch) for batch in sends))
        assert Counter(result["status"] for answer in results for result in answer) == {201: 2000}
        backends = await server.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND application_name = 'waybill ingest lanes'",
            database.name,
        )
    after = await _commits(server, database)
    owner = await asyncpg.connect(database.owner_url)
    transactions = await owner.fetchval("SELECT count(DISTINCT xmin::text) FROM event WHERE seq > 1")
    await owner.close()
    await server.close()
    assert backends >= 2
    assert 2 <= transactions <= after - before < 200


async def test_writes_and_reads_go_by_index(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    tables = ["event", "member", "conversation"]
    statement = "SELECT relname, seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = ANY ($1)"
    async with running(database) as ingest:
        group = await ingest.create("ann", "bob")
        for n in range(20):
            await ingest.sent("ann", group)
            await ingest.sent("ann", group, type="edit", target_seq=2, body={"n": n})
            await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": f"user-{n}"})
            await ingest.page("bob", group, after=3)
            await ingest.page("bob", group, before=9)
            await ingest.call("GET", f"/v1/conversations/{group}", "bob")
    try:
        scans: dict[str, tuple[int, int]] = {}

        async def counted() -> bool:
            scans.update({row[0]: (row[1], row[2]) for row in await owner.fetch(statement, tables)})
            return all(scans[table][1] >= 60 for table in tables)

        await until(counted, timeout=10, what="counters of the closed connections")
        assert {table: scans[table][0] for table in tables} == dict.fromkeys(tables, 0)
    finally:
        await owner.close()


async def test_a_held_shard_gives_unavailable_and_nothing_written(database: Database) -> None:
    owner = await asyncpg.connect(database.owner_url)
    (group,) = await make_groups(owner, 1)
    async with open_pool(database.url("ingest"), size=2, name="test") as pool:
        writer = Writer(pool, 10)
        transaction = owner.transaction()
        await transaction.start()
        await owner.execute("SELECT lock_outbox_shards(ARRAY[$1::smallint])", partition_of(group))
        with pytest.raises(UnavailableError):
            await writer.write([message(group)])
        await transaction.rollback()
        (answer,) = await writer.write([message(group)])
        assert isinstance(answer, Written)
        assert answer.seq == 2
    with suppress(asyncpg.PostgresError):
        await owner.close()
