"""All partitions of events and receipts, read from the end without a consumer group.

No group means no rebalance: every gateway reads everything, and a record of a conversation without a local session
costs a look-up. Nothing is missed by starting at the end: positions are fixed before any session reads a head.
"""

from __future__ import annotations

import asyncio
from itertools import chain, cycle
from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec
from aiokafka.errors import KafkaError

from services.gateway.fanout import ALWAYS
from services.gateway.metrics import RECORDS
from services.gateway.records import check, envelope
from shared.clock import Backoff
from shared.dead_letter import Graves
from shared.kafka import begin_at_end, ensure_fetching, partitions, reader, stop_reader
from shared.logging import logger
from shared.metrics import BAD_RECORDS, LOOP_ERRORS

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer

    from services.gateway.fanout import Fanout
    from services.gateway.letters import Letters
    from services.gateway.sweep import Sweep
    from shared.kafka import Consumed, Topics

_LOOP = LOOP_ERRORS.labels("stream")
_POLL_MS = 1_000
_MOST = 2_000
_TURN_S = 0.005
"""How long records are handled before other tasks get their turn."""

_FRESH_S = 0.5
_PROBE_S = 1.0
_PROBE_STEP = 7
"""So that a few probes reach every broker."""

_START_S = 30.0
_STOP_S = 3.0
_AWAY = (KafkaError, OSError, TimeoutError)


class Stream:
    """Reads a topic into the fan-out. ``started`` is set once all positions are fixed for the first time.

    ``sweep`` is told what came, and carries delivery while nothing comes; ``letters`` gets what cannot be read.
    ``pause_s``: the least time between two reads. Each one asks for every partition, which costs this process and the
    broker milliseconds, however few records come. ``away``: what is wrong with Kafka, None while it answers.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Topics,
        topic: str,
        fanout: Fanout,
        *,
        client_id: str,
        pause_s: float,
        sweep: Sweep,
        letters: Letters,
    ) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        BAD_RECORDS.labels(topic)
        self._graves = Graves(bootstrap, topics.dead, client_id=f"{client_id}-dead")
        self._fanout = fanout
        self._client_id = client_id
        self._pause_s = pause_s
        self._sweep = sweep
        self._letters = letters
        self.started = asyncio.Event()
        self.away: str | None = "starting"
        self._lag_s = 0.0
        self._read_at = 0.0

    async def run(self) -> None:
        """Read until cancelled. A consumer that fails is replaced, from the end."""
        try:
            await self._run(Backoff())
        finally:
            await self._graves.close()

    @property
    def lag_s(self) -> float:
        """How long the last records were on their way from Kafka to here; 0 while nothing waits there."""
        return self._lag_s if monotonic() - self._read_at < _FRESH_S else 0.0

    async def _run(self, backoff: Backoff) -> None:
        while True:
            consumer = reader(self._bootstrap, client_id=self._client_id)
            probe: asyncio.Task[None] | None = None
            try:
                await self._fix_positions(consumer)
                backoff.reset()
                self.started.set()
                self.away = None
                probe = asyncio.create_task(self._probe(consumer))
                while True:
                    await self._read(consumer)
            except _AWAY as error:
                _LOOP.inc()
                self.away = type(error).__name__
                logger(__name__).warning("Kafka cannot be read", topic=self._topic, error=self.away)
                await asyncio.sleep(backoff.next())
            finally:
                if probe is not None:
                    probe.cancel()
                await stop_reader(consumer, _STOP_S)

    async def _probe(self, consumer: AIOKafkaConsumer) -> None:
        """Ask a broker for an offset now and then: a consumer whose brokers are gone just reads nothing."""
        for partition in cycle(partitions([self._topic])[::_PROBE_STEP]):
            await asyncio.sleep(_PROBE_S)
            try:
                async with asyncio.timeout(_PROBE_S):
                    await consumer.end_offsets([partition])
            except _AWAY as error:
                if self.away is None:
                    logger(__name__).warning("Kafka does not answer", topic=self._topic, error=type(error).__name__)
                self.away = type(error).__name__
            else:
                self.away = None

    async def _fix_positions(self, consumer: AIOKafkaConsumer) -> None:
        async with asyncio.timeout(_START_S):
            await begin_at_end(consumer, self._topic)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        ensure_fetching(consumer)
        batches = await consumer.getmany(timeout_ms=_POLL_MS, max_records=_MOST)
        RECORDS.inc(sum(map(len, batches.values())))
        since = self._read_at = monotonic()
        for record in chain.from_iterable(batches.values()):
            error = self._handle(record)
            if error is not None:
                await self._bury(record, error)
            if monotonic() - since > _TURN_S:
                await asyncio.sleep(0)
                since = monotonic()
        await asyncio.sleep(self._pause_s)

    def _handle(self, record: Consumed) -> str | None:
        """Hand a record on; returns what is wrong with it if it cannot be read."""
        try:
            of = envelope(record)
            fanout = self._fanout
            value = record.value or b""
            wanted = fanout.wants(of.conversation_id, of.type)
            if wanted:
                check(value, of)
            stamped = record.timestamp / 1000
            self._lag_s = time() - stamped
            if not of.is_event:
                self._sweep.saw_receipt(record.partition, of.seq)
                if wanted and not self._sweep.told_receipt(record.partition, of.seq):
                    fanout.receipt(of.conversation_id, value)
            elif wanted:
                fanout.event(of.conversation_id, of.seq, of.type, value, stamped=stamped, committed=of.committed)
                if of.type in ALWAYS:
                    self._sweep.saw_change(of.conversation_id, of.seq)
        except (ValueError, msgspec.MsgspecError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - a fault of ours at one record; sessions that miss it read it
            _LOOP.inc()
            logger(__name__).exception("a record was not handled", topic=record.topic, offset=record.offset)
        return None

    async def _bury(self, record: Consumed, error: str) -> None:
        logger(__name__).error("a record cannot be read", topic=record.topic, offset=record.offset, error=error)
        try:
            await self._graves.bury(record, error)
        except _AWAY as away:
            logger(__name__).error("it could not be kept as a dead letter", error=type(away).__name__)
        self._letters.note(record, error)
