"""Acks on the desk of dead letters that somebody wants to be tried again: parsed anew, and applied without offsets.

One process at a time tries them, in the order of their offsets, by a lease that is a row of the store. What is applied
twice, since somebody dies in between, changes nothing: marks are merges.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, Protocol

from services.receipts.fold import fold
from services.receipts.metrics import LETTERS
from services.receipts.records import fault, parse
from services.receipts.store import NO_CONVERSATION, STORE_AWAY, BadAckError, UnknownConversationsError
from shared.clock import Backoff
from shared.errors import BadRequestError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.receipts.fold import Changes
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_CLAIM, _SETTLE = _SQL["claim"], _SQL["settle"]

_EVERY_S = 1.0
_LEASE = timedelta(seconds=15)
"""Longer than one letter may take."""

_ASK_S = 10.0
_MOST = 100

_LOOP = LOOP_ERRORS.labels("letters")


class Applies(Protocol):
    """Applies acks without offsets."""

    async def apply_again(self, changes: Changes) -> object:
        """Raises `UnknownConversationsError`, `BadAckError`, and what asyncpg raises: then the letter waits."""


@dataclass(slots=True)
class _Read:
    """A letter's record, as Kafka handed it out."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int = 0
    headers: Sequence[tuple[str, bytes | None]] = ()


class Letters:
    """Tries the letters of one origin (`acks.v1`) again: what is applied is `sent`, the rest is dead again."""

    def __init__(self, pool: Pool, origin: str, store: Applies, *, every_s: float = _EVERY_S) -> None:
        self._pool = pool
        self._origin = origin
        self._store = store
        self._every_s = every_s
        self._owner = str(uuid.uuid4())
        self._log = logger(__name__)

    async def run(self) -> NoReturn:
        """Look until cancelled. While the store is away the letters wait, and no attempt is counted."""
        backoff = Backoff()
        while True:
            try:
                tried = await self.look()
            except STORE_AWAY as error:
                _LOOP.inc()
                self._log.warning("dead letters wait: the store is away", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            if tried < _MOST:
                await asyncio.sleep(self._every_s)

    async def look(self) -> int:
        """Try what is asked for now, at most 100 letters; how many. Raises what asyncpg raises where it must wait."""
        async with asyncio.timeout(_ASK_S):
            rows = await self._pool.fetch(_CLAIM, self._origin, self._owner, _LEASE, _MOST)
        for row in rows:
            # With the last one the lease ends: whoever looks next may go on.
            lease = _LEASE if row is not rows[-1] else timedelta(0)
            if not await self._settle(row, await self._try(row), lease):
                return 0
        return len(rows)

    async def _try(self, row: Record) -> str | None:
        """What is wrong with a letter; None once its ack is applied."""
        if row["is_cut"]:
            return "value: only its beginning was kept"
        try:
            changes = fold([parse(_Read(self._origin, row["partition"], row["at"], row["key"], row["value"]))])
            async with asyncio.timeout(_ASK_S):
                await self._store.apply_again(changes)
        except BadRequestError as error:
            return fault(error)
        except UnknownConversationsError:
            return NO_CONVERSATION
        except BadAckError as error:
            return f"value: {error}"
        return None

    async def _settle(self, row: Record, error: str | None, lease: timedelta) -> bool:
        plain = None if error is None else error.replace("\0", "\ufffd")
        async with asyncio.timeout(_ASK_S):
            ours = bool(
                await self._pool.fetchval(
                    _SETTLE, self._origin, self._owner, lease, row["dead_id"], row["attempts"], plain
                )
            )
        if ours:
            outcome = "sent" if error is None else "dead"
            LETTERS.labels(outcome).inc()
            self._log.info("dead letter tried again", dead_id=row["dead_id"], outcome=outcome, error=plain)
        return ours
