"""SIGKILL to a part of the local stack while messages are under way, and how long until they flow again."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.local import endpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from services.console.demo.observer import Observer

AIM_S = 5.0
"""How long to wait for enough to be under way."""
RECOVERY_S = 60.0
_POLL_S = 0.001
_GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class Kill:
    """``in_flight``: messages (for receipts: ticks) under way at that moment. ``recovery_s``: None if never."""

    part: str
    pid: int
    at: float
    in_flight: int
    recovery_s: float | None

    @property
    def window(self) -> tuple[float, float]:
        """From the kill to the recovery."""
        return self.at, self.at + (RECOVERY_S if self.recovery_s is None else self.recovery_s)


@dataclass(frozen=True, slots=True)
class Aim:
    """``in_flight`` counts what is under way, ``enough`` of it is worth a shot."""

    in_flight: Callable[[], int]
    enough: int


async def kill(part: str, file: Path, observer: Observer, aim: Aim, shot: asyncio.Event) -> Kill:
    """Kill a part once enough is under way, set ``shot``, wait until messages sent after that arrive.

    ``file``: the stack's `endpoints.json`; it is read anew, since pids change. Raises `RuntimeError` when the part has
    no living process there.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + AIM_S
    while aim.in_flight() < aim.enough and loop.time() < deadline:  # noqa: ASYNC110 - a count, polled to a millisecond
        await asyncio.sleep(_POLL_S)
    pid, at, under_way = await _shoot(part, file, aim.in_flight)
    shot.set()
    with observer.recovery(at) as recovered:
        try:
            async with asyncio.timeout(RECOVERY_S):
                return Kill(part, pid, at, under_way, await recovered - at)
        except TimeoutError:
            return Kill(part, pid, at, under_way, None)


async def _shoot(part: str, file: Path, in_flight: Callable[[], int]) -> tuple[int, float, int]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GONE_S
    while True:
        pid = endpoints.read(file).pids_of(part)[0]
        under_way, at = in_flight(), loop.time()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            # Between two lives: the file names the next one soon.
            if loop.time() > deadline:
                raise RuntimeError(f"{part} does not run") from None
            await asyncio.sleep(0.1)
        else:
            return pid, at, under_way
