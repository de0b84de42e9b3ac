"""Topics, clients and the one rule that binds them to the outbox: a conversation's shard is its Kafka partition."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError
from aiokafka.partitioner import murmur2

from shared.keeping import ERASE_WITHIN_S, keeping, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PARTITIONS = 64
"""For life: partition = shard, and the key of what is stored already decides both."""

MAX_RECORD_BYTES = 1_000_000
"""Just under a broker's default `message.max.bytes`; our largest record is far below."""


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics' full names (protocol §7)."""

    prefix: str = "waybill"

    @property
    def events(self) -> str:
        """Key: conversation id; value: the `event` frame's bytes."""
        return f"{self.prefix}.events.v1"

    @property
    def receipts(self) -> str:
        """Key: conversation id; value: the `receipt` frame's bytes plus `kind`, `cause`."""
        return f"{self.prefix}.receipts.v1"

    @property
    def acks(self) -> str:
        """Key: conversation id; value: what a device says that it stores or has read."""
        return f"{self.prefix}.acks.v1"

    @property
    def dead(self) -> str:
        """Records that a consumer could not read, with where they came from."""
        return f"{self.prefix}.dead.v1"

    def of_outbox(self, topic: str) -> str:
        """The full name of a topic as an outbox row names it: without the prefix."""
        return f"{self.prefix}.{topic}"

    def in_outbox(self, topic: str) -> str:
        """A topic's full name as outbox rows and dead letters have it: without the prefix."""
        return topic.removeprefix(f"{self.prefix}.")

    def without_prefix(self, name: str) -> str:
        """A full name as an outbox row names the topic."""
        return name.removeprefix(f"{self.prefix}.")

    @property
    def all(self) -> tuple[str, ...]:
        """Every topic."""
        return (self.events, self.receipts, self.acks, self.dead)


def partition_of(key: str) -> int:
    """The Java default partitioner's choice, so that clients in other languages find the same one."""
    return int((murmur2(key.encode()) & 0x7FFFFFFF) % PARTITIONS)


def producer(
    bootstrap: str,
    *,
    client_id: str,
    linger_ms: int = 0,
    timeout_ms: int = 10_000,
    idempotent: bool = True,
    batch_bytes: int = MAX_RECORD_BYTES,
) -> AIOKafkaProducer:
    """A producer with `acks=all`; not started. ``timeout_ms`` bounds a request, ``batch_bytes`` a batch.

    An idempotent one must be thrown away after a failed batch, whose sequence numbers it has burnt.
    """
    return AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        client_id=client_id,
        acks="all",
        enable_idempotence=idempotent,
        linger_ms=linger_ms,
        request_timeout_ms=timeout_ms,
        max_request_size=MAX_RECORD_BYTES,
        max_batch_size=batch_bytes,
        metadata_max_age_ms=60_000,
    )


def reader(
    bootstrap: str, *, client_id: str, group: str | None = None, instance: str | None = None
) -> AIOKafkaConsumer:
    """A consumer that commits nothing to Kafka and never jumps by itself; not started.

    Where to start is the caller's to say: an offset out of range raises `OffsetOutOfRangeError` instead of skipping.
    ``instance`` names a member of the group that keeps its partitions over a restart within the session timeout.
    """
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        client_id=client_id,
        group_id=group,
        group_instance_id=instance,
        enable_auto_commit=False,
        auto_offset_reset="none",
        fetch_max_wait_ms=500,
        request_timeout_ms=10_000,
        metadata_max_age_ms=30_000,
        session_timeout_ms=10_000,
        heartbeat_interval_ms=1_000,
    )


async def begin_at_end(consumer: AIOKafkaConsumer, topic: str) -> None:
    """Start a consumer of every partition of a topic, at the ends that they have now: all that comes later is read."""
    await consumer.start()
    every = partitions([topic])
    consumer.assign(every)
    await consumer.seek_to_end(*every)
    for partition in every:
        await consumer.position(partition)


def ensure_fetching(consumer: AIOKafkaConsumer) -> None:
    """Raises `KafkaError` if the task that fetches has died: `getmany` would answer "nothing new" for ever."""
    if consumer._fetcher.error_future.done():  # noqa: SLF001 - nothing public tells
        raise KafkaError("the task that fetches records has ended")


async def stop_reader(consumer: AIOKafkaConsumer, within_s: float) -> None:
    """Stop a consumer, for at most so long; what goes wrong with it is not raised.

    One that has just failed lets the cancellation of its own tasks out of `stop`. In the caller's task that would end a
    loop as if somebody had told it to, and nobody would notice. So it is stopped in a task of its own.
    """
    stopping = asyncio.create_task(_stop(consumer))
    stopping.add_done_callback(_look_at)
    try:
        await asyncio.wait([stopping], timeout=within_s)
    finally:
        stopping.cancel()


async def _stop(consumer: AIOKafkaConsumer) -> None:
    try:
        await consumer.stop()
    finally:
        # Where `stop` is left early it does not get to its connections.
        await consumer._client.close()  # noqa: SLF001 - nothing public does


def _look_at(outcome: asyncio.Task[None]) -> None:
    # One that nobody looks at would be an error in the log.
    if not outcome.cancelled():
        outcome.exception()


def partitions(topics: Iterable[str]) -> list[TopicPartition]:
    """Every partition of these topics."""
    return [TopicPartition(topic, part) for topic in topics for part in range(PARTITIONS)]


async def ensure_topics(
    bootstrap: str,
    topics: Topics,
    *,
    replication: int = 1,
    min_insync: int = 1,
    erase_within_s: float = ERASE_WITHIN_S,
) -> None:
    """Make the topics that are missing. Safe to call from several processes at once.

    None keeps a record for longer than ``erase_within_s``; one that does is changed.
    Raises `RuntimeError` if a topic is there with another number of partitions: shards and partitions would part.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=30_000)
    await admin.start()
    try:
        there = set(await admin.list_topics())
        missing = [name for name in topics.all if name not in there]
        for name in missing:
            wanted = NewTopic(
                name=name,
                num_partitions=PARTITIONS,
                replication_factor=replication,
                topic_configs={"min.insync.replicas": str(min_insync), **keeping(erase_within_s)},
            )
            try:
                await admin.create_topics([wanted], timeout_ms=30_000)
            except TopicAlreadyExistsError:
                continue
        for described in await admin.describe_topics(list(topics.all)):
            if described["topic"] in there and len(described["partitions"]) != PARTITIONS:
                raise RuntimeError(
                    f"{described['topic']} has {len(described['partitions'])} partitions, not {PARTITIONS}"
                )
        await shorten(admin, there.intersection(topics.all), erase_within_s)
    finally:
        await admin.close()


async def cluster_id(bootstrap: str) -> str:
    """The id of the cluster behind these brokers: stored offsets of another cluster mean nothing."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=10_000)
    await admin.start()
    try:
        described = await admin.describe_cluster()
        return str(described["cluster_id"])
    finally:
        await admin.close()


class Consumed(Protocol):
    """A record as aiokafka hands it out."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


def header(headers: Sequence[tuple[str, bytes | None]], name: str) -> str | None:
    """A header's text, or None if it is not there, null or not UTF-8."""
    for key, value in headers:
        if key == name and value is not None:
            try:
                return value.decode()
            except UnicodeDecodeError:
                return None
    return None
