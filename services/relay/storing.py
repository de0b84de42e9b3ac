"""Rare writes of a shard's line: told to Postgres until it has them, or until the shard is no longer ours."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import RETRIABLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from services.relay.held import HeldShard

T = TypeVar("T")

_CALL_S = 15.0

_log = logger(__name__)


class EndedError(Exception):
    """The shard has ended while Postgres was waited for."""


async def stored(shard: HeldShard, call: Callable[[], Awaitable[T]]) -> T:
    """What ``call`` answers, which is made again while Postgres is away. Raises `EndedError`."""
    backoff = Backoff()
    while True:
        try:
            async with asyncio.timeout(_CALL_S):
                return await call()
        except RETRIABLE as error:
            LOOP_ERRORS.labels("parking").inc()
            _log.warning("parking not stored", shard=shard.number, error=repr(error))
        await asyncio.sleep(backoff.next())
        if shard.ended:
            raise EndedError
