"""What may be written by whom, and what it does to the timeline."""

import asyncio
import json
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from shared.auth import mint
from tests.databases import Database
from tests.ingest import SECRET, Ingest, Json, new_id, running


@pytest_asyncio.fixture
async def ingest(database: Database) -> AsyncIterator[Ingest]:
    async with running(database) as found:
        yield found


@pytest_asyncio.fixture
async def owner(database: Database) -> "AsyncIterator[asyncpg.Connection]":
    connection = await asyncpg.connect(database.owner_url)
    yield connection
    await connection.close()


def code(result: Json) -> tuple[int, str, str | None]:
    return result["status"], result["error"]["code"], result["error"].get("field")


@pytest.mark.promise("I9", "protocol.3.send_types")
async def test_every_type_of_event_is_written_numbered_and_put_into_the_outbox(
    ingest: Ingest, owner: asyncpg.Connection
) -> None:
    group = await ingest.create("ann", "bob", title="Plans")
    await ingest.sent("ann", group, body={"text": "one"})
    await ingest.sent("ann", group, type="edit", target_seq=2, body={"text": "two"})
    await ingest.sent("bob", group, body={"text": "three"})
    await ingest.sent("bob", group, type="recall", target_seq=4)
    await ingest.sent("bob", group, body={"text": "five"})
    await ingest.sent("ann", group, type="delete", target_seq=6)
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "cid"})
    await ingest.sent("ann", group, type="conversation", body={"title": "Other plans"})
    last = await ingest.sent("bot", group, scope="service", type="system", body={"note": 1})
    assert last["seq"] == 10
    rows = await owner.fetch("SELECT seq, type FROM event ORDER BY seq")
    assert [tuple(row) for row in rows] == list(
        enumerate(
            (
                "conversation",
                "message",
                "edit",
                "message",
                "recall",
                "message",
                "delete",
                "member",
                "conversation",
                "system",
            ),
            start=1,
        )
    )
    outbox = await owner.fetch("SELECT seq, type, topic, source, payload FROM outbox ORDER BY id")
    assert [(row["seq"], row["type"], row["topic"], row["source"]) for row in outbox] == [
        (row["seq"], f"waybill.event.{row['type']}", "events.v1", "/waybill/ingest") for row in rows
    ]
    live = json.loads(outbox[1]["payload"])
    assert live["t"] == "event"
    assert live["body"] == {"text": "one"}


@pytest.mark.promise("I9", "protocol.3.edited_by", "protocol.3.delete", "protocol.3.recall", "protocol.9.present_state")
async def test_edit_recall_and_delete_show_in_every_later_read(ingest: Ingest, owner: asyncpg.Connection) -> None:
    group = await ingest.create("ann", "bob")
    for text in ("edited", "recalled", "deleted"):
        await ingest.sent("bob", group, body={"text": text})
    await ingest.sent("bob", group, type="edit", target_seq=2, body={"text": "new"})
    await ingest.sent("bob", group, type="edit", target_seq=4, body={"text": "before it was deleted"})
    await ingest.sent("ann", group, type="recall", target_seq=3)
    await ingest.sent("ann", group, type="delete", target_seq=4)
    shown = {event["seq"]: event for event in (await ingest.page("bob", group))["events"]}
    assert (shown[2]["body"], shown[2]["edited_by"]) == ({"text": "new"}, 5)
    assert (shown[3]["body"], shown[3]["recalled_by"]) == (None, 7)
    assert (shown[4]["body"], shown[4]["edited_by"], shown[4]["deleted_by"]) == (None, 6, 8)
    assert shown[6]["body"] is None
    assert "edited_by" not in shown[3]
    stored = await owner.fetch("SELECT seq FROM event WHERE body IS NULL ORDER BY seq")
    assert [row["seq"] for row in stored] == [4, 6, 7, 8]


@pytest.mark.promise("protocol.3.roles")
async def test_roles(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob", "cid")
    await ingest.sent("bob", group)
    add = {"action": "add", "user_id": "dan"}
    assert code(await ingest.send("bob", group, type="member", body=add)) == (403, "forbidden", None)
    assert code(await ingest.send("bob", group, type="conversation", body={"title": "x"})) == (403, "forbidden", None)
    for action in ("remove", "role"):
        refused = await ingest.send(
            "bob", group, type="member", body={"action": action, "user_id": "cid", "role": "admin"}
        )
        assert code(refused) == (403, "forbidden", None)
    assert code(await ingest.send("cid", group, type="edit", target_seq=2, body={})) == (403, "forbidden", "target_seq")
    assert code(await ingest.send("ann", group, type="edit", target_seq=2, body={})) == (403, "forbidden", "target_seq")
    assert code(await ingest.send("cid", group, type="recall", target_seq=2)) == (403, "forbidden", "target_seq")
    assert code(await ingest.send("cid", group, type="delete", target_seq=2)) == (403, "forbidden", "target_seq")
    assert code(await ingest.send("bob", group, type="system")) == (403, "forbidden", "type")
    await ingest.sent("ann", group, type="recall", target_seq=2)
    await ingest.sent("ann", group, type="member", body=add)
    await ingest.sent("ann", group, type="member", body={"action": "role", "user_id": "bob", "role": "admin"})
    await ingest.sent("bob", group, type="member", body={"action": "remove", "user_id": "dan"})
    await ingest.sent("cid", group, type="member", body={"action": "leave"})


@pytest.mark.promise("protocol.3.roles", "protocol.9.targets")
async def test_conflicts(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob")
    direct = await ingest.create("ann", "bob", kind="direct")

    async def member(user: str, where: str, **body: str) -> tuple[int, str, str | None]:
        return code(await ingest.send(user, where, type="member", body=body))

    assert (await member("ann", group, action="add", user_id="bob"))[:2] == (409, "conflict")
    assert (await member("ann", group, action="remove", user_id="eve"))[:2] == (409, "conflict")
    assert (await member("ann", group, action="role", user_id="eve", role="admin"))[:2] == (409, "conflict")
    assert (await member("ann", group, action="leave"))[:2] == (409, "conflict")
    assert (await member("ann", group, action="remove", user_id="ann"))[:2] == (409, "conflict")
    assert (await member("ann", group, action="role", user_id="ann", role="member"))[:2] == (409, "conflict")
    for body in ({"action": "leave"}, {"action": "add", "user_id": "cid"}, {"action": "remove", "user_id": "bob"}):
        assert (await member("ann", direct, **body))[:2] == (409, "conflict")
    await ingest.sent("ann", group)
    await ingest.sent("ann", group, type="recall", target_seq=2)
    for kind in ("edit", "recall", "delete"):
        extra = {"body": {}} if kind == "edit" else {}
        assert code(await ingest.send("ann", group, type=kind, target_seq=2, **extra)) == (
            409,
            "conflict",
            "target_seq",
        )
        assert code(await ingest.send("ann", group, type=kind, target_seq=1, **extra)) == (
            409,
            "conflict",
            "target_seq",
        )
        assert code(await ingest.send("ann", group, type=kind, target_seq=9, **extra)) == (
            404,
            "not_found",
            "target_seq",
        )
    await ingest.sent("ann", group, type="member", body={"action": "remove", "user_id": "bob"})
    await ingest.sent("ann", group, type="member", body={"action": "leave"})


@pytest.mark.promise("I12", "protocol.4.stranger")
async def test_strangers_and_former_members_write_nothing(ingest: Ingest, owner: asyncpg.Connection) -> None:
    group = await ingest.create("ann", "bob")
    await ingest.sent("ann", group)
    before = await ingest.sent("bob", group, client_msg_id="known")
    await ingest.sent("ann", group, type="member", body={"action": "remove", "user_id": "bob"})
    rows = await owner.fetchval("SELECT count(*) FROM event")
    shapes: list[Json] = [
        {"type": "message"},
        {"type": "system"},
        {"type": "edit", "target_seq": 2, "body": {}},
        {"type": "recall", "target_seq": 2},
        {"type": "delete", "target_seq": 2},
        {"type": "member", "body": {"action": "add", "user_id": "eve"}},
        {"type": "member", "body": {"action": "leave"}},
        {"type": "conversation", "body": {"title": "x"}},
    ]
    for shape in shapes:
        stranger = await ingest.send("eve", group, **shape)
        nowhere = await ingest.send("eve", new_id(), **shape)
        assert code(stranger) == code(nowhere) == (404, "not_found", "conversation_id")
        assert stranger == nowhere
        assert code(await ingest.send("bob", group, **shape)) == (403, "not_member", "conversation_id")
    assert await owner.fetchval("SELECT count(*) FROM event") == rows
    again = await ingest.send("bob", group, client_msg_id="known")
    assert (again["status"], again["event"]) == (200, before | {"duplicate": True})


@pytest.mark.promise("I12", "protocol.6.page", "protocol.9.former_members", "protocol.9.visible")
async def test_reads_stay_within_what_was_visible(ingest: Ingest) -> None:
    group = await ingest.create("ann")
    await ingest.sent("ann", group)
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "bob"})
    await ingest.sent("ann", group, body={"text": "four"})
    await ingest.sent("ann", group, type="member", body={"action": "remove", "user_id": "bob"})
    await ingest.sent("ann", group, body={"text": "six"})
    page = await ingest.page("bob", group)
    assert [event["seq"] for event in page["events"]] == [3, 4, 5]
    assert (page["next"], page["head"], page["complete"]) == (5, 5, True)
    answer = await ingest.call("GET", f"/v1/conversations/{group}", "bob")
    assert (answer.status, answer.json["code"]) == (403, "not_member")
    for path in (f"/v1/conversations/{group}", f"/v1/conversations/{group}/events?after=0"):
        stranger = await ingest.call("GET", path, "eve")
        nowhere = await ingest.call("GET", path.replace(group, new_id()), "eve")
        assert stranger.status == nowhere.status == 404
        assert stranger.json == nowhere.json
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "bob"})
    page = await ingest.page("bob", group, after=3, limit=2)
    assert [event["seq"] for event in page["events"]] == [4, 5]
    assert (page["next"], page["head"], page["complete"]) == (6, 7, False)
    edit = await ingest.send("bob", group, type="recall", target_seq=6)
    assert code(edit) == (404, "not_found", "target_seq")


async def test_history_all_opens_the_timeline_from_its_beginning(ingest: Ingest) -> None:
    group = await ingest.create("ann", history="all")
    await ingest.sent("ann", group)
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "bob"})
    assert [event["seq"] for event in (await ingest.page("bob", group))["events"]] == [1, 2, 3]
    await ingest.sent("bob", group, type="member", body={"action": "leave"})
    await ingest.sent("ann", group)
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "bob"})
    assert [event["seq"] for event in (await ingest.page("bob", group))["events"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.promise("protocol.9.order_of_checks")
async def test_order_of_checks(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob")
    await ingest.sent("bob", group, client_msg_id="known")
    # Shape before who speaks, who speaks before the known id, the known id before membership, rights and target.
    assert code(await ingest.send("ann", group, sender_id="bob", target_seq=2)) == (400, "bad_request", "target_seq")
    foreign = await ingest.send("ann", group, sender_id="bob", client_msg_id="known")
    assert code(foreign) == (403, "forbidden", "sender_id")
    reused = await ingest.send("bob", group, client_msg_id="known", type="edit", target_seq=99, body={})
    assert code(reused) == (409, "client_msg_id_reused", "client_msg_id")
    await ingest.sent("ann", group, type="member", body={"action": "remove", "user_id": "bob"})
    assert (await ingest.send("bob", group, client_msg_id="known"))["status"] == 200
    # Membership before rights, the target before what it is.
    assert code(await ingest.send("bob", group, type="system"))[1] == "not_member"
    assert code(await ingest.send("eve", group, type="edit", target_seq=99, body={}))[1:] == (
        "not_found",
        "conversation_id",
    )
    assert code(await ingest.send("ann", group, type="edit", target_seq=99, body={}))[1:] == ("not_found", "target_seq")


@pytest.mark.promise("protocol.2.scopes", "protocol.9.http")
async def test_who_speaks_for_whom(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob")
    as_bob = await ingest.sent("shop", group, scope="service", sender_id="bob")
    page = await ingest.page("shop", group, scope="service")
    assert (as_bob["seq"], page["events"][1]["sender_id"]) == (2, "bob")
    await ingest.sent("shop", group, scope="service", type="system")
    await ingest.sent("shop", group, scope="service", type="system", sender_id="eve")
    assert [event["sender_id"] for event in (await ingest.page("ann", group, after=2))["events"]] == ["shop", "eve"]
    assert code(await ingest.send("shop", group, scope="service")) == (400, "bad_request", "sender_id")
    assert code(await ingest.send("shop", group, scope="service", sender_id="eve"))[:2] == (403, "not_member")
    assert code(await ingest.send("shop", new_id(), scope="service", type="system"))[:2] == (404, "not_found")
    assert code(await ingest.send("gw", group, scope="gateway")) == (400, "bad_request", "sender_id")
    assert code(await ingest.send("gw", group, scope="gateway", type="system", sender_id="ann"))[:2] == (
        403,
        "forbidden",
    )
    assert code(await ingest.send("gw", group, scope="gateway", sender_id="eve"))[:2] == (404, "not_found")
    assert (await ingest.send("gw", group, scope="gateway", sender_id="bob"))["status"] == 201
    assert code(await ingest.send("root", group, scope="admin"))[:2] == (403, "forbidden")
    assert code(await ingest.send("ann", group, sender_id="bob")) == (403, "forbidden", "sender_id")
    assert (await ingest.send("ann", group, sender_id="ann"))["status"] == 201


@pytest.mark.promise("protocol.6.events")
async def test_two_bad_items_among_500_leave_498_written(ingest: Ingest, owner: asyncpg.Connection) -> None:
    group = await ingest.create("ann")
    events: list[Json] = [{"conversation_id": group, "client_msg_id": new_id(), "body": {"n": n}} for n in range(500)]
    events[100]["body"] = {"nul": "\0"}
    events[300]["conversation_id"] = new_id()
    results = await ingest.send_all("ann", events)
    assert code(results[100]) == (400, "bad_request", "body")
    assert code(results[300]) == (404, "not_found", "conversation_id")
    written = [result["event"]["seq"] for n, result in enumerate(results) if n not in (100, 300)]
    assert written == list(range(2, 500))
    assert await owner.fetchval("SELECT last_seq FROM conversation") == 499
    events.append(events[0])
    answer = await ingest.call("POST", "/v1/events", "ann", json={"events": events})
    assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "bad_request", "events")
    assert await ingest.send_all("ann", []) == []


@pytest.mark.promise("protocol.1.body_value")
async def test_a_body_comes_back_as_the_same_json_value(ingest: Ingest, owner: asyncpg.Connection) -> None:
    group = await ingest.create("ann")
    body = '{ "z": 1.0, "a": [1e400, -0, 12345678901234567890.10], "text": "\\u00e9\\ud83d\\ude00é\\/" , "":null}'
    text = f'{{"events":[{{"conversation_id":"{group.upper()}","client_msg_id":"one","body":{body}}}]}}'
    answer = await ingest.call("POST", "/v1/events", "ann", data=text.encode())
    assert answer.json["results"][0]["event"]["conversation_id"] == group
    token = {"authorization": f"Bearer {mint(SECRET, 'ann')}"}
    async with ingest.session.get(f"{ingest.url}/v1/conversations/{group}/events?after=1", headers=token) as page:
        assert f'"body":{body}'.encode() in await page.read()
    assert f'"body":{body}'.encode() in await owner.fetchval("SELECT payload FROM outbox WHERE seq = 2")


async def test_traceparent_goes_into_the_outbox(ingest: Ingest, owner: asyncpg.Connection) -> None:
    group = await ingest.create("ann")
    own, of_request = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-01"
    events = [
        {"conversation_id": group, "client_msg_id": "one", "body": {}, "traceparent": own},
        {"conversation_id": group, "client_msg_id": "two", "body": {}},
    ]
    await ingest.call("POST", "/v1/events", "ann", json={"events": events}, headers={"traceparent": of_request})
    await ingest.call(
        "POST", "/v1/events", "ann", json={"events": [events[1] | {"client_msg_id": "x"}]}, headers={"traceparent": "?"}
    )
    rows = await owner.fetch("SELECT headers FROM outbox WHERE seq > 1 ORDER BY id")
    assert [row["headers"] for row in rows] == [["traceparent", own], ["traceparent", of_request], []]


@pytest.mark.promise("protocol.9.order_in")
async def test_one_connection_sends_commit_in_the_order_of_arrival(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob")
    events: list[Json] = []
    for n in range(60):
        kind: Json = {"body": {"n": n}} if n % 3 else {"type": "conversation", "body": {"title": str(n)}}
        events.append({"conversation_id": group, "client_msg_id": str(n), **kind})
    results = await ingest.send_all("ann", events)
    assert [result["event"]["seq"] for result in results] == list(range(2, 62))


async def test_many_requests_at_once_share_transactions(ingest: Ingest, owner: asyncpg.Connection) -> None:
    groups = await asyncio.gather(*(ingest.create("ann") for _ in range(20)))
    before = await owner.fetchval("SELECT count(DISTINCT xmin::text) FROM event")
    await asyncio.gather(*(ingest.sent("ann", groups[n % 20]) for n in range(200)))
    assert await owner.fetchval("SELECT count(DISTINCT xmin::text) FROM event") - before < 200
    assert await owner.fetchval("SELECT sum(last_seq) FROM conversation") == 220
