"""One shard's way to Kafka under one epoch and one session: what was read is sent, what is refused is parked.

At most one batch of a shard and topic is with a client, and the next is handed over after its confirmation: a batch
queued behind a failed one could be written first. Everything of a shard is done here, one thing after another, so that
what is sent, parked, tried again and let go can't overtake each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from services.relay.batch import Batch
from services.relay.failure import FailedBatchError, RefusedError
from services.relay.metrics import (
    BATCH_ROWS,
    DELIVERY_SECONDS,
    FAILED_BATCHES,
    PARKED_ROWS,
    published,
)
from services.relay.retrying import Retrying
from services.relay.shards import Park
from services.relay.storing import EndedError, stored
from shared.clock import Backoff
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.relay.cursors import Cursors
    from services.relay.held import HeldShard
    from services.relay.lease import Timing
    from services.relay.parking import ParkingStore
    from services.relay.retries import Retries
    from services.relay.session import Session
    from services.relay.shards import Delivery
    from shared.postgres import Record

_TRUST_EVERY_S = 0.02
_COOL_DOWN_S = 5.0
_LONGEST_COOL_DOWN_S = 300.0

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Common:
    """What all lines of a relay share. ``confirmed`` is called for each batch that Kafka has."""

    cursors: Cursors
    parking: ParkingStore
    timing: Timing
    retries: Retries
    batch_size: int
    confirmed: Callable[[], None]
    chance: random.Random = field(default_factory=random.Random)


class Line:
    """Ends when the shard has ended; raises `FailedBatchError` when the session must end."""

    def __init__(self, shard: HeldShard, session: Session, common: Common) -> None:
        self._shard = shard
        self._session = session
        self._common = common
        self._care_rows = max(1, common.batch_size // 2)
        self._cool_down = Backoff(base_s=_COOL_DOWN_S, cap_s=_LONGEST_COOL_DOWN_S)
        self._probe_at = 0.0
        self._retrying = Retrying(shard, session, common, self._lease_lasts)

    async def run(self) -> None:
        """Publish until the shard has ended."""
        shard = self._shard
        try:
            await self._load()
            while await self._may_send():
                if shard.stopped is not None:
                    await self._probe()
                    continue
                if shard.due_queues or shard.due_letters:
                    await self._retrying.one()
                # What was tried again may have taken long.
                if not shard.rows or not await self._lease_lasts():
                    continue
                if shard.rows[0][1] <= shard.suspect_id:
                    await self._publish_with_care()
                else:
                    await self._publish()
        except EndedError:
            pass

    async def _load(self) -> None:
        """What another holder left behind. After the lease was taken: nobody else changes it now."""
        shard, parking = self._shard, self._common.parking
        if shard.parked is not None:
            return
        reason = await stored(shard, lambda: parking.stopped(shard))
        shard.parked = await stored(shard, lambda: parking.queues(shard))
        if reason is not None:
            shard.breaker.half_open()
            self._stand_still(reason)

    async def _may_send(self) -> bool:
        """Wait for work, and for a lease that outlasts a delivery; False once the shard has ended."""
        shard = self._shard
        while not shard.ended:
            if shard.stopped is not None:
                wait_s = self._probe_at - time.monotonic()
                if shard.rows and wait_s <= 0:
                    break
                await self._woken(wait_s if wait_s > 0 else None)
            elif shard.has_work:
                break
            else:
                await self._woken(None)
        return await self._lease_lasts()

    async def _lease_lasts(self) -> bool:
        """Wait for a lease that outlasts a delivery; False once the shard has ended."""
        shard = self._shard
        while not shard.ended:
            if self._common.timing.may_send(shard.trusted_until, time.monotonic()):
                return True
            await asyncio.sleep(_TRUST_EVERY_S)
        return False

    async def _woken(self, at_most_s: float | None) -> None:
        self._shard.wake.clear()
        if at_most_s is None:
            await self._shard.wake.wait()
            return
        try:
            async with asyncio.timeout(at_most_s):
                await self._shard.wake.wait()
        except TimeoutError:
            pass

    def _build(self, at_most: int) -> Batch:
        shard = self._shard
        return self._session.build(shard.rows, at_most, shard.parked or ())

    # The straight way.

    async def _publish(self) -> None:
        shard = self._shard
        batch = self._build(self._common.batch_size)
        placed: Sequence[tuple[Delivery, int]] = ()
        if batch.rows:
            begun = time.monotonic()
            try:
                placed = await self._session.send(shard.number, batch)
            except RefusedError as refused:
                FAILED_BATCHES.labels("permanent").inc()
                shard.suspect_id = batch.to_id
                raise FailedBatchError(f"shard {shard.number}: {refused}") from refused
            except FailedBatchError:
                FAILED_BATCHES.labels("retriable").inc()
                raise
            DELIVERY_SECONDS.observe(time.monotonic() - begun)
        self._done(batch, placed)
        await self._judge_next(batch)

    def _done(self, batch: Batch, placed: Sequence[tuple[Delivery, int]]) -> None:
        """Note that the batch is in Kafka, and that its waiting rows wait."""
        shard = self._shard
        if not batch.to_id:
            return
        shard.acked_id = batch.to_id
        parks = [_park(row, "waiting") for row in batch.waiting]
        self._common.cursors.moved(shard, batch.to_id, placed, parks)
        if parks:
            PARKED_ROWS.labels("waiting").inc(len(parks))
        if batch.rows:
            shard.breaker.sent(batch.rows, time.monotonic())
            BATCH_ROWS.observe(batch.rows)
            self._common.confirmed()
            for delivery, rows in placed:
                published(delivery.topic, "sent", rows)

    async def _judge_next(self, batch: Batch) -> None:
        """What became clear of the row behind the batch."""
        if batch.unknown is not None:
            reason = await self._session.learn(self._shard.number, batch.unknown)
            if reason is not None:
                await self._refuse(reason)
        if batch.refused is not None:
            await self._refuse(batch.refused.reason)

    # What was refused.

    async def _publish_with_care(self) -> None:
        """A part of a refused batch: halved until the row to blame stands alone."""
        shard = self._shard
        before = list(islice(shard.rows, 2 * self._care_rows))
        batch = self._build(self._care_rows)
        placed: Sequence[tuple[Delivery, int]] = ()
        if batch.rows:
            try:
                placed = await self._session.send_with_care(shard.number, batch)
            except RefusedError as refused:
                shard.rows.extendleft(reversed(before[: batch.rows + len(batch.waiting)]))
                if batch.rows > 1:
                    self._care_rows = max(1, batch.rows // 2)
                else:
                    [part] = batch.parts.values()
                    self._done(self._waiting_before(part.from_id), ())
                    await self._refuse(str(refused))
                return
            self._care_rows = min(2 * self._care_rows, self._common.batch_size)
        self._done(batch, placed)
        await self._judge_next(batch)

    def _waiting_before(self, id_: int) -> Batch:
        batch = Batch()
        while (row := self._shard.rows[0])["id"] != id_:
            batch.waiting.append(self._shard.rows.popleft())
            batch.to_id = row["id"]
        return batch

    async def _refuse(self, error: str) -> None:
        """Park the first row, and its conversation's later ones with it; or stop before it."""
        shard = self._shard
        row: Record = shard.rows[0]
        why = shard.breaker.refused(time.monotonic())
        if why is not None:
            await self._stop(f"{why}; row {row['id']}: {error}")
            return
        verdict = self._common.retries.after(1, self._common.chance)
        shard.rows.popleft()
        shard.acked_id = row["id"]
        park = _park(row, verdict.outcome, error, verdict.wait_ms)
        if verdict.outcome == "failed" and shard.parked is not None:
            shard.parked.add((park.conversation_id, park.topic))
        self._common.cursors.moved(shard, park.id, (), [park])
        PARKED_ROWS.labels(verdict.outcome).inc()
        published(park.topic, verdict.outcome, 1)
        _log.warning(
            "row refused",
            shard=shard.number,
            id=park.id,
            event_id=str(park.event_id),
            conversation_id=str(park.conversation_id),
            topic=park.topic,
            outcome=verdict.outcome,
            wait_ms=verdict.wait_ms,
            error=error,
        )

    # The breaker.

    async def _stop(self, reason: str) -> None:
        shard = self._shard
        self._stand_still(reason)
        await stored(shard, lambda: self._common.parking.stop(shard, reason))

    def _stand_still(self, reason: str) -> None:
        self._shard.stopped = reason
        self._probe_at = time.monotonic() + self._cool_down.next()
        _log.error("shard stopped: too many of its rows are refused", shard=self._shard.number, reason=reason)

    async def _probe(self) -> None:
        """Try one row: if Kafka takes it, the shard goes on, watched closely; nothing is parked meanwhile."""
        shard = self._shard
        before = list(islice(shard.rows, 2))
        batch = self._build(1)
        try:
            reason = batch.refused.reason if batch.refused is not None else None
            if batch.unknown is not None:
                reason = await self._session.learn(shard.number, batch.unknown)
            if batch.rows:
                self._done(batch, await self._session.send_with_care(shard.number, batch))
                await self._go_on()
            elif batch.waiting:
                self._done(batch, ())
        except RefusedError as refused:
            shard.rows.extendleft(reversed(before[: batch.rows + len(batch.waiting)]))
            reason = str(refused)
        if reason is not None and shard.stopped is not None:
            self._probe_at = time.monotonic() + self._cool_down.next()
            _log.warning("shard stays stopped", shard=shard.number, error=reason)

    async def _go_on(self) -> None:
        shard = self._shard
        shard.stopped = None
        shard.breaker.half_open()
        self._cool_down.reset()
        await stored(shard, lambda: self._common.parking.go_on(shard))
        _log.info("shard goes on", shard=shard.number)


def _park(row: Record, outcome: str, error: str | None = None, wait_ms: int = 0) -> Park:
    return Park(row["id"], row["conversation_id"], row["topic"], row["event_id"], outcome, error, wait_ms)
