"""A batch of records into the store: what can be read is applied, what cannot is put away, and all of it once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiokafka.errors import KafkaError

from services.receipts import metrics
from services.receipts.batch import Fetched, batches
from services.receipts.fold import fold
from services.receipts.records import fault, parse
from services.receipts.store import (
    NO_CONVERSATION,
    STORE_AWAY,
    BadAckError,
    OffsetsMovedError,
    UnknownConversationsError,
)
from shared.clock import Backoff
from shared.dead_letter import BadRecord
from shared.errors import BadRequestError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.receipts.batch import Batch
    from services.receipts.breaker import Breaker
    from services.receipts.fold import Changes
    from services.receipts.records import Ack
    from services.receipts.store import Store
    from shared.dead_letter import Graves
    from shared.kafka import Consumed

Place = tuple[int, int]
"""Partition and offset of a record."""

_KAFKA_AWAY = (KafkaError, OSError, TimeoutError)

_log = logger(__name__)

for _loop in ("apply", "bury"):
    LOOP_ERRORS.labels(_loop)


class Applier:
    """Applies one batch after the other."""

    def __init__(self, store: Store, graves: Graves, breaker: Breaker) -> None:
        self._store = store
        self._graves = graves
        self._breaker = breaker

    async def close(self) -> None:
        """Close what it opened."""
        await self._graves.close()

    async def apply(
        self, batch: Batch, cluster: str, ours: Callable[[], bool], buried: frozenset[Place] = frozenset()
    ) -> bool:
        """Apply a batch of this cluster; False if it is not ours to apply, or not known to be.

        ``ours`` says whether it still is. ``buried``: records of it that are in the topic of dead letters already.
        Raises `BreakerTrippedError`: then nothing was applied and nothing put away.
        """
        began, backoff = time.monotonic(), Backoff()
        good, bad = _parsed(batch.records)
        self._breaker.judge(len(batch.records), len(bad))
        metrics.LAG_SECONDS.set(max(0.0, time.time() - min(r.timestamp for r in batch.records) / 1000))
        while True:
            for record, error in bad:
                if _place(record) not in buried and not await self._bury(record, error, ours):
                    return False
            buried |= {_place(record) for record, _ in bad}
            changes = fold([ack for _, ack in good], [record for record, _ in good])
            try:
                if not await self._commit(batch, cluster, changes, [BadRecord.of(*one) for one in bad], ours):
                    return False
                break
            except UnknownConversationsError as unknown:
                lost = [record for record, ack in good if ack.conversation_id.lower() in unknown.ids]
                # With another database behind it, every ack would be such a one.
                self._breaker.judge(0, len(lost))
                bad += [(record, NO_CONVERSATION) for record in lost]
                good = [one for one in good if one[1].conversation_id.lower() not in unknown.ids]
            except BadAckError as refused:
                if len(batch.records) > 1:
                    return await self._one_by_one(batch, cluster, ours, buried)
                if not good:
                    LOOP_ERRORS.labels("apply").inc()
                    _log.error("acks wait: the desk does not take a bad record", error=str(refused))
                    await asyncio.sleep(backoff.next())
                self._breaker.judge(0, len(good))
                bad += [(record, str(refused)) for record, _ in good]
                good = []
        metrics.BATCH_RECORDS.observe(len(batch.records))
        metrics.BATCH_SECONDS.observe(time.monotonic() - began)
        return True

    async def _one_by_one(self, batch: Batch, cluster: str, ours: Callable[[], bool], buried: frozenset[Place]) -> bool:
        """Apply a batch's records each by itself: the store does not take one of them."""
        self._breaker.undo()
        fetched = Fetched()
        for record in batch.records:
            fetched.setdefault(record.partition, []).append(record)
        expected = {part: span.since for part, span in batch.spans.items()}
        for one in batches(fetched, expected, max_bytes=1):
            if not await self.apply(one, cluster, ours, buried):
                return False
            expected.update((part, span.upto) for part, span in one.spans.items())
        return True

    async def _bury(self, record: Consumed, error: str, ours: Callable[[], bool]) -> bool:
        backoff = Backoff()
        while ours():
            try:
                await self._graves.bury(record, error)
            except _KAFKA_AWAY as problem:
                LOOP_ERRORS.labels("bury").inc()
                _log.warning("acks wait: a bad record cannot be put away", error=repr(problem))
                await asyncio.sleep(backoff.next())
            else:
                _log.warning("a bad record was put away", partition=record.partition, offset=record.offset, error=error)
                return True
        return False

    async def _commit(
        self, batch: Batch, cluster: str, changes: Changes, bad: list[BadRecord], ours: Callable[[], bool]
    ) -> bool:
        """Apply changes and offsets, again and again while the store is away; False once another process has them.

        Raises `UnknownConversationsError` and `BadAckError`: nothing is applied.
        """
        backoff = Backoff()
        while ours():
            try:
                counted = await self._store.apply(cluster, batch.spans, changes, bad)
            except OffsetsMovedError:
                metrics.FENCED.inc()
                _log.info("another process moved the offsets", partitions=sorted(batch.spans))
                # Kafka may give the partition back and forth for a while; each round reads the stored offsets.
                await asyncio.sleep(backoff.next())
                return False
            except STORE_AWAY as error:
                LOOP_ERRORS.labels("apply").inc()
                _log.warning("acks wait: they cannot be applied", error=repr(error), acks=len(batch.records))
                await asyncio.sleep(backoff.next())
                continue
            metrics.count(counted)
            return True
        return False


def _place(record: Consumed) -> Place:
    return record.partition, record.offset


def _parsed(records: list[Consumed]) -> tuple[list[tuple[Consumed, Ack]], list[tuple[Consumed, str]]]:
    good: list[tuple[Consumed, Ack]] = []
    bad: list[tuple[Consumed, str]] = []
    for record in records:
        try:
            good.append((record, parse(record)))
        except BadRequestError as error:
            bad.append((record, fault(error)))
    return good, bad
