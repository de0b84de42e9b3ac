"""The receipts process between a real Kafka and a real Postgres."""

import asyncio
import json
import random
import signal
import uuid
from collections import Counter
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
    Process,
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
from tests.waiting import lasting, until

pytestmark = pytest.mark.long(60)


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


async def expect(
    stage: Stage, ids: list[str], acks: list[Held | Mark], *, head: int = HEAD
) -> Counter[tuple[str, str | None]]:
    """The rows are what the pure rule makes of these acks; returns what it counts."""
    scenes = {id_: Scene(id_, head) for id_ in ids}
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
    return sum((scene.counted for scene in scenes.values()), Counter())


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


STREAM_S = 0.04


class Storm:
    """Acks that go on until told to stop: those of anna one by one upwards, those of the others at random."""

    def __init__(self, stage: Stage, ids: list[str]) -> None:
        self.sent: list[Held | Mark] = []
        self.rounds = 0
        self._stage = stage
        self._ids = ids
        self._chance = random.Random(7)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        while not self._stop.is_set():
            self.rounds += 1
            some = [ack for id_ in self._ids for ack in self._round(id_)]
            await self._stage.send(some)
            self.sent += some
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), STREAM_S)

    def stop(self) -> None:
        self._stop.set()

    def _round(self, id_: str) -> list[Held | Mark]:
        seq, chance = self.rounds, self._chance
        other, low = chance.choice(["late", "left", "back", "stranger"]), chance.randint(1, seq + 2)
        others: list[Held | Mark] = [
            Held(id_, other, chance.choice(["phone", "laptop"]), RangeSet([(low, low + 2)])),
            Mark(id_, other, "phone", "read", chance.randint(0, 1 + seq // 50), low),
            Mark(id_, other, "phone", "unread", chance.randint(1, 1 + seq // 50), low),
        ]
        mine = [Held(id_, "anna", "phone", RangeSet([(seq, seq)])), Mark(id_, "anna", "phone", "read", 0, seq)]
        return [*mine, chance.choice(others)]


@pytest.mark.promise("I8")
async def test_two_processes_killed_and_frozen_in_turn_lose_no_mark_and_take_none_twice(stage: Stage) -> None:
    """Each mark of anna is larger than the one before it: one that was applied twice would be refused as stale.

    Halfway one of the two loses its store and is frozen, for so long that the other has all partitions and goes on with
    them. It wakes up with acks in its hands that it tries again, and that are not its own any more.
    """
    ids = await seeded(stage, 12, head=5_000)
    chance = random.Random(7)
    gate = await gate_of(stage)
    settings = {
        "one": {"WAYBILL_RECEIPTS_INSTANCE": "one"},
        "two": {"WAYBILL_RECEIPTS_INSTANCE": "two", "WAYBILL_POSTGRES_URL": through(gate, stage)},
    }
    processes = {name: stage.process(**settings[name]).start() for name in settings}
    storm = Storm(stage, ids)

    async def kill(name: str) -> None:
        await processes[name].ready()
        before = sum((await offsets(stage.pool)).values())
        await until(lambda: _has_moved(stage, before), timeout=30, what="some acks applied")
        await lasting(chance.uniform(0.01, 0.2))
        await processes[name].kill()
        processes[name] = stage.process(**settings[name]).start()

    async def has(name: str, partitions: int) -> bool:
        return (await processes[name].metrics()).get("waybill_receipts_partitions") == partitions

    async def fenced(name: str) -> bool:
        return (await processes[name].metrics()).get("waybill_receipts_fenced_total", 0) > 0

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(storm.run())
            for name in ("one", "two", "one", "two"):
                await kill(name)
            await processes["two"].ready()
            await gate.shut()
            await until(lambda: _says(processes["two"], "postgres"), timeout=30, what="a store that is away")
            processes["two"].signal(signal.SIGSTOP)
            await kill("one")
            await kill("one")
            await until(lambda: has("one", 64), timeout=60, what="the other's session is over")
            ends = await stage.ends(stage.topics.acks)
            await until(lambda: _reached(stage, ends), timeout=60, what="the other's acks are applied")
            await gate.open()
            processes["two"].signal(signal.SIGCONT)
            await until(lambda: fenced("two"), timeout=60, what="what it holds is not its own")
            await until(lambda: has("one", 32), timeout=60, what="half of them each, again")
            storm.stop()
        await stage.caught_up(60)
        counted = await expect(stage, ids, storm.sent, head=5_000)
        there = await receipts(stage.pool)
        everything = Receipt(RangeSet([(1, storm.rounds)]), storm.rounds, (0, storm.rounds))
        assert [there[id_, "anna"] for id_ in ids] == [everything] * len(ids)
        assert {r["cause"] for r in await announced(stage.pool) if r["user_id"] == "anna"} == {"ack", "read"}
        assert await logged(stage) == {what: count for what, count in counted.items() if count and what != _IGNORED}
        assert sum((await offsets(stage.pool)).values()) == len(storm.sent)
    finally:
        for process in processes.values():
            await process.kill()
        await gate.shut()


_IGNORED = ("delivered", "invisible")
"""Counted once for each device and batch, so its number says nothing of what was applied twice."""


async def logged(stage: Stage) -> dict[tuple[str, str | None], int]:
    """How many marks, and newly held seqs of a device, the log of state changes tells of, by why they were refused."""
    rows = await stage.pool.fetch(
        "SELECT kind, cause, sum(CASE kind WHEN 'delivered' THEN to_seq - from_seq + 1 ELSE 1 END)::bigint AS amount"
        " FROM transition WHERE NOT (kind = 'delivered' AND cause <> 'ack') GROUP BY kind, cause"
    )
    return {
        (row["kind"], None if row["cause"] == "ack" else row["cause"].removeprefix("refused:")): row["amount"]
        for row in rows
    }


async def _reached(stage: Stage, ends: dict[int, int]) -> bool:
    stored = await offsets(stage.pool)
    return all(stored.get(partition, 0) >= end for partition, end in ends.items())


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


async def gate_of(stage: Stage) -> Gate:
    """An open way to the store."""
    parts = urlsplit(stage.database.url("receipts"))
    assert parts.hostname is not None
    gate = Gate(parts.hostname, parts.port or 5432)
    await gate.open()
    return gate


def through(gate: Gate, stage: Stage) -> str:
    """The store's address by this way."""
    parts = urlsplit(stage.database.url("receipts"))
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{gate.port}"))


async def _says(process: Process, what: str) -> bool:
    return what in (await process.get("/readyz"))[1]


@pytest.mark.promise("I8")
async def test_while_the_store_is_away_acks_wait_and_none_is_lost(stage: Stage) -> None:
    ids = await seeded(stage, 3)
    gate = await gate_of(stage)
    acks = history(ids, 120, 5)
    async with stage.process(WAYBILL_POSTGRES_URL=through(gate, stage)) as process:
        await stage.send(acks[:40])
        await stage.caught_up()
        await gate.shut()
        await stage.send(acks[40:])
        await until(lambda: _says(process, "postgres"), timeout=15, what="readyz names Postgres")
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
