"""What `delete` and `recall` do to every copy that may still be published or looked at, whoever comes first."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from services.relay.erasing import Erasing
from services.relay.metrics import UNVACUUMED
from tests.rows import user
from tests.timeline_copies import copies, park, settle
from tests.timeline_stage import Stage, draft, open_stage
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.databases import Database

SECRET = "the body that is to be forgotten"
EDITED = "the edit that is to be forgotten"


@pytest.fixture
async def stage(module_database: Database) -> AsyncIterator[Stage]:
    async with open_stage(module_database) as found:
        yield found


async def edited_message(stage: Stage, sender: str, group: str) -> None:
    """Seq 2 with two edits, 3 and 4; and 5, which is another message."""
    await stage.sent(sender, group, body={"text": SECRET})
    for _ in range(2):
        await stage.sent(sender, group, type="edit", target_seq=2, body={"text": EDITED})
    await stage.sent(sender, group, body={"text": "another"})


@pytest.mark.promise("protocol.3.delete", "protocol.3.recall")
@pytest.mark.parametrize("type_", ["delete", "recall"])
async def test_copies_lose_their_bodies_with_the_event(stage: Stage, type_: str) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    await park(stage.relay, stage, group, {2: "dead", 3: "failed", 4: "waiting", 5: "waiting"})
    before = await copies(stage, group)
    assert {what for what, frame in before.items() if frame["body"]} == set(before)
    await stage.sent(ann, group, type=type_, target_seq=2)
    after = await copies(stage, group)
    named = {"delete": "deleted_by", "recall": "recalled_by"}[type_]
    bare = before[("letter", 2)] | {"body": None, "edited_by": 4, named: 6}
    assert after == {
        ("letter", 2): bare,
        ("row", 2): bare,
        ("row", 3): before[("row", 3)] | {"body": None},
        ("row", 4): before[("row", 4)] | {"body": None},
        ("row", 5): before[("row", 5)],
    }
    stored = await stage.owner.fetch("SELECT seq, body FROM event WHERE conversation_id = $1 ORDER BY seq", group)
    bodies = [row["seq"] for row in stored if row["body"] is None]
    assert bodies == ([2, 3, 4, 6] if type_ == "delete" else [6]), "a recall keeps them in the store"
    seen = await stage.page(ann, group)
    assert [seq for seq, event in seen.items() if event["body"] is None] == [2, 3, 4, 6]
    assert not any("expired" in event for event in seen.values())


@pytest.mark.parametrize("type_", ["delete", "recall"])
async def test_what_is_parked_or_dies_afterwards_has_none_from_the_start(stage: Stage, type_: str) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    await park(stage.relay, stage, group, {2: "failed", 3: "waiting"})
    await stage.sent(ann, group, type=type_, target_seq=2)
    await park(stage.relay, stage, group, {4: "dead", 5: "dead"})
    await settle(stage, group, {2: "dead", 3: "dead"})
    found = await copies(stage, group)
    assert {what for what, frame in found.items() if frame["body"] is not None} == {("letter", 5), ("row", 5)}
    assert len(found) == 8


@pytest.mark.parametrize("outcome", ["dead", "waiting"])
@pytest.mark.parametrize("type_", ["delete", "recall"])
async def test_who_parks_beside_a_change_waits_for_it(stage: Stage, type_: str, outcome: str) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    async with _open(stage, stage.ingest) as changing:
        change = draft(ann, group, type=type_, target_seq=2)
        await _write(changing, change)
        parking = asyncio.create_task(park(stage.relay, stage, group, {2: outcome, 3: outcome, 5: outcome}))
        await _waiting(stage, 1)
    await parking
    found = await copies(stage, group)
    assert {seq for (_, seq), frame in found.items() if frame["body"] is not None} == {5}


@pytest.mark.parametrize("outcome", ["dead", "waiting"])
@pytest.mark.parametrize("type_", ["delete", "recall"])
async def test_a_change_beside_one_who_parks_waits_for_them(stage: Stage, type_: str, outcome: str) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    async with _open(stage, stage.relay) as parking:
        await park(parking, stage, group, {2: outcome, 3: outcome, 5: outcome})
        changing = asyncio.create_task(stage.sent(ann, group, type=type_, target_seq=2))
        await _waiting(stage, 1)
    await changing
    found = await copies(stage, group)
    assert {seq for (_, seq), frame in found.items() if frame["body"] is not None} == {5}


async def test_parking_and_changing_at_once_in_many_conversations_ends_with_every_copy_bare(
    module_database: Database,
) -> None:
    async with open_stage(module_database, lanes=8) as stage:
        ann = user("ann")
        groups = [await stage.group(ann) for _ in range(24)]
        for group in groups:
            await edited_message(stage, ann, group)

        async def change(some: Sequence[str]) -> None:
            await stage.write(*(draft(ann, group, type="delete", target_seq=2) for group in some))

        async def park_all() -> None:
            for group in reversed(groups):
                await park(stage.relay, stage, group, {2: "dead", 3: "failed", 4: "waiting"})

        await asyncio.gather(park_all(), *(change(groups[at::6]) for at in range(6)))
        for group in groups:
            assert {frame["body"] for frame in (await copies(stage, group)).values()} == {None}


async def test_other_topics_rows_are_left_alone(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    await stage.sent(ann, group, type="delete", target_seq=2)
    await park(stage.relay, stage, group, {5: "dead"}, topic="receipts.v1")
    assert (await copies(stage, group))[("letter", 5)]["body"] == {"text": "another"}


async def test_what_was_sent_is_never_written_again(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    await park(stage.relay, stage, group, {2: "failed"})
    await settle(stage, group, {2: "sent"})
    await stage.sent(ann, group, type="delete", target_seq=2)
    assert (await copies(stage, group))[("row", 2)]["body"] == {"text": SECRET}, "it goes with its partition"


async def test_an_erasure_leaves_a_row_for_good(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await edited_message(stage, ann, group)
    await stage.sent(ann, group, type="recall", target_seq=5)
    await stage.sent(ann, group, type="delete", target_seq=2)
    rows = await stage.owner.fetch(
        "SELECT from_seq, to_seq, events, cause FROM erasure WHERE conversation_id = $1", group
    )
    assert [tuple(row) for row in rows] == [(2, 4, 3, "delete")]
    (noted,) = await stage.transitions(group, "erased")
    assert (noted["cause"], noted["user_id"], noted["from_seq"]) == ("delete", ann, 2)
    assert json.loads(noted["detail"]) == {"by": 7, "bodies": 3}


async def test_old_versions_of_rows_are_vacuumed_away(database: Database) -> None:
    async with open_stage(database) as stage:
        erasing = Erasing(stage.relay, 4.0)
        group = await stage.group("ann")
        await edited_message(stage, "ann", group)
        assert not await erasing.vacuum(), "nothing was erased"
        await stage.sent("ann", group, type="delete", target_seq=2)
        assert not await erasing.vacuum(), "it is not yet time"
        assert UNVACUUMED._value.get() < 1.0
        await stage.owner.execute("UPDATE erasure SET at = at - interval '1 hour'")
        async with _open(stage, stage.ingest) as looking:
            await looking.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await looking.fetchval("SELECT count(*) FROM event")
            await stage.sent("ann", group, type="delete", target_seq=5)
            await stage.owner.execute("UPDATE erasure SET at = at - interval '1 hour'")
            assert await erasing.vacuum(), "of the first one nobody sees the rows any more"
            assert not await erasing.vacuum(), "somebody sees the store as it was before the second one"
            assert UNVACUUMED._value.get() > 3000.0
        assert await erasing.vacuum()
        assert UNVACUUMED._value.get() == 0.0
        assert not await erasing.vacuum()
        await stage.owner.execute("SELECT pg_stat_force_next_flush()")
        dead = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'event'"
        assert await stage.owner.fetchval(dead) == 0


async def test_a_vacuum_beside_another_one_waits_for_its_turn(database: Database) -> None:
    async with open_stage(database) as stage:
        erasing = Erasing(stage.relay, 4.0)
        group = await stage.group("ann")
        await edited_message(stage, "ann", group)
        await stage.sent("ann", group, type="delete", target_seq=2)
        await stage.owner.execute("UPDATE erasure SET at = at - interval '1 hour'")
        async with stage.owner.transaction():
            await stage.owner.execute("LOCK TABLE dead_letter IN SHARE UPDATE EXCLUSIVE MODE")
            assert not await erasing.vacuum()
        assert await erasing.vacuum()


@asynccontextmanager
async def _open(stage: Stage, pool: Any) -> AsyncIterator[Any]:
    """A connection in a transaction that ends with the block. Others write beside it."""
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            yield connection
        except BaseException:
            await transaction.rollback()
            raise
        await transaction.commit()


async def _write(connection: Any, send: Any) -> None:
    """As `Writer` does, in the connection's own transaction."""
    one = send.draft
    row = await connection.fetchrow(
        "SELECT outcome FROM append_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, NULL,"
        " NULL, NULL, true)",
        [one.conversation_id],
        [one.sender_id],
        [one.client_msg_id],
        [one.type],
        [send.digest],
        [None],
        [one.target_seq],
        [False],
        *([[None]] * 4),
        [False],
        *([[None]] * 3),
    )
    assert row["outcome"] == "new"


async def _waiting(stage: Stage, count: int) -> None:
    """Until so many sessions wait for a lock of another one."""
    observer = await asyncpg.connect(stage.database_url)
    try:

        async def waits() -> bool:
            return count == await observer.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND cardinality(pg_blocking_pids(pid)) > 0"
            )

        await until(waits, timeout=5, what="somebody who waits")
    finally:
        await observer.close()
