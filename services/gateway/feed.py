"""One conversation in one session: what was handed out of it, and what is acknowledged. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shared.ranges import EMPTY, OPEN, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.gateway.follower import Follower
    from services.gateway.room import Room
    from shared.ranges import Pair

NEVER = OPEN
"""``open_from`` of who is no member."""

_MOST_EARLY = 1_000
"""Most ranges of acks that wait for the `conversation` frame."""


class Sent:
    """Seqs ``first`` to ``last``, written together. ``due``: when they go again; ``tries``: how often they did."""

    __slots__ = ("due", "first", "last", "since", "tries")

    def __init__(self, first: int, last: int, since: float, due: float) -> None:
        self.first = first
        self.last = last
        self.since = since
        self.due = due
        self.tries = 0


class Proposed(NamedTuple):
    """A read mark that the client has proposed, and when."""

    version: int
    seq: int
    kind: Literal["read", "unread"]
    at: float


class Feed:
    """One conversation in one session.

    ``position``: everything visible up to it was handed to the socket. ``as_of``: the seq up to which ``visible`` and
    ``role`` are known. ``open_from``: where the last range of ``visible`` begins if it has no end, else `NEVER`.
    ``start``, ``low``: the device acked everything visible in (start, low] in this session; ``gaps``: what else it
    acked; ``record``: what the server knew of before. ``loading``: its `conversation` frame has to go out before any
    event; ``fresh``: none went out yet; ``asleep``: nobody has asked for it, the first event does; ``halted``: no event
    goes out at all, the client has to begin anew. ``early``: acks that came before the frame, of what a page or
    `sent` told. ``own``: only a read for this user can tell what comes next. ``unlogged``: the first seq that was
    pushed and is not in the log of state changes, pushed at ``unlogged_at``; 0: there is none. ``repeated``: what was
    pushed before the feed went back. ``proposed``: the largest read mark of the client that no receipt has answered.
    """

    __slots__ = (
        "as_of",
        "asleep",
        "behind",
        "direct",
        "early",
        "fresh",
        "gaps",
        "halted",
        "in_flight",
        "keeps_history",
        "loading",
        "low",
        "open_from",
        "own",
        "owner",
        "position",
        "proposed",
        "read_version",
        "record",
        "repeated",
        "role",
        "room",
        "sent",
        "start",
        "unlogged",
        "unlogged_at",
        "visible",
        "watching",
    )

    def __init__(self, room: Room, owner: Follower) -> None:
        self.room = room
        self.owner = owner
        self.loading = self.fresh = True
        self.halted = self.behind = self.own = self.asleep = False
        self.direct = self.keeps_history = self.watching = False
        self.role = "member"
        self.visible = EMPTY
        self.open_from = NEVER
        self.as_of = 0
        self.position = self.start = self.low = 0
        self.read_version = 0
        self.proposed: Proposed | None = None
        self.unlogged = 0
        self.unlogged_at = 0.0
        self.gaps = self.record = self.early = self.repeated = EMPTY
        self.in_flight = 0
        self.sent: list[Sent] | None = None

    @property
    def conversation_id(self) -> str:
        """Of the room."""
        return self.room.conversation_id

    @property
    def member(self) -> bool:
        """Whether the user is a member now."""
        return self.open_from != NEVER

    @property
    def held(self) -> bool:
        """Whether no event may go out now."""
        return self.loading or self.halted

    def wake(self) -> None:
        """Something is to be told of it: ask for its `conversation` frame, if nobody has."""
        if self.asleep:
            self.asleep = False
            self.owner.load(self.conversation_id)

    def may_see(self, seq: int) -> bool:
        """Whether the user may read this seq; true only for what ``as_of`` covers or a member's open range."""
        return seq >= self.open_from or seq in self.visible

    def wait_for_frame(self, ranges: Iterable[Pair]) -> bool:
        """Keep an ack until it is known what the user may see; False if too many ranges wait."""
        early = self.early | RangeSet(ranges)
        if len(early) > _MOST_EARLY:
            return False
        self.early = early
        return True

    def known(self, as_of: int, visible: RangeSet, role: str) -> bool:
        """Take membership as a read found it; False for an older read than what is known, which changes nothing."""
        if as_of < self.as_of:
            return False
        self.as_of, self.role = as_of, role
        self.see(visible)
        return True

    def begin(self, position: int, record: int) -> None:
        """Pushing starts above ``position``; the server knows that the device holds everything up to ``record``."""
        self.position = self.start = self.low = position
        self.record = RangeSet([(1, record)]) if record else EMPTY

    def acked(self) -> RangeSet:
        """What the device said in this session that it stores."""
        return (
            (self.gaps | RangeSet([(self.start + 1, self.low)])) & self.visible if self.low > self.start else self.gaps
        )

    def propose(self, mark: Proposed) -> None:
        """The client has proposed this."""
        if self.proposed is None or mark[:2] >= self.proposed[:2]:
            self.proposed = mark

    def marked(self, version: int, seq: int, *, refused: bool = False) -> None:
        """The user's present mark; ``refused``: told since one of this client was not taken."""
        self.read_version = max(self.read_version, version)
        if self.proposed is not None and (refused or (version, seq) >= self.proposed[:2]):
            self.proposed = None

    def see(self, visible: RangeSet) -> None:
        """The user may see this."""
        self.visible = visible
        pairs = tuple(visible)
        self.open_from = pairs[-1][0] if pairs and pairs[-1][1] == OPEN else NEVER

    def go_back(self, position: int, seen: RangeSet) -> None:
        """Begin anew above a lower position. ``seen``: what the user could see before."""
        if self.position > self.start:
            self.repeated |= seen & RangeSet([(self.start + 1, self.position)])
        if self.low > position:
            self.gaps = (self.acked() & seen) - RangeSet([(0, position)])
            self.low = position
            self.start = min(self.start, position)
        self.position = position
        sent = [run for run in self.sent or () if run.first <= position]
        for run in sent:
            run.last = min(run.last, position)
        self.sent = sent or None
