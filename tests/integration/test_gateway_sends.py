"""From a socket to ingest and back: sends in order, their answers, conversations made, read marks answered."""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web

from deploy.local import ports
from tests.databases import Database
from tests.gateways import Gateway, House, metric, user
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]


def message(conversation_id: str, rid: str, n: int = 0, **more: object) -> dict[str, object]:
    fields = {"rid": rid, "conversation_id": conversation_id, "client_msg_id": uuid.uuid4().hex, "body": {"n": n}}
    return {**fields, **more}


@pytest.mark.promise("protocol.3.send", "I2")
async def test_a_send_is_answered_and_comes_as_an_event(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    sender, reader = await gateway.client(ann), await gateway.client(bob)
    fields = message(group.upper(), "r1", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    await sender.say("send", **fields)
    sent = await sender.one("sent", rid="r1")
    assert {**sent, "event_id": "", "created_at": ""} == {
        "t": "sent",
        "rid": "r1",
        "conversation_id": group,
        "client_msg_id": fields["client_msg_id"],
        "event_id": "",
        "seq": 2,
        "created_at": "",
        "duplicate": False,
    }
    (row,) = [row for row in await home.line.publish() if row["conversation_id"] == group and row["seq"] == 2]
    assert row["headers"] == ["traceparent", f"00-{'a' * 32}-{'b' * 16}-01"]
    for one in (sender, reader):
        await one.has(group, 1, 2)
        assert one.all("event")[1]["event_id"] == sent["event_id"]
    await sender.say("send", **{**fields, "rid": "r2"})
    again = await sender.one("sent", rid="r2")
    assert {**again, "rid": "r1", "duplicate": False} == sent
    await sender.say("send", **{**fields, "rid": "r3", "body": {"n": 1}})
    assert (await sender.one("error", rid="r3"))["code"] == "client_msg_id_reused"


@pytest.mark.promise("protocol.9.order_in")
async def test_sends_of_a_session_keep_their_order_over_batches(home: House) -> None:
    await home.ingest()
    gateway = await home.gateway(gateway_session_sends=50, gateway_sends_per_s=0, gateway_frames_per_s=0)
    ann = user("ann")
    groups = [await home.group(ann) for _ in range(3)]
    client = await gateway.client(ann)
    for n in range(900):
        await client.say("send", **message(groups[n % 3], str(n), n))
    await until(lambda: len(client.all("sent")) == 900, timeout=20, what="900 answers")
    assert client.all("error") == []
    for group in groups:
        seqs = {int(sent["rid"]): sent["seq"] for sent in client.all("sent", conversation_id=group)}
        assert [seqs[n] for n in sorted(seqs)] == list(range(2, 302))


@pytest.mark.promise("protocol.3.create", "protocol.9.creation_event")
async def test_create(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann, bob = user("ann"), user("bob")
    one, other = await gateway.client(ann), await gateway.client(bob)
    group = str(uuid.uuid4())
    for rid, existing in (("c1", False), ("c2", True)):
        await one.say("create", rid=rid, kind="group", members=[bob], title="T", conversation_id=group)
        assert await one.one("created", rid=rid) == {
            "t": "created",
            "rid": rid,
            "conversation_id": group,
            "existing": existing,
        }
    await home.line.publish()
    for client, role in ((one, "admin"), (other, "member")):
        await client.has(group, 1)
        frame = client.all("conversation")[0]
        assert (frame["role"], frame["cursor"], frame["head"]) == (role, 0, 1)
    await other.say("create", rid="c3", kind="group", members=[], conversation_id=group)
    refused = await other.one("error", rid="c3")
    assert (refused["code"], refused["field"], bool(refused["message"])) == ("conflict", "conversation_id", True)
    await one.say("create", rid="d1", kind="direct", members=[bob])
    await other.say("create", rid="d2", kind="direct", members=[ann, bob])
    first, second = await one.one("created", rid="d1"), await other.one("created", rid="d2")
    assert first["conversation_id"] == second["conversation_id"]
    assert sorted([first["existing"], second["existing"]]) == [False, True]


@pytest.mark.promise("protocol.3.ack", "protocol.3.read")
async def test_what_was_sent_may_be_acked_and_read_before_kafka_brings_it(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann = user("ann")
    client = await gateway.client(ann, acks=False)
    ignored = metric("waybill_ignored_acks_total")
    await client.say("create", rid="c", kind="group", members=[])
    group = (await client.one("created", rid="c"))["conversation_id"]
    await client.say("read", conversation_id=group, seq=1)
    await client.say("send", **message(group, "s"))
    assert (await client.one("sent", rid="s"))["seq"] == 2
    await client.ack(group, 1, 2)
    await client.say("read", conversation_id=group, seq=2)
    assert (await client.one("conversation", conversation_id=group))["head"] in (1, 2)
    await client.pong()
    assert client.all("error") == []
    assert metric("waybill_ignored_acks_total") == ignored

    async def told() -> bool:
        of = await home.acks(group)
        acked = {pair for one in of if one["kind"] == "delivered" for pair in map(tuple, one["ranges"])}
        return bool(acked & {(1, 2), (2, 2)}) and [one["seq"] for one in of if one["kind"] == "read"] == [1, 2]

    await until(told, timeout=10, what="acks and marks")
    await home.line.publish()
    await client.has(group, 1, 2)


@pytest.mark.promise("protocol.4.indefinite", "protocol.4.stranger")
async def test_errors_of_ingest_are_told(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    await home.member(group, ann, "remove", bob)
    client = await gateway.client(bob)
    await client.say("send", **message(group, "former"))
    assert (await client.one("error", rid="former"))["code"] == "not_member"
    await client.say("send", **message(str(uuid.uuid4()), "nowhere"))
    assert (await client.one("error", rid="nowhere"))["code"] == "not_found"


@pytest.mark.promise("protocol.4.indefinite")
async def test_ingest_away(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.say("send", **message(group, "r"))
    await client.say("create", rid="c", kind="group", members=[])
    for rid in ("r", "c"):
        error = await client.one("error", rid=rid)
        assert (error["code"], error["retry_after_ms"] > 0) == ("unavailable", True)
    await home.ingest()
    await client.say("send", **message(group, "again"))
    await client.one("sent", rid="again")


@pytest.fixture
async def silent(home: House) -> AsyncIterator[None]:
    """An ingest that takes every request and answers none."""

    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_post("/{any:.*}", never)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", home.ingest_port).start()
    yield
    await runner.cleanup()


@pytest.mark.promise("protocol.4.indefinite", "protocol.9.defaults")
async def test_an_ingest_that_does_not_answer(home: House, silent: None) -> None:
    gateway = await home.gateway(gateway_send_timeout_s=0.5)
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    for n in range(3):
        await client.say("send", **message(group, str(n)))
        await client.pong()
    for n in range(3):
        assert (await client.one("error", timeout=3, rid=str(n)))["code"] == "timeout"
    await client.say("create", rid="c", kind="group", members=[])
    assert (await client.one("error", timeout=3, rid="c"))["code"] == "timeout"


async def test_an_ingest_that_answers_nonsense(home: House) -> None:
    bodies = iter([b"x", b"{}", b'{"results":[]}', b'{"results":[{"status":500}]}'])

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=next(bodies), content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/events", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", home.ingest_port).start()
    gateway = await home.gateway()
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    for n in range(4):
        await client.say("send", **message(group, str(n)))
        assert (await client.one("error", rid=str(n)))["code"] == "internal"
    await client.close()
    await runner.cleanup()


@pytest.fixture(scope="module")
def receipts(shared_database: Database, stores: Stores, shared_prefix: str) -> Iterator[None]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")},
        "WAYBILL_POSTGRES_URL": shared_database.url("receipts"),
        "WAYBILL_KAFKA_BOOTSTRAP": stores.kafka,
        "WAYBILL_TOPIC_PREFIX": shared_prefix,
        "WAYBILL_RECEIPTS_PRIVATE_PORT": str(ports.free_port()),
    }
    command = [sys.executable, "-m", "services.receipts.main"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        yield
        process.terminate()
        process.wait(20)


async def published(home: House, conversation_id: str, rows: int) -> None:
    """Wait for so many rows of receipts of the conversation, and publish them."""
    seen = 0

    async def enough() -> bool:
        nonlocal seen
        for row in await home.line.publish():
            seen += row["topic"] == "receipts.v1" and row["conversation_id"] == conversation_id
        return seen >= rows

    await until(enough, timeout=40, what=f"{rows} receipts")


@pytest.mark.promise(
    "protocol.3.read", "protocol.5.read_mark", "protocol.5.read_refused", "protocol.5.receipt_goes_to", "I8"
)
async def test_read_marks_are_answered(home: House, gateway: Gateway, receipts: None) -> None:
    ann, bob = user("ann"), user("bob")
    chat = await home.direct(ann, bob)
    await home.messages(chat, ann, 3)
    await home.line.publish()
    phone, tablet = await gateway.client(bob), await gateway.client(bob, device="tablet")
    peer = await gateway.client(ann)
    for one in (phone, tablet, peer):
        await one.has(chat, 1, 2, 3, 4)
    await published(home, chat, 2)
    for one in (phone, tablet, peer):
        await one.one("receipt", user_id=bob, delivered_seq=4, read_seq=0)
    await phone.say("read", conversation_id=chat, seq=3)
    await published(home, chat, 1)
    for one in (phone, tablet, peer):
        await one.one("receipt", user_id=bob, read_seq=3, read_version=0)
    await phone.say("unread", conversation_id=chat, seq=1, version=1)
    await published(home, chat, 1)
    for one in (phone, tablet, peer):
        await one.one("receipt", user_id=bob, read_seq=1, read_version=1)
    # Without a version the gateway fills in the one last told: it moves forward from there.
    await tablet.say("read", conversation_id=chat, seq=2)
    await published(home, chat, 1)
    await phone.one("receipt", user_id=bob, read_seq=2, read_version=1)
    before = [len(one.all("receipt")) for one in (phone, tablet, peer)]
    await phone.say("read", conversation_id=chat, seq=99)
    await published(home, chat, 1)
    await until(lambda: len(phone.all("receipt")) > before[0], timeout=10, what="answer to a refused mark")
    refused = phone.all("receipt")[-1]
    assert (refused["read_seq"], refused["read_version"], refused["cause"]) == (2, 1, "refused:beyond_head")
    for one in (tablet, peer):
        await one.pong()
    assert [len(one.all("receipt")) for one in (tablet, peer)] == before[1:]


@pytest.mark.promise("protocol.5.receipt_goes_to")
async def test_receipts_of_a_group_go_to_their_user_alone(home: House, gateway: Gateway, receipts: None) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    mine, other, peer = (
        await gateway.client(bob),
        await gateway.client(bob, device="tablet"),
        await gateway.client(ann, acks=False),
    )
    for one in (mine, other, peer):
        await one.has(group, 1)
    await mine.say("read", conversation_id=group, seq=1)
    await published(home, group, 2)
    for one in (mine, other):
        await one.one("receipt", user_id=bob, read_seq=1)
    await peer.pong()
    assert peer.all("receipt") == []
