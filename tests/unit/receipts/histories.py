"""Histories of acks for Hypothesis, and what the pure rule makes of them. Shared with the tests of the SQL."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from services.receipts.fold import Changes, Held, Mark
from services.receipts.marks import Marks, View, deliver, ignored, propose
from shared.ranges import OPEN, RangeSet

HEAD = 12

VISIBLE: dict[str, RangeSet | None] = {
    "anna": RangeSet([(1, OPEN)]),
    "late": RangeSet([(5, OPEN)]),
    "left": RangeSet([(1, 6)]),
    "back": RangeSet([(1, 3), (8, OPEN)]),
    "stranger": None,
}
"""Users of one conversation by what each may see; the last never was a member."""

DEVICES = ("phone", "laptop", "tablet")


@dataclass(frozen=True, slots=True)
class Change:
    """The timeline grows by so many events, or a user's membership becomes this."""

    grow: int = 0
    user: str = "anna"
    visible: RangeSet | None = None


@dataclass(slots=True)
class Scene:
    """A conversation: its head, who sees what, and what the pure rule says of every user's marks."""

    conversation_id: str = "00000000-0000-7000-8000-000000000001"
    head: int = HEAD
    visible: dict[str, RangeSet | None] = field(default_factory=lambda: dict(VISIBLE))
    marks: dict[str, Marks] = field(default_factory=lambda: {user: Marks() for user in VISIBLE})
    counted: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    records: list[tuple[str, str, str, str | None]] = field(default_factory=list)
    """(user, kind, cause, device or None) of each receipt that is to be announced."""

    def change(self, change: Change) -> None:
        self.head += change.grow
        if change.visible is not None:
            self.visible[change.user] = change.visible

    def apply(self, changes: Changes) -> None:
        """One batch by the pure rule: delivered first, then the marks in order."""
        before = dict(self.marks)
        told: set[tuple[str, str, str, str | None]] = set()
        for held in changes.held:
            view = View(self.visible[held.user_id], self.head)
            self.marks[held.user_id], gained = deliver(self.marks[held.user_id], held.device_id, held.ranges, view)
            self.counted["delivered", None] += gained
            if (reason := ignored(held.ranges, view)) is not None:
                self.counted["delivered", reason] += 1
        for user, marks in self.marks.items():
            if marks.delivered_seq > before[user].delivered_seq:
                told.add((user, "delivered", "ack", None))
        for mark in changes.marks:
            view = View(self.visible[mark.user_id], self.head)
            self.marks[mark.user_id], refusal = propose(
                self.marks[mark.user_id], mark.kind, (mark.version, mark.seq), view
            )
            self.counted[mark.kind, refusal] += 1
            if refusal is None:
                told.add((mark.user_id, mark.kind, mark.kind, None))
            elif view.visible is not None:
                told.add((mark.user_id, mark.kind, f"refused:{refusal}", mark.device_id))
        self.records += sorted(told, key=str)


def batched(acks: Iterable[Held | Mark]) -> Changes:
    """Acks as one batch: as `fold` does it, from what it makes."""
    held: dict[tuple[str, str, str], RangeSet] = {}
    marks: list[Mark] = []
    for ack in acks:
        if isinstance(ack, Held):
            key = (ack.conversation_id, ack.user_id, ack.device_id)
            held[key] = held.get(key, RangeSet()) | ack.ranges
        else:
            marks.append(ack)
    return Changes([Held(*key, ranges) for key, ranges in held.items()], marks)


_SCENE_ID = Scene().conversation_id
_users = st.sampled_from(sorted(VISIBLE))
_devices = st.sampled_from(DEVICES)
_seqs = st.integers(1, HEAD + 3)
_pairs = st.tuples(_seqs, _seqs).map(lambda pair: (min(pair), max(pair)))
_ranges = st.lists(_pairs | st.just((HEAD - 2, OPEN)), min_size=1, max_size=3).map(RangeSet)

helds = st.builds(Held, st.just(_SCENE_ID), _users, _devices, _ranges)
reads = st.builds(Mark, st.just(_SCENE_ID), _users, _devices, st.just("read"), st.integers(0, 4), _seqs)
unreads = st.builds(
    Mark, st.just(_SCENE_ID), _users, _devices, st.just("unread"), st.integers(1, 4), st.integers(0, HEAD + 3)
)
acks = helds | reads | unreads
"""Version jumps, marks beyond the head, acks of what is not visible and devices side by side come by themselves."""

changes = st.builds(Change, grow=st.integers(0, 4)) | st.builds(
    Change,
    user=st.sampled_from(["anna", "late", "left", "back"]),
    visible=st.lists(_pairs | st.just((1, OPEN)), min_size=1).map(RangeSet),
)
