"""Writes into Postgres what the load client publishes straight to Kafka: the same events under the same seqs.

So both gateways get their events in the same way and at the same moment, and one of Waybill's sessions that falls
behind finds them in its store. They are there some milliseconds after Kafka has them, where in life they are there
before; a session that reads in this moment reads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from aiokafka import AIOKafkaConsumer

from shared.kafka import begin_at_end, ensure_fetching, header
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from shared.kafka import Consumed

_SQL = statements(__file__)

_OWN = "/waybill/ingest"
"""Source of what is in Postgres already."""

_GATHER_MS, _GATHER_BYTES = 30, 1024 * 1024
"""How much the broker gathers before it answers: each answer costs, here and there, however few records it brings."""

_POLL_MS = 500
_MOST = 5_000
_TIMEOUT_S = 30.0


class Event(msgspec.Struct, frozen=True):
    """What of an `event` frame becomes a row. The body stays as it is."""

    conversation_id: str
    seq: int
    event_id: str
    sender_id: str
    client_msg_id: str
    body: msgspec.Raw
    created_at: str


class Rows(NamedTuple):
    """Columns of rows."""

    conversations: list[UUID]
    seqs: list[int]
    event_ids: list[UUID]
    senders: list[str]
    client_msg_ids: list[str]
    bodies: list[str]
    times: list[str]


_EVENT = msgspec.json.Decoder(Event)


def rows(records: Iterable[Consumed]) -> Rows:
    """Rows of those records that ingest did not write."""
    events = [_EVENT.decode(record.value or b"") for record in records if header(record.headers, "ce_source") != _OWN]
    return Rows(
        [UUID(event.conversation_id) for event in events],
        [event.seq for event in events],
        [UUID(event.event_id) for event in events],
        [event.sender_id for event in events],
        [event.client_msg_id for event in events],
        [bytes(event.body).decode() for event in events],
        [event.created_at for event in events],
    )


class Shadow:
    """``behind_ms``: how long after its time in Kafka an event was committed, at most."""

    def __init__(self, kafka: str, topic: str, postgres_url: str) -> None:
        self.behind_ms = 0.0
        self._kafka = kafka
        self._topic = topic
        self._postgres_url = postgres_url

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write what comes from now on, while the block runs. Raises what reading or writing raised."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._kafka,
            client_id="bench-shadow",
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_min_bytes=_GATHER_BYTES,
            fetch_max_wait_ms=_GATHER_MS,
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await begin_at_end(consumer, self._topic)
            task = asyncio.create_task(self._write(consumer), name="shadow")
            try:
                yield
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        finally:
            await consumer.stop()

    async def _write(self, consumer: AIOKafkaConsumer) -> None:
        db = await asyncpg.connect(self._postgres_url, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)
        try:
            # Nothing of it has to outlive the run.
            await db.execute("SET synchronous_commit = off")
            while True:
                ensure_fetching(consumer)
                found = await consumer.getmany(timeout_ms=_POLL_MS, max_records=_MOST)
                records = [record for some in found.values() for record in some]
                new = rows(records)
                if new.seqs:
                    await db.execute(_SQL["write"], *new)
                    oldest = min(record.timestamp for record in records)
                    self.behind_ms = max(self.behind_ms, round(time.time() * 1000 - oldest, 1))
        finally:
            await db.close(timeout=_TIMEOUT_S)
