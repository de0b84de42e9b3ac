"""Relay processes, rows for them to publish, and what of it is in Kafka."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
from aiokafka import ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from deploy.local import ports
from shared.kafka import PARTITIONS, partition_of, partitions, reader
from tests.databases import Database
from tests.waiting import until

COMMAND = [sys.executable, "-m", "services.relay.main"]

QUICK = {"WAYBILL_RELAY_SENDING_STALE_MS": "3000", "WAYBILL_RELAY_DELIVERY_TIMEOUT_MS": "1500"}
"""A short lease."""


@dataclass
class Relay:
    """A relay as a process of its own. Started again, it keeps its port, its settings and its log."""

    environment: dict[str, str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(COMMAND, env=self.environment, stderr=log, stdout=log)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self.process.kill()
        self.process.wait(10)

    async def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        await until(lambda: self.process.poll() is not None, timeout=30, what="end of the relay")
        return self.process.returncode

    async def readyz(self) -> dict[str, Any] | None:
        """What `readyz` answers; None while nobody does."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}/readyz") as answer,
            ):
                return dict(await answer.json())
        except OSError:
            return None

    async def ready(self) -> None:
        async def is_ready() -> bool:
            return ((await self.readyz()) or {}).get("status") == "ok"

        await until(is_ready, timeout=60, what=f"ready relay (log: {self.log})")

    async def metrics(self) -> dict[str, float]:
        """Its metrics: name with labels → value."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The entries of its log with this text."""
        entries = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [entry for entry in entries if entry.get("event") == event]


class Relays:
    """Starts relays on one database and topic prefix, and ends them all."""

    def __init__(self, database: Database, kafka: str, topic_prefix: str, folder: Path) -> None:
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")},
            "WAYBILL_POSTGRES_URL": database.url("relay"),
            "WAYBILL_KAFKA_BOOTSTRAP": kafka,
            "WAYBILL_TOPIC_PREFIX": topic_prefix,
        }
        self._folder = folder
        self.all: list[Relay] = []

    def start(self, owner: str | None = None, settings: dict[str, str] | None = None) -> Relay:
        port = ports.free_port()
        environment = {**self._environment, **(QUICK if settings is None else settings)}
        environment["WAYBILL_RELAY_PRIVATE_PORT"] = str(port)
        if owner is not None:
            environment["WAYBILL_RELAY_OWNER"] = owner
        relay = Relay(environment, port, self._folder / f"relay-{len(self.all)}.log")
        self.all.append(relay)
        return relay

    def close(self) -> None:
        for relay in self.all:
            relay.kill()


@contextmanager
def relays(database: Database, kafka: str, topic_prefix: str, folder: Path) -> Iterator[Relays]:
    made = Relays(database, kafka, topic_prefix, folder)
    try:
        yield made
    finally:
        made.close()


def conversation(number: int) -> uuid.UUID:
    """The id of a conversation of tests."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"relay-{number}")


def shard_of(number: int) -> int:
    return partition_of(str(conversation(number)))


_INSERT = """
    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at)
    SELECT i.shard, i.conversation_id, i.seq, uuidv7(), 'events.v1', 'waybill.event.message', '/waybill/ingest', '{}',
           convert_to('{"seq":' || i.seq || '}', 'UTF8'), clock_timestamp()
    FROM unnest($1::smallint[], $2::uuid[], $3::bigint[]) WITH ORDINALITY AS i (shard, conversation_id, seq, ord)
    ORDER BY i.shard, i.conversation_id, i.ord
"""


class Writer:
    """Writes events into the outbox as every writer does: ids drawn under the shards' locks, `seq` dense."""

    def __init__(self, connection: asyncpg.Connection, conversations: Sequence[int]) -> None:
        self._connection = connection
        self._conversations = conversations
        self._turn = 0
        self.last_seq: dict[str, int] = defaultdict(int)

    async def write_one(self, **changes: Any) -> int:
        """The next row of the first conversation, with these columns; returns its id."""
        number = self._conversations[0]
        key = str(conversation(number))
        self.last_seq[key] += 1
        return await add(self._connection, number, seq=self.last_seq[key], **changes)

    async def write(self, rows: int) -> None:
        """One transaction of so many rows, each conversation in turn."""
        shards, ids, seqs = [], [], []
        for _ in range(rows):
            number = self._conversations[self._turn % len(self._conversations)]
            self._turn += 1
            key = conversation(number)
            self.last_seq[str(key)] += 1
            shards.append(shard_of(number))
            ids.append(key)
            seqs.append(self.last_seq[str(key)])
        async with self._connection.transaction():
            await self._connection.execute("SELECT lock_outbox_shards($1)", shards)
            await self._connection.execute(_INSERT, shards, ids, seqs)


async def add(db: asyncpg.Connection, number: int, **changes: Any) -> int:
    """One row of conversation `number`; returns its id."""
    row = {
        "seq": 1,
        "event_id": uuid.uuid4(),
        "topic": "events.v1",
        "type": "waybill.event.message",
        "source": "/waybill/ingest",
        "headers": [],
        "payload": b'{"t":"event"}',
        **changes,
    }
    async with db.transaction():
        await db.execute("SELECT lock_outbox_shards($1)", [shard_of(number)])
        return int(
            await db.fetchval(
                "INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, headers, payload, "
                "created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, now()) RETURNING id",
                shard_of(number),
                conversation(number),
                *row.values(),
            )
        )


def ids_of(records: Sequence[ConsumerRecord[bytes, bytes]]) -> list[str]:
    return [dict(record.headers)["ce_id"].decode() for record in records]


def same_shard(number: int) -> int:
    """Another conversation of its shard."""
    return next(n for n in range(number + 1, number + 5000) if shard_of(n) == shard_of(number))


def other_shard(number: int) -> int:
    """A conversation of another shard."""
    return next(n for n in range(number + 1, number + 1000) if shard_of(n) != shard_of(number))


async def make_topic(admin: AIOKafkaAdminClient, name: str, configs: dict[str, str]) -> None:
    """Returns once the brokers tell of it with all its leaders: they do so a little after it was made."""
    await admin.create_topics([NewTopic(name, PARTITIONS, 1, topic_configs=configs)])

    async def known() -> bool:
        [described] = await admin.describe_topics([name])
        return len([part for part in described["partitions"] if part["leader"] >= 0]) == PARTITIONS

    await until(known, timeout=30, what="a topic with all its leaders")


async def all_records(kafka: str, names: Sequence[str]) -> list[ConsumerRecord[bytes, bytes]]:
    """Every record of these topics, by partition in order of offset."""
    consumer = reader(kafka, client_id="tests")
    await consumer.start()
    found: list[ConsumerRecord[bytes, bytes]] = []
    try:
        every = partitions(names)
        consumer.assign(every)
        begins, ends = await consumer.beginning_offsets(every), await consumer.end_offsets(every)
        waiting = {part for part in every if ends[part] > begins[part]}
        for part in every:
            consumer.seek(part, begins[part])
        async with asyncio.timeout(30):
            while waiting:
                for part, records in (await consumer.getmany(timeout_ms=200)).items():
                    found += records
                    if records[-1].offset + 1 >= ends[part]:
                        waiting.discard(part)
    finally:
        await consumer.stop()
    return found


def order_per_conversation(records: Sequence[ConsumerRecord[bytes, bytes]]) -> dict[str, list[int]]:
    """The seqs of each conversation in the order of their partition, without what came again."""
    seen: set[str] = set()
    order: dict[str, list[int]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.topic, record.partition, record.offset)):
        headers = dict(record.headers)
        if (event_id := headers["ce_id"].decode()) not in seen:
            seen.add(event_id)
            order[record.key.decode()].append(int(headers["seq"]))
    return dict(order)


async def drained(connection: asyncpg.Connection, *, timeout: float) -> None:
    """Wait until no row lies above its shard's cursor."""

    async def nothing_left() -> bool:
        return not await connection.fetchval(
            "SELECT count(*) FROM outbox AS o JOIN outbox_shard AS s USING (shard) WHERE o.id > s.cursor_id"
        )

    await until(nothing_left, timeout=timeout, what="empty backlog")


async def holders(connection: asyncpg.Connection) -> dict[str | None, int]:
    """Owner → number of shards, where the lease lasts; None → the others."""
    rows = await connection.fetch(
        "SELECT CASE WHEN lease_until > clock_timestamp() THEN owner END, count(*) FROM outbox_shard GROUP BY 1"
    )
    return {row[0]: row[1] for row in rows}
