"""The log of state changes, whole: what is sent and published is journaled once, however the relay dies."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiokafka import ConsumerRecord

from services.relay import shards as relay_shards
from services.relay.held import HeldShard
from services.relay.journal import Journal
from services.relay.metrics import JOURNAL_SKIPPED
from services.relay.retention import Periods, Retention
from services.relay.shards import Delivery, Move, ShardStore
from shared.kafka import Topics, partition_of
from shared.postgres import Pool, open_pool
from shared.statements import statements
from tests.databases import Database
from tests.gateways import Gateway, House, house
from tests.relays import QUICK, Relays, add, all_records, conversation, drained
from tests.rows import Rows, open_rows, user
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

pytestmark = pytest.mark.timeout(300)

TRACING = statements(str(Path(__file__).parents[2] / "docs" / "operations" / "tracing.md"))
LONG_AGO, LATER = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

Log = list[dict[str, Any]]


@pytest.fixture
async def rows(database: Database) -> AsyncIterator[Rows]:
    async with open_rows(database) as made:
        yield made


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=2, name="tests") as made:
        yield made


async def log(db: asyncpg.Connection, *kinds: str) -> Log:
    """What the log has of these kinds, with the detail as it was."""
    found = await db.fetch("SELECT * FROM transition WHERE kind = ANY ($1::text[]) ORDER BY at, from_seq", kinds)
    return [{**row, "detail": json.loads(row["detail"]) if row["detail"] else None} for row in map(dict, found)]


def ranges(found: Log) -> list[tuple[str, int, int]]:
    return sorted((str(row["conversation_id"]), row["from_seq"], row["to_seq"]) for row in found)


def offsets_of(row: dict[str, Any]) -> dict[int, int]:
    """Where each seq of a `published` row lies."""
    seqs, detail = range(row["from_seq"], row["to_seq"] + 1), row["detail"]
    at = detail.get("offsets") or range(detail["offset"], detail["offset"] + len(seqs))
    return dict(zip(seqs, at, strict=True))


class Shards:
    """Moves cursors as the relay does, without Kafka, and journals behind them."""

    def __init__(self, pool: Pool, owner_db: asyncpg.Connection) -> None:
        self.pool, self.owner_db = pool, owner_db
        self.store = ShardStore(pool, "ann", 60)
        self.held: dict[int, HeldShard] = {}
        self.offset: dict[int, int] = defaultdict(int)

    async def take(self) -> None:
        for taken in await self.store.take(64):
            self.held[taken.shard] = HeldShard(taken, 1e9)

    async def publish(self, shard: int, *, most: int | None = None, topic: str = "events.v1") -> list[int]:
        """All that is new in a shard, or the first rows, as one delivery; their ids."""
        held = self.held[shard]
        found = await self.owner_db.fetch(
            "SELECT id, topic FROM outbox WHERE shard = $1 AND id > $2 ORDER BY id LIMIT $3", shard, held.acked_id, most
        )
        ids = [row["id"] for row in found]
        own = [row["id"] for row in found if row["topic"] == topic]
        delivery = Delivery(own[0], own[-1], topic, self.offset[shard])
        assert await self.store.advance([Move(shard, held.epoch, ids[-1], [delivery])]) == set()
        held.acked_id = ids[-1]
        self.offset[shard] += len(own)
        return own

    def journal(self, most: int = 2_000) -> Journal:
        return Journal(self.pool, "ann", self.held, lambda: False, most=most)


@pytest.fixture
async def shards(pool: Pool, owner_db: asyncpg.Connection) -> Shards:
    made = Shards(pool, owner_db)
    await made.take()
    return made


async def in_one_shard(rows: Rows, count: int, *members: str) -> list[str]:
    """Groups of one shard."""
    found: dict[int, list[str]] = defaultdict(list)
    while True:
        group = await rows.group(*members)
        same = found[partition_of(group)]
        same.append(group)
        if len(same) == count:
            return same


async def test_what_one_delivery_brings_of_a_conversation_is_one_row(
    rows: Rows, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    ann, bob = user("ann"), user("bob")
    one, other = await in_one_shard(rows, 2, ann, bob)
    shard = partition_of(one)
    await rows.messages(one, ann, 3)
    await rows.messages(other, bob, 1)
    await rows.messages(one, bob, 2)
    await shards.publish(shard)
    assert not await shards.journal().look()

    sent = await log(owner_db, "sent")
    assert {(row["service"], row["cause"], row["device_id"], row["trace_id"]) for row in sent} == {
        ("ingest", "new", None, None)
    }
    of = {name: ranges([row for row in sent if row["user_id"] == name]) for name in (ann, bob)}
    assert of[bob] == sorted([(one, 5, 6), (other, 2, 2)])
    assert [row for row in of[ann] if row[0] == one] in ([(one, 1, 4)], [(one, 1, 1), (one, 2, 4)])
    published = await log(owner_db, "published")
    assert ranges(published) == sorted([(one, 1, 6), (other, 1, 2)])
    for row in published:
        detail = row["detail"]
        ids = await owner_db.fetch(
            "SELECT seq, (SELECT count(*) FROM outbox AS b WHERE b.shard = o.shard AND b.id < o.id) AS place"
            " FROM outbox AS o WHERE conversation_id = $1 ORDER BY seq",
            row["conversation_id"],
        )
        assert list(offsets_of(row).values()) == [one["place"] for one in ids]
        assert (row["service"], row["cause"], detail["topic"], detail["partition"], detail["epoch"]) == (
            "relay", "new", "events.v1", shard, 1,
        )  # fmt: skip
        assert row["at"] == await owner_db.fetchval("SELECT acked_at FROM outbox_delivery")


async def test_a_call_that_ends_within_a_delivery_counts_on(
    rows: Rows, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    """Receipts lie between, and rows that are parked: neither counts."""
    ann = user("ann")
    (group,) = await in_one_shard(rows, 1, ann)
    shard = partition_of(group)
    await shards.publish(shard)
    await rows.messages(group, ann, 4)
    await rows.mark(group, ann, held="{[1,4)}")
    await rows.messages(group, ann, 6)
    parked = await owner_db.fetchval("SELECT id FROM outbox WHERE shard = $1 AND seq = 3", shard)
    await owner_db.execute(
        "INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state)"
        " SELECT shard, id, conversation_id, topic, event_id, 'failed' FROM outbox WHERE id = $1",
        parked,
    )
    await shards.publish(shard)
    calls = 1
    while await shards.journal(most=2).look():
        calls += 1
    assert calls >= 6
    assert await shards.journal().look() is False
    offsets: dict[int, int] = {}
    for row in await log(owner_db, "published"):
        assert not offsets.keys() & offsets_of(row).keys()
        offsets |= offsets_of(row)
    assert offsets == {1: 0, 2: 1, **{seq: seq - 2 for seq in range(4, 12)}}
    covered = [seq for _, low, high in ranges(await log(owner_db, "sent")) for seq in range(low, high + 1)]
    assert sorted(covered) == list(range(1, 12)), "what is parked was sent, too"


async def test_a_delivery_that_was_kept_twice_counts_once(
    rows: Rows, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    """The answer to its first half was lost, and it was told again with what came since."""
    ann = user("ann")
    group = await rows.group(ann)
    shard = partition_of(group)
    await rows.messages(group, ann, 2)
    ids = await shards.publish(shard)
    await rows.messages(group, ann, 2)
    await shards.publish(shard)
    await owner_db.execute("UPDATE outbox_delivery SET from_id = $1, base_offset = 0", ids[0])
    while await shards.journal(most=1).look():
        pass
    offsets = [(row["from_seq"], row["detail"]["offset"]) for row in await log(owner_db, "published")]
    assert sorted(offsets) == [(seq, seq - 1) for seq in range(1, 6)]


async def test_who_holds_no_shard_journals_nothing_and_two_journal_nothing_twice(
    rows: Rows, pool: Pool, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    ann = user("ann")
    group = await rows.group(ann)
    await shards.publish(partition_of(group))
    assert not await Journal(pool, "ben", shards.held, lambda: False).look()
    epoch = {number: HeldShard(relay_shards.Taken(number, 7, 0), 1e9) for number in shards.held}
    assert not await Journal(pool, "ann", epoch, lambda: False).look()
    assert await log(owner_db, "sent", "published") == []
    # A second relay looks while the first one's transaction is open.
    first = await asyncpg.connect(rows.database.url("relay"))
    try:
        async with first.transaction():
            statement = "SELECT read FROM journal_outbox('ann', $1::smallint[], $2::bigint[], 100)"
            assert await first.fetchval(statement, list(shards.held), [1] * 64) == 1
            assert not await shards.journal().look()
    finally:
        await first.close()
    assert not await shards.journal().look()
    assert ranges(await log(owner_db, "published")) == [(group, 1, 1)]


async def test_what_is_published_again_is_logged_again_and_what_was_sent_is_not(
    rows: Rows, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    ann = user("ann")
    group = await rows.group(ann)
    shard = partition_of(group)
    await rows.messages(group, ann, 3)
    ids = await shards.publish(shard)
    # Not journaled yet: the rewind sees to it, before it forgets where they are.
    await owner_db.execute("SELECT rewind_shard($1, $2, 'eve')", shard, ids[2])
    assert ranges(await log(owner_db, "published")) == [(group, 1, 4)]
    await shards.take()
    await shards.publish(shard)
    while await shards.journal().look():
        pass
    published = await log(owner_db, "published")
    assert ranges(published) == [(group, 1, 4), (group, 3, 4)]
    assert sorted(row["detail"]["offset"] for row in published) == [0, 4]
    covered = [seq for _, low, high in ranges(await log(owner_db, "sent")) for seq in range(low, high + 1)]
    assert sorted(covered) == [1, 2, 3, 4]
    (rewound,) = await log(owner_db, "rewound")
    assert rewound["detail"] == {"shard": shard, "id": ids[2], "was_at": ids[3], "who": "eve"}


async def test_a_delivery_over_many_partitions_is_placed_to_the_record_however_small_the_portions(
    rows: Rows, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    ann = user("ann")
    group = await rows.group(ann)
    shard = partition_of(group)
    for _ in range(4):
        await rows.messages(group, ann, 2)
        await owner_db.execute("SELECT close_outbox_partition('0 s')")
    await shards.publish(shard)
    while await shards.journal(1).look():
        pass
    placed: dict[int, int] = {}
    for row in await log(owner_db, "published"):
        placed |= offsets_of(row)
    assert placed == {seq: seq - 1 for seq in range(1, 10)}


async def test_a_rewind_logs_first_what_it_makes_forgotten_however_much_that_is(
    rows: Rows, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    ann = user("ann")
    group = await rows.group(ann)
    shard = partition_of(group)
    await rows.messages(group, ann, 1_299)
    ids = await shards.publish(shard)
    await owner_db.execute("SELECT rewind_shard($1, $2, 'eve')", shard, ids[0])
    assert ranges(await log(owner_db, "published")) == [(group, 1, 500), (group, 501, 1_000), (group, 1_001, 1_300)]


async def test_what_the_outbox_drops_is_passed_over_and_counted(
    rows: Rows, pool: Pool, shards: Shards, owner_db: asyncpg.Connection
) -> None:
    ann = user("ann")
    group = await rows.group(ann)
    shard = partition_of(group)
    await rows.messages(group, ann, 4)
    await shards.publish(shard, most=3)
    day = 86_400.0
    retention = Retention(pool, Periods(day, 6 * day, 30 * day, 30 * day))
    await owner_db.execute("SELECT close_outbox_partition('0 s')")
    await retention.look()
    assert await log(owner_db, "journal") == [], "it is young, and a row of it is not published"
    await shards.publish(shard)
    await owner_db.execute("UPDATE outbox SET created_at = created_at - interval '7 days'")
    before = JOURNAL_SKIPPED._value.get()
    assert await retention.look()
    assert await owner_db.fetchval("SELECT count(*) FROM outbox") == 0
    (skipped,) = await log(owner_db, "journal")
    assert (skipped["cause"], skipped["detail"]["shard"], skipped["detail"]["rows"]) == ("skipped", shard, 5)
    assert JOURNAL_SKIPPED._value.get() == before + 5
    await rows.messages(group, ann, 1)
    await shards.publish(shard)
    assert not await shards.journal().look()
    assert ranges(await log(owner_db, "published")) == ranges(await log(owner_db, "sent")) == [(group, 6, 6)]


@dataclass
class Whole:
    """All services but receipts, and what a test does with them."""

    home: House
    gateway: Gateway

    async def told(self, group: str, seq: int, count: int) -> Log:
        """The log of a seq, by the documented statement, once it has so many rows of gateways."""

        async def enough() -> Log:
            found = [dict(row) for row in await self.home.owner.fetch(TRACING["what_happened"], group, seq, LONG_AGO)]
            return found if {"sent", "published"} <= {row["kind"] for row in found} and len(found) >= count else []

        return await until(enough, timeout=60, what=f"{count} rows of the log")


@pytest.fixture
async def whole(
    database: Database, stores: Stores, relay_topics: Topics, redis_url: str, fleet: Relays
) -> AsyncIterator[Whole]:
    fleet.start()
    async with house(database, stores, relay_topics.prefix, redis_url) as home:
        await home.ingest()
        yield Whole(home, await home.gateway())


async def test_the_whole_way_of_a_message_is_told_by_one_statement(
    whole: Whole, stores: Stores, relay_topics: Topics
) -> None:
    home, gateway = whole.home, whole.gateway
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob, publish=False)
    clients = {
        (name, device): await gateway.client(name, device)
        for name, device in ((ann, "phone"), (bob, "phone"), (bob, "pc"))
    }
    sessions = {whose: client.got[0]["session_id"] for whose, client in clients.items()}
    await clients[ann, "phone"].say(
        "send",
        rid="1",
        conversation_id=group,
        client_msg_id="m1",
        body={"n": 1},
        traceparent=f"00-{TRACE}-00f067aa0ba902b7-01",
    )
    sent = await clients[ann, "phone"].one("sent", rid="1")
    for client in clients.values():
        await client.one("event", conversation_id=group, seq=2)
    found = await whole.told(group, 2, 5)
    by_kind = defaultdict(list)
    for row in found:
        by_kind[row["kind"]].append(row)
    assert {kind: len(of) for kind, of in by_kind.items()} == {"sent": 1, "published": 1, "pushed": 3}
    (first,) = by_kind["sent"]
    assert (first["service"], first["user_id"], first["device_id"], first["trace_id"]) == (
        "ingest",
        ann,
        "phone",
        TRACE,
    )
    assert first["at"].isoformat() == sent["created_at"].replace("Z", "+00:00")
    (published,) = by_kind["published"]
    detail = json.loads(published["detail"])
    lies_at = places(await all_records(stores.kafka, [relay_topics.events]))
    assert lies_at[detail["partition"], offsets_of({**published, "detail": detail})[2]] == (group, 2)
    pushed = {(row["user_id"], row["device_id"]): str(row["session_id"]) for row in by_kind["pushed"]}
    assert pushed == sessions
    assert all(row["from_seq"] <= 2 <= row["to_seq"] for row in found)


async def test_pushes_are_one_row_per_session_and_range_and_an_end_loses_none(whole: Whole) -> None:
    """Both a session's end and the gateway's; what was sent again is told apart."""
    home = whole.home
    gateway = await home.gateway(gateway_resend_s=0.3)
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob, publish=False)
    slow = await gateway.client(bob, "slow", acks=False)
    quick = await gateway.client(bob, "quick")
    await home.messages(group, ann, 40)
    for client in (slow, quick):
        await until(lambda client=client: len(client.seqs(group)) >= 41, timeout=20, what="all events")
    since = datetime.now(UTC) - timedelta(hours=1)
    session_ids = [client.got[0]["session_id"] for client in (slow, quick)]
    await until(lambda: len(slow.seqs(group)) >= 82, timeout=20, what="all of it again")
    await quick.close()
    await gateway.end()

    for session_id in session_ids:
        found = await home.owner.fetch(TRACING["what_happened_in_session"], bob, session_id, since, LATER)
        of = defaultdict(list)
        for row in found:
            of[row["kind"]].append(row)
        covered = sorted(seq for row in of["pushed"] for seq in range(row["from_seq"], row["to_seq"] + 1))
        assert covered == list(range(1, 42)), "each once"
        assert len(of["pushed"]) <= 6
        assert [row["cause"] for row in of["session"]] == ["opened", "ended"]
        assert bool(of["resent"]) == (session_id == session_ids[0])
    told = await home.owner.fetch(TRACING["sessions_of"], bob, since, LATER)
    assert [row["cause"] for row in told] == ["opened", "opened", "ended", "ended"]
    assert {str(row["session_id"]) for row in told} == set(session_ids)


def places(records: list[ConsumerRecord[bytes, bytes]]) -> dict[tuple[int, int], tuple[str, int]]:
    """What lies at a partition and offset: conversation and seq."""
    return {
        (record.partition, record.offset): (record.key.decode(), int(dict(record.headers)["seq"])) for record in records
    }


@pytest.mark.long(40)
async def test_kills_lose_and_repeat_nothing_of_the_log(
    rows: Rows, owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    ann = user("ann")
    groups = [await rows.group(ann) for _ in range(20)]
    relay = fleet.start("slot-0")
    for life in range(1, 5):
        for group in groups:
            await rows.messages(group, ann, 10)

        async def journaled(epoch: int = life) -> bool:
            """In this life cursors were moved, and something was logged: the next kill comes while more is."""
            moved = "SELECT 1 FROM transition WHERE kind = 'published' AND (detail ->> 'epoch')::int = $1 LIMIT 1"
            return bool(await owner_db.fetchval(moved, epoch))

        await until(journaled, timeout=60, what="a first row of the log")
        for group in groups:
            await rows.messages(group, ann, 10)
        relay.kill()
        relay.start()
    await drained(owner_db, timeout=60)
    behind = (
        "SELECT count(*) FROM outbox_journal AS j JOIN outbox_shard AS s USING (shard) WHERE j.cursor_id < s.cursor_id"
    )

    async def caught_up() -> bool:
        return not await owner_db.fetchval(behind)

    await until(caught_up, timeout=60, what="the journal")
    heads = dict(await owner_db.fetch("SELECT conversation_id::text, last_seq FROM conversation"))
    lies_at = places(await all_records(stores.kafka, [relay_topics.events]))
    for kind in ("sent", "published"):
        found: dict[str, list[int]] = defaultdict(list)
        for row in await log(owner_db, kind):
            found[str(row["conversation_id"])] += range(row["from_seq"], row["to_seq"] + 1)
            for seq, offset in offsets_of(row).items() if kind == "published" else ():
                assert lies_at[row["detail"]["partition"], offset] == (str(row["conversation_id"]), seq)
        assert {name: sorted(seqs) for name, seqs in found.items()} == {
            name: list(range(1, head + 1)) for name, head in heads.items()
        }, kind


async def test_each_try_of_a_parked_row_is_logged(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    soon = {**QUICK, "WAYBILL_RELAY_MAX_ATTEMPTS": "2", "WAYBILL_RELAY_RETRY_DELAY_MS": "100"}
    await add(owner_db, 1, seq=1, payload=b"x" * 1_100_000)
    await add(owner_db, 1, seq=2)
    fleet.start(settings=soon)
    group, query = conversation(1), TRACING["what_happened"]

    async def told(seq: int, *kinds: str) -> Log:
        found = await owner_db.fetch(query, group, seq, LONG_AGO)
        return [dict(row) for row in found] if [row["kind"] for row in found] == list(kinds) else []

    dead = await until(lambda: told(1, "parked", "dead"), timeout=60, what="a dead letter")
    assert [(row["cause"], json.loads(row["detail"])["attempt"]) for row in dead] == [
        ("too_large", 1),
        ("too_large", 2),
    ]
    gone = await until(lambda: told(2, "parked", "published"), timeout=60, what="the row behind it")
    assert [row["cause"] for row in gone] == ["waiting", "retry"]
    detail = json.loads(gone[1]["detail"])
    lies_at = places(await all_records(stores.kafka, [relay_topics.events]))
    assert lies_at[detail["partition"], detail["offset"]] == (str(group), 2)
    assert (detail["topic"], detail["attempt"], detail["epoch"]) == ("events.v1", 1, 1)

    await owner_db.execute("UPDATE dead_letter SET state = 'retrying'")
    again = await until(lambda: told(1, "parked", "dead", "dead"), timeout=60, what="a letter that died again")
    assert json.loads(again[2]["detail"])["attempt"] == 3
    await owner_db.execute("UPDATE dead_letter SET state = 'retrying', payload = '{}'")
    late = await until(lambda: told(1, "parked", "dead", "dead", "published"), timeout=60, what="a letter that came")
    assert late[3]["cause"] == "letter"
    detail = json.loads(late[3]["detail"])
    lies_at = places(await all_records(stores.kafka, [relay_topics.events]))
    assert lies_at[detail["partition"], detail["offset"]] == (str(group), 1)
