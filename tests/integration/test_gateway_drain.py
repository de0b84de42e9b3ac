"""A gateway that ends: what it says while it does, whom it lets in, and what it leaves behind."""

import asyncio
import functools
import time

import pytest
from websockets.exceptions import InvalidStatus

from services.gateway import main
from services.gateway.upgrade import Policy
from tests.gateways import Client, House, metric, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]


@pytest.mark.promise("protocol.3.reconnect", "protocol.3.close_codes", "protocol.6.health")
async def test_sessions_are_sent_away_over_a_while_and_nobody_is_let_in(home: House) -> None:
    gateway = await home.gateway(gateway_drain_s=1.5)
    sessions = 40
    names = [user("ann") for _ in range(sessions)]
    clients = list(await asyncio.gather(*(gateway.client(name) for name in names)))
    greets = await gateway.open()
    reader, half = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
    half.write(b"GET /v1/socket HTTP/1.1\r\nHost: x\r\n")
    drained = metric("waybill_drained_sessions_total")
    ends: dict[Client, float] = {}

    async def watch(client: Client) -> None:
        assert await client.closed() == 4503
        ends[client] = time.monotonic() - begun

    begun = time.monotonic()
    gateway.stop.set()
    watching = asyncio.gather(*map(watch, [*clients, greets]))

    async def fails() -> bool:
        ready = await gateway.readyz()
        return ready is not None and ready["failing"] == {"sockets": "not open"}

    await until(fails, timeout=5, what="readyz fails")
    assert not gateway.task.done()
    with pytest.raises((InvalidStatus, OSError)):
        await gateway.open()
    half.write(
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: " in answer
    half.close()
    await watching
    await gateway.end()
    for client in [*clients, greets]:
        (told,) = client.all("reconnect")
        assert client.got[-1] is told
        assert 0 <= told["after_ms"] <= 1000
    assert metric("waybill_drained_sessions_total") == drained + sessions + 1
    assert len({client.all("reconnect")[0]["after_ms"] for client in clients}) > sessions / 2
    # Spread: not all at once, nor all at the end.
    first, last = min(ends.values()), max(ends.values())
    assert last - first > 0.7
    quarters = [
        sum(quarter <= (end - first) / (last - first) * 4 < quarter + 1 for end in ends.values())
        for quarter in range(4)
    ]
    assert max(quarters) <= 0.6 * sessions, quarters


@pytest.mark.promise("protocol.7.acks", "protocol.3.ack")
async def test_acks_are_with_kafka_when_it_has_ended(home: House) -> None:
    gateway = await home.gateway(gateway_ack_flush_ms=1000, gateway_drain_s=0)
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 4)
    client = await gateway.client(ann)
    await client.has(group, 1, 2, 3, 4, 5)
    await client.say("read", conversation_id=group, seq=5)
    await client.pong()
    assert await home.acks(group) == []
    begun = time.monotonic()
    await gateway.end()
    assert time.monotonic() - begun < 5
    told = [{name: value for name, value in ack.items() if name != "at"} for ack in await home.acks(group)]
    whose = {"conversation_id": group, "user_id": ann, "device_id": "phone"}
    assert told == [
        {**whose, "kind": "delivered", "ranges": [[1, 5]]},
        {**whose, "kind": "read", "seq": 5, "version": 0},
    ]


@pytest.mark.promise("protocol.3.reconnect")
async def test_a_drain_does_not_wait_for_who_reads_nothing(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "Policy", functools.partial(Policy, close_s=0.3))
    gateway = await home.gateway(gateway_buffer_bytes=64 * 1024)
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann, acks=False)
    await client.has(group, 1)
    client.socket.transport.pause_reading()
    for _ in range(3):
        for _ in range(30):
            await home.write(group, ann, {"x": "y" * 60_000})
        await home.line.publish()
    # It also asks for something, which waits until it reads.
    pulls = metric("waybill_client_frames_total", kind="pulls")
    await client.say("pull", rid="p", conversation_id=group, after=0)
    await until(lambda: metric("waybill_client_frames_total", kind="pulls") > pulls, timeout=5, what="the pull")
    begun = time.monotonic()
    await gateway.end()
    assert time.monotonic() - begun < 5
    client.socket.transport.abort()
    await client.closed()
