"""Times as they are written, waiting and chance in one place."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime


def wire_time(at: datetime) -> str:
    """A time in UTC as the protocol writes it: RFC 3339 with microseconds."""
    return at.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


class Backoff:
    """Delays in seconds with full jitter: a random time between 0 and ``min(cap, base · 2ⁿ)``."""

    def __init__(self, base_s: float = 0.05, cap_s: float = 5.0, chance: random.Random | None = None) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._chance = chance or random.Random()
        self._tries = 0

    def next(self) -> float:
        """The next delay; each call may wait twice as long as the one before."""
        limit = min(self._cap_s, self._base_s * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return self._chance.uniform(0, limit)

    def reset(self) -> None:
        """Begin again: the last try succeeded."""
        self._tries = 0
