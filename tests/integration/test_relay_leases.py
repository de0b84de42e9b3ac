"""Who holds which shard: taking, renewing, sharing, giving back, and the fence around the cursor."""

import signal
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest

from services.relay.held import HeldShard
from services.relay.lease import SHARDS
from services.relay.life import Life
from services.relay.shards import Delivery, Move, ShardStore
from services.relay.tail import Tail
from shared.kafka import Topics
from shared.postgres import Pool, open_pool
from tests.databases import Database
from tests.relays import (
    QUICK,
    Relays,
    Writer,
    add,
    all_records,
    conversation,
    drained,
    holders,
    ids_of,
    order_per_conversation,
    shard_of,
)
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

pytestmark = pytest.mark.timeout(300)

LEASE_S = 3.0
"""As in `tests.relays.QUICK`."""


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=4, name="test") as made:
        yield made


async def end_leases(owner_db: asyncpg.Connection) -> None:
    await owner_db.execute("UPDATE outbox_shard SET lease_until = clock_timestamp() - interval '1 s'")


# The statements.


async def test_only_free_and_ended_leases_are_taken(pool: Pool, owner_db: asyncpg.Connection) -> None:
    ann, ben = ShardStore(pool, "ann", 60), ShardStore(pool, "ben", 60)
    assert [taken.epoch for taken in await ann.take(40)] == [1] * 40
    assert len(await ben.take(SHARDS)) == 24
    assert await ben.take(SHARDS) == []
    await end_leases(owner_db)
    assert {taken.epoch for taken in await ben.take(SHARDS)} == {2}


async def test_a_stable_name_takes_its_own_back_with_a_higher_epoch(pool: Pool) -> None:
    before, after = ShardStore(pool, "slot-0", 60), ShardStore(pool, "slot-0", 60)
    first = {taken.shard: taken.epoch for taken in await before.take(10)}
    assert {taken.shard: taken.epoch for taken in await after.take_own()} == dict.fromkeys(first, 2)
    assert await before.renew(first) == set()


@pytest.mark.promise("I4")
async def test_an_older_epoch_moves_no_cursor_and_writes_no_delivery(pool: Pool, owner_db: asyncpg.Connection) -> None:
    ann, ben = ShardStore(pool, "ann", 60), ShardStore(pool, "ben", 60)
    [one, other] = await ann.take(2)
    await owner_db.execute("UPDATE outbox_shard SET lease_until = now() - interval '1 s' WHERE shard = $1", one.shard)
    [again] = [taken for taken in await ben.take(SHARDS) if taken.shard == one.shard]
    placed = [Delivery(3, 9, "t.events.v1", 100)]
    moves = [Move(one.shard, one.epoch, 9, placed), Move(other.shard, other.epoch, 9, placed)]
    assert await ann.advance(moves) == {(one.shard, one.epoch)}
    cursors = dict(await owner_db.fetch("SELECT shard, cursor_id FROM outbox_shard WHERE cursor_id > 0"))
    assert cursors == {other.shard: 9}
    told = await owner_db.fetch(
        "SELECT shard, from_id, to_id, topic, partition, base_offset, owner, epoch FROM outbox_delivery"
    )
    assert [tuple(row) for row in told] == [(other.shard, 3, 9, "t.events.v1", other.shard, 100, "ann", 1)]
    assert await ben.advance([Move(one.shard, again.epoch, 12, [])]) == set()


@pytest.mark.promise("I4")
async def test_an_earlier_life_under_the_same_name_is_fenced(pool: Pool, owner_db: asyncpg.Connection) -> None:
    store = ShardStore(pool, "ann", 60)
    [before] = await store.take(1)
    [now] = await store.take_own()
    late = Move(before.shard, before.epoch, 9, [Delivery(3, 9, "t.events.v1", 100)])
    assert await store.advance([late]) == {(before.shard, before.epoch)}
    assert await store.renew({before.shard: before.epoch}) == set()
    assert await owner_db.fetchval("SELECT cursor_id FROM outbox_shard WHERE shard = $1", now.shard) == 0
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_delivery") == 0
    assert await store.advance([late._replace(epoch=now.epoch)]) == set()


@pytest.mark.promise("I4")
async def test_in_another_life_of_the_store_nothing_is_renewed_moved_or_read(
    pool: Pool, owner_db: asyncpg.Connection
) -> None:
    """Its ids may be other rows."""
    life = Life(pool)
    store = ShardStore(pool, "ann", 60, life)
    [one] = [taken for taken in await store.take(SHARDS) if taken.shard == shard_of(1)]
    held = HeldShard(one, 0.0)
    tail = Tail(pool, {held.number: held}, batch_size=10, longest_wait_s=0.001, life=life)
    await life.known()
    await owner_db.execute("UPDATE store SET incarnation = gen_random_uuid()")
    row_id = await add(owner_db, 1)
    move = Move(one.shard, one.epoch, row_id, [Delivery(row_id, row_id, "events.v1", 100)])
    assert await store.renew({one.shard: one.epoch}) == set()
    assert await store.advance([move]) == {(one.shard, one.epoch)}
    assert not await store.park(move)
    async with pool.acquire() as connection:
        for _ in range(2):
            await tail.read_once(connection)
        assert not held.rows
        life.adopt(await life.now())
        await tail.read_once(connection)
    assert [row["id"] for row in held.rows] == [row_id]
    assert await store.renew({one.shard: one.epoch}) == {one.shard}
    assert await store.advance([move]) == set()


@pytest.mark.promise("I4", "I10")
async def test_a_store_that_was_set_back_draws_ids_again_and_all_of_them_are_published(
    fleet: Relays, owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics
) -> None:
    """As after a failover to a standby that lacked the last commits, under a relay that lives on."""
    relay = fleet.start("ann")
    await relay.ready()
    writer = Writer(owner_db, range(40))
    await writer.write(400)
    await drained(owner_db, timeout=60)
    kept = await owner_db.fetchval("SELECT max(id) - 200 FROM outbox")
    async with owner_db.transaction():
        await owner_db.execute("DELETE FROM outbox WHERE id > $1", kept)
        await owner_db.execute("DELETE FROM outbox_delivery WHERE to_id > $1", kept)
        await owner_db.execute("UPDATE outbox_shard SET cursor_id = least(cursor_id, $1)", kept)
        await owner_db.execute("SELECT setval('outbox_id_seq', $1)", kept)
        await owner_db.execute("UPDATE store SET incarnation = gen_random_uuid()")
    last = await owner_db.fetch("SELECT conversation_id::text, max(seq) FROM outbox GROUP BY 1")
    again = Writer(owner_db, range(40))
    again.last_seq.update(map(tuple, last))
    await again.write(400)
    await drained(owner_db, timeout=60)
    there = ids_of(await all_records(stores.kafka, [relay_topics.events]))
    rows = await owner_db.fetch("SELECT event_id::text FROM outbox")
    assert {row["event_id"] for row in rows} <= set(there)
    assert relay.logged("the store is another one, or an earlier state of it: all shards are taken anew")


async def test_an_advance_told_twice_is_one(pool: Pool, owner_db: asyncpg.Connection) -> None:
    store = ShardStore(pool, "ann", 60)
    [one] = await store.take(1)
    move = Move(one.shard, one.epoch, 9, [Delivery(3, 9, "t.events.v1", 100), Delivery(4, 8, "t.receipts.v1", 7)])
    assert await store.advance([move]) == set()
    assert await store.advance([move]) == set()
    assert await owner_db.fetchval("SELECT count(*) FROM outbox_delivery") == 2
    assert await store.advance([move._replace(to_id=5)]) == {(one.shard, one.epoch)}, "a cursor never goes back"


async def test_what_is_given_back_is_free_at_once(pool: Pool, owner_db: asyncpg.Connection) -> None:
    ann, ben = ShardStore(pool, "ann", 60), ShardStore(pool, "ben", 60)
    taken = {one.shard: one.epoch for one in await ann.take(5)}
    await ann.give_back({shard: epoch + 1 for shard, epoch in taken.items()})
    assert await holders(owner_db) == {"ann": 5, None: 59}, "another epoch gives nothing back"
    await ann.give_back(taken)
    assert await holders(owner_db) == {None: SHARDS}
    assert len(await ben.take(SHARDS)) == SHARDS


async def test_who_lives_is_known_before_holding_anything(pool: Pool, owner_db: asyncpg.Connection) -> None:
    ann, ben = ShardStore(pool, "ann", 60), ShardStore(pool, "ben", 60)
    await ann.announce()
    await ben.announce()
    assert await ann.live_owners() == {"ann", "ben"}
    await ben.leave()
    assert await ann.live_owners() == {"ann"}
    await owner_db.execute("UPDATE relay_owner SET seen_until = clock_timestamp() - interval '2 h'")
    assert await ann.live_owners() == set()
    await ben.announce()
    assert await owner_db.fetchval("SELECT count(*) FROM relay_owner") == 1, "the long gone are forgotten"


# The processes.


@pytest.mark.promise("I4")
async def test_two_relays_share_and_a_dead_ones_shards_are_taken_over(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    ann = fleet.start("ann")
    await ann.ready()

    async def all_are_anns() -> bool:
        return await holders(owner_db) == {"ann": SHARDS}

    await until(all_are_anns, timeout=20, what="all shards at one relay")
    ben = fleet.start("ben")
    await ben.ready()

    async def shared() -> bool:
        return await holders(owner_db) == {"ann": 32, "ben": 32}

    await until(shared, timeout=60, what="an even share")
    # Those that stayed were not touched, those that moved changed hands once.
    epochs = dict(await owner_db.fetch("SELECT owner, array_agg(DISTINCT epoch) FROM outbox_shard GROUP BY owner"))
    assert epochs == {"ann": [1], "ben": [2]}
    writer = Writer(owner_db, range(50))
    await writer.write(200)
    ben.kill()
    killed_at = time.monotonic()
    await writer.write(200)
    await until(all_are_anns, timeout=20, what="take-over")
    assert time.monotonic() - killed_at <= LEASE_S + 5
    await drained(owner_db, timeout=60)
    records = await all_records(stores.kafka, [relay_topics.events])
    assert order_per_conversation(records) == {key: list(range(1, 9)) for key in writer.last_seq}


async def test_sigterm_gives_the_shards_back_at_once(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    relay = fleet.start("ann", {})
    await relay.ready()
    writer = Writer(owner_db, range(100))
    await writer.write(2000)
    relay.send(signal.SIGTERM)
    assert await relay.ended() == 0
    assert await holders(owner_db) == {None: SHARDS}
    assert await owner_db.fetchval("SELECT count(*) FROM relay_owner") == 0
    # What Kafka has confirmed by then is stored: the next relay repeats nothing.
    await fleet.start("ben", {}).ready()
    await drained(owner_db, timeout=60)
    records = await all_records(stores.kafka, [relay_topics.events])
    assert len(records) == 2000
    assert order_per_conversation(records) == {key: list(range(1, 21)) for key in writer.last_seq}


async def test_a_restarted_slot_does_not_wait_for_its_leases(owner_db: asyncpg.Connection, fleet: Relays) -> None:
    relay = fleet.start("slot-0", {})
    await relay.ready()
    relay.kill()
    await Writer(owner_db, range(20)).write(100)
    relay.start()
    await relay.ready()
    # Their leases of 15 s still last.
    await drained(owner_db, timeout=10)
    assert {row[0] for row in await owner_db.fetch("SELECT epoch FROM outbox_shard")} == {2}


@pytest.mark.promise("I4")
async def test_a_relay_that_slept_past_its_lease_moves_no_cursor(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    sleeper = fleet.start("sleeper")
    await sleeper.ready()
    writer = Writer(owner_db, range(100))

    async def some_are_sent() -> bool:
        return bool(await owner_db.fetchval("SELECT count(*) FROM outbox_shard WHERE cursor_id > 0"))

    for _ in range(30):
        await writer.write(100)
    await until(some_are_sent, timeout=20, what="first cursors")
    sleeper.send(signal.SIGSTOP)
    try:
        for _ in range(20):
            await writer.write(100)
        fleet.start("other")

        async def taken_over() -> bool:
            return await holders(owner_db) == {"other": SHARDS}

        await until(taken_over, timeout=60, what="take-over")
        await drained(owner_db, timeout=60)
        epochs = {row[0] for row in await owner_db.fetch("SELECT epoch FROM outbox_shard")}
        cursors = dict(await owner_db.fetch("SELECT shard, cursor_id FROM outbox_shard"))
    finally:
        sleeper.send(signal.SIGCONT)
    assert epochs == {2}

    def lost() -> bool:
        entries = sleeper.logged("shards lost to another relay")
        return sorted(shard for entry in entries for shard in entry["shards"]) == list(range(SHARDS))

    await until(lost, timeout=30, what="the sleeper's word of its losses")
    # Whatever the sleeper still wrote came before the take-over, or not at all.
    stale = await owner_db.fetchval(
        "SELECT count(*) FROM outbox_delivery AS d JOIN outbox_shard AS s USING (shard) "
        "WHERE d.owner = 'sleeper' AND d.acked_at > (SELECT min(acked_at) FROM outbox_delivery AS o "
        "WHERE o.shard = d.shard AND o.owner = 'other')"
    )
    assert stale == 0
    assert all(
        cursor >= cursors[shard] for shard, cursor in await owner_db.fetch("SELECT shard, cursor_id FROM outbox_shard")
    )
    records = await all_records(stores.kafka, [relay_topics.events])
    assert order_per_conversation(records) == {key: list(range(1, 51)) for key in writer.last_seq}


_PARKED = "SELECT id, state, attempts, kafka_offset FROM outbox_parked ORDER BY id"
_ATTEMPTS = "SELECT id, attempt, owner FROM outbox_attempt ORDER BY id, attempt"


@pytest.mark.promise("I4", "I5")
async def test_a_relay_that_slept_past_its_lease_settles_nothing(
    owner_db: asyncpg.Connection, database: Database, stores: Stores, relay_topics: Topics, fleet: Relays
) -> None:
    """It fell asleep when Kafka had taken a parked row and Postgres did not know it yet; another one has it now."""
    far = {**QUICK, "WAYBILL_RELAY_RETRY_DELAY_MS": "3600000", "WAYBILL_RELAY_RETRY_CAP_MS": "3600000"}
    due = "UPDATE outbox_parked SET retry_at = clock_timestamp() + $1 * interval '1 s' WHERE id = $2"
    sleeper = fleet.start("sleeper", far)
    bad = await add(owner_db, 1, seq=1, headers=["odd"])
    behind = await add(owner_db, 1, seq=2)

    async def parked() -> bool:
        return [(row["id"], row["state"]) for row in await owner_db.fetch(_PARKED)] == [
            (bad, "failed"),
            (behind, "waiting"),
        ]

    await until(parked, timeout=30, what="a queue")
    await owner_db.execute("UPDATE outbox SET headers = '{}' WHERE id = $1", bad)
    lock = await asyncpg.connect(database.owner_url)
    try:
        async with lock.transaction():
            await lock.execute("SELECT FROM outbox_shard WHERE shard = $1 FOR UPDATE", shard_of(1))
            await owner_db.execute(due, 0.0, bad)

            async def settling() -> bool:
                return bool(
                    await owner_db.fetchval(
                        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND query LIKE '%settle_parked%' AND usename = 'waybill_relay' AND wait_event_type = 'Lock'"
                    )
                )

            await until(settling, timeout=20, what="a settlement that waits")
            sleeper.send(signal.SIGSTOP)
            await owner_db.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE usename = 'waybill_relay' AND datname = current_database()"
            )
        await owner_db.execute(due, 3600.0, bad)
        fleet.start("other", far)

        async def taken_over() -> bool:
            return await holders(owner_db) == {"other": SHARDS}

        await until(taken_over, timeout=60, what="take-over")
        before = await owner_db.fetch(_PARKED), await owner_db.fetch(_ATTEMPTS)
    finally:
        await lock.close()
        sleeper.send(signal.SIGCONT)
    await until(lambda: sleeper.logged("shards lost to another relay"), timeout=30, what="word of its losses")
    assert (await owner_db.fetch(_PARKED), await owner_db.fetch(_ATTEMPTS)) == before
    assert [row["state"] for row in before[0]] == ["failed", "waiting"]
    await owner_db.execute(due, 0.0, bad)

    async def settled() -> bool:
        return [row["state"] for row in await owner_db.fetch(_PARKED)] == ["sent", "sent"]

    await until(settled, timeout=30, what="the end of the queue")
    records = await all_records(stores.kafka, [relay_topics.events])
    assert [int(dict(record.headers)["seq"]) for record in records] == [1, 1, 2], "Kafka took the first one twice"
    assert order_per_conversation(records) == {str(conversation(1)): [1, 2]}
    attempts = [tuple(row) for row in await owner_db.fetch(_ATTEMPTS)]
    assert attempts == [(bad, 1, "sleeper"), (bad, 2, "other"), (behind, 1, "other")]
    assert [row["kafka_offset"] for row in await owner_db.fetch(_PARKED)] == [1, 2]
