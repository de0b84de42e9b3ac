"""Sending: one task per shard, and one Kafka client for all of them until a batch fails.

At most one batch of a shard and topic is with the client, and the next is handed over after its confirmation: a batch
queued behind a failed one could be written first. After any failed batch the client is thrown away, and every shard
begins again behind what is confirmed. Rows may then come twice, but their first copies are in order.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiokafka.errors import KafkaError

from services.relay.batch import Refused, build
from services.relay.failure import is_permanent
from services.relay.metrics import BATCH_ROWS, DELIVERY_SECONDS, FAILED_BATCHES, PUBLISHED, STOPPED_SHARDS
from services.relay.producer import OUTBOX_TOPICS, MissingTopicError, open_client
from services.relay.shards import Delivery
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from services.relay.batch import Batch, Part
    from services.relay.cursors import Cursors
    from services.relay.held import HeldShard
    from services.relay.lease import Timing
    from services.relay.producer import Client
    from shared.kafka import Topics

_TRUST_EVERY_S = 0.02

_log = logger(__name__)


class FailedBatchError(Exception):
    """Kafka did not confirm a batch; its client is of no more use."""


class Publisher:
    """Publishes the shards of ``held``. `start` one after it was put there, `finish` it before it is taken out."""

    def __init__(
        self,
        held: dict[int, HeldShard],
        cursors: Cursors,
        *,
        timing: Timing,
        bootstrap: str,
        topics: Topics,
        batch_size: int,
        client_id: str,
    ) -> None:
        self._held = held
        self._cursors = cursors
        self._timing = timing
        self._bootstrap = bootstrap
        self._topics = topics
        self._batch_size = batch_size
        self._client_id = client_id
        self._backoff = Backoff(base_s=0.1)
        self._group: asyncio.TaskGroup | None = None
        self._producer: AIOKafkaProducer | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._known: set[str] = set()
        self._closing = asyncio.Event()
        self.trouble: str | None = "not connected yet"

    # What others call.

    def start(self, shard: HeldShard) -> None:
        """Publish this shard from now on, after what is under way of its earlier epoch."""
        if self._group is not None and self._producer is not None and not self._closing.is_set():
            work = self._run_shard(shard, self._producer, self._tasks.get(shard.number))
            self._tasks[shard.number] = self._group.create_task(work, name=f"shard-{shard.number}")

    async def finish(self, shards: list[HeldShard], timeout_s: float) -> None:
        """Hand nothing more of these shards to Kafka, and wait for what is under way, at most ``timeout_s``."""
        for shard in shards:
            shard.leave()
        tasks = [task for shard in shards if (task := self._tasks.get(shard.number)) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def close(self) -> None:
        """Let `run` end, once every shard has been finished."""
        self._closing.set()

    async def run(self) -> None:
        """Publish until closed. Whatever passes by itself is waited for, without an end."""
        while not self._closing.is_set():
            try:
                client = await open_client(
                    self._bootstrap, self._topics, client_id=self._client_id, timeout_s=self._timing.delivery_s
                )
            except (KafkaError, OSError, TimeoutError, MissingTopicError) as error:
                await self._wait(f"no connection: {error!r}")
                continue
            try:
                await self._session(client)
            except* FailedBatchError as failed:
                LOOP_ERRORS.labels("publish").inc()
                await client.discard()
                self._rewind()
                await self._wait("; ".join(str(error) for error in failed.exceptions))
            finally:
                await client.discard()

    # One client's time.

    async def _session(self, client: Client) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group, self._producer = group, client.producer
                self._known = {*OUTBOX_TOPICS}
                self.trouble = None
                for shard in list(self._held.values()):
                    if not shard.ended:
                        self.start(shard)
                await self._closing.wait()
        finally:
            self._group = self._producer = None
            self._tasks.clear()

    def _rewind(self) -> None:
        for shard in self._held.values():
            shard.rewind()

    async def _wait(self, trouble: str) -> None:
        self.trouble = trouble
        _log.warning("Kafka is waited for", error=trouble)
        try:
            async with asyncio.timeout(self._backoff.next()):
                await self._closing.wait()
        except TimeoutError:
            pass

    # One shard's task.

    async def _run_shard(
        self, shard: HeldShard, producer: AIOKafkaProducer, earlier: asyncio.Task[None] | None
    ) -> None:
        try:
            await self._publish(shard, producer, earlier)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The client's own cancellation must not end a shard's task in silence.
            raise FailedBatchError(f"shard {shard.number}: the client cancelled a batch") from None

    async def _publish(self, shard: HeldShard, producer: AIOKafkaProducer, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        while await self._may_send(shard):
            batch = build(shard.rows, self._batch_size, producer.create_batch, self._known)
            if batch.rows:
                await self._deliver(shard, producer, batch)
            if batch.unknown is not None:
                batch.refused = await self._learn(shard, producer, batch.unknown)
            if batch.refused is not None:
                _stop(shard, batch.refused)

    async def _may_send(self, shard: HeldShard) -> bool:
        """Wait for rows, and for a lease that outlasts a delivery; False once the shard has ended."""
        while not shard.ended:
            if not shard.rows:
                shard.wake.clear()
                await shard.wake.wait()
            elif self._timing.may_send(shard.trusted_until, time.monotonic()):
                return True
            else:
                await asyncio.sleep(_TRUST_EVERY_S)
        return False

    async def _learn(self, shard: HeldShard, producer: AIOKafkaProducer, topic: str) -> Refused | None:
        """Ask for a topic before its first row is handed over: if it is not there, this row is to blame."""
        row = shard.rows[0]
        try:
            async with asyncio.timeout(self._timing.delivery_s):
                there = await producer.partitions_for(self._topics.of_outbox(topic))
        except (KafkaError, OSError, TimeoutError) as error:
            if not is_permanent(error):
                raise FailedBatchError(f"shard {shard.number}: {error!r}") from error
            return Refused(row["id"], str(row["event_id"]), f"{topic}: {error!r}")
        if shard.number not in there:
            return Refused(row["id"], str(row["event_id"]), f"{topic} has no partition {shard.number}")
        self._known.add(topic)
        return None

    async def _deliver(self, shard: HeldShard, producer: AIOKafkaProducer, batch: Batch) -> None:
        begun = time.monotonic()
        parts = list(batch.parts.values())
        try:
            async with asyncio.timeout(self._timing.delivery_s):
                bases = await self._send(shard, producer, parts)
        except (KafkaError, OSError, TimeoutError) as error:
            self._failed(shard, parts, error)
            raise FailedBatchError(f"shard {shard.number}: {error!r}") from error
        DELIVERY_SECONDS.observe(time.monotonic() - begun)
        BATCH_ROWS.observe(batch.rows)
        self._backoff.reset()
        shard.acked_id = batch.to_id
        placed = [
            (Delivery(part.from_id, part.to_id, part.topic, base), part.rows)
            for part, base in zip(parts, bases, strict=True)
        ]
        self._cursors.moved(shard, batch.to_id, placed)
        for part in parts:
            PUBLISHED.labels(part.topic).inc(part.rows)

    async def _send(self, shard: HeldShard, producer: AIOKafkaProducer, parts: list[Part]) -> list[int]:
        """Hand the parts over and wait for their base offsets."""
        waiting = []
        for part in parts:
            topic = self._topics.of_outbox(part.topic)
            waiting.append(await producer.send_batch(part.builder, topic, partition=shard.number))
        bases = [int(placed.offset) for placed in await asyncio.gather(*waiting)]
        if min(bases) < 0:
            # Written by an earlier try whose answer was lost, at an offset that the broker has forgotten.
            raise KafkaError("the offset of a batch is not known")
        return bases

    def _failed(self, shard: HeldShard, parts: list[Part], error: BaseException) -> None:
        kind = "permanent" if is_permanent(error) else "retriable"
        FAILED_BATCHES.labels(kind).inc()
        if kind == "permanent":
            ids = f"{parts[0].from_id} to {max(part.to_id for part in parts)}"
            reason = f"refused by Kafka, one of the rows {ids}: {error!r}"
            _stop(shard, Refused(parts[0].from_id, parts[0].event_id, reason))


def _stop(shard: HeldShard, refused: Refused) -> None:
    shard.refused = refused
    STOPPED_SHARDS.inc()
    _log.error(
        "shard stopped: a row can't be published",
        shard=shard.number,
        id=refused.id,
        event_id=refused.event_id,
        reason=refused.reason,
    )
