"""Muted and archived: a user's own settings of a conversation, over HTTP and on the socket, on all devices."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from waybill_client import Client, errors

from services.gateway.listing import Wanted, list_conversations
from shared.clock import wire_time
from shared.postgres import open_pool
from tests.databases import Database
from tests.frames import sdk_watched
from tests.gateways import Gateway, House, token, user
from tests.ingest import Answer, Ingest, new_id, running
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

TOMORROW = wire_time(datetime.now(UTC) + timedelta(days=1))
PLAIN = {"muted": False, "muted_until": None, "archived": False}


@pytest.fixture
async def ingest(module_database: Database) -> AsyncIterator[Ingest]:
    async with running(module_database) as made:
        yield made


@pytest.fixture
async def owner(module_database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(module_database.owner_url)
    yield connection
    await connection.close()


async def put(ingest: Ingest, group: str, who: str, **said: Any) -> Answer:
    return await ingest.call("PUT", f"/v1/conversations/{group}/settings", who, json=said)


async def told(ingest: Ingest, group: str, who: str, **said: Any) -> dict[str, Any]:
    """How they are after a change."""
    answer = await put(ingest, group, who, **said)
    assert answer.status == 200, answer
    assert answer.json.pop("conversation_id") == group
    return dict(answer.json)


async def records(owner: asyncpg.Connection, group: str) -> list[dict[str, Any]]:
    rows = await owner.fetch(
        "SELECT type, headers, payload, shard FROM outbox"
        " WHERE conversation_id = $1 AND topic = 'receipts.v1' ORDER BY id",
        group,
    )
    return [{**row, "payload": json.loads(row["payload"])} for row in rows]


@pytest.mark.promise("protocol.6.settings")
async def test_each_is_set_by_itself_and_once(ingest: Ingest, owner: asyncpg.Connection) -> None:
    ann, ben = user("ann"), user("ben")
    group = await ingest.create(ann, ben)
    before = await owner.fetchval("SELECT changed_xid::text::bigint FROM member WHERE user_id = $1", ben)
    assert await told(ingest, group, ben, muted=True) == {**PLAIN, "muted": True}
    assert await told(ingest, group, ben, muted=True) == {**PLAIN, "muted": True}
    assert await told(ingest, group, ben, archived=True) == {**PLAIN, "muted": True, "archived": True}
    day = {"muted": True, "muted_until": TOMORROW, "archived": True}
    assert await told(ingest, group, ben, muted=True, muted_until=TOMORROW) == day
    zone = datetime.fromisoformat(TOMORROW).astimezone().isoformat()
    assert await told(ingest, group, ben, muted=True, muted_until=zone) == day
    assert await told(ingest, group, ben, archived=True, muted=None) == day
    assert await told(ingest, group, ben, muted=True) == {**day, "muted_until": None}
    assert await told(ingest, group, ben, muted=False, archived=False) == PLAIN
    assert await told(ingest, group, ben, muted=False) == PLAIN
    assert await owner.fetchval("SELECT changed_xid::text::bigint FROM member WHERE user_id = $1", ben) > before

    written = await records(owner, group)
    assert len(written) == 5, "what changes nothing writes nothing"
    assert [row["type"] for row in written] == ["waybill.receipt.settings"] * 5
    assert written[0]["headers"] == ["user_id", ben, "kind", "settings"]
    assert written[0]["payload"] == {
        "t": "receipt", "conversation_id": group, "user_id": ben, "delivered_seq": 0, "read_seq": 0, "read_version": 0,
        "kind": "settings", "cause": "set",
    }  # fmt: skip
    shard = await owner.fetchval("SELECT shard FROM conversation WHERE conversation_id = $1", group)
    assert {row["shard"] for row in written} == {shard}
    rows = await owner.fetch("SELECT * FROM transition WHERE conversation_id = $1 ORDER BY at", group)
    settings = [row for row in rows if row["kind"] == "settings"]
    assert [(row["service"], row["cause"], row["user_id"]) for row in settings] == [("ingest", "set", ben)] * 5
    assert json.loads(settings[2]["detail"]) == day
    assert await owner.fetchval("SELECT count(*) FROM member WHERE user_id = $1 AND (muted OR archived)", ann) == 0


@pytest.mark.promise("protocol.6.settings")
async def test_the_record_carries_the_present_marks(ingest: Ingest, owner: asyncpg.Connection) -> None:
    ann = user("ann")
    group = await ingest.create(ann)
    await owner.execute(
        "INSERT INTO receipt (conversation_id, user_id, delivered_seq, read_seq, read_version)"
        " VALUES ($1, $2, 1, 1, 3)",
        group,
        ann,
    )
    await told(ingest, group, ann, archived=True)
    [record] = await records(owner, group)
    marks = {name: record["payload"][name] for name in ("delivered_seq", "read_seq", "read_version")}
    assert marks == {"delivered_seq": 1, "read_seq": 1, "read_version": 3}


@pytest.mark.promise("protocol.6.settings")
async def test_a_time_that_has_passed_is_not_muted(
    ingest: Ingest, owner: asyncpg.Connection, module_database: Database
) -> None:
    ann, ben = user("ann"), user("ben")
    group = await ingest.create(ann, ben)
    await ingest.sent(ann, group)
    assert await told(ingest, group, ben, muted=True, muted_until="2020-01-01T00:00:00Z") == PLAIN
    assert await records(owner, group) == []
    await told(ingest, group, ben, muted=True, muted_until=TOMORROW, archived=True)
    await owner.execute("UPDATE member SET muted_until = now() - interval '1 s' WHERE user_id = $1", ben)
    async with open_pool(module_database.url("gateway"), size=1, name="tests") as pool:
        [listed] = (await list_conversations(pool, [Wanted(ben, "phone", group)])).rows
    assert listed is not None
    assert (listed.muted, listed.archived, listed.unread) == (False, True, 1)
    assert (await ingest.call("GET", "/v1/unread", ben)).json["unread"] == 1
    assert await told(ingest, group, ben, muted=False) == {**PLAIN, "archived": True}
    assert len(await records(owner, group)) == 1
    assert await told(ingest, group, ben, muted=True) == {**PLAIN, "muted": True, "archived": True}


@pytest.mark.promise("protocol.6.settings", "protocol.4.stranger")
async def test_who_may_set_them(ingest: Ingest) -> None:
    ann, ben, cat = user("ann"), user("ben"), user("cat")
    group = await ingest.create(ann, ben)
    stranger, nowhere = await put(ingest, group, cat, muted=True), await put(ingest, new_id(), cat, muted=True)
    assert stranger.status == nowhere.status == 404
    assert stranger.json == nowhere.json
    await ingest.sent(ben, group, type="member", body={"action": "leave"})
    assert await told(ingest, group, ben, archived=True) == {**PLAIN, "archived": True}
    await ingest.sent(ann, group, type="member", body={"action": "add", "user_id": ben})
    assert await told(ingest, group, ben, muted=True) == {**PLAIN, "muted": True, "archived": True}
    path = f"/v1/conversations/{group}/settings"
    said = {"user_id": ben, "muted": False}
    assert (await ingest.call("PUT", path, "shop", scope="service", json=said)).json["muted"] is False
    unknown = await ingest.call("PUT", path, "shop", scope="service", json={"user_id": cat, "muted": True})
    assert (unknown.status, unknown.json["code"]) == (404, "not_found")


async def test_many_at_once_end_as_one_of_them_beside_writers_of_the_same_rows(
    ingest: Ingest, owner: asyncpg.Connection
) -> None:
    """Lock order: the member's row, then the shard, while members come and go and messages flow."""
    ann, ben = user("ann"), user("ben")
    group = await ingest.create(ann, ben)

    async def sets(number: int) -> None:
        for turn in range(10):
            await told(ingest, group, ben, muted=bool((number + turn) % 2), archived=bool(turn % 2))

    async def comes_and_goes() -> None:
        for action in ("remove", "add") * 5:
            await ingest.sent(ann, group, type="member", body={"action": action, "user_id": ben})
            await ingest.sent(ann, group)

    await asyncio.gather(*(sets(number) for number in range(4)), comes_and_goes())
    row = await owner.fetchrow("SELECT * FROM member WHERE conversation_id = $1 AND user_id = $2", group, ben)
    assert row is not None
    written = await owner.fetch(
        "SELECT detail FROM transition WHERE conversation_id = $1 AND kind = 'settings' ORDER BY at", group
    )
    assert len(written) == len(await records(owner, group))
    last = json.loads(written[-1]["detail"])
    assert (row["muted"], row["archived"]) == (last["muted"], last["archived"])


@pytest.mark.promise("protocol.3.settings", "protocol.3.conversation_frame")
async def test_all_devices_of_the_user_hear_of_it_and_nobody_else(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann, ben = user("ann"), user("ben")
    chat = await home.direct(ann, ben)
    other = await home.gateway()
    phone, pad, peer = await gateway.client(ann), await other.client(ann, "pad"), await gateway.client(ben)
    await phone.say("settings", rid="1", conversation_id=chat.upper(), muted=True, muted_until=TOMORROW)
    answer = {"t": "settings", "rid": "1", "conversation_id": chat, "muted": True, "archived": False}
    assert await phone.one("settings") == {**answer, "muted_until": TOMORROW}
    await home.line.publish()
    for device in (phone, pad):
        frame = await device.one("conversation", muted=True)
        assert (frame["conversation_id"], frame["muted_until"], frame["archived"]) == (chat, TOMORROW, False)
    await phone.say("settings", rid="2", conversation_id=chat, muted=False, archived=True)
    assert (await phone.one("settings", rid="2"))["archived"] is True
    await home.line.publish()
    for device in (phone, pad):
        frame = await device.one("conversation", archived=True)
        assert frame["muted"] is False
        assert "muted_until" not in frame
        assert device.all("receipt") == []
    await peer.pong()
    assert len(peer.all("conversation")) == 1
    assert peer.all("receipt") == []
    device = await home.owner.fetchval(
        "SELECT device_id FROM transition WHERE conversation_id = $1 AND kind = 'settings' LIMIT 1", chat
    )
    assert device == "phone"


@pytest.mark.promise("protocol.3.settings", "protocol.3.hello_since")
async def test_who_was_away_is_told_by_since(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann = user("ann")
    quiet, changed = await home.group(ann), await home.group(ann)
    await home.settled()
    pad = await gateway.client(ann, "pad", cursors={})
    since = pad.all("listed")[0]["since"]
    await pad.close()
    phone = await gateway.client(ann)
    await phone.say("settings", rid="1", conversation_id=changed, archived=True)
    await phone.one("settings")
    again = await gateway.client(ann, "pad", since=since)
    assert [frame["conversation_id"] for frame in again.all("conversation")] == [changed]
    assert again.all("conversation")[0]["archived"] is True
    assert quiet


@pytest.mark.promise("I10")
async def test_while_kafka_brings_nothing_the_sweep_tells_of_it(home: House) -> None:
    await home.ingest()
    gateway = await home.gateway(gateway_sweep_s=0.3)
    ann = user("ann")
    group = await home.group(ann)
    phone, pad = await gateway.client(ann), await gateway.client(ann, "pad")
    await phone.say("settings", rid="1", conversation_id=group, muted=True)
    await phone.one("settings")
    await home.line.lose()
    await pad.one("conversation", muted=True, timeout=20)


@pytest.mark.promise("protocol.3.settings", "protocol.4.stranger")
async def test_refusals_on_the_socket(home: House, gateway: Gateway) -> None:
    ann, ben = user("ann"), user("ben")
    group = await home.group(ann)
    client = await gateway.client(ben)
    await client.say("settings", rid="away", conversation_id=group, muted=True)
    assert (await client.one("error", rid="away"))["code"] == "unavailable"
    await home.ingest()
    for rid, id_ in (("stranger", group), ("nowhere", new_id())):
        await client.say("settings", rid=rid, conversation_id=id_, muted=True)
        error = await client.one("error", rid=rid)
        assert (error["code"], error["field"]) == ("not_found", "conversation_id")
    await client.say("settings", rid="empty", conversation_id=group)
    error = await client.one("error", rid="empty")
    assert (error["code"], error["field"]) == ("bad_request", "muted")


async def test_the_sdk_sets_them_and_exposes_them(home: House, gateway: Gateway) -> None:
    await home.ingest()
    ann = user("ann")
    group = await home.group(ann)
    with sdk_watched() as faults:
        async with (
            Client(gateway.url, token(ann), "phone", deliver=False) as phone,
            Client(gateway.url, token(ann), "pad", deliver=False) as pad,
        ):
            await phone.ready()
            await pad.ready()
            assert phone.unread_totals is not None
            assert (phone.unread_totals.unread, phone.unread_totals.muted) == (0, 0)
            at = datetime.fromisoformat(TOMORROW)
            told_ = await phone.set_settings(group, muted=True, muted_until=at, archived=True)
            assert (told_.muted, told_.muted_until, told_.archived) == (True, TOMORROW, True)
            await home.line.publish()
            await until(lambda: pad.conversations[group].archived, timeout=10, what="the other device")
            assert pad.conversations[group].muted_until == TOMORROW
            with pytest.raises(errors.NotFound):
                await phone.set_settings(new_id(), muted=True)
    assert faults == []
