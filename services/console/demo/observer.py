"""What all devices tell together while the demo runs: enough to aim a kill, to time a recovery, to draw progress."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Observer:
    """Counts only; the verdict is made from the recordings. Times are seconds of the loop's clock."""

    def __init__(self) -> None:
        self.acked = 0
        """Sends that were answered."""
        self.displays = 0
        """Events displayed, on all devices together."""
        self._left: dict[str, float] = {}
        self._arrived: set[str] = set()
        self._held: dict[tuple[str, str], int] = {}
        self._ticked: dict[tuple[str, str], int] = {}
        self._recoveries: list[tuple[float, asyncio.Future[float]]] = []

    def left(self, client_msg_id: str, at: float) -> None:
        """A message was written to a socket."""
        self._left.setdefault(client_msg_id, at)

    def arrived(self, client_msg_id: str, at: float) -> None:
        """A message was displayed on a device other than its sender's."""
        left = self._left.get(client_msg_id)
        if left is None or client_msg_id in self._arrived:
            return
        self._arrived.add(client_msg_id)
        for killed_at, recovered in self._recoveries:
            if left > killed_at and not recovered.done():
                recovered.set_result(at)

    def displayed(self, conversation_id: str, user_id: str, seq: int) -> None:
        """A device displayed an event."""
        self.displays += 1
        whose = (conversation_id, user_id)
        self._held[whose] = max(seq, self._held.get(whose, 0))

    def ticked(self, conversation_id: str, user_id: str, delivered_seq: int) -> None:
        """A device displayed how far a user holds a conversation."""
        whose = (conversation_id, user_id)
        self._ticked[whose] = max(delivered_seq, self._ticked.get(whose, 0))

    def in_flight(self) -> int:
        """Messages that have left a device and are not displayed on another one yet."""
        return len(self._left) - len(self._arrived)

    def unticked(self, directs: set[str]) -> int:
        """Events of direct chats that somebody displayed and whose delivered tick nobody has seen yet."""
        held = ((whose, seq) for whose, seq in self._held.items() if whose[0] in directs)
        return sum(max(0, seq - self._ticked.get(whose, 0)) for whose, seq in held)

    @contextmanager
    def recovery(self, killed_at: float) -> Iterator[asyncio.Future[float]]:
        """When the first message arrives that left after ``killed_at``.

        Not just the next one: what was past the part that died says nothing about its recovery.
        """
        recovered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        entry = (killed_at, recovered)
        self._recoveries.append(entry)
        try:
            yield recovered
        finally:
            self._recoveries.remove(entry)
            recovered.cancel()
