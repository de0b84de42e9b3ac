"""A minute of faults by chance under load: then nothing is lost, all is in order, and all accounted for."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.history import Faults, LastingWriter, load, nothing_parked, read_history
from tests.relays import QUICK, Relay, Relays, drained
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.kafka import Topics
    from tests.databases import Database
    from tests.own_stack import OwnStack

pytest_plugins = ["tests.own_fixtures"]

pytestmark = pytest.mark.long(90)

LENGTH_S = 60.0
WRITERS = 16
SETTINGS = {**QUICK, "WAYBILL_RELAY_MAX_ATTEMPTS": "2", "WAYBILL_RELAY_RETRY_DELAY_MS": "200"}

BEFORE_S = 2.0
"""A row comes again whose first copy was under way when a fault began: for the longest delivery, of 1.5 s, at most."""

AFTER_S = 4.5
"""What was under way has ended, and shards have been taken over, a lease (3 s) and a delivery after a fault."""


class Trouble:
    """Does one thing after another to the stores and the relays."""

    def __init__(self, stack: OwnStack, relays: list[Relay], chance: random.Random) -> None:
        self.faults = Faults()
        self._stack = stack
        self._relays = relays
        self._chance = chance
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill_relays,
            self._freeze_relay,
            self._end_relay,
            self._freeze_broker,
            self._kill_broker,
            self._restart_postgres,
        ]

    async def run(self, seconds: float) -> None:
        """Each kind once, and again until the time is over; some close upon each other, some after a rest."""
        over = time.monotonic() + seconds
        first = True
        while first or time.monotonic() < over:
            rests = self._chance.sample([0.5, 0.5, 0.5, 9.0, 9.0, 9.0], len(self._kinds))
            for fault in self._chance.sample(self._kinds, len(self._kinds)):
                if first or time.monotonic() < over:
                    await fault()
                    await lasts(rests.pop())
            first = False

    async def _kill_relays(self) -> None:
        dying = self._chance.sample(self._relays, self._chance.randint(1, len(self._relays)))
        with self.faults.noted(f"{len(dying)} relays killed"):
            for relay in dying:
                relay.kill()
            await lasts(self._chance.uniform(0, 4))
            for relay in dying:
                relay.start()

    async def _freeze_relay(self) -> None:
        relay = self._chance.choice(self._relays)
        with self.faults.noted("a relay frozen"):
            relay.send(signal.SIGSTOP)
            await lasts(self._chance.uniform(0.5, 6))
            relay.send(signal.SIGCONT)

    async def _end_relay(self) -> None:
        relay = self._chance.choice(self._relays)
        with self.faults.noted("a relay ended in order"):
            relay.send(signal.SIGTERM)
            await relay.ended()
            relay.start()

    async def _freeze_broker(self) -> None:
        with self.faults.noted("the broker frozen"):
            self._stack.fault("kafka", signal.SIGSTOP)
            await lasts(self._chance.uniform(0.3, 3))
            self._stack.fault("kafka", signal.SIGCONT)

    async def _kill_broker(self) -> None:
        with self.faults.noted("the broker killed"):
            self._stack.fault("kafka", signal.SIGKILL)
            await asyncio.to_thread(self._stack.restart, "kafka")

    async def _restart_postgres(self) -> None:
        how = self._chance.choice([signal.SIGKILL, signal.SIGQUIT, signal.SIGINT])
        with self.faults.noted(f"Postgres ended by {how.name}"):
            self._stack.fault("postgres", how)
            await asyncio.to_thread(self._stack.restart, "postgres")


async def lasts(seconds: float) -> None:
    """Let so much time pass."""
    over = time.monotonic() + seconds
    await until(lambda: time.monotonic() >= over, timeout=seconds + 30, what="time")


@pytest.mark.timeout(400)
@pytest.mark.promise("I4", "I5")
async def test_a_minute_of_trouble_leaves_a_history_without_a_flaw(
    own_stack: OwnStack, own_database: Database, own_topics: Topics, own_fleet: Relays
) -> None:
    """`WAYBILL_TEST_HISTORY_SEED` repeats one."""
    seed = int(os.environ.get("WAYBILL_TEST_HISTORY_SEED") or random.randrange(2**32))
    print(f"WAYBILL_TEST_HISTORY_SEED={seed}")
    chance = random.Random(seed)
    relays = [own_fleet.start(f"slot-{number}", SETTINGS) for number in range(chance.choice([2, 3]))]
    await asyncio.gather(*(relay.ready() for relay in relays))
    writers = [
        LastingWriter(own_database.owner_url, range(10 * n, 10 * n + 10), rows=8, every_s=0.2, odd_in=60)
        for n in range(WRITERS)
    ]
    trouble = Trouble(own_stack, relays, chance)
    async with load(writers):
        await lasts(2)
        await trouble.run(LENGTH_S)
        await lasts(AFTER_S + 2)
    for fault in trouble.faults.done:
        print(f"{fault.begun:.1f} to {fault.ended:.1f}: {fault.what}")
    assert [relay.process.poll() for relay in relays] == [None] * len(relays), "no relay has ended by itself"

    db = await asyncpg.connect(own_database.owner_url)
    try:
        await drained(db, timeout=60)
        await until(lambda: nothing_parked(db), timeout=30, what="the end of all queues")
        history = await read_history(db, own_stack.kafka, own_topics.prefix)
        history.hold()
        odd = {row[0] for row in await db.fetch("SELECT event_id::text FROM outbox WHERE headers <> '{}'")}
        assert history.dead == odd
        assert await db.fetchval("SELECT count(*) FROM outbox_dead") == len(odd)
    finally:
        await db.close()

    def near(at: float) -> bool:
        return trouble.faults.near(at, BEFORE_S, AFTER_S)

    repeats = history.repeats()
    quiet = [record for record in history.records if not near(record.timestamp / 1000)]
    print(f"{len(history.rows)} rows, {len(odd)} dead, {len(repeats)} repeats, {len(quiet)} records in quiet times")
    assert [(a, b) for a, b in repeats if not (near(a) or near(b))] == []
    assert len(quiet) > len(history.rows) / 50, "or this would say nothing"
