"""The moderation hook: asked before anything is written, and about nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from aiohttp import web

from tests.databases import Database
from tests.ingest import Ingest, Json, free_port, new_id, running
from tests.waiting import until

Items = list[dict[str, Any]]


class Hook:
    """A hook that refuses texts with `bad` in them, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Items] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Callable[[Items], Awaitable[web.Response]] = self.judge

    async def handle(self, request: web.Request) -> web.Response:
        items = (await request.json())["items"]
        self.asked.append(items)
        await self.gate.wait()
        return await self.answer(items)

    async def judge(self, items: Items) -> web.Response:
        results: list[Json] = [
            {"allow": False, "reason": "not nice"} if "bad" in str(item["body"]) else {"allow": True} for item in items
        ]
        return web.json_response({"results": results})

    @property
    def texts(self) -> list[str]:
        return [item["body"].get("text", "") for items in self.asked for item in items]


@asynccontextmanager
async def moderated(database: Database, **settings: Any) -> AsyncIterator[tuple[Ingest, Hook]]:
    hook, port = Hook(), free_port()
    app = web.Application()
    app.router.add_post("/judge", hook.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        settings = {"moderation_timeout_ms": 3000} | settings
        async with running(database, moderation_url=f"http://127.0.0.1:{port}/judge", **settings) as ingest:
            yield ingest, hook
    finally:
        hook.gate.set()
        await runner.cleanup()


async def _rows(database: Database) -> tuple[int, int, int]:
    connection = await asyncpg.connect(database.owner_url)
    try:
        row = await connection.fetchrow(
            "SELECT (SELECT count(*) FROM event), (SELECT count(*) FROM outbox), "
            "(SELECT max(last_seq) FROM conversation)"
        )
        assert row is not None
        return row[0], row[1], row[2]
    finally:
        await connection.close()


@pytest.mark.promise("I1", "protocol.6.moderation")
async def test_refused_means_nothing_written_or_numbered(database: Database) -> None:
    async with moderated(database) as (ingest, hook):
        group = await ingest.create("ann")
        refused = await ingest.send("ann", group, body={"text": "bad"}, client_msg_id="one")
        assert (refused["status"], refused["error"]) == (422, {"code": "moderated", "message": "not nice"})
        assert await _rows(database) == (1, 1, 1)
        assert hook.asked == [
            [
                {
                    "conversation_id": group,
                    "sender_id": "ann",
                    "type": "message",
                    "body": {"text": "bad"},
                    "client_msg_id": "one",
                }
            ]
        ]
        allowed = await ingest.sent("ann", group, body={"text": "good"}, client_msg_id="one")
        assert allowed["seq"] == 2
        edit = await ingest.send("ann", group, type="edit", target_seq=2, body={"text": "bad"})
        assert edit["error"]["code"] == "moderated"
        assert await _rows(database) == (2, 2, 2)


@pytest.mark.promise("protocol.9.moderation", "protocol.9.order_of_checks")
async def test_only_messages_and_edits_that_would_be_written_are_asked_about(database: Database) -> None:
    async with moderated(database) as (ingest, hook):
        group = await ingest.create("ann", "bob")
        await ingest.sent("ann", group, body={"text": "first"}, client_msg_id="known")
        hook.asked.clear()
        assert (await ingest.send("ann", group, body={"text": "first"}, client_msg_id="known"))["status"] == 200
        reused = await ingest.send("ann", group, body={"text": "bad"}, client_msg_id="known")
        assert reused["error"]["code"] == "client_msg_id_reused"
        assert (await ingest.send("eve", group, body={"text": "bad"}))["error"]["code"] == "not_found"
        for fields in ({"type": "edit", "target_seq": 9}, {"type": "edit", "target_seq": 1}):
            assert (await ingest.send("ann", group, body={"text": "bad"}, **fields))["status"] in (403, 404, 409)
        await ingest.sent("bot", group, scope="service", type="system", body={"text": "bad"})
        await ingest.sent("ann", group, type="conversation", body={"title": "bad"})
        await ingest.sent("ann", group, type="recall", target_seq=2)
        await ingest.sent("bob", group, type="member", body={"action": "leave", "text": "bad"})
        assert hook.asked == []


@pytest.mark.promise("protocol.6.moderation")
async def test_a_refused_item_fails_alone_and_copies_follow_their_first(database: Database) -> None:
    async with moderated(database, ingest_gather_ms=20) as (ingest, _):
        group = await ingest.create("ann")

        def event(client_msg_id: str, text: str) -> Json:
            return {"conversation_id": group, "client_msg_id": client_msg_id, "body": {"text": text}}

        results = await ingest.send_all(
            "ann",
            [
                event("a", "1"),
                event("b", "bad"),
                event("b", "bad"),
                event("b", "2"),
                event("c", "3"),
                event("c", "bad"),
            ],
        )
        codes = [result["status"] for result in results]
        assert codes == [201, 422, 422, 201, 201, 409]
        assert [result["event"]["seq"] for result in results if result["status"] == 201] == [2, 3, 4]


@pytest.mark.promise("protocol.9.order_in")
async def test_a_slow_hook_keeps_the_order_of_arrival(database: Database) -> None:
    async with moderated(database) as (ingest, hook):
        group = await ingest.create("ann")
        hook.gate.clear()
        first = asyncio.create_task(ingest.sent("ann", group, body={"text": "slow"}))
        await until(lambda: hook.asked, timeout=15, what="the hook is asked")
        second = asyncio.create_task(ingest.sent("bot", group, scope="service", type="system"))
        await asyncio.wait([second], timeout=0.2)
        assert not second.done()
        hook.gate.set()
        assert [(await first)["seq"], (await second)["seq"]] == [2, 3]


@pytest.mark.promise("I1")
async def test_no_transaction_is_open_while_the_hook_is_asked(database: Database) -> None:
    async with moderated(database) as (ingest, hook):
        group = await ingest.create("ann")
        hook.gate.clear()
        sending = asyncio.create_task(ingest.sent("ann", group))
        await until(lambda: hook.asked, timeout=15, what="the hook is asked")
        owner = await asyncpg.connect(database.owner_url)
        states = await owner.fetch(
            "SELECT DISTINCT state FROM pg_stat_activity WHERE datname = $1 AND usename = 'waybill_ingest'",
            database.name,
        )
        await owner.close()
        assert [row["state"] for row in states] == ["idle"]
        hook.gate.set()
        await sending


async def _status(answer: web.Response) -> Callable[[Items], Awaitable[web.Response]]:
    async def answers(_: Items) -> web.Response:
        return answer

    return answers


@pytest.mark.promise("protocol.9.moderation", "protocol.4.indefinite")
@pytest.mark.parametrize("when_away", ["closed", "open"])
async def test_a_hook_that_is_away_or_talks_nonsense(database: Database, when_away: str) -> None:
    nonsense = [
        web.Response(status=500),
        web.Response(text="no JSON"),
        web.json_response([]),
        web.json_response({"results": []}),
        web.json_response({"results": [{"allow": "yes"}]}),
        web.json_response({"results": [{"allow": True}, {"allow": True}]}),
        web.Response(status=302, headers={"location": "/judge"}),
    ]
    async with moderated(database, moderation_timeout_ms=300, moderation_when_away=when_away) as (ingest, hook):
        group = await ingest.create("ann")
        statuses = []
        for answer in nonsense:
            hook.answer = await _status(answer)
            statuses.append(await ingest.send("ann", group))
        hook.gate.clear()
        statuses.append(await ingest.send("ann", group))
        if when_away == "open":
            assert [result["status"] for result in statuses] == [201] * 8
            return
        assert {(result["status"], result["error"]["code"]) for result in statuses} == {(503, "unavailable")}
        assert all(result["error"]["retry_after_ms"] > 0 for result in statuses)
        assert await _rows(database) == (1, 1, 1)
        mixed = await ingest.send_all(
            "bot",
            [{"conversation_id": group, "client_msg_id": new_id(), "type": "system", "body": {}}],
            scope="service",
        )
        assert mixed[0]["status"] == 201
