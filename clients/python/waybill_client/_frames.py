"""The values of the wire as typed, frozen objects, and how they are read and written.

Fields that this version does not know are ignored; one that is missing or of a wrong type raises ``BadFrame``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .errors import BadFrame, BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# Made once: json.dumps builds a new encoder for each call that is not all defaults.
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

Span = tuple[int, int | None]
"""An inclusive range of seqs; None = still open."""


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a conversation's timeline.

    ``type`` is ``message``, ``edit``, ``recall``, ``delete``, ``member``, ``conversation`` or ``system``.
    ``body`` is the parsed JSON object, or None once recalled, deleted or erased by age (``expired``). ``created_at`` is
    the server's RFC 3339 time. ``edited_by``, ``recalled_by``, ``deleted_by`` are seqs of the newest change that
    ``body`` already shows.
    """

    conversation_id: str
    seq: int
    event_id: str
    type: str
    sender_id: str
    client_msg_id: str
    body: Any
    created_at: str
    target_seq: int | None = None
    edited_by: int | None = None
    recalled_by: int | None = None
    deleted_by: int | None = None
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as this device knows it.

    ``head`` is the highest seq heard of, ``cursor`` the one up to which this device has everything it may see,
    ``read_seq`` and ``read_version`` the user's own mark including one that is still on its way. ``unread`` is the
    server's count of the last ``conversation`` frame. ``muted`` and ``archived`` are the user's own settings;
    ``muted_until`` (RFC 3339, None for ever) passes without a further word from the server.
    """

    conversation_id: str
    kind: str
    title: str | None
    role: str | None
    head: int
    cursor: int
    visible: tuple[Span, ...]
    delivered_seq: int
    read_seq: int
    read_version: int
    unread: int
    updated_at: str | None
    muted: bool = False
    muted_until: str | None = None
    archived: bool = False


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """The user's own settings of a conversation, as the server holds them now."""

    conversation_id: str
    muted: bool
    muted_until: str | None
    archived: bool


@dataclass(frozen=True, slots=True)
class UnreadTotals:
    """Events that are unread in all: of conversations that are not muted, and of those that are."""

    unread: int
    muted: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far a user's devices hold a conversation, and how far the user has read it. The two are separate facts."""

    conversation_id: str
    user_id: str
    delivered_seq: int
    read_seq: int
    read_version: int


@dataclass(frozen=True, slots=True)
class MessageReceipts:
    """Who has the event ``seq``, of those who may see it, but for its sender.

    ``members``: how many those are; ``delivered``, ``read``: how many of them hold it and have read it. ``users``: a
    page of the receipts asked for, in order of user id; ``next``: the user id to go on above, None after the last page.
    """

    conversation_id: str
    seq: int
    members: int
    delivered: int
    read: int
    users: tuple[Receipt, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class Typing:
    """A member is writing, for ``for_ms`` milliseconds from now unless told again."""

    conversation_id: str
    user_id: str
    for_ms: int


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether a user has a session; ``online`` is None where the server cannot tell. ``since`` is the server's time."""

    user_id: str
    online: bool | None
    since: str | None


@dataclass(frozen=True, slots=True)
class Sent:
    """The server's word that an event is committed. ``duplicate`` = it was so before this attempt."""

    conversation_id: str
    client_msg_id: str
    event_id: str
    seq: int
    created_at: str
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Created:
    """A conversation that is there; ``existing`` = it was so before this call."""

    conversation_id: str
    existing: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Events in ascending order of seq, and the cursor to go on from; ``complete`` = no more that way."""

    conversation_id: str
    events: tuple[Event, ...]
    next: int
    head: int
    complete: bool


def read_event(frame: Mapping[str, Any]) -> Event:
    try:
        conversation_id, seq, event_id = frame["conversation_id"], frame["seq"], frame["event_id"]
        if type(seq) is not int or type(conversation_id) is not str or type(event_id) is not str:
            raise BadFrame("event with a wrong type in seq, conversation_id or event_id")
        return Event(
            conversation_id,
            seq,
            event_id,
            frame["type"],
            frame["sender_id"],
            frame["client_msg_id"],
            frame["body"],
            frame["created_at"],
            frame.get("target_seq"),
            frame.get("edited_by"),
            frame.get("recalled_by"),
            frame.get("deleted_by"),
            frame.get("expired") is True,
        )
    except KeyError as missing:
        raise BadFrame(f"event without {missing}", field=str(missing.args[0])) from None


def read_receipt(frame: Mapping[str, Any]) -> Receipt:
    return Receipt(
        text(frame, "conversation_id"),
        text(frame, "user_id"),
        number(frame, "delivered_seq"),
        number(frame, "read_seq"),
        number(frame, "read_version"),
    )


def read_message_receipts(frame: Mapping[str, Any]) -> MessageReceipts:
    conversation_id, users, more = text(frame, "conversation_id"), frame.get("users"), frame.get("next")
    if not isinstance(users, list) or not all(isinstance(one, dict) for one in users):
        raise BadFrame("receipts without users", field="users")
    return MessageReceipts(
        conversation_id,
        number(frame, "seq"),
        number(frame, "members"),
        number(frame, "delivered"),
        number(frame, "read"),
        tuple(read_receipt({**one, "t": "receipts", "conversation_id": conversation_id}) for one in users),
        more if isinstance(more, str) else None,
    )


def read_typing(frame: Mapping[str, Any]) -> Typing:
    return Typing(text(frame, "conversation_id"), text(frame, "user_id"), number(frame, "for_ms"))


def read_presence(frame: Mapping[str, Any]) -> Presence:
    online, since = frame.get("online"), frame.get("since")
    if online is not None and type(online) is not bool:
        raise BadFrame("presence without a truth value as online", field="online")
    return Presence(text(frame, "user_id"), online, since if isinstance(since, str) else None)


def read_sent(frame: Mapping[str, Any]) -> Sent:
    return Sent(
        text(frame, "conversation_id"),
        text(frame, "client_msg_id"),
        text(frame, "event_id"),
        number(frame, "seq"),
        text(frame, "created_at"),
        bool(frame.get("duplicate")),
    )


def read_created(frame: Mapping[str, Any]) -> Created:
    return Created(text(frame, "conversation_id"), bool(frame.get("existing")))


def read_page(frame: Mapping[str, Any]) -> Page:
    events = frame.get("events")
    if not isinstance(events, list):
        raise BadFrame("page without events", field="events")
    return Page(
        text(frame, "conversation_id"),
        tuple(read_event(event) for event in events),
        number(frame, "next"),
        number(frame, "head"),
        bool(frame.get("complete")),
    )


def read_settings(frame: Mapping[str, Any]) -> ConversationSettings:
    return ConversationSettings(text(frame, "conversation_id"), *read_own(frame))


def read_own(frame: Mapping[str, Any]) -> tuple[bool, str | None, bool]:
    """Muted, until when, archived; a server of before there were settings says none of it."""
    until = frame.get("muted_until")
    return frame.get("muted") is True, until if isinstance(until, str) else None, frame.get("archived") is True


def read_totals(frame: Mapping[str, Any]) -> UnreadTotals | None:
    """None unless the frame tells them."""
    unread, muted = frame.get("unread"), frame.get("muted_unread")
    return UnreadTotals(unread, muted) if type(unread) is int and type(muted) is int else None


def read_visible(frame: Mapping[str, Any]) -> tuple[Span, ...]:
    try:
        return tuple((int(a), None if b is None else int(b)) for a, b in frame["visible"])
    except (KeyError, TypeError, ValueError):
        raise BadFrame("conversation without visible ranges", field="visible") from None


def text(frame: Mapping[str, Any], name: str) -> str:
    value = frame.get(name)
    if not isinstance(value, str):
        raise BadFrame(f"{frame.get('t')} without {name}", field=name)
    return value


def number(frame: Mapping[str, Any], name: str) -> int:
    value = frame.get(name)
    if type(value) is not int:
        raise BadFrame(f"{frame.get('t')} without a number as {name}", field=name)
    return value


def encode(value: Mapping[str, Any]) -> bytes:
    """Return compact JSON in UTF-8; raise ``BadRequest`` for NaN, infinity, lone surrogates or no JSON at all."""
    try:
        return _dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"not a JSON value: {error}", field="body") from None


def settings_fields(
    conversation_id: str, *, muted: bool | None, muted_until: datetime | None, archived: bool | None
) -> bytes:
    """Return a ``settings`` frame from the first field after ``rid``; raise ``ValueError`` for what makes none."""
    if muted is None and archived is None:
        raise ValueError("one of muted and archived")
    if muted_until is not None and (not muted or muted_until.tzinfo is None):
        raise ValueError("muted_until goes with muted=True, and has a time zone")
    until = None if muted_until is None else muted_until.astimezone(UTC).isoformat()
    fields = {"conversation_id": conversation_id, "muted": muted, "muted_until": until, "archived": archived}
    return encode({name: value for name, value in fields.items() if value is not None})[1:]
