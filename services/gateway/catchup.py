"""Reads from Postgres for sessions that are behind, a bounded number at a time, in the order that `turns` says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.gateway.events import entry
from services.gateway.metrics import CATCH_UP_READS, CATCH_UP_WAITING
from services.gateway.turns import Own, Turns
from services.gateway.wire import ready
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import from_multirange, unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.gateway.fanout import Fanout
    from services.gateway.follower import Follower
    from services.gateway.turns import Need
    from shared.postgres import Pool

_SQL = statements(__file__)
_OF = _SQL["events_of"]
_AFTER = _SQL["events_after"]
_AT = _SQL["events_at"]
_LOOP = LOOP_ERRORS.labels("catch-up")
_PAGE_BYTES = 512 * 1024
_READ_S = 10.0
_AT_AGAIN = 2
"""Most reads at a time of what was not acknowledged, of all sessions."""

_AGAIN_S = 0.1
_PORTION = 128
"""Feeds that a page is handed to between two turns of the event loop."""


class CatchUp:
    """``at_once``: most reads at a time; ``page``: most events of one."""

    def __init__(self, pool: Pool, fanout: Fanout, *, at_once: int, page: int) -> None:
        self._pool = pool
        self._at_once = at_once
        self._page = page
        self._turns = Turns(fanout, page=page)
        self._turns.later = self._later
        self._some = asyncio.Semaphore(0)
        self._again = asyncio.Semaphore(_AT_AGAIN)
        self._turns.queued = self._some.release

    def wake(self, follower: Follower) -> None:
        """Serve a session whose feeds are behind, as far as its window allows."""
        self._turns.wake(follower)

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._at_once):
                workers.create_task(self._work())

    def _later(self, wake: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(_AGAIN_S, wake)

    async def _work(self) -> None:
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._some.acquire()
            CATCH_UP_WAITING.set(len(self._turns))
            need = self._turns.next()
            if need is None:
                continue
            try:
                CATCH_UP_READS.inc()
                await (self._shared(need) if need.key.user_id is None else self._own(need, need.key.user_id))
                backoff.reset()
            except UnavailableError:
                _LOOP.inc()
                self._turns.failed(need)
                await asyncio.sleep(backoff.next())
            except Exception:  # noqa: BLE001 - a fault in one conversation stops no other one; its sessions try again
                _LOOP.inc()
                logger(__name__).exception("a conversation could not be read")
                self._turns.broken(need)
                await asyncio.sleep(backoff.next())

    async def _shared(self, need: Need) -> None:
        room, position = need.key.room, need.key.position
        with unavailable_if_away():
            rows = await self._pool.fetch(_OF, room.conversation_id, position, self._page, _PAGE_BYTES, timeout=_READ_S)
        if not rows:
            self._turns.gone(need)
            return
        entries = [entry(row["seq"], row["type"], row["frame"]) for row in rows if row["seq"] is not None]
        run = self._turns.shared(need, rows[0]["last_seq"], entries)
        while self._turns.hand_out(need, run, _PORTION):  # noqa: ASYNC110 - it does a part at each turn
            await asyncio.sleep(0)

    async def _own(self, need: Need, user_id: str) -> None:
        room, position = need.key.room, need.key.position
        with unavailable_if_away():
            rows = await self._pool.fetch(
                _AFTER, room.conversation_id, user_id, position, self._page, _PAGE_BYTES, timeout=_READ_S
            )
        if not rows:
            self._turns.gone(need)
            return
        events = [(row["seq"], ready(row["frame"])) for row in rows if row["seq"] is not None]
        visible = from_multirange(rows[0]["visible"])
        self._turns.own(need, Own(rows[0]["last_seq"], rows[0]["role"], visible, events))

    async def at(self, user_id: str, wanted: Sequence[tuple[str, Sequence[int]]]) -> dict[str, list[tuple[int, bytes]]]:
        """Events by (conversation, seqs): (seq, ready frame) of each conversation, ascending, without the hidden ones.

        Raises `UnavailableError`, also if it does not get its turn in time.
        """
        ids = [conversation_id for conversation_id, seqs in wanted for _ in seqs]
        numbers = [seq for _, seqs in wanted for seq in seqs]
        found: dict[str, list[tuple[int, bytes]]] = {conversation_id: [] for conversation_id, _ in wanted}
        with unavailable_if_away():
            async with asyncio.timeout(_READ_S), self._again:
                CATCH_UP_READS.inc()
                rows = await self._pool.fetch(_AT, user_id, ids, numbers, timeout=_READ_S)
        for row in rows:
            found[row["conversation_id"]].append((row["seq"], ready(row["frame"])))
        return found
