"""What this process knows of a shard that it holds. No I/O: tail and due fill it, a line empties it, holder ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from services.relay.breaker import Breaker, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.relay.batch import Queue
    from services.relay.shards import Taken
    from shared.postgres import Record


class HeldShard:
    """A shard under one epoch: rows read and not yet handed to Kafka, and how far reading and Kafka are.

    ``acked_id``: every row up to it is in Kafka or parked. ``read_id``: every row up to it is in ``rows`` or was handed
    on. ``trusted_until``: monotonic seconds. ``leaving``: it is given up once the batch under way is confirmed.
    ``lost``: another relay holds it. ``parked``: the queues that rows wait in; None until they are known, before which
    nothing is published. ``due_queues``, ``due_letters``: what is to be tried again. ``suspect_id``: a batch up to this
    id was refused, so up to it rows are sent with care. ``stopped``: why it stands still; None while it moves.
    """

    __slots__ = (
        "_last_read", "acked_id", "breaker", "due_letters", "due_queues", "epoch", "leaving", "lost", "number",
        "parked", "read_id", "rows", "stopped", "suspect_id", "trusted_until", "wake",
    )  # fmt: skip

    def __init__(self, taken: Taken, trusted_until: float, limits: Limits | None = None) -> None:
        self.number = taken.shard
        self.epoch = taken.epoch
        self.acked_id = taken.cursor_id
        self.read_id = taken.cursor_id
        self.trusted_until = trusted_until
        self.breaker = Breaker(limits or Limits())
        self.rows: deque[Record] = deque()
        self.leaving = False
        self.lost = False
        self.parked: set[Queue] | None = None
        self.due_queues: dict[Queue, None] = {}
        self.due_letters: dict[int, None] = {}
        self.suspect_id = 0
        self.stopped: str | None = None
        self.wake = asyncio.Event()
        self._last_read = 0

    @property
    def ended(self) -> bool:
        """Nothing more of it is to be published under this epoch."""
        return self.leaving or self.lost

    @property
    def has_work(self) -> bool:
        """Whether there is something to hand to Kafka."""
        return bool(self.rows or self.due_queues or self.due_letters)

    @property
    def has_room(self) -> bool:
        """Whether to read on. The measure is the last read, since that was bounded in rows and in bytes."""
        return not self.ended and len(self.rows) * 2 <= self._last_read

    def accept(self, after: int, rows: Sequence[Record], last_id: int) -> None:
        """Take rows that were read past ``after``; dropped if the position has been changed meanwhile."""
        if after != self.read_id or self.ended:
            return
        self.rows.extend(rows)
        self.read_id = last_id
        self._last_read = len(rows)
        self.wake.set()

    def rewind(self) -> None:
        """Begin again behind what Kafka has confirmed."""
        self.rows.clear()
        self.read_id = self.acked_id
        self._last_read = 0

    def leave(self) -> None:
        """Publish nothing more than what is under way."""
        self.leaving = True
        self.wake.set()

    def lose(self) -> None:
        """Another relay holds it: what is under way moves no cursor."""
        self.lost = True
        self.wake.set()
