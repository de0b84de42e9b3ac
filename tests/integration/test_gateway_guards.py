"""What a gateway does not let anybody do: too much, too large, too slow, from elsewhere, or in its metrics."""

import asyncio
import itertools
import re
import ssl
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidMessage, InvalidStatus
from websockets.frames import Frame as WireFrame
from websockets.frames import Opcode
from websockets.typing import Origin

from services.gateway import main
from services.gateway.connection import Connection
from tests.certificates import self_signed
from tests.gateways import Client, Gateway, House, metric, token, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

_rids = itertools.count()


def send(conversation_id: str) -> dict[str, Any]:
    return {
        "rid": str(next(_rids)),
        "conversation_id": conversation_id,
        "client_msg_id": uuid.uuid4().hex,
        "body": {"text": "x"},
    }


async def answered(client: Client, frames: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Wait for the answers to sends: the rids of those that were sent, and the errors."""
    rids = {frame["rid"] for frame in frames}

    def answers() -> list[dict[str, Any]]:
        return [frame for frame in client.got if frame.get("rid") in rids]

    await until(lambda: len(answers()) == len(rids), timeout=10, what="an answer to each")
    return (
        [frame["rid"] for frame in answers() if frame["t"] == "sent"],
        [frame for frame in answers() if frame["t"] == "error"],
    )


@pytest.mark.promise("protocol.9.defaults", "protocol.4.problem")
async def test_what_is_over_the_rate_is_refused_and_not_written(home: House) -> None:
    await home.ingest()
    gateway = await home.gateway(gateway_sends_per_s=1, gateway_sends_burst=5)
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    client, tablet, other = await gateway.client(ann), await gateway.client(ann, "tablet"), await gateway.client(bob)
    assert client.got[0]["limits"]["sends_per_s"] == 1
    counted = limited()
    frames, of_tablet, of_other = ([send(group) for _ in range(count)] for count in (30, 10, 5))
    begun = time.monotonic()
    for one, said in ((client, frames), (tablet, of_tablet), (other, of_other)):
        for frame in said:
            await one.say("send", **frame)
    sent, errors = await answered(client, frames)
    more_sent, more_errors = await answered(tablet, of_tablet)
    elapsed_s = time.monotonic() - begun
    assert 5 <= len(sent) + len(more_sent) <= 6 + elapsed_s, "a user's devices share a rate"
    refused = errors + more_errors
    assert {(error["code"], 0 < error["retry_after_ms"] <= 1000) for error in refused} == {("rate_limited", True)}
    assert limited() == counted + len(refused)
    # Everybody else goes on, and everything else of this one.
    assert (await answered(other, of_other))[1] == []
    await client.pong()
    assert await home.head(group) == 1 + len(sent) + len(more_sent) + 5
    # Who waits as long as it was told may go on, if not at the first try: what it did is known elsewhere a bit later.
    refused = errors
    for _ in range(3):
        await asyncio.sleep(max(error["retry_after_ms"] for error in refused) / 1000)
        again = [send(group)]
        await client.say("send", **again[0])
        _, refused = await answered(client, again)
        if not refused:
            break
    assert refused == []


def limited() -> float:
    return sum(
        metric("waybill_rate_limited_total", kind="sends", scope=scope) for scope in ("session", "user", "shared")
    )


@pytest.mark.promise("protocol.3.close_codes")
@pytest.mark.parametrize("frame", ['{"t":"ping"}', "junk", b"\x00"], ids=["good", "bad", "binary"])
async def test_who_asks_on_and_on_is_warned_and_then_closed(home: House, frame: str | bytes) -> None:
    gateway = await home.gateway(gateway_frames_per_s=5, gateway_frames_burst=5)
    client = await gateway.client(user("ann"))

    async def flood() -> bool:
        await asyncio.gather(*(client.socket.send(frame) for _ in range(100)), return_exceptions=True)
        await asyncio.sleep(0.02)
        return client.socket.close_code is not None

    await until(flood, timeout=20, what="the end")
    assert await client.closed() == 4429
    refused = client.all("error", code="rate_limited")
    assert len(refused) > 100
    assert all(error["retry_after_ms"] > 0 for error in refused)


@pytest.mark.promise("protocol.3.close_codes")
async def test_a_user_has_so_many_sessions_and_no_more(home: House) -> None:
    gateway = await home.gateway(gateway_user_sessions=2)
    ann = user("ann")

    async def ends(device: str) -> tuple[Client, int | None]:
        client = await gateway.open()
        await client.say("hello", device_id=device, token=token(ann))
        await until(lambda: client.all("listed") or client.socket.close_code, timeout=10, what="an answer")
        return client, client.socket.close_code

    outcomes = await asyncio.gather(*(ends(f"d{n}") for n in range(8)))
    assert sorted(str(code) for _, code in outcomes) == ["4429"] * 6 + ["None"] * 2
    left, stays = [client for client, code in outcomes if code is None]
    await gateway.client(user("bob"))
    # A device that comes back takes its own place.
    device = stays.all("welcome")[0]["device_id"]
    await gateway.client(ann, device)
    assert await stays.closed() == 4409
    assert (await ends("another"))[1] == 4429
    await left.close()

    async def let_in() -> bool:
        return (await ends("another"))[1] is None

    await until(let_in, timeout=10, what="a place")


@pytest.mark.promise("protocol.3.upgrade")
async def test_an_address_has_so_many_connections_and_no_more(home: House) -> None:
    gateway = await home.gateway(gateway_address_connections=2)
    ann = user("ann")
    one, _ = await gateway.client(ann, "one"), await gateway.client(ann, "two")
    with pytest.raises(InvalidStatus) as refused:
        await gateway.open()
    assert refused.value.response.status_code == 429
    assert int(refused.value.response.headers["Retry-After"]) > 0
    await one.close()

    async def let_in() -> bool:
        try:
            await gateway.client(ann, "one")
        except InvalidStatus:
            return False
        return True

    await until(let_in, timeout=10, what="a place")


@pytest.mark.promise("protocol.3.upgrade")
async def test_only_known_origins_may_connect(home: House) -> None:
    gateway = await home.gateway(gateway_origins=("https://chat.example", "http://localhost:3000"))
    for origin in ("https://chat.example", "http://localhost:3000", None):
        client = await gateway.open(origin=None if origin is None else Origin(origin))
        await client.hello(token=token(user("ann")))
    for origin in ("https://evil.example", "https://chat.example.evil.example", "http://chat.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            await gateway.open(origin=Origin(origin))
        assert refused.value.response.status_code == 403


@pytest.mark.promise("protocol.3.hello", "protocol.3.close_codes", "protocol.9.defaults")
async def test_who_says_no_hello_in_time_is_closed(home: House) -> None:
    gateway = await home.gateway(gateway_hello_s=0.3)
    greets, silent = await gateway.client(user("ann")), await gateway.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.gateway_port)
    writer.write(b"GET /v1/socket HTTP/1.1\r\nHost: x\r\n")
    assert await silent.closed(timeout=3) == 4408
    assert await asyncio.wait_for(reader.read(), 3) == b""
    writer.close()
    await greets.pong()


@pytest.mark.promise("protocol.3.frame_size", "protocol.3.close_codes")
async def test_frames_over_the_limit_are_closed_and_what_is_at_it_is_not(home: House) -> None:
    gateway = await home.gateway(gateway_frame_bytes=1024)
    ann = user("ann")
    client = await gateway.client(ann, client="x" * 10_000)
    assert client.got[0]["limits"]["frame_bytes"] == 1024
    await client.socket.send('{"t":"ping","x":"' + "x" * (1024 - 19) + '"}')
    await client.one("pong")
    await client.socket.send('{"t":"ping","x":"' + "x" * (1025 - 19) + '"}')
    assert await client.closed() == 1009
    for size, code in ((1024 * 1024, 4400), (1024 * 1024 + 1, 1009)):
        large = await gateway.open()
        await large.socket.send("x" * size)
        assert await large.closed() == code


HOSTILE = "hostile-3f9c"


@pytest.mark.promise("protocol.9.metric_labels")
async def test_nothing_that_a_client_says_becomes_a_metric_label(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann = user("ann")
    group = await home.group(ann)
    calm = await gateway.client(ann, "calm")
    await calm.say("send", **send(group))
    await calm.one("sent")
    before = await series(gateway)
    name = f"{HOSTILE}.{uuid.uuid4().hex[:6]}"
    for frame in (
        {"t": HOSTILE},
        {"t": 'ping"} 1\n' + HOSTILE, "rid": HOSTILE},
        {"t": "send", "rid": HOSTILE, "conversation_id": HOSTILE, "client_msg_id": HOSTILE, "type": HOSTILE},
        {"t": "send", "rid": "x", "conversation_id": str(uuid.uuid4()), "client_msg_id": HOSTILE, "body": {}},
        {"t": "create", "rid": HOSTILE, "kind": HOSTILE, "members": [HOSTILE]},
        {"t": "watch", "conversation_id": str(uuid.uuid4()), "on": True, HOSTILE: HOSTILE},
        {"t": "presence", "users": [HOSTILE, name]},
        {"t": "ack", "conversation_id": group, "ranges": [[1, 2**62]]},
        {"t": "read", "conversation_id": group, "seq": 2**62},
        {"t": "token", "token": HOSTILE},
    ):
        client = await gateway.client(name, HOSTILE, client=HOSTILE)
        await client.say(**frame)
        if frame["t"] != "token":
            await client.pong()
        await client.socket.close(code=3999, reason=HOSTILE)
    for hello in ({"device_id": HOSTILE}, {"device_id": HOSTILE + "!"}, {"device_id": "d", "token": HOSTILE}):
        client = await gateway.open(user_agent_header=HOSTILE)
        await client.say("hello", **hello)
        await client.closed()
    with pytest.raises(InvalidStatus):
        await gateway.open(subprotocols=[HOSTILE])
    async with aiohttp.ClientSession() as session:
        url = gateway.url.replace("ws:", "http:")
        for method, path in (("GET", "/" + HOSTILE), (HOSTILE.upper(), ""), ("POST", f"?{HOSTILE}={HOSTILE}")):
            async with session.request(method, url + path, headers={HOSTILE: HOSTILE}) as answer:
                assert answer.status >= 400
    await calm.pong()
    after = await series(gateway)
    assert not [one for one in after if HOSTILE in one.lower()]
    # What is new are codes of ours: a set that was known before.
    new = {re.sub(r'"(\d{3,4}|other|[a-z_]+)"', '""', one) for one in after - before}
    assert new <= {
        'waybill_client_errors_total{code=""}',
        'waybill_handshakes_total{status=""}',
        'waybill_sessions_ended_total{code=""}',
        'waybill_sends_total{result=""}',
    }
    assert 'waybill_sessions_ended_total{code="other"}' in after
    assert not any("3999" in one for one in after)


async def series(gateway: Gateway) -> set[str]:
    """Every series of `/metrics`, without those of when something was made, and of ingest's in this process."""
    url = f"http://127.0.0.1:{gateway.settings.gateway_private_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        lines = (await answer.text()).splitlines()
    names = {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}
    return {name for name in names if "_created" not in name and not name.startswith(("waybill_ingest", "http"))}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The gateways' own sides of the clients, in the order in which they came."""
    made: list[Connection] = []

    def connection(*args: Any) -> Connection:
        made.append(Connection(*args))
        return made[-1]

    monkeypatch.setattr(main, "Connection", connection)
    return made


@pytest.mark.promise("protocol.3.pull")
async def test_who_asks_and_does_not_read_costs_no_memory(home: House, connections: list[Connection]) -> None:
    gateway = await home.gateway(gateway_pulls_per_s=0, gateway_send_buffer_bytes=64 * 1024)
    ann = user("ann")
    group = await home.group(ann)
    for _ in range(16):
        await home.write(group, ann, {"x": "y" * 60_000})
    client = await gateway.client(ann, cursors={group: 17})
    (connected,) = connections
    assert connected.user_id == ann
    client.socket.transport.pause_reading()
    for n in range(30):
        await client.say("pull", rid=str(n), conversation_id=group, after=0)
    page_bytes = 17 * 60_100
    await until(lambda: connected.wire.waiting_bytes > 0, timeout=10, what="what it does not read")
    for _ in range(20):
        await asyncio.sleep(0.02)
        assert connected.wire.waiting_bytes < 2 * page_bytes
    client.socket.transport.resume_reading()
    await until(lambda: len(client.all("page")) == 30, timeout=30, what="all pages")
    assert [page["rid"] for page in client.all("page")] == [str(n) for n in range(30)]


async def test_who_reads_no_answer_at_all_is_ended(home: House, connections: list[Connection]) -> None:
    gateway = await home.gateway(gateway_frames_per_s=0)
    client = await gateway.client(user("ann"))
    (connected,) = connections
    dropped = metric("waybill_dropped_total", reason="too_slow")
    client.socket.transport.pause_reading()
    ping = WireFrame(Opcode.TEXT, b'{"t":"ping","rid":"%s"}' % (b"r" * 64)).serialize(mask=True)
    for _ in range(100):
        client.socket.transport.write(ping * 500)
        await asyncio.sleep(0)
        assert connected.wire.waiting_bytes < 3 * 1024 * 1024
    await until(lambda: connected.ended, timeout=10, what="the end")
    assert metric("waybill_dropped_total", reason="too_slow") == dropped + 1
    client.socket.transport.abort()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed one of loopback, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


async def test_tls_by_setting(home: House, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    gateway = await home.gateway(gateway_tls_certificate=chain, gateway_tls_key=key)
    trusting = ssl.create_default_context(cafile=chain)
    ann = user("ann")
    group = await home.group(ann)
    client = await gateway.open(ssl=trusting)
    await client.hello(token=token(ann))
    for _ in range(3):
        await home.write(group, ann, {"x": "y" * 60_000})
    await home.line.publish()
    await client.has(group, 1, 2, 3, 4)
    old = ssl.create_default_context(cafile=chain)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    await (await gateway.open(ssl=old)).hello("old", token=token(ann))
    with pytest.raises(ssl.SSLCertVerificationError):
        await gateway.open(ssl=ssl.create_default_context())
    with pytest.raises(InvalidMessage):
        await connect(gateway.url.replace("wss:", "ws:"))
    await client.pong()
