"""What the gateway reads of conversations for many sessions at once, and how it counts sessions."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec
import pytest

from services.gateway import catchup
from services.gateway.catchup import CatchUp
from services.gateway.fanout import Fanout
from services.gateway.listing import (
    LIST_AT_ONCE,
    Listed,
    Wanted,
    changed_since,
    conversations_of_users,
    list_conversations,
    store_incarnation,
)
from services.gateway.opening import Opened, Opener
from services.gateway.revocations import is_revoked, newest_revocations
from services.gateway.since import Since, known_since
from shared.auth import Claims
from shared.clock import wire_time
from shared.errors import UnavailableError
from shared.postgres import Pool, open_pool
from shared.statements import statements
from tests.databases import Database
from tests.rows import Rows, open_rows, user


@pytest.fixture
async def home(module_database: Database) -> AsyncIterator[Rows]:
    async with open_rows(module_database) as made:
        yield made


@pytest.fixture
async def pool(module_database: Database) -> AsyncIterator[Pool]:
    async with open_pool(module_database.url("gateway"), size=4, name="tests") as made:
        yield made


async def listed(pool: Pool, *wanted: Wanted) -> list[Listed]:
    rows = (await list_conversations(pool, wanted)).rows
    assert None not in rows
    return [row for row in rows if row is not None]


async def test_what_is_listed_is_what_each_device_sees(home: Rows, pool: Pool) -> None:
    ann, ben, cat = user("ann"), user("ben"), user("cat")
    group = await home.group(ann, ben, title='a "title" – ü')
    chat = await home.direct(ann, ben)
    await home.messages(group, ben, 5)
    await home.member(group, ann, "remove", ben)
    await home.messages(group, ann, 2)
    await home.messages(chat, ben, 2)
    await home.mark(group, ann, held="{[1,5)}")
    await home.mark(group, ann, read=3)
    await home.mark(chat, ben, held="{[1,3)}", read=2)

    ann_group, ben_group, ann_chat, other = await listed(
        pool,
        Wanted(ann, "phone", group),
        Wanted(ben, "phone", group),
        Wanted(ann, "pad", chat),
        Wanted(ann, "pad", group),
    )
    assert (ann_group.conversation_id, ann_group.kind, ann_group.title) == (group, "group", 'a "title" – ü')
    assert (ann_group.role, ann_group.member, list(ann_group.visible)) == ("admin", True, [(1, 2**63 - 1)])
    assert (ann_group.as_of, ann_group.head, ann_group.record, other.record) == (9, 9, 4, 0)
    assert (ann_group.mine.read_seq, ann_group.unread, ann_group.keeps_history) == (3, 3, False)
    assert (ben_group.as_of, ben_group.head, ben_group.member, list(ben_group.visible)) == (9, 7, False, [(1, 7)])
    assert (ben_group.role, ben_group.unread, ben_group.mine.user_id) == ("member", 0, ben)
    assert (ann_chat.kind, ann_chat.title, ann_chat.unread, ann_group.peer) == ("direct", None, 2, None)
    assert ann_chat.peer is not None
    assert (ann_chat.peer.user_id, ann_chat.peer.delivered_seq, ann_chat.peer.read_seq) == (ben, 2, 2)
    for row, seq in ((ann_group, 9), (ben_group, 7), (ann_chat, 3)):
        made = await home.owner.fetchval(
            "SELECT created_at FROM event WHERE conversation_id = $1 AND seq = $2", row.conversation_id, seq
        )
        assert row.updated_at == wire_time(made.astimezone(UTC))

    strangers = await list_conversations(pool, [Wanted(cat, "phone", group), Wanted(ann, "phone", group)])
    assert strangers.rows[0] is None
    assert strangers.rows[1] == ann_group
    assert (await list_conversations(pool, [])).rows == []

    frame = msgspec.json.decode(ann_group.frame(4))
    assert frame == {
        "t": "conversation", "conversation_id": group, "kind": "group", "title": 'a "title" – ü', "role": "admin",
        "head": 9, "visible": [[1, None]], "cursor": 4, "delivered_seq": 4, "read_seq": 3, "read_version": 0,
        "unread": 3, "updated_at": ann_group.updated_at, "muted": False, "archived": False,
    }  # fmt: skip
    assert msgspec.json.decode(ben_group.frame(4, reset=True))["reset"] is True
    assert msgspec.json.decode(ben_group.frame(4))["visible"] == [[1, 7]]
    assert msgspec.json.decode(ann_chat.frame(1))["title"] is None
    assert ann_group.peer_frame() is None
    assert msgspec.json.decode(ann_chat.peer_frame() or b"") == {
        "t": "receipt", "conversation_id": chat, "user_id": ben, "delivered_seq": 2, "read_seq": 2, "read_version": 0,
    }  # fmt: skip


async def test_who_has_left_sees_the_title_of_then(home: Rows, pool: Pool) -> None:
    ann, ben = user("ann"), user("ben")
    group = await home.group(ann, ben, title="one")
    await home.write(group, ann, {"title": "two"}, "conversation")
    await home.member(group, ben, "leave")
    await home.write(group, ann, {"title": "three"}, "conversation")
    assert [row.title for row in await listed(pool, Wanted(ben, "p", group), Wanted(ann, "p", group))] == [
        "two",
        "three",
    ]
    await home.member(group, ann, "add", ben)
    [row] = await listed(pool, Wanted(ben, "p", group))
    assert (row.title, list(row.visible), row.first_cursor) == ("three", [(1, 3), (5, 2**63 - 1)], 0)
    assert msgspec.json.decode(row.frame(0))["visible"] == [[1, 3], [5, None]]


@pytest.mark.parametrize(
    ("seq", "held", "mismatch"),
    [(2, "same", False), (2, "other", True), (2, None, False), (99, "same", True), (0, "other", False)],
)
async def test_a_cursor_that_names_an_event(home: Rows, pool: Pool, seq: int, held: str | None, mismatch: bool) -> None:
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 2)
    same = await home.owner.fetchval("SELECT event_id FROM event WHERE conversation_id = $1 AND seq = 2", group)
    event_id = {"same": str(same), "other": str(uuid.uuid4()), None: None}[held]
    [row] = await listed(pool, Wanted(ann, "phone", group, seq, event_id))
    assert row.mismatch is mismatch


async def test_a_long_list_comes_in_its_order(home: Rows, pool: Pool) -> None:
    ann, ben = user("ann"), "null"  # a name that an array's text would take for nothing at all
    groups = [await home.group(ann, ben) for _ in range(3)]
    wanted = [Wanted((ann, ben)[n % 2], "phone", groups[n % 3]) for n in range(LIST_AT_ONCE + 7)]
    got = await list_conversations(pool, wanted)
    rows = [row for row in got.rows if row is not None]
    assert [(row.mine.user_id, row.conversation_id) for row in rows] == [(w.user_id, w.conversation_id) for w in wanted]
    assert got.since is not None
    assert got.since.incarnation == await store_incarnation(pool)


async def test_conversations_of_users(home: Rows, pool: Pool) -> None:
    ann, ben, cat = user("ann"), user("ben"), user("cat")
    one, two = await home.group(ann, ben), await home.group(ann)
    await home.member(one, ben, "leave")
    found = await conversations_of_users(pool, [ann, ben, cat])
    assert {name: set(ids) for name, ids in found.items()} == {ann: {one, two}, ben: {one}, cat: set()}


CHANGES: dict[str, tuple[Callable[[Rows, str, str, str], Awaitable[Any]], str]] = {
    "an event": (lambda home, chat, _, ann: home.messages(chat, ann, 1), "direct and group"),
    "a title": (lambda home, group, _, ann: home.write(group, ann, {"title": "new"}, "conversation"), "group"),
    "an edit": (lambda home, chat, _, ann: home.write(chat, ann, {"x": 2}, "edit", 2), "direct and group"),
    "a recall": (lambda home, chat, _, ann: home.write(chat, ann, type_="recall", target=2), "direct and group"),
    "a delete": (lambda home, chat, _, ann: home.write(chat, ann, type_="delete", target=2), "direct and group"),
    "the own ack": (lambda home, chat, ben, _: home.mark(chat, ben, held="{[1,3)}"), "direct and group"),
    "the own read mark": (lambda home, chat, ben, _: home.mark(chat, ben, read=2), "direct and group"),
    "the peer's ack": (lambda home, chat, _, ann: home.mark(chat, ann, held="{[1,3)}"), "direct"),
    "the peer's read mark": (lambda home, chat, _, ann: home.mark(chat, ann, read=2), "direct"),
    "a new role": (
        lambda home, group, ben, ann: home.write(
            group, ann, {"action": "role", "user_id": ben, "role": "admin"}, "member"
        ),
        "group",
    ),
    "a removal": (lambda home, group, ben, ann: home.member(group, ann, "remove", ben), "group"),
    "leaving": (lambda home, group, ben, _: home.member(group, ben, "leave"), "group"),
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [(name, kind) for name, (_, kinds) in CHANGES.items() for kind in kinds.split(" and ")],
)
async def test_every_change_is_seen_from_a_snapshot_on(home: Rows, pool: Pool, change: str, kind: str) -> None:
    ann, ben = user("ann"), user("ben")
    quiet = await home.group(ann, ben)
    changing = await (home.direct if kind == "direct" else home.group)(ann, ben)
    await home.messages(changing, ann, 2)
    since = (await changed_since(pool, [(ben, None)])).since
    [before] = (await changed_since(pool, [(ben, since.xmin)])).users
    assert not any(before.changed)
    assert set(before.ids) == {quiet, changing}

    await CHANGES[change][0](home, changing, ben, ann)
    after = await changed_since(pool, [(ben, since.xmin), (ben, None), (ben, since.xmin), (user("nobody"), 1)])
    flags = dict(zip(after.users[0].ids, after.users[0].changed, strict=True))
    assert flags == {quiet: False, changing: True}
    assert after.users[1].changed == [True, True]
    assert after.users[2] == after.users[0]
    assert after.users[3].ids == after.users[3].heads == after.users[3].changed == []
    heads = dict(zip(after.users[0].ids, after.users[0].heads, strict=True))
    assert heads[changing] == await home.owner.fetchval(
        "SELECT last_seq FROM conversation WHERE conversation_id = $1", changing
    )
    [settled] = (await changed_since(pool, [(ben, after.since.xmin)])).users
    assert not any(settled.changed)


async def test_being_added_is_a_change_and_others_marks_in_a_group_are_none(home: Rows, pool: Pool) -> None:
    ann, ben = user("ann"), user("ben")
    group = await home.group(ann)
    gone = await home.group(ann, ben)
    await home.member(gone, ben, "leave")
    since = (await changed_since(pool, [(ben, None)])).since
    await home.mark(gone, ann, read=1)
    await home.messages(gone, ann, 1)  # after ben's time
    [known] = (await changed_since(pool, [(ben, since.xmin)])).users
    assert (known.ids, known.changed) == ([gone], [False])
    await home.member(group, ann, "add", ben)
    [known] = (await changed_since(pool, [(ben, since.xmin)])).users
    assert dict(zip(known.ids, known.changed, strict=True)) == {gone: False, group: True}
    two = user("cat")
    other = await home.group(ann, two)
    since = (await changed_since(pool, [(two, None)])).since
    await home.mark(other, ann, read=1)
    [known] = (await changed_since(pool, [(two, since.xmin)])).users
    assert known.changed == [False]


async def test_what_commits_late_is_not_passed_over(home: Rows, pool: Pool) -> None:
    """A change that began before the snapshot and is committed after it; and one that began after, and came first."""
    ann = user("ann")
    early, late = await home.group(ann), await home.group(ann)
    connection = await asyncpg.connect(home.database.owner_url)
    try:
        async with connection.transaction():
            await connection.execute(
                "UPDATE conversation SET changed_xid = pg_current_xact_id() WHERE conversation_id = $1", late
            )
            await home.messages(early, ann, 1)
            since = (await changed_since(pool, [(ann, None)])).since
        [known] = (await changed_since(pool, [(ann, since.xmin)])).users
    finally:
        await connection.close()
    assert dict(zip(known.ids, known.changed, strict=True))[late]


async def test_since_is_of_this_store_only(home: Rows, pool: Pool) -> None:
    ann = user("ann")
    group = await home.group(ann)
    since = (await changed_since(pool, [(ann, None)])).since
    assert known_since(str(since), await store_incarnation(pool)) == since.xmin
    [future] = (await changed_since(pool, [(ann, since.xmin + 1_000_000)])).users
    assert (future.ids, future.changed) == ([group], [True]), "told by a store of which this one is an older copy"
    await home.owner.execute("UPDATE store SET incarnation = gen_random_uuid()")
    assert known_since(str(since), await store_incarnation(pool)) is None


CLAIMS = Claims("x", "user", None, 4e9)


@pytest.fixture
async def opener(pool: Pool) -> AsyncIterator[Opener]:
    made = Opener(pool, gateway="g1")
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(UnavailableError):
        await made.open("ann", "phone", str(uuid.uuid4()), CLAIMS)


def hello(opener: Opener, user_id: str, device_id: str = "phone", **claims: Any) -> asyncio.Task[Opened]:
    token = replace(CLAIMS, subject=user_id, **{"issued_at": time.time(), **claims})
    return asyncio.create_task(opener.open(user_id, device_id, str(uuid.uuid4()), token))


async def test_hellos_of_a_device_get_rising_numbers(home: Rows, pool: Pool, opener: Opener) -> None:
    ann, ben = user("ann"), user("ben")
    told = await asyncio.gather(
        *(hello(opener, ann) for _ in range(3)), hello(opener, ben), hello(opener, ann, "pad"), hello(opener, ann)
    )
    assert [one.number for one in told] == [1, 2, 3, 1, 1, 4]
    session_id = str(uuid.uuid4())
    assert (await opener.open(ann, "phone", session_id, replace(CLAIMS, subject=ann))).number == 5
    row = await home.owner.fetchrow("SELECT * FROM device_session WHERE user_id = $1 AND device_id = 'phone'", ann)
    assert row is not None
    assert (row["number"], str(row["session_id"]), row["gateway"]) == (5, session_id, "g1")


async def test_gateways_that_open_the_same_devices_never_hold_each_other_up(pool: Pool, opener: Opener) -> None:
    users = [user("ann") for _ in range(40)]
    other = Opener(pool, gateway="g2", most=16, at_once=3)
    task = asyncio.create_task(other.run())
    made = await asyncio.gather(
        *(hello((opener, other)[n % 2], name) for n in range(20) for name in users[:: 1 if n % 3 else -1])
    )
    task.cancel()
    await asyncio.wait([task])
    assert sorted(one.number or 0 for one in made) == sorted(list(range(1, 21)) * 40)


async def test_one_that_gives_up_harms_nobody(opener: Opener) -> None:
    ann, ben = user("ann"), user("ben")
    leaving, staying = hello(opener, ann), hello(opener, ben)
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).number == 1
    assert leaving.cancelled()


async def test_without_postgres_each_is_told_so() -> None:
    async with open_pool("postgres://nobody@127.0.0.1:1/none", size=2, name="tests", timeout_s=2) as away:
        opener = Opener(away, gateway="g", most_waiting=3)
        task = asyncio.create_task(opener.run())
        waiting = [hello(opener, user("ann")) for _ in range(4)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
        assert len({id(outcome) for outcome in outcomes}) == 4
        task.cancel()
        await asyncio.wait([task])


async def revoke(home: Rows, user_id: str, **columns: object) -> None:
    names = ", ".join(("user_id", *columns))
    places = ", ".join(f"${n}" for n in range(1, len(columns) + 2))
    connection = await asyncpg.connect(home.database.url("console"))
    try:
        await connection.execute(f"INSERT INTO revocation ({names}) VALUES ({places})", user_id, *columns.values())
    finally:
        await connection.close()


NOW = time.time()


@pytest.mark.parametrize(
    ("row", "claims", "device", "void"),
    [
        ({}, {"issued_at": NOW - 60}, "phone", True),
        ({}, {"issued_at": NOW + 3600}, "phone", False),
        ({}, {"issued_at": None}, "phone", True),
        ({"device_id": "phone"}, {"issued_at": NOW - 60}, "phone", True),
        ({"device_id": "phone"}, {"issued_at": NOW - 60}, "pad", False),
        ({"device_id": "phone"}, {"issued_at": None}, "phone", True),
        ({"device_id": "phone"}, {"issued_at": NOW + 3600}, "phone", False),
        ({"jti": "t1"}, {"issued_at": NOW + 3600, "token_id": "t1"}, "phone", True),
        ({"jti": "t1"}, {"issued_at": NOW - 60, "token_id": "t2"}, "phone", False),
        ({"jti": "t1"}, {"issued_at": None, "token_id": None}, "phone", False),
        ({"jti": "t1", "device_id": "pad"}, {"issued_at": NOW, "token_id": "t1"}, "phone", True),
        ({"before": datetime.fromtimestamp(NOW - 60, UTC)}, {"issued_at": NOW - 59}, "phone", False),
        ({"before": datetime.fromtimestamp(NOW - 60, UTC)}, {"issued_at": NOW - 61}, "phone", True),
    ],
)
async def test_a_void_token_opens_nothing(
    home: Rows, pool: Pool, opener: Opener, *, row: dict[str, Any], claims: dict[str, Any], device: str, void: bool
) -> None:
    """In SQL and without it the rule is the same; and the one whose token is void replaces nobody."""
    ann, ben = user("ann"), user("ben")
    await revoke(home, ann, **row)
    opened, beside, unconcerned = await asyncio.gather(
        hello(opener, ann, device, **claims),
        hello(opener, ann, device, issued_at=NOW + 7200),
        hello(opener, ben, device, **claims),
    )
    assert (opened.number is None) is void
    assert beside.number == (1 if void else 2)
    assert (unconcerned.number, unconcerned.revocations) == (1, ())
    assert is_revoked(replace(CLAIMS, subject=ann, **claims), device, opened.revocations) is void
    assert not is_revoked(replace(CLAIMS, subject=ben, **claims), device, opened.revocations)
    newest = await newest_revocations(pool, 60)
    assert set(opened.revocations) <= set(newest)
    assert await newest_revocations(pool, 0) == []


async def test_an_upper_case_since_and_nonsense() -> None:
    assert Since.parse("A-1.7") == Since("a-1", 7)
    for text in (None, "", ".", "a.b", "a.-1", "a.1.2", "g.1", "a." + "9" * 20, "a." + "1" * 30, "a" * 65 + ".1"):
        assert Since.parse(text) is None


@pytest.mark.promise("protocol.9.present_state", "protocol.3.hidden_edit")
async def test_events_of_many_conversations_are_read_at_once_as_their_user_sees_them(home: Rows, pool: Pool) -> None:
    ann, ben = user("ann"), user("ben")
    one, two, strange = await home.group(ann, ben), await home.group(ann), await home.group(ann)
    await home.messages(one, ann, 3)
    await home.write(one, ann, target=2, type_="recall")
    await home.member(two, ann, "add", ben)
    await home.messages(two, ann, 2)
    wanted = [(two, [1, 2, 4]), (strange, [1]), (one, [2, 4, 99])]
    found = await CatchUp(pool, Fanout(), at_once=1, page=10).at(ben, wanted)
    assert {name: [seq for seq, _ in events] for name, events in found.items()} == {
        two: [2, 4],
        strange: [],
        one: [2, 4],
    }
    frames = [msgspec.json.decode(frame[frame.index(b"{") :]) for _, frame in found[one]]
    assert [(frame["seq"], frame.get("body")) for frame in frames] == [(2, None), (4, {"n": 2})]


async def test_they_are_found_by_their_keys(home: Rows, pool: Pool) -> None:
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 2_000)
    await home.owner.execute("ANALYZE event, member")
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE again AS {statements(catchup.__file__)['events_at']}")
        call = f"EXECUTE again('{ann}', '{{{','.join([group] * 3)}}}', '{{2,1000,2000}}')"
        lines = [row[0] for row in await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {call}")]
        await connection.execute("DEALLOCATE again")
    plan = "\n".join(lines)
    assert "Index Scan using event_pkey on event e (actual rows=1.00 loops=3)" in plan, plan
    assert "Index Cond: ((conversation_id = w.conversation_id) AND (seq = w.seq))" in plan, plan
    assert "Seq Scan on event" not in plan, plan
