"""Acks and read marks on their way to Kafka. What a device acked stays here until Kafka has confirmed it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from aiokafka.errors import KafkaError

from services.gateway.metrics import ACKS_WAITING
from shared.clock import Backoff, wire_time
from shared.contracts.frames import MAX_RANGES
from shared.errors import UnavailableError
from shared.kafka import partition_of, producer
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokafka import AIOKafkaProducer
    from aiokafka.producer.message_accumulator import BatchBuilder

    from shared.ranges import Pair

_LOOP = LOOP_ERRORS.labels("acks")
_PRODUCE_S = 15.0
_CLOSE_S = 2.0
_MOST_PER_FLUSH = 2_000
_MOST_MARKS = 100_000
_MOST_OF_DEVICE = 100
_MOST_UNFOLDED = 1_000
_MOST_PAUSE_S = 0.1
_REST = 4.0
"""Building the batches may take a fifth of this process' time; about as much goes into sending them."""

_RETRY_MS = 1000
_PRODUCE_ERRORS = (KafkaError, OSError, TimeoutError)


class Device(NamedTuple):
    """Whose ack it is."""

    conversation_id: str
    user_id: str
    device_id: str


class Mark(NamedTuple):
    """A read mark that a device proposes."""

    device: Device
    kind: Literal["read", "unread"]
    seq: int
    version: int


class Waiting:
    """What has not been confirmed: per device what it acked, and its marks in order. Pure.

    ``held``: sorted or not, folded when it is written; most acks only lengthen the last range.
    """

    def __init__(self) -> None:
        self.held: dict[Device, list[Pair]] = {}
        self.marks: dict[Device, list[Mark]] = {}
        self._marks = 0

    def __len__(self) -> int:
        return len(self.held) + self._marks

    def hold(self, device: Device, ranges: Iterable[Pair]) -> None:
        """Add what a device stores."""
        held = self.held.get(device)
        if held is None:
            held = self.held[device] = []
        for low, high in ranges:
            if held and held[-1][0] <= low <= held[-1][1] + 1:
                held[-1] = held[-1][0], max(high, held[-1][1])
            else:
                held.append((low, high))
        if len(held) > _MOST_UNFOLDED:
            held[:] = RangeSet(held)

    def mark(self, mark: Mark) -> None:
        """Add a proposal. Raises `UnavailableError` if too many wait.

        The client keeps its own mark and says it again.
        """
        if self._marks >= _MOST_MARKS or len(self.marks.get(mark.device, ())) >= _MOST_OF_DEVICE:
            raise UnavailableError("too many read marks wait", retry_after_ms=_RETRY_MS)
        self._add([mark])

    def mark_again(self, mark: Mark) -> None:
        """Add a proposal that was confirmed and never answered, unless it waits, or too many do."""
        marks = self.marks.get(mark.device, ())
        if self._marks < _MOST_MARKS and len(marks) < _MOST_OF_DEVICE and mark not in marks:
            self._add([mark])

    def take(self, most: int) -> Waiting:
        """Take about ``most`` of them out, in order."""
        taken = Waiting()
        for device in list(self.held)[:most]:
            taken.held[device] = self.held.pop(device)
        while self.marks and taken._marks < most:
            marks = self.marks.pop(next(iter(self.marks)))
            self._marks -= len(marks)
            taken._add(marks)
        return taken

    def put_back(self, taken: Waiting) -> None:
        """Put back what was taken and not confirmed: a repeat changes no mark, so more than was lost may go again."""
        for device, ranges in taken.held.items():
            self.hold(device, ranges)
        newer, self.marks, self._marks = self.marks, {}, 0
        for marks in (*taken.marks.values(), *newer.values()):
            self._add(marks)

    def _add(self, marks: list[Mark]) -> None:
        for mark in marks:
            self.marks.setdefault(mark.device, []).append(mark)
        self._marks += len(marks)

    def records(self, at: str) -> dict[int, list[tuple[bytes, bytes]]]:
        """The records of the acks topic as (key, value), by partition. ``at``: the time of writing."""
        out: dict[int, list[tuple[bytes, bytes]]] = {}
        for device, held in self.held.items():
            pairs = held if len(held) == 1 else list(RangeSet(held))
            for start in range(0, len(pairs), MAX_RANGES):
                ranges = ",".join([f"[{low},{high}]" for low, high in pairs[start : start + MAX_RANGES]])
                _add(out, device, f'"kind":"delivered","ranges":[{ranges}]', at)
        for mark in chain.from_iterable(self.marks.values()):
            _add(out, mark.device, f'"kind":"{mark.kind}","seq":{mark.seq},"version":{mark.version}', at)
        return out


_partition = lru_cache(65_536)(partition_of)


def _add(out: dict[int, list[tuple[bytes, bytes]]], device: Device, what: str, at: str) -> None:
    # Written by hand, at a third of an encoder's price: ids and names hold nothing that JSON escapes.
    key, user_id, device_id = device
    value = f'{{"conversation_id":"{key}","user_id":"{user_id}","device_id":"{device_id}",{what},"at":"{at}"}}'
    out.setdefault(_partition(key), []).append((key.encode(), value.encode()))


class Acks:
    """Writes acks to Kafka in the background; never blocks a session.

    ``flush_s``: how long acks are gathered, at least; ``later_s``: the same for those that nobody waits for.
    """

    def __init__(self, bootstrap: str, topic: str, *, flush_s: float, later_s: float, client_id: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._flush_s = flush_s
        self._client_id = client_id
        self._later_s = later_s
        self._waiting = Waiting()
        self._later = Waiting()
        self._in_flight = 0
        self._flushed = asyncio.Event()
        self._some = asyncio.Event()

    def hold(self, device: Device, ranges: Iterable[Pair], *, later: bool = False) -> None:
        """A device stores these. ``later``: nobody waits to hear of it, so that more may be folded together."""
        if not (later and self._later_s):
            self._waiting.hold(device, ranges)
            self._some.set()
            return
        if not self._later.held:
            asyncio.get_running_loop().call_later(self._later_s, self._now_due)
        self._later.hold(device, ranges)

    def _now_due(self) -> None:
        self._waiting.put_back(self._later)
        self._later = Waiting()
        self._some.set()

    def hurry(self, device: Device) -> None:
        """The device's session has ended: its next one may begin soon, at what is known of it."""
        held = self._later.held.pop(device, None)
        if held is not None:
            self._waiting.hold(device, held)
            self._some.set()

    def mark(self, mark: Mark) -> None:
        """A device proposes a read mark. Raises `UnavailableError` if too many wait."""
        self._waiting.mark(mark)
        self._some.set()

    def mark_again(self, mark: Mark) -> None:
        """It proposed this a while ago, and nobody has answered: Kafka may have lost what it had confirmed."""
        self._waiting.mark_again(mark)
        self._some.set()

    async def run(self) -> None:
        """Flush until cancelled. After a failure everything unconfirmed goes out again, with a new producer."""
        backoff = Backoff()
        while True:
            made = producer(self._bootstrap, client_id=self._client_id, idempotent=False)
            try:
                async with asyncio.timeout(_PRODUCE_S):
                    await made.start()
                pause_s = self._flush_s
                while True:
                    await self._some.wait()
                    await asyncio.sleep(pause_s)
                    built_s = await self._flush(made)
                    # Under load acks are gathered for longer: more of them fold, and each batch brings more.
                    pause_s = min(_MOST_PAUSE_S, max(self._flush_s, _REST * built_s))
                    backoff.reset()
            except _PRODUCE_ERRORS as error:
                _LOOP.inc()
                logger(__name__).warning(
                    "acks wait: Kafka is away", error=type(error).__name__, waiting=len(self._waiting)
                )
                await asyncio.sleep(backoff.next())
            finally:
                await _close(made)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all is confirmed; False if it takes longer."""
        self._now_due()
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._waiting) + self._in_flight:
                    self._flushed.clear()
                    await self._flushed.wait()
        except TimeoutError:
            return False
        return True

    async def _flush(self, made: AIOKafkaProducer) -> float:
        """Returns for how many seconds nothing else could run here."""
        self._some.clear()
        built_s = 0.0
        while len(self._waiting):
            taken = self._waiting.take(_MOST_PER_FLUSH)
            self._in_flight = len(taken)
            try:
                async with asyncio.timeout(_PRODUCE_S):
                    built_s += await self._produce(made, taken)
            except BaseException:
                self._waiting.put_back(taken)
                self._some.set()
                raise
            finally:
                self._in_flight = 0
                ACKS_WAITING.set(len(self._waiting))
        self._flushed.set()
        return built_s

    async def _produce(self, made: AIOKafkaProducer, taken: Waiting) -> float:
        began = time.perf_counter()
        built: list[tuple[BatchBuilder, int]] = []
        for partition, records in taken.records(wire_time(datetime.now(UTC))).items():
            batch = made.create_batch()
            for key, value in records:
                if batch.append(key=key, value=value, timestamp=None) is None:
                    built.append((batch, partition))
                    batch = made.create_batch()
                    batch.append(key=key, value=value, timestamp=None)
            built.append((batch, partition))
        built_s = time.perf_counter() - began
        confirmations = [await self._send(made, batch, partition) for batch, partition in built]
        outcomes = await asyncio.gather(*confirmations, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return built_s

    async def _send(self, made: AIOKafkaProducer, batch: BatchBuilder, partition: int) -> asyncio.Future[object]:
        sent: asyncio.Future[object] = await made.send_batch(batch, self._topic, partition=partition)
        sent.add_done_callback(_look_at)
        return sent


def _look_at(outcome: asyncio.Future[object]) -> None:
    # One that nobody looks at, because an earlier one failed, would be an error in the log.
    if not outcome.cancelled():
        outcome.exception()


async def _close(made: AIOKafkaProducer) -> None:
    with contextlib.suppress(*_PRODUCE_ERRORS):
        async with asyncio.timeout(_CLOSE_S):
            await made.stop()
