"""A shard's line on a real Postgres and a Kafka that a seeded random steers: whatever comes when, order holds.

Rows are refused and mended, batches fail before and after they were written, the relay dies and is taken over, queues
come due, letters are asked for.
"""

import asyncio
import random
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Collection
from typing import Any

import asyncpg
import pytest
from aiokafka.producer.message_accumulator import BatchBuilder

from services.relay.batch import Batch, Queue, build
from services.relay.breaker import Limits
from services.relay.cursors import Cursors
from services.relay.due import Due
from services.relay.failure import FailedBatchError, RefusedError
from services.relay.held import HeldShard
from services.relay.lease import Timing
from services.relay.line import Common, Line
from services.relay.parking import ParkingStore
from services.relay.retries import Retries
from services.relay.shards import Delivery, ShardStore
from shared.kafka import MAX_RECORD_BYTES
from shared.postgres import Pool, open_pool
from tests.databases import Database
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

SHARD = 5
CONVERSATIONS = [uuid.UUID(int=number) for number in range(1, 5)]
STEPS = 40

_READ = """
    SELECT shard, id, conversation_id, seq, event_id, topic, type, source, NULL::text[] AS headers, payload,
           timestamptz_send(created_at) AS created_at
    FROM outbox WHERE shard = $1 AND id > $2 ORDER BY id LIMIT 12
"""

_ADD = """
    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
    SELECT $1, c, 1, gen_random_uuid(), 'events.v1', 't', '/s', '', now() FROM unnest($2::uuid[]) AS c
    RETURNING id, conversation_id
"""


class Kafka:
    """One partition: the ids of its records, in order of offset; ``bad`` ones are refused."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.records: list[tuple[int, bool]] = []
        self.bad: set[int] = set()
        self.failing = 0.0
        self.slow_s = 0.002

    async def append(self, rows: list[tuple[int, bool]]) -> int:
        await asyncio.sleep(self.chance.uniform(self.slow_s / 2, self.slow_s))
        if self.bad & {id_ for id_, _ in rows}:
            raise RefusedError("one of them is bad")
        fails = self.chance.random() < self.failing
        if fails and self.chance.random() < 0.5:
            raise FailedBatchError("before it was written")
        base = len(self.records)
        self.records += rows
        if fails:
            raise FailedBatchError("after it was written")
        return base


class Session:
    """What a line asks of a session. A batch is known by the builder that it was built with."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka
        self._rows: dict[int, list[tuple[int, bool]]] = {}

    def build(self, rows: deque[Any], at_most: int, parked: Collection[Queue] = ()) -> Batch:
        before = {row[1]: bool(row[8]) for row in rows}
        batch = build(rows, at_most, lambda: BatchBuilder(MAX_RECORD_BYTES, 0), {"events.v1"}, parked)
        left = {row[1] for row in rows} | {row[1] for row in batch.waiting}
        self._rows[id(batch)] = [(id_, late) for id_, late in before.items() if id_ not in left]
        return batch

    async def send(self, shard: int, batch: Batch) -> list[tuple[Delivery, int]]:
        assert shard == SHARD
        base = await self.kafka.append(self._rows[id(batch)])
        return [(Delivery(part.from_id, part.to_id, part.topic, base), part.rows) for part in batch.parts.values()]

    send_with_care = send


class Relay:
    """One life of a relay that holds the shard: line, cursors, due, as the publisher runs them."""

    def __init__(self, pool: Pool, kafka: Kafka, chance: random.Random, max_attempts: int = 2) -> None:
        self._pool, self._kafka = pool, kafka
        self._shards = ShardStore(pool, "slot", 600)
        self._cursors = Cursors(self._shards)
        self._parking = ParkingStore(pool, "slot")
        retries = Retries(max_attempts, 3_600_000, 1, 3_600_000)
        self._common = Common(self._cursors, self._parking, Timing(600, 5), retries, 4, lambda: None, chance)
        self.held: HeldShard | None = None

    async def run(self) -> None:
        taken = [one for one in await self._shards.take_own() if one.shard == SHARD]
        taken = taken or [one for one in await self._shards.take(64) if one.shard == SHARD]
        self.held = HeldShard(taken[0], float("inf"), Limits(share=1))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cursors.run())
            group.create_task(self._due(self.held))
            group.create_task(self._tail(self.held))
            group.create_task(self._publish(self.held))

    async def _publish(self, held: HeldShard) -> None:
        while True:
            try:
                await Line(held, Session(self._kafka), self._common).run()
            except FailedBatchError:
                held.rewind()

    async def _tail(self, held: HeldShard) -> None:
        while True:
            after = held.read_id
            if held.has_room and (rows := await self._pool.fetch(_READ, SHARD, after)):
                held.accept(after, rows, rows[-1]["id"])
            await asyncio.sleep(0.002)

    async def _due(self, held: HeldShard) -> None:
        due = Due(self._parking, {SHARD: held})
        while True:
            await due.look()
            await asyncio.sleep(0.01)


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=6, name="tests-line") as made:
        yield made


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.promise("I4", "I5")
async def test_order_holds_whatever_comes(pool: Pool, database: Database, seed: int) -> None:
    chance = random.Random(seed)
    kafka = Kafka(chance)
    db = await asyncpg.connect(database.owner_url)
    written: dict[uuid.UUID, list[int]] = defaultdict(list)
    ever_bad: set[int] = set()

    async def add() -> None:
        async with db.transaction():
            for row in await db.fetch(_ADD, SHARD, chance.choices(CONVERSATIONS, k=chance.randint(1, 10))):
                written[row["conversation_id"]].append(row["id"])
                if chance.random() < 0.08:
                    ever_bad.add(row["id"])
                    kafka.bad.add(row["id"])

    async def mend() -> None:
        kafka.bad -= set(chance.sample(sorted(kafka.bad), len(kafka.bad) // 2))

    async def time_passes() -> None:
        await db.execute("UPDATE outbox_parked SET retry_at = now() WHERE retry_at IS NOT NULL")

    async def ask() -> None:
        await db.execute(f"UPDATE dead_letter SET state = 'retrying' WHERE state = 'dead' AND dead_id % 2 = {seed % 2}")

    async def die() -> None:
        nonlocal life
        await stop(life)
        life = asyncio.create_task(Relay(pool, kafka, chance).run())

    life = asyncio.create_task(Relay(pool, kafka, chance).run())
    kafka.failing = 0.1
    for _ in range(STEPS):
        step = chance.choices([add, mend, time_passes, ask, die], [8, 1, 4, 1, 1])[0]
        await step()
        await asyncio.wait([life], timeout=chance.uniform(0, 0.05))
    kafka.failing = 0

    async def quiet() -> bool:
        assert not life.done(), life.exception()
        await time_passes()
        return not await db.fetchval(
            "SELECT (SELECT count(*) FROM outbox AS o JOIN outbox_shard AS s USING (shard) WHERE o.id > s.cursor_id) "
            "+ (SELECT count(*) FROM outbox_parked WHERE state IN ('waiting', 'failed')) "
            "+ (SELECT count(*) FROM dead_letter WHERE state = 'retrying')"
        )

    await until(quiet, timeout=60, what="an end of all work")
    await stop(life)
    dead = {row[0] for row in await db.fetch("SELECT outbox_id FROM outbox_dead WHERE state = 'dead'")}
    parked = {row["id"]: row for row in await db.fetch("SELECT * FROM outbox_parked")}
    sent = {id_ for id_, _ in kafka.records}
    every = {id_ for ids in written.values() for id_ in ids}
    assert sent | dead == every, "nothing is lost"
    assert dead <= ever_bad, "nobody dies for another"
    assert not kafka.bad & sent
    first: dict[int, int] = {}
    for offset, (id_, late) in enumerate(kafka.records):
        if not late:
            first.setdefault(id_, offset)
    for ids in written.values():
        straight = [id_ for id_ in ids if id_ in first]
        assert straight == sorted(straight, key=first.__getitem__), "first copies are in order"
    # Where the records lie.
    for row in await db.fetch(
        "SELECT o.id, d.base_offset + (SELECT count(*) FROM outbox AS r WHERE r.shard = o.shard AND r.id BETWEEN "
        "d.from_id AND o.id AND NOT EXISTS (SELECT FROM outbox_parked AS p WHERE p.id = r.id)) - 1 AS at "
        "FROM outbox AS o JOIN outbox_delivery AS d ON d.shard = o.shard AND o.id BETWEEN d.from_id AND d.to_id "
        "WHERE NOT EXISTS (SELECT FROM outbox_parked AS p WHERE p.id = o.id)"
    ):
        assert kafka.records[row["at"]][0] == row["id"]
    for id_, row in parked.items():
        assert row["state"] == ("dead" if id_ in dead else "sent")
        if row["state"] == "sent":
            assert kafka.records[row["kafka_offset"]][0] == id_
    await db.close()


async def test_a_try_that_takes_long_is_one_try(pool: Pool, database: Database) -> None:
    """Its queue is seen due all the while, and waits for its time none the less once it is refused again."""
    chance = random.Random(0)
    kafka = Kafka(chance)
    db = await asyncpg.connect(database.owner_url)
    life = asyncio.create_task(Relay(pool, kafka, chance, max_attempts=9).run())

    async def tried(times: int) -> None:
        attempts = "SELECT coalesce(max(attempts), 0) >= $1 FROM outbox_parked"
        await until(lambda: db.fetchval(attempts, times), timeout=30, what=f"{times} tries")

    async with db.transaction():
        [bad] = await db.fetch(_ADD, SHARD, CONVERSATIONS[:1])
        kafka.bad.add(bad["id"])
    await tried(1)
    kafka.slow_s = 0.2
    await db.execute("UPDATE outbox_parked SET retry_at = now()")
    await tried(2)
    # The line tries again what is due before it goes on.
    for _ in range(2):
        [good] = await db.fetch(_ADD, SHARD, CONVERSATIONS[1:2])
        await until(lambda row=good: (row["id"], False) in kafka.records, timeout=30, what="another row")
    assert await db.fetchval("SELECT attempts FROM outbox_parked WHERE id = $1", bad["id"]) == 2
    await stop(life)
    await db.close()
