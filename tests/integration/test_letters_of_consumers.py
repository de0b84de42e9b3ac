"""Records that a consumer could not process, on the desk of the relay's dead letters: put there once, tried again."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from services.console.dead.changes import discard, retry, retry_matching, settled
from services.console.dead.letters import page, show
from services.console.dead.schemas import Filter, only
from services.console.dead.tables import detail, listing
from services.gateway.letters import Letters as GatewayLetters
from services.gateway.metrics import LETTERS_DROPPED
from services.receipts.fold import Held, Mark
from services.receipts.letters import Letters
from services.receipts.store import Store
from services.relay.backlog import Backlog
from services.relay.metrics import DEAD_LETTERS
from services.relay.parking import ParkingStore
from shared.dead_letter import BadRecord
from shared.errors import BadRequestError, ConflictError, UnavailableError
from shared.kafka import Topics, cluster_id, partition_of
from shared.postgres import open_pool
from shared.ranges import RangeSet
from tests import letters
from tests.console import console
from tests.integration.receipts_stage import EVERYTHING, Gate, open_stage, receipts, seed, value_of
from tests.letters import actions, bury, park, state_of
from tests.relays import shard_of
from tests.unit.console.dead.test_tables import drawn
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from services.receipts.fold import Changes
    from shared.postgres import Pool
    from tests.databases import Database
    from tests.stack import Stores

pytest_plugins = ["tests.relay_fixtures"]

ACKS = "acks.v1"
CLUSTER = "cluster-1"
TABLES = ("dead_letter", "dead_letter_attempt", "dead_letter_action", "transition")


@dataclass
class Bad:
    """A record that is read at an offset, as Kafka hands it out."""

    offset: int
    value: bytes | None = b"not json"
    key: bytes | None = b"a key"
    partition: int = 3
    topic: str = f"waybill.{ACKS}"
    timestamp: int = 0
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Home:
    """One database as each of its roles sees it."""

    owner: Pool
    receipts: Pool
    desk: Pool

    async def put(self, records: Iterable[Bad], error: str = "value: not valid JSON", *, cluster: str = CLUSTER) -> int:
        """Put records on the desk, as `apply_acks` does; how many are new."""
        columns = zip(*(BadRecord.of(record, error) for record in records), strict=True)
        new: int = await self.receipts.fetchval(
            "SELECT bury_records($1, $2, $3, $4, $5, $6, $7::text[]::json[], $8)", ACKS, cluster, *columns
        )
        return new

    async def ids(self) -> list[int]:
        return [row[0] for row in await self.owner.fetch("SELECT dead_id FROM dead_letter ORDER BY dead_id")]

    async def all_rows(self) -> dict[str, list[str]]:
        """Everything there is of letters, as text."""
        return {
            table: sorted(row[0] for row in await self.owner.fetch(f"SELECT t::text FROM {table} AS t"))
            for table in TABLES
        }

    def again(self, store: Store | None = None) -> Letters:
        """The receipts service's loop; asked by hand."""
        return Letters(self.receipts, ACKS, store or Store(self.receipts, f"waybill.{ACKS}"))


@pytest.fixture
async def home(database: Database) -> AsyncIterator[Home]:
    async with (
        open_pool(database.owner_url, size=2, name="owner") as owner,
        open_pool(database.url("receipts"), size=4, name="receipts") as service,
        open_pool(database.url("console"), size=2, name="desk") as desk,
    ):
        yield Home(owner, service, desk)


def read(conversation_id: str, seq: int = 3) -> Mark:
    return Mark(conversation_id, "anna", "phone", "read", 0, seq)


def ack(offset: int, of: Held | Mark, **changed: object) -> Bad:
    return Bad(offset, value_of(of), of.conversation_id.encode(), **changed)  # type: ignore[arg-type]


# Put on the desk.


@pytest.mark.promise("protocol.7.dead")
async def test_a_record_has_one_letter_however_often_its_topic_is_read(home: Home) -> None:
    topic = [Bad(offset, partition=partition) for partition in (9, 3) for offset in (5, 1, 7)]
    assert await home.put(topic) == 6
    places = [(d.read_from.partition, d.read_from.offset) for d in (await page(home.desk, Filter())).letters[::-1]]
    assert places == [(3, 1), (3, 5), (3, 7), (9, 1), (9, 5), (9, 7)]
    first, second = (await home.ids())[:2]
    only(await discard(home.desk, [first], "an old client", "ada"))
    only(await retry(home.desk, [second], "ada"))
    before = await home.all_rows()
    assert [len(before[table]) for table in TABLES] == [6, 6, 2, 8]
    assert await home.put([*topic, *topic], "value: another word for it") == 0
    assert await home.all_rows() == before
    # Another Kafka has other records at the same offsets.
    assert await home.put(topic[:2], cluster="cluster-2") == 2
    assert await home.put([*topic, Bad(8)]) == 1


async def test_many_at_once_make_one_letter(home: Home) -> None:
    topic = [Bad(offset) for offset in range(50)]
    assert sum(await asyncio.gather(*(home.put(topic[:: 1 if n % 2 else -1]) for n in range(4)))) == 50
    assert len(await home.ids()) == 50


async def test_the_log_tells_of_it_without_what_it_holds(home: Home) -> None:
    conversation_id, event_id = str(uuid.uuid4()), str(uuid.uuid4())
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = [("traceparent", f"00-{trace}-b7ad6b7169203331-01".encode()), ("ce_id", event_id.encode())]
    await home.put([Bad(4, b'"secret"', conversation_id.upper().encode(), headers=headers)], "ranges.0: secret")
    [row] = await home.owner.fetch("SELECT * FROM transition")
    assert (row["service"], row["kind"], row["cause"]) == ("receipts", "dead", "ranges.0")
    assert (str(row["conversation_id"]), row["trace_id"]) == (conversation_id, trace)
    [dead_id] = await home.ids()
    assert json.loads(row["detail"]) == {"dead_id": dead_id, "topic": ACKS, "partition": 3, "offset": 4}
    assert "secret" not in str(row)
    assert (await show(home.desk, event_id)).dead_id == dead_id
    await home.put([Bad(5)], "secret without a word for it")
    assert await home.owner.fetchval("SELECT cause FROM transition ORDER BY at DESC LIMIT 1") == "unreadable"


ODD = [
    Bad(1, None, None),
    Bad(2, b"", b""),
    Bad(3, b"\xff\x00", b"\xff" * 36),
    Bad(4, b"{}", b"\0"),
    Bad(5, b"{}", b"{" * 36),
    Bad(6, b"x" * 200_000, b"k" * 5_000),
    Bad(7, headers=[("a\0", b"\0"), ("b", None), ("c", b"\xff"), ("ce_id", b"no id"), ("traceparent", b"\0")]),
    Bad(8, headers=[(f"name-{n}" + "x" * 2000, b"y" * 2000) for n in range(100)]),
    Bad(9, headers=[("ce_type", b"a"), ("ce_type", b"b"), ("seq", b"9" * 30)]),
]


async def test_nothing_in_a_record_keeps_it_from_the_desk(home: Home) -> None:
    for error in ("", "\0: \ud800", "x" * 100_000):
        assert await home.put(ODD, error, cluster=f"cluster {error[:1]!r}") == len(ODD)
    for headers in (None, "{}", "7", '[7, "x", ["a"], [], {"b": 1}, ["c", {"d": "\\u0000"}]]'):
        bare = ([3], [headers and len(headers)], [b"k"], [b"v"], None if headers is None else [headers], ["e"])
        await home.receipts.fetchval(
            "SELECT bury_records($1, 'bare', $2, coalesce($3::bigint[], '{0}'), $4, $5, $6::text[]::json[], $7)",
            ACKS,
            *bare,
        )
    found = [await show(home.desk, str(dead_id)) for dead_id in await home.ids()]
    assert len(found) == 3 * len(ODD) + 4
    by_offset = {letter.read_from.offset: letter for letter in found[: len(ODD)]}
    assert [(by_offset[n].key, by_offset[n].key_encoding) for n in (1, 2, 3)] == [
        (None, None),
        ("", "text"),
        ("/" * 48, "base64"),
    ]
    assert {letter.conversation_id for letter in found} == {None}
    assert (by_offset[1].payload_bytes, by_offset[1].payload_cut_from) == (0, None)
    assert (by_offset[6].payload_bytes, by_offset[6].payload_cut_from, len(by_offset[6].key)) == (
        131_072,
        200_000,
        1024,
    )
    assert by_offset[7].headers[:3] == [("a\ufffd", "\ufffd"), ("b", ""), ("c", "\ufffd")]
    assert len(by_offset[8].headers) == 32
    assert {len(text) for pair in by_offset[8].headers for text in pair} == {1000}
    assert (by_offset[9].type, by_offset[9].seq) == ("a", None)
    assert all(len(letter.error) <= 1000 for letter in found)
    drawn(listing(await page(home.desk, Filter())))
    for letter in found:
        drawn(detail(letter))


# The desk.


async def test_the_desk_shows_where_it_was_read_its_key_and_its_payload(home: Home) -> None:
    of_relay = await bury(home.owner, 1)
    conversation_id = str(uuid.uuid4())
    await home.put([Bad(41, b'{"n": 1.10}', conversation_id.encode(), headers=[("a", b"1")]), Bad(42, b"\xff", b"odd")])
    _, known, unknown = await home.ids()
    found = await show(home.desk, str(known))
    assert (found.origin, found.topic, found.shard, found.outbox_id) == (ACKS, ACKS, 3, None)
    read_from = found.read_from
    assert read_from is not None
    assert (read_from.topic, read_from.partition, read_from.offset, read_from.cluster) == (ACKS, 3, 41, CLUSTER)
    assert (found.conversation_id, found.key, found.key_encoding) == (conversation_id, conversation_id, "text")
    assert (found.payload_encoding, bytes(found.payload), found.headers) == ("json", b'{"n": 1.10}', [("a", "1")])
    assert (found.state, found.attempts, found.retry, found.place) == ("dead", 1, "any_order", None)
    assert [(t.attempt, t.error, t.owner, t.epoch) for t in found.tries] == [
        (1, "value: not valid JSON", "receipts", None)
    ]
    text = drawn(detail(await show(home.desk, str(unknown))))
    for word in (f"{ACKS}, partition 3, offset 42, of the cluster {CLUSTER}", "odd", "base64 /w==", "in any order"):
        assert word in text
    text = drawn(listing(await page(home.desk, Filter())))
    for word in (f"{ACKS}, partition 3, offset 41", conversation_id, "odd", "events.v1"):
        assert word in text

    async def ids(**wanted: object) -> set[int]:
        return {letter.dead_id for letter in (await page(home.desk, Filter(**wanted))).letters}  # type: ignore[arg-type]

    assert await ids() == {of_relay, known, unknown}
    assert await ids(origin=ACKS) == {known, unknown}
    assert await ids(origin="outbox") == {of_relay}
    assert await ids(conversation_id=conversation_id, origin=ACKS) == {known}


async def test_the_same_over_http(home: Home, database: Database) -> None:
    await bury(home.owner, 1)
    await home.put([Bad(1), Bad(2)])
    _, one, two = await home.ids()
    async with console({}, database.url("console")) as desk:
        _, listed = await desk.ask("GET", f"/api/dead?origin={ACKS}&order=oldest")
        assert [letter["dead_id"] for letter in listed["letters"]] == [one, two]
        assert listed["letters"][0]["read_from"] == {"topic": ACKS, "partition": 3, "offset": 1, "cluster": CLUSTER}
        status, shown = await desk.ask("GET", f"/api/dead/{one}")
        assert (status, shown["key"], shown["payload_encoding"], shown["conversation_id"]) == (
            200,
            "a key",
            "base64",
            None,
        )
        assert (await desk.ask("POST", f"/api/dead/{one}/retry"))[1]["state"] == "retrying"
        assert (await desk.ask("POST", f"/api/dead/{two}/discard", json={"reason": "x"}))[1]["state"] == "discarded"
        described = (await desk.ask("GET", "/openapi.json"))[1]["components"]["schemas"]
        assert "read_from" in described["Letter"]["properties"]
    assert await actions(home.owner, one) == [("retry", "ops", None)]


async def test_all_that_match_are_tried_again_of_each_origin(home: Home) -> None:
    of_relay = await bury(home.owner, 1)
    of_gateway = await bury(home.owner, 1, origin="events.v1")
    await home.put([Bad(1), Bad(2)])
    one, two = (await home.ids())[2:]
    assert [c.dead_id for c in await retry_matching(home.desk, Filter(origin=ACKS), "ada", cap=1)] == [one]
    assert {c.dead_id for c in await retry_matching(home.desk, Filter(), "ada", cap=9)} == {of_relay, two}
    assert await state_of(home.owner, of_gateway) == "dead"
    with pytest.raises(BadRequestError):
        Filter(origin="a\0")


# Tried again.


async def test_an_ack_of_a_conversation_that_exists_by_now_is_healed(home: Home) -> None:
    conversation_id = str(uuid.uuid4())
    held = Held(conversation_id, "anna", "phone", RangeSet([(1, 5)]))
    await home.put([ack(1, held), ack(2, read(conversation_id))], "conversation_id: there is no such conversation")
    ids = await home.ids()
    made = await retry(home.desk, ids, "ada")
    assert await home.again().look() == 2
    for dead_id, change in zip(ids, await settled(home.desk, made, 5), strict=True):
        assert change.last_error == "conversation_id: there is no such conversation"
        assert (await show(home.desk, str(dead_id))).attempts == 2
    await seed(home.owner, conversation_id, 9, {"anna": EVERYTHING})
    made = await retry(home.desk, ids, "ben")
    assert await home.again().look() == 2
    assert [change.state for change in await settled(home.desk, made, 5)] == ["sent", "sent"]
    [receipt] = (await receipts(home.owner, conversation_id)).values()
    assert (receipt.delivered_seq, receipt.read) == (5, (0, 3))
    found = await show(home.desk, str(ids[0]))
    assert [(t.attempt, t.error is None, t.owner) for t in found.tries] == [
        (1, False, "receipts"),
        (2, False, "receipts"),
        (3, True, "receipts"),
    ]
    assert found.settled_at is not None
    assert [(a.action, a.who) for a in found.actions] == [("retry", "ada"), ("retry", "ben")]
    told = await home.owner.fetch(
        "SELECT cause FROM transition WHERE kind = 'retried' AND service = 'receipts' ORDER BY at"
    )
    assert [row["cause"] for row in told] == ["refused:conversation_id"] * 2 + ["applied"] * 2
    with pytest.raises(ConflictError, match="already"):
        only(await retry(home.desk, [ids[0]], "ada"))
    # A replay of the topic adds nothing, and changes nothing.
    before = await home.all_rows()
    assert await home.put([ack(1, held)]) == 0
    assert await home.again().look() == 0
    assert await home.all_rows() == before


async def test_what_is_wrong_in_itself_is_dead_again_and_holds_up_nobody(home: Home) -> None:
    conversation_id = str(uuid.uuid4())
    await seed(home.owner, conversation_id, 9, {"anna": EVERYTHING})
    whole = value_of(read(conversation_id))
    bad = [
        Bad(1),
        Bad(2, json.dumps({"kind": "\0"}).encode()),
        Bad(3, whole, b"another key"),
        Bad(4, whole + b" " * 200_000, conversation_id.encode()),
        Bad(5, None, None),
    ]
    await home.put([*bad, ack(6, read(conversation_id))])
    ids = await home.ids()
    await retry(home.desk, ids, "ada")
    assert await home.again().look() == 6
    errors = [(await show(home.desk, str(dead_id))).error.partition(":")[0] for dead_id in ids]
    assert errors == ["value", "kind", "key", "value", "value", "value"]
    assert [await state_of(home.owner, dead_id) for dead_id in ids] == ["dead"] * 5 + ["sent"]
    assert "only its beginning" in (await show(home.desk, str(ids[3]))).error
    assert only(await discard(home.desk, [ids[0]], "an old client", "ada")).changed
    assert await home.again().look() == 0, "nobody asked for them"


class Noted(Store):
    """The real one, which keeps what it was asked for, and when it was asked twice at a time."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool, f"waybill.{ACKS}")
        self.asked: list[int] = []
        self.now = 0
        self.most = 0

    async def apply_again(self, changes: Changes) -> list[object]:  # type: ignore[override]
        self.asked += [mark.seq for mark in changes.marks]
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return [*await super().apply_again(changes)]
        finally:
            self.now -= 1


async def test_letters_are_tried_in_the_order_of_their_offsets_by_one_process_at_a_time(home: Home) -> None:
    conversation_id = str(uuid.uuid4())
    await seed(home.owner, conversation_id, 99, {"anna": EVERYTHING})
    for offset in (7, 40, 12, 3, 25):
        await home.put([ack(offset, read(conversation_id, offset))])
    await home.put([ack(1, read(conversation_id, 50), partition=60)])
    await home.put([ack(10 + n, read(conversation_id, 60 + n), partition=61) for n in range(30)])
    noted = Noted(home.receipts)
    await retry(home.desk, await home.ids(), "ada")
    loops = [asyncio.create_task(Letters(home.receipts, ACKS, noted, every_s=0.01).run()) for _ in range(3)]

    async def done() -> bool:
        return await home.owner.fetchval("SELECT count(*) FROM dead_letter WHERE state = 'sent'") == 36

    try:
        await until(done, timeout=30, what="all letters")
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    assert noted.asked == [3, 7, 12, 25, 40, 50, *range(60, 90)]
    assert noted.most == 1
    assert await home.owner.fetchval("SELECT array_agg(DISTINCT attempts) FROM dead_letter") == [2]


async def test_who_takes_over_is_the_one_to_say_what_became_of_a_letter(home: Home) -> None:
    await home.put([Bad(1)])
    [dead_id] = await home.ids()
    await retry(home.desk, [dead_id], "ada")
    claim, settle = "SELECT * FROM claim_letters($1, $2, $3, 9)", "SELECT settle_claimed('r', $1, $2, $3, $4, 1, NULL)"
    lease = timedelta(seconds=15)

    async def claimed(who: str) -> int:
        return len(await home.receipts.fetch(claim, ACKS, who, lease))

    assert [await claimed("ann"), await claimed("ben"), await claimed("ann")] == [1, 0, 1]
    await home.owner.execute("UPDATE letter_lease SET lease_until = clock_timestamp()")
    assert await claimed("ben") == 1
    assert not await home.receipts.fetchval(settle, ACKS, "ann", lease, dead_id)
    assert await state_of(home.owner, dead_id) == "retrying"
    assert await home.receipts.fetchval(settle, ACKS, "ben", lease, dead_id)
    assert not await home.receipts.fetchval(settle, ACKS, "ben", lease, dead_id), "told twice"
    assert (await show(home.desk, str(dead_id))).attempts == 2


@asynccontextmanager
async def through(gate: Gate, url: str) -> AsyncIterator[Pool]:
    parts = urlsplit(url)
    place = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{gate.port}"
    async with open_pool(urlunsplit(parts._replace(netloc=place)), size=2, name="gated") as pool:
        yield pool


async def test_a_store_that_is_away_costs_no_attempt(home: Home, database: Database) -> None:
    conversation_id = str(uuid.uuid4())
    await seed(home.owner, conversation_id, 9, {"anna": EVERYTHING})
    await home.put([ack(1, read(conversation_id))])
    [dead_id] = await home.ids()
    parts = urlsplit(database.owner_url)
    gate = Gate(parts.hostname or "", parts.port or 5432)
    await gate.open()
    async with through(gate, database.url("receipts")) as gated:
        # What looks for letters reaches the store; what applies them does not.
        loop = asyncio.create_task(Letters(home.receipts, ACKS, Noted(gated), every_s=0.01).run())
        try:
            await gated.fetchval("SELECT 1")
            await gate.shut()
            await retry(home.desk, [dead_id], "ada")
            held = "SELECT count(*) FROM letter_lease"
            await until(lambda: home.owner.fetchval(held), timeout=10, what="a claim")
            assert await state_of(home.owner, dead_id) == "retrying"
            assert len((await show(home.desk, str(dead_id))).tries) == 1
            await gate.open()
            await until(lambda: _is_sent(home, dead_id), timeout=30, what="the letter")
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            await gate.shut()
    assert (await show(home.desk, str(dead_id))).attempts == 2


async def _is_sent(home: Home, dead_id: int) -> bool:
    return await state_of(home.owner, dead_id) == "sent"


async def test_the_service_puts_acks_on_the_desk_and_tries_them_again(
    database: Database, stores: Stores, topic_prefix: str, tmp_path: Path
) -> None:
    known, late = str(uuid.uuid4()), str(uuid.uuid4())
    async with (
        open_stage(database, stores.kafka, topic_prefix, tmp_path) as stage,
        open_pool(database.url("console"), size=2, name="desk") as desk,
    ):
        await seed(stage.pool, known, 9, {"anna": EVERYTHING})
        async with stage.process():
            await stage.send_raw([(known, b"not json"), (late, value_of(read(late))), (known, value_of(read(known)))])
            await stage.caught_up()
            found = (await page(desk, Filter(origin=ACKS))).letters
            by_conversation = {letter.conversation_id: letter for letter in found}
            assert by_conversation.keys() == {known, late}
            for letter in found:
                assert letter.read_from is not None
                assert letter.read_from.partition == partition_of(str(letter.conversation_id))
            await seed(stage.pool, late, 9, {"anna": EVERYTHING})
            ended = await settled(desk, await retry(desk, [letter.dead_id for letter in found], "ada"), 30)
            states = {change.dead_id: change.state for change in ended}
            assert states[by_conversation[known].dead_id] == "dead"
            assert states[by_conversation[late].dead_id] == "sent"
        assert {key[0]: row.read for key, row in (await receipts(stage.pool)).items()} == {known: (0, 3), late: (0, 3)}


# The relay beside it.


@pytest.fixture
async def relay(database: Database) -> AsyncIterator[Pool]:
    async with open_pool(database.url("relay"), size=2, name="relay") as pool:
        yield pool


async def test_the_relay_redrives_them_too_under_one_cap(home: Home, relay: Pool) -> None:
    of_relay = await bury(home.owner, 1)
    of_gateway = await bury(home.owner, 1, origin="receipts.v1", after_s=-1)
    await home.put([Bad(1), Bad(2)])
    first, second = (await home.ids())[2:]
    await home.owner.execute("UPDATE dead_letter SET died_at = died_at - interval '1 day' WHERE dead_id = $1", first)
    await home.owner.execute("UPDATE dead_letter SET died_at = died_at - interval '1 hour' WHERE dead_id = $1", second)
    since: datetime = await home.owner.fetchval("SELECT clock_timestamp()")
    parking = ParkingStore(relay, "ann")
    assert await parking.redrive(since, 2) == 2
    assert await parking.redrive(since, 2) == 0
    states = {dead_id: await state_of(home.owner, dead_id) for dead_id in await home.ids()}
    assert states == {of_relay: "retrying", of_gateway: "dead", first: "retrying", second: "dead"}
    assert await actions(home.owner, first) == [("redrive", "redrive by ann", None)]
    assert await home.again().look() == 1
    assert await state_of(home.owner, first) == "dead"
    assert await parking.redrive(since, 9) == 1, "each once, and the one that had no room"
    assert await state_of(home.owner, second) == "retrying"


async def test_the_relay_sees_none_but_its_own(home: Home, relay: Pool, database: Database) -> None:
    of_relay = await bury(home.owner, 1, state="retrying", outbox_id=900)
    key = str(await home.owner.fetchval("SELECT conversation_id FROM dead_letter")).encode()
    await home.put([Bad(1, key=key, partition=shard_of(1))])
    acks = (await home.ids())[-1]
    await home.owner.execute(
        "SELECT bury_stream_records('events.v1', 'c', $1, '{1}', $2, '{v}', NULL, '{x}')", [shard_of(1)], [key]
    )
    of_gateway = (await home.ids())[-1]
    await retry(home.desk, [acks], "ada")
    parking = ParkingStore(relay, "ann")
    assert await parking.due_letters(range(64)) == [(shard_of(1), of_relay)]
    assert [row[0] for row in await home.desk.fetch("SELECT dead_id FROM outbox_dead")] == [of_relay]
    await Backlog(relay).look()
    assert [DEAD_LETTERS.labels(state)._value.get() for state in ("dead", "retrying")] == [1, 2]

    others = "SELECT t::text FROM dead_letter AS t WHERE origin <> 'outbox' ORDER BY dead_id"
    before = await home.owner.fetch(others)
    connection, of_owner = await asyncpg.connect(database.url("relay")), await asyncpg.connect(database.owner_url)
    try:
        ids = await park(connection, of_owner, ["failed", "dead"])
        assert await letters.settle(connection, ids[:1], ["dead"]) == 0
        await of_owner.fetchval("SELECT rewind_shard($1, $2, 'me')", shard_of(1), ids[0])
        assert not await connection.fetchval("SELECT settle_letter('x', 9, $1, $2, 1, 1, NULL)", shard_of(1), acks)
    finally:
        await connection.close()
        await of_owner.close()
    assert await home.owner.fetch(others) == before
    assert [await state_of(home.owner, dead_id) for dead_id in (acks, of_gateway)] == ["retrying", "dead"]


async def test_they_expire_as_all_letters_do(home: Home, relay: Pool) -> None:
    await home.put([Bad(1), Bad(2, partition=63)])
    kept, gone = await home.ids()
    await retry(home.desk, [gone], "ada")
    await home.again().look()
    assert await relay.fetch("SELECT * FROM expire_letters('1 hour', 10)") == []
    await home.owner.execute("UPDATE dead_letter SET died_at = died_at - interval '2 hours' WHERE dead_id = $1", gone)
    [row] = await relay.fetch("SELECT * FROM expire_letters('1 hour', 10)")
    assert (row["dead_id"], row["conversation_id"], row["topic"]) == (gone, None, ACKS)
    rows = await home.all_rows()
    assert [len(rows[table]) for table in TABLES[:3]] == [1, 1, 0]
    assert await home.ids() == [kept]


# The gateways' own.


def on_gateway(pool: Pool, stores: Stores, **bounds: int) -> GatewayLetters:
    return GatewayLetters(pool, stores.kafka, Topics("waybill"), flush_s=0.01, **bounds)


async def test_what_several_gateways_cannot_read_is_one_letter_that_nobody_tries_again(
    home: Home, database: Database, stores: Stores
) -> None:
    conversation_id, event_id = str(uuid.uuid4()), str(uuid.uuid4())
    named = [("ce_id", event_id.encode()), ("seq", b"7"), ("ce_type", b"waybill.event.message")]
    events = [
        Bad(1, b"junk", conversation_id.encode(), topic="waybill.events.v1", headers=[*named]),
        Bad(2, key=b"\0", topic="waybill.events.v1"),
    ]
    receipt = Bad(1, b"junk", conversation_id.encode(), topic="waybill.receipts.v1", headers=[("seq", b"7")])
    async with open_pool(database.url("gateway"), size=2, name="gateway") as pool:
        for _ in range(2):
            gateway = on_gateway(pool, stores)
            for record in (*events, receipt):
                gateway.note(record, "ValueError: not a frame")
            assert len(gateway) == 3
            await gateway.flush()
            assert len(gateway) == 0
    first, second, third = (await page(home.desk, Filter(), newest=False)).letters
    assert [letter.origin for letter in (first, second, third)] == ["events.v1", "events.v1", "receipts.v1"]
    assert (first.conversation_id, first.event_id, first.seq) == (conversation_id, event_id, 7)
    assert first.type == "waybill.event.message"
    assert third.seq is None, "of a receipt it is an id of the outbox"
    assert first.read_from is not None
    assert first.read_from.cluster == await cluster_id(stores.kafka)
    assert await home.owner.fetch("SELECT DISTINCT service, kind, cause FROM transition") == [
        ("gateway", "dead", "ValueError")
    ]
    with pytest.raises(ConflictError, match="waybill relay rewind"):
        only(await retry(home.desk, [first.dead_id], "ada"))
    assert only(await discard(home.desk, [first.dead_id], "seen", "ada")).changed


async def test_a_gateway_waits_for_nobody_and_keeps_a_bounded_number(
    home: Home, database: Database, stores: Stores
) -> None:
    parts = urlsplit(database.owner_url)
    gate = Gate(parts.hostname or "", parts.port or 5432)
    dropped = LETTERS_DROPPED._value.get()
    async with through(gate, database.url("gateway")) as gated:
        gateway = on_gateway(gated, stores, most_waiting=5, most_bytes=1000)
        for offset in range(7):
            gateway.note(Bad(offset, topic="waybill.events.v1"), "ValueError: not a frame")
        assert (len(gateway), LETTERS_DROPPED._value.get() - dropped) == (5, 2)
        with pytest.raises(UnavailableError):
            await gateway.flush()
        assert len(gateway) == 5
        running = asyncio.create_task(gateway.run())
        try:
            await gate.open()
            await until(lambda: len(gateway) == 0, timeout=30, what="what waited")
            gateway.note(Bad(9, b"x" * 2000, topic="waybill.events.v1"), "ValueError: not a frame")
            assert LETTERS_DROPPED._value.get() - dropped == 3
            gateway.note(Bad(10, topic="waybill.events.v1"), "ValueError: not a frame")
            await until(lambda: len(gateway) == 0, timeout=30, what="one more")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await gate.shut()
    places = [letter.read_from for letter in (await page(home.desk, Filter(), newest=False)).letters]
    assert [place and place.offset for place in places] == [0, 1, 2, 3, 4, 10]
