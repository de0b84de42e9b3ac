"""A group's receipts on their way to those who watch it, folded: the newest of each member, in steps. Pure.

A step takes members out of those that wait, in the order of their first change that nobody was told of, and appends
their newest frames to a log, numbered; a member stands in it once. A watcher is nothing but a number: all up to it was
told. So a receipt costs one entry, however many watch; who takes nothing for a while costs nothing and goes on at its
number, with what is the newest by then; and all that is kept is bounded by the number of members.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST = 500
"""Members in a step, and that a watcher is told of at a time."""

_number = itemgetter(0)


class Part:
    """What follows a number: ready frames as one buffer, built once for all who stand there. ``last``: its end."""

    __slots__ = ("_buffer", "_frames", "_users", "last")

    def __init__(self, users: list[str], frames: list[bytes], last: int) -> None:
        self.last = last
        self._users = {user_id: at for at, user_id in enumerate(users)}
        self._frames = frames
        self._buffer = b"".join(frames)

    def buffer(self, user_id: str) -> bytes:
        """For a session of this user, who hears of its own marks elsewhere."""
        at = self._users.get(user_id)
        return self._buffer if at is None else b"".join(self._frames[:at] + self._frames[at + 1 :])

    def count(self, user_id: str) -> int:
        """Of how many members `buffer` tells."""
        return len(self._frames) - (user_id in self._users)


class Fold:
    """``number``: of the last entry of the log."""

    __slots__ = ("_log", "_most", "_numbers", "_parts", "_waiting", "number")

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.number = 0
        self._waiting: dict[str, bytes] = {}
        self._log: list[tuple[int, str, bytes]] = []
        self._numbers: dict[str, int] = {}
        self._parts: dict[int, Part | None] = {}

    @property
    def waits(self) -> bool:
        """Whether some member's marks are in no step yet."""
        return bool(self._waiting)

    def put(self, user_id: str, frame: bytes) -> None:
        """A member's marks; they take the place of older ones that still wait, and their turn."""
        self._waiting[user_id] = frame

    def step(self) -> None:
        """Append those who have waited for longest to the log."""
        for user_id in list(islice(self._waiting, self._most)):
            self.number += 1
            self._numbers[user_id] = self.number
            self._log.append((self.number, user_id, self._waiting.pop(user_id)))
        self._parts.clear()
        if len(self._log) > 2 * len(self._numbers) + self._most:
            self._log = [entry for entry in self._log if self._numbers[entry[1]] == entry[0]]

    def part(self, number: int) -> Part | None:
        """What follows a number, the longest untold first; None if there is nothing."""
        if number not in self._parts:
            self._parts[number] = self._part(number)
        return self._parts[number]

    def _part(self, number: int) -> Part | None:
        users: list[str] = []
        frames: list[bytes] = []
        last = number
        for at in range(bisect_right(self._log, number, key=_number), len(self._log)):
            last, user_id, frame = self._log[at]
            if self._numbers[user_id] == last:
                users.append(user_id)
                frames.append(frame)
                if len(users) == self._most:
                    break
        return Part(users, frames, last) if users else None

    def told(self, numbers: Iterable[int]) -> None:
        """Forget what all watchers, who stand at these numbers, were told."""
        lowest = min(numbers, default=self.number)
        gone = bisect_right(self._log, lowest, key=_number)
        for number, user_id, _ in self._log[:gone]:
            if self._numbers[user_id] == number:
                del self._numbers[user_id]
        del self._log[:gone]
        self._parts.clear()
