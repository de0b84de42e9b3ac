"""The contracts as pydantic models: what documents are made from, and what the fast codec is checked against.

Nothing on a hot path uses them: frames from clients are decoded by `shared.contracts.frames`, frames to clients are
ready-made bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictInt, StrictStr, model_validator

from shared.contracts.frames import MAX_CURSORS, MAX_PAGE, MAX_RANGES
from shared.contracts.words import MAX_SEQ, EventType, History, Kind, Role

_NAME = r"^[A-Za-z0-9._:@-]{1,64}$"
_UUID = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_TRACEPARENT = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"

Name = Annotated[StrictStr, Field(pattern=_NAME)]
ConversationId = Annotated[StrictStr, Field(pattern=_UUID)]
EventId = Annotated[StrictStr, Field(pattern=_UUID)]
Rid = Annotated[StrictStr, Field(max_length=64)]
Seq = Annotated[StrictInt, Field(ge=1, le=MAX_SEQ)]
Count = Annotated[StrictInt, Field(ge=0, le=MAX_SEQ)]
Range = Annotated[list[Seq], Field(min_length=2, max_length=2, description="[from, to], both inclusive")]
Time = Annotated[StrictStr, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$", description="RFC 3339 UTC")]
Body = dict[str, JsonValue]


class Contract(BaseModel):
    """A field that is not listed may be there; readers ignore it."""

    model_config = ConfigDict(extra="ignore")


class Hello(Contract):
    """The first frame of a session."""

    t: Literal["hello"]
    device_id: Name
    token: StrictStr | None = None
    client: StrictStr | None = None
    sync: Literal["full", "live"] = "full"
    cursors: Annotated[dict[str, Count | tuple[Count, StrictStr | None]], Field(max_length=MAX_CURSORS)] | None = None
    since: StrictStr | None = None


class SendItem(Contract):
    """One event to be written, as an item of `POST /v1/events`."""

    conversation_id: ConversationId
    client_msg_id: Name
    sender_id: Name | None = None
    type: EventType = "message"
    body: Body | None = None
    target_seq: Seq | None = None
    traceparent: Annotated[StrictStr, Field(pattern=_TRACEPARENT)] | None = None


class Send(Contract):
    """One event to be written."""

    t: Literal["send"]
    rid: Rid
    conversation_id: ConversationId
    client_msg_id: Name
    type: EventType = "message"
    body: Body | None = None
    target_seq: Seq | None = None
    traceparent: Annotated[StrictStr, Field(pattern=_TRACEPARENT)] | None = None


class Create(Contract):
    """A conversation to be made."""

    t: Literal["create"]
    rid: Rid
    kind: Kind
    members: list[Name]
    title: StrictStr | None = None
    conversation_id: ConversationId | None = None
    history: History = "joined"


class Ack(Contract):
    """What is stored on this device now."""

    t: Literal["ack"]
    conversation_id: ConversationId
    ranges: Annotated[list[Range], Field(min_length=1, max_length=MAX_RANGES)]

    @model_validator(mode="after")
    def _ascending(self) -> Ack:
        if any(low > high for low, high in self.ranges):
            raise ValueError("a range ends before it begins")
        return self


class Read(Contract):
    """A read mark, forward."""

    t: Literal["read"]
    conversation_id: ConversationId
    seq: Seq
    version: Count | None = None


class Unread(Contract):
    """A read mark, lowered on purpose."""

    t: Literal["unread"]
    conversation_id: ConversationId
    seq: Count
    version: Seq


class Pull(Contract):
    """A page to be read; exactly one of `after` and `before`."""

    t: Literal["pull"]
    rid: Rid
    conversation_id: ConversationId
    after: Count | None = None
    before: Seq | None = None
    limit: Annotated[StrictInt, Field(ge=1, le=MAX_PAGE)] = 100

    @model_validator(mode="after")
    def _one_way(self) -> Pull:
        if (self.after is None) == (self.before is None):
            raise ValueError("exactly one of after, before")
        return self


class Token(Contract):
    """A fresh token for the same user."""

    t: Literal["token"]
    token: StrictStr


class Ping(Contract):
    """A probe."""

    t: Literal["ping"]
    rid: Rid | None = None


FromClient = Annotated[Hello | Send | Create | Ack | Read | Unread | Pull | Token | Ping, Field(discriminator="t")]


class Limits(Contract):
    """What the server allows."""

    frame_bytes: int
    window: int
    resend_s: float
    heartbeat_s: float
    sends_per_s: float | None


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
    conversation_id: ConversationId
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
    reset: bool | None = None


class Listed(Contract):
    """The end of the list of conversations."""

    t: Literal["listed"]
    count: Count


class EventFields(Contract):
    """An entry of a timeline."""

    conversation_id: ConversationId
    seq: Seq
    event_id: EventId
    type: EventType
    sender_id: Name
    client_msg_id: Name
    body: Body | None
    target_seq: Seq | None = None
    created_at: Time
    edited_by: Seq | None = None
    recalled_by: Seq | None = None
    deleted_by: Seq | None = None


class Event(EventFields):
    """An entry of a timeline, pushed; also the value of the events topic."""

    t: Literal["event"]


class SentFields(Contract):
    """A committed event."""

    conversation_id: ConversationId
    client_msg_id: Name
    event_id: EventId
    seq: Seq
    created_at: Time
    duplicate: bool


class Sent(SentFields):
    """The answer to `send`: committed, with its outbox row."""

    t: Literal["sent"]
    rid: Rid


class Created(Contract):
    """The answer to `create`."""

    t: Literal["created"]
    rid: Rid
    conversation_id: ConversationId
    existing: bool


class PageFields(Contract):
    """A page of a timeline, ascending."""

    conversation_id: ConversationId
    events: list[EventFields]
    next: Count
    head: Count
    complete: bool


class Page(PageFields):
    """The answer to `pull`."""

    t: Literal["page"]
    rid: Rid


class Receipt(Contract):
    """A user's marks in a conversation."""

    t: Literal["receipt"]
    conversation_id: ConversationId
    user_id: Name
    delivered_seq: Count
    read_seq: Count
    read_version: Count


class Problem(Contract):
    """An error: of a frame, of an item, and, with RFC 9457's members beside it, of an HTTP call."""

    code: StrictStr
    message: StrictStr
    field: StrictStr | None = None
    retry_after_ms: int | None = None


class Error(Problem):
    """The answer to a frame that was refused."""

    t: Literal["error"]
    rid: Rid | None = None


class Expiring(Contract):
    """The token ends soon."""

    t: Literal["expiring"]
    in_s: int


class Reconnect(Contract):
    """Go away and come back after that long."""

    t: Literal["reconnect"]
    after_ms: int
    reason: StrictStr


class Pong(Contract):
    """The answer to `ping`."""

    t: Literal["pong"]
    rid: Rid | None = None
    server_time: Time


ToClient = Annotated[
    Welcome | Conversation | Listed | Event | Sent | Created | Page | Receipt | Error | Expiring | Reconnect | Pong,
    Field(discriminator="t"),
]


class ReceiptRecord(Receipt):
    """The value of the receipts topic. `device_id`: a refused mark, for that device of the user alone."""

    kind: Literal["delivered", "read", "unread"]
    cause: StrictStr
    device_id: Name | None = None


class AckRecord(Contract):
    """The value of the acks topic: `ranges` of a `delivered`, `seq` and `version` of a `read` or `unread`."""

    conversation_id: ConversationId
    user_id: Name
    device_id: Name
    kind: Literal["delivered", "read", "unread"]
    ranges: Annotated[list[Range], Field(min_length=1, max_length=MAX_RANGES)] | None = None
    seq: Count | None = None
    version: Count | None = None
    at: Time
