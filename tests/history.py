"""Writers that outlive their stores, and the check of what came of all they wrote."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from shared.postgres import RETRIABLE
from tests.relays import Writer, add, all_records, conversation, order_per_conversation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from aiokafka import ConsumerRecord

ODD = ["half a pair"]
"""Headers that no record can be made of."""


class LastingWriter:
    """A `Writer` that loses its connection, comes back, and goes on behind what the outbox holds by then.

    ``rows`` in one transaction, a pause of ``every_s``, and before one in ``odd_in`` of them a row that can't be
    published.
    """

    def __init__(
        self, url: str, conversations: Sequence[int], *, rows: int = 20, every_s: float = 0.1, odd_in: int | None = None
    ) -> None:
        self._url = url
        self._conversations = conversations
        self._rows = rows
        self._every_s = every_s
        self._odd_in = odd_in
        self._chance = random.Random(conversations[0])
        self.returns = -1

    async def run(self, stop: asyncio.Event) -> None:
        """Write until ``stop`` is set."""
        while not stop.is_set():
            with suppress(*RETRIABLE):
                await self._write(stop)
            await _pause(stop, 0.1)

    async def _write(self, stop: asyncio.Event) -> None:
        connection = await asyncpg.connect(self._url, timeout=5, command_timeout=10)
        try:
            self.returns += 1
            writer = Writer(connection, self._conversations)
            ids = [conversation(number) for number in self._conversations]
            # A commit whose answer was lost may have happened.
            last = "SELECT conversation_id::text, max(seq) FROM outbox WHERE conversation_id = ANY ($1) GROUP BY 1"
            writer.last_seq.update(await connection.fetch(last, ids))
            while not stop.is_set():
                if self._odd_in is not None and self._chance.randrange(self._odd_in) == 0:
                    await odd_row(connection, writer, self._chance.choice(self._conversations))
                await writer.write(self._rows)
                await _pause(stop, self._every_s)
        finally:
            connection.terminate()


async def odd_row(connection: asyncpg.Connection, writer: Writer, number: int) -> int:
    """The next row of a conversation of ``writer``, which can't be published; its id."""
    key = str(conversation(number))
    writer.last_seq[key] += 1
    return await add(connection, number, seq=writer.last_seq[key], headers=ODD)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


@asynccontextmanager
async def load(writers: Sequence[LastingWriter]) -> AsyncIterator[None]:
    """The writers write meanwhile."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for writer in writers:
            group.create_task(writer.run(stop))
        try:
            yield
        finally:
            stop.set()


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, from ``begun`` to ``ended`` (seconds since 1970)."""

    what: str
    begun: float
    ended: float


@dataclass
class Faults:
    """Those of a test, in their order."""

    done: list[Fault] = field(default_factory=list)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        begun = time.time()
        yield
        self.done.append(Fault(what, begun, time.time()))

    def near(self, at: float, before_s: float, after_s: float) -> bool:
        """Whether a fault begins at most ``before_s`` after this time, or ended at most ``after_s`` before it."""
        return any(fault.begun - before_s <= at <= fault.ended + after_s for fault in self.done)


_ROWS = "SELECT shard, id, conversation_id::text AS key, topic, event_id::text, seq FROM outbox ORDER BY shard, id"
_DEAD = "SELECT event_id::text FROM outbox_dead WHERE state = 'dead'"
_DELIVERIES = "SELECT shard, topic, from_id, to_id, base_offset FROM outbox_delivery"
_PARKED = "SELECT shard, id, kafka_offset FROM outbox_parked"


class Place(NamedTuple):
    """Where the tables say that a row is."""

    event_id: str
    topic: str
    shard: int
    offset: int


def places(
    rows: Sequence[asyncpg.Record], deliveries: Sequence[asyncpg.Record], parked: Sequence[asyncpg.Record]
) -> list[Place]:
    """By the row's rank in each delivery that covers it, among those that were never parked; else by its own offset."""
    own = {(row["shard"], row["id"]): row["kafka_offset"] for row in parked}
    straight: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    found = []
    for row in rows:
        if (row["shard"], row["id"]) not in own:
            straight[row["shard"], row["topic"]].append((row["id"], row["event_id"]))
        elif (offset := own[row["shard"], row["id"]]) is not None:
            found.append(Place(row["event_id"], row["topic"], row["shard"], offset))
    for delivery in deliveries:
        shard, topic = delivery["shard"], delivery["topic"]
        line = straight[shard, topic]
        first = bisect_left(line, (delivery["from_id"],))
        last = bisect_left(line, (delivery["to_id"] + 1,))
        for rank, (_, event_id) in enumerate(line[first:last]):
            found.append(Place(event_id, topic, shard, delivery["base_offset"] + rank))
    return found


@dataclass
class History:
    """All rows, all records, all dead letters of a test, once it is quiet."""

    rows: list[asyncpg.Record]
    records: list[ConsumerRecord[bytes, bytes]]
    dead: set[str]
    places: list[Place]
    prefix: str
    copies: dict[str, list[ConsumerRecord[bytes, bytes]]] = field(init=False)

    def __post_init__(self) -> None:
        self.copies = defaultdict(list)
        for record in self.records:
            self.copies[event_of(record)].append(record)

    def lost(self) -> set[str]:
        """Committed, and neither in Kafka nor a dead letter."""
        return {row["event_id"] for row in self.rows} - set(self.copies) - self.dead

    def unknown(self) -> set[str]:
        """In Kafka, and never committed, or a dead letter."""
        return set(self.copies) - ({row["event_id"] for row in self.rows} - self.dead)

    def disordered(self) -> dict[str, tuple[list[int], list[int]]]:
        """Conversations whose first copies are not all of its rows in their order: these, those."""
        expected: dict[str, list[int]] = defaultdict(list)
        for row in self.rows:
            if row["event_id"] not in self.dead:
                expected[row["key"]].append(row["seq"])
        found = order_per_conversation(self.records)
        return {
            key: (found.get(key, []), expected.get(key, []))
            for key in {*found, *expected}
            if found.get(key) != expected.get(key)
        }

    def misplaced(self) -> list[tuple[str, int, int]]:
        """Rows that do not lie where the tables say (event, partition, offset), and those of which they say nothing."""
        there = {(one.topic, one.partition, one.offset): event_of(one) for one in self.records}
        wrong = [
            (one.event_id, one.shard, one.offset)
            for one in self.places
            if there.get((f"{self.prefix}.{one.topic}", one.shard, one.offset)) != one.event_id
        ]
        told = {one.event_id for one in self.places}
        untold = {row["event_id"] for row in self.rows} - told - self.dead
        return wrong + [(event_id, -1, -1) for event_id in untold]

    def repeats(self) -> list[tuple[float, float]]:
        """Each further copy: when the one before it was made, and when it was itself (seconds since 1970)."""
        found = []
        for copies in self.copies.values():
            inorder = sorted(copies, key=lambda record: record.offset)
            found += [(a.timestamp / 1000, b.timestamp / 1000) for a, b in pairwise(inorder)]
        return found

    def hold(self) -> None:
        """Nothing is lost, invented, out of order or said to be where it is not."""
        for what in (self.lost, self.unknown, self.disordered, self.misplaced):
            assert not (found := what()), f"{what.__name__}: {len(found)}, {str(found)[:2_000]}"


def event_of(record: ConsumerRecord[bytes, bytes]) -> str:
    return str(dict(record.headers)["ce_id"].decode())


async def read_history(
    db: asyncpg.Connection, kafka: str, prefix: str, topics: Sequence[str] = ("events.v1",)
) -> History:
    rows = await db.fetch(_ROWS)
    return History(
        rows,
        await all_records(kafka, [f"{prefix}.{topic}" for topic in topics]),
        {row[0] for row in await db.fetch(_DEAD)},
        places(rows, await db.fetch(_DELIVERIES), await db.fetch(_PARKED)),
        prefix,
    )


async def nothing_parked(db: asyncpg.Connection) -> bool:
    """Whether no row waits to be tried again."""
    return not await db.fetchval("SELECT count(*) FROM outbox_parked WHERE state IN ('waiting', 'failed')")
