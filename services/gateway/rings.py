"""What the rings of all conversations may hold together. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.room import Room

_AGED_S = 300.0
_AGED_AT_ONCE = 1_000


class Rings:
    """``ring``, ``ring_bytes``: most events, and about how many bytes, of one ring; ``rings_bytes``: of all of them.

    Over that the ring that has had nothing new for longest is emptied, but never the only one. An event stays for twice
    ``aged_s`` seconds at most: bodies that are erased by age are not told of.
    """

    def __init__(self, *, ring: int, ring_bytes: int, rings_bytes: int, aged_s: float = _AGED_S) -> None:
        self.bytes = 0
        self.filled: OrderedDict[Room, None] = OrderedDict()
        self._ring = ring
        self._ring_bytes = ring_bytes
        self._rings_bytes = rings_bytes
        self._aged_s = aged_s
        self._aged_at = float("-inf")
        self._to_age: list[Room] = []

    def changed(self, room: Room, size: int) -> None:
        """A room's ring, which was of ``size`` bytes, has other events than before."""
        room.shorten(self._ring, self._ring_bytes)
        self.bytes += room.size - size
        if room.size:
            self.filled[room] = None
            self.filled.move_to_end(room)
            while self.bytes > self._rings_bytes and len(self.filled) > 1:
                self.empty(next(iter(self.filled)))
        else:
            self.filled.pop(room, None)

    def empty(self, room: Room) -> None:
        """Drop what a room's ring holds."""
        if room in self.filled:
            del self.filled[room]
            self.bytes -= room.size
        room.forget()

    def age(self, now: float) -> None:
        """Drop what has been in the rings for long, of some rooms at each call; ``now`` in seconds."""
        if not self._to_age and now - self._aged_at >= self._aged_s:
            self._aged_at = now
            self._to_age = list(self.filled)
        for _ in range(min(len(self._to_age), _AGED_AT_ONCE)):
            room = self._to_age.pop()
            if room in self.filled:
                size = room.size
                room.age()
                self.bytes += room.size - size
                if not room.size:
                    del self.filled[room]

    def clear(self) -> None:
        """Count nothing any more; what the rings hold is left to whoever still has them."""
        self.filled.clear()
        self._to_age.clear()
        self.bytes = 0
