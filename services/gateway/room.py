"""A conversation with local sessions, and the ring of its newest events. Pure.

The ring is itself a cursor over the timeline: it grows by the next seq only, and an event at or below its end changes
nothing. After a gap it starts anew; what lies in the gap is read from Postgres by the feeds that miss it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.events import Entry
    from services.gateway.feed import Feed
    from services.gateway.follower import Follower
    from services.gateway.watching import Watchers

RUN_BYTES = 64 * 1024
"""What one write to a session brings at most, about."""

_MOST_RUNS = 64
_OVERHEAD = 200
"""What an event in the ring takes beside its frame, about."""


class Came(Enum):
    """What an event means for the ring."""

    NEXT = "next"
    OLD = "old"
    GAP = "gap"
    """There is something between the ring's end and this event."""

    OTHER = "other"
    """Another event had this seq before: the store is not the one that it was."""


class Run:
    """Consecutive events as one buffer, built once for all feeds that stand below it.

    ``lowest``: the lowest seq that a feed has to see to take the whole run: its first, or the target of an edit in it.
    ``concerns``: whose membership it changes. ``titles``: it changes the conversation itself.
    """

    __slots__ = ("buffer", "concerns", "entries", "last", "lowest", "titles")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.last = entries[-1].seq
        self.buffer = entries[0].frame if len(entries) == 1 else b"".join([one.frame for one in entries])
        self.lowest = entries[0].seq
        self.concerns: set[str] | None = None
        self.titles = False
        for one in entries:
            if one.target and one.target < self.lowest:
                self.lowest = one.target
            if one.change is not None:
                self.titles = self.titles or one.titles
                if one.concerns is not None:
                    self.concerns = {one.concerns} if self.concerns is None else self.concerns | {one.concerns}


class Room:
    """A conversation with local sessions, or one that had some a short while ago.

    ``head``: the highest seq that Kafka or a read has told of; 0: none yet. ``top``: the last seq of the ring, or the
    one before the first that it will take; 0: not known yet. ``committed``: the highest that a client was told of by
    `sent` or a page, maybe before Kafka brought it. ``queued``: the fan-out will visit its feeds. ``told``: the
    ring's end when its feeds were visited last. ``version``: rises when what was read before may be out of date.
    ``direct``: None until it was read; ``watchers``: who wants a group's receipts; None until somebody does.
    """

    __slots__ = (
        "_aged",
        "_base",
        "_events",
        "_fresh_from",
        "_runs",
        "committed",
        "conversation_id",
        "direct",
        "feeds",
        "head",
        "order",
        "queued",
        "size",
        "told",
        "top",
        "version",
        "watchers",
    )

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.head = 0
        self.top = 0
        self.told = 0
        self.committed = 0
        self.feeds: dict[Follower, Feed] = {}
        self.watchers: Watchers | None = None
        self.direct: bool | None = None
        self.order: list[Feed] | None = None
        self.queued = False
        self.size = 0
        self.version = 0
        self._aged = 0
        self._base = 1
        self._fresh_from = 1
        self._events: list[Entry] | None = None
        self._runs: dict[int, Run] | None = None

    @property
    def ackable(self) -> int:
        """The highest seq that a device may hold."""
        return max(self.head, self.committed)

    @property
    def watched(self) -> bool:
        """Whether somebody wants the receipts of others."""
        return self.watchers is not None and bool(self.watchers.told)

    def listed(self) -> list[Feed]:
        """All feeds; the same list until one enters or leaves."""
        if self.order is None:
            self.order = list(self.feeds.values())
        return self.order

    def know(self, head: int) -> int:
        """A read has seen this head: raise the known one; returns it."""
        if self.top == 0:
            self.top = self.told = head
        self.head = max(self.head, head)
        return self.head

    def seen(self, told: int, head: int) -> int:
        """A read that began when the known head was ``told`` has seen ``head``; returns the known head.

        What Kafka tells of is committed before. So a head that a later read of the primary does not see was never
        there, and nobody must wait for it.
        """
        if head < told == self.head:
            self.head = self.top = self.told = head
            self.forget()
        return self.know(head)

    def came(self, entry: Entry) -> Came:
        """An event came from Kafka, in whatever order."""
        seq = entry.seq
        self.head = max(self.head, seq)
        if seq <= self.top:
            events = self._events
            known = events is not None and seq >= self._base
            if known and events and events[seq - self._base].event_id != entry.event_id:
                return Came.OTHER
            return Came.OLD
        came = Came.NEXT if seq == self.top + 1 or self.top == 0 else Came.GAP
        if came is Came.GAP:
            self.forget()
        if self._events is None:
            self._base = seq
            self._events = []
        self._events.append(entry)
        self._runs = None
        self.size += len(entry.frame) + _OVERHEAD
        self.top = seq
        if entry.outdates:
            self._fresh_from = seq
            self.version += 1
        return came

    def fill(self, entries: list[Entry], head: int) -> bool:
        """Take consecutive events as a read found them at ``head``, if they reach the ring; whether its end rose."""
        first, last, top = entries[0].seq, entries[-1].seq, self.top
        if self._events is None:
            if not first <= top + 1 <= last + 1:
                return False
            kept: list[Entry] = []
        elif first <= self._base <= last + 1 and self._fresh_from <= min(head, last + 1):
            kept = self._events[last + 1 - self._base :] if last >= self._base else self._events
        else:
            return False
        self._events = entries + kept
        self._base = self._fresh_from = first
        self._runs = None
        self.size = sum(len(one.frame) + _OVERHEAD for one in self._events)
        self.top = max(top, last)
        self.head = max(self.head, self.top)
        return self.top > top

    def forget(self) -> None:
        """Empty the ring."""
        self._events = self._runs = None
        self.size = 0
        self._base = self._fresh_from = self.top + 1
        self.version += 1

    def shorten(self, most: int, most_bytes: int) -> None:
        """Drop the oldest events until the ring holds at most ``most`` of about ``most_bytes``."""
        events = self._events
        if events is None or (len(events) <= most and self.size <= most_bytes):
            return
        count = max(0, len(events) - most)
        dropped = sum(len(one.frame) + _OVERHEAD for one in events[:count])
        while count < len(events) and self.size - dropped > most_bytes:
            dropped += len(events[count].frame) + _OVERHEAD
            count += 1
        self._drop(events, count, dropped)

    def age(self) -> None:
        """Drop what was as high as the ring's end at the last call."""
        events = self._events
        count = 0 if events is None else max(0, min(len(events), self._aged + 1 - self._base))
        self._aged = self.top
        if events is not None and count:
            self._drop(events, count, sum(len(one.frame) + _OVERHEAD for one in events[:count]))

    def _drop(self, events: list[Entry], count: int, size: int) -> None:
        del events[:count]
        self.size -= size
        self._base += count
        self._runs = None

    def run(self, position: int) -> Run | None:
        """What follows ``position``, as it came; None if the ring does not reach back so far, or there is nothing."""
        if self._runs is not None:
            made = self._runs.get(position)
            if made is not None:
                return made
        events = self._events
        at = position + 1 - self._base
        if events is None or at < 0 or at >= len(events):
            return None
        end, size = at, 0
        while end < len(events) and size < RUN_BYTES:
            size += len(events[end].frame)
            end += 1
        made = Run(events[at:end])
        if self._runs is None or len(self._runs) >= _MOST_RUNS:
            self._runs = {}
        self._runs[position] = made
        return made

    def fresh_run(self, position: int) -> Run | None:
        """As `run`, if a read would find the same now: nothing newer is known, and no event of it was changed since."""
        if self.top < self.head or position + 1 < self._fresh_from:
            return None
        return self.run(position)

    def entries(self, low: int, high: int) -> list[Entry] | None:
        """The events from ``low`` to ``high``, as a read would find them now; None if the ring cannot tell."""
        at = low - self._base
        if self._events is None or self.top < self.head or low < self._fresh_from or at < 0 or high > self.top:
            return None
        return self._events[at : high - self._base + 1]
