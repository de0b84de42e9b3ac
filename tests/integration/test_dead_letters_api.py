"""The desk over HTTP: the console's own process-wide app on a real store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.console import console
from tests.letters import TOO_LARGE, actions, bury, park, state_of
from tests.relays import conversation, shard_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.console import Console
    from tests.databases import Database

pytest_plugins = ["tests.relay_fixtures"]


@pytest.fixture
async def desk(database: Database) -> AsyncIterator[Console]:
    async with console({}, database.url("console")) as made:
        yield made


async def test_letters_are_listed_page_by_page(desk: Console, owner_db: asyncpg.Connection) -> None:
    made = [await bury(owner_db, number, after_s=number) for number in range(4)]
    sent = await bury(owner_db, state="sent")
    status, first = await desk.ask("GET", "/api/dead?state=dead&limit=3&order=oldest")
    assert status == 200
    assert [letter["dead_id"] for letter in first["letters"]] == made[:3]
    _, second = await desk.ask("GET", f"/api/dead?state=dead&limit=3&order=oldest&after={first['next']}")
    assert ([letter["dead_id"] for letter in second["letters"]], second["next"]) == (made[3:], None)
    _, newest = await desk.ask("GET", f"/api/dead?state=dead&state=sent&conversation={conversation(1)}")
    assert [letter["dead_id"] for letter in newest["letters"]] == [made[1], sent]
    _, of_shard = await desk.ask("GET", f"/api/dead?shard={shard_of(2)}")
    assert [letter["dead_id"] for letter in of_shard["letters"]] == [made[2]]


async def test_a_letter_is_shown_tried_again_and_given_up(desk: Console, owner_db: asyncpg.Connection) -> None:
    one, two = await bury(owner_db, payload=b'{"n": 1.10}'), await bury(owner_db)
    status, shown = await desk.ask("GET", f"/api/dead/{one}")
    assert (status, shown["dead_id"], shown["error"], shown["payload"]) == (200, one, TOO_LARGE, {"n": 1.1})
    assert (await desk.ask("GET", f"/api/dead/{shown['event_id']}"))[1] == shown
    for changed in (True, False):
        assert await desk.ask("POST", f"/api/dead/{one}/retry") == (
            200,
            {"dead_id": one, "state": "retrying", "changed": changed},
        )
    for changed in (True, False):
        assert await desk.ask("POST", f"/api/dead/{two}/discard", json={"reason": "no use"}) == (
            200,
            {"dead_id": two, "state": "discarded", "changed": changed},
        )
    assert await actions(owner_db, one) == [("retry", "ops", None)]
    assert await actions(owner_db, two) == [("discard", "ops", "no use")]


async def test_several_are_tried_again_each_with_its_own_result(desk: Console, owner_db: asyncpg.Connection) -> None:
    one, two = await bury(owner_db), await bury(owner_db, state="sent")
    status, said = await desk.ask("POST", "/api/dead/retry", json={"ids": [two + 1, one, two]})
    assert status == 200
    results = said["results"]
    assert [(r["dead_id"], r["state"], r["changed"], r.get("error", {}).get("code")) for r in results] == [
        (one, "retrying", True, None),
        (two, "sent", False, "conflict"),
        (two + 1, None, False, "not_found"),
    ]


@pytest.mark.promise("protocol.4.problem")
async def test_what_cannot_be_is_a_problem(desk: Console, owner_db: asyncpg.Connection) -> None:
    sent, retrying = await bury(owner_db, state="sent"), await bury(owner_db, state="retrying")
    none = retrying + 1
    for method, path, body, status, code, field in (
        ("GET", f"/api/dead/{none}", None, 404, "not_found", None),
        ("GET", "/api/dead/x", None, 400, "bad_request", "dead_id"),
        ("GET", "/api/dead?state=open", None, 400, "bad_request", "state.0"),
        ("GET", "/api/dead?limit=0", None, 400, "bad_request", "limit"),
        ("GET", "/api/dead?shard=64", None, 400, "bad_request", "shard"),
        ("GET", "/api/dead?after=x", None, 400, "bad_request", "after"),
        ("GET", "/api/dead?conversation=x", None, 400, "bad_request", "conversation"),
        ("POST", f"/api/dead/{none}/retry", None, 404, "not_found", None),
        ("POST", f"/api/dead/{sent}/retry", None, 409, "conflict", None),
        ("POST", "/api/dead/0/retry", None, 400, "bad_request", "dead_id"),
        ("POST", f"/api/dead/{2**63}/retry", None, 400, "bad_request", "dead_id"),
        ("POST", "/api/dead/retry", {}, 400, "bad_request", "ids"),
        ("POST", "/api/dead/retry", {"ids": []}, 400, "bad_request", "ids"),
        ("POST", "/api/dead/retry", {"ids": [1, "x"]}, 400, "bad_request", "ids.1"),
        ("POST", "/api/dead/retry", [], 400, "bad_request", "ids"),
        ("POST", f"/api/dead/{none}/discard", {"reason": "x"}, 404, "not_found", None),
        ("POST", f"/api/dead/{sent}/discard", {"reason": "x"}, 409, "conflict", None),
        ("POST", f"/api/dead/{retrying}/discard", {"reason": "x"}, 409, "conflict", None),
        ("POST", f"/api/dead/{retrying}/discard", {}, 400, "bad_request", "reason"),
        ("POST", f"/api/dead/{retrying}/discard", {"reason": " "}, 400, "bad_request", "reason"),
        ("POST", f"/api/dead/{retrying}/discard", {"reason": "x" * 70_000}, 413, "too_large", None),
        ("POST", "/api/relay/shards/64/resume", None, 400, "bad_request", "shard"),
        ("POST", "/api/relay/shards/1/rewind", {"id": 0}, 400, "bad_request", "id"),
        ("POST", "/api/relay/shards/1/rewind", {"id": 1}, 409, "conflict", "id"),
    ):
        found, said = await desk.ask(method, path, json=body)
        assert (found, said["code"], said.get("field")) == (status, code, field), (path, body, said)
    assert (await desk.ask("POST", "/api/dead/retry", data=b"{"))[1]["field"] == "ids"
    assert [await state_of(owner_db, letter) for letter in (sent, retrying)] == ["sent", "retrying"]


async def test_shards_are_listed_resumed_and_rewound(
    desk: Console, database: Database, owner_db: asyncpg.Connection
) -> None:
    relay = await asyncpg.connect(database.url("relay"))
    try:
        first, last = await park(relay, owner_db, ["failed", "waiting"])
    finally:
        await relay.close()
    shard = shard_of(1)
    await owner_db.execute("UPDATE outbox_shard SET stopped_at = now(), stopped_reason = 'x' WHERE shard = $1", shard)
    status, said = await desk.ask("GET", "/api/relay/shards")
    assert (status, len(said["shards"])) == (200, 64)
    found = said["shards"][shard]
    assert (found["cursor_id"], found["parked"], found["stopped_reason"], found["held"]) == (last, 2, "x", True)
    for changed in (True, False):
        assert await desk.ask("POST", f"/api/relay/shards/{shard}/resume") == (
            200,
            {"shard": shard, "changed": changed},
        )
    assert await desk.ask("POST", f"/api/relay/shards/{shard}/rewind", json={"id": first}) == (
        200,
        {"shard": shard, "id": first, "cursor_before": last, "ids_back": last - first + 1},
    )


async def test_ready_means_that_postgres_answers(desk: Console) -> None:
    async with desk.session.get(f"{desk.private}/readyz") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok", "failing": {}})
