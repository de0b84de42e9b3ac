"""`waybill dead` and `waybill relay` as processes on a real store."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import msgspec
import pytest

from deploy.local import endpoints
from tests.letters import TOO_LARGE, actions, bury, park, state_of
from tests.relays import conversation, shard_of
from tests.unit.deploy.test_endpoints import ENDPOINTS
from tests.waiting import until

if TYPE_CHECKING:
    from tests.databases import Database

pytest_plugins = ["tests.relay_fixtures"]

pytestmark = pytest.mark.long(50)

WAYBILL = Path(sys.executable).with_name("waybill")


@dataclass(frozen=True)
class Done:
    code: int | None
    out: str
    err: str

    @property
    def document(self) -> dict[str, object]:
        """Standard output as the one JSON document that it has to be."""
        found: dict[str, object] = json.loads(self.out)
        return found


@dataclass(frozen=True)
class Commands:
    url: str | None

    async def run(self, *arguments: object) -> Done:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}
        if self.url is not None:
            environment["WAYBILL_POSTGRES_URL"] = self.url
        process = await asyncio.create_subprocess_exec(
            WAYBILL,
            *map(str, arguments),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        return Done(process.returncode, out.decode(), err.decode())


@pytest.fixture
def waybill(database: Database) -> Commands:
    return Commands(database.url("console"))


async def test_list_and_show_print_one_document(waybill: Commands, owner_db: asyncpg.Connection) -> None:
    made = [await bury(owner_db, number, after_s=number) for number in range(3)]
    first = await waybill.run("dead", "list", "--limit", 2, "--json")
    assert (first.code, first.err) == (0, "")
    assert set(first.document) == {"letters", "next"}
    assert [letter["dead_id"] for letter in first.document["letters"]] == made[:0:-1]
    second = await waybill.run("dead", "list", "--limit", 2, "--json", "--after", first.document["next"])
    assert [letter["dead_id"] for letter in second.document["letters"]] == made[:1]
    assert second.document["next"] is None
    one = await waybill.run("dead", "list", "--json", "--only", "dead", "--conversation", conversation(1))
    assert [letter["dead_id"] for letter in one.document["letters"]] == [made[1]]

    shown = await waybill.run("dead", "show", made[0], "--json")
    assert (shown.code, shown.err) == (0, "")
    assert (shown.document["payload"], shown.document["payload_encoding"]) == ({"seq": 7}, "json")
    assert (await waybill.run("dead", "show", shown.document["event_id"], "--json")).document == shown.document

    read = await bury(owner_db, origin="acks.v1")
    of_acks = await waybill.run("dead", "list", "--json", "--origin", "acks.v1")
    assert [letter["dead_id"] for letter in of_acks.document["letters"]] == [read]
    again = await waybill.run("dead", "retry", "--all", "--origin", "acks.v1", "--json")
    assert [result["dead_id"] for result in again.document["results"]] == [read]


async def test_tables_are_for_people(waybill: Commands, owner_db: asyncpg.Connection) -> None:
    assert (await waybill.run("dead", "list")).out == "No dead letters.\n"
    letter = await bury(owner_db, payload=b'{"text":"\x1b[2J hello"}')
    listed = await waybill.run("dead", "list")
    assert (listed.code, listed.err) == (0, "")
    for word in (str(letter), "dead", str(conversation(1)), TOO_LARGE):
        assert word in listed.out
    shown = await waybill.run("dead", "show", letter)
    assert "\x1b" not in shown.out
    assert TOO_LARGE in shown.out


async def test_retry_says_what_it_did(waybill: Commands, owner_db: asyncpg.Connection) -> None:
    letter, sent = await bury(owner_db), await bury(owner_db, state="sent")
    done = await waybill.run("dead", "retry", letter, "--json", "--who", "ada")
    assert (done.code, done.err) == (0, "")
    assert done.document == {"results": [{"dead_id": letter, "state": "retrying", "changed": True}]}
    again = await waybill.run("dead", "retry", letter)
    assert (again.code, again.out) == (
        0,
        f"letter {letter} is being tried again (it was before; nothing is changed)\n",
    )
    assert await actions(owner_db, letter) == [("retry", "ada", None)]

    mixed = await waybill.run("dead", "retry", letter, sent, sent + 1, "--json")
    assert mixed.code == 1
    assert [result.get("error", {}).get("code") for result in mixed.document["results"]] == [
        None,
        "conflict",
        "not_found",
    ]
    assert (
        mixed.err == f"waybill: letter {sent}: it was sent already\nwaybill: letter {sent + 1}: no such dead letter\n"
    )


async def test_all_are_tried_again_up_to_a_limit(waybill: Commands, owner_db: asyncpg.Connection) -> None:
    ids = [await bury(owner_db, after_s=n) for n in range(3)]
    done = await waybill.run("dead", "retry", "--all", "--limit", 2, "--json", "--conversation", conversation(1))
    assert done.code == 0
    assert [result["dead_id"] for result in done.document["results"]] == ids[:2]
    assert (await waybill.run("dead", "retry", "--all")).code == 0
    none = await waybill.run("dead", "retry", "--all", "--json")
    assert (none.code, none.document) == (0, {"results": []})
    assert await actions(owner_db, ids[2]) == [("retry", getpass.getuser(), None)]


@pytest.mark.parametrize(("state", "code"), [("sent", 0), ("dead", 1)])
async def test_retry_waits_for_what_becomes_of_a_letter(
    waybill: Commands, owner_db: asyncpg.Connection, state: str, code: int
) -> None:
    letter = await bury(owner_db)
    waiting = asyncio.create_task(waybill.run("dead", "retry", letter, "--wait", 50, "--json"))

    async def asked() -> bool:
        return await state_of(owner_db, letter) == "retrying"

    await until(asked, timeout=50, what="a letter that is tried again")
    await owner_db.execute("UPDATE dead_letter SET state = $2, error = 'again' WHERE dead_id = $1", letter, state)
    done = await waiting
    (result,) = done.document["results"]
    assert (done.code, result["state"]) == (code, state)
    if code:
        assert result["last_error"] == "again"
        assert done.err == f"waybill: letter {letter} is dead again: again\n"


async def test_a_wait_ends(waybill: Commands, owner_db: asyncpg.Connection) -> None:
    letter = await bury(owner_db)
    done = await waybill.run("dead", "retry", letter, "--wait", 0.1, "--json")
    (result,) = done.document["results"]
    assert (done.code, result["state"], result["error"]["code"]) == (1, "retrying", "timeout")


async def test_discard_keeps_who_and_why(waybill: Commands, owner_db: asyncpg.Connection) -> None:
    letter = await bury(owner_db)
    done = await waybill.run("dead", "discard", letter, "--reason", "a test of ours", "--who", "ada", "--json")
    assert (done.code, done.document) == (0, {"results": [{"dead_id": letter, "state": "discarded", "changed": True}]})
    again = await waybill.run("dead", "discard", letter, "--reason", "another")
    assert (again.code, again.out) == (0, f"letter {letter} is discarded (it was before; nothing is changed)\n")
    assert await actions(owner_db, letter) == [("discard", "ada", "a test of ours")]
    blank = await waybill.run("dead", "discard", letter, "--reason", " ")
    assert (blank.code, blank.out, blank.err) == (1, "", "waybill: reason: expected 1 to 1000 characters\n")


async def test_errors_are_one_line_on_standard_error(waybill: Commands) -> None:
    for arguments, what in (
        (("dead", "show", "1"), "no such dead letter"),
        (("dead", "show", "x"), "dead_id: expected"),
        (("dead", "list", "--only", "open"), "state: expected dead, retrying"),
        (("dead", "list", "--after", "x"), "after: expected"),
        (("dead", "list", "--conversation", "x"), "conversation: expected a UUID"),
        (("relay", "rewind", "5", "1"), "id: shard 5 has published up to id 0 only"),
    ):
        done = await waybill.run(*arguments, "--json")
        assert (done.code, done.out) == (1, ""), arguments
        assert done.err.startswith("waybill: ")
        assert what in done.err
        assert done.err.count("\n") == 1


async def test_a_store_that_is_away_is_an_error() -> None:
    done = await Commands("postgres://nobody@127.0.0.1:1/none").run("dead", "list", "--json")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("waybill: the store is away: ")


async def test_a_running_stack_is_found_by_its_folder(
    database: Database, owner_db: asyncpg.Connection, tmp_path: Path
) -> None:
    # The store of the tests may ask for a password, which a stack of one machine does not: so only the way is tested.
    endpoints.write(tmp_path / endpoints.FILE, msgspec.structs.replace(ENDPOINTS, postgres=database.owner_url))
    letter = await bury(owner_db)
    done = await Commands(None).run("dead", "list", "--json", "--state", tmp_path)
    if done.code == 0:
        assert [found["dead_id"] for found in done.document["letters"]] == [letter]
    else:
        assert "waybill_console" in done.err


async def test_shards_are_listed_resumed_and_rewound(
    waybill: Commands, database: Database, owner_db: asyncpg.Connection
) -> None:
    relay = await asyncpg.connect(database.url("relay"))
    try:
        first, last = await park(relay, owner_db, ["failed", "waiting"])
    finally:
        await relay.close()
    shard = shard_of(1)
    await owner_db.execute("UPDATE outbox_shard SET stopped_at = now(), stopped_reason = 'x' WHERE shard = $1", shard)
    found = (await waybill.run("relay", "shards", "--json")).document["shards"]
    assert len(found) == 64
    assert (found[shard]["cursor_id"], found[shard]["parked"], found[shard]["stopped_reason"]) == (last, 2, "x")
    assert "x (since 20" in (await waybill.run("relay", "shards")).out

    assert (await waybill.run("relay", "resume", shard)).out == f"shard {shard} goes on\n"
    again = await waybill.run("relay", "resume", shard, "--json")
    assert (again.code, again.document) == (0, {"shard": shard, "changed": False})
    back = await waybill.run("relay", "rewind", shard, last)
    assert (back.code, back.out) == (0, f"shard {shard}: the cursor goes back by 1, from {last} to {last - 1}\n")
    further = await waybill.run("relay", "rewind", shard, first, "--json")
    assert further.document == {"shard": shard, "id": first, "cursor_before": last - 1, "ids_back": last - first}
