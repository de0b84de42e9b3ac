"""The values of the wire as typed, frozen objects, and how they are read and written.

Fields that this version does not know are ignored; one that is missing or of a wrong type raises ``BadFrame``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    ``body`` is the parsed JSON object, or None once recalled or deleted. ``created_at`` is the server's RFC 3339
    time. ``edited_by``, ``recalled_by``, ``deleted_by`` are seqs of the newest change that ``body`` already shows.
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


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as this device knows it.

    ``head`` is the highest seq heard of, ``cursor`` the one up to which this device has everything it may see,
    ``read_seq`` and ``read_version`` the user's own mark including one that is still on its way. ``unread`` is the
    server's count of the last ``conversation`` frame.
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


@dataclass(frozen=True, slots=True)
class Receipt:
    """How far a user's devices hold a conversation, and how far the user has read it. The two are separate facts."""

    conversation_id: str
    user_id: str
    delivered_seq: int
    read_seq: int
    read_version: int


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
