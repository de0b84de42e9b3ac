"""Small runs in which every promise was kept, to be spoilt by a test."""

from __future__ import annotations

from services.console.demo.faults import Kill
from services.console.demo.play import Outcome
from services.console.demo.recording import Pushed, Recording, Shown, Tick
from services.console.demo.verdict import Truth
from shared.ranges import OPEN, RangeSet

CHAT = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
EVENTS = 6


def event_id(chat: str, seq: int) -> str:
    return f"event-{chat[-1]}-{seq}"


def client_id(chat: str, seq: int) -> str:
    return f"client-{chat[-1]}-{seq}"


def recording(user: str, device: str, chats: tuple[str, ...] = (CHAT, OTHER)) -> Recording:
    """A device that was pushed and displayed everything, the chats in turns, in two sessions with repeats between."""
    made = Recording(user, device, online=[(0.0, 1000.0)])
    for session, seqs in ((1, range(1, 5)), (2, range(3, EVENTS + 1))):
        made.opened[session], made.resend_s[session] = 5.0 * session, 5.0
        for chat in chats:
            made.starts[session, chat] = seqs[0] - 1
        for seq in seqs:
            for chat in chats:
                at = 10.0 * seq + 0.002 + session
                made.pushed.append(Pushed(session, chat, seq, event_id(chat, seq), client_id(chat, seq), at))
    for seq in range(1, EVENTS + 1):
        made.shown += [Shown(chat, seq, event_id(chat, seq), 10.0 * seq + 0.01) for chat in chats]
        made.ticks.append(Tick(CHAT, "ben", seq, (0, seq // 2)))
    return made


def truth() -> Truth:
    events = {chat: {seq: event_id(chat, seq) for seq in range(1, EVENTS + 1)} for chat in (CHAT, OTHER)}
    everything = RangeSet([(1, OPEN)])
    return Truth(events, {(chat, user): everything for chat in (CHAT, OTHER) for user in ("ada", "ben")})


def outcome() -> Outcome:
    recordings = [recording("ada", "ada-phone"), recording("ben", "ben-phone")]
    for seq in range(2, EVENTS + 1):
        for chat in (CHAT, OTHER):
            recordings[0].written[client_id(chat, seq)] = 10.0 * seq
            recordings[0].acked[client_id(chat, seq)] = (chat, event_id(chat, seq))
    sent = 2 * (EVENTS - 1)
    kills = [Kill("relay", 1, 25.0, 10, 1.5), Kill("gateway", 2, 45.0, 12, 2.25)]
    return Outcome(truth=truth(), recordings=recordings, sent=sent, acked=sent, kills=kills, seconds=60.0)
