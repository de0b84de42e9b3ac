"""Ingest as processes: killed, paused and stopped in the middle of a transaction."""

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest
import pytest_asyncio

from shared.kafka import partition_of
from tests.databases import Database
from tests.ingest import Ingest, process, running
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest_asyncio.fixture
async def owner(database: Database) -> "AsyncIterator[asyncpg.Connection]":
    connection = await asyncpg.connect(database.owner_url)
    yield connection
    await connection.close()


async def _hold(owner: asyncpg.Connection, group: str) -> "asyncpg.transaction.Transaction":
    transaction = owner.transaction()
    await transaction.start()
    await owner.execute("SELECT lock_outbox_shards(ARRAY[$1::smallint])", partition_of(group))
    return transaction


async def _waiting(owner: asyncpg.Connection) -> int | None:
    """The backend that has inserted its events and waits for the shard."""
    found: int | None = await owner.fetchval(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return found


@pytest.mark.promise("I1", "protocol.4.indefinite")
@pytest.mark.parametrize("rolls_back", [True, False], ids=["rolls back", "commits"])
async def test_killed_between_insert_and_commit(
    database: Database, owner: asyncpg.Connection, rolls_back: bool
) -> None:
    async with process(database) as first, running(database) as second:
        group = await first.create("ann")
        acknowledged = await first.sent("ann", group, client_msg_id="acknowledged")
        transaction = await _hold(owner, group)
        sending = asyncio.create_task(first.send("ann", group, client_msg_id="in-flight"))
        backend = await until(lambda: _waiting(owner), timeout=15, what="the send waits for its shard")
        first.kill()
        with pytest.raises(Exception):  # noqa: B017, PT011 - how a killed server looks depends on the client
            await sending
        if rolls_back:
            await owner.execute("SELECT pg_terminate_backend($1, 3000)", backend)
        await transaction.rollback()
        retried = await second.send("ann", group, client_msg_id="in-flight")
        assert (retried["status"], retried["event"]["seq"]) == (201 if rolls_back else 200, 3)
        again = await second.send("ann", group, client_msg_id="acknowledged")
        assert again["event"] == acknowledged | {"duplicate": True}
    counts = await owner.fetchrow(
        "SELECT (SELECT count(*) FROM event) AS events, (SELECT count(*) FROM outbox) AS rows"
    )
    assert counts is not None
    assert (counts["events"], counts["rows"]) == (3, 3)


@pytest.mark.promise("I1")
async def test_nothing_is_acknowledged_while_it_can_roll_back(database: Database, owner: asyncpg.Connection) -> None:
    async with running(database) as ingest:
        group = await ingest.create("ann")
        transaction = await _hold(owner, group)
        sending = asyncio.create_task(ingest.send("ann", group))
        backend = await until(lambda: _waiting(owner), timeout=15, what="the send waits for its shard")
        assert not sending.done()
        await owner.execute("SELECT pg_terminate_backend($1, 3000)", backend)
        await transaction.rollback()
        result = await asyncio.wait_for(sending, 15)
        assert (result["status"], result["error"]["code"]) == (503, "unavailable")
        assert await owner.fetchval("SELECT count(*) FROM event") == 1
        assert (await ingest.sent("ann", group))["seq"] == 2


@pytest.mark.promise("I1")
async def test_a_paused_process_does_not_stop_another(database: Database, owner: asyncpg.Connection) -> None:
    async with process(database) as paused, running(database) as other:
        group = await paused.create("ann")
        transaction = await _hold(owner, group)
        sending = asyncio.create_task(paused.send("ann", group, client_msg_id="paused"))
        await until(lambda: _waiting(owner), timeout=15, what="the send waits for its shard")
        paused.pause()
        await transaction.rollback()
        sent = await asyncio.wait_for(other.sent("ann", group), 10)
        assert sent["seq"] == 3
        known = await other.send("ann", group, client_msg_id="paused")
        assert (known["status"], known["event"]["seq"]) == (200, 2)
        sending.cancel()


async def test_sigterm_finishes_what_was_accepted(database: Database, owner: asyncpg.Connection) -> None:
    async with process(database) as ingest:
        group = await ingest.create("ann")
        transaction = await _hold(owner, group)
        sending = asyncio.create_task(ingest.send("ann", group))
        await until(lambda: _waiting(owner), timeout=15, what="the send waits for its shard")
        ingest.process.terminate()
        async with ingest.session.get(f"{ingest.private_url}/readyz") as answer:
            assert answer.status == 503
            assert (await answer.json())["failing"] == {"process": "draining"}
        await transaction.rollback()
        assert (await sending)["status"] == 201
        assert await asyncio.to_thread(ingest.process.wait, 15) == 0


@pytest.mark.promise("protocol.6.health", "protocol.6.metrics")
async def test_private_port(database: Database) -> None:
    async with process(database) as ingest:

        async def get(path: str) -> tuple[int, str]:
            async with ingest.session.get(ingest.private_url + path) as answer:
                return answer.status, await answer.text()

        assert (await get("/healthz"))[0] == 200
        assert (await get("/readyz"))[0] == 200
        metrics = (await get("/metrics"))[1]
        for result in (
            "new",
            "duplicate",
            "bad_request",
            "moderated",
            "unavailable",
            "timeout",
            "client_msg_id_reused",
        ):
            assert f'waybill_sends_total{{result="{result}"}} 0.0' in metrics
        group = await ingest.create("ann")
        for _ in range(2):
            await ingest.send("ann", group, client_msg_id="one")
        await ingest.send("eve", group)
        assert await ingest.metric('waybill_sends_total{result="new"}') == 1
        assert await ingest.metric('waybill_sends_total{result="duplicate"}') == 1
        assert await ingest.metric('waybill_sends_total{result="not_found"}') == 1


async def test_readyz_fails_without_the_schema_and_without_room(database: Database, owner: asyncpg.Connection) -> None:
    async with running(database) as ingest:

        async def failing() -> dict[str, str]:
            async with ingest.session.get(f"{ingest.private_url}/readyz") as answer:
                found: dict[str, str] = (await answer.json())["failing"]
                assert answer.status == (503 if found else 200)
                return found

        assert await failing() == {}
        last = 16 * 2**26
        await owner.execute(f"SELECT setval('outbox_id_seq', {last - 2**24})")
        assert await failing() == {}
        await owner.execute(f"SELECT setval('outbox_id_seq', {last - 2**20})")
        assert "more ids only" in (await failing())["postgres"]
        assert await ingest.metric("waybill_outbox_ids_left") == 2**20 - 1
        await owner.execute("SELECT setval('outbox_id_seq', 100); DROP FUNCTION start_conversation")
        assert await failing() == {"postgres": "the schema is not the one that this version needs"}


@pytest.mark.promise("protocol.4.indefinite")
async def test_a_full_queue_answers_503_with_a_delay(database: Database, owner: asyncpg.Connection) -> None:
    async with running(database, ingest_queue_items=500) as ingest:
        group = await ingest.create("ann")
        transaction = await _hold(owner, group)
        events = [{"conversation_id": group, "client_msg_id": str(n), "body": {}} for n in range(500)]
        sending = asyncio.create_task(ingest.send_all("ann", events))
        await until(lambda: _waiting(owner), timeout=15, what="the sends wait for their shard")
        refused = await _refused(ingest, group)
        assert refused == ("unavailable", True)
        await transaction.rollback()
        assert {result["status"] for result in await sending} == {201}
        assert (await ingest.sent("ann", group))["seq"] == 502


async def _refused(ingest: Ingest, group: str) -> tuple[str, bool]:
    event = {"conversation_id": group, "client_msg_id": "late", "body": {}}
    answer = await ingest.call("POST", "/v1/events", "ann", json={"events": [event]})
    assert answer.status == 503
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.json["code"], 0 < answer.json["retry_after_ms"] <= 1000 * int(answer.headers["retry-after"])


@pytest.mark.promise("protocol.4.indefinite")
async def test_a_send_that_is_not_written_in_time_gets_timeout(database: Database, owner: asyncpg.Connection) -> None:
    async with running(database, ingest_send_timeout_s=0.5) as ingest:
        group = await ingest.create("ann")
        transaction = await _hold(owner, group)
        result = await ingest.send("ann", group, client_msg_id="one")
        assert (result["status"], result["error"]["code"]) == (504, "timeout")
        await transaction.rollback()
        again = await ingest.send("ann", group, client_msg_id="one")
        assert again["status"] in (200, 201)
        assert again["event"]["seq"] == 2
