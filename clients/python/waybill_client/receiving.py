"""What each frame of the server does to a session. Pure; one function per frame type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import _frames as frames
from . import errors
from .outputs import (
    Answered,
    Changed,
    Deliver,
    Failed,
    GoAway,
    Listed,
    Output,
    ReceiptGrew,
    Seen,
    TokenWanted,
    Typed,
    Welcomed,
    Write,
)
from .timeline import Verdict

if TYPE_CHECKING:
    from .session import Session

Frame = Mapping[str, Any]


def welcome(session: Session, frame: Frame, now: float) -> list[Output]:
    """The server took the hello: everything unanswered leaves again."""
    session.user_id = frames.text(frame, "user_id")
    limits = frame.get("limits")
    limits = limits if isinstance(limits, Mapping) else {}
    window = limits.get("window")
    if type(window) is int and window > 0:
        session.window = window
    session.outbox.pace.rate_is(limits.get("sends_per_s"))
    frame_bytes = limits.get("frame_bytes")
    session.stats.connects += 1
    writes, too_large = session.outbox.connected(frame_bytes if type(frame_bytes) is int else None, now)
    session.stats.refused += len(too_large)
    outputs: list[Output] = [Welcomed()]
    outputs += [Failed(key, errors.TooLarge(f"over {frame_bytes} bytes", field="body")) for key in too_large]
    outputs += [Write(data) for data in writes]
    return outputs


def conversation(session: Session, frame: Frame, now: float) -> list[Output]:
    """What the server knows of a conversation, and where it begins to push."""
    conversation_id = frames.text(frame, "conversation_id")
    head, cursor = frames.number(frame, "head"), frames.number(frame, "cursor")
    visible = frames.read_visible(frame)
    told = (frames.number(frame, "read_version"), frames.number(frame, "read_seq"))
    kind, unread = frames.text(frame, "kind"), frames.number(frame, "unread")
    delivered_seq = frames.number(frame, "delivered_seq")
    timeline = session.timeline(conversation_id)
    first = session.first_frame(timeline)
    new, timeline.known = not timeline.known, True
    timeline.kind, timeline.title, timeline.role = kind, frame.get("title"), frame.get("role")
    timeline.visible, timeline.unread, timeline.own = visible, unread, frames.read_own(frame)
    timeline.updated_at = frame.get("updated_at")
    timeline.delivered_seq = max(timeline.delivered_seq, delivered_seq)
    outputs: list[Output] = []
    if frame.get("reset"):
        outputs += session.disagrees(conversation_id)
    elif first and timeline.hello_cursor is not None and timeline.hello_cursor > head:
        # Only the answer to a cursor may take something back: a later frame's head may be older than its events.
        outputs += session.rewind(conversation_id, cursor)
    elif first and max(timeline.promised, default=0) > head:
        # Own messages that were `sent` and are not there any more; their events never came.
        outputs += session.rewind(conversation_id, head)
    elif new and session.settings.sync == "live":
        timeline.cursor = cursor
    elif timeline.sees_any(timeline.cursor + 1, cursor):
        timeline.pull_to = max(timeline.pull_to, cursor)
        outputs += session.pull(timeline, now)
    elif cursor > timeline.cursor:
        timeline.cursor = cursor
    timeline.head = max(timeline.head, head)
    timeline.told, timeline.told_head = told, head
    if told < timeline.mark:
        outputs += session.mark_frame(timeline, told[0])
    timeline.mark = max(timeline.mark, told)
    outputs.append(Changed(conversation_id))
    return outputs


def event(session: Session, frame: Frame, now: float) -> list[Output]:
    """One event, pushed: new, held already, or beyond something that is missing."""
    new = frames.read_event(frame)
    timeline = session.timeline(new.conversation_id)
    timeline.known = True
    verdict = timeline.take(new)
    if verdict is Verdict.TAKEN:
        session.stats.events += 1
        return [Deliver(new)]
    if verdict is Verdict.REPEAT:
        session.stats.repeats += 1
        session.acks.released(timeline, 1, now)
        return session.acks_if_due(now)
    if verdict is Verdict.CONTRADICTS:
        return session.disagrees(new.conversation_id)
    if verdict is Verdict.FULL:
        session.stats.dropped_ahead += 1
    if not timeline.pulling and new.conversation_id not in session.pull_again:
        session.stats.gaps += 1
    return session.pull(timeline, now)


def sent(session: Session, frame: Frame, now: float) -> list[Output]:
    """A send is committed."""
    value = frames.read_sent(frame)
    key = ("send", value.conversation_id, value.client_msg_id)
    if not session.outbox.answered(key):
        session.stats.late_answers += 1
        return []
    outputs: list[Output] = [Answered(key, value)]
    outputs += [Write(data) for data in session.outbox.released(key[1], now)]
    if not session.timeline(value.conversation_id).promise(value.seq, value.event_id):
        outputs += session.disagrees(value.conversation_id)
    return outputs


def created(session: Session, frame: Frame, _now: float) -> list[Output]:
    """A conversation is there."""
    value = frames.read_created(frame)
    key = session.outbox.owner(frame.get("rid"))
    if key is None or key[0] != "create":
        session.stats.late_answers += 1
        return []
    session.outbox.answered(key)
    return [Answered(key, value)]


def settings(session: Session, frame: Frame, _now: float) -> list[Output]:
    """The user's own settings of a conversation are as asked for."""
    value = frames.read_settings(frame)
    key = session.outbox.owner(frame.get("rid"))
    if key is None or key[0] != "settings":
        session.stats.late_answers += 1
        return []
    session.outbox.answered(key)
    timeline = session.timelines.get(value.conversation_id)
    if timeline is not None:
        timeline.own = (value.muted, value.muted_until, value.archived)
    return [Answered(key, value)]


def receipts(session: Session, frame: Frame, _now: float) -> list[Output]:
    """Who has an event."""
    value = frames.read_message_receipts(frame)
    key = session.outbox.owner(frame.get("rid"))
    if key is None or key[0] != "receipts":
        session.stats.late_answers += 1
        return []
    session.outbox.answered(key)
    return [Answered(key, value)]


def page(session: Session, frame: Frame, now: float) -> list[Output]:
    """The answer to a pull: the app's own, or one that closes a gap."""
    value = frames.read_page(frame)
    rid = frame.get("rid")
    pull = session.pulls.pop(rid, None) if isinstance(rid, str) else None
    if pull is None:
        key = session.outbox.owner(rid)
        if key is None or key[0] != "pull":
            session.stats.late_answers += 1
            return []
        session.outbox.answered(key)
        return [Answered(key, value)]
    conversation_id = pull[0]
    timeline = session.timeline(conversation_id)
    if value.conversation_id != conversation_id:
        session.pull_later(timeline, now)
        raise errors.BadFrame("page of another conversation", field="conversation_id")
    timeline.pulling = False
    taken, contradiction = timeline.take_page(value)
    session.stats.events += len(taken)
    outputs: list[Output] = [Deliver(new) for new in taken]
    if contradiction is not None:
        return outputs + session.disagrees(conversation_id)
    if timeline.misses():
        outputs += session.pull(timeline, now)
    outputs.append(Changed(conversation_id))
    return outputs


def receipt(session: Session, frame: Frame, _now: float) -> list[Output]:
    """Marks of a member, this user included."""
    new = frames.read_receipt(frame)
    outputs: list[Output] = []
    if new.user_id == session.user_id:
        session.timeline(new.conversation_id).merge(new)
        outputs.append(Changed(new.conversation_id))
    merged = session.receipts.merge(new)
    if merged is not None:
        outputs.append(ReceiptGrew(merged))
    return outputs


def error(session: Session, frame: Frame, now: float) -> list[Output]:
    """The answer to a request that failed, or to a frame without ``rid``."""
    failure = errors.from_frame(frame)
    rid = frame.get("rid")
    pull = session.pulls.pop(rid, None) if isinstance(rid, str) else None
    if pull is not None:
        timeline = session.timeline(pull[0])
        timeline.pulling = False
        if not failure.definite or isinstance(failure, errors.RateLimited):
            session.pull_later(timeline, now)
        else:
            session.stats.errors += 1
        return []
    key = session.outbox.owner(rid)
    if key is None:
        if rid is None:
            session.stats.errors += 1
            if isinstance(failure, errors.RateLimited):
                session.standing.refused(now, failure.retry_after_ms)
        else:
            session.stats.late_answers += 1
        return []
    final = session.outbox.failed(key, failure, now)
    released: list[Output] = [Write(data) for data in session.outbox.released(key[1], now)]
    if final is None:
        return released
    session.stats.refused += 1
    if isinstance(final, errors.BadRequest) and final.field == "t":
        final = errors.Unsupported(f"the server does not know '{key[0]}': it is older than this SDK")
    return [Failed(key, final), *released]


def listed(session: Session, frame: Frame, _now: float) -> list[Output]:
    """The listing is complete: ``since`` is good for the next one, if every frame of this one could be read."""
    since = frame.get("since")
    session.since = since if isinstance(since, str) and not session.misread else None
    session.listed = True
    session.totals = frames.read_totals(frame)
    session.standing.begin()
    return [Listed(), *(Write(data) for data in session.standing.frames())]


def typing(_session: Session, frame: Frame, _now: float) -> list[Output]:
    """A member is writing."""
    return [Typed(frames.read_typing(frame))]


def presence(_session: Session, frame: Frame, _now: float) -> list[Output]:
    """A user's online state."""
    return [Seen(frames.read_presence(frame))]


def expiring(_session: Session, frame: Frame, _now: float) -> list[Output]:
    """The token nears its end."""
    in_s = frame.get("in_s")
    return [TokenWanted(float(in_s) if isinstance(in_s, int | float) else 0.0)]


def reconnect(_session: Session, frame: Frame, _now: float) -> list[Output]:
    """The server wants this connection gone."""
    after_ms = frames.number(frame, "after_ms")
    return [GoAway(max(0, after_ms) / 1000, str(frame.get("reason", "")))]


def ignored(_session: Session, _frame: Frame, _now: float) -> list[Output]:
    """A frame that this SDK does nothing with."""
    return []


HANDLERS: dict[str, Callable[[Session, Frame, float], list[Output]]] = {
    "welcome": welcome,
    "conversation": conversation,
    "event": event,
    "sent": sent,
    "created": created,
    "settings": settings,
    "page": page,
    "receipt": receipt,
    "receipts": receipts,
    "error": error,
    "listed": listed,
    "expiring": expiring,
    "reconnect": reconnect,
    "pong": ignored,
    "typing": typing,
    "presence": presence,
}
