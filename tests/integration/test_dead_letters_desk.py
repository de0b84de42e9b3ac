"""The desk for dead letters on a real store, through the console's own role."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING

import asyncpg
import pytest

from services.console.dead.changes import discard, retry, retry_matching, settled
from services.console.dead.letters import page, show
from services.console.dead.schemas import Filter, only
from services.console.relay.shards import resume, rewind, shards
from shared.errors import BadRequestError, ConflictError, NotFoundError, UnavailableError
from shared.postgres import open_pool
from tests import letters
from tests.letters import actions, bury, park, settle, settle_letter, state_of
from tests.relays import conversation, shard_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shared.postgres import Pool
    from tests.databases import Database

pytest_plugins = ["tests.relay_fixtures"]


@pytest.fixture
async def desk(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("console"), size=8, name="desk") as pool:
        yield pool


@pytest.fixture
async def relay_db(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.url("relay"))
    yield connection
    await connection.close()


async def all_pages(desk: Pool, wanted: Filter, *, newest: bool) -> list[int]:
    found: list[int] = []
    after = None
    while True:
        got = await page(desk, wanted, newest=newest, after=after, limit=3)
        found += [letter.dead_id for letter in got.letters]
        after = got.next
        if after is None:
            return found
        assert len(got.letters) == 3


@pytest.mark.parametrize("newest", [True, False])
async def test_pages_are_whole_and_in_the_order_of_deaths(
    desk: Pool, owner_db: asyncpg.Connection, newest: bool
) -> None:
    made = [(after_s, await bury(owner_db, after_s=after_s)) for after_s in (5, 5, 1, 5, 9, 5, 2, 0.000001, 0)]
    in_order = [dead_id for _, dead_id in sorted(made)]
    assert await all_pages(desk, Filter(), newest=newest) == (in_order[::-1] if newest else in_order)


async def test_a_page_that_ends_with_the_last_letter_is_the_last_page(desk: Pool, owner_db: asyncpg.Connection) -> None:
    for _ in range(3):
        await bury(owner_db)
    assert (await page(desk, Filter(), limit=3)).next is None
    assert (await page(desk, Filter(), limit=2)).next is not None
    assert (await page(desk, Filter(shard=(shard_of(1) + 1) % 64))).letters == []


async def test_each_filter_limits(desk: Pool, owner_db: asyncpg.Connection) -> None:
    event_id = uuid.uuid4()
    one = await bury(owner_db, 1, event_id=event_id)
    two = await bury(owner_db, 2, state="sent")
    three = await bury(owner_db, 3, origin="acks.v1")
    four = await bury(owner_db, 1, state="discarded")

    async def found(**wanted: object) -> set[int]:
        return {letter.dead_id for letter in (await page(desk, Filter(**wanted))).letters}

    assert await found() == {one, two, three, four}
    assert await found(states=("dead",)) == {one, three}
    assert await found(states=("sent", "discarded")) == {two, four}
    assert await found(conversation_id=str(conversation(1)).upper()) == {one, four}
    assert await found(event_id=str(event_id)) == {one}
    assert await found(shard=shard_of(2)) == {two}
    assert await found(origin="acks.v1") == {three}
    assert await found(states=("dead",), conversation_id=str(conversation(1)), shard=shard_of(1)) == {one}


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"states": ("open",)}, "state"),
        ({"conversation_id": "1"}, "conversation"),
        ({"event_id": "x"}, "event"),
        ({"shard": 64}, "shard"),
        ({"shard": -1}, "shard"),
        ({"origin": "a\0"}, "origin"),
    ],
)
def test_a_filter_that_cannot_be_names_its_field(wanted: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        Filter(**wanted)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "after",
    ["", "x", "2026-01-02T03:04:05.678901Z", "2026-13-02T03:04:05.678901Z_1", f"2026-01-02T03:04:05.678901Z_{2**63}"],
)
async def test_a_place_that_no_page_gave_is_refused(desk: Pool, after: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await page(desk, Filter(), after=after)
    assert refused.value.field == "after"


async def test_a_letter_is_shown_with_all_that_is_known(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    first, second = await park(relay_db, owner_db, ["failed", "waiting"])
    assert await settle(relay_db, [first], ["dead"]) == 1
    (letter,) = (await page(desk, Filter())).letters
    found = await show(desk, str(letter.dead_id))
    assert found.outbox_id == first
    assert (found.state, found.attempts, found.error) == ("dead", 2, letters.TOO_LARGE)
    assert (found.origin, found.shard, found.seq, found.topic) == ("outbox", shard_of(1), 1, "events.v1")
    assert found.conversation_id == str(conversation(1))
    assert [(t.attempt, t.error, t.owner, t.epoch) for t in found.tries] == [
        (1, letters.TOO_LARGE, letters.RELAY, 1),
        (2, letters.TOO_LARGE, letters.RELAY, 1),
    ]
    assert (found.actions, found.place, found.settled_at, found.redriven_at) == ([], None, None, None)
    assert (found.payload_encoding, json.loads(bytes(found.payload))) == ("json", {"seq": 1})
    assert found.retry == "in_order"

    only(await retry(desk, [letter.dead_id], "ada"))
    assert await settle_letter(relay_db, letter.dead_id, offset=41)
    found = await show(desk, found.event_id)
    assert found.state == "sent"
    assert found.place is not None
    assert (found.place.topic, found.place.partition, found.place.offset) == ("events.v1", shard_of(1), 41)
    assert found.settled_at is not None
    assert [(t.attempt, t.error) for t in found.tries][-1] == (3, None)
    assert [(a.action, a.who) for a in found.actions] == [("retry", "ada")]
    assert found.retry is None
    assert second > first


async def test_a_retry_comes_late_once_something_passed(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    rows = await park(relay_db, owner_db, ["failed", "waiting", "waiting"])
    await settle(relay_db, rows[:1], ["dead"])
    (letter,) = (await page(desk, Filter())).letters
    assert letter.retry == "in_order"
    await settle(relay_db, rows[1:2], ["failed"])
    assert (await show(desk, str(letter.dead_id))).retry == "in_order"
    await settle(relay_db, rows[1:2], ["sent"], offset=5)
    assert (await show(desk, str(letter.dead_id))).retry == "late"


async def test_a_retry_comes_late_once_the_queue_has_ended(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    rows = await park(relay_db, owner_db, ["failed"])
    assert await settle(relay_db, rows, ["dead"]) == 0
    (letter,) = (await page(desk, Filter())).letters
    assert letter.retry == "late"


async def test_a_retry_comes_late_once_a_later_letter_was_sent(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    rows = await park(relay_db, owner_db, ["failed", "waiting", "waiting", "waiting"])
    for row in rows[:3]:
        await settle(relay_db, [row], ["dead"])
    first, second, third = (await page(desk, Filter(), newest=False)).letters
    only(await retry(desk, [second.dead_id], "ada"))
    assert await settle_letter(relay_db, second.dead_id, offset=5)
    assert (await show(desk, str(first.dead_id))).retry == "late"
    assert (await show(desk, str(third.dead_id))).retry == "in_order"


async def test_a_retry_comes_late_once_a_rewind_has_let_its_queue_go(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    first, second, third = await park(relay_db, owner_db, ["failed", "waiting", "waiting"])
    await settle(relay_db, [first], ["dead"])
    (letter,) = (await page(desk, Filter())).letters
    await rewind(desk, shard_of(1), third, "ada")
    assert (await show(desk, str(letter.dead_id))).retry == "in_order", "the second row waits still"
    await rewind(desk, shard_of(1), second, "ada")
    # Both go straight to Kafka, and a row behind them is refused.
    await park(relay_db, owner_db, ["failed"])
    assert (await show(desk, str(letter.dead_id))).retry == "late"


async def test_what_is_not_as_it_should_be_is_shown_as_it_is(desk: Pool, owner_db: asyncpg.Connection) -> None:
    odd = await bury(owner_db, headers=["traceparent", "00-ab", "alone"], payload=b"\xff\x00not text")
    found = await show(desk, str(odd))
    assert found.headers == [("traceparent", "00-ab"), ("alone", None)]
    assert (found.payload_encoding, json.loads(bytes(found.payload))) == ("base64", "/wBub3QgdGV4dA==")
    exact = await bury(owner_db, payload=b'{"amount": 1.10, "huge": 1e999, "id": 12345678901234567890123}')
    assert (
        bytes((await show(desk, str(exact))).payload)
        == b'{"amount": 1.10, "huge": 1e999, "id": 12345678901234567890123}'
    )
    for payload in (b"", b"{", b"nan", b'"\xff"', b"{} {}"):
        assert (await show(desk, str(await bury(owner_db, payload=payload)))).payload_encoding == "base64"


async def test_the_newest_letter_of_an_event_is_shown(desk: Pool, owner_db: asyncpg.Connection) -> None:
    event_id = uuid.uuid4()
    await bury(owner_db, event_id=event_id, state="sent")
    newest = await bury(owner_db, event_id=event_id)
    assert (await show(desk, str(event_id))).dead_id == newest


async def test_what_is_not_there_and_what_is_no_name(desk: Pool) -> None:
    for name in ("1", str(uuid.uuid4()), str(2**63 - 1)):
        with pytest.raises(NotFoundError):
            await show(desk, name)
    for name in ("", "x", "-1", "1.5", str(2**63), "1" * 30):
        with pytest.raises(BadRequestError):
            await show(desk, name)


async def test_a_retry_is_asked_for_once(desk: Pool, owner_db: asyncpg.Connection) -> None:
    letter = await bury(owner_db)
    first = only(await retry(desk, [letter], "ada"))
    again = only(await retry(desk, [letter, letter], "ben"))
    assert (first.state, first.changed) == ("retrying", True)
    assert (again.state, again.changed) == ("retrying", False)
    assert await state_of(owner_db, letter) == "retrying"
    assert await actions(owner_db, letter) == [("retry", "ada", None)]


async def test_many_at_once_make_one_change(desk: Pool, owner_db: asyncpg.Connection) -> None:
    ids = [await bury(owner_db, number) for number in range(5)]
    made = await asyncio.gather(*(retry(desk, ids[:: 1 if n % 2 else -1], f"who-{n}") for n in range(8)))
    for place, letter in enumerate(ids):
        assert sum(changes[place].changed for changes in made) == 1
        assert {changes[place].state for changes in made} == {"retrying"}
        assert len(await actions(owner_db, letter)) == 1


async def test_retry_and_discard_at_once_end_in_one_of_them(desk: Pool, owner_db: asyncpg.Connection) -> None:
    for _ in range(5):
        letter = await bury(owner_db)
        tried, given_up = await asyncio.gather(retry(desk, [letter], "ada"), discard(desk, [letter], "no use", "ben"))
        assert [tried[0].changed, given_up[0].changed].count(True) == 1
        assert await state_of(owner_db, letter) == ("retrying" if tried[0].changed else "discarded")
        assert len(await actions(owner_db, letter)) == 1


async def test_what_was_waited_for_is_judged_as_it_is_then(
    desk: Pool, database: Database, owner_db: asyncpg.Connection
) -> None:
    letter = await bury(owner_db)
    other = await asyncpg.connect(database.owner_url)
    try:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("UPDATE dead_letter SET state = 'discarded' WHERE dead_id = $1", letter)
        asking = asyncio.create_task(retry(desk, [letter], "ada"))

        async def waits() -> bool:
            return bool(await owner_db.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))

        await until(waits, timeout=10, what="a retry that waits for the row")
        await transaction.commit()
    finally:
        await other.close()
    (change,) = await asking
    assert (change.state, change.changed) == ("discarded", False)
    assert change.error is not None
    assert change.error.code == "conflict"
    assert await actions(owner_db, letter) == []


@pytest.mark.parametrize("state", ["sent", "discarded", "rewound"])
async def test_what_is_settled_is_not_tried_again(desk: Pool, owner_db: asyncpg.Connection, state: str) -> None:
    letter = await bury(owner_db, state=state)
    with pytest.raises(ConflictError):
        only(await retry(desk, [letter], "ada"))
    assert await state_of(owner_db, letter) == state
    assert await actions(owner_db, letter) == []


async def test_what_nobody_tries_again_is_refused(desk: Pool, owner_db: asyncpg.Connection) -> None:
    """A gateway's letter says where to turn; that of a consumer that looks for its own is not among these."""
    for origin, why in (("events.v1", r"waybill relay rewind"), ("receipts.v1", "relay"), ("orders.v1", "nobody")):
        letter = await bury(owner_db, origin=origin)
        assert (await show(desk, str(letter))).retry is None
        with pytest.raises(ConflictError, match=why):
            only(await retry(desk, [letter], "ada"))
        assert await state_of(owner_db, letter) == "dead"
        assert only(await discard(desk, [letter], "an old client", "ada")).changed
        with pytest.raises(ConflictError, match="discarded"):
            only(await retry(desk, [letter], "ada"))
        assert await actions(owner_db, letter) == [("discard", "ada", "an old client")]
    acks = await bury(owner_db, origin="acks.v1")
    assert (await show(desk, str(acks))).retry == "any_order"
    assert only(await retry(desk, [acks], "ada")).state == "retrying"


async def test_each_of_several_has_its_own_result(desk: Pool, owner_db: asyncpg.Connection) -> None:
    dead, sent = await bury(owner_db), await bury(owner_db, state="sent")
    made = await retry(desk, [sent + 1, sent, dead], "ada")
    assert [(c.dead_id, c.state, c.changed, c.error and c.error.code) for c in made] == [
        (dead, "retrying", True, None),
        (sent, "sent", False, "conflict"),
        (sent + 1, None, False, "not_found"),
    ]


async def test_all_that_match_are_tried_again_up_to_a_cap(desk: Pool, owner_db: asyncpg.Connection) -> None:
    late, early, middle = [await bury(owner_db, after_s=after_s) for after_s in (9, 1, 5)]
    others = [await bury(owner_db, 2), await bury(owner_db, state="sent"), await bury(owner_db, origin="a.topic")]
    wanted = Filter(conversation_id=str(conversation(1)))
    made = await retry_matching(desk, wanted, "ada", cap=2)
    assert {change.dead_id for change in made if change.changed} == {early, middle}
    assert await state_of(owner_db, late) == "dead"
    assert [change.dead_id for change in await retry_matching(desk, wanted, "ada", cap=2)] == [late]
    assert await retry_matching(desk, wanted, "ada", cap=2) == []
    assert [await state_of(owner_db, other) for other in others] == ["dead", "sent", "dead"]
    with pytest.raises(BadRequestError):
        await retry_matching(desk, wanted, "ada", cap=0)


async def test_a_discard_keeps_its_first_reason(desk: Pool, owner_db: asyncpg.Connection) -> None:
    letter = await bury(owner_db)
    first = only(await discard(desk, [letter], " no use ", "ada"))
    again = only(await discard(desk, [letter], "another", "ben"))
    assert (first.state, first.changed) == ("discarded", True)
    assert (again.state, again.changed) == ("discarded", False)
    assert await actions(owner_db, letter) == [("discard", "ada", "no use")]
    found = await show(desk, str(letter))
    assert found.settled_at is not None
    assert [(a.action, a.who, a.reason) for a in found.actions] == [("discard", "ada", "no use")]


@pytest.mark.parametrize("state", ["retrying", "sent", "rewound"])
async def test_what_is_not_dead_is_not_discarded(desk: Pool, owner_db: asyncpg.Connection, state: str) -> None:
    letter = await bury(owner_db, state=state)
    with pytest.raises(ConflictError):
        only(await discard(desk, [letter], "no use", "ada"))
    assert await state_of(owner_db, letter) == state
    assert await actions(owner_db, letter) == []


@pytest.mark.parametrize(
    ("reason", "who", "field"),
    [
        ("", "ada", "reason"),
        (" ", "ada", "reason"),
        ("x" * 1001, "ada", "reason"),
        ("a\0", "ada", "reason"),
        ("x", " ", "who"),
    ],
)
async def test_a_discard_needs_a_reason_and_a_name(
    desk: Pool, owner_db: asyncpg.Connection, reason: str, who: str, field: str
) -> None:
    letter = await bury(owner_db)
    with pytest.raises(BadRequestError) as refused:
        await discard(desk, [letter], reason, who)
    assert refused.value.field == field
    assert await state_of(owner_db, letter) == "dead"


@pytest.mark.parametrize("ids", [[], [0], [2**63], range(1, 1002)])
async def test_ids_that_cannot_be_are_refused(desk: Pool, ids: list[int]) -> None:
    for asked in (retry(desk, ids, "ada"), discard(desk, ids, "no use", "ada")):
        with pytest.raises(BadRequestError) as refused:
            await asked
        assert refused.value.field == "ids"


async def test_a_retry_is_waited_for(desk: Pool, owner_db: asyncpg.Connection) -> None:
    taken, dead_again, conflict, slow = [await bury(owner_db) for _ in range(4)]
    await owner_db.execute("UPDATE dead_letter SET state = 'sent' WHERE dead_id = $1", conflict)
    made = await retry(desk, [taken, dead_again, conflict], "ada")
    waiting = asyncio.create_task(settled(desk, made, 20))
    await owner_db.execute("UPDATE dead_letter SET state = 'sent', kafka_offset = 1 WHERE dead_id = $1", taken)
    await owner_db.execute("UPDATE dead_letter SET state = 'dead', error = 'no' WHERE dead_id = $1", dead_again)
    ended = await waiting
    assert [(c.dead_id, c.state, c.failed, c.last_error) for c in ended] == [
        (taken, "sent", False, None),
        (dead_again, "dead", True, "no"),
        (conflict, "sent", True, None),
    ]
    (late,) = await settled(desk, await retry(desk, [slow], "ada"), 0.2)
    assert late.error is not None
    assert (late.state, late.error.code, late.failed) == ("retrying", "timeout", True)


async def test_shards_are_told_as_they_are(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    ids = await park(relay_db, owner_db, ["failed", "waiting", "dead"])
    stopped = (shard_of(1) + 1) % 64
    await owner_db.execute(
        "UPDATE outbox_shard SET stopped_at = now(), stopped_reason = 'too many' WHERE shard = $1", stopped
    )
    found = (await shards(desk)).shards
    assert [shard.shard for shard in found] == list(range(64))
    held = found[shard_of(1)]
    assert (held.owner, held.epoch, held.held, held.cursor_id, held.parked) == (letters.RELAY, 1, True, ids[-1], 2)
    assert held.lease_until is not None
    assert (held.stopped_at, held.stopped_reason) == (None, None)
    other = found[stopped]
    assert (other.owner, other.held, other.parked, other.stopped_reason) == (None, False, 0, "too many")
    assert other.stopped_at is not None


async def test_a_shard_is_rewound_within_what_is_kept(
    desk: Pool, owner_db: asyncpg.Connection, relay_db: asyncpg.Connection
) -> None:
    first, second, third = await park(relay_db, owner_db, ["dead", "dead", "dead"])
    shard = shard_of(1)
    before = {letter.outbox_id: letter for letter in (await page(desk, Filter())).letters}
    only(await discard(desk, [before[third].dead_id], "no use", "ada"))
    done = await rewind(desk, shard, second, "ada")
    assert (done.shard, done.id, done.cursor_before, done.ids_back) == (shard, second, third, third - second + 1)
    assert await owner_db.fetchval("SELECT cursor_id FROM outbox_shard WHERE shard = $1", shard) == second - 1
    after = {letter.outbox_id: letter.state for letter in (await page(desk, Filter())).letters}
    assert after == {first: "dead", second: "rewound", third: "discarded"}
    assert await actions(owner_db, before[second].dead_id) == [("rewind", "ada", None)]
    with pytest.raises(ConflictError, match="only"):
        await rewind(desk, shard, third, "ada")
    await owner_db.execute("DELETE FROM outbox WHERE id = $1", first)
    with pytest.raises(ConflictError, match=f"begins at id {second}"):
        await rewind(desk, shard, first, "ada")


@pytest.mark.parametrize(
    ("shard", "from_id", "who", "field"),
    [(64, 1, "a", "shard"), (-1, 1, "a", "shard"), (1, 0, "a", "id"), (1, 1, "", "who")],
)
async def test_a_rewind_that_cannot_be_is_refused(desk: Pool, shard: int, from_id: int, who: str, field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await rewind(desk, shard, from_id, who)
    assert refused.value.field == field


async def test_a_stopped_shard_goes_on(desk: Pool, owner_db: asyncpg.Connection) -> None:
    await owner_db.execute("UPDATE outbox_shard SET stopped_at = now(), stopped_reason = 'too many' WHERE shard = 9")
    assert (await resume(desk, 9, "ada")).changed
    assert not (await resume(desk, 9, "ada")).changed
    assert (await shards(desk)).shards[9].stopped_reason is None
    with pytest.raises(BadRequestError):
        await resume(desk, 64, "ada")


async def test_a_store_that_is_away_is_told_as_such() -> None:
    async with open_pool("postgres://nobody@127.0.0.1:1/none", size=1, name="desk") as pool:
        for asked in (
            page(pool, Filter()),
            show(pool, "1"),
            retry(pool, [1], "ada"),
            discard(pool, [1], "no use", "ada"),
            shards(pool),
            rewind(pool, 1, 1, "ada"),
            resume(pool, 1, "ada"),
        ):
            with pytest.raises(UnavailableError):
                await asked


async def test_what_is_asked_of_a_letter_is_in_the_log(desk: Pool, owner_db: asyncpg.Connection) -> None:
    one, two = await bury(owner_db), await bury(owner_db)
    await retry(desk, [one], "ops")
    await discard(desk, [two], "spam", "ops")
    rows = await owner_db.fetch("SELECT kind, cause, conversation_id, detail FROM transition WHERE service = 'console'")
    assert {(row["kind"], row["cause"], json.loads(row["detail"])["dead_id"]) for row in rows} == {
        ("retried", "retry", one),
        ("discarded", "discard", two),
    }
    assert all(row["conversation_id"] is not None for row in rows)
