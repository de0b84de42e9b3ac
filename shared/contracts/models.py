"""The contracts as pydantic models: the words, what the socket shares with HTTP, and the frames from clients.

Documents are made from them, and the fast codec is checked against them. Nothing on a hot path uses them: frames from
clients are decoded by `shared.contracts.frames`, frames to clients (`server_models`) are ready-made bytes.
"""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from shared.contracts import member_settings
from shared.contracts.frames import MAX_CURSORS, MAX_PAGE, MAX_PRESENCE, MAX_RANGES
from shared.contracts.words import MAX_SEQ, EventType, History, Kind, State
from shared.errors import ERRORS, BadRequestError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_NAME = r"^[A-Za-z0-9._:@-]{1,64}$"
_UUID = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_WRITTEN_UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_TRACEPARENT = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"

Name = Annotated[StrictStr, Field(pattern=_NAME)]
ConversationId = Annotated[StrictStr, Field(pattern=_UUID)]
EventId = Annotated[StrictStr, Field(pattern=_UUID)]
Id = Annotated[StrictStr, Field(pattern=_WRITTEN_UUID, description="A UUID as the server writes it")]
Traceparent = Annotated[StrictStr, Field(pattern=_TRACEPARENT)]
Rid = Annotated[StrictStr, Field(max_length=64)]
Seq = Annotated[StrictInt, Field(ge=1, le=MAX_SEQ)]
Count = Annotated[StrictInt, Field(ge=0, le=MAX_SEQ)]
Range = Annotated[list[Seq], Field(min_length=2, max_length=2, description="[from, to], both inclusive")]
Time = Annotated[StrictStr, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$", description="RFC 3339 UTC")]
Body = dict[str, JsonValue]


def _known_moment(text: str) -> str:
    member_settings.moment(text)
    return text


Moment = Annotated[
    StrictStr,
    Field(pattern=member_settings.MOMENT.replace(r"\A", "^").replace(r"\Z", "$"), description="RFC 3339, in any zone"),
    AfterValidator(_known_moment),
]


def _known_code(code: str) -> str:
    if code not in ERRORS:
        raise ValueError("not one of the protocol's codes")
    return code


Code = Annotated[StrictStr, AfterValidator(_known_code), Field(json_schema_extra={"enum": sorted(ERRORS)})]


class _NeverNull:
    """Marks an optional field of what the server writes: absent where it does not apply, never null (protocol §9)."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        given = tuple(one for one in get_args(source) if one is not NoneType)
        return handler(Union[given])  # noqa: UP007 - known at run time only


def _no_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


T = TypeVar("T")
Given = Annotated[T | None, _NeverNull(), Field(json_schema_extra=_no_default)]


class Contract(BaseModel):
    """A field that is not listed may be there; readers ignore it."""

    model_config = ConfigDict(extra="ignore")


class EventFields(Contract):
    """An entry of a timeline."""

    conversation_id: Id
    seq: Seq
    event_id: Id
    type: EventType
    sender_id: Name
    client_msg_id: Name
    body: Body | None
    target_seq: Given[Seq] = None
    created_at: Time
    edited_by: Given[Seq] = None
    recalled_by: Given[Seq] = None
    deleted_by: Given[Seq] = None
    expired: Annotated[Given[Literal[True]], Field(description="The body was erased by age, and not by anybody.")] = (
        None
    )


class SentFields(Contract):
    """A committed event."""

    conversation_id: Id
    client_msg_id: Name
    event_id: Id
    seq: Seq
    created_at: Time
    duplicate: StrictBool


class PageFields(Contract):
    """A page of a timeline, ascending."""

    conversation_id: Id
    events: list[EventFields]
    next: Count
    head: Count
    complete: StrictBool


class Marks(Contract):
    """A user's marks in a conversation."""

    user_id: Name
    delivered_seq: Count
    read_seq: Count
    read_version: Count


class ReceiptsFields(Contract):
    """Who has an event: of those who may see it, but for its sender."""

    conversation_id: Id
    seq: Seq
    members: Annotated[Count, Field(description="How many may see it, but for its sender.")]
    delivered: Annotated[Count, Field(description="How many of them hold it.")]
    read: Annotated[Count, Field(description="How many of them have read it.")]
    users: Annotated[list[Marks], Field(description="Those of the state that was asked for, in order of user id.")]
    next: Annotated[Name | None, Field(description="The last of them, to go on above; null if there are no more.")]


class SettingsAsked(Contract):
    """A user's own settings of a conversation, to be set. What is null stays as it is."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"type": "boolean"}}} for name in ("muted", "archived")
            ],
            "oneOf": [
                {"properties": {"muted_until": {"type": "null"}}},
                {
                    "required": ["muted", "muted_until"],
                    "properties": {"muted": {"const": True}, "muted_until": {"type": "string"}},
                },
            ],
        }
    )

    muted: StrictBool | None = None
    muted_until: Annotated[
        Moment | None,
        Field(description="With `muted`: until when; null is for ever, and what has passed is not muted."),
    ] = None
    archived: StrictBool | None = None

    @model_validator(mode="after")
    def _some(self) -> SettingsAsked:
        try:
            member_settings.check(muted=self.muted, muted_until=self.muted_until, archived=self.archived)
        except BadRequestError as error:
            raise ValueError(error.message) from None
        return self


class SettingsFields(Contract):
    """A user's own settings of a conversation."""

    conversation_id: Id
    muted: StrictBool
    muted_until: Annotated[Time | None, Field(description="Until when it is muted; null if for ever, or if it is not.")]
    archived: StrictBool


class Problem(Contract):
    """An error: of a frame, of an item, and, with RFC 9457's members beside it, of an HTTP call."""

    code: Code
    message: StrictStr
    field: Given[StrictStr] = None
    retry_after_ms: Given[StrictInt] = None


class Hello(Contract):
    """The first frame of a session."""

    t: Literal["hello"]
    device_id: Name
    token: StrictStr | None = None
    client: StrictStr | None = None
    sync: Literal["full", "live"] = "full"
    cursors: Annotated[dict[str, Count | tuple[Count, EventId | None]], Field(max_length=MAX_CURSORS)] | None = None
    since: StrictStr | None = None


class SendItem(Contract):
    """One event to be written, as an item of `POST /v1/events`."""

    conversation_id: ConversationId
    client_msg_id: Name
    sender_id: Name | None = None
    type: EventType = "message"
    body: Body | None = None
    target_seq: Seq | None = None
    traceparent: Traceparent | None = None
    device_id: Annotated[Name | None, Field(description="The gateway's to tell; ignored from others.")] = None


class Send(Contract):
    """One event to be written."""

    t: Literal["send"]
    rid: Rid
    conversation_id: ConversationId
    client_msg_id: Name
    type: EventType = "message"
    body: Body | None = None
    target_seq: Seq | None = None
    traceparent: Traceparent | None = None


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

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [name], "properties": {name: {"type": "integer"}}} for name in ("after", "before")]
        }
    )

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


class ReceiptsRequest(Contract):
    """Who has an event: how many, and a page of names."""

    t: Literal["receipts"]
    rid: Rid
    conversation_id: ConversationId
    seq: Seq
    state: Annotated[State, Field(description="Whose names: who has read it, who holds it, who has not read it.")] = (
        "read"
    )
    after: Annotated[Name | None, Field(description="Names above this one.")] = None
    limit: Annotated[StrictInt, Field(ge=1, le=MAX_PAGE)] = 100


class SettingsRequest(SettingsAsked):
    """The user's own settings of a conversation, to be set. What is null stays as it is."""

    t: Literal["settings"]
    rid: Rid
    conversation_id: ConversationId


class Watch(Contract):
    """Other members' receipts of a group: wanted, or no more."""

    t: Literal["watch"]
    conversation_id: ConversationId
    on: StrictBool


class TypingRequest(Contract):
    """The user is writing."""

    t: Literal["typing"]
    conversation_id: ConversationId


class PresenceRequest(Contract):
    """Whose online state is wanted."""

    t: Literal["presence"]
    users: Annotated[list[Name], Field(max_length=MAX_PRESENCE)]


class Token(Contract):
    """A fresh token for the same user."""

    t: Literal["token"]
    token: StrictStr


class Ping(Contract):
    """A probe."""

    t: Literal["ping"]
    rid: Rid | None = None


FromClient = Annotated[
    Hello
    | Send
    | Create
    | Ack
    | Read
    | Unread
    | Pull
    | ReceiptsRequest
    | SettingsRequest
    | Watch
    | TypingRequest
    | PresenceRequest
    | Token
    | Ping,
    Field(discriminator="t"),
]
