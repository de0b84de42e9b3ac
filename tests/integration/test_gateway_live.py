"""What a session gets while it is open: from Kafka, and from Postgres whenever Kafka was not enough."""

import asyncio
import json

import pytest

from tests.gateways import Gateway, House, metric, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]


@pytest.mark.promise("I6", "protocol.3.event_everywhere", "protocol.6.metrics")
async def test_an_event_goes_to_every_session_of_every_member(home: House, gateway: Gateway) -> None:
    ann, bob, cyd = user("ann"), user("bob"), user("cyd")
    group = await home.group(ann, bob)
    sessions = [await gateway.client(ann), await gateway.client(ann, device="tablet"), await gateway.client(bob)]
    stranger = await gateway.client(cyd)
    for one in sessions:
        await one.has(group, 1)
    pushes = metric("waybill_pushes_total")
    await home.write(group, ann, {"text": "hi", "big": 123456789012345678901234567890})
    await home.line.publish()
    for one in sessions:
        await one.has(group, 1, 2)
        assert one.all("event")[1]["body"] == {"text": "hi", "big": 123456789012345678901234567890}
    assert metric("waybill_pushes_total") == pushes + 3
    await stranger.pong()
    assert stranger.all("event") == []


@pytest.mark.promise("I6", "protocol.9.metric_labels")
async def test_records_that_are_missing_late_or_twice(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.has(group, 1)
    gaps = metric("waybill_cursor_breaks_total", kind="gap")
    await home.messages(group, ann, 3)
    rows = await home.line.publish(without={2, 3})
    await client.has(group, 1, 2, 3, 4)
    assert metric("waybill_cursor_breaks_total", kind="gap") == gaps + 1
    await home.line.again(rows)
    await home.messages(group, ann, 3)
    await home.line.publish(backwards=True)
    await client.has(group, 1, 2, 3, 4, 5, 6, 7)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 1, 2, 3, 4, 5, 6, 7, 8)
    await client.pong()
    assert client.seqs(group) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.promise("protocol.3.window", "I6")
async def test_a_full_window_turns_the_session_behind(home: House) -> None:
    gateway = await home.gateway(gateway_window=3, gateway_page=2)
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann, acks=False)
    await client.has(group, 1)
    await home.messages(group, ann, 9)
    await home.line.publish()
    await client.has(group, 1, 2, 3)
    await client.pong()
    assert client.seqs(group) == [1, 2, 3]
    await client.ack(group, 2)
    await client.has(group, 1, 2, 3, 4)
    await client.ack(group, 1, 3)
    await client.has(group, 1, 2, 3, 4, 5, 6)
    client.acks = True
    await client.ack(group, 4, 5, 6)
    await client.has(group, *range(1, 11))
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, *range(1, 12))


@pytest.mark.promise("I7")
async def test_a_device_that_was_away_ends_with_the_same_timeline(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    away = await gateway.client(bob, device="phone", cursors={})
    stays = await gateway.client(bob, device="tablet", cursors={})
    await away.has(group, 1)
    await away.close()
    for _ in range(4):
        await home.messages(group, ann, 60)
        await home.line.publish()
    back = await gateway.client(bob, device="phone", cursors={group: 1})
    restored = await gateway.client(bob, device="old", cursors={group: 100})
    await back.has(group, *range(2, 242))
    await restored.has(group, *range(101, 242))
    await stays.has(group, *range(1, 242))
    bodies = {frame["seq"]: frame for frame in stays.all("event")}
    assert all(bodies[frame["seq"]] == frame for frame in (*back.all("event"), *restored.all("event")))


@pytest.mark.promise("I9", "I12", "protocol.9.visible", "protocol.3.conversation_frame")
async def test_members_come_and_go(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann)
    await home.messages(group, ann, 2)
    await home.line.publish()
    client = await gateway.client(bob)
    await home.member(group, ann, "add", bob)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 4, 5)
    frame = client.all("conversation")[0]
    assert (frame["visible"], frame["cursor"], frame["role"]) == ([[4, None]], 3, "member")
    assert client.got.index(frame) < client.got.index(client.all("event")[0])
    await home.write(group, ann, {"action": "role", "user_id": bob, "role": "admin"}, type_="member")
    await home.line.publish()
    await client.one("conversation", role="admin")
    await home.write(group, ann, {"title": "New"}, type_="conversation")
    await home.line.publish()
    await client.one("conversation", title="New")
    await home.member(group, ann, "remove", bob)
    await home.messages(group, ann, 2)
    await home.write(group, ann, {"title": "Secret"}, type_="conversation")
    await home.line.publish()
    await client.one("conversation", visible=[[4, 8]], head=8)
    await client.has(group, 4, 5, 6, 7, 8)
    await client.pong()
    assert client.seqs(group) == [4, 5, 6, 7, 8]
    assert client.all("conversation", title="Secret") == []


@pytest.mark.promise("I6")
async def test_a_removal_whose_record_is_missing(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    client = await gateway.client(bob)
    await client.has(group, 1)
    await home.member(group, ann, "remove", bob)
    await home.messages(group, ann, 1)
    await home.member(group, ann, "add", bob)
    await home.messages(group, ann, 1)
    await home.line.publish(without={2, 4})
    await client.has(group, 1, 2, 4, 5)
    frame = await client.one("conversation", visible=[[1, 2], [4, None]])
    assert client.got.index(frame) < client.got.index(client.all("event", seq=4)[0])


@pytest.mark.promise("protocol.3.hidden_edit", "I12")
async def test_an_edit_of_what_one_may_not_see_comes_without_a_body(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann)
    await home.messages(group, ann, 1)
    await home.member(group, ann, "add", bob)
    await home.line.publish()
    sees, hidden = await gateway.client(ann, cursors={group: 3}), await gateway.client(bob)
    await hidden.has(group, 3)
    await home.write(group, ann, {"text": "secret"}, type_="edit", target=2)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await sees.has(group, 4, 5)
    await hidden.has(group, 3, 4, 5)
    assert sees.all("event", seq=4)[0]["body"] == {"text": "secret"}
    assert hidden.all("event", seq=4)[0]["body"] is None


@pytest.mark.promise("protocol.9.present_state", "protocol.3.recall")
async def test_catch_up_shows_events_as_they_are_now(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 2)
    await home.write(group, ann, {"n": "new"}, type_="edit", target=2)
    await home.write(group, ann, type_="recall", target=3)
    client = await gateway.client(ann, cursors={group: 1})
    await client.has(group, 2, 3, 4, 5)
    two, three, _, recall = client.all("event")
    assert (two["body"], two["edited_by"]) == ({"n": "new"}, 4)
    assert (three["body"], three["recalled_by"]) == (None, 5)
    assert (recall["body"], recall["target_seq"]) == (None, 3)


async def test_a_body_with_strange_members_is_pushed_like_any_other(home: House, gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    client = await gateway.client(bob)
    await client.has(group, 1)
    strange = {"title": "x", "members": 5, "user_id": {"a": 1e300}, "role": [], "big": 10**40}
    await home.write(group, ann, strange, type_="conversation")
    cyd = user("cyd")
    await home.write(group, ann, {"action": "add", "user_id": cyd, "members": 7, "big": 10**40}, type_="member")
    await home.line.publish()
    await client.has(group, 1, 2, 3)
    assert client.all("event")[1]["body"] == strange


@pytest.mark.promise("protocol.7.dead", "protocol.9.kafka")
async def test_a_record_that_cannot_be_read_stops_nothing(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.has(group, 1)
    bad = metric("waybill_bad_records_total", topic=home.topics.events)
    shard = await home.owner.fetchval("SELECT shard FROM conversation WHERE conversation_id = $1", group)
    for payload, seq in ((b"junk", "2"), (b'{"t":"event"}', "two"), (b'{"t":"event"}', "0"), (b'{"t":"x"}', "2")):
        headers = {"ce_type": "waybill.event.edit" if seq == "2" else "waybill.event.message", "seq": seq}
        await home.line.raw("events.v1", group, payload, shard, headers)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 1, 2)
    assert metric("waybill_bad_records_total", topic=home.topics.events) == bad + 4

    async def on_the_desk() -> bool:
        letters = "SELECT origin, payload FROM dead_letter WHERE conversation_id = $1 ORDER BY origin_offset"
        found = await home.owner.fetch(letters, group)
        return [tuple(row) for row in found] == [
            ("events.v1", value) for value in (b"junk", b'{"t":"event"}', b'{"t":"event"}', b'{"t":"x"}')
        ]

    await until(on_the_desk, timeout=20, what="letters of what cannot be read")


@pytest.mark.promise("protocol.7.dead", "protocol.9.kafka")
async def test_garbage_of_no_conversation_is_kept_and_a_false_head_holds_nobody(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.has(group, 1)
    shard = await home.owner.fetchval("SELECT shard FROM conversation WHERE conversation_id = $1", group)
    bad = [metric("waybill_bad_records_total", topic=topic) for topic in (home.topics.events, home.topics.receipts)]
    for topic in ("events.v1", "receipts.v1"):
        await home.line.raw(topic, "no conversation", b"junk", shard, {})
    lie = {"t": "event", "conversation_id": group, "seq": 900, "event_id": group, "sender_id": ann, "body": {}}
    headers = {"ce_type": "waybill.event.message", "seq": "900"}
    await home.line.raw("events.v1", group, json.dumps(lie, separators=(",", ":")).encode(), shard, headers)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 1, 2)
    reads = metric("waybill_catch_up_reads_total")
    await home.messages(group, ann, 2)
    await home.line.publish()
    await client.has(group, 1, 2, 3, 4)
    assert metric("waybill_catch_up_reads_total") == reads  # live again
    await until(
        lambda: (
            [metric("waybill_bad_records_total", topic=t) for t in (home.topics.events, home.topics.receipts)]
            == [bad[0] + 1, bad[1] + 1]
        ),
        timeout=10,
        what="bad records",
    )


@pytest.mark.promise("protocol.3.ack", "protocol.7.acks")
@pytest.mark.promise("protocol.3.pull")
async def test_what_was_pulled_may_be_acked_before_kafka_brought_it(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.has(group, 1)
    await home.messages(group, ann, 2)
    ignored = metric("waybill_ignored_acks_total")
    await client.say("pull", rid="p", conversation_id=group, after=1)
    page = await client.one("page", rid="p")
    assert [event["seq"] for event in page["events"]] == [2, 3]
    assert (page["next"], page["head"], page["complete"]) == (3, 3, True)
    await client.ack(group, 2, 3)
    await client.pong()
    assert metric("waybill_ignored_acks_total") == ignored
    await client.say("ack", conversation_id=group, ranges=[[1, 9]])
    await client.pong()
    assert metric("waybill_ignored_acks_total") == ignored + 6


@pytest.mark.promise("I6", "protocol.3.window")
async def test_a_client_that_reads_slowly_gets_all(home: House) -> None:
    gateway = await home.gateway(gateway_buffer_bytes=64 * 1024)
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann, acks=False)
    client.socket.transport.pause_reading()
    for _ in range(8):
        for _ in range(4):
            await home.write(group, ann, {"x": "y" * 60_000})
        await home.line.publish()
    await asyncio.sleep(0.2)
    client.acks = True
    client.socket.transport.resume_reading()
    await client.ack(group, 1)
    await client.has(group, *range(1, 34), timeout=20)
