"""What a session has been given and has acknowledged. Pure: no socket, no store, no clock of its own.

A session follows each of its conversations with a `Feed`. A feed is *live* while its position is the conversation's
known head: then an event that comes from Kafka goes straight to the socket. Otherwise it is *behind*: the shell reads
from Postgres above the position, as far as the window allows. Live push is only the fast case of catch-up, so nothing
that is missed here is lost.

Times are seconds of a monotonic clock, given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from shared.ranges import EMPTY, OPEN, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable


_MOST_EARLY = 1_000
"""Most ranges of acks that wait for the `conversation` frame."""


class Offer(Enum):
    """What to do with an event that came from Kafka."""

    DROP = "drop"
    """Handed out before, or not visible: nothing to do."""

    PUSH = "push"
    """Write it to the socket now; `Session.pushed` has been noted."""

    READ = "read"
    """It cannot be pushed in order: the feed is behind and has to be read."""


@dataclass(slots=True)
class Sent:
    """An event on its way. ``due``: when it is sent again; ``tries``: how often it was sent again."""

    due: float
    tries: int = 0


@dataclass(slots=True, eq=False)
class Feed:
    """One conversation in one session.

    ``position``: everything visible up to it was handed to the socket. ``as_of``: the seq up to which ``visible`` and
    ``role`` are known. ``acked``: what the device says it stores. ``loading``: its `conversation` frame has to go out
    before any event; ``fresh``: none went out yet. ``early``: acks that came before it, of what a page or `sent` told.
    """

    conversation_id: str
    loading: bool = True
    fresh: bool = True
    reading: bool = False
    direct: bool = False
    keeps_history: bool = False
    role: str = "member"
    title: str | None = None
    visible: RangeSet = EMPTY
    as_of: int = 0
    position: int = 0
    read_version: int = 0
    acked: RangeSet = EMPTY
    early: RangeSet = EMPTY
    unacked: dict[int, Sent] = field(default_factory=dict)

    def may_see(self, seq: int) -> bool:
        """Whether the user may read this seq; true only for what ``as_of`` covers or a member's open range."""
        return seq in self.visible

    def wait_for_frame(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Keep an ack until it is known what the user may see; False if too many ranges wait."""
        early = self.early | RangeSet(ranges)
        if len(early) > _MOST_EARLY:
            return False
        self.early = early
        return True

    def changed_by(self, seq: int, action: str, role: str | None) -> None:
        """Apply a `member` event about this user; one that ``as_of`` covers already changes nothing."""
        if seq <= self.as_of:
            return
        if action == "add":
            self._see(self.visible | RangeSet([(1 if self.keeps_history else seq, OPEN)]))
            self.role = role or "member"
        elif action in ("remove", "leave"):
            self._see(self.visible.up_to(seq))
        elif role is not None:
            self.role = role
        self.as_of = seq

    def known(self, as_of: int, visible: RangeSet, role: str) -> None:
        """Take membership as a read found it; an older read than what is known changes nothing."""
        if as_of >= self.as_of:
            self.as_of, self.role = as_of, role
            self._see(visible)

    def _see(self, visible: RangeSet) -> None:
        # Who is added again to a conversation that keeps its history may see what was passed over meanwhile.
        gained = (visible - self.visible).lowest
        if gained is not None and gained <= self.position:
            self.position = gained - 1
        self.visible = visible


@dataclass(frozen=True, slots=True)
class Read:
    """A read to be done: events of the feed above its position, at most ``limit``."""

    feed: Feed
    limit: int


@dataclass(frozen=True, slots=True)
class Resend:
    """Events to be read and written again, ascending."""

    feed: Feed
    seqs: list[int]


class Session:
    """All feeds of a session, with one window over them.

    ``window``: most events that may be unacknowledged at a time. ``resend_s``: seconds until an unacknowledged event is
    sent again, doubled each time, ``resends`` times; then `overdue` says to give up.
    """

    def __init__(self, *, window: int, resend_s: float, resends: int, page: int) -> None:
        self.window = window
        self.feeds: dict[str, Feed] = {}
        self._resend_s = resend_s
        self._resends = resends
        self._page = page
        self._behind: dict[Feed, None] = {}
        self._in_flight = 0
        self._reserved = 0

    @property
    def in_flight(self) -> int:
        """Events that were sent and are not acknowledged."""
        return self._in_flight

    @property
    def room(self) -> int:
        """How many more events may be sent now; what a read under way may bring is taken already."""
        return max(0, self.window - self._in_flight - self._reserved)

    def join(self, conversation_id: str) -> Feed:
        """Follow a conversation; the feed takes no event until `loaded`."""
        feed = Feed(conversation_id)
        self.feeds[conversation_id] = feed
        return feed

    def drop(self, conversation_id: str) -> None:
        """Stop following a conversation."""
        feed = self.feeds.pop(conversation_id, None)
        if feed is not None:
            self._behind.pop(feed, None)
            self._in_flight -= len(feed.unacked)

    def loaded(self, feed: Feed, head: int) -> None:
        """Its `conversation` frame is out. ``head``: the highest seq known by now, from Kafka or a read."""
        feed.loading = False
        if feed.position < head:
            self._behind[feed] = None

    def reload(self, feed: Feed) -> None:
        """The user may see more than before: no event goes out until its `conversation` frame has, again."""
        feed.loading = True
        self._behind.pop(feed, None)

    def offer(self, feed: Feed, seq: int, now: float, *, congested: bool = False) -> Offer:
        """An event came from Kafka. ``congested``: the socket's buffer is full."""
        if seq <= feed.position:
            return Offer.DROP
        if feed.loading or feed.reading:
            return Offer.DROP  # the known head has risen: the read under way, or the next one, finds it
        if seq != feed.position + 1 or feed in self._behind:
            self._behind[feed] = None
            return Offer.READ
        if not feed.may_see(seq):
            feed.position = seq
            return Offer.DROP
        if congested or self.room == 0:
            self._behind[feed] = None
            return Offer.READ
        self.pushed(feed, seq, now)
        return Offer.PUSH

    def fall_behind(self, feed: Feed) -> None:
        """Have the feed read from the store: what came from Kafka is not what this user may see of it."""
        if not feed.loading:
            self._behind[feed] = None

    def pushed(self, feed: Feed, seq: int, now: float) -> None:
        """An event goes to the socket for the first time."""
        feed.position = seq
        if seq not in feed.unacked:
            feed.unacked[seq] = Sent(now + self._resend_s)
            self._in_flight += 1

    def next_read(self) -> Read | None:
        """The next read to do, feeds in turn; None while nobody is behind or the window is full."""
        if not self._behind or self.room == 0:
            return None
        feed = next(iter(self._behind))
        del self._behind[feed]
        feed.reading = True
        limit = min(self.room, self._page)
        self._reserved += limit
        return Read(feed, limit)

    def read_done(self, read: Read, seqs: list[int], *, complete: bool, head: int, known_head: int, now: float) -> None:
        """A read brought ``seqs``, now on their way to the socket. Call it with no await after the known head is taken.

        ``complete``: nothing visible is left up to ``head``, the head that the read saw. A read that ended short of
        ``known_head`` (the read came from a replica, or an event came meanwhile) leaves the feed behind.
        """
        feed = self._ended(read)
        for seq in seqs:
            self.pushed(feed, seq, now)
        if complete:
            feed.position = max(feed.position, head)
        if feed.position < known_head:
            self.fall_behind(feed)

    def read_failed(self, read: Read) -> None:
        """A read failed, or what it brought cannot be used; the feed stays behind."""
        self.fall_behind(self._ended(read))

    def _ended(self, read: Read) -> Feed:
        read.feed.reading = False
        self._reserved -= read.limit
        return read.feed

    def ack(self, feed: Feed, ranges: Iterable[tuple[int, int]], head: int) -> tuple[RangeSet, int]:
        """The device stores ``ranges``. Returns what of it is new and counts, and how many seqs do not count.

        What counts is visible and not above ``head``, however it came: pushed, pulled, or over another session.
        """
        named = RangeSet(ranges)
        valid = named & feed.visible.up_to(head)
        for seq in [seq for seq in feed.unacked if seq in valid]:
            del feed.unacked[seq]
            self._in_flight -= 1
        new = valid - feed.acked
        feed.acked |= new
        return new, named.count() - valid.count()

    def resends_due(self, now: float) -> list[Resend]:
        """What is to be sent again now; each of it is counted as sent again."""
        due: list[Resend] = []
        for feed in self.feeds.values():
            seqs = sorted(seq for seq, sent in feed.unacked.items() if sent.due <= now)
            for seq in seqs:
                sent = feed.unacked[seq]
                sent.tries += 1
                sent.due = now + self._resend_s * 2.0**sent.tries
            if seqs:
                due.append(Resend(feed, seqs))
        return due

    def not_resent(self, resend: Resend) -> None:
        """They could not be read: it was no try, and they are due again."""
        for seq in resend.seqs:
            sent = resend.feed.unacked.get(seq)
            if sent is not None:
                sent.tries -= 1
                sent.due -= self._resend_s * (2.0 ** (sent.tries + 1) - 1)

    def overdue(self, now: float) -> bool:
        """Whether some event was sent again as often as allowed and its last time is up."""
        return any(
            sent.tries >= self._resends and sent.due <= now
            for feed in self.feeds.values()
            for sent in feed.unacked.values()
        )

    def next_due(self) -> float | None:
        """When `resends_due` or `overdue` has to be asked next; None while nothing waits for an ack."""
        return min((sent.due for feed in self.feeds.values() for sent in feed.unacked.values()), default=None)
