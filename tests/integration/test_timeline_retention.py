"""Bodies erased by age: whose, in which steps, and what readers see of it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from services.console.cli import app
from services.console.retention import policies
from services.console.retention.policies import Policy
from services.relay.erasing import Erasing
from services.relay.metrics import BODIES_EXPIRED
from shared.errors import BadRequestError, NotFoundError
from shared.postgres import Pool, open_pool
from tests.ingest import new_id
from tests.timeline_copies import copies, park
from tests.timeline_stage import Stage, member, open_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.databases import Database

STEP = "SELECT conversations, bodies, is_more FROM expire_bodies($1, $2, '1 hour')"
DAY = 86_400


@pytest.fixture
async def stage(database: Database) -> AsyncIterator[Stage]:
    async with open_stage(database) as found:
        yield found


@pytest.fixture
async def desk(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("console"), size=2, name="tests") as pool:
        yield pool


@pytest.fixture
def erasing(stage: Stage) -> Erasing:
    return Erasing(stage.relay, 604_800.0, pause_s=0.0)


async def bodies(stage: Stage, conversation_id: str) -> list[int]:
    """The seqs that have a body in the store."""
    rows = await stage.owner.fetch(
        "SELECT seq FROM event WHERE conversation_id = $1 AND body IS NOT NULL ORDER BY seq", conversation_id
    )
    return [row["seq"] for row in rows]


async def erasures(stage: Stage, conversation_id: str) -> list[tuple[Any, ...]]:
    rows = await stage.owner.fetch(
        "SELECT from_seq, to_seq, events FROM erasure WHERE conversation_id = $1 AND cause = 'retention'"
        " ORDER BY erasure_id",
        conversation_id,
    )
    return [tuple(row) for row in rows]


async def test_without_a_policy_nothing_is_erased(stage: Stage, erasing: Erasing) -> None:
    group = await stage.group("ann")
    await stage.sent("ann", group)
    await stage.age(group, "100 years")
    assert await erasing.expire() == 0
    assert await bodies(stage, group) == [1, 2]


@pytest.mark.promise("protocol.9.expired")
async def test_what_is_old_loses_its_body_and_nothing_else(stage: Stage, desk: Pool, erasing: Erasing) -> None:
    group = await stage.group("ann", "bob")
    await stage.sent("ann", group, body={"text": "old"})  # 2
    await stage.sent("ann", group, body={"text": "old, and edited lately"})
    await stage.sent("bot", group, scope="service", type="system", body={"notice": 1})
    await stage.sent("ann", group, **member("add", "cid"))
    await stage.sent("ann", group, type="conversation", body={"title": "t"})
    await stage.sent("ann", group, type="edit", target_seq=2, body={"text": "old edit"})  # 7
    await stage.sent("ann", group, body={"text": "recalled"})
    await stage.sent("ann", group, type="recall", target_seq=8)
    await stage.age(group, "31 days")
    await stage.sent("ann", group, type="edit", target_seq=3, body={"text": "young edit"})  # 10
    await stage.sent("ann", group, body={"text": "young"})
    await policies.set_policy(desk, None, 30 * DAY, "ann")
    before = BODIES_EXPIRED._value.get()
    assert await erasing.expire() == 5
    assert BODIES_EXPIRED._value.get() - before == 5
    assert await bodies(stage, group) == [1, 5, 6, 10, 11]
    seen = await stage.page("bob", group)
    assert [seq for seq, event in seen.items() if event.get("expired")] == [2, 4, 7]
    assert {seq for seq, event in seen.items() if event["body"] is None} == {2, 4, 7, 8, 9}
    assert seen[3]["body"] == {"text": "young edit"}
    assert (seen[8]["recalled_by"], seen[2]["edited_by"]) == (9, 7)
    backward = await stage.ingest.fetch("SELECT frame FROM timeline_before($1, '{[1,)}', 12, 20)", group)
    one_by_one = await stage.ingest.fetch(
        "SELECT present_frame(e, '{[1,)}') AS frame FROM event AS e WHERE conversation_id = $1", group
    )
    for rows in (backward, one_by_one):
        frames = {frame.pop("seq"): frame for frame in (json.loads(row["frame"]) for row in rows)}
        assert {seq: {"t": "event", **frame} for seq, frame in seen.items()} == {
            seq: {**frame, "seq": seq} for seq, frame in frames.items()
        }
    assert await erasures(stage, group) == [(2, 8, 5)]
    (noted,) = await stage.transitions(group, "erased")
    assert (noted["cause"], noted["service"], json.loads(noted["detail"])) == ("retention", "relay", {"bodies": 5})
    assert await erasing.expire() == 0


async def test_copies_lose_their_bodies_too(stage: Stage, desk: Pool, erasing: Erasing) -> None:
    group = await stage.group("ann")
    for _ in range(2):
        await stage.sent("ann", group)
    await park(stage.relay, stage, group, {2: "dead", 3: "waiting"})
    await stage.age(group, "2 days")
    await policies.set_policy(desk, None, DAY, "ann")
    assert await erasing.expire() == 2
    found = await copies(stage, group)
    assert {what: (frame["body"], frame["expired"]) for what, frame in found.items()} == {
        ("letter", 2): (None, True),
        ("row", 2): (None, True),
        ("row", 3): (None, True),
    }


async def test_a_repeat_of_an_expired_message_is_still_known(stage: Stage, desk: Pool, erasing: Erasing) -> None:
    group = await stage.group("ann")
    first = await stage.send("ann", group, client_msg_id="one", body={"text": "old"})
    await stage.age(group, "2 days")
    await policies.set_policy(desk, None, DAY, "ann")
    await erasing.expire()
    again = await stage.send("ann", group, client_msg_id="one", body={"text": "old"})
    assert (again.seq, again.duplicate) == (first.seq, True)  # type: ignore[union-attr]
    assert await stage.said("ann", group, client_msg_id="one", body={}) == ("client_msg_id_reused", "client_msg_id")
    await stage.sent("ann", group, type="edit", target_seq=2, body={"text": "new"})
    assert (await stage.page("ann", group))[2]["body"] == {"text": "new"}
    await stage.sent("ann", group, type="delete", target_seq=2)
    assert "expired" not in (await stage.page("ann", group))[2]


async def test_a_conversations_own_policy_goes_before_that_of_all(stage: Stage, desk: Pool, erasing: Erasing) -> None:
    short, long, kept, plain = [await stage.group("ann") for _ in range(4)]
    for group in (short, long, kept, plain):
        await stage.sent("ann", group)
        await stage.age(group, "10 days")
        await stage.sent("ann", group)
        await stage.age(group, "1 day")
    await policies.set_policy(desk, short, 3600, "ann")
    assert await erasing.expire() == 2, "one that has a policy is found without one for all"
    await policies.set_policy(desk, long, 100 * DAY, "ann")
    await policies.set_policy(desk, kept, None, "ann")
    await policies.set_policy(desk, None, 5 * DAY, "ann")
    assert await erasing.expire() == 1
    assert [await bodies(stage, group) for group in (short, long, kept, plain)] == [[1], [1, 2, 3], [1, 2, 3], [1, 3]]
    await policies.clear_policy(desk, long, "ann")
    await policies.set_policy(desk, kept, 9 * DAY, "ann")
    assert await erasing.expire() == 2, "what was passed over is not forgotten"
    assert [await bodies(stage, group) for group in (long, kept)] == [[1, 3], [1, 3]]
    await policies.clear_policy(desk, None, "ann")
    await stage.age(plain, "1 year")
    assert await erasing.expire() == 0


async def test_steps_are_small_and_go_on_where_the_last_one_ended(stage: Stage, desk: Pool) -> None:
    groups = sorted([await stage.group("ann") for _ in range(3)])
    for group in groups:
        for _ in range(7):
            await stage.sent("ann", group)
        await stage.age(group, "2 days")
    await policies.set_policy(desk, None, DAY, "ann")
    told = []
    for _ in range(20):
        row = await stage.relay.fetchrow(STEP, 2, 5)
        assert row is not None
        told.append((row["bodies"], row["is_more"]))
        if not row["is_more"]:
            break
    assert sum(count for count, _ in told) == 21
    assert max(count for count, _ in told) <= 5
    for group in groups:
        spans = await erasures(stage, group)
        assert sum(span[2] for span in spans) == 7
        assert [low for low, _, _ in spans[1:]] == [high + 1 for _, high, _ in spans[:-1]], "nothing is done twice"
    upto = await stage.owner.fetch("SELECT upto FROM retention_progress")
    assert [row["upto"] for row in upto] == [8, 8, 8]
    row = await stage.relay.fetchrow(STEP, 2, 5)
    assert row is not None
    assert tuple(row) == (0, 0, False), "the next round begins in an hour"


async def test_one_relay_at_a_time(stage: Stage, desk: Pool, database: Database) -> None:
    group = await stage.group("ann")
    await stage.sent("ann", group)
    await stage.age(group, "2 days")
    await policies.set_policy(desk, None, DAY, "ann")
    other = await asyncpg.connect(database.url("relay"))
    async with other.transaction():
        assert (await other.fetchrow(STEP, 10, 10))["bodies"] == 1
        assert await stage.relay.fetchrow(STEP, 10, 10) is None
    await other.close()


async def test_a_step_that_was_cut_short_is_done_again(stage: Stage, desk: Pool, database: Database) -> None:
    group = await stage.group("ann")
    await stage.sent("ann", group)
    await stage.age(group, "2 days")
    await policies.set_policy(desk, None, DAY, "ann")
    other = await asyncpg.connect(database.url("relay"))
    await other.execute("BEGIN")
    assert (await other.fetchrow(STEP, 10, 10))["bodies"] == 1
    other.terminate()
    assert await Erasing(stage.relay, 60.0).expire() == 1
    assert await bodies(stage, group) == [1]
    assert await erasures(stage, group) == [(2, 2, 1)]


async def test_beside_deletes_each_body_is_erased_once(stage: Stage, desk: Pool, erasing: Erasing) -> None:
    groups = [await stage.group("ann") for _ in range(6)]
    for group in groups:
        for _ in range(5):
            await stage.sent("ann", group)
        await stage.age(group, "2 days")
    await policies.set_policy(desk, None, DAY, "ann")

    async def delete(group: str) -> None:
        for seq in range(2, 7):
            await stage.sent("ann", group, type="delete", target_seq=seq)

    await asyncio.gather(erasing.expire(), *(delete(group) for group in groups[:3]))
    await erasing.expire()
    counted = await stage.owner.fetchval("SELECT sum(events) FROM erasure")
    assert counted == 30
    for group in groups:
        assert await bodies(stage, group) == [1]


async def test_policies_are_told_as_they_are(stage: Stage, desk: Pool) -> None:
    group = await stage.group("ann")
    assert (await policies.listing(desk)).policies == []
    assert await policies.set_policy(desk, None, 90 * DAY, "ann")
    assert not await policies.set_policy(desk, None, 90 * DAY, "bob"), "it is so already"
    assert await policies.set_policy(desk, group.upper(), None, "bob")
    found = await policies.listing(desk)
    assert [(one.conversation_id, one.age_s, one.set_by) for one in found.policies] == [
        (None, 90.0 * DAY, "ann"),
        (group, None, "bob"),
    ]
    assert isinstance(found.policies[0], Policy)
    assert found.round_ended_at is None
    await Erasing(stage.relay, 60.0).expire()
    assert (await policies.listing(desk)).round_ended_at is not None
    assert await policies.clear_policy(desk, group, "ann")
    assert not await policies.clear_policy(desk, group, "ann")
    noted = await stage.owner.fetch("SELECT cause, detail FROM transition WHERE kind = 'settings' ORDER BY at")
    assert [(row["cause"], json.loads(row["detail"])["who"]) for row in noted] == [
        ("retention", "ann"),
        ("retention", "bob"),
        ("retention_cleared", "ann"),
    ]


def test_the_command(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.console.terminal.configure", lambda *_: None)

    def run(*arguments: str) -> tuple[int, str]:
        with capture_logs():
            done = CliRunner().invoke(
                app, ["retention", *arguments], env={"WAYBILL_POSTGRES_URL": database.url("console")}
            )
        return done.exit_code, done.output.strip()

    assert run("list") == (0, "No policies: nothing is erased.\n\nno round yet")
    assert run("set", "90d", "--who", "ann") == (0, "set to 90d")
    assert run("set", "90d") == (0, "it was 90d before; nothing is changed")
    code, told = run("list", "--json")
    assert code == 0
    assert [(one["age_s"], one["set_by"]) for one in json.loads(told)["policies"]] == [(90 * DAY, "ann")]
    assert re.search(r"all others +90d +ann", run("list")[1])
    for arguments in (("set", "90"), ("set", "1d", "--conversation", new_id()), ("clear", "--conversation", "x")):
        code, told = run(*arguments)
        assert (code, told.partition(":")[0]) == (1, "waybill")
    assert json.loads(run("clear", "--json")[1]) == {"conversation_id": None, "age_s": None, "changed": True}
    assert run("clear") == (0, "there was none; nothing is changed")


@pytest.mark.parametrize(
    ("conversation", "age_s", "who", "field"),
    [("x", 90, "ann", "conversation_id"), (None, 59, "ann", "age"), (None, 1e12, "ann", "age"), (None, 90, "", "who")],
)
async def test_a_policy_that_cannot_be_is_refused(
    desk: Pool, conversation: str | None, age_s: float, who: str, field: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await policies.set_policy(desk, conversation, age_s, who)
    assert refused.value.field == field


async def test_a_policy_of_a_conversation_that_is_not_there(desk: Pool) -> None:
    with pytest.raises(NotFoundError):
        await policies.set_policy(desk, new_id(), 90, "ann")
