"""A gateway that ends sends its sessions elsewhere, a few at a time: all at once would be a mass reconnect."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from services.gateway.close import Close
from services.gateway.metrics import DRAINED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator

    from services.gateway.connection import Connection

_STEP_S = 0.05
_MOST_AFTER_MS = 1_000
"""A client comes back within so long after its session ended, at a time of its own."""


def portions(count: int, spread_s: float) -> Iterator[int]:
    """How many sessions to end in each step of 50 ms, so that ``count`` have ended after ``spread_s``. Pure."""
    steps = max(1, int(spread_s / _STEP_S))
    done = 0
    for step in range(1, steps + 1):
        until = -(-count * step // steps)
        yield until - done
        done = until


async def drain(sessions: Collection[Connection], spread_s: float, *, reason: str = "the server drains") -> None:
    """Tell each session to come back, and end it; evenly over ``spread_s``, in no order. Ends when none is left."""
    left = list(sessions)
    random.shuffle(left)
    for portion in portions(len(left), spread_s):
        for connection in left[-portion:] if portion else ():
            _send_away(connection, reason)
        del left[len(left) - portion :]
        if not sessions:
            return
        await asyncio.sleep(_STEP_S)
    for connection in list(sessions):  # those that were still being accepted when the port was closed
        _send_away(connection, reason)


class Renewal:
    """Has sessions begin anew, because the store became another one; those that begin meanwhile know it already."""

    def __init__(self, spread_s: float, spawn: Callable[[Coroutine[None, None, None]], object]) -> None:
        self._spread_s = spread_s
        self._spawn = spawn
        self._stale: set[Connection] = set()
        self._under_way = False

    def begin(self, sessions: Iterable[Connection]) -> bool:
        """These have to; whether it is the first word of it."""
        self._stale.update(sessions)
        if self._under_way:
            return False
        self._under_way = True
        self._spawn(self._run())
        return True

    async def _run(self) -> None:
        try:
            while self._stale:
                stale, self._stale = self._stale, set()
                await drain(stale, self._spread_s, reason="the store was replaced")
        finally:
            self._under_way = False


def _send_away(connection: Connection, reason: str) -> None:
    if connection.ended:
        return
    DRAINED.inc()
    after_ms = random.randint(0, _MOST_AFTER_MS)
    connection.say({"t": "reconnect", "after_ms": after_ms, "reason": reason})
    connection.end(Close(4503, reason))
