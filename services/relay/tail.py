"""Reading: one query for all held shards past their positions, again and again.

Nobody wakes the relay (a `NOTIFY` in the writers' transactions would put them in a queue), so it looks often while
rows come, and less often while none do. It looks at the sequence of ids first, and reads only if one was drawn.
"""

from __future__ import annotations

import asyncio
import time
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from services.relay.drawn import Drawn
from services.relay.life import Life
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE, to_array
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Collection

    from services.relay.held import HeldShard
    from shared.postgres import Pool, PooledConnection, Record

_SQL = statements(__file__)
_DRAWN, _READ, _READ_LARGE = _SQL["drawn"], _SQL["read"], _SQL["read_large"]

_SHORTEST_S = 0.002
_GROWTH = 1.2
_SURE_S = 1.0
"""A read comes after so long in any case: a transaction may have drawn ids long ago and commit now."""

_READ_ROWS = 4_000
"""About so many rows come in one read; twice as many at most."""

_READ_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = _READ_BYTES // (2 * _READ_ROWS)
"""Bounds of one read over all shards: memory stays flat however long the backlog is."""

_LEAST_ROWS = 16
_BEHIND_AT_ONCE = 8
"""Of shards that have more than one read brings, so many are read at a time: a few large batches cost the client and
the broker far less than many small ones."""

_READ_S = 15.0

_log = logger(__name__)


class Pace:
    """How long to wait before the next read, in seconds. Pure.

    Not at all while there is more than one read brings, 2 ms while rows come, then ever longer up to ``longest_s``.
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
    """Fills the shards of ``held``, which others change while it runs. Keeps a connection of ``pool`` for itself."""

    def __init__(
        self,
        pool: Pool,
        held: dict[int, HeldShard],
        *,
        batch_size: int,
        longest_wait_s: float,
        life: Life | None = None,
    ) -> None:
        self._pool = pool
        self._life = life or Life(pool)
        self._in_life = ""
        self._held = held
        self._batch_size = batch_size
        self._pace = Pace(longest_wait_s)
        self._drawn = Drawn()
        self._ends: dict[int, int] = {}
        self._behind: dict[int, None] = {}
        self._sure_at = float("-inf")
        self._large = False

    async def run(self) -> None:
        """Read until cancelled."""
        backoff = Backoff()
        while True:
            try:
                async with self._pool.acquire(timeout=_READ_S) as connection:
                    while True:
                        rows, more = await self.read_once(connection)
                        backoff.reset()
                        await asyncio.sleep(self._pace.after(rows, more=more))
            except RETRIABLE as error:
                LOOP_ERRORS.labels("tail").inc()
                _log.warning("outbox not read", error=repr(error))
                await asyncio.sleep(backoff.next())

    async def read_once(self, connection: PooledConnection) -> tuple[int, bool]:
        """Read what has room. Returns the number of rows, and whether a shard has more than it was given.

        One row is said, too, where there is none yet, but soon will be. The pool's time-out bounds each statement.
        """
        wanted = self._wanted()
        if not wanted:
            return int(bool(self._held)), False
        life = await self._life.known(connection)
        if life != self._in_life:
            # What was read in another one says nothing of this one.
            self._in_life, self._drawn, self._ends = life, Drawn(), {}
        drawn: int = await connection.fetchval(_DRAWN)
        news = self._drawn.up_to(drawn, now := time.monotonic())
        if self._drawn.all_read(now) and now < self._sure_at and wanted.items() <= self._ends.items():
            return 0, False
        few = max(_LEAST_ROWS, min(2 * self._batch_size, _READ_ROWS // len(wanted)))
        many = max(few, min(self._batch_size, _READ_ROWS // _BEHIND_AT_ONCE))
        limits = {number: many if number in self._behind else few for number in wanted}
        statement, most_bytes = (_READ_LARGE, _READ_BYTES // len(wanted)) if self._large else (_READ, _LARGE_BYTES)
        rows = await connection.fetch(
            statement,
            to_array(wanted),
            to_array(wanted.values()),
            to_array(limits.values()),
            most_bytes,
            min(wanted.values()),
            drawn,
            life,
        )
        self._hand_out(rows, wanted, limits, now)
        self._sure_at = now + _SURE_S
        return len(rows) or int(news), bool(self._behind)

    def _wanted(self) -> dict[int, int]:
        """The positions of the shards to read."""
        # Most have no row left, and asking them for no more than that is what an idle relay does all the time.
        wanted = {shard.number: shard.read_id for shard in self._held.values() if not shard.rows or shard.has_room}
        if self._behind:
            self._behind = {number: None for number in self._behind if number in self._held}
            with_room = [number for number in self._behind if number in wanted]
            # Rows of a shard that stands still don't go, and must keep nobody else from being read.
            ahead = sum(len(shard.rows) for shard in self._held.values() if shard.stopped is None)
            for number in with_room[_BEHIND_AT_ONCE if ahead <= _READ_ROWS else 0 :]:
                del wanted[number]
        return wanted

    def _hand_out(self, rows: Collection[Record], wanted: dict[int, int], limits: dict[int, int], now: float) -> None:
        ends = wanted.copy()
        bounded_by_bytes, self._large = self._large, False
        for number in wanted:
            self._behind.pop(number, None)
        for number, group in groupby(rows, itemgetter(0)):
            own = list(group)
            more = len(own) == limits[number] or bounded_by_bytes
            payloads = [row[9] for row in own]
            if None in payloads:
                more = self._large = True
                own = own[: payloads.index(None)]
            if more:
                del ends[number]
                self._behind[number] = None
            else:
                ends[number] = own[-1][1]
            if own:
                self._drawn.read(number, [row[1] for row in own], now)
                shard = self._held.get(number)
                if shard is not None:
                    shard.accept(wanted[number], own, own[-1][1])
        self._ends = ends
