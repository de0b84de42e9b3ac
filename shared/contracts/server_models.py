"""The socket's frames to clients as pydantic models; see `models`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from shared.contracts.models import (
    Contract,
    Count,
    EventFields,
    Given,
    Id,
    Name,
    PageFields,
    Problem,
    ReceiptsFields,
    Rid,
    SentFields,
    Seq,
    SettingsFields,
    Time,
)
from shared.contracts.words import Kind, Role


class Limits(Contract):
    """What the server allows."""

    frame_bytes: StrictInt
    window: StrictInt
    resend_s: StrictFloat
    heartbeat_s: StrictFloat
    sends_per_s: Annotated[StrictFloat | None, Field(description="null: not limited")]


class Welcome(Contract):
    """The answer to `hello`."""

    t: Literal["welcome"]
    session_id: StrictStr
    user_id: Name
    device_id: Name
    server_time: Time
    limits: Limits


class Conversation(Contract):
    """A conversation as this device sees it."""

    t: Literal["conversation"]
    conversation_id: Id
    kind: Kind
    title: StrictStr | None
    role: Role
    head: Count
    visible: list[tuple[Seq, Seq | None]]
    cursor: Count
    delivered_seq: Count
    read_seq: Count
    read_version: Count
    unread: Count
    updated_at: Time
    muted: StrictBool
    muted_until: Annotated[
        Given[Time], Field(description="Until when it is muted; no frame tells that it has passed.")
    ] = None
    archived: StrictBool
    reset: Annotated[
        Given[Literal[True]], Field(description="Another event stands at the cursor that `hello` named, or none.")
    ] = None


class Listed(Contract):
    """The end of the list of conversations."""

    t: Literal["listed"]
    count: Count
    since: StrictStr
    unread: Annotated[
        Given[Count], Field(description="Of all conversations that are not muted. There if all were listed.")
    ] = None
    muted_unread: Annotated[Given[Count], Field(description="Of the muted ones. There if all were listed.")] = None


class Event(EventFields):
    """An entry of a timeline, pushed; also the value of the events topic."""

    t: Literal["event"]


class Sent(SentFields):
    """The answer to `send`: committed, with its outbox row."""

    t: Literal["sent"]
    rid: Rid


class Created(Contract):
    """The answer to `create`."""

    t: Literal["created"]
    rid: Rid
    conversation_id: Id
    existing: StrictBool


class Page(PageFields):
    """The answer to `pull`."""

    t: Literal["page"]
    rid: Rid


class Receipt(Contract):
    """A user's marks in a conversation."""

    t: Literal["receipt"]
    conversation_id: Id
    user_id: Name
    delivered_seq: Count
    read_seq: Count
    read_version: Count


class ReceiptsPage(ReceiptsFields):
    """The answer to `receipts`."""

    t: Literal["receipts"]
    rid: Rid


class Settings(SettingsFields):
    """The answer to `settings`."""

    t: Literal["settings"]
    rid: Rid


class TypingNotice(Contract):
    """A member is writing, for that long unless told again."""

    t: Literal["typing"]
    conversation_id: Id
    user_id: Name
    for_ms: Count


class PresenceNotice(Contract):
    """Whether a user has a session, null where that is not known, and since when."""

    t: Literal["presence"]
    user_id: Name
    online: StrictBool | None
    since: Time | None


class Error(Problem):
    """The answer to a frame that was refused."""

    t: Literal["error"]
    rid: Given[Rid] = None


class Expiring(Contract):
    """The token ends soon."""

    t: Literal["expiring"]
    in_s: Annotated[StrictInt, Field(ge=0)]


class Reconnect(Contract):
    """Go away and come back after that long."""

    t: Literal["reconnect"]
    after_ms: Annotated[StrictInt, Field(ge=0)]
    reason: StrictStr


class Pong(Contract):
    """The answer to `ping`."""

    t: Literal["pong"]
    rid: Given[Rid] = None
    server_time: Time


ToClient = Annotated[
    Welcome
    | Conversation
    | Listed
    | Event
    | Sent
    | Created
    | Page
    | Receipt
    | ReceiptsPage
    | Settings
    | TypingNotice
    | PresenceNotice
    | Error
    | Expiring
    | Reconnect
    | Pong,
    Field(discriminator="t"),
]
