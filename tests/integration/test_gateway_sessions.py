"""How a session begins and ends: the upgrade, tokens, resends, heartbeats, drain, and stores that go away."""

import asyncio
import base64
import json
import os
import time

import aiohttp
import pytest
import redis.asyncio as redis
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame as WireFrame
from websockets.frames import Opcode
from websockets.typing import Subprotocol

from services.gateway import hello, stream
from shared.errors import UnavailableError
from tests.gateways import Gateway, House, metric, token, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]


@pytest.mark.promise("protocol.3.upgrade", "protocol.9.tokens")
async def test_the_upgrade(gateway: Gateway) -> None:
    async with (
        connect(gateway.url) as none,
        connect(gateway.url, subprotocols=[Subprotocol("x"), Subprotocol("waybill.v1")]) as ours,
    ):
        assert (none.subprotocol, ours.subprotocol) == (None, "waybill.v1")
        assert none.response is not None
        assert "Sec-WebSocket-Extensions" not in none.response.headers
    for url, options, status in (
        (gateway.url, {"subprotocols": [Subprotocol("waybill.v2")]}, 400),
        (gateway.url + "s", {}, 404),
        (gateway.url + "/", {}, 404),
    ):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(url, **options):  # type: ignore[arg-type]
                pass
        assert refused.value.response.status_code == status
    async with connect(gateway.url + "?x=1"):
        pass
    async with aiohttp.ClientSession() as session, session.get(gateway.url.replace("ws:", "http:")) as answer:
        assert answer.status == 426


async def ends(gateway: Gateway, *, bearer: str | None = None, **hello: object) -> int:
    client = await gateway.open(bearer=bearer)
    await client.say("hello", **{"device_id": "phone", **hello})
    return await client.closed()


@pytest.mark.promise("protocol.2.hello_token", "protocol.2.token", "protocol.3.close_codes", "protocol.9.tokens")
async def test_tokens(gateway: Gateway) -> None:
    ann, bob = user("ann"), user("bob")
    assert await ends(gateway, token=token(ann, scope="service")) == 4403
    assert await ends(gateway, token=token(ann, scope="admin")) == 4403
    assert await ends(gateway, token=token(ann, scope="gateway")) == 4403
    assert await ends(gateway, token=token(ann, device="tablet")) == 4403
    assert await ends(gateway, token=token(ann, ttl_s=-20)) == 4401
    assert await ends(gateway, bearer="junk", token=token(ann)) == 4401
    assert await ends(gateway, token="junk") == 4401
    client = await gateway.open(bearer=token(ann, device="phone"))
    await client.hello(token=token(bob))
    assert client.got[0]["user_id"] == ann


@pytest.mark.promise("protocol.2.expiry", "protocol.3.token_frame")
async def test_a_token_is_renewed_in_the_session(gateway: Gateway) -> None:
    ann = user("ann")
    client = await gateway.open()
    await client.hello(token=token(ann, ttl_s=-8))
    await client.one("expiring", in_s=0)
    await client.say("token", token=token(ann, ttl_s=3600))
    short = await gateway.open()
    await short.hello("short", token=token(ann, ttl_s=30))
    assert 25 <= (await short.one("expiring"))["in_s"] <= 30
    for device, shown in (
        ("other user", token(user("bob"))),
        ("other device", token(ann, device="tablet")),
        ("junk", "junk"),
        ("service", token(ann, scope="service")),
    ):
        one = await gateway.client(ann, device.replace(" ", "-"))
        await one.say("token", token=shown)
        assert await one.closed() == 4401, device
    # The first token's end has passed when one that ends as early is refused.
    late = await gateway.open()
    await late.hello("late", token=token(ann, ttl_s=-8))
    assert await late.closed() == 4401
    await client.pong()


@pytest.mark.promise("protocol.3.resend", "protocol.3.close_codes")
async def test_what_is_not_acked_comes_again_and_then_the_session_ends(home: House) -> None:
    gateway = await home.gateway(gateway_resend_s=0.1, gateway_resends=2)
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 2)
    client = await gateway.client(ann, acks=False)
    await client.has(group, 1, 2, 3)
    await client.ack(group, 2)
    resends = metric("waybill_resends_total")
    assert await client.closed() == 4408
    assert client.seqs(group) == [1, 2, 3, 1, 3, 1, 3]
    assert metric("waybill_resends_total") == resends + 4


@pytest.mark.promise("protocol.3.heartbeat")
async def test_a_client_that_answers_no_ping_is_closed(home: House) -> None:
    gateway = await home.gateway(gateway_heartbeat_s=0.2)
    ann = user("ann")
    lives, dead = await gateway.client(ann), await gateway.client(ann, "dead")
    pongs = dead.socket.protocol
    pongs.recv_frame = _without_pings(pongs.recv_frame)  # type: ignore[method-assign]
    begun = time.monotonic()
    assert await dead.closed() == 4408
    assert 0.4 < time.monotonic() - begun < 3
    await lives.pong()


def _without_pings(receive):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    def wrapped(frame: WireFrame) -> None:
        if frame.opcode is not Opcode.PING:
            receive(frame)

    return wrapped


@pytest.mark.promise("protocol.3.ping")
async def test_several_frames_in_one_write(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
    writer.write(
        b"GET /v1/socket HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + base64.b64encode(os.urandom(16)) + b"\r\n\r\n"
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b" 101 " in head.splitlines()[0]
    frames = [{"t": "hello", "device_id": "phone", "token": token(ann)}] + [
        {"t": "ping", "rid": str(n)} for n in range(5)
    ]
    writer.write(b"".join(WireFrame(Opcode.TEXT, json.dumps(one).encode()).serialize(mask=True) for one in frames))
    read = b""
    async with asyncio.timeout(5):
        while read.count(b'"pong"') < 5:
            read += await reader.read(65536)
    assert read.index(b'"listed"') < read.index(b'"pong"')
    assert [read.index(b'"rid":"%d"' % n) for n in range(5)] == sorted(read.index(b'"rid":"%d"' % n) for n in range(5))
    writer.close()
    await writer.wait_closed()


@pytest.mark.promise("protocol.3.frame_size", "protocol.9.defaults")
async def test_hello_may_be_larger_than_other_frames(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    ids = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(9_000)]
    cursors = {one: [1, one] for one in ids} | {group: 1}
    client = await gateway.client(ann, cursors=cursors)
    assert client.all("conversation")[0]["cursor"] == 1


async def test_redis_holds_who_is_connected_where(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    key = f"{home.topics.prefix}:sessions:{ann}"
    async with redis.Redis.from_url(home.redis_url, decode_responses=True) as client:
        await client.zadd(key, {"dead/x": time.time() - 1})
        session = await gateway.client(ann)
        there = f"{gateway.settings.gateway_name}/{session.got[0]['session_id']}"

        async def members() -> list[str]:
            return list(await client.zrange(key, 0, -1))

        async def is_there() -> bool:
            return await members() == [there]

        await until(is_there, timeout=15, what="session in Redis")
        assert await client.zscore(key, there) > time.time()
        assert 0 < await client.ttl(key) <= 51
        await session.close()

        async def is_gone() -> bool:
            return not await members()

        await until(is_gone, timeout=15, what="no session in Redis")


@pytest.mark.promise("I10", "protocol.6.health")
async def test_redis_away_does_not_matter(home: House) -> None:
    gateway = await home.gateway(redis_url="redis://127.0.0.1:1/0")
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.has(group, 1)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 1, 2)
    assert await gateway.readyz() == {"status": "ok", "failing": {}}


@pytest.mark.promise("protocol.9.gateway_start", "protocol.6.health")
async def test_nobody_is_let_in_before_positions_are_fixed(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    fix, may = stream.Stream._fix_positions, asyncio.Event()

    async def later(self: stream.Stream, consumer: AIOKafkaConsumer) -> None:
        if self._topic == home.topics.receipts:
            await may.wait()
        await fix(self, consumer)

    monkeypatch.setattr(stream.Stream, "_fix_positions", later)
    gateway = await home.gateway(waits=False)
    ready = await until(gateway.readyz, timeout=10, what="health")
    assert (ready["status"], list(ready["failing"])) == ("failing", ["sockets"])
    with pytest.raises(OSError, match="Connect call failed"):
        await gateway.open()
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    may.set()
    await gateway.opened()
    client = await gateway.client(bob)
    await client.has(group, 1)
    assert await gateway.readyz() == {"status": "ok", "failing": {}}


@pytest.mark.promise("I10", "I6")
async def test_while_kafka_brings_nothing_the_sweep_delivers_and_afterwards_nothing_comes_again(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await home.gateway(gateway_sweep_s=0.2)
    ann, bob = user("ann"), user("bob")
    group, nobodys = await home.group(ann, bob), await home.group(ann)
    client = await gateway.client(bob)
    await client.has(group, 1)
    read, fix, away = stream.Stream._read, stream.Stream._fix_positions, asyncio.Event()

    async def broken(self: stream.Stream, consumer: object) -> None:
        away.set()
        raise KafkaError("broken")

    monkeypatch.setattr(stream.Stream, "_fix_positions", broken)
    monkeypatch.setattr(stream.Stream, "_read", broken)
    await asyncio.wait_for(away.wait(), 10)
    await home.messages(group, ann, 2)
    new = await home.group(ann, bob, publish=False)
    await home.mark(group, bob, held="{[1,2)}")
    rows = await home.line.publish()
    await client.has(group, 1, 2, 3)
    await client.has(new, 1)
    await client.one("receipt", conversation_id=group, user_id=bob, delivered_seq=1)
    monkeypatch.setattr(stream.Stream, "_read", read)
    monkeypatch.setattr(stream.Stream, "_fix_positions", fix)

    async def brought() -> bool:
        before = metric("waybill_dropped_records_total")
        await home.write(nobodys, ann)
        await home.line.publish()
        await asyncio.sleep(0.1)
        return metric("waybill_dropped_records_total") > before

    await until(brought, timeout=20, what="a record of a conversation that nobody follows")
    await home.line.again(rows)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 1, 2, 3, 4)
    assert client.seqs(new) == [1]


@pytest.mark.promise("protocol.3.close_codes")
async def test_postgres_away_at_hello(home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> list[str]:
        raise UnavailableError("the store is away")

    monkeypatch.setattr(hello, "changed_since", away)
    client = await gateway.open()
    await client.say("hello", device_id="phone", token=token(user("ann")))
    assert await client.closed() == 4503
    assert (await client.one("reconnect"))["after_ms"] > 0
