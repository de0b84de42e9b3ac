"""What the hot statements touch in an outbox of two million rows: pages of 8 KiB, never a whole table.

Each runs as its role, as often planned as in service, in a transaction that is undone. The bounds are a few times what
was measured; a scan of any of these tables would touch thousands.
"""

import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from services.gateway import devices, group_receipts, listing, opening, revocations, sweep
from services.receipts import letters
from services.relay import backlog, erasing, journal, parking, retention, shards, tail
from shared import readers
from shared.postgres import to_array
from shared.statements import statements
from tests.databases import Database, Databases, fill, run

pytestmark = pytest.mark.timeout(240)

SIZE = 1 << 26
ROWS = 1_000_000
"""Of each of the two partitions, all of the closed one and half of the other published."""

SHARDS = 64
BATCH = 100
CROWD_SESSIONS = 6_000
CURSOR = SIZE + ROWS // 2

TRACING = statements(str(Path(__file__).parents[2] / "docs" / "operations" / "tracing.md"))
TAIL, BACKLOG, STORE = statements(tail.__file__), statements(backlog.__file__), statements(shards.__file__)
PARKING, RETENTION = statements(parking.__file__), statements(retention.__file__)
ERASING, JOURNAL = statements(erasing.__file__), statements(journal.__file__)
LETTERS = statements(letters.__file__)
LISTING, OPENING = statements(listing.__file__), statements(opening.__file__)
WATCHING, READERS = statements(group_receipts.__file__), statements(readers.__file__)
REVOCATIONS, SWEEP, DEVICES = (statements(one.__file__) for one in (revocations, sweep, devices))

BIG = (
    "outbox_p0", "outbox_p1", "outbox_delivery_p0", "outbox_parked", "outbox_attempt", "dead_letter",
    "dead_letter_action", "dead_letter_attempt", "event", "conversation", "member", "receipt", "device_cursor",
    "device_session", "revocation",
    "erasure",
)  # fmt: skip

FILL = f"""
    CREATE FUNCTION conversation_of(n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE
    RETURN lpad(to_hex(n % 5000), 32, '0')::uuid;

    INSERT INTO outbox (shard, id, conversation_id, seq, event_id, topic, type, source, payload, created_at)
    SELECT n % {SHARDS}, n, conversation_of(n), n / 5000 + 1, uuidv7(make_interval(secs => (n - {2 * ROWS}) * 0.01)),
           CASE WHEN n / {SHARDS} % 4 = 0 THEN 'receipts.v1' ELSE 'events.v1' END, '', '', '',
           clock_timestamp() - interval '10 days' + make_interval(secs => n * 0.01)
    FROM generate_series(1, {ROWS}) AS n;
    SELECT setval('outbox_id_seq', {SIZE + ROWS});
    INSERT INTO outbox
    SELECT shard, id + {SIZE}, conversation_id, seq + 200, uuidv7(make_interval(secs => (id - {ROWS}) * 0.01)), topic,
           type, source, headers, payload, created_at + interval '10 days'
    FROM outbox WHERE id <= {ROWS} ORDER BY id;

    UPDATE outbox_shard SET owner = 'ann', epoch = 1, lease_until = clock_timestamp() + interval '1 hour',
        cursor_id = {CURSOR} - {CURSOR} % {SHARDS} + shard;
    UPDATE outbox_journal AS j SET cursor_id = s.cursor_id, sent_id = s.cursor_id
    FROM outbox_shard AS s WHERE s.shard = j.shard;
    INSERT INTO outbox_delivery (shard, from_id, to_id, topic, partition, base_offset, owner, epoch)
    SELECT shard, min(id), max(id), topic, shard, min(id) / 64, 'ann', 1
    FROM outbox WHERE id <= {CURSOR} GROUP BY shard, id / {SHARDS} / 10, topic;

    -- One row in fifty was parked; those of the last hundredth are open.
    INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state, attempts, retry_at)
    SELECT shard, id, conversation_id, topic, event_id,
           CASE WHEN id < {CURSOR - ROWS // 100} THEN 'sent' ELSE 'failed' END, 2,
            CASE WHEN id >= {CURSOR - ROWS // 100} THEN clock_timestamp() + interval '1 hour' END
    FROM outbox WHERE id <= {CURSOR} AND id / {SHARDS} % 50 = 7;
    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    SELECT shard, id, n, 'no', 'ann', 1 FROM outbox_parked, generate_series(1, 2) AS n;
    INSERT INTO dead_letter (origin, shard, outbox_id, conversation_id, seq, event_id, topic, type, source, headers,
        payload, created_at, state, attempts, error, died_at, settled_at)
    SELECT 'outbox', shard, id, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at,
           CASE WHEN id / {SHARDS} / 50 % 10 = 0 THEN 'dead' ELSE 'sent' END, 2, 'no', created_at,
           CASE WHEN id / {SHARDS} / 50 % 10 <> 0 THEN created_at END
    FROM outbox WHERE id <= {CURSOR} AND id / {SHARDS} % 50 = 8;
    INSERT INTO dead_letter_action (dead_id, action, who) SELECT dead_id, 'retry', 'ann' FROM dead_letter;
    SELECT keep_records('receipts', 'acks.v1', 'c', array_agg(n % {SHARDS}), array_agg(n), array_agg(''::bytea),
        array_agg(''::bytea), NULL, array_agg('no'::text)) FROM generate_series(1, 20000) AS n;
    UPDATE dead_letter SET state = CASE WHEN origin_offset % 2 = 0 THEN 'retrying' ELSE 'sent' END
    WHERE origin = 'acks.v1';

    INSERT INTO conversation (conversation_id, shard, kind, history, creator_id, last_seq, created_at)
    SELECT conversation_of(n), n % {SHARDS}, 'group', 'all', 'u0', 20, clock_timestamp()
    FROM generate_series(0, 4999) AS n;
    INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, created_at)
    SELECT conversation_id, seq, event_id, 'message', 'u' || id % 20, id::text, '', created_at FROM outbox
    WHERE id <= 100000;
    INSERT INTO member (conversation_id, user_id, role, visible)
    SELECT conversation_of(c), 'u' || (c + m) % 5000, 'member', '{{[1,)}}'
    FROM generate_series(0, 4999) AS c, generate_series(0, 9) AS m;
    INSERT INTO receipt (conversation_id, user_id, delivered) SELECT conversation_id, user_id, '{{[1,18)}}' FROM member;
    INSERT INTO device_cursor SELECT conversation_id, user_id, 'phone', '{{[1,18)}}' FROM member;
    INSERT INTO member SELECT conversation_of(c), 'u' || 10000 + m, 'member', '{{[1,)}}'
    FROM generate_series(0, 4999) AS c, generate_series(0, 1) AS m WHERE m = 0 OR c = 0;
    INSERT INTO member SELECT conversation_of(7), 'm' || m, 'member', '{{[1,)}}' FROM generate_series(1, 20000) AS m;
    INSERT INTO receipt (conversation_id, user_id) SELECT conversation_id, user_id FROM member WHERE user_id LIKE 'm%';
    INSERT INTO device_session SELECT 'u' || n % 5000, 'd' || n / 5000, 1, gen_random_uuid(), 'g', clock_timestamp()
    FROM generate_series(0, 49999) AS n;
    INSERT INTO revocation (user_id, created_at)
    SELECT 'r' || n, clock_timestamp() - make_interval(days => 1, secs => n) FROM generate_series(0, 9999) AS n;

    -- Over two days, each conversation in turn: a row per seq, one in fifty of six seqs; and some seqs of a crowd.
    INSERT INTO transition (at, conversation_id, service, kind, cause, user_id, device_id, session_id, from_seq, to_seq)
    SELECT clock_timestamp() + make_interval(secs => n * 0.6), conversation_of(n), 'gateway', 'pushed', 'new',
           'u' || n % 5000, 'phone', lpad(to_hex(n % 5000), 32, '0')::uuid, n / 5000 + 1,
           n / 5000 + 1 + CASE WHEN n % 50 = 0 THEN 5 ELSE 0 END
    FROM generate_series(0, 299999) AS n;
    INSERT INTO transition (conversation_id, service, kind, cause, user_id, session_id, from_seq, to_seq)
    SELECT conversation_of(7), 'gateway', 'pushed', 'new', 'm' || m, gen_random_uuid(), seq, seq
    FROM generate_series(500, 502) AS seq, generate_series(1, {CROWD_SESSIONS}) AS m;
    INSERT INTO transition (service, kind, cause, user_id, session_id)
    SELECT 'gateway', 'session', 'opened', 'u' || n % 5000, lpad(to_hex(n % 5000), 32, '0')::uuid
    FROM generate_series(1, 20000) AS n;

    VACUUM ANALYZE;
"""


@pytest.fixture(scope="module")
def filled(databases: Databases) -> Iterator[Database]:
    made = databases.create()
    run(fill(made, FILL))
    yield made
    databases.drop(made)


class Role:
    """A role's connection, which tells what a statement touches."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._prepared = 0

    async def touched(self, statement: str, *arguments: object) -> int:
        """Pages that the statement touches once it is planned. Fails if it scans one of `BIG`."""
        self._prepared += 1
        name = f"statement_{self._prepared}"
        # The arguments' types come from the statement, as in service.
        await self._connection.execute(f"PREPARE {name} AS {statement}")
        call = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {name}"
        if arguments:
            call += f"({', '.join(map(_literal, arguments))})"
        for _ in range(2):
            transaction = self._connection.transaction()
            await transaction.start()
            try:
                [explained] = json.loads(await self._connection.fetchval(call))
                scans = await self._connection.fetch(
                    "SELECT relname FROM pg_stat_xact_user_tables WHERE seq_scan > 0 AND relname = ANY ($1::text[])",
                    BIG,
                )
            finally:
                await transaction.rollback()
        assert [row[0] for row in scans] == [], f"scanned by {statement[:60]}"
        plan: dict[str, Any] = explained["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list | tuple):
        return "'{" + ",".join("NULL" if one is None else f'"{one}"' for one in value) + "}'"
    return f"'{value}'"


@pytest.fixture
async def relay(filled: Database) -> AsyncIterator[Role]:
    connection = await asyncpg.connect(filled.url("relay"))
    yield Role(connection)
    await connection.close()


@pytest.fixture
async def receipts(filled: Database) -> AsyncIterator[Role]:
    connection = await asyncpg.connect(filled.url("receipts"))
    yield Role(connection)
    await connection.close()


@pytest.fixture
async def gateway(filled: Database) -> AsyncIterator[Role]:
    connection = await asyncpg.connect(filled.url("gateway"))
    yield Role(connection)
    await connection.close()


@pytest.fixture
async def ingest(filled: Database) -> AsyncIterator[Role]:
    connection = await asyncpg.connect(filled.url("ingest"))
    yield Role(connection)
    await connection.close()


@pytest.fixture
async def console(filled: Database) -> AsyncIterator[Role]:
    connection = await asyncpg.connect(filled.url("console"))
    yield Role(connection)
    await connection.close()


@pytest.fixture
async def owner(filled: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(filled.owner_url)
    yield connection
    await connection.close()


ALL = list(range(SHARDS))
HELD = [CURSOR - CURSOR % SHARDS + number for number in ALL]
"""The cursors."""


async def test_reading_behind_a_backlog(relay: Role, owner: asyncpg.Connection) -> None:
    last, life = SIZE + ROWS, await owner.fetchval("SELECT store_incarnation()")
    shards, held, end, most = (to_array(numbers) for numbers in (ALL, HELD, [last] * SHARDS, [128] * SHARDS))
    for name in ("read", "read_large"):
        assert await relay.touched(TAIL[name], shards, held, most, 1_000_000, min(HELD), last, life) < 64 * 160
        assert await relay.touched(TAIL[name], shards, end, most, 1_000_000, last, last, life) < 64 * 8
    assert await relay.touched(BACKLOG["oldest_unsent"]) < 64 * 10
    assert await relay.touched(BACKLOG["backlog"], 1_000) < 64 * 1_100


async def test_moving_cursors(relay: Role, owner: asyncpg.Connection) -> None:
    life = await owner.fetchval("SELECT store_incarnation()")
    shards, epochs, to_ids = to_array(ALL), to_array([1] * SHARDS), [cursor + 640 for cursor in HELD]
    moves = ("ann", shards, epochs, to_array(to_ids))
    placed = (shards, to_array(to_id - 5 for to_id in to_ids), to_array(to_ids), ["events.v1"] * SHARDS)
    assert await relay.touched(STORE["advance"], *moves, *placed, to_array([9] * SHARDS), life) < 64 * 20
    assert await relay.touched(STORE["renew"], "ann", 60, ALL, [1] * SHARDS, life) < 64 * 20
    assert await relay.touched(STORE["take"], "ben", 60, 64) < 64 * 20
    assert await relay.touched(STORE["take_own"], "ann", 60) < 64 * 20
    assert await relay.touched(STORE["give_back"], "ann", ALL, [1] * SHARDS) < 64 * 20


async def test_parking(relay: Role, owner: asyncpg.Connection) -> None:
    rows = await owner.fetch(
        "SELECT id, conversation_id, topic, event_id FROM outbox WHERE shard = 3 AND id > $1 ORDER BY id LIMIT $2",
        HELD[3],
        BATCH,
    )
    ids, conversations, topics, events = zip(*rows, strict=True)
    outcomes = ["failed", "dead"] * (BATCH // 2)
    parks = (ids, conversations, topics, events, outcomes, ["no"] * BATCH, [1000] * BATCH)
    delivery = ([ids[0]], [ids[-1]], ["events.v1"], [7])
    life = await owner.fetchval("SELECT store_incarnation()")
    assert await relay.touched(STORE["park"], "ann", 1, 3, ids[-1], *delivery, *parks, life) < BATCH * 60


async def test_retrying(relay: Role, owner: asyncpg.Connection) -> None:
    row = await owner.fetchrow("SELECT * FROM outbox_parked WHERE shard = 3 AND state = 'failed' ORDER BY id LIMIT 1")
    assert row is not None
    queue = (row["conversation_id"], row["topic"])
    assert await relay.touched(PARKING["queues"], 3) < 50
    assert await relay.touched(BACKLOG["parked"]) < 64 * 50
    assert await relay.touched(PARKING["due_queues"], ALL, 100) < 500
    assert await relay.touched(PARKING["due_letters"], ALL, 100) < 64 * 8
    assert await relay.touched(PARKING["queue"], 3, *queue, 100) < 200
    settle = ("ann", 1, 3, *queue, [row["id"]], [2], ["dead"], [None], ["no"], [None])
    assert await relay.touched(PARKING["settle"], *settle) < 200
    dead_id = await owner.fetchval("SELECT dead_id FROM dead_letter WHERE shard = 3 AND state = 'dead' LIMIT 1")
    assert await relay.touched(PARKING["letter"], dead_id) < 20
    assert await relay.touched(PARKING["settle_letter"], "ann", 1, 3, dead_id, 1, None, "no") < 100
    assert await relay.touched(PARKING["redrive"], "2000-01-01", 100, "redrive") < 3_000


async def test_letters_of_consumers(receipts: Role, relay: Role) -> None:
    """However many others there are, and however many wait: here ten thousand."""
    numbers = list(range(20_001 - BATCH // 2, 20_001 + BATCH // 2))
    records = ([n % SHARDS for n in numbers], numbers, ["k"] * BATCH, ["v"] * BATCH, [None] * BATCH, ["no"] * BATCH)
    buries = "SELECT bury_records($1, $2, $3, $4, $5, $6, $7, $8)"
    assert await receipts.touched(buries, "acks.v1", "c", *records) < 5_000
    assert await receipts.touched(LETTERS["claim"], "acks.v1", "ann", "15 s", BATCH) < 1_000
    assert await receipts.touched(LETTERS["claim"], "other.v1", "ann", "15 s", BATCH) < 30
    assert await relay.touched(PARKING["due_letters"], ALL, 100) < 64 * 8


async def test_rewinding(owner: asyncpg.Connection) -> None:
    """It pays for what it takes back, here a thousand rows, and for no more."""
    assert await Role(owner).touched("SELECT rewind_shard($1, $2, 'ann')", 3, HELD[3] - SHARDS * 1000) < 2_000


async def test_retention(relay: Role) -> None:
    day = 86_400
    assert await relay.touched(RETENTION["make"], 16) < 8_000
    assert await relay.touched(RETENTION["close"], 100 * day) < 64 * 20
    assert await relay.touched(RETENTION["drop"], 100 * day) < 64 * 40
    assert await relay.touched(RETENTION["forget_parked"], 100) < 64 * 20
    assert await relay.touched(RETENTION["expire_letters"], 5 * day, 100) < 100 * 100
    assert await relay.touched(RETENTION["expire_letters"], 100 * day, 100) < 64 * 20
    assert await relay.touched(RETENTION["gauges"]) < 64 * 40


async def test_erasing(relay: Role, owner: asyncpg.Connection) -> None:
    assert await relay.touched(ERASING["expire"], 1_000, 500, 0) < 50, "without a policy"
    await owner.execute("INSERT INTO retention_policy (age, set_by) VALUES ('1 day', 'ann')")
    try:
        # A conversation that has nothing to erase costs one look at its first event.
        assert await relay.touched(ERASING["expire"], 1_000, 500, 0) < 1_000 * 12 + 500 * 60
    finally:
        await owner.execute("DELETE FROM retention_policy")
    await owner.execute(
        "INSERT INTO erasure (conversation_id, from_seq, to_seq, events, cause, at, xid)"
        " SELECT gen_random_uuid(), 1, 1, 1, 'delete', clock_timestamp() - interval '1 hour', pg_snapshot_xmin("
        "pg_current_snapshot()) FROM generate_series(1, 20000)"
    )
    assert await relay.touched(ERASING["to_vacuum"], 60) < 100
    assert await relay.touched(ERASING["gauges"]) < 50
    events = [row[0] for row in await owner.fetch("SELECT event_id FROM dead_letter ORDER BY dead_id LIMIT 100")]
    assert await relay.touched("SELECT erase_copies($1)", events) < 100 * 60


async def test_dropping_looks_at_the_ends_only(relay: Role) -> None:
    """The partition itself goes with its files."""
    assert await relay.touched(RETENTION["drop"], 1) < 8_000


@pytest.mark.parametrize("id_", [ROWS // 3 // SHARDS * SHARDS + 5, CURSOR - 5000, SIZE + ROWS - 5000])
async def test_where_a_row_is(console: Role, owner: asyncpg.Connection, id_: int) -> None:
    row = await owner.fetchrow("SELECT shard, event_id FROM outbox WHERE id = $1 AND shard = $1 % 64", id_)
    assert row is not None
    assert await console.touched("SELECT * FROM outbox_state WHERE shard = $1 AND id = $2", row["shard"], id_) < 500
    assert await console.touched("SELECT * FROM outbox_state WHERE event_id = $1", row["event_id"]) < 1_500
    for name in ("how_often_tried", "why_it_failed", "what_became_of_its_letter", "where_in_kafka"):
        assert await console.touched(TRACING[name], row["event_id"]) < 1_500, name


async def test_the_way_of_an_event(console: Role, owner: asyncpg.Connection) -> None:
    event_id = await owner.fetchval("SELECT event_id FROM event WHERE seq = 7 LIMIT 1")
    assert await console.touched(TRACING["event_by_seq"], "0" * 32, 7) < 20
    assert await console.touched(TRACING["event_by_client_id"], "0" * 32, "u1", "5") < 20
    assert await console.touched(TRACING["who_sent_it"], event_id) < 20
    assert await console.touched(TRACING["to_whom"], event_id) < 300
    assert await console.touched(TRACING["not_yet_delivered"], "u17", 1, timedelta(0), 100) < 500
    assert await console.touched(TRACING["not_yet_delivered"], "", 10, timedelta(0), 100) < 5_000


async def test_journaling_costs_by_the_row(relay: Role, owner: asyncpg.Connection) -> None:
    """As far behind as half a million rows, of which a call takes 1,984, a quarter of them receipts."""
    await owner.execute("UPDATE outbox_journal SET cursor_id = $1, sent_id = $1", SIZE)
    try:
        call = ("ann", to_array(ALL), to_array([1] * SHARDS), 2_000)
        assert await relay.touched(JOURNAL["journal"], *call) < 2_000 * 25
        assert await relay.touched(JOURNAL["lag"]) < 64 * 40
    finally:
        await owner.execute(
            "UPDATE outbox_journal AS j SET cursor_id = s.cursor_id FROM outbox_shard AS s WHERE s.shard = j.shard"
        )
    assert await relay.touched(JOURNAL["journal"], *call) < 64 * 10
    assert await relay.touched(JOURNAL["lag"]) < 64 * 10
    assert await relay.touched(RETENTION["skip_journal"], 100 * 86_400) < 64 * 20


async def test_what_happened_is_found_by_seq_and_by_session(console: Role, owner: asyncpg.Connection) -> None:
    """In fifteen days' partitions; a row of the log is found by some three pages in each."""
    until = "2100-01-01"
    ago = str(await owner.fetchval("SELECT clock_timestamp() - interval '1 hour'"))
    assert await console.touched(TRACING["what_happened"], f"{42:032x}", 30, ago) < 400
    found = await owner.fetch(
        "SELECT from_seq, to_seq FROM transitions_around($1, 4, 4, $2::text::timestamptz)", f"{50:032x}", ago
    )
    assert sorted(map(tuple, found)) == [(1, 6), (2, 7), (3, 8), (4, 9)]
    assert await console.touched(TRACING["what_happened"], CROWD, 501, ago) < CROWD_SESSIONS + 500
    assert await console.touched(TRACING["sessions_of"], "u17", ago, until) < 200
    assert await console.touched(TRACING["what_happened_in_session"], "u17", f"{17:032x}", ago, until) < 3_000


CROWD, EVERYWHERE = f"{7:032x}", "u10000"
"""A conversation of 20,000 members, and a user in 5,000 conversations."""


async def test_listing_costs_by_the_row(gateway: Role, owner: asyncpg.Connection) -> None:
    rows = await owner.fetch("SELECT user_id, conversation_id FROM member WHERE user_id ~ '^u[0-9]{1,3}$' LIMIT 2000")
    users, conversations = zip(*rows, strict=True)
    count = len(rows)
    wanted = (users, ["phone"] * count, conversations, [18] * count, [None] * count)
    assert count == 2_000
    assert await gateway.touched(LISTING["list_conversations"], *wanted) < count * 60
    named = [await owner.fetchval("SELECT event_id FROM event LIMIT 1")] * count
    assert await gateway.touched(LISTING["list_conversations"], *wanted[:4], named) < count * 64
    crowd = [[f"m{n}" for n in range(1, 101)], ["phone"] * 100, [CROWD] * 100, [None] * 100, [None] * 100]
    assert await gateway.touched(LISTING["list_conversations"], *crowd) < 100 * 60
    assert await gateway.touched(LISTING["conversations_of_users"], [EVERYWHERE]) < 5_000 * 5
    for since in (None, 1, 2**62):
        assert await gateway.touched(LISTING["changed_since"], [EVERYWHERE], [since]) < 5_000 * 16
        assert await gateway.touched(LISTING["changed_since"], ["m1", "m2", "u10001"], [since] * 3) < 3 * 40


@pytest.mark.parametrize("state", ["read", "delivered", "unread"])
async def test_who_has_a_seq_costs_by_the_member(gateway: Role, ingest: Role, state: str) -> None:
    """The counts walk the members and their receipts once, whoever else has some; a page looks at its own."""
    for role in (gateway, ingest):
        for after in ("", "m19999", "x"):
            crowd = (CROWD, "m1", 7, state, after, 501)
            assert await role.touched(READERS["message_receipts"], *crowd) < 2 * 20_000 + 501 * 6
        assert await role.touched(READERS["message_receipts"], f"{9:032x}", "u9", 7, state, "", 501) < 200


async def test_marks_so_far_cost_by_those_that_are_told(gateway: Role) -> None:
    watchers = [f"m{n}" for n in range(1, 101)]
    assert await gateway.touched(WATCHING["marks_so_far"], CROWD, watchers, 501) < 501 * 2 + 100 * 6


async def test_opening_costs_by_the_hello(gateway: Role) -> None:
    count = 200
    hellos = [f"u{n}" for n in range(count)], ["d1"] * count, [f"{n:032x}" for n in range(count)]
    assert await gateway.touched(OPENING["open_sessions"], *hellos, "g", [1.0] * count, ["j"] * count) < count * 40
    assert await gateway.touched(REVOCATIONS["newest"], 120.0) < 20
    some = [f"u{n}" for n in range(1000)], ["d1"] * 1000
    assert await gateway.touched(DEVICES["numbers"], *some) < 1_000 * 8


async def test_sweeping_costs_by_the_row(gateway: Role, owner: asyncpg.Connection) -> None:
    last = [SIZE + ROWS] * SHARDS
    assert await gateway.touched(SWEEP["sweep"], to_array(ALL), to_array(last), last[0], 100) < 64 * 10
    # Half a million rows behind, of which a turn reads 6,400.
    assert await gateway.touched(SWEEP["sweep"], to_array(ALL), to_array(HELD), min(HELD), 100) < 64 * 130
    assert await gateway.touched(SWEEP["sweep"], to_array(ALL), to_array([0] * SHARDS), 0, 100) < 64 * 140
    assert await gateway.touched(SWEEP["ends"], to_array(ALL)) < 64 * 40
    rows = await owner.fetch("SELECT shard, id FROM outbox WHERE shard = 3 AND id > $1 ORDER BY id LIMIT 200", HELD[3])
    shards, ids = zip(*rows, strict=True)
    assert await gateway.touched(SWEEP["contents"], to_array(shards), to_array(ids)) < 200 * 12
