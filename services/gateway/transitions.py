"""The gateway's entries in the log of state changes: noted at once, written in batches, never in anybody's way."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import asyncpg
import msgspec

from services.gateway.metrics import TRANSITIONS_DROPPED
from services.gateway.pushed import Pushes
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import to_array, unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from services.gateway.pushed import Pushed
    from shared.postgres import Pool

_Row = TypeVar("_Row")

_SQL = statements(__file__)
_INSERT, _PUSHED = _SQL["insert"], _SQL["pushed"]
_LOOP = LOOP_ERRORS.labels("transitions")
_WRITE_S = 5.0

MOST_WAITING = 100_000
"""Entries, and as many ranges of sessions that ended, that wait while Postgres takes nothing: what 10,000 sessions
leave behind in several seconds. One takes some 300 bytes, so both together are 60 MB at the most."""


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


class Refusal(NamedTuple):
    """What was refused, and to whom: what is refused again within a second is one entry, with a count."""

    kind: str
    cause: str
    conversation_id: str | None
    user_id: str
    device_id: str
    session_id: str
    trace_id: str | None = None


class Transitions:
    """Writes every ``flush_s`` seconds, or when ``most`` entries wait, so many at once; keeps ``most_waiting`` of them.

    Over that the oldest are dropped and counted. ``pushes`` are written every ``flush_s`` seconds, ``most_pushes`` at
    once. While Postgres is away all wait.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        flush_s: float = 1.0,
        most: int = 500,
        most_pushes: int = 500,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.pushes = Pushes(most=most_waiting, dropped=TRANSITIONS_DROPPED.inc)
        self._pool = pool
        self._flush_s = flush_s
        self._most = most
        self._most_pushes = most_pushes
        self._waiting: deque[_Entry] = deque(maxlen=most_waiting)
        self._refused: dict[Refusal, tuple[float, int]] = {}
        self._enough = asyncio.Event()
        self._writing = asyncio.Lock()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting) + len(self._refused) + len(self.pushes)

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
        text = None if detail is None else msgspec.json.encode(detail).decode()
        self._add(
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
                text,
            )
        )

    def refused(self, refusal: Refusal) -> None:
        """Note that something was just refused; again and again, if a client goes on so."""
        at, times = self._refused.get(refusal) or (time.time(), 0)
        self._refused[refusal] = at, times + 1
        if len(self._refused) >= self._most:
            self._fold()

    def _fold(self) -> None:
        for of, (at, times) in self._refused.items():
            detail = None if times == 1 else f'{{"times":{times}}}'
            whose = (of.conversation_id, of.user_id, of.device_id, of.session_id)
            self._add(_Entry(at, of.kind, of.cause, *whose, None, None, of.trace_id, detail))
        self._refused.clear()

    def _add(self, entry: _Entry) -> None:
        if len(self._waiting) == self._waiting.maxlen:
            TRANSITIONS_DROPPED.inc()
        self._waiting.append(entry)
        if len(self._waiting) >= self._most:
            self._enough.set()

    async def run(self) -> None:
        """Write until cancelled. What waits then is left to `flush`."""
        backoff = Backoff(0.1, 5.0)
        due = time.monotonic() + self._flush_s
        while True:
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._enough.wait()
            except TimeoutError:
                pass
            self._enough.clear()
            try:
                if time.monotonic() < due:
                    await self._flush_entries()
                else:
                    due = time.monotonic() + self._flush_s
                    await self.flush()
                backoff.reset()
            except UnavailableError as error:
                _LOOP.inc()
                logger(__name__).warning("transitions wait", error=error.message, waiting=len(self))
                await asyncio.sleep(backoff.next())

    async def flush(self) -> None:
        """Write all that waits now, after what is just being written.

        Raises `UnavailableError`; what was not written goes on waiting.
        """
        self._fold()
        await self._flush_entries()
        async with self._writing:
            left = len(self.pushes)
            while left > 0 and (taken := self.pushes.take(min(left, self._most_pushes))):
                left -= len(taken)
                await self._write(taken, self._insert_pushes, self.pushes.put_back)

    async def _flush_entries(self) -> None:
        async with self._writing:
            left = len(self._waiting)
            while left > 0 and self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(self._most, left, len(self._waiting)))]
                left -= len(batch)
                await self._write(batch, self._insert, self._put_back)

    def _put_back(self, batch: list[_Entry]) -> None:
        room = (self._waiting.maxlen or 0) - len(self._waiting)
        TRANSITIONS_DROPPED.inc(max(0, len(batch) - room))
        self._waiting.extendleft(reversed(batch[max(0, len(batch) - room) :]))

    async def _insert(self, batch: list[_Entry]) -> None:
        await self._pool.execute(_INSERT, *zip(*batch, strict=True))

    async def _insert_pushes(self, batch: list[Pushed]) -> None:
        at, conversations, users, devices, sessions, first, last = zip(*batch, strict=True)
        wall = time.time() - time.monotonic()
        await self._pool.execute(
            _PUSHED,
            "{" + ",".join([f"{wall + one:.6f}" for one in at]) + "}",
            _names(conversations),
            _names(users),
            _names(devices),
            _names(sessions),
            to_array(first),
            to_array(last),
        )

    @staticmethod
    async def _write(
        batch: list[_Row], insert: Callable[[list[_Row]], Awaitable[None]], put_back: Callable[[list[_Row]], None]
    ) -> None:
        try:
            with unavailable_if_away():
                async with asyncio.timeout(_WRITE_S):
                    await insert(batch)
        except asyncpg.PostgresError:
            # A row that cannot be written would hold up all others for ever.
            TRANSITIONS_DROPPED.inc(len(batch))
            _LOOP.inc()
            logger(__name__).exception("transitions dropped")
        except BaseException:
            put_back(batch)
            raise


def _names(names: Iterable[str]) -> str:
    """The text of an array of ids, which hold nothing that has to be escaped; in quotes, since one may be `NULL`."""
    return '{"' + '","'.join(names) + '"}'
