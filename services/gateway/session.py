"""What a session has been given and has acknowledged. Pure: no socket, no store, no clock of its own.

A session follows each of its conversations with a `Feed`. A feed is *live* while it takes every event as it comes from
Kafka. Else it is *behind*: it takes what it misses from the room's ring or from Postgres, as far as the window allows.
Live push is only the fast case of catch-up, so nothing that is missed here is lost.

Every seq of a timeline passes a feed in order, `member` events included. So what its user may see is known at each seq
from the events themselves, whoever read them.

Times are seconds of a monotonic clock, given by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from services.gateway.feed import NEVER, Feed, Sent
from shared.ranges import EMPTY, OPEN, RangeSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.gateway.events import Entry
    from services.gateway.follower import Follower
    from services.gateway.pushed import Pushes
    from services.gateway.room import Room, Run
    from shared.ranges import Pair

_MOST_GAPS = 1_000
"""Most ranges of acks out of order that are remembered; what is in flight never needs more than the window."""

_SPAN = 0.05
"""What was sent within this share of the resend time is sent again together."""


class Resend(NamedTuple):
    """Seqs to be read and written again, ascending."""

    feed: Feed
    seqs: RangeSet
    runs: list[Sent]


class Taken(NamedTuple):
    """``frames``: to be written now. ``events``: how many they are. ``load``: the `conversation` frame is due."""

    frames: bytes
    events: int
    load: bool


_NOTHING = Taken(b"", 0, load=False)


class Session:
    """All feeds of a session, with one window over them.

    ``window``: most events that may be unacknowledged at a time. ``resend_s``: seconds until an unacknowledged event is
    sent again, doubled each time, ``resends`` times; then `overdue` says to give up. ``due``: when `resends_due` has to
    be asked next, at the latest. ``behind``: feeds that miss something, ``reads``: those of them that the ring does not
    help, both in turn; ``reading``: the one that is being read for. ``pushes``: where pushes are noted, if anywhere.
    """

    __slots__ = (
        "behind", "due", "feeds", "in_flight", "pushes", "reading", "reads", "resend_s", "resends", "user_id", "window",
    )  # fmt: skip

    def __init__(
        self, user_id: str, *, window: int, resend_s: float, resends: int, pushes: Pushes | None = None
    ) -> None:
        self.user_id = user_id
        self.window = window
        self.resend_s = resend_s
        self.resends = resends
        self.pushes = pushes
        self.feeds: dict[str, Feed] = {}
        self.behind: dict[Feed, None] = {}
        self.reads: dict[Feed, None] = {}
        self.reading: Feed | None = None
        self.in_flight = 0
        self.due = float("inf")

    @property
    def room(self) -> int:
        """How many more events may be sent now."""
        return max(0, self.window - self.in_flight)

    def join(self, room: Room, owner: Follower) -> Feed:
        """Follow a conversation; the feed takes no event until `loaded`."""
        feed = Feed(room, owner)
        self.feeds[room.conversation_id] = feed
        return feed

    def drop(self, conversation_id: str) -> None:
        """Stop following a conversation."""
        feed = self.feeds.pop(conversation_id, None)
        if feed is not None:
            self._forward(feed)
            self._cut(feed)
            self.in_flight -= feed.in_flight
            feed.in_flight = 0
            feed.halted = True

    # Membership and loading.

    def loaded(self, feed: Feed) -> None:
        """Its `conversation` frame is out, and the room knows the head that was read."""
        feed.loading = False
        if feed.position < feed.room.head:
            self.fall_behind(feed)

    def reload(self, feed: Feed) -> None:
        """No event goes out until its `conversation` frame has, again."""
        feed.loading = True
        self._forward(feed)

    def known(self, feed: Feed, as_of: int, visible: RangeSet, role: str) -> None:
        """Take membership as a read found it; an older read than what is known changes nothing."""
        before = feed.visible
        if feed.known(as_of, visible, role):
            self._gained(feed, before)

    def _changed(self, feed: Feed, entry: Entry) -> bool:
        """Apply a `member` event about this user; whether the user may see more than before."""
        change = entry.change
        before = feed.visible
        if change is None or entry.seq <= feed.as_of:
            return False
        if change.action == "add":
            feed.see(before | RangeSet([(1 if feed.keeps_history else entry.seq, OPEN)]))
            feed.role = change.role or "member"
        elif change.action in ("remove", "leave"):
            feed.see(before.up_to(entry.seq))
        elif change.role is not None:
            feed.role = change.role
        feed.as_of = entry.seq
        return self._gained(feed, before)

    def _gained(self, feed: Feed, before: RangeSet) -> bool:
        # Who is added again to a conversation that keeps its history may see what was passed over meanwhile.
        if feed.visible is before or feed.visible == before:
            return False
        gained = (feed.visible - before).lowest
        if gained is None:
            return False
        if gained <= feed.position and not feed.fresh:
            self._cut(feed)
            self.in_flight -= feed.in_flight
            feed.go_back(gained - 1, before)
            feed.in_flight = self.unacked(feed).count()
            self.in_flight += feed.in_flight
        return True

    def halt(self, feed: Feed) -> None:
        """No event goes out any more."""
        feed.halted = True
        self._forward(feed)

    # Handing out.

    def fall_behind(self, feed: Feed) -> None:
        """Have the feed take what it misses from the ring or the store."""
        if not feed.held:
            feed.behind = True
            if feed is not self.reading and feed not in self.reads:
                self.behind[feed] = None

    def _forward(self, feed: Feed) -> None:
        feed.behind = False
        self.behind.pop(feed, None)
        self.reads.pop(feed, None)

    def next_behind(self) -> Feed | None:
        """Take the next feed that is behind out of its turn; None if there is none, or the window is full."""
        if not self.behind or self.in_flight >= self.window:
            return None
        feed = next(iter(self.behind))
        del self.behind[feed]
        return feed

    def needs_read(self, feed: Feed) -> None:
        """The ring does not help the feed."""
        self.behind.pop(feed, None)
        self.reads[feed] = None

    def next_read(self, page: int) -> Feed | None:
        """The next feed to read for; `read_done` ends it. One at a time, and not for a few events only."""
        if self.reading is not None or not self.reads or self.room < min(page, max(1, self.window // 4)):
            return None
        self.reading = next(iter(self.reads))
        del self.reads[self.reading]
        return self.reading

    def read_done(self, feed: Feed) -> None:
        """The read ended, however; a feed that still misses something is behind again."""
        if self.reading is feed:
            self.reading = None
        if feed.behind and not self.settle(feed):
            self.fall_behind(feed)

    def settle(self, feed: Feed) -> bool:
        """Whether the feed has all that is known of; then it is live. Call it with no await after the last hand-out."""
        if feed.held or feed.position < feed.room.head:
            return False
        self._forward(feed)
        return True

    def take(self, feed: Feed, run: Run, now: float) -> Taken:
        """Hand out what of ``run``, which follows the feed's position, may go out now.

        The position moves over all that is handed out or not visible. If it does not reach the end of the run, the feed
        is behind: the window is full, its `conversation` frame is due first, or it needs a read of its own.
        """
        count = len(run.entries)
        if (
            feed.open_from <= run.lowest
            and self.in_flight + count <= self.window
            and not run.titles
            and (run.concerns is None or self.user_id not in run.concerns)
        ):
            self._pushed(feed, feed.position + 1, run.last, count, now)
            return Taken(run.buffer, count, load=False)
        if (
            feed.open_from == NEVER
            and run.lowest > (feed.visible.highest or 0)
            and (run.concerns is None or self.user_id not in run.concerns)
        ):
            self._pass(feed, run.last)
            return _NOTHING
        return self._take_each(feed, run.entries, now)

    def _take_each(self, feed: Feed, entries: Sequence[Entry], now: float) -> Taken:
        frames: list[bytes] = []
        load = False
        for entry in entries:
            if entry.titles:
                load = load or (entry.seq > feed.as_of and feed.may_see(entry.seq))
            elif entry.change is not None and entry.concerns == self.user_id and entry.seq > feed.as_of:
                load = True
                if self._changed(feed, entry):
                    self.reload(feed)
                    break
            if not feed.may_see(entry.seq):
                self._pass(feed, entry.seq)
                continue
            if entry.target and not feed.may_see(entry.target):
                feed.own = True
                self.fall_behind(feed)
                break
            if self.in_flight >= self.window:
                self.fall_behind(feed)
                break
            self._pushed(feed, entry.seq, entry.seq, 1, now)
            frames.append(entry.frame)
        return Taken(b"".join(frames), len(frames), load)

    def took(self, feed: Feed, seqs: list[int], now: float) -> None:
        """Events of a read for this user alone go to the socket; all are visible."""
        for seq in seqs:
            self._pass(feed, seq - 1)
            self._pushed(feed, seq, seq, 1, now)

    def passed(self, feed: Feed, head: int) -> None:
        """There is nothing visible left up to ``head``."""
        self._pass(feed, head)

    def _pass(self, feed: Feed, seq: int) -> None:
        """Move up to ``seq`` without a push."""
        if seq > feed.position:
            self._cut(feed)
            feed.position = seq

    def _cut(self, feed: Feed) -> None:
        if self.pushes is not None:
            self.pushes.cut(feed)

    def _pushed(self, feed: Feed, first: int, last: int, count: int, now: float) -> None:
        if not feed.unlogged and self.pushes is not None:
            self.pushes.begin(feed, first, now)
        feed.position = last
        if feed.gaps:
            count -= (RangeSet([(first, last)]) & feed.gaps & feed.visible).count()
        feed.in_flight += count
        self.in_flight += count
        sent = feed.sent
        if sent is None:
            sent = feed.sent = []
        elif sent and not sent[-1].tries and now - sent[-1].since <= self.resend_s * _SPAN:
            sent[-1].last = last
            sent[-1].due = now + self.resend_s
            return
        due = now + self.resend_s
        sent.append(Sent(first, last, now, due))
        self.due = min(self.due, due)

    # Acks.

    def ack(self, feed: Feed, ranges: Sequence[Pair], head: int) -> tuple[Sequence[Pair], int]:
        """The device stores ``ranges``. Returns what of it is new and counts, and how many seqs do not count.

        What counts is visible and not above ``head``, however it came: pushed, pulled, or over another session.
        """
        if len(ranges) == 1 and not feed.gaps:
            first, last = ranges[0]
            low = feed.low
            if feed.open_from <= first <= low + 1 and low < last <= feed.position and last <= head:
                feed.low = last
                feed.in_flight -= last - low
                self.in_flight -= last - low
                self._prune(feed)
                if (feed.record.highest or 0) <= low:
                    return ((low + 1, last),), 0
                return tuple(RangeSet([(low + 1, last)]) - feed.record), 0
        named = RangeSet(ranges)
        valid = named & feed.visible.up_to(head)
        new = valid - feed.acked()
        pushed = (new & RangeSet([(feed.low + 1, feed.position)])).count() if feed.position > feed.low else 0
        feed.in_flight -= pushed
        self.in_flight -= pushed
        feed.gaps |= new
        if len(feed.gaps) > _MOST_GAPS:
            # What was not handed out in this session is told to receipts, but not remembered.
            feed.gaps &= RangeSet([(feed.start + 1, max(feed.start + 1, feed.position))])
        self._compact(feed)
        self._prune(feed)
        return tuple(new - feed.record), named.count() - valid.count()

    def _compact(self, feed: Feed) -> None:
        if feed.position > feed.low:
            missing = self.unacked(feed).lowest
            feed.low = feed.position if missing is None else missing - 1
        if feed.low > feed.start:
            feed.gaps -= RangeSet([(feed.start + 1, feed.low)])

    def _prune(self, feed: Feed) -> None:
        sent = feed.sent
        if sent is not None:
            while sent and sent[0].last <= feed.low:
                del sent[0]
            if not sent:
                feed.sent = None

    # Resends.

    def resends_due(self, now: float) -> list[Resend]:
        """What is to be sent again now; each of it is counted as sent again. Sets ``due`` anew."""
        out: list[Resend] = []
        self.due = float("inf")
        for feed in self.feeds.values():
            if feed.sent is None or feed.halted:
                continue
            left: list[Sent] = []
            again: list[Sent] = []
            seqs = EMPTY
            for run in feed.sent:
                if run.due > now:
                    left.append(run)
                    continue
                missing = self.unacked(feed, run)
                if missing:
                    run.tries += 1
                    run.due = now + self.resend_s * 2.0**run.tries
                    seqs |= missing
                    left.append(run)
                    again.append(run)
            feed.sent = left or None
            self.due = min([self.due, *(run.due for run in left)])
            if again:
                out.append(Resend(feed, seqs, again))
        return out

    def not_resent(self, resend: Resend, now: float, again_s: float) -> None:
        """They could not be read or written: it was no try, and they are due again in ``again_s``."""
        for run in resend.runs:
            run.tries -= 1
            run.due = now + again_s
            self.due = min(self.due, run.due)

    def overdue(self, now: float) -> bool:
        """Whether some event was sent again as often as allowed and its last time is up."""
        return any(
            run.tries >= self.resends and run.due <= now and bool(self.unacked(feed, run))
            for feed in self.feeds.values()
            if not feed.halted
            for run in feed.sent or ()
        )

    def unacked(self, feed: Feed, run: Sent | None = None) -> RangeSet:
        """What of a conversation, or of ``run``, was handed out in this session and is not acknowledged."""
        low = feed.low + 1 if run is None else max(feed.low + 1, run.first)
        high = feed.position if run is None else run.last
        return (feed.visible & RangeSet([(low, high)])) - feed.gaps if low <= high else EMPTY
