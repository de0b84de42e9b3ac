"""Histories of acks for Hypothesis, and what the pure rule makes of them. Shared with the tests of the SQL."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

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
    """The timeline grows by so many events, or a user's membership becomes this.

    ``moves``: the user leaves, or comes back, with an event of its own; who is there does not come back.
    """

    grow: int = 0
    user: str = "anna"
    visible: RangeSet | None = None
    moves: Literal["leaves", "returns"] | None = None


Step = Held | Mark | Change


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
        visible = self.visible[change.user]
        if change.moves is not None and visible is not None:
            self.head += 1
            coming = RangeSet([(self.head, OPEN)]) if change.moves == "returns" else RangeSet()
            self.visible[change.user] = visible.up_to(self.head) | coming

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

_members = st.sampled_from(["anna", "late", "left", "back"])
_ordinary = st.builds(Change, grow=st.integers(0, 4)) | st.builds(
    Change, user=_members, moves=st.sampled_from(["leaves", "returns"])
)
changes = _ordinary | st.builds(
    Change, user=_members, visible=st.lists(_pairs | st.just((1, OPEN)), min_size=1).map(RangeSet)
)
"""Growing heads, and members who leave and come back, or of whom another range becomes visible than before."""


@dataclass(frozen=True, slots=True)
class History:
    """Steps, and after each of them whether a batch ends there."""

    steps: list[Step]
    cuts: list[bool]

    def batches(self) -> list[list[Held | Mark] | Change]:
        """The acks by batch, and the changes between them; a change ends a batch too."""
        found: list[list[Held | Mark] | Change] = []
        batch: list[Held | Mark] = []
        for step, cut in zip(self.steps, self.cuts, strict=True):
            if isinstance(step, Change):
                found += [batch, step]
                batch = []
            else:
                batch.append(step)
                if cut:
                    found.append(batch)
                    batch = []
        return [one for one in (*found, batch) if one]


@st.composite
def histories(draw: st.DrawFn, *, most: int = 12) -> History:
    """Acks of all kinds between changes; some are said again later, in another order than the first time."""
    steps: list[Step] = draw(st.lists(acks | changes, min_size=1, max_size=most))
    for at, step in list(enumerate(steps)):
        if not isinstance(step, Change) and draw(st.integers(0, 3)) == 0:
            steps.insert(draw(st.integers(at + 1, len(steps))), step)
    return History(steps, draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps))))


@st.composite
def shuffled(draw: st.DrawFn, said: list[Held | Mark]) -> History:
    """All of these acks in any order, some of them twice, cut anywhere."""
    doubled = said + draw(st.lists(st.sampled_from(said), max_size=6)) if said else []
    order: list[Step] = list(draw(st.permutations(doubled)))
    return History(order, draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order))))


@st.composite
def honest(draw: st.DrawFn) -> History:
    """A history of clients that keep to the protocol: they ack what they were pushed, and mark what they were told."""
    scene, steps = Scene(), list[Step]()
    for _ in range(draw(st.integers(1, 14))):
        user, device = draw(_members), draw(_devices)
        visible = scene.visible[user]
        assert visible is not None
        seen = list(visible.up_to(scene.head).seqs())
        if draw(st.integers(0, 3)):
            version, _ = scene.marks[user].read
            low, high = sorted((draw(st.sampled_from(seen)), draw(st.sampled_from(seen))))
            said = (
                Held(_SCENE_ID, user, device, RangeSet([(low, high)]) & visible),
                Mark(_SCENE_ID, user, device, "read", version, high),
                Mark(_SCENE_ID, user, device, "unread", version + 1, low),
            )
            step: Step = draw(st.sampled_from(said))
        else:
            step = draw(_ordinary)
        steps.append(step)
        if isinstance(step, Change):
            scene.change(step)
        else:
            scene.apply(batched([step]))
    return History(steps, draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps))))
