"""One Kafka client's time: handing batches over and waiting for where they lie, until one fails.

Beside the idempotent client there is a careful one, opened when it is first needed, without sequence numbers: a refused
batch burns none there, so that a refused row can be looked for without an end of everything.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

from aiokafka.errors import KafkaError

from services.relay.batch import build
from services.relay.failure import FailedBatchError, RefusedError, is_permanent
from services.relay.metrics import FAILED_BATCHES
from services.relay.producer import MissingTopicError, find_topic
from services.relay.shards import Delivery

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Awaitable, Callable, Collection

    from aiokafka.structs import RecordMetadata

    from services.relay.batch import Batch, Queue
    from services.relay.producer import Client
    from shared.kafka import Topics
    from shared.postgres import Record

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""What Kafka takes as a topic's name. Its client breaks at some others."""

_WATCH_EVERY_S = 0.1
_MISSING_FOR_S = 10.0
"""For how long a topic that is not there is not asked for again."""


class Session:
    """One batch of a shard and topic at a time, whichever client has it."""

    def __init__(
        self, client: Client, topics: Topics, *, delivery_s: float, open_careful: Callable[[], Awaitable[Client]]
    ) -> None:
        self.known = set(client.known)
        self._client = client
        self._topics = topics
        self._delivery_s = delivery_s
        self._open_careful = open_careful
        self._opening = asyncio.Lock()
        self._careful: Client | None = None
        self._missing: dict[str, tuple[float, str]] = {}
        self._confirmed_by: dict[int, float] = {}

    async def watch(self) -> None:
        """Raise `FailedBatchError` once a batch is not confirmed in time. One clock for all: a timer each is dearer."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            now = time.monotonic()
            for shard, confirmed_by in self._confirmed_by.items():
                if now >= confirmed_by:
                    FAILED_BATCHES.labels("retriable").inc()
                    raise FailedBatchError(f"shard {shard}: not confirmed within {self._delivery_s:g} s")

    def build(self, rows: deque[Record], at_most: int, parked: Collection[Queue] = ()) -> Batch:
        """Move rows from the front into a batch for either client; see `services.relay.batch.build`."""
        return build(rows, at_most, self._client.producer.create_batch, self.known, parked, self._client.batch_bytes)

    async def send(self, shard: int, batch: Batch) -> list[tuple[Delivery, int]]:
        """Hand a batch over and wait for where it lies: deliveries with their numbers of rows.

        Raises `RefusedError` and `FailedBatchError`. After either one the session must end: the client has burnt the
        batch's sequence numbers. `watch` bounds it.
        """
        self._confirmed_by[shard] = time.monotonic() + self._delivery_s - _WATCH_EVERY_S
        try:
            waiting = [
                self._client.hand_over(part.builder, self._topics.of_outbox(part.topic), shard)
                for part in batch.parts.values()
            ]
            return await _placed(batch, waiting)
        except (KafkaError, OSError) as error:
            raise _sorted_out(shard, error) from error
        finally:
            del self._confirmed_by[shard]

    async def send_with_care(self, shard: int, batch: Batch) -> list[tuple[Delivery, int]]:
        """`send` through the careful client: the session lives on after a `RefusedError`."""
        try:
            async with asyncio.timeout(self._delivery_s):
                async with self._opening:
                    if self._careful is None:
                        self._careful = await self._open_careful()
                producer = self._careful.producer
                waiting = [
                    await producer.send_batch(part.builder, self._topics.of_outbox(part.topic), partition=shard)
                    for part in batch.parts.values()
                ]
                return await _placed(batch, waiting)
        except (KafkaError, OSError, TimeoutError, MissingTopicError) as error:
            raise _sorted_out(shard, error) from error

    async def learn(self, shard: int, topic: str) -> str | None:
        """Make a topic `known`; the reason, if it is not there for us. Raises `FailedBatchError`: can't be told now."""
        if not _NAME.fullmatch(self._topics.of_outbox(topic)):
            return f"{topic[:100]!r} can't be a topic"
        until, reason = self._missing.get(topic, (0.0, ""))
        if time.monotonic() < until:
            return reason
        try:
            async with asyncio.timeout(self._delivery_s):
                there = await find_topic(self._client.producer, self._topics.of_outbox(topic))
        except (KafkaError, OSError, TimeoutError) as error:
            if not is_permanent(error):
                raise FailedBatchError(f"shard {shard}: {error!r}") from error
            reason = f"{topic}: {error!r}"
        else:
            if shard in there:
                self.known.add(topic)
                return None
            reason = f"{topic} has no partition {shard}" if there else f"there is no topic {topic}"
        self._missing[topic] = (time.monotonic() + _MISSING_FOR_S, reason)
        return reason

    async def discard(self) -> None:
        """Get rid of both clients, without flushing."""
        clients = [self._client] if self._careful is None else [self._client, self._careful]
        await asyncio.gather(*(client.discard() for client in clients))


async def _placed(batch: Batch, waiting: list[asyncio.Future[RecordMetadata]]) -> list[tuple[Delivery, int]]:
    if len(waiting) == 1:
        answers = [await waiting[0]]
    else:
        # Each is waited for, or the next try could overtake what is still under way.
        answers = _all_placed(await asyncio.gather(*waiting, return_exceptions=True))
    if min(answer.offset for answer in answers) < 0:
        # Written by an earlier try whose answer was lost, at an offset that the broker has forgotten.
        raise KafkaError("the offset of a batch is not known")
    return [
        (Delivery(part.from_id, part.to_id, part.topic, int(answer.offset)), part.rows)
        for part, answer in zip(batch.parts.values(), answers, strict=True)
    ]


def _all_placed(answers: list[RecordMetadata | BaseException]) -> list[RecordMetadata]:
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if errors:
        # What passes by itself goes first: only then it is sure who is to blame.
        raise min(errors, key=is_permanent)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def _sorted_out(shard: int, error: Exception) -> RefusedError | FailedBatchError:
    if is_permanent(error):
        return RefusedError(f"refused by Kafka: {error!r}")
    return FailedBatchError(f"shard {shard}: {error!r}")
