"""Reads of Postgres that clients' frames ask for: a share of the pool is theirs, and they wait for their turn."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shared.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_TURN_S = 10.0
"""How long a frame waits for those that read before it."""

_RETRY_MS = 1000


@asynccontextmanager
async def a_turn(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    """Read in it. Raises `UnavailableError` if too many others do, and go on doing so."""
    try:
        async with asyncio.timeout(_TURN_S):
            await turns.acquire()
    except TimeoutError:
        raise UnavailableError("too many requests wait", retry_after_ms=_RETRY_MS) from None
    try:
        yield
    finally:
        turns.release()
