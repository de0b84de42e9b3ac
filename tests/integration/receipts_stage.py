"""Conversations, acks and processes for the tests of the receipts service."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from deploy.local.ports import free_port
from services.receipts.fold import Held, Mark
from shared.kafka import Consumed, Topics, ensure_topics, partition_of, producer, reader
from shared.postgres import Pool, from_multirange, open_pool, to_multirange
from shared.ranges import OPEN, RangeSet
from tests.databases import Database
from tests.waiting import until

ROOT = Path(__file__).parents[2]
EVERYTHING = RangeSet([(1, OPEN)])


async def seed(
    pool: Pool, conversation_id: str, head: int, members: Mapping[str, RangeSet | None], *, shard: int | None = None
) -> None:
    """A group with these members (None: none) and this head; its events are not needed here."""
    await pool.execute(
        "INSERT INTO conversation (conversation_id, shard, kind, history, creator_id, last_seq, created_at)"
        " VALUES ($1, $2, 'group', 'all', 'anna', $3, now())",
        conversation_id,
        partition_of(conversation_id) if shard is None else shard,
        head,
    )
    for user, visible in members.items():
        if visible is not None:
            await set_visible(pool, conversation_id, user, visible)


async def set_visible(pool: Pool, conversation_id: str, user: str, visible: RangeSet) -> None:
    await pool.execute(
        "INSERT INTO member (conversation_id, user_id, role, visible)"
        " VALUES ($1, $2, 'member', $3::text::int8multirange)"
        " ON CONFLICT (conversation_id, user_id) DO UPDATE SET visible = excluded.visible",
        conversation_id,
        user,
        to_multirange(visible),
    )


@dataclass(frozen=True, slots=True)
class Receipt:
    """A row of `receipt`."""

    delivered: RangeSet
    delivered_seq: int
    read: tuple[int, int]


async def receipts(pool: Pool, conversation_id: str | None = None) -> dict[tuple[str, str], Receipt]:
    """The receipts that say something, by (conversation, user)."""
    rows = await pool.fetch(
        "SELECT * FROM receipt WHERE coalesce(conversation_id = $1, true)"
        " AND (delivered_seq > 0 OR read_version > 0 OR read_seq > 0 OR NOT isempty(delivered))",
        conversation_id,
    )
    return {
        (str(row["conversation_id"]), row["user_id"]): Receipt(
            from_multirange(row["delivered"]), row["delivered_seq"], (row["read_version"], row["read_seq"])
        )
        for row in rows
    }


async def device_cursors(pool: Pool, conversation_id: str | None = None) -> dict[tuple[str, str, str], RangeSet]:
    """The devices that have acked something, by (conversation, user, device)."""
    rows = await pool.fetch(
        "SELECT * FROM device_cursor WHERE coalesce(conversation_id = $1, true) AND NOT isempty(delivered)",
        conversation_id,
    )
    return {
        (str(row["conversation_id"]), row["user_id"], row["device_id"]): from_multirange(row["delivered"])
        for row in rows
    }


async def announced(pool: Pool, *, after: int = 0) -> list[dict[str, object]]:
    """The receipt records in the outbox above an id, in order."""
    rows = await pool.fetch("SELECT payload FROM outbox WHERE topic = 'receipts.v1' AND id > $1 ORDER BY id", after)
    return [json.loads(row["payload"]) for row in rows]


async def offsets(pool: Pool) -> dict[int, int]:
    """The stored offsets by partition; of one topic and cluster, as a test has them."""
    return {row["partition"]: row["next"] for row in await pool.fetch("SELECT partition, next FROM ack_offset")}


def value_of(ack: Held | Mark) -> bytes:
    """The record's value as the gateway writes it."""
    value: dict[str, object] = {
        "conversation_id": ack.conversation_id,
        "user_id": ack.user_id,
        "device_id": ack.device_id,
        "at": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
    }
    if isinstance(ack, Held):
        value |= {"kind": "delivered", "ranges": [list(pair) for pair in ack.ranges]}
    else:
        value |= {"kind": ack.kind, "seq": ack.seq, "version": ack.version}
    return json.dumps(value).encode()


@dataclass(frozen=True, slots=True)
class Stage:
    """Topics under a prefix, a database, and the receipts processes of one test. ``pool`` is the database owner's."""

    database: Database
    bootstrap: str
    prefix: str
    logs: Path
    pool: Pool
    writer: AIOKafkaProducer

    @property
    def topics(self) -> Topics:
        return Topics(self.prefix)

    async def send(self, acks: Iterable[Held | Mark]) -> None:
        """Write acks, each to its conversation's partition, in order; returns once Kafka has them all."""
        await self.send_raw([(ack.conversation_id, value_of(ack)) for ack in acks])

    async def send_raw(self, records: Iterable[tuple[str, bytes]]) -> None:
        waiting = [
            await self.writer.send(self.topics.acks, value, key=key.encode(), partition=partition_of(key))
            for key, value in records
        ]
        await asyncio.gather(*waiting)

    async def ends(self, topic: str) -> dict[int, int]:
        """The end of each of a topic's partitions that is not empty."""
        async with self.kafka_reader() as kafka:
            found = await kafka.end_offsets([TopicPartition(topic, part) for part in range(64)])
        return {tp.partition: end for tp, end in found.items() if end}

    async def records(self, topic: str) -> list[Consumed]:
        """All of a topic's records."""
        ends = await self.ends(topic)
        if not ends:
            return []
        async with self.kafka_reader() as kafka:
            parts = [TopicPartition(topic, part) for part in ends]
            kafka.assign(parts)
            for tp in parts:
                kafka.seek(tp, 0)
            got: list[Consumed] = []
            while len(got) < sum(ends.values()):
                async with asyncio.timeout(10):
                    got += [r for some in (await kafka.getmany(timeout_ms=1000)).values() for r in some]
        return got

    @asynccontextmanager
    async def kafka_reader(self, group: str | None = None) -> AsyncIterator[AIOKafkaConsumer]:
        kafka = reader(self.bootstrap, client_id="test", group=group)
        await kafka.start()
        try:
            yield kafka
        finally:
            await kafka.stop()

    def process(self, **extra: str) -> "Process":
        """A receipts process; not started."""
        env = {
            "WAYBILL_POSTGRES_URL": self.database.url("receipts"),
            "WAYBILL_KAFKA_BOOTSTRAP": self.bootstrap,
            "WAYBILL_TOPIC_PREFIX": self.prefix,
        }
        return Process(env | extra, self.logs / f"receipts-{uuid.uuid4().hex[:6]}.log")

    async def caught_up(self, timeout: float = 30) -> None:
        """Wait until the stored offsets are the ends of the topic."""
        ends = await self.ends(self.topics.acks)

        async def done() -> bool:
            stored = await offsets(self.pool)
            return all(stored.get(part, 0) >= end for part, end in ends.items())

        await until(done, timeout=timeout, what="all acks applied")


@asynccontextmanager
async def open_stage(database: Database, bootstrap: str, prefix: str, logs: Path) -> AsyncIterator[Stage]:
    await ensure_topics(bootstrap, Topics(prefix))
    writer = producer(bootstrap, client_id="test", linger_ms=5)
    await writer.start()
    try:
        async with open_pool(database.owner_url, size=4, name="test") as pool:
            yield Stage(database, bootstrap, prefix, logs, pool, writer)
    finally:
        await writer.stop()


class Process:
    """`python -m services.receipts.main`, killed at the end of the block if it still runs."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        self.port = free_port()
        self.log = log
        self._env = {**os.environ, **env, "WAYBILL_RECEIPTS_PRIVATE_PORT": str(self.port)}
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "services.receipts.main"], cwd=ROOT, env=self._env, stdout=log, stderr=log
            )
        return self

    @property
    def child(self) -> subprocess.Popen[bytes]:
        assert self._child is not None
        return self._child

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text of a path of the private port; 0 if nothing answers."""
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(f"http://127.0.0.1:{self.port}{path}") as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def ready(self, timeout: float = 30) -> None:
        async def is_ready() -> bool:
            assert self.child.poll() is None, self.log.read_text()
            return (await self.get("/readyz"))[0] == 200

        await until(is_ready, timeout=timeout, what="readyz")

    async def metrics(self) -> dict[str, float]:
        """Each sample of `/metrics` with its labels."""
        _, text = await self.get("/metrics")
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    async def ended(self, timeout: float = 10) -> int:
        """The exit code."""
        async with asyncio.timeout(timeout + 1):
            return await asyncio.to_thread(self.child.wait, timeout)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.ended()

    async def __aenter__(self) -> Self:
        self.start()
        await self.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End it if it still runs, with SIGKILL if need be."""
        if self.child.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                await self.ended(5)
            except (TimeoutError, subprocess.TimeoutExpired):
                await self.kill()


class Gate:
    """A way to a server that can be shut: connections break, and new ones are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._there = (host, port)
        self.port = free_port()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)

    async def shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _pass(self, inner: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        outer = None
        try:
            there, outer = await asyncio.open_connection(*self._there)
            await asyncio.gather(_copy(inner, outer), _copy(there, answer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            for writer in (answer, outer):
                if writer is not None:
                    writer.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while some := await source.read(65536):
            target.write(some)
            await target.drain()
    target.close()


async def connect(url: str) -> "asyncpg.Connection[asyncpg.Record]":
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(url)
    return connection
