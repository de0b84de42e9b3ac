"""The protocol's small words as types (protocol §1)."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Literal, TypeGuard

from msgspec import Meta

MAX_SEQ = 2**63 - 1

NAME = r"\A[A-Za-z0-9._:@-]{1,64}\Z"
UUID = r"\A[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\Z"
TRACEPARENT = r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z"

Name = Annotated[str, Meta(pattern=NAME)]
"""A user id, device id or client message id."""

ConversationId = Annotated[str, Meta(pattern=UUID)]
"""A UUID in any case; written in lower case."""

Rid = Annotated[str, Meta(max_length=64)]
Seq = Annotated[int, Meta(ge=1, le=MAX_SEQ)]
Count = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
"""A seq that may be 0: nothing yet."""

Traceparent = Annotated[str, Meta(pattern=TRACEPARENT)]

EventType = Literal["message", "edit", "recall", "delete", "member", "conversation", "system"]
Kind = Literal["direct", "group"]
Role = Literal["admin", "member"]
History = Literal["joined", "all"]
State = Literal["read", "delivered", "unread"]
"""Of a user and an event: has read it, holds it, has not read it."""

RESERVED_CLIENT_MSG_ID = "create:"
"""The creation event's client id is this and the conversation id; nobody else's may begin so."""

_NAME = re.compile(NAME)
_UUID = re.compile(UUID)


def is_name(value: object) -> TypeGuard[str]:
    """Whether it can be a user id, device id or client message id."""
    return isinstance(value, str) and _NAME.match(value) is not None


def is_uuid(value: str) -> bool:
    """Whether it is a UUID in its 36-character form, in any case."""
    return _UUID.match(value) is not None


def direct_id(one: str, other: str) -> str:
    """The id of the direct chat of two users: the same whoever creates it (a line feed cannot stand in an id)."""
    first, second = sorted((one, other))
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{first}\n{second}"))
