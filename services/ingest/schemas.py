"""What OpenAPI tells of bodies and answers: the contracts that the socket has too, and what only HTTP has.

They describe; msgspec types do the work, and a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from services.ingest.conversations import MAX_MEMBERS
from services.ingest.items import MAX_ITEMS
from shared.contracts.models import (
    Body,
    Contract,
    ConversationId,
    Count,
    Given,
    Id,
    Name,
    PageFields,
    Problem,
    ReceiptsFields,
    SendItem,
    SentFields,
    Seq,
    SettingsAsked,
    SettingsFields,
    Time,
)
from shared.contracts.sends import MAX_TITLE
from shared.contracts.words import History as Since
from shared.contracts.words import Kind, Role

__all__ = [
    "Conversation",
    "Create",
    "Created",
    "History",
    "HttpProblem",
    "OwnSettings",
    "Page",
    "Receipts",
    "Results",
    "SendItem",
    "Sends",
    "SentFields",
    "Settings",
    "Totals",
]

Page = PageFields
Receipts = ReceiptsFields
OwnSettings = SettingsFields


class Sends(Contract):
    """The body of `POST /v1/events`. Each event fails alone."""

    events: Annotated[list[SendItem], Field(max_length=MAX_ITEMS)]


class Result(Contract):
    """The answer to one event."""

    status: Annotated[StrictInt, Field(description="201 new, 200 known already, else the error's.")]
    event: SentFields | None = None
    error: Problem | None = None


class Results(Contract):
    """The answers, in order."""

    results: list[Result]


class HttpProblem(Contract):
    """RFC 9457. `timeout` and `unavailable`: not known to be committed, send again with the same id."""

    type: StrictStr
    title: StrictStr
    status: StrictInt
    detail: StrictStr
    code: StrictStr
    field: StrictStr | None = None
    retry_after_ms: StrictInt | None = None


class Create(Contract):
    """A conversation to make. `direct` with one other user is the same one each time."""

    kind: Kind
    members: Annotated[list[Name], Field(max_length=MAX_MEMBERS, description="The creator is added.")]
    title: Annotated[StrictStr, Field(max_length=MAX_TITLE)] | None = None
    conversation_id: Annotated[
        ConversationId | None, Field(description="Of a group: version 4 or 7; repeating it makes no second one.")
    ] = None
    history: Since = "joined"
    creator_id: Annotated[Name | None, Field(description="Needed from a service.")] = None


class Created(Contract):
    """Made now (201), or there already (200)."""

    conversation_id: ConversationId
    existing: StrictBool


class Member(Contract):
    """A present member."""

    user_id: Name
    role: Role
    visible: Annotated[
        list[tuple[Seq, Seq | None]], Field(description="Inclusive ranges of seqs; null where there is no end.")
    ]


class Conversation(Contract):
    """What a conversation is now."""

    conversation_id: ConversationId
    kind: Kind
    title: StrictStr | None
    head: Annotated[Count, Field(description="Its highest seq.")]
    created_at: Time
    updated_at: Time
    members: list[Member]


class Version(Contract):
    """What an event has said: at first, or with one of its edits."""

    seq: Annotated[Seq, Field(description="Of the event itself, or of the edit.")]
    event_id: Id
    sender_id: Name
    body: Annotated[Body | None, Field(description="null once the event is recalled or deleted, or the text erased.")]
    created_at: Time
    expired: Annotated[Given[Literal[True]], Field(description="The text was erased by age.")] = None


class History(Contract):
    """Versions of an event, the oldest first."""

    conversation_id: Id
    seq: Seq
    versions: list[Version]
    next: Annotated[Count, Field(description="The cursor to go on from.")]
    complete: Annotated[StrictBool, Field(description="There are no more.")]


class Settings(SettingsAsked):
    """A user's own settings of a conversation, to be set. What is null stays as it is."""

    user_id: Annotated[Name | None, Field(description="Whose; needed from a service.")] = None
    device_id: Annotated[Name | None, Field(description="The gateway's to tell; ignored from others.")] = None


class Unread(Contract):
    """What is unread, and where."""

    unread: Annotated[Count, Field(description="Events.")]
    conversations: Annotated[Count, Field(description="In how many conversations they are.")]


class Totals(Unread):
    """What is unread in all: of conversations that are not muted, and apart of those that are; archived ones count."""

    user_id: Name
    muted: Unread
