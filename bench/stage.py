"""What a benchmark runs on: a Waybill of its own or a given one, and room for the reference beside it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import asyncpg
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError

from bench.messages import Chat
from deploy.local import endpoints
from deploy.local.running import running
from shared.auth import mint
from shared.kafka import PARTITIONS, ensure_topics, producer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from deploy.local.endpoints import Endpoints
    from shared.kafka import Topics

_DATABASE = "waybill_bench_reference"
_TOPIC = "bench-reference.messages"
_TIMEOUT_S = 30.0
_AT_ONCE = 8
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the reference works: a database of its own on the same Postgres, a topic of its own on the same Kafka."""

    postgres: str
    kafka: str
    topic: str


def say(line: str) -> None:
    """Tell a person how far it is."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waybill(file: Path | None, *, pool: int, environment: Mapping[str, str] | None = None) -> Iterator[Endpoints]:
    """The Waybill that ``file`` (an `endpoints.json`) names, or one of our own until the block is left.

    ``pool`` is what one of our own gets as its processes' connections, ``environment`` its further settings. Blocks;
    raises `FileNotFoundError`, `ValueError`, `NotRunningError`.
    """
    if file is not None:
        yield endpoints.read(file)
        return
    with tempfile.TemporaryDirectory(prefix="waybill-bench-") as folder:
        # The database server runs as another user when we are root.
        Path(folder).chmod(0o755)
        say("starting Waybill")
        settings = {"WAYBILL_POSTGRES_POOL": str(pool), **(environment or {})}
        with running(Path(folder) / "state", environment=settings) as stack:
            yield stack.endpoints


@contextlib.asynccontextmanager
async def reference(of: Endpoints) -> AsyncIterator[Reference]:
    """An empty database and topic for the reference, removed at the end."""
    url = urlunsplit(urlsplit(of.postgres)._replace(path=f"/{_DATABASE}"))
    await _make_database(of.postgres)
    try:
        await _make_topic(of.kafka)
        try:
            yield Reference(url, of.kafka, _TOPIC)
        finally:
            await _drop_topic(of.kafka)
    finally:
        await _drop_database(of.postgres)


class Door(Protocol):
    """Where conversations are made: ingest's address, and the secret that it trusts."""

    @property
    def ingest(self) -> str:
        """`http://host:port`."""

    @property
    def auth_secret(self) -> str:
        """Of tokens."""


async def make_chats(of: Door, pairs: Sequence[tuple[str, str]]) -> list[Chat]:
    """Direct chats in Waybill, through its door. Raises `RuntimeError` if one is refused."""
    token = mint(of.auth_secret, "bench", scope="service")
    room = asyncio.Semaphore(_AT_ONCE)

    async def make(http: aiohttp.ClientSession, pair: tuple[str, str]) -> Chat:
        asked = {"kind": "direct", "members": list(pair), "creator_id": pair[0]}
        async with room, http.post(f"{of.ingest}/v1/conversations", json=asked) as answer:
            if answer.status not in (200, 201):
                raise RuntimeError(f"no conversation: {await answer.text()}")
            return Chat((await answer.json())["conversation_id"], pair)

    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        return await asyncio.gather(*(make(http, pair) for pair in pairs))


async def _make_database(server: str) -> None:
    connection = await asyncpg.connect(server, timeout=_TIMEOUT_S)
    try:
        await connection.execute(f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", timeout=_TIMEOUT_S)
        await connection.execute(f"CREATE DATABASE {_DATABASE}", timeout=_TIMEOUT_S)
    finally:
        await connection.close(timeout=_TIMEOUT_S)


async def _drop_database(server: str) -> None:
    with contextlib.suppress(OSError, asyncpg.PostgresError):
        connection = await asyncpg.connect(server, timeout=_TIMEOUT_S)
        try:
            await connection.execute(f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", timeout=_TIMEOUT_S)
        finally:
            await connection.close(timeout=_TIMEOUT_S)


async def _make_topic(bootstrap: str) -> None:
    async with _admin(bootstrap) as admin:
        with contextlib.suppress(TopicAlreadyExistsError):
            await admin.create_topics([NewTopic(name=_TOPIC, num_partitions=PARTITIONS, replication_factor=1)])
    # A new partition's leader is not there at once: a record in each says that it is.
    made = producer(bootstrap, client_id="bench")
    await made.start()
    try:
        for number in range(PARTITIONS):
            await made.send_and_wait(_TOPIC, b"", partition=number)
    finally:
        await made.stop()


async def make_topics(bootstrap: str, topics: Topics) -> None:
    """Make Waybill's topics, and wait until each partition has a leader, which is not at once."""
    await ensure_topics(bootstrap, topics)
    async with asyncio.timeout(_TIMEOUT_S), _admin(bootstrap) as admin:
        while any(  # noqa: ASYNC110 - what the broker does meanwhile sets no event
            topic["error_code"] or any(part["leader"] < 0 for part in topic["partitions"])
            for topic in await admin.describe_topics(list(topics.all))
        ):
            await asyncio.sleep(_POLL_S)


async def _drop_topic(bootstrap: str) -> None:
    with contextlib.suppress(OSError, KafkaError):
        async with _admin(bootstrap) as admin:
            await admin.delete_topics([_TOPIC])


@contextlib.asynccontextmanager
async def _admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=int(_TIMEOUT_S * 1000))
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()
