"""From `hello` to `listed`: what a device is told it has, and where pushing starts."""

import asyncio
from typing import Any

import pytest

from services.gateway import hello, listing
from services.gateway.listing import Listing, list_conversations
from tests.gateways import Gateway, House, metric, token, user

pytest_plugins = ["tests.integration.gateway_house"]


def breaks(kind: str) -> float:
    return metric("waybill_cursor_breaks_total", kind=kind)


@pytest.mark.promise("protocol.3.hello", "protocol.3.conversation_frame", "protocol.9.unread")
async def test_a_device_without_a_store_gets_everything(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob, title="Lunch")
    await home.messages(group, ann, 3)
    await home.write(group, bob)
    client = await gateway.client(bob, cursors={})
    welcome = client.got[0]
    assert (welcome["t"], welcome["user_id"], welcome["device_id"]) == ("welcome", bob, "phone")
    assert welcome["limits"] == {
        "frame_bytes": 98304,
        "window": 256,
        "resend_s": 5.0,
        "heartbeat_s": 25.0,
        "sends_per_s": 50,
    }
    assert client.got[1] == {
        "t": "conversation",
        "conversation_id": group,
        "kind": "group",
        "title": "Lunch",
        "role": "member",
        "head": 5,
        "visible": [[1, None]],
        "cursor": 0,
        "delivered_seq": 0,
        "read_seq": 0,
        "read_version": 0,
        "unread": 3,
        "updated_at": client.got[1]["updated_at"],
        "muted": False,
        "archived": False,
    }
    assert client.all("listed")[0]["count"] == 1
    await client.has(group, 1, 2, 3, 4, 5)
    first = client.all("event")[0]
    assert (first["type"], first["body"]["action"]) == ("conversation", "create")


@pytest.mark.promise("protocol.3.hello_sync")
async def test_full_starts_at_the_record_and_live_at_the_head(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 4)
    await home.mark(group, ann, held="{[1,3),[4,5)}")
    full = await gateway.client(ann)
    assert full.all("conversation")[0]["cursor"] == 2
    await full.has(group, 3, 4, 5)
    live = await gateway.client(ann, sync="live")
    assert live.all("conversation")[0]["cursor"] == 5
    assert live.seqs(group) == []
    other = await gateway.client(ann, device="tablet")
    assert other.all("conversation")[0]["cursor"] == 0


@pytest.mark.promise("protocol.3.hello_cursors", "protocol.3.cursor_ahead", "protocol.9.metric_labels", "I7")
async def test_a_device_that_went_back_gets_it_again_and_is_counted(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 4)
    await home.mark(group, ann, held="{[1,5)}")
    before = [breaks("behind"), breaks("ahead_of_record"), breaks("ahead_of_head")]
    back = await gateway.client(ann, cursors={group: 2})
    await back.has(group, 3, 4, 5)
    await back.close()
    ahead = await gateway.client(ann, cursors={group.upper(): [5, None]})
    assert ahead.all("conversation")[0]["cursor"] == 5
    await ahead.close()
    above = await gateway.client(ann, cursors={group: 9, "00000000-0000-0000-0000-000000000000": 3})
    frame = above.all("conversation")[0]
    assert (frame["cursor"], frame["head"]) == (5, 5)
    await above.pong()
    assert above.seqs(group) == []
    await above.close()
    after = [breaks("behind"), breaks("ahead_of_record"), breaks("ahead_of_head")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1]


async def test_a_cursor_below_the_first_visible_seq_is_no_break(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann)
    await home.messages(group, ann, 3)
    await home.member(group, ann, "add", bob)
    before = breaks("behind")
    client = await gateway.client(bob, cursors={group: 0})
    assert client.all("conversation")[0]["cursor"] == 0
    await client.has(group, 5)
    assert breaks("behind") == before


@pytest.mark.promise("protocol.3.listing_order")
async def test_unread_come_first_and_the_newest_of_them(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    groups = [await home.group(ann, bob, title=str(n)) for n in range(4)]
    for n in (1, 0):
        await home.write(groups[n], bob)
    client = await gateway.client(ann)
    assert [frame["title"] for frame in client.all("conversation")] == ["0", "1", "3", "2"]
    assert client.all("listed")[0]["count"] == 4


async def test_the_order_holds_over_several_reads(
    home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LIST_AT_ONCE", 2)
    ann, bob = user("ann"), user("bob")
    groups = [await home.group(ann, bob, title=str(n)) for n in range(5)]
    await home.write(groups[2], bob)
    client = await gateway.client(ann)
    assert [frame["title"] for frame in client.all("conversation")] == ["2", "4", "3", "1", "0"]


@pytest.mark.promise("protocol.3.peer_receipt")
async def test_a_direct_chat_is_followed_by_the_peers_receipt(home: House, gateway: Gateway) -> None:
    ann, bob, cyd = user("ann"), user("bob"), user("cyd")
    with_receipt, without = await home.direct(ann, bob), await home.direct(ann, cyd)
    await home.owner.execute(
        "INSERT INTO receipt (conversation_id, user_id, delivered_seq, read_seq, read_version)"
        " VALUES ($1, $2, 1, 1, 2)",
        with_receipt,
        bob,
    )
    client = await gateway.client(ann, acks=False)
    at = client.got.index(client.all("conversation", conversation_id=with_receipt)[0])
    assert client.got[at]["title"] is None
    assert client.got[at + 1] == {
        "t": "receipt",
        "conversation_id": with_receipt,
        "user_id": bob,
        "delivered_seq": 1,
        "read_seq": 1,
        "read_version": 2,
    }
    assert client.all("receipt", conversation_id=without) == []


@pytest.mark.promise("protocol.3.left_conversation")
async def test_a_left_conversation_is_listed_until_its_end_is_here(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    await home.member(group, ann, "remove", bob)
    await home.messages(group, ann, 3)
    behind = await gateway.client(bob, cursors={group: 1})
    frame = behind.all("conversation")[0]
    assert (frame["head"], frame["visible"], frame["cursor"]) == (2, [[1, 2]], 1)
    await behind.has(group, 2)
    await behind.pong()
    assert behind.seqs(group) == [2]
    await behind.close()
    done = await gateway.client(bob, cursors={group: 2})
    assert done.all("conversation") == []
    assert done.all("listed")[0]["count"] == 0


@pytest.mark.promise("I6", "protocol.3.left_conversation")
async def test_one_who_left_is_told_when_added_again(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    await home.member(group, ann, "remove", bob)
    await home.messages(group, ann, 2)
    client = await gateway.client(bob, cursors={group: 2})
    await home.line.publish()
    await home.member(group, ann, "add", bob)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 5, 6)
    (frame,) = client.all("conversation")
    assert frame["visible"] == [[1, 2], [5, None]]
    assert client.got.index(frame) < client.got.index(client.all("event")[0])


@pytest.mark.promise("I6")
async def test_history_that_was_passed_over_comes_with_being_added_again(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob, history="all")
    client = await gateway.client(bob)
    await client.has(group, 1)
    await home.member(group, ann, "remove", bob)
    await home.messages(group, ann, 2)
    await home.line.publish()
    await client.has(group, 1, 2)
    await client.one("conversation", visible=[[1, 2]])
    await home.member(group, ann, "add", bob)
    await home.line.publish()
    await client.has(group, 1, 2, 3, 4, 5)
    again = await client.one("conversation", visible=[[1, None]], cursor=2)
    assert client.got.index(again) < client.got.index(client.all("event", seq=3)[0])


@pytest.mark.promise("I6", "protocol.3.hello")
async def test_what_happens_while_conversations_are_read_is_not_lost(
    home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = user("ann"), user("bob")
    group, left = await home.group(ann, bob), await home.group(ann, bob)
    await home.member(left, ann, "remove", bob)
    await home.line.publish()
    made: list[str] = []

    async def listed(*args: Any) -> Listing:
        rows = await list_conversations(*args)
        if not made:
            # After the read's snapshot, before the session takes what it read.
            made.append(await home.group(ann, bob))
            await home.messages(group, ann, 3)
            await home.member(left, ann, "add", bob)
            await home.line.publish()
            await asyncio.sleep(0.3)
        return rows

    monkeypatch.setattr(hello, "list_conversations", listed)
    client = await gateway.client(bob, cursors={left: 2})
    await client.has(group, 1, 2, 3, 4)
    await client.has(left, 3)
    await client.has(made[0], 1)
    for conversation_id in (group, left, made[0]):
        at = next(n for n, frame in enumerate(client.got) if frame.get("conversation_id") == conversation_id)
        assert client.got[at]["t"] == "conversation"


@pytest.mark.promise("I6")
async def test_the_last_event_of_a_burst_is_not_stuck(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    client = await gateway.client(bob)
    for _ in range(3):
        clients = [await gateway.open() for _ in range(3)]
        writing = asyncio.create_task(_burst(home, group, ann))
        await asyncio.gather(*(one.hello(f"d{n}", token=token(bob), cursors={}) for n, one in enumerate(clients)))
        await writing
        head = await home.head(group)
        for one in clients:
            await one.has(group, *range(1, head + 1))
            await one.close()
    await client.has(group, *range(1, head + 1))


async def _burst(home: House, group: str, sender: str) -> None:
    for _ in range(5):
        await home.messages(group, sender, 3)
        await home.line.publish()
