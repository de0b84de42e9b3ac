"""Which local devices have a newer session elsewhere: Redis tells at once, Postgres tells for sure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from services.gateway.metrics import SWEEP_FINDS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.judge import Fanout
    from shared.postgres import Pool

_NUMBERS = statements(__file__)["numbers"]

_AT_ONCE = 2_000
_ALL_S = 30.0
"""So long it takes until every local session was looked at."""


class Devices:
    """``replaced(user_id, device_id, number)``: the device has that number now, above that of a session here."""

    def __init__(self, pool: Pool, fanout: Fanout, replaced: Callable[[str, str, int], None]) -> None:
        self._pool = pool
        self._fanout = fanout
        self._replaced = replaced
        self._left: list[str] = []

    async def look(self, every_s: float) -> None:
        """Look at a share of the local sessions, when called every so many seconds. Raises `UnavailableError`."""
        users = self._fanout.users
        if not self._left:
            self._left = list(users)
        share = math.ceil(len(users) * every_s / _ALL_S)
        some, self._left = self._left[:share], self._left[share:]
        numbers: dict[tuple[str, str], int] = {}
        for user_id in some:
            for follower in users.get(user_id, ()):
                if follower.number:
                    device = user_id, follower.device_id
                    numbers[device] = min(follower.number, numbers.get(device, follower.number))
        devices = list(numbers)
        for start in range(0, len(devices), _AT_ONCE):
            user_ids, device_ids = zip(*devices[start : start + _AT_ONCE], strict=True)
            with unavailable_if_away():
                rows = await self._pool.fetch(_NUMBERS, user_ids, device_ids)
            for row in rows:
                if row["number"] > numbers[row["user_id"], row["device_id"]]:
                    SWEEP_FINDS.labels("session").inc()
                    self._replaced(row["user_id"], row["device_id"], row["number"])
