"""Loops that ask Postgres now and then, and go on whatever becomes of one look."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_LOOK_S = 15.0

_log = logger(__name__)


async def keep_looking(loop: str, look: Callable[[], Awaitable[object]], *, every_s: float) -> NoReturn:
    """Call ``look`` every so many seconds until cancelled; with backoff while Postgres is away. ``loop`` names it."""
    backoff = Backoff()
    while True:
        try:
            async with asyncio.timeout(_LOOK_S):
                await look()
        except RETRIABLE as error:
            LOOP_ERRORS.labels(loop).inc()
            _log.warning("Postgres not asked", loop=loop, error=repr(error))
            await asyncio.sleep(backoff.next())
            continue
        backoff.reset()
        await asyncio.sleep(every_s)
