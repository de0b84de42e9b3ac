"""What was refused is tried again: queues of parked rows in their order, and dead letters that somebody asked for.

Part of a shard's line, which does nothing else meanwhile.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from services.relay.failure import RefusedError
from services.relay.metrics import ATTEMPTS, FENCED_WRITES, published
from services.relay.parking import Settled
from services.relay.storing import stored
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from services.relay.batch import Queue
    from services.relay.held import HeldShard
    from services.relay.line import Common
    from services.relay.parking import Letter
    from services.relay.session import Session
    from shared.postgres import Record

_LATE = ("late", "1")
_MOST_ROWS = 200
_FLUSH_S = 5.0

_log = logger(__name__)


class _Attempt(NamedTuple):
    """What became of the first ``rows`` rows: they lie in Kafka from ``offset`` on, or were refused with ``error``."""

    rows: int
    offset: int | None = None
    error: str | None = None


class Retrying:
    """``lease_lasts`` waits for a lease that outlasts a delivery; False once the shard has ended."""

    def __init__(
        self, shard: HeldShard, session: Session, common: Common, lease_lasts: Callable[[], Awaitable[bool]]
    ) -> None:
        self._shard = shard
        self._session = session
        self._common = common
        self._lease_lasts = lease_lasts

    async def one(self) -> None:
        """Try one due queue, else one letter, of the shard."""
        shard, parking = self._shard, self._common.parking
        # Rows that wait are stored a little later than they are read.
        if not await self._common.cursors.flush([shard], _FLUSH_S):
            shard.due_queues.clear()
            shard.due_letters.clear()
        elif shard.due_queues:
            queue = next(iter(shard.due_queues))
            del shard.due_queues[queue]
            await self._try_queue(queue)
        else:
            dead_id = next(iter(shard.due_letters))
            del shard.due_letters[dead_id]
            letter = await stored(shard, lambda: parking.letter(dead_id))
            if letter is not None:
                await self._try_letter(dead_id, letter)

    async def _try_queue(self, queue: Queue) -> None:
        """Publish the queue from its head on, until it is empty or a row is refused again."""
        shard, parking = self._shard, self._common.parking
        rows = await stored(shard, lambda: parking.queue(shard, queue, _MOST_ROWS))
        if rows and not rows[0].due:
            # It was seen due before its last try was written down.
            return
        left: int | None = 0
        # A row that was refused goes alone: the others need not be sent twice if it is refused again.
        at_most = 1 if rows and rows[0].attempts else _MOST_ROWS
        while rows and await self._lease_lasts():
            attempt = await self._attempt([one.row for one in rows[:at_most]])
            if attempt.error is not None and attempt.rows > 1:
                at_most = attempt.rows // 2
                continue
            tried, rows = rows[: attempt.rows], rows[attempt.rows :]
            settled = self._settled([(one.id, one.attempts) for one in tried], attempt)
            left = await stored(shard, functools.partial(parking.settle, shard, queue, settled))
            self._tell(queue, settled, attempt.error)
            if left is None:
                FENCED_WRITES.inc()
                shard.lose()
            if left is None or settled[0].outcome == "failed":
                return
            at_most = _MOST_ROWS
        if left:
            shard.due_queues[queue] = None
        elif not rows and shard.parked is not None:
            shard.parked.discard(queue)

    def _settled(self, tried: Sequence[tuple[int, int]], attempt: _Attempt) -> list[Settled]:
        if attempt.offset is not None:
            return [Settled(id_, attempts, "sent", attempt.offset + rank) for rank, (id_, attempts) in enumerate(tried)]
        [(id_, attempts)] = tried
        verdict = self._common.retries.after(attempts + 1, self._common.chance)
        return [Settled(id_, attempts, verdict.outcome, None, attempt.error, verdict.wait_ms)]

    async def _try_letter(self, dead_id: int, letter: Letter) -> None:
        """Publish a dead letter: in its place while everything behind it waits, else late."""
        shard, parking = self._shard, self._common.parking
        late = letter.passed or letter.queue not in (shard.parked or ())
        if not await self._lease_lasts():
            return
        attempt = await self._attempt([letter.with_headers(_LATE) if late else letter.row])
        await stored(
            shard, lambda: parking.settle_letter(shard, dead_id, letter.attempts, attempt.offset, attempt.error)
        )
        outcome = "sent" if attempt.error is None else "dead"
        ATTEMPTS.labels(outcome).inc()
        published(letter.queue[1], "late" if late and attempt.error is None else outcome, 1)
        _log.info(
            "dead letter tried again",
            shard=shard.number,
            dead_id=dead_id,
            outcome=outcome,
            late=late,
            error=attempt.error,
        )

    async def _attempt(self, rows: Sequence[Record]) -> _Attempt:
        """Hand over as many of the first rows as one batch takes; all have one topic."""
        batch = self._session.build(deque(rows), len(rows))
        if batch.unknown is not None:
            reason = await self._session.learn(self._shard.number, batch.unknown)
            if reason is not None:
                return _Attempt(1, error=reason)
            batch = self._session.build(deque(rows), len(rows))
        if not batch.rows:
            return _Attempt(1, error=batch.refused.reason if batch.refused is not None else "not built")
        try:
            [(delivery, _)] = await self._session.send_with_care(self._shard.number, batch)
        except RefusedError as refused:
            return _Attempt(batch.rows, error=str(refused))
        return _Attempt(batch.rows, delivery.base_offset)

    def _tell(self, queue: Queue, settled: Sequence[Settled], error: str | None) -> None:
        first = settled[0]
        ATTEMPTS.labels(first.outcome).inc(len(settled))
        published(queue[1], first.outcome, len(settled))
        _log.info(
            "parked rows tried again",
            shard=self._shard.number,
            conversation_id=str(queue[0]),
            topic=queue[1],
            id=first.id,
            rows=len(settled),
            attempt=first.attempts + 1,
            outcome=first.outcome,
            wait_ms=first.wait_ms,
            error=error,
        )
