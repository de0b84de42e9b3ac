"""Parts of the timeline's migration, run again by themselves: what each leaves to the services that go on meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.timeline_copies import copies, park
from tests.timeline_stage import open_stage

if TYPE_CHECKING:
    from tests.databases import Database

MIGRATION = Path(__file__).parents[2] / "deploy" / "migrations" / "0013_pre_timeline.sql"


def part(with_: str) -> str:
    """The transaction of the migration that holds these words."""
    (found,) = [one for one in MIGRATION.read_text().split("COMMIT;") if with_ in one]
    return f"{found[found.index('BEGIN;') :]}COMMIT;"


async def test_who_writes_members_may_count_them_as_soon_as_there_are_triggers(database: Database) -> None:
    async with open_stage(database) as stage:
        await stage.owner.execute("REVOKE UPDATE (members) ON conversation FROM waybill_ingest")
        await stage.owner.execute(part("CREATE OR REPLACE TRIGGER count_joined"))
        group = await stage.group("ann")
        await stage.member("ann", group, "add", "bob")
        assert await stage.owner.fetchval("SELECT members FROM conversation WHERE conversation_id = $1", group) == 2


async def test_copies_of_what_was_hidden_before_lose_their_bodies(database: Database) -> None:
    async with open_stage(database) as stage:
        group = await stage.group("ann")
        for _ in range(3):
            await stage.sent("ann", group)
        await stage.sent("ann", group, type="edit", target_seq=2, body={"text": "new"})
        await park(stage.relay, stage, group, {2: "dead", 3: "failed", 4: "dead", 5: "waiting"})
        before = await copies(stage, group)
        # As the version before did it.
        await stage.owner.execute("UPDATE event SET recalled_by = 9 WHERE conversation_id = $1 AND seq = 2", group)
        await stage.owner.execute(
            "UPDATE event SET deleted_by = 10, body = NULL WHERE conversation_id = $1 AND seq = 3", group
        )
        await stage.owner.execute(part("-- Copies of what was hidden before this version."))
        after = await copies(stage, group)
        assert {key for key, frame in after.items() if frame["body"] is None} == {
            ("letter", 2),
            ("row", 2),
            ("row", 3),
            ("row", 5),
        }
        assert {key: after[key] for key in (("letter", 4), ("row", 4))} == {
            key: before[key] for key in (("letter", 4), ("row", 4))
        }
