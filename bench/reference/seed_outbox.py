"""The reference: an outbox table with a status column, as it is usually built.

One transaction per message numbers it, writes it and writes its outbox row. A dispatcher scans the outbox every few
seconds, claims rows in batches of 100 with `FOR UPDATE SKIP LOCKED`, sends them to Kafka and marks them. With ``push``
each message is sent right after its commit as well, and the scan is the safety net.

It is tuned within its design, and spared what does not belong to it:

- every statement is prepared once per connection; with ``at_once`` the whole transaction is a single statement, and so
  a single round trip, which is more than such code usually does (``statements``: five round trips);
- the dispatcher has one of the connections for itself, so that a rush of sends does not starve it;
- the scan does not wait while batches come back full, so a backlog is drained without a pause;
- a batch goes to Kafka as a whole and is waited for once, not per record; no linger; `acks=all`, idempotent, as
  Waybill's;
- the index `(status, next_retry_at, id)` answers a claim without a sort; room on the pages for updates in place, and a
  keener autovacuum, since every row is updated twice;
- a row that is pushed after its commit is hidden from the scan for ``scan_s``, so that the two do not send it twice;
- it checks neither membership nor rights nor the body, all of which Waybill does.

What it does not promise, by design: order in Kafka (a failed record is passed by the next ones, two dispatchers or two
pushes overtake each other), and that one broken record does not keep its batch.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import asyncpg
import msgspec
from aiokafka.errors import KafkaError

from shared.kafka import producer
from shared.postgres import RETRIABLE, open_pool
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from aiokafka import AIOKafkaProducer

    from shared.postgres import Pool, Record

_SQL = statements(__file__)

BATCH = 100
_STALE_S = 30.0
_MOST_PUSHES = 1_000
"""Pushes under way at a time; what commits beyond it is left to the scan."""

_DISPATCHING = 1
"""Connections of the dispatcher, out of the budget; it does one thing after the other."""

_CLOSE_S = 10.0
_TIMEOUT_S = 30.0

Writing = Literal["statements", "at_once"]


class Message(msgspec.Struct, frozen=True):
    """What a client sends; an item of the door's request."""

    conversation_id: str
    sender_id: str
    client_msg_id: str
    body: msgspec.Raw


class Stored(msgspec.Struct, frozen=True):
    """A message as it was committed."""

    seq: int
    created_at: str
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Design:
    """``pool``: connections for everything, at least 2. ``push``: send right after the commit, too.

    ``scan_s``: seconds from a scan's end to the next one.
    """

    pool: int = 8
    push: bool = False
    writing: Writing = "statements"
    scan_s: float = 3.0


class _Payload(msgspec.Struct, frozen=True):
    conversation_id: str
    sender_id: str
    client_msg_id: str
    body: msgspec.Raw


class SeedOutbox:
    """Writes messages and dispatches them; made by `opened`."""

    def __init__(self, pool: Pool, dispatching: Pool, made: AIOKafkaProducer, topic: str, design: Design) -> None:
        self._pool = pool
        self._dispatching = dispatching
        self._producer = made
        self._topic = topic
        self._design = design
        self._pushes: set[asyncio.Task[None]] = set()
        self._hidden_s = design.scan_s if design.push else 0.0

    # Sending.

    async def send(self, message: Message) -> Stored:
        """Write one message in a transaction of its own; a repeated client id is answered with its first result.

        Returns after the commit. Raises `KeyError` for a conversation that is not there.
        """
        try:
            if self._design.writing == "at_once":
                return await self._write_at_once(message)
            return await self._write(message)
        except asyncpg.UniqueViolationError:
            row = await self._pool.fetchrow(
                _SQL["known"], message.conversation_id, message.sender_id, message.client_msg_id
            )
            assert row is not None
            return _stored(row["seq"], row["created_at"], duplicate=True)

    async def _write(self, message: Message) -> Stored:
        async with self._pool.acquire() as connection, connection.transaction():
            seq = await connection.fetchval(_SQL["next_seq"], message.conversation_id)
            if seq is None:
                raise KeyError(message.conversation_id)
            body = bytes(message.body).decode()
            created_at = await connection.fetchval(
                _SQL["add_message"], message.conversation_id, seq, message.sender_id, message.client_msg_id, body
            )
            payload = _template(message, "%d") % seq
            row_id = await connection.fetchval(_SQL["add_outbox"], message.conversation_id, payload, self._hidden_s)
        self._after_commit(row_id, message.conversation_id, payload)
        return _stored(seq, created_at, duplicate=False)

    async def _write_at_once(self, message: Message) -> Stored:
        row = await self._pool.fetchrow(
            _SQL["write_at_once"],
            message.conversation_id,
            message.sender_id,
            message.client_msg_id,
            bytes(message.body).decode(),
            _template(message, "%s"),
            self._hidden_s,
        )
        if row is None:
            raise KeyError(message.conversation_id)
        self._after_commit(row["id"], message.conversation_id, row["payload"])
        return _stored(row["seq"], row["created_at"], duplicate=False)

    def _after_commit(self, row_id: int, conversation_id: str, payload: str) -> None:
        if self._design.push and len(self._pushes) < _MOST_PUSHES:
            task = asyncio.create_task(self._push(row_id, conversation_id, payload))
            self._pushes.add(task)
            task.add_done_callback(self._pushes.discard)

    async def _push(self, row_id: int, conversation_id: str, payload: str) -> None:
        try:
            await self._producer.send_and_wait(self._topic, payload.encode(), key=conversation_id.encode())
            await self._pool.execute(_SQL["mark_sent"], [row_id])
        except (KafkaError, *RETRIABLE):
            return  # the scan finds it

    # Dispatching.

    async def dispatch(self) -> None:
        """Scan until cancelled."""
        while True:
            try:
                await self._dispatching.execute(_SQL["release_stale"], _STALE_S)
                for status in ("PENDING", "FAILED"):
                    while await self._dispatch_batch(status) == BATCH:
                        pass
            except (KafkaError, *RETRIABLE):
                pass  # the next scan finds them
            await asyncio.sleep(self._design.scan_s)

    async def _dispatch_batch(self, status: str) -> int:
        rows = await self._dispatching.fetch(_SQL["claim"], status, BATCH)
        if rows:
            sent, failed = await self._publish(rows)
            if sent:
                await self._dispatching.execute(_SQL["mark_sent"], sent)
            if failed:
                await self._dispatching.execute(_SQL["mark_failed"], failed)
        return len(rows)

    async def _publish(self, rows: Sequence[Record]) -> tuple[list[int], list[int]]:
        # An update returns its rows in no order of its own.
        ordered = sorted(rows, key=lambda row: int(row["id"]))
        waiting = [
            await self._producer.send(self._topic, row["payload"].encode(), key=str(row["conversation_id"]).encode())
            for row in ordered
        ]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        sent: list[int] = []
        failed: list[int] = []
        for row, result in zip(ordered, results, strict=True):
            (failed if isinstance(result, BaseException) else sent).append(row["id"])
        return sent, failed

    async def unsent(self) -> int:
        """Rows that are not marked as sent."""
        return int(await self._dispatching.fetchval(_SQL["unsent"]) or 0)

    async def settle(self) -> None:
        """Wait for the pushes under way, for a few seconds at most."""
        if self._pushes:
            _, late = await asyncio.wait(self._pushes, timeout=_CLOSE_S)
            for task in late:
                task.cancel()


def _template(message: Message, place: str) -> str:
    """The record's text as a format with one place, for the number, which only the store knows."""
    payload = _Payload(message.conversation_id, message.sender_id, message.client_msg_id, message.body)
    return f'{{"seq":{place},' + msgspec.json.encode(payload)[1:].decode().replace("%", "%%")


def _stored(seq: int, created_at: datetime, *, duplicate: bool) -> Stored:
    return Stored(seq, created_at.isoformat(), duplicate)


@asynccontextmanager
async def opened(postgres_url: str, kafka: str, topic: str, design: Design) -> AsyncIterator[SeedOutbox]:
    """The reference at work: its dispatcher scans while the block runs. Tables and topic must be there."""
    async with (
        open_pool(postgres_url, size=design.pool - _DISPATCHING, name="bench reference", timeout_s=_TIMEOUT_S) as pool,
        open_pool(postgres_url, size=_DISPATCHING, name="bench dispatcher", timeout_s=_TIMEOUT_S) as dispatching,
    ):
        made = producer(kafka, client_id="bench-reference")
        await made.start()
        try:
            outbox = SeedOutbox(pool, dispatching, made, topic, design)
            async with asyncio.TaskGroup() as tasks:
                scanning = tasks.create_task(outbox.dispatch(), name="dispatch")
                try:
                    yield outbox
                    await outbox.settle()
                finally:
                    scanning.cancel()
        finally:
            await made.stop()


async def prepare(postgres_url: str, conversations: Collection[UUID | str]) -> None:
    """Make the tables anew, with these conversations."""
    connection = await asyncpg.connect(postgres_url, timeout=_TIMEOUT_S)
    try:
        await connection.execute(_SQL["schema"], timeout=_TIMEOUT_S)
        await connection.execute(_SQL["add_conversations"], list(conversations), timeout=_TIMEOUT_S)
        await connection.execute("ANALYZE im_conversation", timeout=_TIMEOUT_S)
    finally:
        await connection.close(timeout=_CLOSE_S)
