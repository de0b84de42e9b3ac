"""Records that a gateway cannot read, put on the desk of dead letters: noted at once, written in nobody's way.

All gateways read the same records; the desk keeps one letter of each.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

import asyncpg
from aiokafka.errors import KafkaError

from services.gateway.metrics import LETTERS_DROPPED
from shared.clock import Backoff
from shared.dead_letter import BadRecord
from shared.errors import UnavailableError
from shared.kafka import cluster_id
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.kafka import Consumed, Topics
    from shared.postgres import Pool

_BURY = statements(__file__)["bury"]
_LOOP = LOOP_ERRORS.labels("letters")
_WRITE_S = 5.0
_AWAY = (KafkaError, OSError, TimeoutError)


class Letters:
    """Writes every ``flush_s`` seconds while any wait; keeps at most ``most_waiting``, of ``most_bytes`` together.

    Over that the newest are dropped and counted: they are in the dead-letter topic all the same. While Postgres or
    Kafka is away they wait.
    """

    def __init__(
        self,
        pool: Pool,
        bootstrap: str,
        topics: Topics,
        *,
        flush_s: float = 1.0,
        most_waiting: int = 1_000,
        most_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self._pool = pool
        self._bootstrap = bootstrap
        self._topics = topics
        self._flush_s = flush_s
        self._most_waiting = most_waiting
        self._most_bytes = most_bytes
        self._waiting: defaultdict[str, list[BadRecord]] = defaultdict(list)
        self._bytes = 0
        self._any = asyncio.Event()

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def note(self, record: Consumed, error: str) -> None:
        """Put a record on the desk before long."""
        bad = BadRecord.of(record, error)
        if len(self) >= self._most_waiting or self._bytes + _size(bad) > self._most_bytes:
            LETTERS_DROPPED.inc()
            return
        self._waiting[self._topics.in_outbox(record.topic)].append(bad)
        self._bytes += _size(bad)
        self._any.set()

    async def run(self) -> None:
        """Write until cancelled. What waits then is left to `flush`."""
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._any.wait()
            await asyncio.sleep(self._flush_s)
            try:
                await self.flush()
                backoff.reset()
            except UnavailableError as error:
                _LOOP.inc()
                logger(__name__).warning("bad records wait for the desk", error=error.message, waiting=len(self))
                await asyncio.sleep(backoff.next())

    async def flush(self) -> None:
        """Write all that waits now. Raises `UnavailableError`; what was not written goes on waiting."""
        if not self._waiting:
            return
        # Asked each time: an emptied Kafka comes back as another cluster, with the same offsets.
        try:
            async with asyncio.timeout(_WRITE_S):
                cluster = await cluster_id(self._bootstrap)
        except _AWAY as error:
            raise UnavailableError("Kafka is away") from error
        for origin in list(self._waiting):
            batch = self._waiting.pop(origin)
            self._bytes -= sum(map(_size, batch))
            try:
                await self._write(origin, cluster, batch)
            except BaseException:
                self._waiting[origin][:0] = batch
                self._bytes += sum(map(_size, batch))
                raise
        if not self._waiting:
            self._any.clear()

    async def _write(self, origin: str, cluster: str, batch: list[BadRecord]) -> None:
        try:
            with unavailable_if_away():
                async with asyncio.timeout(_WRITE_S):
                    new = await self._pool.fetchval(_BURY, origin, cluster, *zip(*batch, strict=True))
        except asyncpg.PostgresError:
            # What cannot be written would hold up all others for ever.
            LETTERS_DROPPED.inc(len(batch))
            _LOOP.inc()
            logger(__name__).exception("bad records are not on the desk", origin=origin, records=len(batch))
        else:
            logger(__name__).info("bad records are on the desk", origin=origin, records=len(batch), new=new)


def _size(bad: BadRecord) -> int:
    return len(bad.value or b"") + len(bad.key or b"") + len(bad.headers)
