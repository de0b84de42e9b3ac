"""Waiting for what another process or task will do: always with a deadline, and the only place where a test sleeps."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02


async def until(condition: Callable[[], T | Awaitable[T]], *, timeout: float, what: str) -> T:
    """The condition's first true result, asked every `POLL_SECONDS`.

    `timeout` is in seconds and bounds a single hanging call, too. Raises `TimeoutError` that names `what` and holds the
    last result; what the condition itself raises ends the wait.
    """
    last: object = "none"
    try:
        async with asyncio.timeout(timeout):
            while True:
                result = condition()
                if inspect.isawaitable(result):
                    result = await result
                if result:
                    return result
                last = result
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {timeout:g} s (last result: {last!r})") from None


async def lasting(seconds: float) -> None:
    """Let something go on for so long: for load and outages whose length is what a test is about."""
    await asyncio.sleep(seconds)
