"""What a device knows of one conversation: which seqs it holds, has acked and still misses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto

from ._frames import Conversation, Event, Page, Receipt, Span
from .ranges import Ranges

REMEMBERED_IDS = 512
"""Event ids kept per conversation: more than a window of repeats, so that a repeat with another id is noticed."""
MAX_AHEAD = 512
"""Events kept beyond a gap while it is being pulled."""

Mark = tuple[int, int]
"""A read mark: (version, seq). Compared as a pair, it only grows."""


class Verdict(Enum):
    """What became of an event."""

    TAKEN = auto()
    REPEAT = auto()
    AHEAD = auto()
    FULL = auto()
    CONTRADICTS = auto()


class Timeline:
    """Cursors, visible ranges, acks and the own read mark of one conversation.

    ``unacked`` are seqs taken but not yet released for an ack, ``to_ack`` those whose ack has yet to leave. The cursor
    of ``hello`` stays below ``unacked``, since a cursor is an ack too. ``mark`` is the user's own read mark, ``told``
    the one that the server last showed, ``told_head`` the head in its last ``conversation`` frame. ``own``: whether the
    user has muted it, until when, and whether they have archived it. ``promised`` are the event ids of own messages
    that are `sent`, by seq, until their event comes.
    """

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.kind = "group"
        self.title: str | None = None
        self.role: str | None = None
        self.visible: tuple[Span, ...] = ((1, None),)
        self.head = 0
        self.cursor = 0
        self.delivered_seq = 0
        self.mark: Mark = (0, 0)
        self.unread = 0
        self.own: tuple[bool, str | None, bool] = (False, None, False)
        self.updated_at: str | None = None
        self.ids: dict[int, str] = {}
        self.promised: dict[int, str] = {}
        self.unacked = Ranges()
        self.to_ack = Ranges()
        self.ahead: dict[int, Event] = {}
        self.known = False
        self.pulling = False
        self.pulled_after = 0
        self.pull_to = 0
        self.told: Mark = (0, 0)
        self.told_head: int | None = None
        self.hello_cursor: int | None = None
        self.listed_in = 0

    def view(self) -> Conversation:
        """Return the present state for the app."""
        return Conversation(
            self.conversation_id,
            self.kind,
            self.title,
            self.role,
            self.head,
            self.cursor,
            self.visible,
            self.delivered_seq,
            self.mark[1],
            self.mark[0],
            self.unread,
            self.updated_at,
            *self.own,
        )

    def acked_cursor(self) -> int:
        """Return the highest seq up to which everything taken may count as acked."""
        first = self.unacked.first
        return self.cursor if first is None else first - 1

    def lacks_told(self) -> bool:
        """Tell whether this device may lack something up to the head that the server told it last."""
        return self.told_head is None or self.acked_cursor() < self.told_head

    def sees_any(self, low: int, high: int) -> bool:
        """Tell whether any seq of ``low`` … ``high`` (inclusive) is visible to this user."""
        return any(low <= (high if b is None else b) and a <= high for a, b in self.visible if low <= high)

    def take(self, event: Event) -> Verdict:
        """Judge an event that was pushed; ``AHEAD`` and ``FULL`` mean that what lies before it has to be pulled."""
        seq = event.seq
        if self.contradicts(event):
            return Verdict.CONTRADICTS
        if seq <= self.cursor:
            if seq not in self.unacked:
                self.to_ack.add(seq, seq)
            return Verdict.REPEAT
        if seq > self.cursor + 1 and self.sees_any(self.cursor + 1, seq - 1):
            if len(self.ahead) >= MAX_AHEAD and seq not in self.ahead:
                return Verdict.FULL
            self.ahead[seq] = event
            return Verdict.AHEAD
        self._hold(event)
        return Verdict.TAKEN

    def take_page(self, page: Page) -> tuple[list[Event], Event | None]:
        """Take what a pull after the cursor brought, then what was ahead of it and now fits.

        The page says what is visible, so a jump inside it is no gap. The second value is an event that contradicts
        what is held; what came before it is taken all the same.
        """
        taken: list[Event] = []
        for event in page.events:
            if self.contradicts(event):
                return taken, event
            if event.seq > self.cursor:
                self._hold(event)
                taken.append(event)
        self.head = max(self.head, page.head)
        if page.next > self.cursor:
            self.cursor = min(page.next, self.head)
            self.promised = {seq: event_id for seq, event_id in self.promised.items() if seq > self.cursor}
        # A page that brings nothing, though something is known to lie ahead, must not be asked for for ever.
        stuck = self.cursor == self.pulled_after
        for seq in sorted(self.ahead):
            if seq > self.cursor + 1 and self.sees_any(self.cursor + 1, seq - 1) and not stuck:
                break
            event = self.ahead.pop(seq)
            verdict = self.take(event) if seq <= self.cursor else Verdict.TAKEN
            if verdict is Verdict.CONTRADICTS:
                return taken, event
            if seq > self.cursor:
                self._hold(event)
                taken.append(event)
        if page.complete or stuck:
            self.pull_to = min(self.pull_to, self.cursor)
        return taken, None

    def misses(self) -> bool:
        """Tell whether something visible is known to lie between the cursor and what was announced."""
        return bool(self.ahead) or self.sees_any(self.cursor + 1, self.pull_to)

    def contradicts(self, event: Event) -> bool:
        """Tell whether another event is held at this seq, or was promised."""
        held = self.ids.get(event.seq) or self.promised.get(event.seq)
        return held is not None and held != event.event_id

    def promise(self, seq: int, event_id: str) -> bool:
        """Note that an own message is committed; False if another event is held or was promised in its place."""
        held = self.ids.get(seq) or self.promised.get(seq)
        if seq > self.cursor:
            self.promised[seq] = event_id
        return held is None or held == event_id

    def stored(self, seq: int) -> None:
        """Release one seq for its ack: it is in the store now."""
        if seq in self.unacked:
            self.unacked.remove(seq, seq)
            self.to_ack.add(seq, seq)

    def ack(self, low: int, high: int) -> None:
        """Release a range for its ack, as far as this device has got at all."""
        if low <= min(high, self.cursor):
            self.unacked.remove(low, high)
            self.to_ack.add(low, min(high, self.cursor))

    def rewind(self, seq: int) -> None:
        """Forget everything above ``seq``: the server does not have it, or has something else there."""
        self.cursor = min(self.cursor, seq)
        self.head = min(self.head, seq)
        self.ids = {held: event_id for held, event_id in self.ids.items() if held <= seq}
        self.promised.clear()  # what is not held is sent again, and then promised anew
        self.unacked.drop_above(seq)
        self.to_ack.drop_above(seq)
        self.ahead.clear()
        self.pulling, self.pull_to = False, 0
        self.delivered_seq = min(self.delivered_seq, seq)
        self.mark = (self.mark[0], min(self.mark[1], seq))

    def merge(self, receipt: Receipt) -> None:
        """Merge a receipt of this user into the own marks."""
        self.delivered_seq = max(self.delivered_seq, receipt.delivered_seq)
        self.told = (receipt.read_version, receipt.read_seq)
        self.mark = max(self.mark, self.told)

    def _hold(self, event: Event) -> None:
        self.cursor = event.seq
        self.head = max(self.head, event.seq)
        self.updated_at = event.created_at
        self.unacked.add(event.seq, event.seq)
        self.promised.pop(event.seq, None)
        self.ids[event.seq] = event.event_id
        if len(self.ids) > REMEMBERED_IDS:
            del self.ids[next(iter(self.ids))]


class Receipts:
    """Receipts merged: ``delivered_seq`` only rises, the pair (``read_version``, ``read_seq``) only grows. Pure."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Receipt] = {}

    def merge(self, new: Receipt) -> Receipt | None:
        """Return the merged receipt, or None if it says nothing new."""
        key = (new.conversation_id, new.user_id)
        held = self._held.get(key)
        if held is None:
            self._held[key] = new
            return new
        version, seq = max((held.read_version, held.read_seq), (new.read_version, new.read_seq))
        merged = Receipt(*key, max(held.delivered_seq, new.delivered_seq), seq, version)
        if merged == held:
            return None
        self._held[key] = merged
        return merged

    def forget(self, conversation_id: str) -> None:
        """Forget a conversation's: the server lost what they were about, and tells what is left again."""
        self._held = {key: held for key, held in self._held.items() if key[0] != conversation_id}


class Conversations(Mapping[str, Conversation]):
    """A live, read-only view of the conversations among a session's timelines."""

    def __init__(self, timelines: Mapping[str, Timeline]) -> None:
        self._timelines = timelines

    def __getitem__(self, conversation_id: str) -> Conversation:
        timeline = self._timelines[conversation_id]
        if not timeline.known:
            raise KeyError(conversation_id)
        return timeline.view()

    def __iter__(self) -> Iterator[str]:
        return (one for one, timeline in list(self._timelines.items()) if timeline.known)

    def __len__(self) -> int:
        return sum(1 for _ in self)
