"""Dead letters are tried again by themselves, in hours when few people write, and not too many at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Self

from services.relay.looking import keep_looking
from shared.logging import logger

if TYPE_CHECKING:
    from services.relay.parking import ParkingStore

_EVERY_S = 30.0
_SHAPE = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Window:
    """A time of the day in UTC; it may go over midnight. Pure."""

    begins: time
    ends: time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HH:MM-HH:MM`. Raises `ValueError`."""
        found = _SHAPE.fullmatch(text)
        if found is None:
            raise ValueError("expected HH:MM-HH:MM, in UTC")
        hours, minutes, end_hours, end_minutes = map(int, found.groups())
        window = cls(time(hours, minutes), time(end_hours, end_minutes))
        if window.begins == window.ends:
            raise ValueError("the window is empty")
        return window

    def begun(self, now: datetime) -> datetime | None:
        """When the window that ``now`` lies in began; None outside of it."""
        now = now.astimezone(UTC)
        for day in (now, now - timedelta(days=1)):
            begins = datetime.combine(day.date(), self.begins, UTC)
            ends = datetime.combine(begins.date(), self.ends, UTC)
            if self.ends <= self.begins:
                ends += timedelta(days=1)
            if begins <= now < ends:
                return begins
        return None


class Redrive:
    """Asks for letters to be tried again; whichever relay holds their shards does it."""

    def __init__(self, parking: ParkingStore, window: Window, cap: int) -> None:
        self._parking = parking
        self._window = window
        self._cap = cap

    async def run(self) -> None:
        """Look until cancelled."""
        await keep_looking("redrive", self.look, every_s=_EVERY_S)

    async def look(self) -> int:
        """Ask for what this window still has room for. Returns how many letters."""
        begun = self._window.begun(await self._parking.now())
        count = 0 if begun is None else await self._parking.redrive(begun, self._cap)
        if count:
            _log.info("dead letters redriven", count=count)
        return count
