"""A user's devices on one gateway and on several, with Redis and without: session numbers, revocations, signals."""

import asyncio
import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

import jwt
import pytest
from redis.asyncio import Redis

from services.gateway.opening import Opened, Opener
from shared import hints
from tests.gateways import SECRET, Client, Gateway, House, metric, token, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

NOBODY_LISTENS = "redis://127.0.0.1:1/0"
NEVER_S = 300.0
"""A sweep that no test lives to see."""


@dataclass
class Pair:
    """Two gateways of one house."""

    here: Gateway
    there: Gateway


async def pair(home: House, **settings: Any) -> Pair:
    return Pair(*await asyncio.gather(home.gateway(**settings), home.gateway(**settings)))


async def revoke(
    home: House, user_id: str, *, device_id: str | None = None, jti: str | None = None, hinted: bool = False
) -> None:
    """What `waybill revoke` does; without the hint to gateways, unless told otherwise."""
    before = await home.owner.fetchval(
        "INSERT INTO revocation (user_id, device_id, jti) VALUES ($1, $2, $3)"
        " RETURNING extract(epoch FROM before)::float8",
        user_id,
        device_id,
        jti,
    )
    if hinted:
        hint = hints.Revocation(user_id=user_id, device_id=device_id, jti=jti, before=before)
        async with Redis.from_url(home.redis_url) as redis:
            await hints.announce_revocation(redis, home.topics.prefix, hint)


def jti_of(bearer: str) -> str:
    return str(jwt.decode(bearer, SECRET, algorithms=["HS256"])["jti"])


async def swept(home: House, *gateways: Gateway) -> None:
    """Wait until each of them has looked twice for what only Postgres tells: each closes somebody for it."""
    for _ in range(2):
        decoy = user("decoy")
        clients = [await gateway.client(decoy, f"device{n}") for n, gateway in enumerate(gateways)]
        await revoke(home, decoy)
        assert [await client.closed() for client in clients] == [4401] * len(clients)


@pytest.mark.promise("protocol.3.session_number", "protocol.3.close_codes")
async def test_a_newer_session_of_a_device_replaces_the_older_one(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    older, other = await gateway.client(ann), await gateway.client(ann, "tablet")
    newer = await gateway.client(ann)
    assert await older.closed() == 4409
    for _ in range(3):
        last, newer = newer, await gateway.client(ann)
        assert await last.closed() == 4409
    await home.messages(group, ann, 1)
    await home.line.publish()
    for client in (newer, other):
        await client.has(group, 1, 2)

    async def logged() -> bool:
        rows = await home.owner.fetch(
            "SELECT session_id::text AS id FROM transition WHERE kind = 'session' AND cause = 'replaced'"
            " AND user_id = $1 AND device_id = 'phone'",
            ann,
        )
        return len(rows) == 4 and older.got[0]["session_id"] in {row["id"] for row in rows}

    await until(logged, timeout=10, what="transitions")


@pytest.mark.promise("protocol.3.session_number")
async def test_of_sessions_that_begin_at_once_the_newest_stays(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the older one's number comes later."""
    gateway = await home.gateway(gateway_sweep_s=NEVER_S)
    ann = user("ann")
    opening, numbers = Opener.open, {}

    async def slow(self: Opener, *args: Any) -> Opened:
        opened = await opening(self, *args)
        numbers[args[2]] = opened.number
        if opened.number == 1:
            await asyncio.sleep(0.2)
        return opened

    monkeypatch.setattr(Opener, "open", slow)
    clients = [await gateway.open() for _ in range(4)]
    for client in clients:
        await client.say("hello", device_id="phone", token=token(ann))
    await until(lambda: sum(client.socket.close_code == 4409 for client in clients) == 3, timeout=10, what="three ends")
    (stays,) = (client for client in clients if client.socket.close_code is None)
    await stays.one("listed")
    assert numbers[stays.got[0]["session_id"]] == 4
    await stays.pong()


@pytest.mark.promise("protocol.3.session_number")
@pytest.mark.parametrize(
    "settings",
    [{"gateway_sweep_s": NEVER_S}, {"gateway_sweep_s": 0.2, "redis_url": NOBODY_LISTENS}],
    ids=["told by Redis", "found by the sweep"],
)
async def test_a_newer_session_on_another_gateway_replaces_the_older_one(home: House, settings: dict[str, Any]) -> None:
    two = await pair(home, **settings)
    ann = user("ann")
    older, tablet = await two.here.client(ann), await two.here.client(ann, "tablet")
    newer = await two.there.client(ann)
    assert await older.closed() == 4409
    newest = await two.here.client(ann)
    assert await newer.closed() == 4409
    if "redis_url" in settings:
        await swept(home, two.here, two.there)
    else:
        # A number that is told late, and those of another device and of another user, whose session they end.
        other = user("other")
        decoy = await two.here.client(other)
        async with Redis.from_url(home.redis_url) as redis:
            for told in ([ann, "phone", 2], [ann, "pad", 9], [other, "phone", 9]):
                await redis.publish(f"{home.topics.prefix}:sessions", json.dumps(["x", [told]]))
        assert await decoy.closed() == 4409
    for client in (newest, tablet):
        await client.pong()


@pytest.mark.promise("protocol.3.event_everywhere", "I6", "I7")
async def test_devices_of_a_user_on_two_gateways_get_everything(home: House) -> None:
    two = await pair(home)
    ann, bob = user("ann"), user("bob")
    group, chat = await home.group(ann, bob), await home.direct(ann, bob)
    clients = [
        await two.here.client(ann, "phone"),
        await two.there.client(ann, "tablet"),
        await two.there.client(bob, "phone"),
    ]
    for _ in range(3):
        for conversation_id in (group, chat):
            await home.messages(conversation_id, ann, 5)
        await home.line.publish()
    new = await home.group(bob, ann)
    for client in clients:
        await client.has(group, *range(1, 17))
        await client.has(chat, *range(1, 17))
        await client.has(new, 1)
    await home.mark(chat, ann, held="{[1,9)}")
    await home.line.publish()
    for client in clients:
        await client.one("receipt", conversation_id=chat, user_id=ann, delivered_seq=8)

    async def acked() -> bool:
        acks = [one for one in await home.acks(group) if one["kind"] == "delivered"]
        held = {(one["user_id"], one["device_id"]): 0 for one in acks}
        for one in acks:
            whose = one["user_id"], one["device_id"]
            held[whose] = max(held[whose], *(high for _, high in one["ranges"]))
        return held == {(ann, "phone"): 16, (ann, "tablet"): 16, (bob, "phone"): 16}

    await until(acked, timeout=10, what="each device's acks")


@pytest.mark.promise("protocol.2.token", "protocol.3.close_codes")
async def test_a_revocation_that_is_told_ends_sessions_at_once(home: House) -> None:
    two = await pair(home, gateway_sweep_s=NEVER_S)
    ann, bob = user("ann"), user("bob")
    void = token(ann)
    of_token, phone = await two.here.open(), await two.here.client(ann, "phone")
    await of_token.hello("old", token=void)
    tablet, other = await two.there.client(ann, "tablet"), await two.there.client(bob, "phone")
    await revoke(home, ann, jti=jti_of(void), hinted=True)
    assert await of_token.closed() == 4401
    await revoke(home, ann, device_id="phone", hinted=True)
    assert await phone.closed() == 4401
    for client in (tablet, other):
        await client.pong()
    again = await two.there.open()
    await again.say("hello", device_id="old", token=void)
    assert await again.closed() == 4401
    assert again.all("welcome") == []
    fresh = await two.here.client(ann, "phone")
    await revoke(home, ann, hinted=True)
    for client in (tablet, fresh):
        assert await client.closed() == 4401
    await (await two.here.client(ann, "phone")).pong()


@pytest.mark.promise("protocol.2.token", "I10")
async def test_a_revocation_that_nobody_tells_is_found_by_the_sweep(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await home.gateway(gateway_sweep_s=0.2, redis_url=NOBODY_LISTENS)
    ann, bob, cyd = user("ann"), user("bob"), user("cyd")
    phone, tablet, other = (
        await gateway.client(ann, "phone"),
        await gateway.client(ann, "tablet"),
        await gateway.client(bob),
    )
    await revoke(home, ann, device_id="phone")
    assert await phone.closed() == 4401
    for client in (tablet, other):
        await client.pong()

    # One whose token becomes void, and is found to be, between its number and its place among the sessions.
    opening = Opener.open

    async def late(self: Opener, user_id: str, *args: Any) -> Opened:
        opened = await opening(self, user_id, *args)
        if user_id == cyd:
            await revoke(home, cyd)
            await swept(home, gateway)
        return opened

    monkeypatch.setattr(Opener, "open", late)
    client = await gateway.open()
    await client.say("hello", device_id="phone", token=token(cyd))
    assert await client.closed() == 4401


@pytest.mark.promise("protocol.2.token", "protocol.3.token_frame")
async def test_a_token_frame_with_a_void_token_ends_the_session(home: House) -> None:
    """Also if the gateway was never told of it."""
    ann = user("ann")
    older, void, kept = token(ann), token(ann), token(ann)
    await revoke(home, ann, jti=jti_of(void))
    gateway = await home.gateway(gateway_sweep_s=NEVER_S, redis_url=NOBODY_LISTENS)
    one, other = await gateway.client(ann, "one"), await gateway.client(ann, "other")
    await one.say("token", token=kept)
    await one.pong()
    await one.say("token", token=void)
    assert await one.closed() == 4401
    await revoke(home, ann, device_id="other")
    await other.say("token", token=token(ann))
    await other.pong()
    await other.say("token", token=older)
    assert await other.closed() == 4401


# Signals.


def online(client: Client, user_id: str) -> list[bool | None]:
    return [frame["online"] for frame in client.all("presence", user_id=user_id)]


async def shown(client: Client, user_id: str, *states: bool | None) -> None:
    """Wait until this was told of the user, and nothing else."""
    await until(
        lambda: len(online(client, user_id)) >= len(states),
        timeout=10,
        what=f"{user_id} {states}, told {online(client, user_id)}",
    )
    assert online(client, user_id) == list(states)


@pytest.mark.promise("protocol.3.presence", "I12")
async def test_presence(home: House) -> None:
    two = await pair(home, gateway_presence_grace_s=0.1)
    ann, bob, cyd, eve, dan = (user(name) for name in ("ann", "bob", "cyd", "eve", "dan"))
    group = await home.group(ann, bob, cyd)
    bobs, eves = await two.there.client(bob), await two.here.client(eve)
    anns = await two.here.client(ann)
    await anns.say("presence", users=[bob, cyd, eve, ann, "nobody"])
    await shown(anns, bob, True)
    await shown(anns, ann, True)
    await shown(anns, eve, None)
    await shown(anns, "nobody", None)
    assert anns.all("presence", user_id=eve)[0]["since"] is None
    assert anns.all("presence", user_id=bob)[0]["since"] is not None
    await until(lambda: online(anns, cyd)[-1:] == [False], timeout=10, what="cyd is offline")
    await two.here.client(cyd)
    await until(lambda: online(anns, cyd)[-1:] == [True], timeout=10, what="cyd is online")
    second = await two.here.client(bob, "tablet")
    await bobs.close()
    await second.close()
    await shown(anns, bob, True, False)
    assert online(anns, eve) == [None]

    # Who leaves is a stranger from then on, who comes is none any more.
    await home.member(group, ann, "remove", cyd)
    await home.member(group, ann, "add", eve)
    await home.line.publish()
    await until(lambda: online(anns, cyd)[-1:] == [None], timeout=10, what="cyd is a stranger")
    await until(lambda: online(anns, eve)[-1:] == [True], timeout=10, what="eve is none")

    # A list takes the place of the one before.
    await anns.say("presence", users=[])
    await anns.pong()
    count = len(anns.all("presence"))
    await eves.say("presence", users=[ann])
    await shown(eves, ann, True)
    await two.there.client(bob)
    await two.here.client(dan)
    await anns.close()
    await until(lambda: online(eves, ann)[-1:] == [False], timeout=10, what="ann is offline")
    assert len(anns.all("presence")) == count
    await eves.say("presence", users=["u"] * 201)
    assert (await eves.one("error"))["field"] == "users"


@pytest.mark.promise("protocol.3.typing", "I12")
async def test_typing(home: House) -> None:
    two = await pair(home)
    ann, bob, cyd, eve = user("ann"), user("bob"), user("cyd"), user("eve")
    group = await home.group(ann, bob, cyd)
    types, tablet, near, far, former, stranger = (
        await two.here.client(ann),
        await two.there.client(ann, "tablet"),
        await two.here.client(bob),
        await two.there.client(bob, "tablet"),
        await two.there.client(cyd),
        await two.here.client(eve),
    )
    await home.member(group, ann, "remove", cyd)
    await home.line.publish()
    await former.has(group, 1, 2)
    await types.say("typing", conversation_id=group.upper())
    for client in (near, far):
        assert await client.one("typing") == {"t": "typing", "conversation_id": group, "user_id": ann, "for_ms": 5000}
    await types.say("typing", conversation_id=group)  # too soon
    await far.say("typing", conversation_id=group)
    for client in (types, tablet):
        await client.one("typing", user_id=bob)
    assert [len(client.all("typing")) for client in (near, far, types, tablet)] == [1, 1, 1, 1]
    for client, code in ((former, "not_member"), (stranger, "not_found")):
        await client.say("typing", conversation_id=group)
        assert (await client.one("error"))["code"] == code
        assert client.all("typing") == []
    assert [len(client.all("typing")) for client in (near, far)] == [1, 1]


@pytest.mark.promise("protocol.3.watch", "protocol.5.receipt_goes_to")
async def test_watch(home: House, gateway: Gateway) -> None:
    ann, bob, cyd, eve = user("ann"), user("bob"), user("cyd"), user("eve")
    group = await home.group(ann, bob, cyd)
    await home.messages(group, ann, 20)
    await home.mark(group, bob, held="{[1,3)}", read=2)
    await home.mark(group, ann, held="{[1,2)}")
    await home.line.publish()
    watches, not_, member = await gateway.client(ann), await gateway.client(ann, "tablet"), await gateway.client(cyd)
    await watches.say("watch", conversation_id=group.upper(), on=True)
    first = await watches.one("receipt", user_id=bob)
    assert (first["conversation_id"], first["delivered_seq"], first["read_seq"]) == (group, 2, 2)
    await watches.pong()
    assert len(watches.all("receipt")) == 1  # not the own marks, nor of who has none

    begun = time.monotonic()
    for seq in range(3, 13):
        await home.mark(group, bob, held=f"{{[{seq},{seq + 1})}}")
        await home.mark(group, cyd, read=seq)
        await home.line.publish()
    await watches.one("receipt", user_id=bob, delivered_seq=12)
    await watches.one("receipt", user_id=cyd, read_seq=12)
    most = 2 + int(time.monotonic() - begun)
    for member_id, mark in ((bob, "delivered_seq"), (cyd, "read_seq")):
        marks = [frame[mark] for frame in watches.all("receipt", user_id=member_id)]
        assert len(marks) <= most + (member_id == bob)
        assert marks == sorted(marks)
    await member.one("receipt", user_id=cyd, read_seq=12)  # of itself, as it comes
    assert not_.all("receipt") == member.all("receipt", user_id=bob) == []

    await watches.say("watch", conversation_id=group, on=False)
    await watches.pong()
    count = len(watches.all("receipt"))
    await home.mark(group, bob, held="{[13,14)}")
    await home.mark(group, cyd, read=13)
    await home.line.publish()
    await member.one("receipt", user_id=cyd, read_seq=13)
    await asyncio.sleep(1.1)  # as long as what is folded waits
    assert len(watches.all("receipt")) == count
    stranger = await gateway.client(eve)
    await stranger.say("watch", conversation_id=group, on=True)
    assert (await stranger.one("error"))["code"] == "not_found"


@pytest.mark.promise("protocol.3.watch")
async def test_of_a_large_group_500_receipts_are_told(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    group = await home.group(ann)
    await home.owner.execute(
        "INSERT INTO receipt (conversation_id, user_id, delivered_seq) SELECT $1, 'm' || n, 1"
        " FROM generate_series(1, 600) AS n",
        uuid.UUID(group),
    )
    client = await gateway.client(ann)
    await client.say("watch", conversation_id=group, on=True)
    await client.pong()
    assert len(client.all("receipt", conversation_id=group, delivered_seq=1)) == 500


@pytest.mark.promise("I10", "protocol.3.presence", "protocol.3.typing")
async def test_without_redis_presence_is_unknown_and_all_else_works(home: House) -> None:
    await home.ingest()
    two = await pair(home, redis_url=NOBODY_LISTENS)
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    anns, bobs, far = await two.here.client(ann), await two.here.client(bob), await two.there.client(bob, "tablet")
    assert metric("waybill_redis_up") == 0
    await anns.say("presence", users=[bob, "nobody"])
    await shown(anns, bob, None)
    await shown(anns, "nobody", None)
    await anns.say("typing", conversation_id=group)
    await bobs.one("typing", user_id=ann)
    await anns.say("watch", conversation_id=group, on=True)
    await anns.say(
        "send", rid="s", conversation_id=group, client_msg_id=uuid.uuid4().hex, body={"text": "without Redis"}
    )
    await anns.one("sent", rid="s", seq=2)
    await home.mark(group, bob, held="{[1,2)}")
    await home.line.publish()
    for client in (anns, bobs, far):
        await client.has(group, 1, 2)
    await anns.one("receipt", user_id=bob, delivered_seq=1)
    assert far.all("typing") == []
    replaced = await two.here.client(bob)
    assert await bobs.closed() == 4409
    await replaced.has(group, 2)
    for gateway in (two.here, two.there):
        assert await gateway.readyz() == {"status": "ok", "failing": {}}
