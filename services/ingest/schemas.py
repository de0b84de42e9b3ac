"""What OpenAPI tells of bodies and answers: the contracts that the socket has too, and what only HTTP has.

They describe; msgspec types do the work, and a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StrictStr

from services.ingest.conversations import MAX_MEMBERS
from services.ingest.items import MAX_ITEMS
from shared.contracts.models import (
    Contract,
    ConversationId,
    Count,
    Name,
    PageFields,
    Problem,
    SendItem,
    SentFields,
    Seq,
    Time,
)
from shared.contracts.sends import MAX_TITLE
from shared.contracts.words import History, Kind, Role

__all__ = ["Conversation", "Create", "Created", "HttpProblem", "Page", "Results", "SendItem", "Sends", "SentFields"]

Page = PageFields


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
    history: History = "joined"
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
