"""The judgement over all devices: what each displayed, against what Postgres holds. Pure.

The SDK closes gaps and drops repeats, so the display alone would hide a gateway that makes them. Both are looked for on
the wire, too. A fault is counted under one figure: an event that is jumped over on the display is either shown later,
which is disorder, or never, which is loss; so `gaps` are those of the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.ranges import EMPTY, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from services.console.demo.recording import Pushed, Recording, Shown

_MOST_NOTES = 20
_TOLERANCE = 0.95
"""Clocks of two processes need not run alike."""

FIGURES = ("lost", "duplicated", "disordered", "gaps", "regressions")


@dataclass(frozen=True, slots=True)
class Truth:
    """What is committed: event ids by conversation and seq, and who may see which seqs."""

    events: Mapping[str, Mapping[int, str]]
    visible: Mapping[tuple[str, str], RangeSet]
    """By conversation and user."""

    def expected(self, user_id: str) -> Iterator[tuple[str, int, str]]:
        """Conversation, seq and event id of everything that this user may see."""
        for (conversation_id, member), visible in self.visible.items():
            if member == user_id:
                for seq, event_id in self.events.get(conversation_id, {}).items():
                    if seq in visible:
                        yield conversation_id, seq, event_id


@dataclass(slots=True)
class Verdict:
    """Counts over all devices; all are 0 when every promise was kept."""

    lost: int = 0
    """Committed and visible but never displayed, by device; and sends that were acknowledged but are not committed."""
    duplicated: int = 0
    """Displayed again; and sent to a session again before the server could have missed its ack."""
    disordered: int = 0
    """Displayed below a higher seq of the same conversation."""
    gaps: int = 0
    """A visible seq that a session jumped over."""
    regressions: int = 0
    """A tick lower than one displayed before (an `unread` raises the version, and so the mark)."""
    strangers: int = 0
    """Displayed, but not what Postgres holds there, or not visible to this user."""
    notes: list[str] = field(default_factory=list)
    """The first faults, each in a sentence."""

    @property
    def good(self) -> bool:
        """Whether nothing at all was found."""
        return not any((self.lost, self.duplicated, self.disordered, self.gaps, self.regressions, self.strangers))

    def figures(self) -> dict[str, int]:
        """The five figures by name."""
        return {name: getattr(self, name) for name in FIGURES}

    def note(self, figure: str, what: str) -> None:
        """Count a fault."""
        setattr(self, figure, getattr(self, figure) + 1)
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(f"{figure}: {what}")


def judge(truth: Truth, recordings: Sequence[Recording]) -> Verdict:
    """The verdict over a whole run."""
    verdict = Verdict()
    written = {client_msg_id: at for recording in recordings for client_msg_id, at in recording.written.items()}
    for recording in recordings:
        _displayed(verdict, truth, recording)
        _jumped(verdict, truth, recording)
        _repeated(verdict, recording, written)
        _ticks(verdict, recording)
    committed = {event_id for events in truth.events.values() for event_id in events.values()}
    for recording in recordings:
        for client_msg_id, (conversation_id, event_id) in recording.acked.items():
            if event_id not in committed:
                verdict.note("lost", f"{client_msg_id} in {conversation_id} was acknowledged but is not in Postgres")
    return verdict


def missing(truth: Truth, recording: Recording) -> int:
    """How many visible events this device has not displayed."""
    shown = {(one.conversation_id, one.seq, one.event_id) for one in recording.shown}
    return sum(expected not in shown for expected in truth.expected(recording.user_id))


def _displayed(verdict: Verdict, truth: Truth, recording: Recording) -> None:
    device = recording.device_id
    expected = set(truth.expected(recording.user_id))
    shown: set[tuple[str, int, str]] = set()
    highest: dict[str, int] = {}
    for one in recording.shown:
        what = (one.conversation_id, one.seq, one.event_id)
        if what in shown:
            verdict.note("duplicated", f"{_name(one)} was displayed again on {device}")
            continue
        shown.add(what)
        if what not in expected:
            verdict.note("strangers", f"{_name(one)} on {device} is not in Postgres, or not visible there")
        if one.seq < highest.get(one.conversation_id, 0):
            verdict.note("disordered", f"{_name(one)} came after {highest[one.conversation_id]} on {device}")
        highest[one.conversation_id] = max(one.seq, highest.get(one.conversation_id, 0))
    for conversation_id, seq, _ in sorted(expected - shown):
        verdict.note("lost", f"{seq} of {conversation_id} was never displayed on {device}")


def _jumped(verdict: Verdict, truth: Truth, recording: Recording) -> None:
    cursors = dict(recording.starts)
    for one in recording.pushed:
        place = (one.session, one.conversation_id)
        cursor = cursors.get(place)
        if cursor is not None and one.seq <= cursor:
            continue
        if cursor is not None:
            visible = truth.visible.get((one.conversation_id, recording.user_id), EMPTY)
            for seq in _between(visible, cursor, one.seq):
                verdict.note("gaps", f"{seq} of {one.conversation_id} was jumped over on {recording.device_id}")
        cursors[place] = one.seq


def _repeated(verdict: Verdict, recording: Recording, written: Mapping[str, float]) -> None:
    """A session may get an event again if its ack did not come in time: after r seconds, then 2r more, then 4r more.

    They count from when it was sent first, which is not before the session began nor before the event was written. How
    long it lay in a buffer on its way here cannot make this wrong.
    """
    times: dict[tuple[int, str, int], int] = {}
    for one in recording.pushed:
        what = (one.session, one.conversation_id, one.seq)
        repeats = times.get(what, -1) + 1
        times[what] = repeats
        resend_s = recording.resend_s.get(one.session)
        if repeats == 0 or resend_s is None:
            continue
        earliest = max(recording.opened.get(one.session, 0.0), written.get(one.client_msg_id, 0.0))
        if one.at < earliest + _TOLERANCE * resend_s * (2.0**repeats - 1):
            verdict.note("duplicated", f"{_name(one)} was sent again to {recording.device_id} without need")


def _between(visible: RangeSet, low: int, high: int) -> Iterable[int]:
    """The visible seqs above ``low`` and below ``high``."""
    return (visible & RangeSet([(low + 1, high - 1)])).seqs() if low + 1 < high else ()


def _ticks(verdict: Verdict, recording: Recording) -> None:
    delivered: dict[tuple[str, str], int] = {}
    read: dict[tuple[str, str], tuple[int, int]] = {}
    for tick in recording.ticks:
        whose = (tick.conversation_id, tick.user_id)
        if tick.delivered_seq < delivered.get(whose, 0) or tick.read < read.get(whose, (0, 0)):
            verdict.note("regressions", f"the ticks of {whose[1]} in {whose[0]} went back on {recording.device_id}")
        delivered[whose] = max(tick.delivered_seq, delivered.get(whose, 0))
        read[whose] = max(tick.read, read.get(whose, (0, 0)))


def _name(one: Shown | Pushed) -> str:
    return f"{one.seq} of {one.conversation_id}"
