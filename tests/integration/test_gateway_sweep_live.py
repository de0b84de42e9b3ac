"""Records that Kafka never brought, to live sessions; and a client that reads nothing among many that do."""

import asyncio
import functools
import socket
import time
from typing import Any

import pytest

from services.gateway import main
from services.gateway.connection import Connection
from services.gateway.sweep import Sweep
from tests.gateways import Gateway, House, metric, token, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

SWEEP_S = 0.6
GRACE_S = 0.2


class Turns:
    """How often was swept since `begin`."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        self.count = 0


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Sweeps judge sooner, and are counted."""
    made, turn = Turns(), Sweep._turn

    async def counted(self: Sweep) -> bool:
        made.count += 1
        return await turn(self)

    monkeypatch.setattr(Sweep, "_turn", counted)
    monkeypatch.setattr(main, "Sweep", functools.partial(Sweep, grace_s=GRACE_S))
    return made


@pytest.fixture
async def gateway(home: House, turns: Turns) -> Gateway:
    return await home.gateway(gateway_sweep_s=SWEEP_S, gateway_resend_s=60)


def finds() -> dict[str, float]:
    return {kind: metric("waybill_sweep_finds_total", kind=kind) for kind in ("event", "change", "receipt", "session")}


@pytest.mark.promise("I6", "I10")
async def test_an_event_whose_record_is_lost_comes_once_within_two_sweeps(
    home: House, gateway: Gateway, turns: Turns
) -> None:
    ann, bob = user("ann"), user("bob")
    lost, brought = await home.group(ann, bob), await home.group(ann, bob)
    clients = [await gateway.client(bob), await gateway.client(ann)]
    before = finds()
    await home.messages(brought, ann, 3)
    await home.line.publish()
    await home.messages(lost, ann, 1)
    rows = await home.line.lose()
    turns.begin()
    for client in clients:
        await client.has(lost, 1, 2)
    assert turns.count <= 2
    assert finds() == {**before, "event": before["event"] + 1}, "what Kafka brought is not found"
    # It comes all the same, late, and twice.
    for _ in range(2):
        await home.line.again(rows)
    await home.messages(lost, ann, 2)
    await home.line.publish()
    for client in clients:
        await client.has(lost, 1, 2, 3, 4)
        await client.has(brought, 1, 2, 3, 4)
        await client.pong()
        assert len(client.all("event")) == 8


@pytest.mark.promise("I6", "protocol.3.hello_since")
async def test_a_session_that_waits_for_acks_or_has_not_listed_it_gets_the_lost_one_in_its_turn(
    home: House, turns: Turns
) -> None:
    gateway = await home.gateway(gateway_sweep_s=SWEEP_S, gateway_resend_s=60, gateway_window=1)
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    await home.settled()
    since = (await gateway.client(ann)).all("listed")[0]["since"]
    asleep, waits = await gateway.client(ann, "tablet", since=since), await gateway.client(bob, acks=False)
    assert asleep.all("conversation") == []
    await waits.has(group, 1)
    await home.messages(group, ann, 1)
    await home.line.lose()
    await asleep.has(group, 2)
    assert [frame["t"] for frame in asleep.got if frame.get("conversation_id") == group] == ["conversation", "event"]
    await waits.pong()
    assert waits.seqs(group) == [1]
    await waits.ack(group, 1)
    await waits.has(group, 1, 2)
    assert turns.count > 0


@pytest.mark.promise("I6", "I10", "protocol.3.conversation_frame")
async def test_a_membership_whose_record_is_lost_brings_the_user_in(
    home: House, gateway: Gateway, turns: Turns
) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann)
    added, other = await gateway.client(bob), await gateway.client(ann)
    await home.member(group, ann, "add", bob)
    created = await home.group(ann, bob, publish=False)
    rows = await home.line.lose()
    turns.begin()
    await added.has(group, 2)
    await added.has(created, 1)
    assert turns.count <= 2
    await other.has(group, 1, 2)
    await other.has(created, 1)
    await home.line.again(rows)
    await home.messages(group, ann, 1)
    await home.messages(created, bob, 1)
    await home.line.publish()
    await added.has(group, 2, 3)
    await added.has(created, 1, 2)
    for conversation_id, visible in ((group, [[2, None]]), (created, [[1, None]])):
        (frame,) = added.all("conversation", conversation_id=conversation_id)
        assert frame["visible"] == visible
        assert added.got.index(frame) < added.got.index(added.all("event", conversation_id=conversation_id)[0])


@pytest.mark.promise("I6", "I12")
@pytest.mark.parametrize("next_one", ["none", "comes", "is lost, too"])
async def test_after_a_removal_whose_record_is_lost_nothing_comes(
    home: House, gateway: Gateway, turns: Turns, next_one: str
) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    removed, stays = await gateway.client(bob), await gateway.client(ann)
    for client in (removed, stays):
        await client.has(group, 1)
    await home.member(group, ann, "remove", bob)
    rows = await home.line.lose()
    if next_one != "none":
        await home.messages(group, ann, 1)
        rows += await (home.line.publish() if next_one == "comes" else home.line.lose())
    head = 2 if next_one == "none" else 3
    await stays.has(group, *range(1, head + 1))
    await removed.one("conversation", visible=[[1, 2]], head=2)
    await removed.has(group, 1, 2)
    await home.line.again(rows)
    await home.messages(group, ann, 2)
    await home.line.publish()
    await stays.has(group, *range(1, head + 3))
    await removed.pong()
    assert removed.seqs(group) == [1, 2]


@pytest.mark.promise("I10", "protocol.5.receipt_goes_to")
async def test_a_receipt_whose_record_is_lost_is_told_once(home: House, gateway: Gateway, turns: Turns) -> None:
    ann, bob = user("ann"), user("bob")
    chat = await home.direct(ann, bob)
    await home.messages(chat, ann, 4)
    await home.line.publish()
    clients = [await gateway.client(ann), await gateway.client(bob), await gateway.client(bob, "tablet")]
    for client in clients:
        await client.has(chat, 1, 2, 3, 4, 5)
    before = finds()
    await home.mark(chat, bob, held="{[1,3)}")
    brought = await home.line.publish()
    await home.mark(chat, bob, read=2)
    await home.mark(chat, bob, held="{[3,5)}")
    lost = await home.line.lose()
    turns.begin()
    for client in clients:
        await client.one("receipt", user_id=bob, delivered_seq=4, read_seq=2)
    assert turns.count <= 2
    assert finds() == {**before, "receipt": before["receipt"] + 2}
    await home.line.again(brought)
    await home.line.again(lost)
    await home.mark(chat, bob, held="{[5,6)}")
    await home.line.publish()
    for client in clients:
        await client.one("receipt", user_id=bob, delivered_seq=5)
        marks = [(frame["delivered_seq"], frame["read_seq"]) for frame in client.all("receipt")]
        # A record that Kafka brings twice is told twice, which clients merge; what the sweep told is not told again.
        assert marks == [(2, 0), (2, 2), (4, 2), (2, 0), (5, 2)]


READERS = 50
ROUNDS, EACH, BODY_BYTES = 12, 8, 6_000


@pytest.mark.promise("I6", "protocol.3.window")
async def test_a_client_that_reads_nothing_hurts_nobody_and_then_gets_everything(
    home: House, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Connection] = {}

    def begin(self: Connection, device_id: str, claims: Any) -> None:
        beginning(self, device_id, claims)
        made[self.user_id] = self

    beginning = Connection.begin
    monkeypatch.setattr(Connection, "begin", begin)
    gateway = await home.gateway(
        gateway_resend_s=60, gateway_buffer_bytes=64 * 1024, gateway_send_buffer_bytes=48 * 1024
    )
    readers, stalled = [user("reader") for _ in range(READERS)], user("stalled")
    group = await home.group(readers[0], *readers[1:], stalled)
    clients = list(await asyncio.gather(*(gateway.client(reader) for reader in readers)))
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", gateway.settings.gateway_port))
    sock.setblocking(False)
    slow = await gateway.open(acks=False, sock=sock)
    await slow.hello(token=token(stalled))
    await slow.has(group, 1)
    transport = slow.socket.transport
    transport.pause_reading()
    wire = made[stalled].wire
    most = 0
    head = 1
    slowest = 0.0
    for _ in range(ROUNDS):
        for _ in range(EACH):
            await home.write(group, readers[0], {"x": "y" * BODY_BYTES})
        head += EACH
        begun = time.monotonic()
        await home.line.publish()
        for client in clients:
            await client.one("event", conversation_id=group, seq=head)
        slowest = max(slowest, time.monotonic() - begun)
        most = max(most, wire.waiting_bytes)
    for client in clients:
        await client.has(group, *range(1, head + 1))
    assert slowest < 5
    # About what is written at once beside the buffer, of 600 KB that it did not read.
    assert 0 < most <= 2.5 * 64 * 1024
    assert made[stalled].congested
    assert made[stalled].session.feeds[group].behind
    await until(lambda: metric("waybill_sessions_by_state", state="stalled") == 1, timeout=10, what="the gauge")
    assert slow.seqs(group) == [1]
    pushed = metric("waybill_pushes_total")
    slow.acks = True
    transport.resume_reading()
    await slow.has(group, *range(1, head + 1), timeout=20)
    assert 0 < metric("waybill_pushes_total") - pushed < head - 1
    await home.messages(group, readers[0], 1)
    await home.line.publish()
    await slow.has(group, *range(1, head + 2))
