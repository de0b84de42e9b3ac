"""Looks twice a second for what is to be tried again: queues whose time has come, letters that somebody wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.relay.looking import keep_looking

if TYPE_CHECKING:
    from services.relay.held import HeldShard
    from services.relay.parking import ParkingStore

_EVERY_S = 0.5


class Due:
    """Tells the lines of ``held``. A shard that stands still tries nothing again: it would only use attempts up."""

    def __init__(self, parking: ParkingStore, held: dict[int, HeldShard]) -> None:
        self._parking = parking
        self._held = held

    async def run(self) -> None:
        """Look until cancelled."""
        await keep_looking("due", self.look, every_s=_EVERY_S)

    async def look(self) -> None:
        """Look once."""
        moving = [number for number, shard in self._held.items() if shard.stopped is None and not shard.ended]
        if not moving:
            return
        for number, queue in await self._parking.due_queues(moving):
            if (shard := self._held.get(number)) is not None:
                shard.due_queues[queue] = None
                shard.wake.set()
        for number, dead_id in await self._parking.due_letters(moving):
            if (shard := self._held.get(number)) is not None:
                shard.due_letters[dead_id] = None
                shard.wake.set()
