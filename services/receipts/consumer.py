"""Acks from Kafka into the store, a batch at a time, with offsets that live in the store.

Kafka's group only says which process should read which partition. Where to read from, and who may apply, is decided
by the stored offsets: `apply_acks` moves them together with the marks, or does nothing if somebody else has moved them.
So a batch is applied once, whatever dies when, and two processes that both believe to own a partition cannot both win.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import (
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)

from services.receipts import metrics
from services.receipts.applying import Applier
from services.receipts.assignment import Assignment
from services.receipts.batch import Batch, Fetched, PositionLostError, batches
from services.receipts.breaker import Breaker, BreakerTrippedError
from services.receipts.store import STORE_AWAY
from shared.clock import Backoff
from shared.kafka import cluster_id, ensure_fetching, reader, stop_reader
from shared.logging import logger
from shared.metrics import BAD_RECORDS, LOOP_ERRORS

if TYPE_CHECKING:
    from services.receipts.settings import ReceiptsSettings
    from services.receipts.store import Store
    from shared.dead_letter import Graves

_POLL_MS = 500
_POLL_S = 30.0
_START_S = 30.0
_CLOSE_S = 3.0
_AWAY = (KafkaError, OSError, TimeoutError)

for _loop in ("kafka", "place"):
    LOOP_ERRORS.labels(_loop)


class AckConsumer:
    """Reads one topic of acks as a member of a group."""

    def __init__(self, settings: ReceiptsSettings, topic: str, group: str, store: Store, graves: Graves) -> None:
        self._settings = settings
        self._topic = topic
        BAD_RECORDS.labels(topic)
        self._group = group
        self._store = store
        self._applier = Applier(
            store,
            graves,
            Breaker(
                share=settings.receipts_breaker_share,
                least=settings.receipts_breaker_least,
                window=settings.receipts_breaker_window,
            ),
        )
        self._log = logger(__name__)
        self._kafka: AIOKafkaConsumer | None = None
        self._assignment = Assignment()
        self._tripped: BreakerTrippedError | None = None
        self.stopped: str | None = None
        """Why no more is read until somebody has looked at it; None while all is well."""

    async def run(self) -> None:
        """Read until cancelled, or until too many records cannot be read; then leave the group, and say so."""
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._as_member(backoff)
                except _AWAY as error:
                    LOOP_ERRORS.labels("kafka").inc()
                    self._log.warning("acks wait: Kafka is away", error=repr(error))
                    await asyncio.sleep(backoff.next())
        except BreakerTrippedError as error:
            self.stopped = str(error)
            metrics.STOPPED.set(1)
            self._log.error("acks are not read any more: too many of them cannot be read", reason=self.stopped)
        finally:
            await self._applier.close()

    async def kafka_problem(self) -> str | None:
        """None if Kafka answers."""
        if self._kafka is None:
            return "not connected"
        await self._kafka.end_offsets([TopicPartition(self._topic, 0)])
        return None

    def assignment_problem(self) -> str | None:
        """None if the group has given this process its partitions (maybe none) and each stands at its stored offset."""
        return None if self._assignment.placed else "no partitions yet"

    def partitions(self) -> list[int]:
        """Which partitions this process applies now."""
        return list(self._assignment.next) if self._assignment.placed else []

    async def _as_member(self, backoff: Backoff) -> None:
        kafka = reader(
            self._settings.kafka_bootstrap,
            client_id="waybill-receipts",
            group=self._group,
            instance=self._settings.receipts_instance,
        )
        self._assignment = Assignment()
        try:
            async with asyncio.timeout(_START_S):
                await kafka.start()
            kafka.subscribe([self._topic], listener=self._assignment)
            self._kafka = kafka
            fetched = Fetched()
            while True:
                if not self._assignment.placed and self._assignment.partitions is not None:
                    await self._place(kafka, self._assignment.partitions)
                fetched = await self._step(kafka, fetched)
                backoff.reset()
        finally:
            self._kafka = None
            self._assignment.on_partitions_revoked(())
            metrics.PARTITIONS.set(0)
            await stop_reader(kafka, _CLOSE_S)

    async def _place(self, kafka: AIOKafkaConsumer, partitions: frozenset[int]) -> None:
        """Seek every partition to its stored offset, whatever Kafka's group has kept."""
        backoff = Backoff()
        generation = self._assignment.generation
        topic_partitions = [TopicPartition(self._topic, p) for p in sorted(partitions)]
        if not partitions and not kafka.partitions_for_topic(self._topic):
            # No topic yet, or none any more. aiokafka would look for it again only when its metadata is old.
            raise UnknownTopicOrPartitionError(self._topic)
        while self._assignment.generation == generation:
            try:
                # Read each time: an emptied Kafka comes back as another cluster, where our offsets mean nothing.
                cluster = await cluster_id(self._settings.kafka_bootstrap)
                stored = await self._store.stored(cluster, sorted(partitions))
                begin = await kafka.beginning_offsets(topic_partitions)
                end = await kafka.end_offsets(topic_partitions)
                positions = await self._store.place(
                    cluster,
                    stored,
                    {tp.partition: at for tp, at in begin.items()},
                    {tp.partition: at for tp, at in end.items()},
                )
            except (*_AWAY, *STORE_AWAY) as error:
                LOOP_ERRORS.labels("place").inc()
                self._log.warning("acks wait: the stored offsets cannot be read", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            if self._assignment.generation != generation or positions.keys() != partitions:
                return
            with contextlib.suppress(IllegalStateError):
                for partition, offset in positions.items():
                    kafka.seek(TopicPartition(self._topic, partition), offset)
                self._assignment.place(cluster, positions)
                metrics.PARTITIONS.set(len(partitions))
                self._log.info("reading acks", partitions=len(partitions), cluster=cluster)
            return

    async def _step(self, kafka: AIOKafkaConsumer, fetched: Fetched) -> Fetched:
        """Apply what was fetched, and fetch what comes after it meanwhile: store and process work side by side.

        What comes after is void if the assignment changed, or if this was not ours to apply.
        """
        ensure_fetching(kafka)
        generation, error, following = self._assignment.generation, None, Fetched()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._apply_all(fetched), name="apply")
            try:
                following = await self._gather(kafka, self._rest_s(fetched))
            except _AWAY as problem:
                error = problem
        if self._tripped is not None:
            raise self._tripped
        if isinstance(error, OffsetOutOfRangeError | NoOffsetForPartitionError):
            self._log.info("reading the stored offsets again", reason=repr(error))
            self._assignment.lose()
        elif error is not None:
            raise error
        self._show_lag(kafka, idle=not following)
        return following if self._assignment.placed and self._assignment.generation == generation else Fetched()

    def _rest_s(self, fetched: Fetched) -> float:
        """The first record after a while waits for nobody, and who is behind does not rest."""
        count = sum(map(len, fetched.values()))
        few = count * 2 < self._settings.receipts_batch_records
        return self._settings.receipts_batch_ms / 1000 if count and few else 0.0

    async def _apply_all(self, fetched: Fetched) -> None:
        """Apply batch by batch; at the first that is not ours to apply the stored offsets are to be read again."""
        try:
            for batch in batches(fetched, self._assignment.next, max_bytes=self._settings.receipts_batch_bytes):
                if not await self._apply(batch):
                    self._assignment.lose()
                    return
        except PositionLostError as error:
            self._log.info("reading the stored offsets again", reason=repr(error))
            self._assignment.lose()
        except BreakerTrippedError as error:
            self._tripped = error

    async def _gather(self, kafka: AIOKafkaConsumer, rest_s: float) -> Fetched:
        """The next records, at most a batch; ``rest_s`` is how long they gather first.

        What is fetched next is asked for when this takes what is there: without a rest each record, of 64 partitions
        that come and go one by one, would cost the broker and this process a fetch of its own.
        """
        await asyncio.sleep(rest_s)
        async with asyncio.timeout(_POLL_S):
            some = await kafka.getmany(timeout_ms=_POLL_MS, max_records=self._settings.receipts_batch_records)
        return {topic_partition.partition: records for topic_partition, records in some.items()}

    async def _apply(self, batch: Batch) -> bool:
        """Apply one batch; False if it is not ours to apply, or not known to be."""
        generation = self._assignment.generation

        def ours() -> bool:
            return self._assignment.generation == generation

        # A rebalance meanwhile has emptied the positions, and what follows was read for the old assignment.
        if not await self._applier.apply(batch, self._assignment.cluster, ours) or not ours():
            return False
        self._assignment.next.update((part, span.upto) for part, span in batch.spans.items())
        return True

    def _show_lag(self, kafka: AIOKafkaConsumer, *, idle: bool) -> None:
        if idle:
            metrics.LAG_SECONDS.set(0)
        assigned = kafka.assignment()
        ends = {tp.partition: kafka.highwater(tp) for tp in assigned}
        metrics.LAG_RECORDS.set(
            sum(max(0, (ends.get(part) or 0) - offset) for part, offset in self._assignment.next.items())
        )
