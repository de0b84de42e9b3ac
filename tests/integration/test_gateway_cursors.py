"""Where a device says that it is: cursors that name events, breaks and their log, and `since` of an earlier session."""

import uuid
from typing import Any

import asyncpg
import pytest

from services.gateway import hello
from services.gateway.listing import Changes, changed_since
from tests.gateways import Client, Gateway, House, metric, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

KINDS = ("behind", "ahead_of_head", "ahead_of_record", "gap", "reset")


def breaks() -> dict[str, float]:
    return {kind: metric("waybill_cursor_breaks_total", kind=kind) for kind in KINDS}


def risen(before: dict[str, float]) -> dict[str, float]:
    """By kind how many more there are, without those that did not rise."""
    return {kind: count - before[kind] for kind, count in breaks().items() if count > before[kind]}


async def transitions(home: House, count: int, *conversation_ids: str) -> dict[tuple[str, str], asyncpg.Record]:
    """Wait for so many rows of cursor breaks; by conversation and cause."""

    async def enough() -> list[asyncpg.Record]:
        rows = await home.owner.fetch(
            "SELECT *, conversation_id::text AS conversation, session_id::text AS session FROM transition"
            " WHERE kind = 'cursor' AND conversation_id = ANY ($1::uuid[])",
            conversation_ids,
        )
        return rows if len(rows) >= count else []

    rows = await until(enough, timeout=10, what=f"{count} transitions")
    found = {(row["conversation"], row["cause"]): row for row in rows}
    assert len(found) == len(rows) == count, rows
    return found


async def seen_by(gateway: Gateway, home: House, records: int = 1) -> None:
    """Publish, and wait until the gateway has read so many records more."""
    before = metric("waybill_records_total")
    await home.line.publish()
    await until(lambda: metric("waybill_records_total") >= before + records, timeout=10, what="records")
    assert not gateway.task.done()


def frame_of(client: Client, conversation_id: str) -> dict[str, Any]:
    """The only `conversation` frame of it so far."""
    (frame,) = client.all("conversation", conversation_id=conversation_id)
    return frame


@pytest.mark.promise("protocol.3.reset", "protocol.3.hello_cursors", "protocol.9.metric_labels", "I7")
async def test_a_cursor_that_names_another_event_is_answered_with_reset(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    agrees, other, none, zero = [await home.group(ann, title=name) for name in ("agrees", "other", "none", "zero")]
    groups = (agrees, other, none, zero)
    for group in groups:
        await home.messages(group, ann, 2)
        await home.mark(group, ann, held="{[1,4)}" if group is none else "{[1,3)}")
    before = breaks()
    client = await gateway.client(
        ann,
        cursors={
            agrees: [2, (await home.event_id(agrees, 2)).upper()],
            other.upper(): [2, str(uuid.uuid4())],
            none: [9, str(uuid.uuid4())],
            zero: [0, str(uuid.uuid4())],
        },
    )
    frames = {group: frame_of(client, group) for group in groups}
    assert [frames[group].get("reset") for group in groups] == [None, True, True, None]
    assert [frames[group]["cursor"] for group in groups] == [2, 2, 9, 0]
    assert [frames[group]["head"] for group in groups] == [3, 3, 3, 3]
    await client.has(agrees, 3)
    await client.has(zero, 1, 2, 3)
    assert risen(before) == {"reset": 2, "behind": 1}  # the server knew that 2 of `zero` were there
    session_id = client.got[0]["session_id"]
    rows = await transitions(home, 3, *groups)
    for group, seq in ((other, 2), (none, 9)):
        row = rows[group, "reset"]
        assert (row["service"], row["user_id"], row["device_id"], row["session"]) == (
            "gateway", ann, "phone", session_id,
        )  # fmt: skip
        assert (row["from_seq"], row["to_seq"]) == (seq, 3)

    # Nothing of it is pushed, whatever comes; an ack and a pull go on working.
    for group in groups:
        await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(agrees, 3, 4)
    await client.has(zero, 1, 2, 3, 4)
    await client.say("pull", rid="p", conversation_id=other, before=3)
    page = await client.one("page", rid="p")
    assert [event["seq"] for event in page["events"]] == [1, 2]
    await client.pong()
    assert (client.seqs(other), client.seqs(none)) == ([], [])
    again = await gateway.client(ann, cursors={other: [1, page["events"][0]["event_id"]], none: 0})
    await again.has(other, 2, 3, 4)
    await again.has(none, 1, 2, 3, 4)


@pytest.mark.promise("protocol.3.cursor_ahead", "protocol.9.metric_labels", "protocol.6.metrics")
async def test_each_break_is_counted_and_logged_and_what_is_none_is_not(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    names = ("behind", "ahead_of_head", "ahead_of_record", "reset", "gap", "as it was", "unseen")
    groups = {name: await home.group(ann, title=name) for name in names}
    for group in groups.values():
        await home.messages(group, ann, 4)
        await home.mark(group, ann, held="{[1,4)}")
    await home.line.publish()
    before = breaks()
    wanted = {"behind": 1, "ahead_of_head": 12, "ahead_of_record": 5, "gap": 3, "as it was": 3}
    cursors: dict[str, Any] = {groups[name]: seq for name, seq in wanted.items()}
    cursors[groups["reset"]] = [3, str(uuid.uuid4())]
    client = await gateway.client(ann, cursors=cursors)
    assert frame_of(client, groups["ahead_of_head"])["cursor"] == 5
    assert frame_of(client, groups["unseen"])["cursor"] == 0
    await client.has(groups["gap"], 4, 5)
    await home.messages(groups["gap"], ann, 3)
    await home.line.publish(without={6, 7})
    await client.has(groups["gap"], 4, 5, 6, 7, 8)
    assert risen(before) == dict.fromkeys(KINDS, 1)

    rows = await transitions(home, 5, *groups.values())
    found = {cause: (row["from_seq"], row["to_seq"]) for (_, cause), row in rows.items()}
    assert found == {
        "behind": (1, 3),
        "ahead_of_head": (12, 5),
        "ahead_of_record": (5, 3),
        "reset": (3, 5),
        "gap": (6, 7),
    }
    assert {groups[cause] for _, cause in rows} == {conversation_id for conversation_id, _ in rows}
    for (_, cause), row in rows.items():
        whose = (None, None, None) if cause == "gap" else (ann, "phone", client.got[0]["session_id"])
        assert (row["user_id"], row["device_id"], row["session"]) == whose


@pytest.mark.promise("protocol.3.hello_since", "protocol.3.conversation_frame", "I7")
async def test_since_lists_only_what_is_named_or_changed(home: House, gateway: Gateway) -> None:
    ann, bob, eve = user("ann"), user("bob"), user("eve")
    names = ("quiet", "named", "event", "others mark", "own mark", "removed", "added", "role")
    groups = {name: await home.group(bob, *([] if name == "added" else [ann]), title=name) for name in names}
    chats = {"peers mark": await home.direct(ann, bob), "quiet chat": await home.direct(ann, eve)}
    for one in (*groups.values(), *chats.values()):
        await home.mark(one, ann, held="{[1,2)}")
    await home.settled()
    first = await gateway.client(ann)
    since = first.all("listed")[0]["since"]
    assert first.all("listed")[0]["count"] == len(names) - 1 + len(chats)
    await first.close()
    await home.messages(groups["event"], bob, 2)
    await home.mark(groups["others mark"], bob, read=1)
    await home.mark(groups["own mark"], ann, read=1)
    await home.mark(chats["peers mark"], bob, read=1)
    await home.member(groups["removed"], bob, "remove", ann)
    await home.member(groups["added"], bob, "add", ann)
    await home.write(groups["role"], bob, {"action": "role", "user_id": ann, "role": "admin"}, "member")
    await home.line.publish()
    await home.settled()

    second = await gateway.client(ann, since=since, cursors={groups["named"]: 0})
    listed = [frame["conversation_id"] for frame in second.all("conversation")]
    changed = [groups[name] for name in ("named", "event", "own mark", "removed", "added", "role")]
    assert sorted(listed) == sorted([*changed, chats["peers mark"]])
    (told,) = second.all("listed")
    assert (told["count"], told["since"] != since) == (len(listed), True)
    # What changed and is not named starts at the server's record, what is named at its cursor.
    assert frame_of(second, groups["event"])["cursor"] == 1
    await second.has(groups["event"], 2, 3)
    await second.has(groups["named"], 1)
    await second.has(groups["removed"], 2)
    await second.has(groups["added"], 2)
    await second.one("receipt", conversation_id=chats["peers mark"], user_id=bob, read_seq=1)

    # The others stay subscribed: the frame comes before the first event, which is the first one that is new.
    for one in (groups["quiet"], chats["quiet chat"], groups["others mark"]):
        assert second.seqs(one) == []
        await home.messages(one, ann if one == chats["quiet chat"] else bob, 2)
    await home.line.publish()
    for one in (groups["quiet"], chats["quiet chat"], groups["others mark"]):
        await second.has(one, 2, 3)
        frame = frame_of(second, one)
        assert frame["cursor"] == 1
        assert second.got.index(frame) < second.got.index(second.all("event", conversation_id=one)[0])

    third = await gateway.client(ann, since=told["since"], cursors={})
    assert sorted(frame["conversation_id"] for frame in third.all("conversation")) == sorted(
        [groups["quiet"], chats["quiet chat"], groups["others mark"]]
    )


@pytest.mark.promise("protocol.3.hello_since")
async def test_an_unknown_since_lists_all(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    groups = [await home.group(ann) for _ in range(3)]
    for group in groups:
        await home.messages(group, ann, 2)
        await home.mark(group, ann, held="{[1,3)}")
    first = await gateway.client(ann)
    incarnation, _, transaction = first.all("listed")[0]["since"].rpartition(".")
    for device, since in (
        ("a", "nonsense"),
        ("b", ""),
        ("c", f"{uuid.uuid4()}-00000001.{transaction}"),
        ("d", f"{incarnation}.x"),
        ("e", f"{incarnation}.{2**64}"),
    ):
        client = await gateway.client(ann, device, since=since)
        assert client.all("listed")[0]["count"] == 3, since
        assert {frame["cursor"] for frame in client.all("conversation")} == {0}  # a new device: nothing is recorded
    phone = await gateway.client(ann, since="nonsense", cursors={groups[0]: 1})
    assert [frame_of(phone, group)["cursor"] for group in groups] == [1, 2, 2]


@pytest.mark.promise("protocol.3.hello_cursors")
async def test_an_empty_store_starts_below_the_first_visible_seq(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    late, whole = await home.group(bob), await home.group(bob, history="all")
    for group in (late, whole):
        await home.messages(group, bob, 2)
        await home.member(group, bob, "add", ann)
        await home.messages(group, bob, 1)
        await home.mark(group, ann, held="{[4,6)}")
    client = await gateway.client(ann, cursors={})
    assert [frame_of(client, group)["cursor"] for group in (late, whole)] == [3, 0]
    await client.has(late, 4, 5)
    await client.has(whole, 1, 2, 3, 4, 5)


@pytest.mark.promise("protocol.3.hello_since", "I6")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_record_that_comes_while_changes_are_read_is_not_lost(
    home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    ann, bob = user("ann"), user("bob")
    quiet, again, named = [await home.group(ann, bob, title=name) for name in ("quiet", "again", "named")]
    for group in (quiet, again, named):
        await home.mark(group, ann, held="{[1,2)}")
    first = await gateway.client(ann)
    since = first.all("listed")[0]["since"]
    await first.close()
    made: list[str] = []

    async def changes(*args: Any) -> Changes:
        found = None if when == "before" else await changed_since(*args)
        if not made:
            made.append(await home.group(bob, ann))
            for group in (quiet, named, again):
                await home.messages(group, bob, 2)
            await seen_by(gateway, home, 6)
        return found or await changed_since(*args)

    monkeypatch.setattr(hello, "changed_since", changes)
    client = await gateway.client(ann, since=since, cursors={named: 1})
    for group in (quiet, named, again):
        await client.has(group, 2, 3)
    await client.has(made[0], 1)
    await home.messages(again, bob, 1)
    await home.line.publish()
    await client.has(again, 2, 3, 4)
    for group in (quiet, named, again, made[0]):
        of = [frame["t"] for frame in client.got if frame.get("conversation_id") == group]
        assert of[0] == "conversation"


@pytest.mark.promise("protocol.3.hello_since", "protocol.3.read", "protocol.3.ack")
async def test_what_is_not_listed_may_be_acked_and_marked_and_its_receipts_come(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group, chat, other = await home.group(ann, bob), await home.direct(ann, bob), await home.group(ann, bob)
    for one in (group, chat, other):
        await home.messages(one, bob, 2)
        await home.mark(one, ann, held="{[1,2)}")
    await home.owner.execute("UPDATE receipt SET read_version = 4 WHERE conversation_id = $1", group)
    await home.line.publish()
    await home.settled()
    first = await gateway.client(ann)
    since = first.all("listed")[0]["since"]
    await first.close()
    client = await gateway.client(ann, since=since, cursors={})
    assert client.all("conversation") == []
    ignored = metric("waybill_ignored_acks_total")
    await client.say("read", conversation_id=group, seq=3)
    await client.ack(other, 2, 3)
    await client.one("conversation", conversation_id=other)
    await client.pong()
    assert metric("waybill_ignored_acks_total") == ignored
    assert client.all("error") == []

    async def told() -> bool:
        acks = await home.acks(group, other)
        marks = [(one["seq"], one["version"]) for one in acks if one["kind"] == "read"]
        ranges = [one["ranges"] for one in acks if one["kind"] == "delivered" and one["conversation_id"] == other]
        return marks == [(3, 4)] and [[2, 3]] in ranges

    await until(told, timeout=10, what="the mark with the version that was told before, and the ack")
    await home.mark(chat, bob, read=3)
    await home.line.publish()
    receipt = await client.one("receipt", conversation_id=chat, user_id=bob, read_seq=3)
    assert client.got.index(frame_of(client, chat)) < client.got.index(receipt)
