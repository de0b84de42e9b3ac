"""What is read of receipts for clients: the marks of a group so far, for who begins to watch it, and who has a seq."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from services.gateway.asking import a_turn
from services.gateway.listing import Marks
from services.gateway.wire import ready
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.readers import readers
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from services.gateway.connection import Connection
    from services.gateway.feed import Feed
    from shared.contracts import frames
    from shared.postgres import Pool, Record

_SO_FAR = statements(__file__)["marks_so_far"]
_TIMEOUT_S = 5.0
_LOOP = LOOP_ERRORS.labels("marks-so-far")
_RETRY_MS = 1000

MOST = 500
"""Members whose marks are told to who begins to watch; the first in order of user id."""

_encode = msgspec.json.Encoder().encode


class _Found:
    """What one read found, for all who share it."""

    def __init__(self, conversation_id: str, rows: list[Record]) -> None:
        self._members = {row[0] for row in rows if row[1] is None}
        marks = [Marks(*row) for row in rows if row[1] is not None]
        self._frames = {one.user_id: ready(one.frame(conversation_id)) for one in marks}
        self._first = b"".join(list(self._frames.values())[:MOST])

    def of_others(self, user_id: str) -> bytes:
        """Ready frames for this user; none if it is no member."""
        if user_id not in self._members:
            return b""
        if user_id not in self._frames:
            return self._first
        return b"".join([frame for one, frame in self._frames.items() if one != user_id][:MOST])


class _Read:
    """A read that has not begun, and who will have its result; None: it failed."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.found: asyncio.Future[_Found | None] = asyncio.get_running_loop().create_future()


class SoFar:
    """Marks so far. Of each conversation one read is under way at a time; who comes meanwhile shares the next one.

    So nobody gets what was read before it asked. ``turns``: held by each read. ``spawn`` starts a task.
    """

    def __init__(
        self, pool: Pool, turns: asyncio.Semaphore, spawn: Callable[[Coroutine[None, None, None]], object]
    ) -> None:
        self._pool = pool
        self._turns = turns
        self._spawn = spawn
        self._next: dict[str, _Read] = {}
        self._serving: set[str] = set()

    async def of(self, conversation_id: str, user_id: str) -> bytes:
        """The receipt frames of at most `MOST` others, ready to be written; none for who is no member.

        Raises `UnavailableError`.
        """
        read = self._next.get(conversation_id)
        if read is None:
            read = self._next[conversation_id] = _Read()
        read.users.add(user_id)
        if conversation_id not in self._serving:
            self._serving.add(conversation_id)
            self._spawn(self._serve(conversation_id))
        found = await asyncio.shield(read.found)
        if found is None:
            raise UnavailableError("the marks so far could not be read", retry_after_ms=_RETRY_MS)
        return found.of_others(user_id)

    async def _serve(self, conversation_id: str) -> None:
        read: _Read | None = None
        try:
            while conversation_id in self._next:
                read = self._next[conversation_id]
                await self._read(conversation_id, read)
        finally:
            self._serving.discard(conversation_id)
            for one in (read, self._next.pop(conversation_id, None)):
                if one is not None and not one.found.done():
                    one.found.set_result(None)

    async def _read(self, conversation_id: str, read: _Read) -> None:
        found: _Found | None = None
        try:
            async with a_turn(self._turns):
                del self._next[conversation_id]  # the snapshot comes after this: who asks from now on needs a later one
                with unavailable_if_away():
                    rows = await self._pool.fetch(
                        _SO_FAR, conversation_id, list(read.users), MOST + 1, timeout=_TIMEOUT_S
                    )
            found = _Found(conversation_id, rows)
        except UnavailableError:
            _LOOP.inc()
        except Exception:  # noqa: BLE001 - a fault in one read is told to who waits for it, and ends no other
            _LOOP.inc()
            logger(__name__).exception("the marks so far could not be read")
        if self._next.get(conversation_id) is read:
            del self._next[conversation_id]  # it failed before it began
        read.found.set_result(found)


async def tell_so_far(connection: Connection, feed: Feed) -> None:
    """Answer `watch` with the marks so far. Raises `UnavailableError`."""
    feed.wake()
    found = await connection.parts.so_far.of(feed.conversation_id, connection.user_id)
    if found and not connection.ended:
        connection.so_far(feed, found)


async def answer(connection: Connection, frame: frames.Receipts) -> None:
    """Answer `receipts`. Raises `NotFoundError` or `UnavailableError`."""
    async with a_turn(connection.parts.asking):
        found = await readers(
            connection.parts.pool,
            frame.conversation_id.lower(),
            connection.user_id,
            seq=frame.seq,
            state=frame.state,
            after=frame.after,
            limit=frame.limit,
        )
    if not connection.ended:
        told = {"t": "receipts", "rid": frame.rid, **msgspec.structs.asdict(found)}
        connection.write(ready(_encode(told)))
