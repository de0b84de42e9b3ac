"""What OpenAPI tells of bodies and answers. Twins of the msgspec types that do the work; a test holds them together."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from services.ingest.conversations import MAX_MEMBERS
from services.ingest.items import MAX_ITEMS
from shared.contracts.sends import MAX_TITLE
from shared.contracts.words import MAX_SEQ, EventType, History, Kind, Role

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,64}$")]
Uuid = Annotated[str, Field(pattern=r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$")]
Seq = Annotated[int, Field(ge=1, le=MAX_SEQ)]
Traceparent = Annotated[str, Field(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
Visible = Annotated[
    list[tuple[int, int | None]], Field(description="Inclusive ranges of seqs; null where there is no end.")
]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class SendItem(_Model):
    """An event to write."""

    conversation_id: Uuid
    client_msg_id: Annotated[
        Name, Field(description="The sender's own id: repeating it never writes a second event. Not `create:…`.")
    ]
    sender_id: Annotated[Name | None, Field(description="Needed from a service, unless it writes `system`.")] = None
    type: EventType = "message"
    body: Annotated[dict[str, object] | None, Field(description="At most 64 KiB; not with `recall`, `delete`.")] = None
    target_seq: Annotated[Seq | None, Field(description="The event that edit, recall, delete change.")] = None
    traceparent: Traceparent | None = None


class Sends(_Model):
    """The body of `POST /v1/events`. Each event fails alone."""

    events: Annotated[list[SendItem], Field(max_length=MAX_ITEMS)]


class Sent(_Model):
    """An event as it was committed."""

    conversation_id: Uuid
    client_msg_id: Name
    event_id: Uuid
    seq: Seq
    created_at: str
    duplicate: Annotated[bool, Field(description="Known already: this is its first result.")]


class Problem(_Model):
    """What is wrong. `timeout` and `unavailable`: not known to be committed, send again with the same id."""

    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


class Result(_Model):
    """The answer to one event."""

    status: Annotated[int, Field(description="201 new, 200 known already, else the error's.")]
    event: Sent | None = None
    error: Problem | None = None


class Results(_Model):
    """The answers, in order."""

    results: list[Result]


class HttpProblem(_Model):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str | None = None
    retry_after_ms: int | None = None


class Create(_Model):
    """A conversation to make. `direct` with one other user is the same one each time."""

    kind: Kind
    members: Annotated[list[Name], Field(max_length=MAX_MEMBERS, description="The creator is added.")]
    title: Annotated[str, Field(max_length=MAX_TITLE)] | None = None
    conversation_id: Annotated[
        Uuid | None, Field(description="Of a group: version 4 or 7; repeating it makes no second one.")
    ] = None
    history: History = "joined"
    creator_id: Annotated[Name | None, Field(description="Needed from a service.")] = None


class Created(_Model):
    """Made now (201), or there already (200)."""

    conversation_id: Uuid
    existing: bool


class Member(_Model):
    """A present member."""

    user_id: Name
    role: Role
    visible: Visible


class Conversation(_Model):
    """What a conversation is now."""

    conversation_id: Uuid
    kind: Kind
    title: str | None
    head: Annotated[int, Field(description="Its highest seq.")]
    created_at: str
    updated_at: str
    members: list[Member]


class Event(_Model):
    """An event as it is now."""

    conversation_id: Uuid
    seq: Seq
    event_id: Uuid
    type: EventType
    sender_id: Name
    client_msg_id: str
    body: Annotated[dict[str, object] | None, Field(description="Null once recalled or deleted.")]
    target_seq: Seq | None = None
    created_at: str
    edited_by: Seq | None = None
    recalled_by: Seq | None = None
    deleted_by: Seq | None = None


class Page(_Model):
    """A part of a timeline, ascending, of about 1 MiB at most."""

    conversation_id: Uuid
    events: list[Event]
    next: Annotated[int, Field(description="The cursor to go on from.")]
    head: Annotated[int, Field(description="The last seq that the reader may see.")]
    complete: Annotated[bool, Field(description="Nothing more that way.")]
