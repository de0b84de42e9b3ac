"""What one may ask to be written to a timeline: the shape of each event type (protocol §3, §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.contracts import body as bodies
from shared.contracts.words import (
    RESERVED_CLIENT_MSG_ID,
    ConversationId,
    EventType,
    Name,
    Seq,
    Traceparent,
    is_name,
)
from shared.errors import BadRequestError

if TYPE_CHECKING:
    from shared.contracts.body import Body

MAX_TITLE = 256
"""Characters of a conversation's title."""

ACTIONS = ("add", "remove", "leave", "role")
ROLES = ("admin", "member")
_TARGETED = ("edit", "recall", "delete")


class SendItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of `POST /v1/events`, as it came; ``body`` is not looked into yet."""

    conversation_id: ConversationId
    client_msg_id: Name
    sender_id: Name | None = None
    type: EventType = "message"
    body: msgspec.Raw = msgspec.Raw()
    target_seq: Seq | None = None
    traceparent: Traceparent | None = None
    device_id: Name | None = None


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the right shape. ``action`` … ``role`` are of a `member` event, ``title`` of a `conversation` one."""

    conversation_id: str
    client_msg_id: str
    sender_id: str
    type: EventType
    body: Body | None
    target_seq: int | None
    traceparent: str | None
    action: str | None = None
    subject: str | None = None
    role: str | None = None
    title: str | None = None
    sets_title: bool = False


def draft(item: SendItem, sender_id: str, *, max_body: int = bodies.MAX_BYTES) -> Draft:
    """Check an item's shape. Raises `BadRequestError` or `TooLargeError` with the field at fault."""
    if item.client_msg_id.startswith(RESERVED_CLIENT_MSG_ID):
        raise BadRequestError(f"{RESERVED_CLIENT_MSG_ID} is reserved", field="client_msg_id")
    targeted = item.type in _TARGETED
    if targeted and item.target_seq is None:
        raise BadRequestError(f"a {item.type} needs a target_seq", field="target_seq")
    if not targeted and item.target_seq is not None:
        raise BadRequestError(f"a {item.type} has no target_seq", field="target_seq")
    raw = None if bytes(item.body) in (b"", b"null") else bytes(item.body)
    if item.type in ("recall", "delete"):
        if raw is not None:
            raise BadRequestError(f"a {item.type} has no body", field="body")
        body = None
    elif raw is None:
        raise BadRequestError(f"a {item.type} needs a body", field="body")
    else:
        body = bodies.parse(raw, max_bytes=max_body)
    made = Draft(
        conversation_id=item.conversation_id.lower(),
        client_msg_id=item.client_msg_id,
        sender_id=sender_id,
        type=item.type,
        body=body,
        target_seq=item.target_seq,
        traceparent=item.traceparent,
    )
    if item.type == "member" and body is not None:
        return _member(made, body)
    if item.type == "conversation" and body is not None:
        return _conversation(made, body)
    return made


def _member(made: Draft, body: Body) -> Draft:
    action, subject, role = body.get_str("action"), body.get_str("user_id"), body.get_str("role")
    if action not in ACTIONS:
        raise BadRequestError(f"expected one of {', '.join(ACTIONS)}", field="body.action")
    if action == "leave":
        if subject not in (None, made.sender_id):
            raise BadRequestError("one leaves for oneself only", field="body.user_id")
        subject = made.sender_id
    if not is_name(subject):
        raise BadRequestError("expected a user id", field="body.user_id")
    if role is None and action == "role":
        raise BadRequestError("a role is needed", field="body.role")
    if role is not None and role not in ROLES:
        raise BadRequestError(f"expected one of {', '.join(ROLES)}", field="body.role")
    return msgspec.structs.replace(made, action=action, subject=subject, role=role)


def _conversation(made: Draft, body: Body) -> Draft:
    if "action" in body.value:
        raise BadRequestError("a conversation event has no action", field="body.action")
    return msgspec.structs.replace(made, title=title(body), sets_title="title" in body.value)


def title(body: Body) -> str | None:
    """A conversation body's title; null takes it away."""
    if body.value.get("title") is None:
        return None
    found = body.get_str("title")
    if found is not None and len(found) > MAX_TITLE:
        raise BadRequestError(f"a title has at most {MAX_TITLE} characters", field="body.title")
    return found
