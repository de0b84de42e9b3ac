"""The sweep against real rows: what a test's Kafka does not bring is found, and nothing else is."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import msgspec
import pytest

from services.gateway import sweep as sweeping
from services.gateway.devices import Devices
from services.gateway.sweep import Sweep
from shared.kafka import partition_of
from shared.postgres import Pool, open_pool
from tests.databases import Database
from tests.rows import Rows, open_rows, user
from tests.waiting import until


@pytest.fixture
async def home(module_database: Database) -> AsyncIterator[Rows]:
    async with open_rows(module_database) as made:
        yield made


@pytest.fixture
async def pool(module_database: Database) -> AsyncIterator[Pool]:
    async with open_pool(module_database.url("gateway"), size=2, name="tests") as made:
        yield made


@dataclass
class Room:
    top: int


@dataclass
class Follower:
    device_id: str = "phone"
    number: int = 1
    feeds: dict[str, None] = field(default_factory=dict)

    @property
    def session(self) -> "Follower":
        return self


class Local:
    """What a gateway has here, and what it is told; and the Kafka that may be away."""

    def __init__(self) -> None:
        self.rooms: dict[str, Room] = {}
        self.users: dict[str, list[Follower]] = {}
        self.events: list[tuple[str, int]] = []
        self.receipts: list[tuple[str, Any]] = []
        self.all_heads: list[dict[str, int]] = []
        self.replaced: list[tuple[str, str, int]] = []
        self.revoked: list[Any] = []
        self.stores = 0
        self.away = False

    def heads(self, heads: Any) -> None:
        self.all_heads.append(dict(heads))
        for name, head in heads.items():
            self.rooms[name].top = max(head, self.rooms[name].top)

    def event(self, conversation_id: str, seq: int, _type: str, _value: bytes, **_: float) -> None:
        self.events.append((conversation_id, seq))
        if conversation_id in self.rooms:
            self.rooms[conversation_id].top = max(seq, self.rooms[conversation_id].top)

    def receipt(self, conversation_id: str, value: bytes) -> None:
        self.receipts.append((conversation_id, msgspec.json.decode(value)))

    def store_changed(self) -> None:
        self.stores += 1

    @asynccontextmanager
    async def swept(self, pool: Pool, **options: Any) -> AsyncIterator[Sweep]:
        """A sweep that runs; looks often, unless told otherwise."""
        sweep = Sweep(
            pool,
            self,  # type: ignore[arg-type]
            kafka_away=lambda: self.away,
            store_changed=self.store_changed,
            replaced=lambda *which: self.replaced.append(which),
            revoked=self.revoked.extend,
            **{"every_s": 0.05, "away_s": 0.05, "grace_s": 0.3, **options},
        )
        task = asyncio.create_task(sweep.run())
        try:
            await until(sweep.started.is_set, timeout=5, what="the sweep")
            yield sweep
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
def local() -> Local:
    return Local()


async def outbox(home: Rows, conversation_id: str, topic: str) -> list[asyncpg.Record]:
    return await home.owner.fetch(
        "SELECT * FROM outbox WHERE conversation_id = $1 AND topic = $2 ORDER BY id", conversation_id, topic
    )


async def has(what: Callable[[], object], timeout: float = 5) -> None:
    await until(what, timeout=timeout, what="what was lost")


async def test_an_event_that_never_came_is_found(home: Rows, pool: Pool, local: Local) -> None:
    ann = user("ann")
    followed, brought, foreign = [await home.group(ann) for _ in range(3)]
    local.rooms = {followed: Room(1), brought: Room(1)}
    async with local.swept(pool):
        await home.messages(followed, ann, 3)
        await home.messages(brought, ann, 2)
        local.rooms[brought].top = 3
        await home.messages(foreign, ann, 1)
        await has(lambda: local.all_heads)
        assert local.all_heads == [{followed: 4}]
        await home.messages(followed, ann, 1)
        await has(lambda: len(local.all_heads) == 2)
    assert local.all_heads[1] == {followed: 5}
    assert local.events == local.receipts == []


async def test_after_a_find_the_next_one_comes_sooner(home: Rows, pool: Pool, local: Local) -> None:
    """Kafka may be away without having said so."""
    ann = user("ann")
    group = await home.group(ann)
    local.rooms = {group: Room(1)}
    async with local.swept(pool, grace_s=0.1) as sweep:
        await home.messages(group, ann, 1)
        await has(lambda: local.all_heads)
        sweep._every_s = 60.0
        await home.messages(group, ann, 1)
        await has(lambda: local.rooms[group].top == 3)


async def test_what_was_committed_before_the_start_is_nobodys(home: Rows, pool: Pool, local: Local) -> None:
    ann = user("ann")
    old, new = await home.group(ann), await home.group(ann)
    await home.messages(old, ann, 1)
    local.rooms = {old: Room(1), new: Room(1)}
    async with local.swept(pool):
        await home.messages(new, ann, 1)
        await has(lambda: local.all_heads)
    assert local.all_heads == [{new: 2}]


async def test_within_the_grace_nothing_is_judged(home: Rows, pool: Pool, local: Local) -> None:
    ann = user("ann")
    late, lost = await home.group(ann), await home.group(ann)
    local.rooms = {late: Room(1), lost: Room(1)}
    lag = 60.0
    async with local.swept(pool, lag_s=lambda: lag):
        await home.messages(late, ann, 1)
        await home.messages(lost, ann, 1)
        await asyncio.sleep(0.6)  # longer than the grace: what is late because much is on its way is not lost
        assert local.all_heads == []
        local.rooms[late].top = 2
        lag = 0.0
        await has(lambda: local.all_heads)
    assert local.all_heads == [{lost: 2}]


async def test_a_member_that_never_came_is_brought_in(home: Rows, pool: Pool, local: Local) -> None:
    ann, ben, cat = user("ann"), user("ben"), user("cat")
    known, unknown = await home.group(ann), await home.group(ann)
    local.users = {ann: [Follower(feeds={known: None})], ben: [Follower()], cat: [Follower(feeds={known: None})]}
    local.rooms = {known: Room(1)}
    async with local.swept(pool) as sweep:
        seen = await home.member(known, ann, "add", cat)
        sweep.saw_change(known, seen)
        lost = await home.member(known, ann, "add", ben)
        local.rooms[known].top = await home.write(known, ann)  # its record raised the head over what was lost
        created = await home.group(ann, ben)
        added = await home.member(unknown, ann, "add", ben)
        another = await home.group(ann, user("dan"))
        await home.group(user("dan"))
        await has(lambda: len(local.events) == 4)
    assert set(local.events) == {(known, lost), (created, 1), (unknown, added), (another, 1)}


async def test_a_receipt_that_never_came_is_told_once(home: Rows, pool: Pool, local: Local) -> None:
    ann, ben = user("ann"), user("ben")
    chat, other = await home.direct(ann, ben), await home.group(ann)
    await home.messages(chat, ann, 3)
    local.rooms = {chat: Room(4)}
    async with local.swept(pool) as sweep:
        await home.mark(chat, ben, held="{[1,3)}")
        await home.mark(other, ann, held="{[1,2)}")
        [seen] = await outbox(home, chat, "receipts.v1")
        sweep.saw_receipt(seen["shard"], seen["id"])
        await home.mark(chat, ben, held="{[3,5)}")
        await has(lambda: local.receipts)
        [(conversation_id, receipt)] = local.receipts
        assert (conversation_id, receipt["user_id"], receipt["delivered_seq"]) == (chat, ben, 4)
        lost = (await outbox(home, chat, "receipts.v1"))[1]
        assert not sweep.told_receipt(seen["shard"], seen["id"])
        assert sweep.told_receipt(lost["shard"], lost["id"])
        assert not sweep.told_receipt(lost["shard"], lost["id"])
    assert local.all_heads == local.events == []


async def test_without_kafka_it_carries_delivery_and_repeats_nothing_after(
    home: Rows, pool: Pool, local: Local
) -> None:
    ann, ben = user("ann"), user("ben")
    chat = await home.direct(ann, ben)
    local.rooms, local.away = {chat: Room(1)}, True
    async with local.swept(pool, every_s=60.0, away_s=0.02, grace_s=60.0) as sweep:
        for seq in (2, 3, 4):
            await home.messages(chat, ann, 1)
            await has(lambda seq=seq: local.rooms[chat].top == seq, timeout=1)
            await home.mark(chat, ben, held=f"{{[1,{seq + 1})}}")
            await has(lambda seq=seq: len(local.receipts) == seq - 1, timeout=1)
        local.away = False
        rows = await outbox(home, chat, "receipts.v1")
        assert [sweep.told_receipt(row["shard"], row["id"]) for row in rows] == [True, True, True]
    assert [receipt["delivered_seq"] for _, receipt in local.receipts] == [2, 3, 4]


async def test_ids_that_are_committed_in_another_order_across_shards(
    home: Rows, pool: Pool, local: Local, module_database: Database
) -> None:
    """A row with a lower id of another shard is committed after a higher one was swept."""
    ann = user("ann")
    first = await home.group(ann)
    while partition_of(second := await home.group(ann)) == partition_of(first):
        pass
    local.rooms = {first: Room(1), second: Room(1)}
    slow = await asyncpg.connect(module_database.owner_url)
    try:
        async with local.swept(pool, grace_s=0.0):
            transaction = slow.transaction()
            await transaction.start()
            await slow.execute("SELECT lock_outbox_shards($1)", [partition_of(first)])
            await slow.execute("UPDATE conversation SET last_seq = 2 WHERE conversation_id = $1", first)
            await slow.execute(
                "INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)"
                " VALUES ($1, $2, 2, $3, 'events.v1', 'waybill.event.message', '', '', now())",
                partition_of(first),
                first,
                uuid.uuid4(),
            )
            await home.messages(second, ann, 1)
            await has(lambda: {second: 2} in local.all_heads)
            await transaction.commit()
            await has(lambda: {first: 2} in local.all_heads)
    finally:
        await slow.close()


async def test_a_backlog_of_20_000_rows_is_read_in_parts(home: Rows, pool: Pool, local: Local) -> None:
    ann = user("ann")
    groups = [await home.group(ann) for _ in range(40)]
    local.rooms = {group: Room(1) for group in groups[:30]}
    local.away = True
    async with local.swept(pool, every_s=60.0) as sweep:
        await home.owner.execute(
            "INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)"
            " SELECT c.shard, c.conversation_id, n, uuidv7(), 'events.v1', 'waybill.event.message', '', '', now()"
            " FROM generate_series(2, 501) AS n, conversation AS c WHERE c.conversation_id = ANY ($1::uuid[])",
            groups,
        )
        await has(lambda: all(room.top == 501 for room in local.rooms.values()), timeout=20)
        assert sweep.started.is_set()
    assert len(local.all_heads) > 3


async def test_another_store_is_noticed_and_swept_from_its_end(home: Rows, pool: Pool, local: Local) -> None:
    ann = user("ann")
    group = await home.group(ann)
    async with local.swept(pool, grace_s=0.0):
        await home.owner.execute("UPDATE store SET incarnation = gen_random_uuid()")
        await has(lambda: local.stores)
        local.rooms = {group: Room(1)}

        async def found() -> bool:
            await home.messages(group, ann, 1)
            return bool(local.all_heads)

        await until(found, timeout=5, what="an event of the other store")
    assert local.stores == 1


async def test_newer_sessions_elsewhere_are_found_a_share_at_a_time(home: Rows, pool: Pool, local: Local) -> None:
    users = [user("ann") for _ in range(12)]
    for name in users:
        await home.owner.execute(
            "INSERT INTO device_session VALUES ($1, 'phone', 5, gen_random_uuid(), 'other', now())", name
        )
        local.users[name] = [Follower(number=4), Follower("pad", 7), Follower(number=0)]
    local.users[users[0]] = [Follower(number=5)]
    devices = Devices(pool, local, lambda *which: local.replaced.append(which))  # type: ignore[arg-type]
    for look in range(1, 7):
        await devices.look(5.0)
        assert len(local.replaced) == 2 * look - 1  # all within half a minute
    assert local.replaced == [(name, "phone", 5) for name in users[1:]]
    local.replaced.clear()
    async with local.swept(pool):
        await has(lambda: len(set(local.replaced)) == 11)


async def test_revocations_are_found_and_told_for_a_while(home: Rows, pool: Pool, local: Local) -> None:
    ann, old = user("ann"), user("old")
    await home.owner.execute("INSERT INTO revocation (user_id, created_at) VALUES ($1, now() - interval '1 hour')", old)
    async with local.swept(pool):
        await home.owner.execute("INSERT INTO revocation (user_id, device_id) VALUES ($1, 'phone')", ann)
        await has(lambda: len([row for row in local.revoked if row.user_id == ann]) >= 2)
    assert {row.user_id for row in local.revoked} == {ann}
    assert local.revoked[0].device_id == "phone"


async def test_postgres_away_for_a_while(
    home: Rows, module_database: Database, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = user("ann")
    group = await home.group(ann)
    local.rooms = {group: Room(1)}
    monkeypatch.setattr(sweeping, "_LEAST_PAUSE_S", 0.01)
    async with open_pool(module_database.url("gateway"), size=1, name="swept") as pool, local.swept(pool):
        for _ in range(3):
            await home.owner.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'swept'"
            )
            await asyncio.sleep(0.05)
        await home.messages(group, ann, 1)
        await has(lambda: local.all_heads == [{group: 2}])
