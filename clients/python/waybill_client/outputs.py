"""What a session wants done, in order. The shell does it; it never decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._frames import ConversationSettings, Created, Event, MessageReceipts, Page, Presence, Receipt, Sent, Typing
    from .errors import WaybillError
    from .outbox import Key


@dataclass(frozen=True, slots=True)
class Write:
    """Write this frame to the socket."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Deliver:
    """Store the event, then report it as stored and hand it to the app."""

    event: Event


@dataclass(frozen=True, slots=True)
class Answered:
    """A request has its answer."""

    key: Key
    value: Sent | Created | Page | ConversationSettings | MessageReceipts


@dataclass(frozen=True, slots=True)
class Failed:
    """A request is over with an error."""

    key: Key
    error: WaybillError


@dataclass(frozen=True, slots=True)
class Changed:
    """A conversation or its marks changed: save them."""

    conversation_id: str


@dataclass(frozen=True, slots=True)
class ReceiptGrew:
    """A merged receipt says more than before."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Typed:
    """A member is writing."""

    typing: Typing


@dataclass(frozen=True, slots=True)
class Seen:
    """A user's online state."""

    presence: Presence


@dataclass(frozen=True, slots=True)
class Rewound:
    """Drop what is stored of the conversation above ``seq``; own messages among it are to be sent again."""

    conversation_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Disagrees:
    """The server holds other events than the store: find by pulling ``before`` where both agree, then rewind."""

    conversation_id: str


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The connection is up; what waited for it follows."""


@dataclass(frozen=True, slots=True)
class Listed:
    """All conversations of the listing are known now."""


@dataclass(frozen=True, slots=True)
class TokenWanted:
    """The token ends in ``in_s`` seconds."""

    in_s: float


@dataclass(frozen=True, slots=True)
class GoAway:
    """Close, and come back after ``after_s`` seconds."""

    after_s: float
    reason: str


Output = (
    Write
    | Deliver
    | Answered
    | Failed
    | Changed
    | ReceiptGrew
    | Typed
    | Seen
    | Rewound
    | Disagrees
    | Welcomed
    | Listed
    | TokenWanted
    | GoAway
)
