"""The Kafka client's life: opened whole or not at all, and got rid of without flushing.

aiokafka 0.14 burns the sequence numbers of a failed batch, so that its producer would answer "out of order sequence"
for ever; and its `stop` first waits for every batch, retried without end while a broker is away. So a producer with a
failed batch is thrown away, and what it had in hand must not reach the broker from a queue once the next one writes.
That needs its inner tasks: the pinned version's private names are used in this module and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import TYPE_CHECKING

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, KafkaError, TopicAuthorizationFailedError

from services.relay.lease import CLOSE_S
from shared.kafka import MAX_RECORD_BYTES, PARTITIONS, producer
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokafka import AIOKafkaProducer
    from aiokafka.structs import RecordMetadata

    from services.relay.batch import Builder
    from shared.kafka import Topics

OUTBOX_TOPICS = ("events.v1", "receipts.v1")
"""What rows of the outbox name, without the prefix. Known before anything is sent: without them nothing could be."""

_CANCEL_EVERY_S = 0.05
_LOOK_AGAIN_S = (0.05, 0.2, 0.5)


_log = logger(__name__)


class MissingTopicError(Exception):
    """A topic is not there, or has not one partition for each shard."""


class Client:
    """An open producer with its sender's inner tasks known.

    ``known``: the outbox's topics that it may see. ``batch_bytes``: how large a batch each of them takes.
    """

    def __init__(self, made: AIOKafkaProducer, batch_bytes: int = MAX_RECORD_BYTES) -> None:
        self.producer = made
        self.batch_bytes = batch_bytes
        self.known: tuple[str, ...] = ()
        self._requests: set[asyncio.Task[object]] = set()
        self._track()

    def _track(self) -> None:
        # The sender keeps its requests' tasks in a local variable, but they must end with it.
        sender = self.producer._sender
        send = sender._send_produce_req

        async def tracked(node_id: int, batches: Mapping[object, object]) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._requests.add(task)
            try:
                await send(node_id, batches)
            finally:
                self._requests.discard(task)

        sender._send_produce_req = tracked

    def hand_over(self, builder: Builder, topic: str, partition: int) -> asyncio.Future[RecordMetadata]:
        """Give a batch to the client: what `send_batch` does for a topic whose leaders this client knows.

        The future may raise what aiokafka raises, and is bounded by nobody but the caller.
        """
        accumulator = self.producer._message_accumulator
        if accumulator._exception is not None:
            raise copy.copy(accumulator._exception)
        waiting: asyncio.Future[RecordMetadata] = accumulator._append_batch(
            builder, TopicPartition(topic, partition)
        ).future
        return waiting

    async def discard(self) -> None:
        """Close without flushing, within about `CLOSE_S`. What was handed over may be in Kafka or not."""
        made = self.producer
        made._closed = True
        for connection in list(made.client._conns.values()):
            # Closing a transport would still write what is in its buffer.
            if connection._writer is not None:
                connection._writer.transport.abort()
        tasks = {task for task in (made._sender.sender_task, made.client._sync_task) if task is not None}
        await _end(tasks | self._requests)
        made.client._sync_task = None
        with contextlib.suppress(TimeoutError, KafkaError, OSError):
            async with asyncio.timeout(CLOSE_S / 2):
                await made.client.close()


async def open_client(
    bootstrap: str, topics: Topics, *, client_id: str, timeout_s: float, idempotent: bool = True
) -> Client:
    """A started client that knows the outbox's topics. ``timeout_s`` bounds a batch, so that two tries fit into it.

    Raises `MissingTopicError`, `TimeoutError`, `OSError`, and what aiokafka raises; nothing is left open then.
    """
    timeout_ms = round(timeout_s * 500)
    batch_bytes = await _batch_bytes(bootstrap, topics, timeout_s=timeout_s / 2)
    made = producer(
        bootstrap, client_id=client_id, timeout_ms=timeout_ms, idempotent=idempotent, batch_bytes=batch_bytes
    )
    client = Client(made, batch_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            await client.producer.start()
            client.known = await _known_topics(client.producer, topics)
    except BaseException:
        await client.discard()
        raise
    return client


async def find_topic(made: AIOKafkaProducer, topic: str) -> set[int]:
    """The topic's partitions; none if the brokers do not know it.

    Raises `TopicAuthorizationFailedError`, and `KafkaConnectionError` if no broker answered: then nothing is known.
    aiokafka's own look-up waits for an unknown topic until its time-out.
    """
    client = made.client
    for wait_s in _LOOK_AGAIN_S:
        await client.add_topic(topic)
        told = await client.force_metadata_update()
        if topic in client.cluster.topics():
            return set(client.cluster.partitions_for_topic(topic) or ())
        # Not asked for any more, or each refresh would complain of it.
        client._topics.discard(topic)
        if not told:
            raise KafkaConnectionError(f"no broker told of {topic}")
        if topic in client.cluster.unauthorized_topics:
            raise TopicAuthorizationFailedError(topic)
        await asyncio.sleep(wait_s)
    return set()


async def _batch_bytes(bootstrap: str, topics: Topics, *, timeout_s: float) -> int:
    """The largest batch that all the outbox's topics take; our own limit where the brokers do not say.

    It holds for whole batches: without it, each batch over a topic's own limit would have to be refused first.
    """
    name = "max.message.bytes"
    asked = [
        ConfigResource(ConfigResourceType.TOPIC, topics.of_outbox(topic), configs={name: None})
        for topic in OUTBOX_TOPICS
    ]
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=round(timeout_s * 1000))
    limits = [MAX_RECORD_BYTES]
    try:
        async with asyncio.timeout(timeout_s):
            await admin.start()
            for answer in await admin.describe_configs(asked):
                limits += [int(entry[1]) for resource in answer.resources for entry in resource[4] if entry[0] == name]
    except (KafkaError, OSError, TimeoutError) as error:
        _log.warning("the topics' limits are not known", error=repr(error))
    finally:
        await admin.close()
    return min(limits)


async def _known_topics(made: AIOKafkaProducer, topics: Topics) -> tuple[str, ...]:
    known = []
    for name in OUTBOX_TOPICS:
        topic = topics.of_outbox(name)
        try:
            there = await find_topic(made, topic)
        except TopicAuthorizationFailedError:
            # Its rows are refused one by one; the other topic's go on.
            continue
        if len(there) != PARTITIONS:
            raise MissingTopicError(f"{topic} has {len(there)} partitions, not {PARTITIONS}")
        known.append(name)
    return tuple(known)


async def _end(tasks: set[asyncio.Task[object]]) -> None:
    # More than once: the sender, cancelled, waits for its requests, which swallow a first cancellation, too.
    for _ in range(round(CLOSE_S / 2 / _CANCEL_EVERY_S)):
        tasks = {task for task in tasks if not task.done()}
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCEL_EVERY_S)
