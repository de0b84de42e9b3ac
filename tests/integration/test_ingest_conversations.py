"""Conversations over HTTP."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from shared.contracts.words import direct_id
from shared.kafka import partition_of
from tests.databases import Database
from tests.ingest import Answer, Ingest, new_id, running


@pytest_asyncio.fixture
async def ingest(database: Database) -> AsyncIterator[Ingest]:
    async with running(database) as found:
        yield found


async def _create(ingest: Ingest, user: str, **body: object) -> Answer:
    return await ingest.call("POST", "/v1/conversations", user, json=body)


@pytest.mark.promise("protocol.3.create", "protocol.6.conversations")
async def test_a_direct_chat_is_one_however_concurrently_it_is_made(ingest: Ingest, database: Database) -> None:
    answers = await asyncio.gather(
        *(
            _create(ingest, user, kind="direct", members=members)
            for _ in range(10)
            for user, members in (("ann", ["bob"]), ("bob", ["ann", "bob"]))
        )
    )
    assert Counter(answer.status for answer in answers) == {201: 1, 200: 19}
    assert {answer.json["conversation_id"] for answer in answers} == {direct_id("bob", "ann")}
    assert all(answer.json["existing"] == (answer.status == 200) for answer in answers)
    connection = await asyncpg.connect(database.owner_url)
    rows = await connection.fetch("SELECT shard, payload FROM outbox")
    await connection.close()
    assert [row["shard"] for row in rows] == [partition_of(direct_id("ann", "bob"))]
    state = (await ingest.call("GET", f"/v1/conversations/{direct_id('ann', 'bob')}", "bob")).json
    assert (state["kind"], state["title"]) == ("direct", None)
    assert {member["role"] for member in state["members"]} == {"member"}


@pytest.mark.promise("protocol.3.create")
@pytest.mark.parametrize(("kind", "members"), [("direct", ["ann", "eve"]), ("group", ["ann", "bob"])])
async def test_what_stands_under_a_direct_chats_id_must_be_that_chat(
    ingest: Ingest, database: Database, kind: str, members: list[str]
) -> None:
    id_ = direct_id("ann", "bob")
    connection = await asyncpg.connect(database.owner_url)
    await connection.execute(
        "SELECT create_conversation($1, $2, $3, NULL, 'joined', 'ann', $4, '{}', '')",
        id_,
        partition_of(id_),
        kind,
        members,
    )
    await connection.close()
    answer = await _create(ingest, "ann", kind="direct", members=["bob"])
    assert (answer.status, answer.json["code"], answer.json["field"]) == (409, "conflict", "conversation_id")


@pytest.mark.promise("protocol.3.create", "protocol.9.creation_event")
async def test_the_creation_event(ingest: Ingest, database: Database) -> None:
    group = await ingest.create("ann", "bob", "bob", "ann", "cid", title="Plans")
    (event,) = (await ingest.page("cid", group))["events"]
    assert event["type"] == "conversation"
    assert (event["seq"], event["sender_id"], event["client_msg_id"]) == (1, "ann", f"create:{group}")
    assert event["body"] == {"action": "create", "kind": "group", "title": "Plans", "members": ["ann", "bob", "cid"]}
    connection = await asyncpg.connect(database.owner_url)
    payload = await connection.fetchval("SELECT payload FROM outbox")
    await connection.close()
    assert json.loads(payload) == {"t": "event", **event}


@pytest.mark.promise("protocol.3.create")
async def test_a_groups_id_is_its_idempotency_key(ingest: Ingest) -> None:
    chosen = str(uuid.uuid4())
    first = await _create(ingest, "ann", kind="group", members=["bob"], conversation_id=chosen.upper())
    assert (first.status, first.json) == (201, {"conversation_id": chosen, "existing": False})
    again = await _create(ingest, "ann", kind="group", members=[], title="other", conversation_id=chosen)
    assert (again.status, again.json) == (200, {"conversation_id": chosen, "existing": True})
    other = await _create(ingest, "bob", kind="group", members=["ann"], conversation_id=chosen)
    assert (other.status, other.json["code"], other.json["field"]) == (409, "conflict", "conversation_id")
    seventh = "0190a0b0-c0d0-7abc-8def-0123456789ab"
    assert (await _create(ingest, "ann", kind="group", members=[], conversation_id=seventh)).status == 201
    assert await ingest.create("ann") != await ingest.create("ann")


@pytest.mark.promise("protocol.6.state", "protocol.9.http")
async def test_state(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob", title="Plans")
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "cid"})
    await ingest.sent("bob", group, type="member", body={"action": "leave"})
    await ingest.sent("ann", group, type="conversation", body={"title": "Other", "more": 1})
    await ingest.sent("ann", group, type="conversation", body={"more": 2})
    last = await ingest.sent("ann", group)
    state = (await ingest.call("GET", f"/v1/conversations/{group.upper()}", "ann")).json
    first = (await ingest.page("ann", group))["events"][0]
    assert state == {
        "conversation_id": group,
        "kind": "group",
        "title": "Other",
        "head": 6,
        "created_at": first["created_at"],
        "updated_at": last["created_at"],
        "members": [
            {"user_id": "ann", "role": "admin", "visible": [[1, None]]},
            {"user_id": "cid", "role": "member", "visible": [[2, None]]},
        ],
    }
    assert (await ingest.call("GET", f"/v1/conversations/{group}", "shop", scope="service")).json == state
    await ingest.sent("ann", group, type="conversation", body={"title": None})
    assert (await ingest.call("GET", f"/v1/conversations/{group}", "ann")).json["title"] is None


async def test_who_creates(ingest: Ingest) -> None:
    for scope in ("service", "gateway"):
        body = {"kind": "group", "members": [], "creator_id": "ann"}
        answer = await ingest.call("POST", "/v1/conversations", "shop", scope=scope, json=body)
        state = (await ingest.call("GET", f"/v1/conversations/{answer.json['conversation_id']}", "ann")).json
        assert state["members"] == [{"user_id": "ann", "role": "admin", "visible": [[1, None]]}]
        del body["creator_id"]
        answer = await ingest.call("POST", "/v1/conversations", "shop", scope=scope, json=body)
        assert (answer.status, answer.json["field"]) == (400, "creator_id")
    foreign = await _create(ingest, "ann", kind="group", members=[], creator_id="bob")
    assert (foreign.status, foreign.json["code"], foreign.json["field"]) == (403, "forbidden", "creator_id")
    assert (await _create(ingest, "ann", kind="group", members=[], creator_id="ann")).status == 201
    for method, path in (("POST", ""), ("GET", f"/{new_id()}"), ("GET", f"/{new_id()}/events?after=0")):
        body = {"kind": "group", "members": []} if method == "POST" else None
        answer = await ingest.call(method, f"/v1/conversations{path}", "root", scope="admin", json=body)
        assert (answer.status, answer.json["code"]) == (403, "forbidden")


async def test_500_members_at_once(ingest: Ingest) -> None:
    group = await ingest.create("ann", *(f"user-{n}" for n in range(500)))
    state = (await ingest.call("GET", f"/v1/conversations/{group}", "user-499")).json
    assert len(state["members"]) == 501
    assert (await ingest.page("user-0", group))["events"][0]["body"]["members"][1] == "user-0"
