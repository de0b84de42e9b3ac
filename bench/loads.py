"""Load: a closed loop that finds the highest rate, and an open loop that keeps a given one."""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import TYPE_CHECKING

from bench.figures import Turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def closed_loop(
    call: Callable[[], Awaitable[int]],
    *,
    callers: int,
    warm_s: float,
    measure_s: float,
    end: Callable[[], Awaitable[None]],
) -> Turn:
    """``callers`` call one after the other without a pause; measured are ``measure_s`` seconds after the warm-up.

    The warm-up lasts ``warm_s`` seconds, and until each caller has ended its first call. ``call`` returns how many
    sends it got done. What ends in the measured time counts, wherever it began. ``end`` is called when that time is
    over, while the last calls are still under way. Raises what a call raises.
    """
    begin = finish = inf
    cold = callers
    warm = asyncio.Event()
    done = 0
    latencies: list[float] = []

    async def caller() -> None:
        nonlocal done, cold
        first = True
        while (before := time.perf_counter()) < finish:
            count = await call()
            after = time.perf_counter()
            if begin <= after < finish:
                done += count
                latencies.append(after - before)
            if first:
                first = False
                cold -= 1
                if cold == 0:
                    warm.set()

    async def watch() -> None:
        nonlocal begin, finish
        await asyncio.sleep(warm_s)
        await warm.wait()
        begin = time.perf_counter()
        finish = begin + measure_s
        await asyncio.sleep(measure_s)
        await end()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        for _ in range(callers):
            tasks.create_task(caller())
    return Turn(latencies, done / measure_s)


async def open_loop(
    call: Callable[[int, bool], Awaitable[None]], *, rate_s: float, warm_s: float, measure_s: float, most: int = 2_000
) -> float:
    """Start calls at an even rate, whether earlier ones have ended or not; returns once all have.

    ``call`` gets the call's number and whether it counts (it begins in the measured time). Returns the 99th percentile
    of how late calls were started, in seconds. Raises `RuntimeError` if more than ``most`` are under way.
    """
    count, warm = round((warm_s + measure_s) * rate_s), round(warm_s * rate_s)
    begin = time.perf_counter()
    late: list[float] = []
    under_way = asyncio.Semaphore(most)

    async def one(number: int) -> None:
        try:
            await call(number, number >= warm)
        finally:
            under_way.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            due = begin + number / rate_s
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            late.append(max(0.0, time.perf_counter() - due))
            if under_way.locked():
                raise RuntimeError(f"{most} calls are under way: the rate is too high for this machine")
            await under_way.acquire()
            tasks.create_task(one(number))
    late.sort()
    return late[int(len(late) * 0.99)] if late else 0.0
