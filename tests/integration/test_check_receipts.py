"""`waybill check receipts` and `check counts`: damage made by SQL is told by kind, mended, and gone."""

import asyncio
import json
import os
import random
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.console.audit import counts, marks
from services.console.audit.findings import Finding, Report, readable
from services.console.audit.rules import NOTED, Difference, Stored, differences, mends, repaired
from services.receipts.fold import Held, Mark
from services.receipts.store import Store
from shared.postgres import Pool, open_pool, to_multirange
from shared.ranges import OPEN, RangeSet
from tests.databases import Database
from tests.integration import receipts_stage as stage
from tests.integration.test_receipts_store import TOPIC, Log
from tests.unit.receipts.histories import HEAD, VISIBLE, batched

WAYBILL = Path(sys.executable).with_name("waybill")

DEVICES = {"phone": RangeSet([(1, 4), (8, 9)]), "laptop": RangeSet([(4, 6)])}


@asynccontextmanager
async def pools(database: Database) -> AsyncIterator[tuple[Pool, Pool]]:
    """The owner's, and the console's."""
    async with (
        open_pool(database.owner_url, size=1, name="test") as owner,
        open_pool(database.url("console"), size=1, name="test") as console,
    ):
        yield owner, console


async def store(owner: Pool, stored: Stored, user: str = "anna") -> str:
    """A conversation with these marks of one user, as no service would write them; its id."""
    id_ = str(uuid.uuid4())
    await stage.seed(owner, id_, stored.head or 1, {user: stored.visible})
    if not stored.head:
        await owner.execute("DELETE FROM conversation WHERE conversation_id = $1", id_)
    await owner.execute(
        "INSERT INTO receipt (conversation_id, user_id, delivered, delivered_seq, read_version, read_seq)"
        " VALUES ($1, $2, $3::text::int8multirange, $4, $5, $6)",
        id_,
        user,
        to_multirange(stored.delivered),
        stored.delivered_seq,
        *stored.read,
    )
    for device, held in stored.devices.items():
        await owner.execute(
            "INSERT INTO device_cursor VALUES ($1, $2, $3, $4::text::int8multirange)",
            id_,
            user,
            device,
            to_multirange(held),
        )
    return id_


async def stored_now(owner: Pool, id_: str, before: Stored, user: str = "anna") -> Stored | None:
    """What is stored; None if nothing is."""
    row = await owner.fetchrow("SELECT * FROM receipt WHERE conversation_id = $1 AND user_id = $2", id_, user)
    cursors = await owner.fetch("SELECT * FROM device_cursor WHERE conversation_id = $1 AND user_id = $2", id_, user)
    if row is None:
        assert not cursors
        return None
    return Stored(
        before.visible,
        before.head,
        {cursor["device_id"]: stage.from_multirange(cursor["delivered"]) for cursor in cursors},
        stage.from_multirange(row["delivered"]),
        row["delivered_seq"],
        (row["read_version"], row["read_seq"]),
    )


async def audit(console: Pool, id_: str | None, *, repair: bool = False, lower: bool = False) -> Report:
    told: list[Finding] = []
    how = marks.Repair("ops", repair, lower)
    report = await marks.check(console, marks.scope_of(id_, None), how, told.append)
    assert report.found == told
    return report


def finding(id_: str, one: Difference, *, mended: bool, user: str = "anna") -> Finding:
    """A difference by the pure rule as the audit tells it."""
    found, wanted = (None if number is None else str(number) for number in (one.found, one.wanted))
    if one.found is None:
        ranges = readable(to_multirange(one.seqs))
        found, wanted = (None, ranges) if one.kind == "union_behind" else (ranges, None)
    return Finding(
        kind=one.kind,
        conversation_id=id_,
        user_id=user,
        device_id=one.device_id,
        found=found,
        wanted=wanted,
        mended=mended,
    )


GOOD = Stored(RangeSet([(1, OPEN)]), 10, DEVICES, RangeSet([(1, 6), (8, 9)]), 6, (0, 9))
LEFT = RangeSet([(1, 6)])

DAMAGE = {
    "union_behind": (Stored(GOOD.visible, 10, DEVICES, RangeSet([(1, 4), (8, 9)]), 6, (0, 9)), ["union_behind"]),
    "no_row": (Stored(GOOD.visible, 10, DEVICES), ["mark_behind", "union_behind"]),
    "mark_behind": (Stored(GOOD.visible, 10, DEVICES, GOOD.delivered, 4, (0, 9)), ["mark_behind"]),
    "mark_ahead": (Stored(GOOD.visible, 10, DEVICES, GOOD.delivered, 10, (0, 9)), ["mark_ahead"]),
    "mark_kept": (Stored(GOOD.visible, 10, DEVICES, GOOD.delivered, 8, (0, 9)), ["mark_kept"]),
    "union_ahead": (Stored(GOOD.visible, 10, {}, GOOD.delivered, 6, (0, 9)), ["union_ahead"]),
    "beyond_head": (
        Stored(GOOD.visible, 8, DEVICES, GOOD.delivered, 6, (0, 0)),
        ["beyond_head", "beyond_head"],
    ),
    "mark_beyond_head": (
        Stored(GOOD.visible, 5, {"phone": RangeSet([(1, 5)])}, RangeSet([(1, 5)]), 9),
        ["mark_beyond_head"],
    ),
    "invisible": (
        Stored(LEFT, 10, DEVICES, GOOD.delivered, 6, (0, 6)),
        ["invisible", "invisible"],
    ),
    "read_beyond_head": (Stored(GOOD.visible, 10, DEVICES, GOOD.delivered, 6, (3, 12)), ["read_beyond_head"]),
    "read_last_version": (Stored(GOOD.visible, 10, DEVICES, GOOD.delivered, 6, (OPEN, 12)), ["read_beyond_head"]),
    "read_invisible": (Stored(LEFT, 10, {}, RangeSet(), 0, (3, 8)), ["read_invisible"]),
    "no_member": (Stored(None, 10, DEVICES, GOOD.delivered, 6, (0, 9)), ["no_member"]),
    "no_conversation": (Stored(GOOD.visible, 0, DEVICES, GOOD.delivered, 6, (0, 9)), ["no_member"]),
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_each_kind_of_damage_is_told_then_mended_and_then_gone(name: str, module_database: Database) -> None:
    damaged, kinds = DAMAGE[name]
    found = differences(damaged)
    assert sorted(one.kind for one in found) == kinds
    async with pools(module_database) as (owner, console):
        id_ = await store(owner, damaged)
        newest = await owner.fetchval("SELECT coalesce(max(id), 0) FROM outbox")

        looked = await audit(console, id_)
        assert looked.found == [finding(id_, one, mended=False) for one in found]
        assert looked.left == len([kind for kind in kinds if kind not in NOTED])
        assert await stored_now(owner, id_, damaged) == damaged
        assert await owner.fetchval("SELECT count(*) FROM transition WHERE conversation_id = $1", id_) == 0

        mended = await audit(console, id_, repair=True)
        assert mended.found == [finding(id_, one, mended=mends(one.kind, lower=False)) for one in found]
        after = await stored_now(owner, id_, damaged)
        assert after == repaired(damaged)
        logged = await owner.fetch("SELECT * FROM transition WHERE conversation_id = $1 ORDER BY cause, device_id", id_)
        will_mend = [one for one in found if mends(one.kind, lower=False)]
        assert Counter((row["cause"], row["device_id"]) for row in logged) == Counter(
            (one.kind, one.device_id) for one in will_mend
        )
        assert all((row["service"], row["kind"], row["user_id"]) == ("console", "repaired", "anna") for row in logged)
        assert all(json.loads(row["detail"])["who"] == "ops" for row in logged)

        told = await stage.announced(owner, after=newest)
        news = [] if after is None else _news(damaged, after)
        assert [(record["kind"], record["cause"]) for record in told] == [(kind, "repair") for kind in news]
        for record in told:
            assert after is not None
            assert (record["delivered_seq"], (record["read_version"], record["read_seq"])) == (
                after.delivered_seq,
                after.read,
            )

        again = await audit(console, id_, repair=True)
        assert again.left == (1 if name == "mark_ahead" else 0)
        assert again.mended == {}
        if name == "mark_ahead":
            assert (await audit(console, id_, repair=True, lower=True)).mended == {"mark_ahead": 1}
            assert await stored_now(owner, id_, damaged) == repaired(damaged, lower=True)
        assert (await audit(console, id_)).left == 0


def _news(before: Stored, after: Stored) -> list[str]:
    news = ["delivered"] if before.delivered_seq != after.delivered_seq else []
    return news + (["read"] if before.read != after.read else [])


seqs = st.integers(1, 14)
ranges = st.lists(st.tuples(seqs, seqs).map(lambda pair: (min(pair), max(pair))), max_size=3).map(RangeSet)
visibles = st.none() | st.sampled_from([RangeSet([(1, OPEN)]), RangeSet([(3, 5), (9, OPEN)]), RangeSet([(2, 6)])])
storeds = st.builds(
    Stored,
    visible=visibles,
    head=st.integers(1, 12),
    devices=st.dictionaries(st.sampled_from(["phone", "laptop"]), ranges, max_size=2),
    delivered=ranges,
    delivered_seq=st.integers(0, 14),
    read=st.tuples(st.integers(0, 3), st.integers(0, 14)),
)


def test_the_sql_finds_and_mends_what_the_pure_rule_does(module_database: Database) -> None:
    with asyncio.Runner() as runner:
        owner, console = (
            runner.run(asyncpg.create_pool(module_database.url(role), min_size=1, max_size=1).__aenter__())
            if role
            else runner.run(asyncpg.create_pool(module_database.owner_url, min_size=1, max_size=1).__aenter__())
            for role in ("", "console")
        )

        async def play(stored: Stored, lower: bool) -> None:
            id_ = await store(owner, stored)
            found = differences(stored)
            report = await audit(console, id_, repair=True, lower=lower)
            assert report.found == [finding(id_, one, mended=mends(one.kind, lower=lower)) for one in found]
            after = await stored_now(owner, id_, stored)
            assert after == (repaired(stored, lower=lower) if report.mended else stored)

        @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
        @given(storeds, st.booleans())
        def check(stored: Stored, lower: bool) -> None:
            runner.run(play(stored, lower))

        try:
            check()
        finally:
            runner.run(owner.close())
            runner.run(console.close())


GROW = "WITH c AS (UPDATE conversation SET last_seq = last_seq + 1 WHERE conversation_id = $1 RETURNING *)"
LEAVE = (
    f"{GROW} UPDATE member AS m SET visible = visible * int8multirange(int8range(1, c.last_seq, '[]'))"
    " FROM c WHERE m.conversation_id = c.conversation_id AND m.user_id = 'anna'"
)
COME_BACK = (
    f"{GROW} UPDATE member AS m SET visible = visible + int8multirange(int8range(c.last_seq, NULL))"
    " FROM c WHERE m.conversation_id = c.conversation_id AND m.user_id = 'anna'"
)


async def test_nothing_is_told_or_mended_while_acks_come_in(database: Database) -> None:
    """Acks, growing heads and members who leave and come back, beside audits that would mend whatever they found."""
    chance = random.Random(5)
    ids = [str(uuid.uuid4()) for _ in range(8)]
    async with (
        pools(database) as (owner, console),
        open_pool(database.url("receipts"), size=1, name="test") as pool,
    ):
        for id_ in ids:
            await stage.seed(owner, id_, HEAD, VISIBLE)
        log = Log(Store(pool, TOPIC))
        await log.open()
        audits = 0
        done = asyncio.Event()

        async def look() -> None:
            nonlocal audits
            while not done.is_set():
                report = await audit(console, None, repair=True)
                assert report.found == []
                audits += 1

        async def write() -> None:
            for _ in range(120):
                batch: list[Held | Mark] = []
                for id_ in chance.sample(ids, 4):
                    user = chance.choice(["anna", "late", "left", "back"])
                    low = chance.randint(1, 40)
                    batch.append(Held(id_, user, chance.choice(["phone", "laptop"]), RangeSet([(low, low + 3)])))
                    batch.append(Mark(id_, user, "phone", "read", 0, low))
                await log.apply(batched(batch), 1)
                await owner.execute(LEAVE if chance.random() < 0.5 else COME_BACK, chance.choice(ids))
            done.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look())
            tasks.create_task(write())
        assert audits > 3
        assert (await audit(console, None)).checked >= len(ids)


async def test_every_user_is_looked_at_whatever_the_pages(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users without a row, rows without devices, users with more devices than a page holds."""
    monkeypatch.setattr(marks, "BATCH", 4)
    chance = random.Random(2)
    async with pools(database) as (owner, console):
        wrong = set()
        for number in range(12):
            id_ = str(uuid.uuid4())
            users = {f"u{member}": stage.EVERYTHING for member in range(chance.randint(1, 4))}
            await stage.seed(owner, id_, 10, users)
            for user in users:
                for device in range(chance.choice([0, 1, 9])):
                    await owner.execute(
                        "INSERT INTO device_cursor VALUES ($1, $2, $3, '{[1,4)}')", id_, user, f"d{device}"
                    )
                    wrong.add((id_, user))
                if number % 3 == 0 and (id_, user) not in wrong:
                    await owner.execute("INSERT INTO receipt (conversation_id, user_id) VALUES ($1, $2)", id_, user)
        report = await audit(console, None)
        assert {(one.conversation_id, one.user_id) for one in report.found} == wrong
        assert report.left == 2 * len(wrong)
        one = min(wrong)
        of_user = await marks.check(console, marks.scope_of(None, one[1]), marks.Repair("ops"), lambda _: None)
        assert {(f.conversation_id, f.user_id) for f in of_user.found} == {key for key in wrong if key[1] == one[1]}
        both = await marks.check(console, marks.scope_of(*one), marks.Repair("ops"), lambda _: None)
        assert (both.checked, both.left) == (1, 2)
        assert (await audit(console, None, repair=True)).left == 0
        assert (await audit(console, None)).found == []


@pytest.fixture(scope="module")
def counted(module_database: Database) -> str:
    """A conversation of some thousand messages, counted."""
    id_ = str(uuid.uuid4())

    async def make() -> None:
        async with open_pool(module_database.owner_url, size=1, name="test") as owner:
            await stage.seed(owner, id_, 1_300, {"anna": stage.EVERYTHING, "ben": stage.EVERYTHING})
            await owner.execute(
                "INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, body,"
                " created_at) SELECT $1, n, gen_random_uuid(), 'message', CASE n % 3 WHEN 0 THEN 'anna' ELSE 'ben' END,"
                " n::text, '', '{}', now() FROM generate_series(1, 1300) AS n",
                id_,
            )
            await owner.execute("SELECT close_late($1, 10)", id_)

    asyncio.run(make())
    return id_


async def test_wrong_counts_are_told_and_counted_anew(module_database: Database, counted: str) -> None:
    async with pools(module_database) as (owner, console):

        async def check(*, repair: bool = False) -> Report:
            told: list[Finding] = []
            report = await counts.check(console, uuid.UUID(counted), "ops", told.append, repair=repair)
            assert report.found == told
            return report

        async def rows() -> list[tuple[Any, ...]]:
            found = await owner.fetch(
                "SELECT sender_id, bucket, amount FROM event_count WHERE conversation_id = $1 ORDER BY 1, 2", counted
            )
            return [tuple(row) for row in found]

        right = await rows()
        assert ((await check()).checked, (await check()).left) == (2, 0)
        await owner.execute(
            "UPDATE event_count SET amount = amount + 2"
            " WHERE conversation_id = $1 AND bucket = 1 AND sender_id IN ('', 'ben')",
            counted,
        )
        await owner.execute(
            "INSERT INTO event_count (conversation_id, sender_id, bucket, amount) VALUES ($1, 'carl', 0, 7)", counted
        )
        found = await check()
        assert [(one.bucket, one.user_id, one.found, one.wanted) for one in found.found] == [
            (0, "carl", "7", "0"),
            (1, None, "514", "512"),
            (1, "ben", "343", "341"),
        ]
        assert (await check(repair=True)).mended == {"count_wrong": 3}
        assert await rows() == right
        assert (await check()).left == 0
        logged = await owner.fetch(
            "SELECT from_seq, to_seq, user_id FROM transition WHERE conversation_id = $1 AND cause = 'count_wrong'"
            " ORDER BY 1, 3",
            counted,
        )
        assert [tuple(row) for row in logged] == [(1, 512, "carl"), (513, 1024, "ben"), (513, 1024, None)]


async def waybill(*arguments: str, url: str) -> tuple[int | None, str, str]:
    """Code, standard output and error of `waybill check`."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}
    process = await asyncio.create_subprocess_exec(
        WAYBILL,
        "check",
        *arguments,
        env={**others, "WAYBILL_POSTGRES_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_the_command_ends_with_0_only_if_nothing_is_left(module_database: Database) -> None:
    url = module_database.url("console")
    async with pools(module_database) as (owner, _):
        id_ = await store(owner, DAMAGE["mark_behind"][0])
        code, out, _ = await waybill("receipts", "--conversation", id_, url=url)
        assert code == 1
        assert f"mark_behind: {id_} anna: 4 should be 6" in out
        code, out, _ = await waybill("receipts", "--conversation", id_, "--repair", "--json", url=url)
        assert (code, json.loads(out)["mended"], json.loads(out)["left"]) == (0, {"mark_behind": 1}, 0)
        clean, buckets, wrong, misused = await asyncio.gather(
            waybill("receipts", "--user", "anna", "--conversation", id_, url=url),
            waybill("counts", "--conversation", id_, url=url),
            waybill("receipts", "--conversation", "x", url=url),
            waybill("receipts", "--lower", url=url),
        )
        assert clean == (0, "1 users' marks checked, 0 differences left\n", "")
        assert buckets == (0, "0 buckets checked, 0 differences left\n", "")
        # Who has no marks has no wrong ones, member or not.
        code, out, _ = await waybill("receipts", "--user", "nobody", "--conversation", id_, "--repair", url=url)
        assert (code, out) == (0, "1 users' marks checked, 0 differences left\n")
        assert wrong == (1, "", "waybill: conversation: expected a UUID\n")
        assert misused[0] == 2


async def test_the_receipts_role_may_not_mend(module_database: Database) -> None:
    for role in ("receipts", "gateway", "ingest", "relay"):
        connection = await asyncpg.connect(module_database.url(role))
        try:
            for statement in (
                "SELECT mend_receipts(gen_random_uuid(), 'anna', true, true, 'x')",
                "SELECT mend_counts(gen_random_uuid(), 0, true, 'x')",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)
        finally:
            await connection.close()
