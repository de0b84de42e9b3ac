"""One client id, one event."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from tests.databases import Database
from tests.ingest import Ingest, Json, running


@pytest_asyncio.fixture
async def ingest(database: Database) -> AsyncIterator[Ingest]:
    async with running(database) as found:
        yield found


async def _count(database: Database, table: str) -> int:
    connection = await asyncpg.connect(database.owner_url)
    try:
        return int(await connection.fetchval(f"SELECT count(*) FROM {table} WHERE seq > 1"))
    finally:
        await connection.close()


@pytest.mark.promise("I2")
async def test_50_concurrent_sends_of_one_id_write_one_event(ingest: Ingest, database: Database) -> None:
    group = await ingest.create("ann")
    results = await asyncio.gather(*(ingest.send("ann", group, client_msg_id="same") for _ in range(50)))
    assert Counter(result["status"] for result in results) == {201: 1, 200: 49}
    told = {(result["event"]["seq"], result["event"]["event_id"], result["event"]["created_at"]) for result in results}
    assert len(told) == 1
    assert all(result["event"]["duplicate"] == (result["status"] == 200) for result in results)
    assert await _count(database, "event") == await _count(database, "outbox") == 1


@pytest.mark.promise("I2")
async def test_copies_in_one_request_follow_their_first(ingest: Ingest, database: Database) -> None:
    group = await ingest.create("ann")

    def event(client_msg_id: str, **fields: object) -> Json:
        return {"conversation_id": group, "client_msg_id": client_msg_id, "body": {"text": "one"}, **fields}

    results = await ingest.send_all(
        "ann",
        [event("a"), event("a"), event("a", body={"text": "two"}), event("b", type="system"), event("b"), event("b")],
    )
    assert [result["status"] for result in results] == [201, 200, 409, 403, 201, 200]
    assert results[1]["event"] == results[0]["event"] | {"duplicate": True}
    assert results[4]["event"]["seq"] == 3
    assert await _count(database, "event") == await _count(database, "outbox") == 2


@pytest.mark.promise("I2")
async def test_two_processes_worth_of_writers_agree_on_one_event(database: Database) -> None:
    async with running(database) as one, running(database) as other:
        group = await one.create("ann")
        for n in range(10):
            sends = [door.send("ann", group, client_msg_id=f"id-{n}") for door in (one, other) for _ in range(4)]
            results = await asyncio.gather(*sends)
            assert Counter(result["status"] for result in results) == {201: 1, 200: 7}
            assert len({result["event"]["event_id"] for result in results}) == 1
    assert await _count(database, "event") == 10


@pytest.mark.promise("I2")
async def test_sameness_is_of_the_json_value_type_and_target(ingest: Ingest) -> None:
    group = await ingest.create("ann")

    async def again(body: str, extra: str = "") -> int:
        text = f'{{"events":[{{"conversation_id":"{group}","client_msg_id":"one","body":{body}{extra}}}]}}'
        answer = await ingest.call("POST", "/v1/events", "ann", data=text.encode())
        return int(answer.json["results"][0]["status"])

    assert await again('{"a":1,"b":["x",{"c":null}]}') == 201
    for same in ('{ "b" : [ "x" , {"c":null} ],\n"a":1 }', '{"\\u0061":1,"b":["\\u0078",{"c":null}]}'):
        assert await again(same) == 200
    assert await again('{"a":1,"b":["x",{"c":null}]}', f',"traceparent":"00-{"a" * 32}-{"b" * 16}-01"') == 200
    for other in (
        '{"a":1.0,"b":["x",{"c":null}]}',
        '{"a":1,"b":[{"c":null},"x"]}',
        '{"a":"1","b":["x",{"c":null}]}',
        "{}",
    ):
        assert await again(other) == 409
    assert await again('{"a":1,"b":["x",{"c":null}]}', ',"type":"edit","target_seq":2') == 409


@pytest.mark.promise("I2")
async def test_a_retry_gets_the_first_result_whatever_has_changed(ingest: Ingest) -> None:
    group = await ingest.create("ann", "bob")
    first = await ingest.sent("bob", group, client_msg_id="one")
    await ingest.sent("bob", group, type="edit", target_seq=2, body={"text": "edited"}, client_msg_id="edit")
    await ingest.sent("ann", group, type="delete", target_seq=2)
    await ingest.sent("ann", group, type="member", body={"action": "remove", "user_id": "bob"})
    again = await ingest.send("bob", group, client_msg_id="one")
    assert (again["status"], again["event"]) == (200, first | {"duplicate": True})
    edit = await ingest.send("bob", group, type="edit", target_seq=2, body={"text": "edited"}, client_msg_id="edit")
    assert (edit["status"], edit["event"]["seq"]) == (200, 3)
    for changed in ({"body": {"text": "other"}}, {"target_seq": 1}):
        event = {"type": "edit", "target_seq": 2, "body": {"text": "edited"}, "client_msg_id": "edit"} | changed
        assert (await ingest.send("bob", group, **event))["error"]["code"] == "client_msg_id_reused"


@pytest.mark.promise("I2")
async def test_the_same_id_is_free_for_another_sender_and_another_conversation(ingest: Ingest) -> None:
    group, other = await ingest.create("ann", "bob"), await ingest.create("ann", "bob")
    for user, where in (("ann", group), ("bob", group), ("ann", other)):
        await ingest.sent(user, where, client_msg_id="one")
