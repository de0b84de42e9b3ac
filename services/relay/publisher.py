"""Sending: one line per shard, and one session with Kafka for all of them until a batch fails.

After any failed batch the client is thrown away, and every shard begins again behind what is confirmed. Rows may then
come twice, but their first copies are in order.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from aiokafka.errors import KafkaError

from services.relay.failure import FailedBatchError
from services.relay.line import Common, Line
from services.relay.producer import MissingTopicError, open_client
from services.relay.session import Session
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from services.relay.cursors import Cursors
    from services.relay.held import HeldShard
    from services.relay.lease import Timing
    from services.relay.parking import ParkingStore
    from services.relay.retries import Retries
    from shared.kafka import Topics

_log = logger(__name__)


class Publisher:
    """Publishes the shards of ``held``. `start` one after it was put there, `finish` it before it is taken out."""

    def __init__(
        self,
        held: dict[int, HeldShard],
        cursors: Cursors,
        parking: ParkingStore,
        *,
        timing: Timing,
        retries: Retries,
        bootstrap: str,
        topics: Topics,
        batch_size: int,
        client_id: str,
    ) -> None:
        self._held = held
        self._timing = timing
        self._topics = topics
        self._backoff = Backoff(base_s=0.1)
        self._common = Common(cursors, parking, timing, retries, batch_size, self._backoff.reset)
        self._open = functools.partial(open_client, bootstrap, topics, client_id=client_id, timeout_s=timing.delivery_s)
        self._group: asyncio.TaskGroup | None = None
        self._session: Session | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closing = asyncio.Event()
        self.trouble: str | None = "not connected yet"

    # What others call.

    def start(self, shard: HeldShard) -> None:
        """Publish this shard from now on, after what is under way of its earlier epoch."""
        if self._group is not None and self._session is not None and not self._closing.is_set():
            work = self._run_line(shard, self._session, self._tasks.get(shard.number))
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
                client = await self._open()
            except (KafkaError, OSError, TimeoutError, MissingTopicError) as error:
                await self._wait(f"no connection: {error!r}")
                continue
            session = Session(
                client,
                self._topics,
                delivery_s=self._timing.delivery_s,
                open_careful=functools.partial(self._open, idempotent=False),
            )
            try:
                await self._run_session(session)
            except* FailedBatchError as failed:
                LOOP_ERRORS.labels("publish").inc()
                await session.discard()
                self._rewind()
                await self._wait("; ".join(str(error) for error in failed.exceptions))
            finally:
                await session.discard()

    # One client's time.

    async def _run_session(self, session: Session) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group, self._session = group, session
                self.trouble = None
                watching = group.create_task(session.watch(), name="watch")
                for shard in list(self._held.values()):
                    if not shard.ended:
                        self.start(shard)
                await self._closing.wait()
                watching.cancel()
        finally:
            self._group = self._session = None
            self._tasks.clear()

    async def _run_line(self, shard: HeldShard, session: Session, earlier: asyncio.Task[None] | None) -> None:
        try:
            if earlier is not None:
                await asyncio.wait([earlier])
            await Line(shard, session, self._common).run()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The client's own cancellation must not end a line in silence.
            raise FailedBatchError(f"shard {shard.number}: the client cancelled a batch") from None

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
