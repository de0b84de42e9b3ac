"""How a session begins and ends: the upgrade, tokens, resends, heartbeats, drain, and stores that go away."""

import asyncio
import base64
import json
import os
import time

import aiohttp
import pytest
import redis.asyncio as redis
from aiokafka.errors import KafkaError
from prometheus_client import REGISTRY
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame as WireFrame
from websockets.frames import Opcode
from websockets.typing import Subprotocol

from services.gateway import following, stream
from services.gateway import socket as sockets
from shared.errors import UnavailableError
from tests.gateways import Client, Gateway, House, token, user
from tests.relays import all_records
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
    await client.close()


@pytest.mark.promise("protocol.2.expiry", "protocol.3.token_frame")
async def test_a_token_is_renewed_in_the_session(gateway: Gateway) -> None:
    ann = user("ann")
    client = await gateway.open()
    await client.hello(token=token(ann, ttl_s=-8))
    await client.one("expiring", in_s=0)
    await client.say("token", token=token(ann, ttl_s=3600))
    short = await gateway.open()
    await short.hello(token=token(ann, ttl_s=30))
    assert 25 <= (await short.one("expiring"))["in_s"] <= 30
    await short.close()
    other = await gateway.client(ann)
    await other.say("token", token=token(user("bob")))
    assert await other.closed() == 4401
    device = await gateway.client(ann)
    await device.say("token", token=token(ann, device="tablet"))
    assert await device.closed() == 4401
    junk = await gateway.client(ann)
    await junk.say("token", token="junk")
    assert await junk.closed() == 4401
    service = await gateway.client(ann)
    await service.say("token", token=token(ann, scope="service"))
    assert await service.closed() == 4401
    await asyncio.sleep(2.5)  # past the end of the first token
    await client.pong()
    await client.close()


@pytest.mark.promise("protocol.3.resend", "protocol.3.close_codes")
async def test_what_is_not_acked_comes_again_and_then_the_session_ends(home: House) -> None:
    gateway = await home.gateway(gateway_resend_s=0.1, gateway_resends=2)
    ann = user("ann")
    group = await home.group(ann)
    await home.messages(group, ann, 2)
    client = await gateway.client(ann, acks=False)
    await client.has(group, 1, 2, 3)
    await client.ack(group, 2)
    resends = REGISTRY.get_sample_value("waybill_resends_total") or 0
    assert await client.closed() == 4408
    assert client.seqs(group) == [1, 2, 3, 1, 3, 1, 3]
    assert REGISTRY.get_sample_value("waybill_resends_total") == resends + 4


@pytest.mark.promise("protocol.3.heartbeat")
async def test_a_client_that_answers_no_ping_is_closed(home: House) -> None:
    gateway = await home.gateway(gateway_heartbeat_s=0.2)
    ann = user("ann")
    lives, dead = await gateway.client(ann), await gateway.client(ann)
    pongs = dead.socket.protocol
    pongs.recv_frame = _without_pings(pongs.recv_frame)  # type: ignore[method-assign]
    begun = time.monotonic()
    assert await dead.closed() == 4408
    assert 0.4 < time.monotonic() - begun < 3
    await lives.pong()
    await lives.close()


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
    cursors = {f"{n:08x}-0000-4000-8000-000000000000": [1, "e" * 36] for n in range(9_000)} | {group: 1}
    client = await gateway.client(ann, cursors=cursors)
    assert client.all("conversation")[0]["cursor"] == 1
    await client.close()


@pytest.mark.promise("protocol.3.reconnect", "protocol.3.close_codes", "protocol.7.acks")
async def test_drain(home: House) -> None:
    gateway = await home.gateway(gateway_ack_flush_ms=1000)
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.client(ann)
    await client.has(group, 1)
    await client.pong()
    greets = await connect(gateway.url).__aenter__()
    _, half = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
    begun = time.monotonic()
    await gateway.end()
    assert time.monotonic() - begun < 5
    assert await client.closed() == 4503
    told = await client.one("reconnect")
    assert 0 <= told["after_ms"] <= 500
    with pytest.raises(ConnectionClosed):
        await greets.recv()
    assert greets.close_code == 4503
    half.close()
    await half.wait_closed()
    records = await _acks(home)
    assert {
        "conversation_id": group,
        "user_id": ann,
        "device_id": "phone",
        "kind": "delivered",
        "ranges": [[1, 1]],
    } in [{name: found for name, found in record.items() if name != "at"} for record in records]


async def _acks(home: House) -> list[dict[str, object]]:
    records = await all_records(home.stores.kafka, [home.topics.acks])
    return [json.loads(record.value or b"") for record in records]


async def test_a_drain_does_not_wait_for_who_reads_nothing(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_FLUSH_S", 0.3)
    monkeypatch.setattr(sockets, "_CLOSE_S", 0.3)
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
    begun = time.monotonic()
    await gateway.end()
    assert time.monotonic() - begun < 5
    client.socket.transport.abort()
    await client.closed()


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
    await client.close()


@pytest.mark.promise("I10", "protocol.9.gateway_start")
async def test_what_kafka_brought_while_its_consumer_was_away_is_found(
    home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    client = await gateway.client(bob)
    await client.has(group, 1)
    read, away = stream.Stream._read, asyncio.Event()
    fix = stream.Stream._fix_positions

    async def broken(self: stream.Stream, consumer: object) -> None:
        away.set()
        raise KafkaError("broken")

    monkeypatch.setattr(stream.Stream, "_fix_positions", broken)
    monkeypatch.setattr(stream.Stream, "_read", broken)
    await asyncio.wait_for(away.wait(), 10)
    await home.messages(group, ann, 2)
    new = await home.group(ann, bob, publish=False)
    await home.owner.execute("INSERT INTO receipt VALUES ($1, $2, '{[1,2)}', 1, 1, 0)", group, bob)
    await home.line.publish()
    monkeypatch.setattr(stream.Stream, "_read", read)
    monkeypatch.setattr(stream.Stream, "_fix_positions", fix)
    await client.has(group, 1, 2, 3, timeout=15)
    await client.has(new, 1)
    await client.one("receipt", conversation_id=group, user_id=bob, delivered_seq=1, read_seq=1, read_version=0)
    await home.messages(group, ann, 1)
    await home.line.publish()
    await client.has(group, 1, 2, 3, 4, timeout=15)
    await client.close()


@pytest.mark.promise("protocol.3.close_codes")
async def test_postgres_away_at_hello(home: House, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> list[str]:
        raise UnavailableError("the store is away")

    monkeypatch.setattr(following, "conversations_of", away)
    client: Client = await gateway.open()
    await client.say("hello", device_id="phone", token=token(user("ann")))
    assert await client.closed() == 4503
    assert (await client.one("reconnect"))["after_ms"] > 0
