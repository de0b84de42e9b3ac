"""Group commit: sends that arrive together are written together, each with an answer of its own.

A lane owns a part of the shards and writes one batch after the other, so two transactions of this process never wait
for the same shard's lock, and the sends of a conversation are written in the order in which they came.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from services.ingest.batches import cut
from services.ingest.metrics import BATCH_SECONDS, BATCH_SIZE, BISECTED, QUEUE_DEPTH
from services.ingest.writer import BadRowError, Written
from shared.errors import InternalError, TimedOutError, UnavailableError, WaybillError
from shared.kafka import partition_of
from shared.logging import logger, trace_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from services.ingest.admission import Send
    from services.ingest.writer import Answer

    Write = Callable[[Sequence[Send]], Awaitable[Sequence[Answer]]]

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all lanes together: ``queue_…``; of one transaction: ``batch_…``. Times in seconds."""

    lanes: int = 4
    gather_s: float = 0.001
    batch_items: int = 500
    batch_bytes: int = 4 * 1024 * 1024
    queue_items: int = 10_000
    queue_bytes: int = 128 * 1024 * 1024
    send_timeout_s: float = 5.0


class _Request:
    """The sends of one caller, who waits until each has its answer."""

    __slots__ = ("answers", "done", "given_up", "left")

    def __init__(self, count: int) -> None:
        self.answers: list[Answer | None] = [None] * count
        self.left = count
        self.done = asyncio.Event()
        self.given_up = False


class _Queued:
    """A send with its place among its request's answers."""

    __slots__ = ("at", "conversation_id", "index", "request", "send", "size", "type")

    def __init__(self, send: Send, request: _Request, index: int, at: float) -> None:
        self.send = send
        self.request = request
        self.index = index
        self.at = at
        self.conversation_id = send.draft.conversation_id
        self.type: str = send.draft.type
        self.size = send.size

    def answer(self, answer: Answer) -> None:
        self.request.answers[self.index] = answer
        self.request.left -= 1
        if self.request.left == 0:
            self.request.done.set()


class _Lane:
    __slots__ = ("queue", "wake")

    def __init__(self) -> None:
        self.queue: deque[_Queued] = deque()
        self.wake = asyncio.Event()


class Lanes:
    """The bounded queue before the writer lanes. ``write`` gets a batch and returns an answer for each, in order.

    ``write`` raises `BadRowError` if the store refused the batch as a whole for something in it: the batch is split
    until the send at fault stands alone. Whatever else it raises is the answer of every send in the batch.
    """

    def __init__(self, write: Write, limits: Limits) -> None:
        self._write = write
        self._limits = limits
        self._lanes = [_Lane() for _ in range(limits.lanes)]
        self._items = 0
        self._bytes = 0
        self._stopping = False

    async def run(self) -> None:
        """Write until `stop`, then until nothing waits any more. Cancelling leaves what waits without an answer."""
        async with asyncio.TaskGroup() as tasks:
            for number, lane in enumerate(self._lanes):
                tasks.create_task(self._run(lane), name=f"lane-{number}")

    def stop(self) -> None:
        """Take nothing new; `run` returns once all that waits is written. May be called twice."""
        self._stopping = True
        for lane in self._lanes:
            lane.wake.set()

    async def send(self, sends: Sequence[Send]) -> list[Answer]:
        """Write events and return an answer for each, in order: what was written, or an error.

        Sends that get no answer in time get `TimedOutError`; those that no lane has begun are then not written any
        more. Raises `UnavailableError` if they do not fit into the queue, with nothing written. Cancelling does not
        undo anything.
        """
        size = sum(send.size for send in sends)
        if (
            self._stopping
            or self._items + len(sends) > self._limits.queue_items
            or (self._items and self._bytes + size > self._limits.queue_bytes)
        ):
            raise UnavailableError("too many sends wait", retry_after_ms=random.randint(200, 1000))
        if not sends:
            return []
        request = _Request(len(sends))
        now = monotonic()
        self._count(len(sends), size)
        for index, send in enumerate(sends):
            lane = self._lanes[partition_of(send.draft.conversation_id) % len(self._lanes)]
            lane.queue.append(_Queued(send, request, index, now))
            lane.wake.set()
        try:
            async with asyncio.timeout(self._limits.send_timeout_s):
                await request.done.wait()
        except TimeoutError:
            pass
        finally:
            request.given_up = True
        return [answer or TimedOutError("not written in time") for answer in request.answers]

    def _count(self, items: int, size: int) -> None:
        self._items += items
        self._bytes += size
        QUEUE_DEPTH.set(self._items)

    async def _run(self, lane: _Lane) -> None:
        while True:
            if not lane.queue:
                if self._stopping:
                    return
                lane.wake.clear()
                await lane.wake.wait()
                continue
            wait = lane.queue[0].at + self._limits.gather_s - monotonic()
            if wait > 0 and len(lane.queue) < self._limits.batch_items and not self._stopping:
                await asyncio.sleep(wait)
            batch = cut(lane.queue, max_items=self._limits.batch_items, max_bytes=self._limits.batch_bytes)
            try:
                await self._answer([queued for queued in batch if not queued.request.given_up])
            finally:
                self._count(-len(batch), -sum(queued.size for queued in batch))

    async def _answer(self, batch: Sequence[_Queued]) -> None:
        if not batch:
            return
        BATCH_SIZE.observe(len(batch))
        begun = monotonic()
        answers: Sequence[Answer]
        try:
            answers = await self._write([queued.send for queued in batch])
        except BadRowError as error:
            if len(batch) > 1:
                BISECTED.inc()
                middle = len(batch) // 2
                await self._answer(batch[:middle])
                await self._answer(batch[middle:])
                return
            log.error("refused by the store", error=str(error), **_named(batch[0]))  # noqa: TRY400 - its text may hold a body
            answers = [InternalError("the event could not be written")]
        except WaybillError as error:
            answers = [error] * len(batch)
        except Exception:
            log.exception("a batch failed")
            answers = [InternalError("the event could not be written")] * len(batch)
        finally:
            BATCH_SECONDS.observe(monotonic() - begun)
        for queued, answer in zip(batch, answers, strict=True):
            queued.answer(answer)
            if isinstance(answer, Written) and not answer.duplicate:
                log.debug("written", event_id=answer.event_id, seq=answer.seq, **_named(queued))


def _named(queued: _Queued) -> dict[str, str | None]:
    """What a log entry says of a send."""
    return {"conversation_id": queued.conversation_id, "trace_id": trace_id(queued.send.draft.traceparent)}
