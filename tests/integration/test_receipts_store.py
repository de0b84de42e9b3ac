"""`apply_acks` against the pure rule, on a real Postgres, under the service's own role."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.receipts.batch import Span
from services.receipts.fold import Changes, Held, Mark
from services.receipts.marks import Marks
from services.receipts.store import OffsetsMovedError, Store
from shared.kafka import partition_of
from shared.postgres import Pool, open_pool
from shared.ranges import OPEN, RangeSet
from tests.databases import Database
from tests.integration import receipts_stage as stage
from tests.unit.receipts.histories import (
    HEAD,
    VISIBLE,
    Change,
    History,
    Scene,
    acks,
    batched,
    histories,
    honest,
    shuffled,
)

TOPIC = "test.acks.v1"
CLUSTER = "cluster-1"


class Log:
    """The offsets of one partition, moved batch by batch."""

    def __init__(self, store: Store, partition: int = 0) -> None:
        self.store = store
        self.partition = partition
        self.next = 0

    async def open(self) -> None:
        placed = await self.store.place(CLUSTER, {}, {self.partition: 0}, {self.partition: 0})
        self.next = placed[self.partition]

    async def apply(self, batch: Changes, records: int = 1) -> Counter[tuple[str, str | None]]:
        span = Span(self.next, self.next + records)
        counted = await self.store.apply(CLUSTER, {self.partition: span}, batch)
        self.next = span.upto
        return Counter({(one.kind, one.reason): one.amount for one in counted})


@dataclass(frozen=True, slots=True)
class Play:
    """A scene that is played by the rule and by the SQL side by side."""

    owner: Pool
    log: Log
    scene: Scene

    async def history(self, history: History) -> None:
        """Play a history, and compare all that there is to compare after each batch."""
        for batch in history.batches():
            if isinstance(batch, Change):
                await self.change(batch)
            else:
                await self.acks(batch)

    async def acks(self, said: list[Held | Mark]) -> None:
        batch = batched(replace(ack, conversation_id=self.scene.conversation_id) for ack in said)
        last_id, before = await newest(self.owner), self.scene.counted.copy()
        self.scene.records.clear()
        self.scene.apply(batch)
        assert await self.log.apply(batch, len(said)) == self.scene.counted - before
        await compare(self.owner, self.scene, last_id)

    async def change(self, change: Change) -> None:
        self.scene.change(change)
        id_ = self.scene.conversation_id
        await self.owner.execute(
            "UPDATE conversation SET last_seq = $2 WHERE conversation_id = $1", id_, self.scene.head
        )
        if (visible := self.scene.visible[change.user]) is not None:
            await stage.set_visible(self.owner, id_, change.user, visible)


async def opened(owner: Pool, log: Log) -> Play:
    """A scene of its own, at its beginning."""
    scene = Scene(str(uuid.uuid4()))
    await stage.seed(owner, scene.conversation_id, HEAD, VISIBLE)
    return Play(owner, log, scene)


async def newest(owner: Pool) -> int:
    return int(await owner.fetchval("SELECT coalesce(max(id), 0) FROM outbox"))


async def compare(owner: Pool, scene: Scene, after: int) -> None:
    """Rows, and the receipts above an id of the outbox, are what the pure rule says."""
    receipts = {user: row for (_, user), row in (await stage.receipts(owner, scene.conversation_id)).items()}
    for user, marks in scene.marks.items():
        there = receipts.get(user, stage.Receipt(RangeSet(), 0, (0, 0)))
        assert there == stage.Receipt(marks.delivered, marks.delivered_seq, marks.read), user
    devices = {(u, d): held for (_, u, d), held in (await stage.device_cursors(owner, scene.conversation_id)).items()}
    assert devices == {(user, d): held for user, marks in scene.marks.items() for d, held in marks.devices.items()}
    announced = await stage.announced(owner, after=after)
    told = [(r["user_id"], r["kind"], r["cause"], r.get("device_id")) for r in announced]
    assert sorted(told, key=str) == scene.records
    for record in announced:
        marks = scene.marks[str(record["user_id"])]
        assert record["conversation_id"] == scene.conversation_id
        assert (record["read_version"], record["read_seq"]) == marks.read
        assert record["delivered_seq"] == marks.delivered_seq


@contextmanager
def playing(database: Database) -> Iterator[tuple[asyncio.Runner, Pool, Log]]:
    """A loop for Hypothesis' examples, the owner's pool, and a log of its own on the store under the service's role."""
    with asyncio.Runner() as runner, ExitStack() as stack:

        def pool(url: str) -> Pool:
            made = open_pool(url, size=1, name="test")
            stack.callback(lambda: runner.run(made.__aexit__(None, None, None)))
            return runner.run(made.__aenter__())

        owner, log = pool(database.owner_url), Log(Store(pool(database.url("receipts")), TOPIC))
        runner.run(log.open())
        yield runner, owner, log


EXAMPLES = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.promise("I8")
def test_the_sql_does_what_the_pure_rule_does(module_database: Database) -> None:
    """Every word of `test_the_histories_hold_every_word_of_the_rule` is in these histories."""
    with playing(module_database) as (runner, owner, log):

        async def one(history: History) -> None:
            await (await opened(owner, log)).history(history)

        @settings(EXAMPLES, max_examples=120)
        @given(histories())
        def check(history: History) -> None:
            runner.run(one(history))

        check()


@pytest.mark.promise("I8")
def test_any_order_of_the_same_acks_ends_in_the_same_marks(module_database: Database) -> None:
    """In the rule and in the SQL: two orders, each with repeats and cuts of its own."""
    with playing(module_database) as (runner, owner, log):

        async def end(history: History) -> dict[str, Marks]:
            play = await opened(owner, log)
            await play.history(history)
            return play.scene.marks

        @settings(EXAMPLES, max_examples=40)
        @given(st.lists(acks, min_size=2, max_size=8), st.data())
        def check(said: list[Held | Mark], data: st.DataObject) -> None:
            ends = [runner.run(end(data.draw(shuffled(said)))) for _ in range(2)]
            assert ends[0] == ends[1]

        check()


@pytest.mark.promise("I8")
def test_a_replay_of_everything_changes_no_row(module_database: Database) -> None:
    """After heads have grown and members have left and come back; in any order, twice, cut anywhere."""
    with playing(module_database) as (runner, owner, log):

        async def one(history: History, again: History) -> None:
            play = await opened(owner, log)
            await play.history(history)
            rows = await all_of(owner, play.scene.conversation_id)
            await play.history(again)
            assert await all_of(owner, play.scene.conversation_id) == rows

        @settings(EXAMPLES, max_examples=40)
        @given(honest(), st.data())
        def check(history: History, data: st.DataObject) -> None:
            said = [step for step in history.steps if not isinstance(step, Change)]
            runner.run(one(history, data.draw(shuffled(said))))

        check()


async def all_of(owner: Pool, id_: str) -> list[str]:
    """Every row of marks and cursors, whole: also when it was changed last."""
    rows = await owner.fetch(
        "SELECT r::text AS line FROM receipt AS r WHERE conversation_id = $1"
        " UNION ALL SELECT d::text FROM device_cursor AS d WHERE conversation_id = $1 ORDER BY line",
        id_,
    )
    return [row["line"] for row in rows]


@pytest.mark.promise("I8")
async def test_every_order_of_a_replayed_history_ends_the_same(database: Database) -> None:
    """The same acks doubled, shuffled and cut at random, as often as there are conversations."""
    chance = random.Random(8)
    history: list[Held | Mark] = []
    for user in ("anna", "late", "left", "back", "stranger"):
        for device in ("phone", "laptop"):
            low = chance.randint(1, 6)
            history.append(Held("", user, device, RangeSet([(low, low + 3), (low + 5, low + 8)])))
            history.append(Mark("", user, device, "read", chance.randint(0, 1), chance.randint(1, 13)))
            history.append(Mark("", user, device, "unread", chance.randint(1, 3), chance.randint(0, 5)))
    ends: list[dict[str, stage.Receipt]] = []
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        log = Log(Store(pool, TOPIC))
        await log.open()
        for _ in range(25):
            scene = Scene(str(uuid.uuid4()))
            await stage.seed(owner, scene.conversation_id, HEAD, VISIBLE)
            order = [
                replace(ack, conversation_id=scene.conversation_id) for ack in history + chance.sample(history, 12)
            ]
            chance.shuffle(order)
            while order:
                size = chance.randint(1, 9)
                scene.apply(batched(order[:size]))
                await log.apply(batched(order[:size]), size)
                del order[:size]
            scene.records.clear()
            await compare(owner, scene, await newest(owner))
            ends.append({user: row for (_, user), row in (await stage.receipts(owner, scene.conversation_id)).items()})
    assert ends == [ends[0]] * 25


@pytest.mark.promise("I8")
async def test_batches_of_several_partitions_side_by_side_neither_deadlock_nor_lose(database: Database) -> None:
    """Lock order: the same users' marks from eight logs at once, as after a change of the topic."""
    chance = random.Random(3)
    ids = [str(uuid.uuid4()) for _ in range(6)]
    scenes = {id_: Scene(id_) for id_ in ids}
    async with (
        open_pool(database.owner_url, size=2, name="test") as owner,
        open_pool(database.url("receipts"), size=8, name="test") as pool,
    ):
        for id_ in ids:
            await stage.seed(owner, id_, HEAD, VISIBLE)

        async def one(partition: int) -> list[Held | Mark]:
            log, done = Log(Store(pool, TOPIC), partition), list[Held | Mark]()
            await log.open()
            for _ in range(15):
                batch: list[Held | Mark] = []
                for id_ in ids:
                    user = chance.choice(["anna", "late", "left", "back"])
                    low = chance.randint(1, 12)
                    batch.append(Held(id_, user, chance.choice(["Phone", "laptop"]), RangeSet([(low, low + 1)])))
                    batch.append(Mark(id_, user, "phone", "read", 0, chance.randint(1, 12)))
                chance.shuffle(batch)
                await log.apply(batched(batch))
                done += batch
            return done

        for history in await asyncio.gather(*(one(partition) for partition in range(8))):
            for ack in history:
                scenes[ack.conversation_id].apply(batched([ack]))
        rows = await stage.receipts(owner)
        for id_, scene in scenes.items():
            for user, marks in scene.marks.items():
                if user != "stranger":
                    assert rows[id_, user] == stage.Receipt(marks.delivered, marks.delivered_seq, marks.read)
        assert await owner.fetchval("SELECT sum(next) FROM ack_offset") == 8 * 15


@pytest.mark.promise("I8")
async def test_who_is_shown_more_of_the_past_keeps_the_delivered_mark(database: Database) -> None:
    """Who comes back to a group with all its history sees events that none of their devices holds."""
    id_ = str(uuid.uuid4())
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        await stage.seed(owner, id_, 10, {"anna": RangeSet([(5, OPEN)])})
        log = Log(Store(pool, TOPIC))
        await log.open()
        await log.apply(batched([Held(id_, "anna", "phone", RangeSet([(5, 7)]))]))
        await stage.set_visible(owner, id_, "anna", stage.EVERYTHING)
        await log.apply(batched([Held(id_, "anna", "phone", RangeSet([(9, 9)]))]))
        assert (await stage.receipts(owner))[id_, "anna"] == stage.Receipt(RangeSet([(5, 7), (9, 9)]), 7, (0, 0))
        await log.apply(batched([Held(id_, "anna", "laptop", RangeSet([(1, 8)]))]))
        assert (await stage.receipts(owner))[id_, "anna"] == stage.Receipt(RangeSet([(1, 9)]), 9, (0, 0))


@pytest.mark.promise("I8")
async def test_an_owner_whose_offsets_were_moved_changes_nothing(database: Database) -> None:
    id_ = str(uuid.uuid4())
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=2, name="test") as pool,
    ):
        await stage.seed(owner, id_, 10, VISIBLE)
        store = Store(pool, TOPIC)
        await store.place(CLUSTER, {}, {0: 0, 1: 5}, {0: 9, 1: 9})
        ours = batched([Held(id_, "anna", "phone", RangeSet([(1, 2)])), Mark(id_, "anna", "phone", "read", 0, 2)])
        theirs = batched([Held(id_, "anna", "laptop", RangeSet([(1, 9)])), Mark(id_, "anna", "laptop", "read", 0, 9)])
        spans = {0: Span(0, 2), 1: Span(5, 6)}
        outcomes = await asyncio.gather(
            store.apply(CLUSTER, spans, ours), store.apply(CLUSTER, spans, theirs), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes].count(OffsetsMovedError) == 1
        seq = 2 if isinstance(outcomes[1], OffsetsMovedError) else 9
        for lost in (spans, {0: Span(2, 4), 1: Span(5, 6)}, {0: Span(2, 4), 2: Span(0, 1)}):
            with pytest.raises(OffsetsMovedError):
                await store.apply(CLUSTER, lost, theirs)
        with pytest.raises(OffsetsMovedError):
            await store.apply("cluster-2", {0: Span(2, 4)}, theirs)
        assert (await stage.receipts(owner))[id_, "anna"] == stage.Receipt(RangeSet([(1, seq)]), seq, (0, seq))
        assert len(await stage.device_cursors(owner)) == 1
        assert len(await stage.announced(owner)) == 2
        assert await stage.offsets(owner) == {0: 2, 1: 6}


async def test_stored_offsets_are_kept_and_useless_ones_start_at_the_beginning(database: Database) -> None:
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        store = Store(pool, TOPIC)
        begin, end = dict.fromkeys(range(4), 5), dict.fromkeys(range(4), 20)
        assert await store.place(CLUSTER, {}, begin, end) == begin
        await owner.execute("UPDATE ack_offset SET next = (ARRAY[5, 20, 4, 21])[partition + 1]")
        stored = await store.stored(CLUSTER, [0, 1, 2, 3])
        assert await store.place(CLUSTER, stored, begin, end) == {0: 5, 1: 20, 2: 5, 3: 5}
        # Another process moved it between our two reads: its word stands.
        assert await store.place(CLUSTER, {1: 99}, {1: 5}, {1: 20}) == {1: 20}
        assert await store.stored("cluster-2", [0, 1, 2, 3]) == {}


@pytest.mark.promise("protocol.5.read_refused")
async def test_a_topic_that_was_made_anew_is_answered_from_its_beginning(database: Database) -> None:
    id_ = str(uuid.uuid4())
    refused = batched([Mark(id_, "anna", "phone", "read", 0, 99, 0, 0)])
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        await stage.seed(owner, id_, 10, VISIBLE)
        store = Store(pool, TOPIC)
        assert await store.place(CLUSTER, {}, {0: 0}, {0: 20}) == {0: 0}
        await store.apply(CLUSTER, {0: Span(0, 20)}, refused)
        assert len(await stage.announced(owner)) == 1
        # Retention has passed the stored offset: the topic is the same, and what was answered stays so.
        assert await store.place(CLUSTER, {0: 20}, {0: 25}, {0: 30}) == {0: 25}
        assert await owner.fetchval("SELECT upto FROM ack_answered") == 20
        assert await store.place(CLUSTER, {0: 25}, {0: 0}, {0: 1}) == {0: 0}
        await store.apply(CLUSTER, {0: Span(0, 1)}, refused)
        assert [one["cause"] for one in await stage.announced(owner)] == ["refused:beyond_head"] * 2


@pytest.mark.promise("protocol.5.delivered")
async def test_who_acks_every_other_seq_makes_nobody_s_acks_dear(database: Database) -> None:
    id_ = str(uuid.uuid4())
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        await stage.seed(owner, id_, 30_000, {"anna": stage.EVERYTHING})
        log = Log(Store(pool, TOPIC))
        await log.open()

        async def kept(ranges: RangeSet, device: str = "phone") -> tuple[int, int, int]:
            """After this ack: how many ranges there are, of the device and of the user, and the mark."""
            await log.apply(batched([Held(id_, "anna", device, ranges)]))
            receipt = (await stage.receipts(owner))[id_, "anna"]
            return (
                len((await stage.device_cursors(owner))[id_, "anna", device]),
                len(receipt.delivered),
                receipt.delivered_seq,
            )

        every_other = RangeSet([(seq, seq) for seq in range(1, 12_000, 2)])
        assert await kept(every_other) == (5000, 5000, 1)
        assert await kept(RangeSet([(20_001, 20_001)])) == (5000, 5000, 1)
        assert await kept(RangeSet([(2, 2)])) == (4999, 4999, 3), "it grows from below"
        assert await kept(RangeSet([(seq, seq) for seq in range(12_002, 13_000, 2)])) == (5000, 5000, 3)
        assert await kept(RangeSet([(9, 9)]), "laptop") == (1, 5000, 3)
        # As the cursor of a later `hello` says it.
        assert await kept(RangeSet([(1, 20_001)])) == (1, 1, 20_001)


async def test_a_table_without_a_partition_makes_no_ack_a_dead_letter(database: Database) -> None:
    id_ = str(uuid.uuid4())
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        await stage.seed(owner, id_, 10, VISIBLE)
        log = Log(Store(pool, TOPIC))
        await log.open()
        for (part,) in await owner.fetch(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox'::regclass"
        ):
            await owner.execute(f"ALTER TABLE outbox DETACH PARTITION {part}")
        with pytest.raises(asyncpg.CheckViolationError, match="no partition"):
            await log.apply(batched([Mark(id_, "anna", "phone", "read", 0, 4)]))


async def test_a_mark_and_its_receipt_carry_what_kafka_and_the_gateway_need(database: Database) -> None:
    id_ = str(uuid.uuid4())
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        await stage.seed(owner, id_, 10, {"anna": stage.EVERYTHING})
        log = Log(Store(pool, TOPIC))
        await log.open()
        await log.apply(batched([Mark(id_, "anna", "phone", "read", 0, 4), Mark(id_, "anna", "old", "read", 0, 11)]))
        rows = await owner.fetch("SELECT * FROM outbox ORDER BY id")
        assert [(r["type"], r["source"], r["topic"], r["seq"], r["shard"]) for r in rows] == [
            ("waybill.receipt.read", "/waybill/receipts", "receipts.v1", None, partition_of(id_))
        ] * 2
        assert [dict(zip(r["headers"][::2], r["headers"][1::2], strict=True)) for r in rows] == [
            {"user_id": "anna", "kind": "read"}
        ] * 2
        assert all(r["event_id"].version == 7 for r in rows)
        base = {
            "t": "receipt",
            "conversation_id": id_,
            "user_id": "anna",
            "delivered_seq": 0,
            "read_seq": 4,
            "read_version": 0,
            "kind": "read",
        }
        told = sorted(await stage.announced(owner), key=len)
        assert told == [base | {"cause": "read"}, base | {"cause": "refused:beyond_head", "device_id": "old"}]


async def test_every_table_is_reached_by_its_key(database: Database) -> None:
    """Full tables of 200,000 rows and full batches: no table is read from end to end, however the planner counts."""
    tables = ["conversation", "member", "receipt", "device_cursor"]
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        await owner.execute(
            """
            INSERT INTO conversation (conversation_id, shard, kind, history, creator_id, last_seq, created_at)
            SELECT md5(n::text)::uuid, n % 64, 'group', 'all', 'u0', 100, now() FROM generate_series(1, 20000) AS n;
            INSERT INTO member (conversation_id, user_id, role, visible)
            SELECT c.conversation_id, 'u' || u, 'member', '{[1,)}' FROM conversation AS c, generate_series(0, 9) AS u;
            INSERT INTO receipt (conversation_id, user_id) SELECT conversation_id, user_id FROM member;
            INSERT INTO device_cursor (conversation_id, user_id, device_id)
            SELECT conversation_id, user_id, 'phone' FROM member;
            ANALYZE;
            """,
            timeout=60,
        )
        ids = [
            str(row["id"])
            for row in await owner.fetch("SELECT md5(n::text)::uuid AS id FROM generate_series(1, 1500) AS n")
        ]
        log = Log(Store(pool, TOPIC))
        await log.open()
        await owner.execute("SELECT pg_stat_force_next_flush()")
        before = await scans(owner, tables)
        for seq in (10, 20, 30):
            held = [Held(id_, f"u{n % 10}", "phone", RangeSet([(1, seq)])) for n, id_ in enumerate(ids)]
            marks = [Mark(id_, f"u{n % 10}", "phone", "read", 0, seq) for n, id_ in enumerate(ids)]
            counted = await log.apply(Changes(held, marks))
            assert counted == {("delivered", None): 10 * len(ids), ("read", None): len(ids)}
        await pool.execute("SELECT pg_stat_force_next_flush()")
        await owner.execute("SELECT pg_stat_force_next_flush()")
        assert await scans(owner, tables) == before


async def scans(owner: Pool, tables: list[str]) -> dict[str, int]:
    rows = await owner.fetch("SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname = ANY ($1)", tables)
    return {row["relname"]: row["seq_scan"] for row in rows}
