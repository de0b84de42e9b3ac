"""The sweep: what Kafka should have brought is held against the outbox, so that a record that was lost is found.

Each turn reads, shard by shard, the rows above the last one that was read; nothing is passed over, since a shard's ids
are committed in their order. What was read is judged after a grace, when a healthy Kafka has brought it: then nothing
is found. While Kafka is away there is no grace, and the sweep carries delivery: sessions are told of heads and read
from Postgres, receipts are told as they are in the outbox. When Kafka is back, what was told is not told again.

Its turns also look for what else only Postgres tells for sure: another store, newer sessions of local devices, revoked
tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from services.gateway.devices import Devices
from services.gateway.judge import Judge
from services.gateway.revocations import newest_revocations
from services.gateway.sweep_rules import SHARDS, Turn, folded
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import to_array, unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.gateway.judge import Fanout
    from services.gateway.revocations import Revocation
    from services.gateway.sweep_rules import Row
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_ENDS, _SWEEP, _CONTENTS = _SQL["ends"], _SQL["sweep"], _SQL["contents"]

_LOOP = LOOP_ERRORS.labels("sweep")
_STATEMENT_S = 8.0
_LEAST_PAUSE_S = 0.05
_MOST_LAG_S = 15.0
_SUSPECT_S = 10.0
"""For so long after something was found the sweep is quicker: Kafka may be away, and nobody have noticed it yet."""

_MOST_KEPT = 200_000
"""Rows that may wait for their judgement; more are not read before."""

_LOOK_BACK_S = 120.0
"""Revocations of so long before the last look are read again: some transaction may have committed late. So they also
reach a session that was just being opened."""


class Sweep:
    """``started`` is set once it knows where to begin: what is committed later is not missed.

    ``kafka_away``: whether Kafka brings nothing now. ``every_s``, ``away_s``: seconds between turns, while it is there
    and while it is away. ``grace_s``: how long after it was read a row is held against what Kafka brought; ``lag_s``:
    how old the records are that Kafka brings now, in seconds, since what is on its way is not lost. ``most``: rows of a
    shard that one turn reads; if there are more, the next turn comes at once.

    ``store_changed()``: seqs may belong to other events than before. ``replaced(user_id, device_id, number)``: the
    device has a session with that number, above that of one here. ``revoked(rows)``: the revocations of the last
    minutes, again and again. ``found(conversation_id, first, last)``: Kafka did not bring these events. None of them
    may block.
    """

    def __init__(
        self,
        pool: Pool,
        fanout: Fanout,
        *,
        kafka_away: Callable[[], bool],
        store_changed: Callable[[], None],
        replaced: Callable[[str, str, int], None],
        revoked: Callable[[Sequence[Revocation]], None],
        found: Callable[[str, int, int], None] = lambda *_: None,
        every_s: float = 5.0,
        away_s: float = 1.0,
        grace_s: float = 2.0,
        lag_s: Callable[[], float] = lambda: 0.0,
        most: int = 100,
    ) -> None:
        self._pool = pool
        self._judge = Judge(fanout, self._contents, found)
        self._devices = Devices(pool, fanout, replaced)
        self._kafka_away = kafka_away
        self._store_changed = store_changed
        self._revoked = revoked
        self._every_s = every_s
        self._away_s = min(away_s, every_s)
        self._grace_s = grace_s
        self._lag_s = lag_s
        self._most = most
        self._ends: dict[int, int] = {}
        self._incarnation: str | None = None
        self._kept: deque[Turn] = deque()
        self._rows_kept = 0
        self._looked_at = self._look_at = time.monotonic()
        self._suspect_until = float("-inf")
        self.started = asyncio.Event()
        self.saw_change = self._judge.changes.saw
        """``(conversation_id, seq)``: Kafka brought a `member` or `conversation` event."""
        self.saw_receipt = self._judge.receipts.saw
        """``(shard, outbox_id)``: Kafka brought a receipt, of whatever conversation."""
        self.told_receipt = self._judge.receipts.told
        """``(shard, outbox_id)``: whether the sweep told of it, so that its record must not be told; asked once."""

    async def run(self) -> None:
        """Sweep until cancelled. While Postgres is away, it is tried again and again, and goes on where it was."""
        backoff = Backoff(0.1, 5.0)
        due = 0.0
        while True:
            try:
                if not self._ends:
                    await self._begin()
                more = False
                if self._kafka_away() or self._suspects() or time.monotonic() >= due:
                    due = time.monotonic() + self._every_s
                    more = await self._turn()
                    if more:
                        due = 0.0
                    elif time.monotonic() >= self._look_at:
                        await self._look()
                await self._judge_ripe()
                backoff.reset()
                await asyncio.sleep(0 if more else self._pause())
            except UnavailableError as error:
                due = 0.0
                _LOOP.inc()
                logger(__name__).warning("not swept: Postgres is away", error=error.message)
                await asyncio.sleep(_LEAST_PAUSE_S + backoff.next())

    def _pause(self) -> float:
        """Until something may be ripe, or Kafka found to be away."""
        return min(self._away_s, max(_LEAST_PAUSE_S, self._grace_s / 4)) if self._kept else self._away_s

    async def _begin(self) -> None:
        rows = await self._fetch(_ENDS, to_array(range(SHARDS)))
        self._incarnation = rows[0]["incarnation"]
        if self._incarnation is None:
            raise UnavailableError("the store is a standby")
        self._ends = {row["shard"]: row["id"] for row in rows}
        self.started.set()

    async def _turn(self) -> bool:
        """Read once; whether there is more to read at once."""
        if self._rows_kept >= _MOST_KEPT:
            return False
        rows = await self._fetch(
            _SWEEP, to_array(self._ends), to_array(self._ends.values()), min(self._ends.values()), self._most
        )
        turn = folded(rows, time.monotonic(), self._most)
        if turn.incarnation is None:
            raise UnavailableError("the store is a standby")
        if turn.incarnation != self._incarnation:
            logger(__name__).warning("the store is another one, or an earlier state of it: what was read is dropped")
            self._ends.clear()
            self._kept.clear()
            self._rows_kept = 0
            self._judge.clear()
            self._store_changed()
            return True
        self._ends.update(turn.ends)
        if turn.rows:
            self._rows_kept += turn.rows
            self._kept.append(turn)
        return turn.more

    def _suspects(self) -> bool:
        return time.monotonic() < self._suspect_until

    async def _judge_ripe(self) -> None:
        while self._kept and (self._kafka_away() or time.monotonic() >= self._kept[0].at + self._grace()):
            # It is taken away when it is done: if Postgres goes away in between, the rest is judged later.
            if await self._judge.judge(self._kept[0]):
                self._suspect_until = time.monotonic() + _SUSPECT_S
            self._rows_kept -= self._kept.popleft().rows

    def _grace(self) -> float:
        # Never none at all: what is just on its way would be found, and keep the suspicion awake.
        return self._grace_s / (2 if self._suspects() else 1) + min(self._lag_s(), _MOST_LAG_S)

    async def _look(self) -> None:
        now = time.monotonic()
        rows = await newest_revocations(self._pool, now - self._looked_at + _LOOK_BACK_S)
        self._looked_at = now
        if rows:
            self._revoked(rows)
        await self._devices.look(self._every_s)
        self._look_at = now + self._every_s

    async def _contents(self, rows: Sequence[Row]) -> list[Record]:
        return await self._fetch(_CONTENTS, to_array(row.shard for row in rows), to_array(row.id for row in rows))

    async def _fetch(self, statement: str, *arguments: object) -> list[Record]:
        with unavailable_if_away():
            async with asyncio.timeout(_STATEMENT_S):
                return await self._pool.fetch(statement, *arguments)
