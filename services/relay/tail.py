"""Reading: one query for all held shards past their positions, again and again.

Nobody wakes the relay (a `NOTIFY` in the writers' transactions would put them in a queue), so it looks often while
rows come, and less often while none do.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from services.relay.metrics import OLDEST_UNSENT
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Collection

    from services.relay.held import HeldShard
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_READ, _OLDEST = _SQL["read"], _SQL["oldest_unsent"]

_SHORTEST_S = 0.003
_GROWTH = 1.3
_READ_ROWS = 8_192
_READ_BYTES = 16 * 1024 * 1024
"""Bounds of one read over all shards: memory stays flat however long the backlog is."""

_LEAST_ROWS = 16
_READ_S = 15.0
_BACKLOG_EVERY_S = 1.0

_log = logger(__name__)


class Pace:
    """How long to wait before the next read, in seconds. Pure.

    Not at all while there is more than one read brings, 3 ms while rows come, then ever longer up to ``longest_s``.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._shortest_s = min(_SHORTEST_S, longest_s)
        self._wait_s = self._shortest_s

    def after(self, rows: int, *, more: bool) -> float:
        """The wait after a read of so many rows; ``more``: it reached its limit."""
        if rows:
            self._wait_s = self._shortest_s
            return 0.0 if more else self._wait_s
        self._wait_s = min(self._longest_s, self._wait_s * _GROWTH)
        return self._wait_s


class Tail:
    """Fills the shards of ``held``, which others change while it runs."""

    def __init__(self, pool: Pool, held: dict[int, HeldShard], *, batch_size: int, longest_wait_s: float) -> None:
        self._pool = pool
        self._held = held
        self._batch_size = batch_size
        self._pace = Pace(longest_wait_s)

    async def run(self) -> None:
        """Read until cancelled."""
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(_READ_S):
                    rows, more = await self.read_once()
            except RETRIABLE as error:
                LOOP_ERRORS.labels("tail").inc()
                _log.warning("outbox not read", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            await asyncio.sleep(self._pace.after(rows, more=more))

    async def read_once(self) -> tuple[int, bool]:
        """Read what has room. Returns the number of rows, and whether a shard has more than it was given."""
        wanted = {shard.number: shard.read_id for shard in self._held.values() if shard.has_room}
        if not wanted:
            return int(bool(self._held)), False
        limit = max(_LEAST_ROWS, min(2 * self._batch_size, _READ_ROWS // len(wanted)))
        most_bytes = _READ_BYTES // len(wanted)
        rows = await self._pool.fetch(_READ, list(wanted), list(wanted.values()), limit, most_bytes)
        return len(rows), self._hand_out(rows, wanted) >= limit

    def _hand_out(self, rows: Collection[Record], wanted: dict[int, int]) -> int:
        longest = 0
        for number, group in groupby(rows, itemgetter(0)):
            own = list(group)
            longest = max(longest, len(own))
            shard = self._held.get(number)
            if shard is not None:
                shard.accept(wanted[number], own, own[-1][1])
        return longest


class Backlog:
    """Watches how old the oldest unsent row is, of all shards, whoever holds them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.oldest_s = 0.0

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_READ_S):
                    self.oldest_s = await self._pool.fetchval(_OLDEST) or 0.0
                OLDEST_UNSENT.set(self.oldest_s)
            except RETRIABLE:
                LOOP_ERRORS.labels("backlog").inc()
            await asyncio.sleep(_BACKLOG_EVERY_S)
