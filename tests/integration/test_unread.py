"""What is unread, by counts of whole buckets, against a recount event by event."""

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.listing import Wanted, list_conversations
from services.ingest.admission import admit
from services.ingest.counting import Counting
from services.ingest.unread import unread_in_all
from services.ingest.writer import Answer, Writer
from shared.postgres import Pool, open_pool
from tests.databases import Database, Databases, fill, run
from tests.gateways import Gateway, House
from tests.ingest import Ingest, running
from tests.rows import DIGEST_KEY, SERVICE, Rows, _item, open_rows, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

BUCKET = 4
"""Seqs of a bucket here, so that short histories have many."""

RECOUNT = """
    SELECT m.user_id, c.conversation_id::text AS conversation_id, m.visible, coalesce(r.read_seq, 0) AS read_seq,
           CASE WHEN upper_inf(m.visible) THEN c.last_seq ELSE visible_head(m.visible, c.last_seq) END AS head,
           (SELECT count(*) FROM event AS e
            WHERE e.conversation_id = m.conversation_id AND e.seq <@ m.visible AND e.seq > coalesce(r.read_seq, 0)
              AND e.type IN ('message', 'system') AND e.sender_id <> m.user_id
              AND e.recalled_by IS NULL AND e.deleted_by IS NULL) AS unread
    FROM member AS m
    JOIN conversation AS c USING (conversation_id)
    LEFT JOIN receipt AS r USING (conversation_id, user_id)
    WHERE m.conversation_id = $1
"""

WRONG_COUNTS = """
    WITH recounted AS (
        SELECT b.bucket, coalesce(e.sender_id, '') AS sender_id, count(e.seq)::int AS amount
        FROM (SELECT bucket FROM event_count WHERE conversation_id = $1 AND sender_id = '') AS b
        LEFT JOIN event AS e ON e.conversation_id = $1 AND (e.seq - 1) / count_bucket() = b.bucket
            AND e.type IN ('message', 'system') AND e.recalled_by IS NULL AND e.deleted_by IS NULL
        GROUP BY GROUPING SETS ((b.bucket), (b.bucket, e.sender_id))
        HAVING grouping(e.sender_id) = 1 OR e.sender_id IS NOT NULL
    )
    SELECT bucket, sender_id, c.amount AS counted, r.amount AS is
    FROM recounted AS r
    FULL JOIN (SELECT * FROM event_count WHERE conversation_id = $1) AS c USING (bucket, sender_id)
    WHERE coalesce(c.amount, 0) <> coalesce(r.amount, 0)
"""

UNCOUNTED = """
    SELECT b FROM conversation, generate_series(0, last_seq / count_bucket() - 1) AS b
    WHERE conversation_id = $1
      AND NOT EXISTS (SELECT FROM event_count WHERE conversation_id = $1 AND sender_id = '' AND bucket = b)
"""


async def small_buckets(connection: asyncpg.Connection) -> None:
    await connection.execute(
        f"CREATE OR REPLACE FUNCTION count_bucket() RETURNS bigint LANGUAGE sql IMMUTABLE RETURN {BUCKET}"
    )


@pytest.fixture(scope="module")
def small(databases: Databases) -> Iterator[Database]:
    """A database with small buckets."""
    made = databases.create()

    async def prepare() -> None:
        connection = await asyncpg.connect(made.owner_url)
        try:
            await small_buckets(connection)
        finally:
            await connection.close()

    run(prepare())
    yield made
    databases.drop(made)


@pytest.fixture
async def rows(small: Database) -> AsyncIterator[Rows]:
    async with open_rows(small) as made:
        yield made


@pytest.fixture
async def gateway_pool(small: Database) -> AsyncIterator[Pool]:
    async with open_pool(small.url("gateway"), size=2, name="tests") as made:
        yield made


async def write(pool: Pool, conversation_id: str, sender: str, *events: tuple[str, Any, int | None]) -> list[Answer]:
    """Write what may be refused: a type, a body and a target each."""
    sends = [
        admit(SERVICE, _item(conversation_id, sender, body, type_, target), digest_key=DIGEST_KEY)
        for type_, body, target in events
    ]
    return list(await Writer(pool, 5.0).write(sends))


async def read_up_to(owner: asyncpg.Connection, conversation_id: str, user_id: str, seq: int) -> None:
    await owner.execute(
        "INSERT INTO receipt (conversation_id, user_id, read_seq) VALUES ($1, $2, $3)"
        " ON CONFLICT (conversation_id, user_id) DO UPDATE SET read_seq = $3, read_version = receipt.read_version + 1",
        conversation_id,
        user_id,
        seq,
    )


async def compare(owner: asyncpg.Connection, gateway: Pool, ingest: Pool, *conversations: str) -> None:
    """Listing, totals and the counts themselves say what a recount says. The users are in no other conversation."""
    totals: dict[str, list[int]] = {}
    for conversation_id in conversations:
        assert await owner.fetch(WRONG_COUNTS, conversation_id) == []
        there = await owner.fetch(RECOUNT, conversation_id)
        listed = await list_conversations(gateway, [Wanted(row["user_id"], "phone", conversation_id) for row in there])
        for row, one in zip(there, listed.rows, strict=True):
            totals.setdefault(row["user_id"], []).append(row["unread"])
            counted = await gateway.fetchval(
                "SELECT unread_of($1, $2, $3, $4, $5)",
                *(conversation_id, row["user_id"], row["visible"], row["read_seq"], row["head"]),
            )
            assert one is not None
            assert (one.unread, counted) == (row["unread"], row["unread"]), dict(row)
    for user_id, unread in totals.items():
        found = await unread_in_all(ingest, user_id, timeout_s=5)
        assert (found.unread, found.conversations) == (sum(unread), sum(one > 0 for one in unread)), user_id


USERS = ("ann", "ben", "cat")
_who = st.sampled_from(USERS)
_seqs = st.integers(1, 40)
_steps = st.one_of(
    st.tuples(st.just("messages"), _who, st.integers(1, 9)),
    st.tuples(st.just("notice"), _who, st.just(1)),
    st.tuples(st.sampled_from(["edit", "recall", "delete"]), _who, _seqs),
    st.tuples(st.sampled_from(["add", "remove", "leave"]), _who, st.just(0)),
    st.tuples(st.just("title"), _who, st.just(0)),
    st.tuples(st.just("read"), _who, st.integers(0, 40)),
    st.tuples(st.just("uncounted"), _who, st.integers(0, 9)),
    st.tuples(st.just("late"), _who, st.integers(1, 3)),
)
Step = tuple[str, str, int]


class Play:
    """A history in a group; users may be refused what they ask for."""

    def __init__(self, owner: asyncpg.Connection, ingest: Pool, group: str, names: dict[str, str]) -> None:
        self.owner, self.ingest, self.group, self.names = owner, ingest, group, names

    async def step(self, what: str, who: str, number: int) -> None:
        name = self.names[who]
        admin = self.names["ann"]
        match what:
            case "messages":
                await write(self.ingest, self.group, name, *[("message", {"n": n}, None) for n in range(number)])
            case "notice":
                await write(self.ingest, self.group, name, ("system", {"n": 1}, None))
            case "edit" | "recall" | "delete":
                body = {"n": 2} if what == "edit" else None
                await write(self.ingest, self.group, name if what == "edit" else admin, (what, body, number))
            case "add" | "remove" | "leave":
                body = {"action": what} | ({} if what == "leave" else {"user_id": name})
                await write(self.ingest, self.group, name if what == "leave" else admin, ("member", body, None))
            case "title":
                await write(self.ingest, self.group, admin, ("conversation", {"title": "T"}, None))
            case "read":
                await read_up_to(self.owner, self.group, name, number)
            case "uncounted":  # as if a writer that counts nothing had finished it
                await self.owner.execute(
                    "DELETE FROM event_count WHERE conversation_id = $1 AND bucket = $2", self.group, number
                )
            case "late":
                await self.ingest.fetchval("SELECT close_late($1, $2)", self.group, number)


@pytest.mark.promise("protocol.9.unread")
def test_counts_and_recounts_agree_over_every_history(small: Database) -> None:
    with asyncio.Runner() as runner, ExitStack() as stack:

        def pool(url: str, size: int = 1) -> Pool:
            opened = open_pool(url, size=size, name="test")
            stack.callback(lambda: runner.run(opened.__aexit__(None, None, None)))
            return runner.run(opened.__aenter__())

        gateway, ingest = pool(small.url("gateway")), pool(small.url("ingest"))
        rows_of = open_rows(small)
        rows = runner.run(rows_of.__aenter__())
        stack.callback(lambda: runner.run(rows_of.__aexit__(None, None, None)))

        async def play(history: str, steps: list[Step]) -> None:
            names = {who: user(who) for who in USERS}
            groups = [await rows.group(*names.values(), history=history) for _ in range(2)]
            played = [Play(rows.owner, ingest, group, names) for group in groups]
            for number, step in enumerate(steps):
                await played[number % 5 == 4].step(*step)
                if number % 8 == 7:
                    await compare(rows.owner, gateway, ingest, *groups)
            await compare(rows.owner, gateway, ingest, *groups)

        @settings(max_examples=40, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(["joined", "all"]), st.lists(_steps, min_size=5, max_size=40))
        def check(history: str, steps: list[Step]) -> None:
            runner.run(play(history, steps))

        check()


async def test_writers_side_by_side_count_each_bucket_once_and_right(
    rows: Rows, small: Database, gateway_pool: Pool
) -> None:
    chance = random.Random(5)
    names = [user("ann"), user("ben")]
    groups = [await rows.group(*names) for _ in range(3)]

    async def writes(pool: Pool) -> None:
        for _ in range(25):
            group, name = chance.choice(groups), chance.choice(names)
            if chance.random() < 0.4:
                await write(pool, group, names[0], (chance.choice(["recall", "delete"]), None, chance.randint(2, 60)))
            else:
                await write(pool, group, name, *[("message", {}, None)] * chance.randint(1, 6))
            if chance.random() < 0.2:
                await pool.fetchval("SELECT close_late($1, 2)", group)

    async with open_pool(small.url("ingest"), size=8, name="tests") as pool:
        await asyncio.gather(*(writes(pool) for _ in range(8)))
        for group in groups:
            assert await rows.owner.fetchval("SELECT last_seq FROM conversation WHERE conversation_id = $1", group) > 60
            assert await rows.owner.fetch(UNCOUNTED, group) == []
        await compare(rows.owner, gateway_pool, pool, *groups)


async def test_a_writer_of_before_counts_nothing_and_its_recalls_count_all_the_same(
    rows: Rows, gateway_pool: Pool
) -> None:
    """Its events are counted by the walk, and what it hides in counted buckets counts no more, whatever it calls."""
    ann, ben = user("ann"), user("ben")
    group = await rows.group(ann, ben)
    await rows.messages(group, ann, 30)
    await rows.owner.execute("DELETE FROM event_count WHERE conversation_id = $1", group)
    await compare(rows.owner, gateway_pool, rows.ingest_pool, group)
    before = await rows.owner.fetch(UNCOUNTED, group)
    assert len(before) == 31 // BUCKET
    counting = Counting(rows.ingest_pool)
    after = await counting.look("00000000-0000-0000-0000-000000000000")
    while after is not None:
        after = await counting.look(after)
    assert await rows.owner.fetch(UNCOUNTED, group) == []
    for column in ("recalled_by", "deleted_by", "deleted_by"):
        await rows.owner.execute(
            f"UPDATE event SET {column} = 31, edited_by = 9 WHERE conversation_id = $1 AND seq IN (7, 11)", group
        )
    await compare(rows.owner, gateway_pool, rows.ingest_pool, group)
    assert await gateway_pool.fetchval("SELECT unread_of($1, $2, '{[1,)}', 0, 31)", group, ben) == 28


async def test_the_walk_looks_at_all_conversations(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.ingest.counting._CONVERSATIONS", 3)
    monkeypatch.setattr("services.ingest.counting._BUCKETS", 2)
    monkeypatch.setattr("services.ingest.counting._PAUSE_S", 0.0)
    ann = user("ann")
    groups = [await rows.group(ann) for _ in range(7)]
    for group in groups:
        await rows.messages(group, ann, 22)
    await rows.owner.execute("DELETE FROM event_count WHERE conversation_id = ANY ($1::uuid[])", groups)
    walking = asyncio.create_task(Counting(rows.ingest_pool, soon_s=0).run())

    async def all_are_counted() -> bool:
        return not [group for group in groups if await rows.owner.fetch(UNCOUNTED, group)]

    try:
        await until(all_are_counted, timeout=20, what="counts of all buckets")
    finally:
        walking.cancel()
        await asyncio.wait([walking])
    for group in groups:
        assert await rows.owner.fetch(WRONG_COUNTS, group) == []


FAR = 200_000
FILL_FAR = f"""
    INSERT INTO conversation (conversation_id, shard, kind, history, creator_id, last_seq, created_at)
    VALUES ('{uuid.UUID(int=1)}', 1, 'group', 'all', 'u0', {FAR}, now());
    INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, created_at)
    SELECT '{uuid.UUID(int=1)}', n, uuidv7(), 'message', 'u' || n % 20, n::text, '', now()
    FROM generate_series(1, {FAR}) AS n;
    INSERT INTO member (conversation_id, user_id, role, visible)
    SELECT '{uuid.UUID(int=1)}', 'u' || n, 'member', '{{[1,)}}' FROM generate_series(0, 19) AS n;
    SELECT count(close_late('{uuid.UUID(int=1)}', 10)) FROM generate_series(1, {FAR // 512 // 10 + 1});
    VACUUM ANALYZE
"""


async def test_far_behind_costs_rows_of_counts_and_not_of_events(database: Database) -> None:
    """A hundred pages or so, where the events have thousands."""
    await fill(database, FILL_FAR)
    for role, call in (
        ("gateway", f"SELECT unread_of('{uuid.UUID(int=1)}', 'u3', '{{[1,)}}', 0, {FAR})"),
        ("gateway", f"SELECT unread_of('{uuid.UUID(int=1)}', 'u3', '{{[1,5000),[70001,)}}', 700, {FAR - 300})"),
        ("ingest", "SELECT * FROM unread_in_all('u3')"),
    ):
        connection = await asyncpg.connect(database.url(role))
        try:
            for _ in range(2):
                plan = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}")
                told = await connection.fetchval(call)
        finally:
            await connection.close()
        assert told > FAR * 0.6
        [explained] = json.loads(plan)
        assert explained["Plan"]["Shared Hit Blocks"] + explained["Plan"]["Shared Read Blocks"] < 250, call


@pytest.fixture
async def ingest(module_database: Database) -> AsyncIterator[Ingest]:
    async with running(module_database) as made:
        yield made


def totals(user_id: str, unread: int, conversations: int, muted: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    of_muted = {"unread": muted[0], "conversations": muted[1]}
    return {"user_id": user_id, "unread": unread, "conversations": conversations, "muted": of_muted}


@pytest.mark.promise("protocol.6.unread")
async def test_totals_over_http(ingest: Ingest) -> None:
    ann, ben = user("ann"), user("ben")
    groups = [await ingest.create(ann, ben) for _ in range(4)]
    for number, group in enumerate(groups):
        for _ in range(number):
            await ingest.sent(ann, group)
    await ingest.sent("bot", groups[3], scope="service", type="system", body={"note": 1})
    target = await ingest.sent(ann, groups[2])
    await ingest.sent(ann, groups[2], type="recall", target_seq=target["seq"])
    assert (await ingest.call("GET", "/v1/unread", ben)).json == totals(ben, 7, 3)
    assert (await ingest.call("GET", "/v1/unread", ann)).json == totals(ann, 1, 1)
    for group, said in ((groups[3], {"muted": True}), (groups[1], {"archived": True})):
        answer = await ingest.call("PUT", f"/v1/conversations/{group}/settings", ben, json=said)
        assert answer.status == 200
    told = totals(ben, 3, 2, (4, 1))
    assert (await ingest.call("GET", "/v1/unread", ben, params={"user_id": ben})).json == told
    assert (await ingest.call("GET", "/v1/unread", "shop", scope="service", params={"user_id": ben})).json == told
    nobody = user("nobody")
    assert (await ingest.call("GET", "/v1/unread", nobody)).json == totals(nobody, 0, 0)
    await ingest.sent(ben, groups[3], type="member", body={"action": "leave"})
    assert (await ingest.call("GET", "/v1/unread", ben)).json == told, "what was visible is still unread"


@pytest.mark.promise("protocol.3.listed_totals")
async def test_a_whole_listing_tells_the_totals_and_a_partial_one_does_not(home: House, gateway: Gateway) -> None:
    ann, ben = user("ann"), user("ben")
    groups = [await home.group(ann, ben) for _ in range(3)]
    for number, group in enumerate(groups, 2):
        await home.messages(group, ann, number)
    await home.owner.execute(
        "UPDATE member SET muted = true WHERE user_id = $1 AND conversation_id = $2", ben, groups[2]
    )
    await home.settled()
    client = await gateway.client(ben, cursors={})
    [listed] = client.all("listed")
    assert (listed["unread"], listed["muted_unread"]) == (5, 4)
    assert [frame["muted"] for frame in client.all("conversation")].count(True) == 1
    await client.close()
    await home.messages(groups[0], ann, 1)
    again = await gateway.client(ben, since=listed["since"])
    [partial] = again.all("listed")
    assert partial.keys() == {"t", "count", "since"}
    whole = await gateway.client(ben, "pad", since="of another store")
    assert whole.all("listed")[0]["unread"] == 6
    none = await gateway.client(user("nobody"), cursors={})
    assert (none.all("listed")[0]["unread"], none.all("listed")[0]["muted_unread"]) == (0, 0)
