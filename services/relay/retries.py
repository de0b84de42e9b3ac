"""When a refused row is tried again, and when it is given up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random

_JITTER = 0.2


class Verdict(NamedTuple):
    """What a failed attempt makes of its row: `failed`, to be tried again in ``wait_ms``, or `dead`."""

    outcome: str
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Retries:
    """``max_attempts`` counts all tries, the first too; delays grow by ``factor`` from ``delay_ms`` to ``cap_ms``."""

    max_attempts: int
    delay_ms: int
    factor: float
    cap_ms: int

    def after(self, attempts: int, chance: random.Random) -> Verdict:
        """The verdict after so many failed attempts. The wait differs by up to a fifth, so that queues part."""
        if attempts >= self.max_attempts:
            return Verdict("dead", 0)
        # The exponent is bounded: a float would overflow where the cap has long been reached.
        grown = min(float(self.cap_ms), self.delay_ms * self.factor ** min(attempts - 1, 64))
        return Verdict("failed", min(self.cap_ms, round(grown * chance.uniform(1 - _JITTER, 1 + _JITTER))))
