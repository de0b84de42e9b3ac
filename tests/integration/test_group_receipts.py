"""Who has received and read a seq: over HTTP, on the socket, in the SDK; and what a large group costs."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, get_args

import asyncpg
import pytest
from aiokafka import TopicPartition
from waybill_client import Client as Phone
from waybill_client import Receipt

from services.gateway import watching
from services.gateway.group_receipts import MOST, SoFar
from services.receipts.fold import Changes, Mark
from services.receipts.store import Store
from shared.contracts.words import State
from shared.errors import NotFoundError
from shared.kafka import partition_of, reader
from shared.postgres import Pool, open_pool, to_multirange
from shared.ranges import OPEN, RangeSet
from shared.readers import Readers, readers
from tests.databases import Database
from tests.gateways import Gateway, House, metric, token
from tests.ingest import Ingest, running
from tests.rows import Rows, open_rows, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

STATES: tuple[State, ...] = get_args(State)


@pytest.fixture
async def rows(module_database: Database) -> AsyncIterator[Rows]:
    async with open_rows(module_database) as made:
        yield made


@pytest.fixture(params=["ingest", "gateway"])
async def pool(module_database: Database, request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    """Of each role that asks; and planned as often as in service."""
    async with open_pool(module_database.url(request.param), size=2, name="tests") as made:
        yield made


@pytest.fixture
async def ingest(module_database: Database) -> AsyncIterator[Ingest]:
    async with running(module_database) as made:
        yield made


async def marks(rows: Rows, conversation_id: str, **users: tuple[int, int]) -> None:
    """By user the delivered and the read seq."""
    await rows.owner.executemany(
        "INSERT INTO receipt (conversation_id, user_id, delivered_seq, read_seq) VALUES ($1, $2, $3, $4)",
        [(conversation_id, name, *seqs) for name, seqs in users.items()],
    )


def names(found: Readers) -> list[str]:
    return [one.user_id for one in found.users]


async def refusal(pool: Pool, *asked: Any, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(NotFoundError) as refused:
        await readers(pool, *asked, **more)
    return refused.value.message, refused.value.field


@pytest.mark.promise("protocol.6.receipts", "protocol.5.read_unread_apart")
async def test_who_has_a_seq(rows: Rows, pool: Pool) -> None:
    ann, ben, cat, dan = (user(name) for name in ("ann", "ben", "cat", "dan"))
    group = await rows.group(ann, ben, cat, dan)
    await rows.messages(group, ann, 3)
    await marks(rows, group, **{ann: (4, 4), ben: (3, 4), cat: (4, 2)})
    found = await readers(pool, group, ben, seq=3)
    assert (found.conversation_id, found.seq, found.members, found.delivered, found.read) == (group, 3, 3, 2, 1)
    assert [(one.user_id, one.delivered_seq, one.read_seq, one.read_version) for one in found.users] == [(ben, 3, 4, 0)]
    assert found.next is None
    assert names(await readers(pool, group, ann, seq=3, state="delivered")) == [ben, cat]
    unread = await readers(pool, group, ann, seq=3, state="unread")
    assert [(one.user_id, one.read_seq) for one in unread.users] == [(cat, 2), (dan, 0)], "dan has no row at all"
    assert names(await readers(pool, group, ann, seq=4, state="delivered")) == [cat]
    assert (await readers(pool, group, None, seq=1)).members == 3, "a service sees it, too"


@pytest.mark.promise("protocol.6.receipts", "I12", "protocol.4.stranger")
async def test_who_may_ask(rows: Rows, pool: Pool) -> None:
    ann, ben, cat, eve = (user(name) for name in ("ann", "ben", "cat", "eve"))
    group = await rows.group(ann, ben)
    before = (await rows.messages(group, ann, 2))[-1]
    gone = await rows.member(group, ann, "remove", ben)
    joined = await rows.member(group, ann, "add", cat)
    [last] = await rows.messages(group, cat, 1)
    await marks(rows, group, **{ann: (last, last), ben: (gone, gone), cat: (last, last)})
    no_event, no_conversation = ("no such event", "seq"), ("no such conversation", "conversation_id")
    assert await refusal(pool, group, eve, seq=1) == no_conversation
    assert await refusal(pool, "0197c3d1-0000-7000-8000-0000000000c1", eve, seq=1) == no_conversation
    assert await refusal(pool, "0197c3d1-0000-7000-8000-0000000000c1", None, seq=1) == no_conversation
    for asker in (ann, ben, cat, None):
        assert await refusal(pool, group, asker, seq=last + 1) == no_event
    assert await refusal(pool, group, cat, seq=before) == no_event, "from before its time"
    assert await refusal(pool, group, ben, seq=joined) == no_event, "from after its time"
    # A former member may ask of what it may see, and counts there; who came later does not, whatever its marks.
    for asker in (ann, ben, None):
        found = await readers(pool, group, asker, seq=before)
        assert (found.members, names(found)) == (1, [ben])
    found = await readers(pool, group, cat, seq=joined)
    assert (found.members, names(found)) == (1, [cat])
    assert (await readers(pool, group, ann, seq=last)).members == 1


@pytest.mark.promise("I12")
async def test_who_has_left_does_not_see_how_far_others_go(rows: Rows, pool: Pool) -> None:
    ann, ben, cat = (user(name) for name in ("ann", "ben", "cat"))
    group = await rows.group(ann, ben, cat)
    [seq] = await rows.messages(group, ann, 1)
    gone = await rows.member(group, ann, "remove", ben)
    last = (await rows.messages(group, ann, 3))[-1]
    await marks(rows, group, **{cat: (last, last - 1)})
    for asker, delivered, read in ((ben, gone, gone), (ann, last, last - 1), (None, last, last - 1)):
        [one] = (await readers(pool, group, asker, seq=seq)).users
        assert (one.user_id, one.delivered_seq, one.read_seq) == (cat, delivered, read)


@dataclass
class Model:
    """A group as the rule without SQL has it."""

    senders: list[str]
    visible: dict[str, RangeSet] = field(default_factory=dict)
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def answer(self, seq: int, state: State, after: str, limit: int) -> tuple[int, int, int, list[str], str | None]:
        may_see = sorted(one for one, ranges in self.visible.items() if seq in ranges and one != self.senders[seq - 1])
        held, read = ([one for one in may_see if self.marks.get(one, (0, 0))[which] >= seq] for which in range(2))
        of = {"read": read, "delivered": held, "unread": [one for one in may_see if one not in read]}[state]
        left = [one for one in of if one > after]
        return len(may_see), len(held), len(read), left[:limit], left[limit - 1] if len(left) > limit else None


@pytest.mark.promise("protocol.6.receipts")
@pytest.mark.parametrize("seed", range(4))
async def test_as_the_rule_without_sql_has_it(rows: Rows, pool: Pool, seed: int) -> None:
    """Random groups, holes in what their members see, and marks; each page of each state."""
    chance = random.Random(seed)
    # In the order of bytes, which is no language's.
    everybody = [user(name) for name in ("a", "A", "b", "B", "_", "0", "a.b", "a-b", "aB")]
    head = 6
    group = await rows.group(everybody[0])
    for _ in range(head - 1):
        await rows.write(group, everybody[0])
    model = Model([everybody[0]] * head)
    for name in everybody:
        low, high = sorted(chance.sample(range(1, head + 2), 2))
        ranges = RangeSet([(low, high - 1)])
        if chance.random() < 0.5:
            ranges |= RangeSet([(chance.randint(1, head), OPEN)])
        model.visible[name] = ranges
        if chance.random() < 0.8:
            model.marks[name] = (chance.randint(0, head), chance.randint(0, head))
    await rows.owner.executemany(
        "INSERT INTO member (conversation_id, user_id, role, visible)"
        " VALUES ($1, $2, 'member', $3::text::int8multirange)"
        " ON CONFLICT (conversation_id, user_id) DO UPDATE SET visible = excluded.visible",
        [(group, name, to_multirange(ranges)) for name, ranges in model.visible.items()],
    )
    await marks(rows, group, **model.marks)
    for seq in range(1, head + 1):
        for state in STATES:
            limit, after, more = chance.randint(1, 4), "", True
            while more:
                found = await readers(pool, group, None, seq=seq, state=state, after=after or None, limit=limit)
                told = (found.members, found.delivered, found.read, names(found), found.next)
                assert told == model.answer(seq, state, after, limit)
                after, more = found.next or "", found.next is not None


@pytest.mark.promise("protocol.6.receipts")
async def test_over_http(rows: Rows, ingest: Ingest) -> None:
    ann, ben, cat = (user(name) for name in ("ann", "ben", "cat"))
    group = await rows.group(ann, ben, cat)
    await rows.messages(group, ann, 1)
    await marks(rows, group, **{ben: (2, 2), cat: (2, 0)})
    path = f"/v1/conversations/{group}/receipts"
    answer = await ingest.call("GET", path, ann, params={"seq": 2, "state": "delivered", "limit": 1})
    assert answer.status == 200
    assert answer.json == {
        "conversation_id": group,
        "seq": 2,
        "members": 2,
        "delivered": 2,
        "read": 1,
        "users": [{"user_id": ben, "delivered_seq": 2, "read_seq": 2, "read_version": 0}],
        "next": ben,
    }
    answer = await ingest.call("GET", path, ann, params={"seq": 2, "state": "delivered", "limit": 1, "after": ben})
    assert ([one["user_id"] for one in answer.json["users"]], answer.json["next"]) == ([cat], None)
    assert (await ingest.call("GET", path, "shop", scope="service", params={"seq": 2})).json["read"] == 1
    for asker, seq, field_ in (("eve", 2, "conversation_id"), (ann, 3, "seq")):
        answer = await ingest.call("GET", path, asker, params={"seq": seq})
        assert (answer.status, answer.json["code"], answer.json["field"]) == (404, "not_found", field_)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_marks_so_far_are_of_those_who_may_see_them(rows: Rows, module_database: Database) -> None:
    ann, ben, eve = (user(name) for name in ("ann", "ben", "eve"))
    group = await rows.group(ann, ben)
    await rows.member(group, ann, "remove", ben)
    crowd = {f"{user('m')}": (1, number) for number in range(MOST + 5)}
    await marks(rows, group, **crowd, **{ann: (2, 1)})
    async with open_pool(module_database.url("gateway"), size=1, name="tests") as pool:
        so_far = SoFar(pool, asyncio.Semaphore(1), asyncio.ensure_future)
        told = await so_far.of(group, ann)
        assert told.count(b'"receipt"') == MOST
        assert f'"{ann}"'.encode() not in told
        assert [await so_far.of(group, one) for one in (ben, eve)] == [b"", b""]


@pytest.mark.promise("protocol.6.receipts")
async def test_on_the_socket_and_in_the_sdk(home: House, gateway: Gateway) -> None:
    ann, ben, cat, eve = (user(name) for name in ("ann", "ben", "cat", "eve"))
    group = await home.group(ann, ben, cat)
    await home.messages(group, ann, 1)
    await marks(home, group, **{ben: (2, 2), cat: (2, 0)})
    client = await gateway.client(ann)
    await client.say("receipts", rid="1", conversation_id=group.upper(), seq=2, state="delivered", limit=1)
    assert await client.one("receipts", rid="1") == {
        "t": "receipts",
        "rid": "1",
        "conversation_id": group,
        "seq": 2,
        "members": 2,
        "delivered": 2,
        "read": 1,
        "users": [{"user_id": ben, "delivered_seq": 2, "read_seq": 2, "read_version": 0}],
        "next": ben,
    }
    await client.say("receipts", rid="2", conversation_id=group, seq=3)
    assert (await client.one("error", rid="2"))["field"] == "seq"
    stranger = await gateway.client(eve)
    await stranger.say("receipts", rid="3", conversation_id=group, seq=2)
    error = await stranger.one("error", rid="3")
    assert (error["code"], error["field"]) == ("not_found", "conversation_id")
    async with Phone(gateway.url, token(ann), "sdk", deliver=False) as phone:
        await phone.ready()
        assert (await phone.receipts_of(group, 2)).users == (Receipt(group, ben, 2, 2, 0),)
        assert [one.user_id async for one in phone.all_receipts_of(group, 2, "delivered", page=1)] == [ben, cat]
        assert [one.user_id async for one in phone.all_receipts_of(group, 2, "unread", page=1)] == [cat]


MEMBERS = 10_000


@pytest.mark.timeout(180)
@pytest.mark.promise("protocol.3.watch")
async def test_ten_thousand_who_read_at_once_cost_by_the_member(
    home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody reads while three watch: what is written, published and pushed is counted, not timed."""
    monkeypatch.setattr(watching, "FOLD_S", 0.05)
    names_ = [f"{number:04}.{user('m')}" for number in range(MEMBERS)]
    watches = names_[:3]
    group = await home.group(*watches)
    await home.owner.execute(
        "INSERT INTO member (conversation_id, user_id, role, visible)"
        " SELECT $1, m, 'member', '{[1,)}' FROM unnest($2::text[]) AS m",
        group,
        names_[3:],
    )
    clients = [await gateway.client(one, acks=False) for one in watches]
    for client in clients:
        await client.say("watch", conversation_id=group, on=True)
        await client.pong()
    quiet = [await gateway.client(watches[0], f"quiet{number}", acks=False) for number in range(3)]

    ends = await receipt_ends(home)
    statements = count_statements(monkeypatch)
    told = metric("waybill_watch_receipts_total")
    async with open_pool(home.database.url("receipts"), size=1, name="tests") as receipts_pool:
        store = Store(receipts_pool, home.topics.acks)
        for at in range(0, MEMBERS, 2_000):
            read = [Mark(group, one, "phone", "read", 0, 1) for one in names_[at : at + 2_000]]
            await store.apply_again(Changes([], read))
        while await store.flush([partition_of(group)], 1_000):
            pass
    rows = await home.line.publish()
    for client, one in zip(clients, watches, strict=True):
        await until(
            lambda client=client: len({frame["user_id"] for frame in client.all("receipt")}) == MEMBERS,  # type: ignore[misc]
            timeout=60,
            what=f"the receipts of all, for {one}",
        )
    assert len([row for row in rows if row["topic"] == "receipts.v1"]) == MEMBERS
    assert sum((await receipt_ends(home)).values()) - sum(ends.values()) == MEMBERS
    for client in clients:
        await client.pong()
        assert len(client.all("receipt")) == MEMBERS, "each member once, and oneself as it came"
        assert {frame["read_seq"] for frame in client.all("receipt")} == {1}
    assert metric("waybill_watch_receipts_total") - told == 3 * (MEMBERS - 1)
    for client in quiet:
        await client.pong()
        assert [frame["user_id"] for frame in client.all("receipt")] == [watches[0]]
    assert len(statements) < MEMBERS / 20, statements


def count_statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process asks of Postgres from now on: ingest's, receipts' and the gateway's pools, and the test's."""
    asked: list[str] = []
    execute = asyncpg.Connection._execute

    async def counted(self: asyncpg.Connection, query: str, *arguments: Any, **more: Any) -> Any:
        asked.append(query)
        return await execute(self, query, *arguments, **more)

    monkeypatch.setattr(asyncpg.Connection, "_execute", counted)
    return asked


async def receipt_ends(home: House) -> dict[TopicPartition, int]:
    """The ends of the receipts topic."""
    consumer = reader(home.stores.kafka, client_id="tests")
    await consumer.start()
    try:
        found: dict[TopicPartition, int] = await consumer.end_offsets(
            [TopicPartition(home.topics.receipts, partition) for partition in range(64)]
        )
        return found
    finally:
        await consumer.stop()
