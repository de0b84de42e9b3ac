"""What a replay of the topic changes, what the store does not take, and how large groups are told."""

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from services.receipts.batch import Span
from services.receipts.fold import Changes, Held, Mark
from services.receipts.store import Store
from shared.kafka import header, partition_of
from shared.postgres import open_pool
from shared.ranges import RangeSet
from tests.databases import Database
from tests.integration.receipts_stage import (
    EVERYTHING,
    Receipt,
    Stage,
    announced,
    offsets,
    open_stage,
    receipts,
    seed,
    value_of,
)
from tests.stack import Stores
from tests.unit.receipts.histories import HEAD, VISIBLE
from tests.waiting import until


@pytest.fixture
async def stage(database: Database, stores: Stores, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_stage(database, stores.kafka, topic_prefix, tmp_path) as made:
        yield made


def acks(ids: Sequence[str], count: int, seed_: int) -> list[Held | Mark]:
    """Acks of every kind, refused ones among them."""
    chance = random.Random(seed_)
    made: list[Held | Mark] = []
    for _ in range(count):
        who = (chance.choice(ids), chance.choice(list(VISIBLE)), chance.choice(["phone", "laptop"]))
        low = chance.randint(1, HEAD + 1)
        made += [
            Held(*who, RangeSet([(low, low + 1)])),
            Mark(*who, "read", chance.randint(0, 2), low),
            Mark(*who, "unread", chance.randint(1, 3), low),
        ]
    return made


async def checksums(stage: Stage) -> dict[str, str]:
    """Of every table but `transition`, which tells of each replay, too."""
    tables = await stage.pool.fetch(
        "SELECT c.relname FROM pg_class AS c WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition"
        " AND c.relnamespace = 'public'::regnamespace AND c.relname <> 'transition'"
    )
    return {
        table: await stage.pool.fetchval(
            f"SELECT coalesce(md5(string_agg(t::text, ',' ORDER BY t::text)), '') FROM {table} AS t"
        )
        for (table,) in tables
    }


@pytest.mark.promise("I8")
@pytest.mark.parametrize("how", ["UPDATE ack_offset SET next = 0", "DELETE FROM ack_offset"])
async def test_a_replay_of_the_whole_topic_changes_no_row_but_in_transition(stage: Stage, how: str) -> None:
    ids = [str(uuid.uuid4()) for _ in range(3)]
    for id_ in ids:
        await seed(stage.pool, id_, HEAD, VISIBLE)
    async with stage.process(WAYBILL_RECEIPTS_BREAKER_LEAST="1000"):
        await stage.send(acks(ids, 60, 5))
        await stage.send_raw([(ids[0], b"not json"), (unknown := str(uuid.uuid4()), _held(unknown))])
        await stage.send(acks(ids, 20, 6))
        await stage.caught_up()
    before = await checksums(stage)
    told = len(await announced(stage.pool))
    logged = await stage.pool.fetchval("SELECT count(*) FROM transition")
    assert told > 0
    assert {"receipt", "device_cursor", "dead_letter", "outbox"} <= before.keys()

    await stage.pool.execute(how)
    async with stage.process(WAYBILL_RECEIPTS_BREAKER_LEAST="1000"):
        await stage.caught_up()
    assert await checksums(stage) == before
    assert len(await announced(stage.pool)) == told
    assert await stage.pool.fetchval("SELECT count(*) FROM transition") > logged

    async with stage.process():
        await stage.send([Mark(ids[0], "anna", "phone", "read", 0, 1)])
        await stage.caught_up()
    assert [record["cause"] for record in (await announced(stage.pool))[told:]] == ["refused:stale"]


def _held(conversation_id: str) -> bytes:
    return value_of(Held(conversation_id, "anna", "phone", RangeSet([(1, 2)])))


@pytest.mark.promise("protocol.9.kafka")
async def test_an_unknown_conversation_and_what_the_store_does_not_take_end_on_the_desk(stage: Stage) -> None:
    id_, unknown = str(uuid.uuid4()), str(uuid.uuid4())
    await seed(stage.pool, id_, HEAD, VISIBLE)
    await stage.pool.execute("ALTER TABLE device_cursor ADD CHECK (device_id <> 'poison')")
    async with stage.process() as process:
        await stage.send(
            [
                Held(id_, "anna", "phone", RangeSet([(1, 2)])),
                Held(unknown, "anna", "phone", RangeSet([(1, 2)])),
                Held(id_, "anna", "poison", RangeSet([(3, 4)])),
                Held(id_, "anna", "phone", RangeSet([(5, 5)])),
            ]
        )
        await stage.caught_up()
        assert await receipts(stage.pool) == {(id_, "anna"): Receipt(RangeSet([(1, 2), (5, 5)]), 2, (0, 0))}
        letters = await stage.pool.fetch("SELECT * FROM dead_letter ORDER BY error")
        assert [json.loads(bytes(letter["payload"]))["device_id"] for letter in letters] == ["phone", "poison"]
        assert ["no such conversation" in letters[0]["error"], "does not take it" in letters[1]["error"]] == [
            True,
            True,
        ]
        assert {letter["state"] for letter in letters} == {"dead"}
        copies = await stage.records(stage.topics.dead)
        assert sorted(bytes(letter["payload"]) for letter in letters) == sorted(copy.value or b"" for copy in copies)
        assert {header(copy.headers, "dead_source") for copy in copies} == {
            f"{stage.topics.acks}/{partition_of(one)}" for one in (id_, unknown)
        }
        assert (await process.get("/readyz"))[0] == 200


async def test_another_database_behind_it_stops_it_before_all_acks_are_dead_letters(stage: Stage) -> None:
    async with stage.process(WAYBILL_RECEIPTS_BREAKER_LEAST="10") as process:
        await stage.send([Held(str(uuid.uuid4()), "anna", "phone", RangeSet([(1, 1)])) for _ in range(300)])

        async def stopped() -> bool:
            return "breaker" in (await process.get("/readyz"))[1]

        await until(stopped, timeout=20, what="the breaker")
        assert sum((await offsets(stage.pool)).values()) < 10


MEMBERS = 150


@pytest.mark.promise("protocol.5.receipt_goes_to")
async def test_a_large_group_is_told_folded_and_none_of_it_is_lost(database: Database) -> None:
    """However often a member's marks move: one record with the newest of them, beside acks that go on."""
    id_ = str(uuid.uuid4())
    users = [f"user-{n}" for n in range(MEMBERS)]
    part = partition_of(id_)
    async with (
        open_pool(database.owner_url, size=2, name="owner") as owner,
        open_pool(database.url("receipts"), size=4, name="receipts") as pool,
    ):
        await seed(owner, id_, 1000, dict.fromkeys(users, EVERYTHING))
        store = Store(pool, "acks", large=100)
        await store.place("cluster", {}, {part: 0}, {part: 0})

        async def step(at: int) -> None:
            held = [Held(id_, user, "phone", RangeSet([(1, at)])) for user in users]
            marks = [Mark(id_, user, "phone", "read", 0, at) for user in users]
            await store.apply("cluster", {part: Span(at - 1, at)}, Changes(held, marks))

        for at in (1, 2, 3):
            await step(at)
        assert await announced(owner) == []
        assert await store.flush([part], 100) == 100
        assert await store.flush([part], 100) == 50
        assert await store.flush([part], 100) == 0
        records = await announced(owner)
        assert {(r["user_id"], r["delivered_seq"], r["read_seq"], r["kind"], r["cause"]) for r in records} == {
            (user, 3, 3, "read", "read") for user in users
        }
        assert len(records) == MEMBERS

        async def flush() -> None:
            for _ in range(20):
                await store.flush([part], 40)

        async def go_on() -> None:
            for at in range(4, 12):
                await step(at)

        await asyncio.gather(flush(), go_on())
        while await store.flush([part], 100):
            pass
        newest = {r["user_id"]: (r["delivered_seq"], r["read_seq"]) for r in await announced(owner)}
        assert newest == dict.fromkeys(users, (11, 11))

        refused = Mark(id_, users[0], "phone", "read", 0, 1)
        await store.apply("cluster", {part: Span(11, 12)}, Changes([], [refused]))
        assert (await announced(owner))[-1]["cause"] == "refused:stale", "an answer to a device does not wait"
