"""The receipts process between a real Kafka and a real Postgres."""

import asyncio
import json
import random
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from aiokafka import TopicPartition

from services.receipts.fold import Held, Mark
from shared.kafka import Topics, ensure_topics, header, partition_of
from shared.ranges import RangeSet
from tests.databases import Database
from tests.integration.receipts_stage import (
    EVERYTHING,
    Gate,
    Receipt,
    Stage,
    announced,
    device_cursors,
    offsets,
    open_stage,
    receipts,
    seed,
    value_of,
)
from tests.stack import Stores
from tests.unit.receipts.histories import HEAD, VISIBLE, Scene, batched
from tests.waiting import until


@pytest.fixture
async def stage(database: Database, stores: Stores, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_stage(database, stores.kafka, topic_prefix, tmp_path) as made:
        yield made


def history(ids: list[str], length: int, seed_: int) -> list[Held | Mark]:
    chance = random.Random(seed_)
    made: list[Held | Mark] = []
    for _ in range(length):
        id_, user, device = chance.choice(ids), chance.choice(list(VISIBLE)), chance.choice(["phone", "laptop"])
        low = chance.randint(1, HEAD + 1)
        made.append(
            chance.choice(
                [
                    Held(id_, user, device, RangeSet([(low, low + 2)])),
                    Mark(id_, user, device, "read", chance.randint(0, 2), low),
                    Mark(id_, user, device, "unread", chance.randint(1, 3), low),
                ]
            )
        )
    return made


async def expect(stage: Stage, ids: list[str], acks: list[Held | Mark]) -> None:
    """The rows are what the pure rule makes of these acks."""
    scenes = {id_: Scene(id_) for id_ in ids}
    for ack in acks:
        scenes[ack.conversation_id].apply(batched([ack]))
    there = await receipts(stage.pool)
    assert there == {
        (id_, user): Receipt(marks.delivered, marks.delivered_seq, marks.read)
        for id_, scene in scenes.items()
        for user, marks in scene.marks.items()
        if marks.delivered or marks.read > (0, 0)
    }
    assert await device_cursors(stage.pool) == {
        (id_, user, device): held
        for id_, scene in scenes.items()
        for user, marks in scene.marks.items()
        for device, held in marks.devices.items()
    }


async def seeded(stage: Stage, count: int, *, head: int = HEAD) -> list[str]:
    ids = [str(uuid.uuid4()) for _ in range(count)]
    for id_ in ids:
        await seed(stage.pool, id_, head, VISIBLE)
    return ids


@pytest.mark.promise("I8")
async def test_acks_become_marks_receipts_and_figures_and_sigterm_ends_it(stage: Stage) -> None:
    [id_] = await seeded(stage, 1)
    async with stage.process() as process:
        at_first = await process.metrics()
        for name in (
            'waybill_receipts_total{kind="delivered"}',
            'waybill_receipts_total{kind="read"}',
            'waybill_receipts_total{kind="unread"}',
            'waybill_receipts_refused_total{reason="stale"}',
            'waybill_receipts_refused_total{reason="beyond_head"}',
            'waybill_receipts_refused_total{reason="invisible"}',
        ):
            assert at_first[name] == 0
        acks = [
            Held(id_, "anna", "phone", RangeSet([(1, 4)])),
            Held(id_, "anna", "laptop", RangeSet([(1, 6)])),
            Mark(id_, "anna", "phone", "read", 0, 5),
            Mark(id_, "anna", "laptop", "read", 0, 4),
            Mark(id_, "anna", "phone", "unread", 1, 2),
            Mark(id_, "late", "phone", "read", 0, 3),
            Mark(id_, "late", "phone", "read", 0, HEAD + 1),
        ]
        await stage.send(acks)
        await stage.caught_up()
        await expect(stage, [id_], acks)
        told = {(r["user_id"], r["cause"], r.get("device_id")) for r in await announced(stage.pool)}
        assert told == {
            ("anna", "ack", None),
            ("anna", "read", None),
            ("anna", "unread", None),
            ("anna", "refused:stale", "laptop"),
            ("late", "refused:invisible", "phone"),
            ("late", "refused:beyond_head", "phone"),
        }
        counted = await process.metrics()
        assert counted['waybill_receipts_total{kind="delivered"}'] == 10
        assert counted['waybill_receipts_total{kind="read"}'] == 1
        assert counted['waybill_receipts_total{kind="unread"}'] == 1
        assert {
            counted[f'waybill_receipts_refused_total{{reason="{r}"}}'] for r in ("stale", "beyond_head", "invisible")
        } == {1}
        assert counted["waybill_receipts_partitions"] == 64
        process.signal(signal.SIGTERM)
        assert await process.ended(5) == 0
        assert await offsets(stage.pool) | {partition_of(id_): 7} == await offsets(stage.pool)


@pytest.mark.promise("I8")
async def test_killed_again_and_again_no_mark_is_lost_or_taken_twice(stage: Stage) -> None:
    """Each mark is larger than the one before it: one that was applied twice would be refused as stale, and told so."""
    ids = await seeded(stage, 20, head=1000)
    chance = random.Random(7)
    process = stage.process(WAYBILL_RECEIPTS_INSTANCE="one").start()
    sent: list[Held | Mark] = []

    async def stream() -> None:
        for seq in range(1, 201):
            some: list[Held | Mark] = []
            for id_ in ids:
                some += [Held(id_, "anna", "phone", RangeSet([(seq, seq)])), Mark(id_, "anna", "phone", "read", 0, seq)]
            await stage.send(some)
            sent.extend(some)

    try:
        async with asyncio.TaskGroup() as group:
            streaming = group.create_task(stream())
            for _ in range(3):
                before = sum((await offsets(stage.pool)).values())
                await until(lambda before=before: _has_moved(stage, before), timeout=30, what="some acks applied")
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(streaming), chance.uniform(0.01, 0.2))
                await process.kill()
                process = stage.process(WAYBILL_RECEIPTS_INSTANCE="one").start()
        await stage.caught_up(60)
        assert await receipts(stage.pool) == {
            (id_, "anna"): Receipt(RangeSet([(1, 200)]), 200, (0, 200)) for id_ in ids
        }
        assert {r["cause"] for r in await announced(stage.pool)} == {"ack", "read"}
        stored = await offsets(stage.pool)
        assert sum(stored.values()) == len(sent) == 20 * 200 * 2
    finally:
        await process.kill()


async def _has_moved(stage: Stage, before: int) -> bool:
    return sum((await offsets(stage.pool)).values()) > before


@pytest.mark.promise("I8")
async def test_a_replay_from_the_beginning_changes_no_mark(stage: Stage) -> None:
    """Offsets of another cluster, offsets out of range, and a Kafka group that says something else."""
    ids = await seeded(stage, 3)
    acks = history(ids, 200, 11)
    async with stage.process():
        await stage.send(acks)
        await stage.caught_up()
    await expect(stage, ids, acks)
    used = sorted({partition_of(id_) for id_ in ids})
    await stage.pool.execute("UPDATE ack_offset SET cluster_id = 'another' WHERE partition = $1", used[0])
    await stage.pool.execute("UPDATE ack_offset SET next = next + 1000000 WHERE partition > $1", used[0])
    async with stage.kafka_reader(f"{stage.prefix}.receipts") as kafka:
        part = TopicPartition(stage.topics.acks, used[0])
        kafka.assign([part])
        await kafka.commit({part: 10_000})
    before = await receipts(stage.pool)
    async with stage.process() as process:
        await until(lambda: _all_applied(stage, len(acks)), timeout=30, what="all read again")
        assert await receipts(stage.pool) == before
        counted = await process.metrics()
        assert counted['waybill_receipts_restarted_total{reason="new"}'] == 1
        assert counted['waybill_receipts_restarted_total{reason="out_of_range"}'] == 63 - used[0]
        more = history(ids, 50, 12)
        await stage.send(more)
        await stage.caught_up()
    await expect(stage, ids, acks + more)


async def _all_applied(stage: Stage, count: int) -> bool:
    moved = await stage.pool.fetchval("SELECT sum(next) FROM ack_offset WHERE cluster_id <> 'another'")
    return bool(moved == count)


@pytest.mark.promise("protocol.9.kafka")
async def test_a_bad_record_is_put_away_and_skipped(stage: Stage) -> None:
    [id_] = await seeded(stage, 1)
    bad = [
        (id_, b"not json"),
        (id_, b"\xff"),
        (id_, json.dumps({"kind": "read"}).encode()),
        (id_, json.dumps({"kind": "\0"}).encode()),
        (str(uuid.uuid4()), value_of(Mark(id_, "anna", "phone", "read", 0, 9))),
    ]
    good = [Mark(id_, "anna", "phone", "read", 0, 3), Mark(id_, "anna", "phone", "read", 0, 4)]
    async with stage.process() as process:
        await stage.send_raw([(id_, value_of(good[0])), *bad, (id_, value_of(good[1]))])
        await stage.caught_up()
        await expect(stage, [id_], list(good))
        dead = await stage.records(stage.topics.dead)
        assert sorted((r.key, r.value) for r in dead) == sorted((key.encode(), value) for key, value in bad)
        for record in dead:
            source, _, partition = (header(record.headers, "dead_source") or "").partition("/")
            assert (source, int(partition)) == (stage.topics.acks, record.partition)
            assert header(record.headers, "dead_attempts") == "1"
            assert (header(record.headers, "dead_error") or "").startswith(("value:", "key:", "seq:", "kind:"))
        assert [header(r.headers, "dead_offset") for r in dead if r.key == id_.encode()] == ["1", "2", "3", "4"]
        assert (await process.metrics())[f'waybill_bad_records_total{{topic="{stage.topics.acks}"}}'] == 5
        assert (await process.get("/readyz"))[0] == 200


async def test_too_many_bad_records_stop_it_before_they_are_all_put_away(stage: Stage) -> None:
    [id_] = await seeded(stage, 1)
    async with stage.process(WAYBILL_RECEIPTS_BREAKER_LEAST="10") as process:
        await stage.send([Mark(id_, "anna", "phone", "read", 0, 3)])
        await stage.caught_up()
        before = await offsets(stage.pool)
        await stage.send_raw([(id_, b"nonsense")] * 500)

        async def stopped() -> bool:
            return "breaker" in (await process.get("/readyz"))[1]

        await until(stopped, timeout=20, what="the breaker")
        status, text = await process.get("/readyz")
        assert status == 503
        assert "could not be read" in json.loads(text)["failing"]["breaker"]
        assert (await process.get("/healthz"))[0] == 200
        assert (await process.metrics())["waybill_receipts_stopped"] == 1
        put_away = len(await stage.records(stage.topics.dead))
        moved = sum((await offsets(stage.pool)).values()) - sum(before.values())
        assert put_away == moved < 10
        process.signal(signal.SIGTERM)
        assert await process.ended(5) == 0


@pytest.mark.promise("I8")
async def test_while_the_store_is_away_acks_wait_and_none_is_lost(stage: Stage) -> None:
    ids = await seeded(stage, 3)
    parts = urlsplit(stage.database.url("receipts"))
    assert parts.hostname is not None
    gate = Gate(parts.hostname, parts.port or 5432)
    await gate.open()
    place = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{gate.port}"
    acks = history(ids, 120, 5)
    async with stage.process(WAYBILL_POSTGRES_URL=urlunsplit(parts._replace(netloc=place))) as process:
        await stage.send(acks[:40])
        await stage.caught_up()
        await gate.shut()
        await stage.send(acks[40:])

        async def says_so() -> bool:
            return "postgres" in (await process.get("/readyz"))[1]

        await until(says_so, timeout=15, what="readyz names Postgres")
        assert (await process.get("/healthz"))[0] == 200
        await gate.open()
        await stage.caught_up()
        await process.ready()
        await expect(stage, ids, acks)
        await gate.shut()
        await stage.send(acks[:10])
        process.signal(signal.SIGTERM)
        assert await process.ended(8) == 0


@pytest.mark.promise("I8")
async def test_two_processes_share_the_partitions_and_take_over_from_each_other(stage: Stage) -> None:
    ids = await seeded(stage, 12)
    acks = history(ids, 1500, 21)
    async with stage.process() as first:
        await stage.send(acks[:500])
        async with stage.process() as second:
            await stage.send(acks[500:1000])

            async def shared() -> bool:
                both = [(await p.metrics()).get("waybill_receipts_partitions", 0) for p in (first, second)]
                return sum(both) == 64 and min(both) == 32

            await until(shared, timeout=30, what="32 partitions each")
            first.signal(signal.SIGTERM)
            assert await first.ended(5) == 0
            await stage.send(acks[1000:])
            await stage.caught_up()
    await expect(stage, ids, acks)
    stored = await offsets(stage.pool)
    assert sum(stored.values()) == len(acks)


async def test_a_conversation_seen_by_all_is_delivered_to_its_head(stage: Stage) -> None:
    """The largest records that the protocol allows, in one batch."""
    id_ = str(uuid.uuid4())
    await seed(stage.pool, id_, 20_000, {"anna": EVERYTHING})
    odd = [
        Held(id_, "anna", "phone", RangeSet((2 * n - 1, 2 * n - 1) for n in range(at, at + 1000)))
        for at in range(1, 10_000, 1000)
    ]
    even = [
        Held(id_, "anna", "laptop", RangeSet((2 * n, 2 * n) for n in range(at, at + 1000)))
        for at in range(1, 10_000, 1000)
    ]
    async with stage.process():
        await stage.send([*odd, *even])
        await stage.caught_up()
    assert (await receipts(stage.pool))[id_, "anna"] == Receipt(RangeSet([(1, 20_000)]), 20_000, (0, 0))


async def test_it_waits_for_its_topic_and_says_so(stage: Stage) -> None:
    process = stage.process(WAYBILL_TOPIC_PREFIX=f"{stage.prefix}-later")
    process.start()
    try:

        async def says_so() -> bool:
            status, text = await process.get("/readyz")
            return status == 503 and "assignment" in json.loads(text)["failing"]

        await until(says_so, timeout=30, what="readyz names the assignment")
        await ensure_topics(stage.bootstrap, Topics(f"{stage.prefix}-later"))
        await process.ready()
        assert (await process.metrics())["waybill_receipts_partitions"] == 64
        process.signal(signal.SIGTERM)
        assert await process.ended(5) == 0
    finally:
        await process.stop()
