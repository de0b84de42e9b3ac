"""The gateway's entries in the log of state changes: noted at once, written in batches, never in anybody's way."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import asyncpg
import msgspec

from services.gateway.metrics import TRANSITIONS_DROPPED
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.postgres import Pool

_INSERT = statements(__file__)["insert"]
_LOOP = LOOP_ERRORS.labels("transitions")
_WRITE_S = 5.0


class _Entry(NamedTuple):
    """A row of `transition`, in the order of the statement's parameters."""

    at: float
    kind: str
    cause: str
    conversation_id: str | None
    user_id: str | None
    device_id: str | None
    session_id: str | None
    from_seq: int | None
    to_seq: int | None
    trace_id: str | None
    detail: str | None


class Transitions:
    """Writes every ``flush_s`` seconds, or when ``most`` wait, so many at once; keeps at most ``most_waiting``.

    Over that the oldest are dropped and counted. While Postgres is away they wait.
    """

    def __init__(self, pool: Pool, *, flush_s: float = 1.0, most: int = 500, most_waiting: int = 10_000) -> None:
        self._pool = pool
        self._flush_s = flush_s
        self._most = most
        self._waiting: deque[_Entry] = deque(maxlen=most_waiting)
        self._enough = asyncio.Event()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def note(
        self,
        kind: str,
        cause: str,
        *,
        conversation_id: str | None = None,
        user_id: str | None = None,
        device_id: str | None = None,
        session_id: str | None = None,
        from_seq: int | None = None,
        to_seq: int | None = None,
        trace_id: str | None = None,
        detail: Mapping[str, object] | None = None,
    ) -> None:
        """Note what happened just now, and why. Ids are UUIDs or names; ``detail`` can be written as JSON."""
        if len(self._waiting) == self._waiting.maxlen:
            TRANSITIONS_DROPPED.inc()
        self._waiting.append(
            _Entry(
                time.time(),
                kind,
                cause,
                conversation_id,
                user_id,
                device_id,
                session_id,
                from_seq,
                to_seq,
                trace_id,
                None if detail is None else msgspec.json.encode(detail).decode(),
            )
        )
        if len(self._waiting) >= self._most:
            self._enough.set()

    async def run(self) -> None:
        """Write until cancelled. What waits then is left to `flush`."""
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                async with asyncio.timeout(self._flush_s):
                    await self._enough.wait()
            except TimeoutError:
                pass
            self._enough.clear()
            try:
                await self.flush()
                backoff.reset()
            except UnavailableError as error:
                _LOOP.inc()
                logger(__name__).warning("transitions wait", error=error.message, waiting=len(self._waiting))
                await asyncio.sleep(backoff.next())

    async def flush(self) -> None:
        """Write all that waits now. Raises `UnavailableError`; what was not written goes on waiting."""
        left = len(self._waiting)
        while left > 0 and self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._most, left, len(self._waiting)))]
            left -= len(batch)
            try:
                await self._write(batch)
            except asyncpg.PostgresError:
                # A row that cannot be written would hold up all others for ever.
                TRANSITIONS_DROPPED.inc(len(batch))
                _LOOP.inc()
                logger(__name__).exception("transitions dropped")
            except BaseException:
                self._put_back(batch)
                raise

    def _put_back(self, batch: list[_Entry]) -> None:
        room = (self._waiting.maxlen or 0) - len(self._waiting)
        TRANSITIONS_DROPPED.inc(max(0, len(batch) - room))
        self._waiting.extendleft(reversed(batch[max(0, len(batch) - room) :]))

    async def _write(self, batch: list[_Entry]) -> None:
        with unavailable_if_away():
            async with asyncio.timeout(_WRITE_S):
                await self._pool.execute(_INSERT, *zip(*batch, strict=True))
