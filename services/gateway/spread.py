"""Users' rates over all gateways: what each user did here is told to Redis, which says who did too much in all.

No send waits for it. Who is over its rate is limited here until the time that Redis names, so between two reports a
user may do a little more. Without Redis the limits of each gateway hold alone.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from services.gateway.limits import KINDS
from services.gateway.link import AwayError
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.gateway.limits import Limits, Usage
    from services.gateway.link import Link

_LOOP = LOOP_ERRORS.labels("rates")
_USERS = 200
"""Most users in one call of Redis."""

_OVER = msgspec.json.Decoder(list[tuple[int, int, int]])


class Spread:
    """Keeps `PREFIX:rate:USER`, a hash of buckets that ends by itself. ``every_s``: how often it is told."""

    def __init__(self, link: Link, limits: Limits, *, prefix: str, every_s: float = 0.1) -> None:
        self._link = link
        self._limits = limits
        self._prefix = prefix
        self._every_s = every_s
        self._script = link.script(__file__)
        self._kinds = [place for place, rate in enumerate(limits.per_user) if rate.limits and place in limits.shared]
        self._arguments: list[str | int | float] = [len(self._kinds)]
        for place in self._kinds:
            rate = limits.per_user[place]
            self._arguments += (KINDS[place], rate.per_s, max(1.0, rate.burst))

    async def run(self) -> None:
        """Tell until cancelled. What was used while Redis is away is told to nobody."""
        while True:
            await asyncio.sleep(self._every_s)
            self._limits.tidy(time.monotonic())
            while usage := self._limits.usage(_USERS):
                if not self._link.available:
                    continue
                try:
                    await self._tell(usage)
                except (AwayError, msgspec.MsgspecError):
                    _LOOP.inc()

    async def _tell(self, usage: Sequence[Usage]) -> None:
        arguments = list(self._arguments)
        for one in usage:
            arguments += [one.counts[place] for place in self._kinds]
        keys = [f"{self._prefix}:rate:{one.user_id}" for one in usage]
        answer = await self._link.call(self._script, keys, arguments)
        if answer:
            now = time.monotonic()
            for user, kind, wait_ms in _OVER.decode(answer):
                self._limits.limit(usage[user - 1].user_id, self._kinds[kind - 1], now + wait_ms / 1000)
