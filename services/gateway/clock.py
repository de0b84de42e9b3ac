"""When each session has to be looked at again: one heap for all of them, one task."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from typing import TYPE_CHECKING, Protocol

from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOP = LOOP_ERRORS.labels("clock")
_TICK_S = 0.02
_TURN_S = 0.005


class Timed(Protocol):
    """Something with a next time. ``scheduled`` is the clock's: when it will look, `inf` for never."""

    scheduled: float

    def tick(self, now: float) -> float:
        """Do what is due; returns when to look again, `inf` for never. Does not block."""


class Heap:
    """Who is due when. An earlier time replaces a later one. Pure."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._number = count()

    def at(self, timed: Timed, due: float) -> bool:
        """Look at it at ``due`` or before; whether that is earlier than all others."""
        if due >= timed.scheduled:
            return False
        timed.scheduled = due
        heapq.heappush(self._heap, (due, next(self._number), timed))
        return self._heap[0][2] is timed

    def due(self, now: float) -> Timed | None:
        """Take one that is due; its ``scheduled`` is `inf` then."""
        while self._heap and self._heap[0][0] <= now:
            due, _, timed = heapq.heappop(self._heap)
            if timed.scheduled == due:
                timed.scheduled = float("inf")
                return timed
        return None

    @property
    def next(self) -> float:
        """When the first is due; `inf` if nobody is."""
        return self._heap[0][0] if self._heap else float("inf")


class Clock:
    """Ticks every session when it is due, and does the house's chores."""

    def __init__(self, chores: Callable[[float], None], *, every_s: float) -> None:
        self._heap = Heap()
        self._earlier = asyncio.Event()
        self._chores = chores
        self._every_s = every_s

    def at(self, timed: Timed, due: float) -> None:
        """Look at it at ``due`` (`time.monotonic`) or before."""
        if self._heap.at(timed, due):
            self._earlier.set()

    async def run(self) -> None:
        """Tick until cancelled."""
        chores_due = time.monotonic()
        while True:
            now = time.monotonic()
            until = now + _TURN_S
            while now < until and (timed := self._heap.due(now)) is not None:
                self._tick(timed, now)
                now = time.monotonic()
            if now >= chores_due:
                self._do_chores(now)
                chores_due = now + self._every_s
            self._earlier.clear()
            wait = max(_TICK_S, min(self._heap.next, chores_due) - now)
            if self._heap.next <= now:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(wait):
                    await self._earlier.wait()
                await asyncio.sleep(_TICK_S)
            except TimeoutError:
                continue

    def _do_chores(self, now: float) -> None:
        try:
            self._chores(now)
        except Exception:  # noqa: BLE001 - sessions' clocks go on
            _LOOP.inc()
            logger(__name__).exception("chores failed")

    def _tick(self, timed: Timed, now: float) -> None:
        try:
            due = timed.tick(now)
        except Exception:  # noqa: BLE001 - one session's fault stops no other's clock
            _LOOP.inc()
            logger(__name__).exception("a session's clock failed")
            due = now + 1.0
        self._heap.at(timed, due)
