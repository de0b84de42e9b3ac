"""The socket's frames from a client (protocol §3), decoded by msgspec; the pydantic twins are in `models`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.contracts import member_settings
from shared.contracts.decode import LOOK_BYTES, at_fault, decode, members
from shared.contracts.member_settings import Moment  # noqa: TC001 - msgspec reads annotations
from shared.contracts.words import (
    MAX_SEQ,
    ConversationId,
    Count,
    EventType,
    History,
    Kind,
    Name,
    Rid,
    Seq,
    State,
    Traceparent,
    is_uuid,
)
from shared.errors import BadRequestError

MAX_RANGES = 1000
MAX_CURSORS = 10_000
MAX_PAGE = 500
MAX_PRESENCE = 200
HELLO_BYTES = 1024 * 1024
FRAME_BYTES = 96 * 1024

# Not `Count | tuple[Count, str]`: msgspec 0.23 reads past its own type description for a union of a constrained
# integer and a tuple (seen: MemoryError, segmentation fault). Shape is checked after decoding.
Cursor = int | list[int | str | None]


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    """What every frame is."""


class Hello(Frame, frozen=True, tag="hello"):
    """The first frame."""

    device_id: Name
    token: str | None = None
    client: str | None = None
    sync: Literal["full", "live"] = "full"
    cursors: Annotated[dict[str, Cursor], Meta(max_length=MAX_CURSORS)] | None = None
    since: str | None = None

    def cursor_ids(self) -> dict[str, tuple[int, str | None]] | None:
        """By conversation the seq up to which the device holds everything, and the id of the event held there, if told.

        Both ids in lower case. None if the client named no cursors at all. An id at seq 0 says nothing.
        """
        if self.cursors is None:
            return None
        return {name.lower(): _cursor(name, at) for name, at in self.cursors.items()}

    def __post_init__(self) -> None:
        self.cursor_ids()


class Send(Frame, frozen=True, tag="send"):
    """One event for a timeline; its body is checked by ingest."""

    rid: Rid
    conversation_id: ConversationId
    client_msg_id: Name
    type: EventType = "message"
    body: msgspec.Raw = msgspec.Raw()
    target_seq: Seq | None = None
    traceparent: Traceparent | None = None

    @property
    def body_bytes(self) -> int:
        """How large its body is."""
        return memoryview(self.body).nbytes


class Create(Frame, frozen=True, tag="create"):
    """A conversation to make."""

    rid: Rid
    kind: Kind
    members: list[Name]
    title: str | None = None
    conversation_id: ConversationId | None = None
    history: History = "joined"


def _cursor(name: str, cursor: Cursor) -> tuple[int, str | None]:
    seq, event_id = (cursor, None) if isinstance(cursor, int) else cursor if len(cursor) == 2 else (None, None)
    if not isinstance(seq, int) or not 0 <= seq <= MAX_SEQ or isinstance(event_id, int):
        raise BadRequestError("expected a seq, or [seq, event_id]", field=f"cursors.{name}")
    if event_id is None:
        return seq, None
    if not is_uuid(event_id):
        raise BadRequestError("expected the event id to be a UUID", field=f"cursors.{name}")
    return seq, event_id.lower() if seq else None


class Ack(Frame, frozen=True, tag="ack"):
    """What is stored on this device now: inclusive ranges."""

    # Not `ConversationId`: this frame comes most often, and msgspec takes 0.7 µs for a pattern, `match` takes 0.3.
    conversation_id: str
    ranges: Annotated[list[tuple[Seq, Seq]], Meta(min_length=1, max_length=MAX_RANGES)]

    def __post_init__(self) -> None:
        if not is_uuid(self.conversation_id):
            raise BadRequestError("expected a UUID", field="conversation_id")
        for at, (low, high) in enumerate(self.ranges):
            if low > high:
                raise BadRequestError("the range ends before it begins", field=f"ranges.{at}")


class Read(Frame, frozen=True, tag="read"):
    """A read mark, forward."""

    conversation_id: ConversationId
    seq: Seq
    version: Count | None = None


class Unread(Frame, frozen=True, tag="unread"):
    """A read mark, lowered on purpose with a new version."""

    conversation_id: ConversationId
    seq: Count
    version: Seq


class Pull(Frame, frozen=True, tag="pull"):
    """A page of the timeline."""

    rid: Rid
    conversation_id: ConversationId
    after: Count | None = None
    before: Seq | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 100

    def __post_init__(self) -> None:
        if (self.after is None) == (self.before is None):
            raise BadRequestError("exactly one of after, before", field="after")


class Receipts(Frame, frozen=True, tag="receipts"):
    """Who has an event: how many, and a page of names above ``after``."""

    rid: Rid
    conversation_id: ConversationId
    seq: Seq
    state: State = "read"
    after: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 100


class Settings(Frame, frozen=True, tag="settings"):
    """The user's own settings of a conversation, to be set. What is null stays as it is."""

    rid: Rid
    conversation_id: ConversationId
    muted: bool | None = None
    muted_until: Moment | None = None
    archived: bool | None = None

    def __post_init__(self) -> None:
        member_settings.check(muted=self.muted, muted_until=self.muted_until, archived=self.archived)


class Watch(Frame, frozen=True, tag="watch"):
    """Other members' receipts of a group: wanted, or no more."""

    conversation_id: ConversationId
    on: bool


class Typing(Frame, frozen=True, tag="typing"):
    """The user is writing."""

    conversation_id: ConversationId


class Presence(Frame, frozen=True, tag="presence"):
    """Whose online state is wanted."""

    users: Annotated[list[Name], Meta(max_length=MAX_PRESENCE)]


class Token(Frame, frozen=True, tag="token"):
    """A fresh token."""

    token: str


class Ping(Frame, frozen=True, tag="ping"):
    """A probe."""

    rid: Rid | None = None


Known = (
    Hello | Send | Create | Ack | Read | Unread | Pull | Receipts | Settings | Watch | Typing | Presence | Token | Ping
)

_DECODER: msgspec.json.Decoder[Known] = msgspec.json.Decoder(Known)
_RID = msgspec.json.Decoder(Rid)


class _WithRid(msgspec.Struct, frozen=True):
    rid: msgspec.Raw = msgspec.Raw()


_WITH_RID = msgspec.json.Decoder(_WithRid)


def parse(text: str) -> Known:
    """A frame's text as a frame. Raises `BadRequestError` with the field at fault: `t` for a text that is not JSON."""
    return decode(_DECODER, text, fallback="t")


def explain(text: str, error: BadRequestError) -> str | None:
    """A second look at a text that `parse` refused: its `rid`, if that much of it can be read.

    Names in ``error`` the member that is no JSON, if one is. Apart from `parse`, which costs next to nothing: this here
    is for whoever is answered, and within its rate.
    """
    try:
        raw = bytes(_WITH_RID.decode(text).rid)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        # No more of it is encoded than is looked at; a byte more tells that there is more.
        head = text[: LOOK_BYTES + 1].encode(errors="surrogatepass")
        found = members(head)
        error.field = at_fault(found, cut=len(head) > LOOK_BYTES) or error.field
        raw = found.get("rid", b"")
    try:
        return _RID.decode(raw)
    except (msgspec.MsgspecError, UnicodeError):
        return None
