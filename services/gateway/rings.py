"""What the rings of all conversations may hold together. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.room import Room


class Rings:
    """``ring``, ``ring_bytes``: most events, and about how many bytes, of one ring; ``rings_bytes``: of all of them.

    Over that the ring that has had nothing new for longest is emptied, but never the only one.
    """

    def __init__(self, *, ring: int, ring_bytes: int, rings_bytes: int) -> None:
        self.bytes = 0
        self.filled: OrderedDict[Room, None] = OrderedDict()
        self._ring = ring
        self._ring_bytes = ring_bytes
        self._rings_bytes = rings_bytes

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

    def clear(self) -> None:
        """Count nothing any more; what the rings hold is left to whoever still has them."""
        self.filled.clear()
        self.bytes = 0
