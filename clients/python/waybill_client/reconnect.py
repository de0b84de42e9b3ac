"""When to come back, and when not to. Pure: chance is handed in.

Close codes and waits are those of the protocol's table. 1009 and 1011 fall under "reconnect": what was too large is
refused on this side once the limit is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import BadHello, Closed, NotAllowed, Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

CAP_S = 30.0
BASE_S = 0.5
STABLE_S = 5.0
"""A session that lived this long starts the waits from the beginning; without it a server that welcomes and fails at
once would be asked twice a second for ever."""
SLOWER_S = 5.0
"""Added after 4429, so that chance cannot make the wait short."""

RETRY_AFTER_CAP_S = 300.0

_FATAL: dict[int, type[Closed]] = {4400: BadHello, 4403: NotAllowed, 4409: Replaced}
TOKEN = 4401
RATE = 4429


def fatal(code: int | None, reason: str) -> Closed | None:
    """Return the error to stop with, or None where one should come back."""
    kind = _FATAL.get(code) if code is not None else None
    return kind(reason) if kind else None


def retry_after_s(header: str | None) -> float:
    """Return the seconds that a refused upgrade asks to wait at least; 0 where it does not say, or says no number."""
    if header is None or not (header.isascii() and header.isdigit()):
        return 0.0
    return min(RETRY_AFTER_CAP_S, float(header))


class Backoff:
    """Full jitter: uniform between 0 and min(30 s, 0.5 s · 2ⁿ). ``random`` returns numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._failures = 0

    def wait_s(self, *, lived_s: float, code: int | None, after_s: float | None) -> float:
        """Return the seconds to wait after a session of ``lived_s`` seconds (0 = never welcomed) has ended.

        ``after_s`` is what the server asked for in ``reconnect``; it spreads its clients itself, so it is obeyed
        exactly.
        """
        if lived_s >= STABLE_S:
            self._failures = 0
        ceiling = min(CAP_S, BASE_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        if after_s is not None:
            return after_s
        wait = self._random() * ceiling
        return wait + SLOWER_S if code == RATE else wait
