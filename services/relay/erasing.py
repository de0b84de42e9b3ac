"""Bodies erased by age, and the old versions of erased rows taken out of the tables.

The database decides and does it (migration `timeline`); this loop asks, in short steps, and counts. It runs here since
the relay is who sees to everything that passes with time, and since its role needs nothing for it but to call functions
that do this and nothing else: it still reads no event. Of several relays one does a step at a time.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

from services.relay.metrics import BODIES_EXPIRED, RETENTION_PUT_OFF, UNVACUUMED
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_SQL = statements(__file__)
_EXPIRE, _GAUGES = _SQL["expire"], _SQL["gauges"]
_TO_VACUUM, _VACUUM, _VACUUMED = _SQL["to_vacuum"], _SQL["vacuum"], _SQL["vacuumed"]

_CONVERSATIONS, _EVENTS = 1_000, 500
"""Of one step: about 50 ms."""

_STEP_S = 7.0
_VACUUM_S = 6.0
"""Below the role's own limit, so that the server is asked to stop and the connection lives."""

_LOOK_EVERY_S = 60.0
_STRETCH_S = 60.0
"""Then the vacuum gets its turn, too: a first round through a large store takes days."""

_PAUSE_S = 3_600.0
"""From the beginning of one round through all conversations to that of the next."""

_SHARE = 4
"""So many vacuums fit into the time by which all is gone."""

_log = logger(__name__)


class Erasing:
    """Looks once a minute. ``erase_within_s``: by when old versions of erased rows are gone."""

    def __init__(
        self,
        pool: Pool,
        erase_within_s: float,
        *,
        look_every_s: float = _LOOK_EVERY_S,
        pause_s: float = _PAUSE_S,
        stretch_s: float = _STRETCH_S,
    ) -> None:
        self._pool = pool
        self._vacuum_after_s = erase_within_s / _SHARE
        self._look_every_s = look_every_s
        self._pause_s = pause_s
        self._stretch_s = stretch_s
        self._is_more = False

    async def run(self) -> NoReturn:
        """Look until cancelled; with backoff while Postgres is away or somebody holds a lock."""
        backoff = Backoff(base_s=1.0, cap_s=self._look_every_s)
        while True:
            try:
                await self.expire()
                await self.vacuum()
            except RETRIABLE as error:
                LOOP_ERRORS.labels("erasing").inc()
                _log.warning("erasing put off", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            if not self._is_more:
                await asyncio.sleep(self._look_every_s)

    async def expire(self) -> int:
        """Erase what is due, for a minute or so; how many bodies. Rests as long as each step took.

        Raises what asyncpg raises.
        """
        bodies = 0
        self._is_more = False
        until = monotonic() + self._stretch_s
        while True:
            begun = monotonic()
            async with asyncio.timeout(_STEP_S):
                row = await self._pool.fetchrow(_EXPIRE, _CONVERSATIONS, _EVENTS, self._pause_s)
            if row is None:  # another relay is at it
                return bodies
            if row["bodies"]:
                bodies += row["bodies"]
                BODIES_EXPIRED.inc(row["bodies"])
                _log.info("bodies erased by age", bodies=row["bodies"])
            if not row["is_more"]:
                return bodies
            await asyncio.sleep(monotonic() - begun)
            if monotonic() >= until:
                self._is_more = True
                return bodies

    async def vacuum(self) -> bool:
        """Vacuum if an erasure waits for it; whether one was done. Cut short, it goes on at the next look."""
        async with asyncio.timeout(_STEP_S):
            due = await self._pool.fetchrow(_TO_VACUUM, self._vacuum_after_s)
        done = False
        if due is not None and due["upto"] is not None:
            try:
                await self._pool.execute(_VACUUM, timeout=_VACUUM_S)
            except TimeoutError:
                RETENTION_PUT_OFF.labels("vacuum").inc()
            else:
                async with asyncio.timeout(_STEP_S):
                    done = bool(await self._pool.fetchval(_VACUUMED, due["upto"], due["began"]))
        async with asyncio.timeout(_STEP_S):
            UNVACUUMED.set(await self._pool.fetchval(_GAUGES) or 0.0)
        return done
