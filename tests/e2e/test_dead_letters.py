"""The walk-through of docs/operations/dead-letters.md on a whole stack: its rows, its commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import asyncpg
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from deploy.local.running import running
from shared.auth import mint
from shared.kafka import PARTITIONS
from tests.relays import all_records
from tests.waiting import until

if TYPE_CHECKING:
    from deploy.local.endpoints import Endpoints

pytestmark = [pytest.mark.promise("protocol.8.dead", "protocol.7.late"), pytest.mark.timeout(400)]

WAYBILL = Path(sys.executable).with_name("waybill")
PAGE = Path(__file__).parents[2] / "docs" / "operations" / "dead-letters.md"
SOON = {"WAYBILL_RELAY_MAX_ATTEMPTS": "2", "WAYBILL_RELAY_RETRY_DELAY_MS": "200"}
TOPIC = "waybill.orders.v1"

LARGE, BEHIND, ODD, LOST = (f"10000000-0000-4000-8000-00000000000{number}" for number in range(1, 5))
SHARD = 3
"""Of LARGE and BEHIND."""


def provoking() -> str:
    """The page's SQL."""
    (found,) = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(found)


class Desk:
    """Runs commands as a user does: the stack is found by its folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}

    async def run(self, *arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
        """The document on standard output, and standard error."""
        process = await asyncio.create_subprocess_exec(
            WAYBILL,
            *map(str, arguments),
            "--json",
            "--state",
            str(self._state),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(90):
            out, err = await process.communicate()
        assert process.returncode == code, (arguments, out, err)
        return json.loads(out) if out else {}, err.decode()

    async def show(self, event_id: str) -> dict[str, Any]:
        return (await self.run("dead", "show", event_id))[0]


def test_the_walk_through(tmp_path: Path) -> None:
    with running(tmp_path, environment=SOON) as stack:
        asyncio.run(walk(stack.endpoints, tmp_path))


async def walk(endpoints: Endpoints, state: Path) -> None:
    desk = Desk(state)
    owner = await asyncpg.connect(endpoints.postgres)
    try:
        await owner.execute(provoking())
        await see(desk, owner)
        await try_again(desk, endpoints)
        await give_up(desk, endpoints)
        await publish_again(desk, endpoints, owner)
    finally:
        await owner.close()


async def see(desk: Desk, owner: asyncpg.Connection) -> None:
    async def all_dead() -> bool:
        return await owner.fetchval("SELECT count(*) FROM dead_letter WHERE state = 'dead' AND origin = 'outbox'") == 3

    await until(all_dead, timeout=60, what="three dead letters")
    page, _ = await desk.run("dead", "list", "--origin", "outbox")
    assert {letter["event_id"]: letter["error"].partition(":")[0] for letter in page["letters"]} == {
        LARGE: "too large",
        ODD: "not serialisable",
        LOST: "there is no topic orders.v1",
    }
    assert page["next"] is None
    for event_id in (LARGE, ODD, LOST):
        letter = await desk.show(event_id)
        assert [attempt["attempt"] for attempt in letter["tries"]] == [1, 2]
        assert {attempt["error"] for attempt in letter["tries"]} == {letter["error"]}
        assert letter["payload_encoding"] == "json"
    assert (await desk.show(LARGE))["payload"] == {"text": "x" * 1_200_000}
    assert (await desk.show(ODD))["headers"] == [["alone", None]]
    shards, _ = await desk.run("relay", "shards")
    assert [shard["parked"] for shard in shards["shards"]] == [0] * 64


async def try_again(desk: Desk, endpoints: Endpoints) -> None:
    lost = await desk.show(LOST)
    said, err = await desk.run("dead", "retry", lost["dead_id"], "--wait", 60, code=1)
    assert said["results"] == [
        {"dead_id": lost["dead_id"], "state": "dead", "changed": True, "last_error": "there is no topic orders.v1"}
    ]
    assert "is dead again" in err
    admin = AIOKafkaAdminClient(bootstrap_servers=endpoints.kafka)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(TOPIC, num_partitions=PARTITIONS, replication_factor=1)])
    finally:
        await admin.close()

    async def sent() -> bool:
        # A relay remembers for a while that a topic was missing.
        letter = await desk.show(LOST)
        if letter["state"] == "dead":
            await desk.run("dead", "retry", "--all", "--event", LOST)
        return bool(letter["state"] == "sent")

    await until(sent, timeout=90, what="a letter that is sent")
    letter = await desk.show(LOST)
    [record] = await all_records(endpoints.kafka, [TOPIC])
    assert letter["place"] == {"topic": "orders.v1", "partition": record.partition, "offset": record.offset}
    headers = {name: value.decode() for name, value in record.headers}
    assert (headers["ce_id"], headers["late"]) == (LOST, "1")
    assert json.loads(record.value) == letter["payload"]
    assert letter["tries"][-1]["error"] is None
    assert {action["action"] for action in letter["actions"]} == {"retry"}
    _, err = await desk.run("dead", "retry", letter["dead_id"], code=1)
    assert "it was sent already" in err


async def give_up(desk: Desk, endpoints: Endpoints) -> None:
    for event_id, reason in ((LARGE, "the sender split it"), (ODD, "a bug of the writer, fixed")):
        dead_id = (await desk.show(event_id))["dead_id"]
        for changed in (True, False):
            said, _ = await desk.run("dead", "discard", dead_id, "--reason", reason, "--who", "ada")
            assert said["results"] == [{"dead_id": dead_id, "state": "discarded", "changed": changed}]
        [action] = (await desk.show(event_id))["actions"]
        assert (action["action"], action["who"], action["reason"]) == ("discard", "ada", reason)
    assert (await desk.run("dead", "list", "--only", "dead", "--origin", "outbox"))[0]["letters"] == []
    token = mint(endpoints.auth_secret, "ops", scope="admin")
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.get(f"{endpoints.console}/api/dead?state=discarded") as answer,
    ):
        assert {letter["event_id"] for letter in (await answer.json())["letters"]} == {LARGE, ODD}


async def publish_again(desk: Desk, endpoints: Endpoints, owner: asyncpg.Connection) -> None:
    async def copies() -> list[int]:
        records = await all_records(endpoints.kafka, ["waybill.events.v1"])
        return [record.offset for record in records if dict(record.headers)["ce_id"].decode() == BEHIND]

    assert len(await copies()) == 1
    row_id = await owner.fetchval("SELECT id FROM outbox WHERE event_id = $1", BEHIND)
    said, _ = await desk.run("relay", "rewind", SHARD, row_id)
    assert (said["cursor_before"], said["ids_back"]) == (row_id, 1)

    async def twice() -> bool:
        return len(await copies()) == 2

    await until(twice, timeout=60, what="the row a second time")
    _, err = await desk.run("relay", "rewind", SHARD, row_id + 1, code=1)
    assert f"has published up to id {row_id} only" in err
    assert (await desk.run("relay", "resume", SHARD))[0] == {"shard": SHARD, "changed": False}
