"""Waiting for what sets no event."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.01


async def until(done: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Return once ``done`` says so. Raises `RuntimeError` that there was no ``what``."""
    try:
        async with asyncio.timeout(within_s):
            while not done():  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise RuntimeError(f"{what} did not come within {within_s:g} s") from None
