"""When sends may leave, on a server that limits them. Pure."""

from __future__ import annotations

MAX_IN_FLIGHT = 256
"""Requests without an answer: what a server that says no has to say at most at once."""
UNKNOWN_GAP_S = 0.02
"""Between sends after a refusal of a server that names no rate."""
SLOWEST = 32.0
FASTER = 0.97


class Pace:
    """Free until a send is refused as ``rate_limited``; then, until nothing waits any more, at the rate of ``limits``.

    A server allows a burst, and does not say how large a one, so only a refusal tells that it is used up. Each further
    refusal halves the rate, and each send that leaves brings it back a little: the user's other devices share it.
    """

    def __init__(self) -> None:
        self._gap_s = UNKNOWN_GAP_S
        self._slower = 1.0
        self._paced = False
        self._next_at = 0.0

    def rate_is(self, sends_per_s: object) -> None:
        """A connection begins; ``sends_per_s`` as `welcome` has it. A refusal of an earlier one is history."""
        self._gap_s = UNKNOWN_GAP_S
        if isinstance(sends_per_s, int | float) and sends_per_s > 0:
            self._gap_s = 1.0 / sends_per_s
        self._paced, self._next_at, self._slower = False, 0.0, 1.0

    def refused(self, now: float, wait_s: float) -> None:
        """The server said to wait."""
        # What was refused before the wait was over had left before it began.
        if self._paced and now >= self._next_at - self._gap_s * self._slower:
            self._slower = min(SLOWEST, 2 * self._slower)
        self._paced = True
        self._next_at = max(self._next_at, now + wait_s)

    def left(self, now: float) -> None:
        """A send leaves."""
        if self._paced:
            self._next_at = max(self._next_at, now) + self._gap_s * self._slower
            self._slower = max(1.0, FASTER * self._slower)

    def drained(self) -> None:
        """Nothing waits any more."""
        self._paced = False

    def next_at(self) -> float:
        """Return when the next send may leave; it may be past."""
        return self._next_at
