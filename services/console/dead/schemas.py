"""What the desk answers, over HTTP and as the command's JSON alike, and what it can be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from shared.contracts.words import MAX_SEQ, UUID
from shared.errors import BadRequestError, WaybillError, from_code

State = Literal["dead", "retrying", "sent", "discarded", "rewound"]
STATES: tuple[State, ...] = get_args(State)

MAX_IDS = 1000
"""Letters that one call changes."""

MAX_REASON = 1000
MAX_WHO = 200

DeadId = Annotated[int, Meta(ge=1, le=MAX_SEQ)]

_UUID = re.compile(UUID)


class Place(msgspec.Struct, frozen=True):
    """Where a record is in Kafka. ``topic`` is without the prefix, as in the outbox."""

    topic: str
    partition: int
    offset: int


class Reading(msgspec.Struct, frozen=True):
    """Where a consumer read a record. ``topic`` is without the prefix; ``cluster`` is Kafka's id of itself."""

    topic: str
    partition: int
    offset: int
    cluster: str


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter.

    ``retry``: whether one asked for now would keep the order; `any_order` where order does not matter, null where none
    can be asked for.
    """

    dead_id: int
    state: State
    origin: Annotated[str, Meta(description="`outbox`, or the topic that a consumer read it from.")]
    shard: int
    outbox_id: int | None
    conversation_id: Annotated[str | None, Meta(description="Null where a consumer's record has no UUID as its key.")]
    seq: int | None
    event_id: Annotated[str | None, Meta(description="Null where a consumer's record names none.")]
    topic: str
    type: str
    payload_bytes: int
    attempts: int
    error: Annotated[str, Meta(description="Of the last attempt that failed.")]
    created_at: str
    died_at: str
    settled_at: str | None
    retry: Literal["in_order", "late", "any_order"] | None
    place: Annotated[Place | None, Meta(description="Once it was sent.")]
    read_from: Annotated[Reading | None, Meta(description="Of a consumer's record.")] = None
    key: Annotated[str | None, Meta(description="Of a consumer's record; at most its first KiB.")] = None
    key_encoding: Annotated[
        Literal["text", "base64"] | None, Meta(description="`base64` where the key is not UTF-8.")
    ] = None
    payload_cut_from: Annotated[
        int | None, Meta(description="How many bytes the payload had, where only its beginning is kept.")
    ] = None


class Try(msgspec.Struct, frozen=True):
    """An attempt to publish or to process it; ``error`` is null for one that succeeded.

    ``owner``, ``epoch``: the relay's lease; of a consumer's record the service, and null.
    """

    attempt: int
    at: str
    error: str | None
    owner: str
    epoch: int | None


class Action(msgspec.Struct, frozen=True):
    """What somebody did to it."""

    at: str
    action: Literal["retry", "redrive", "discard", "rewind"]
    who: str
    reason: str | None


class Detail(Letter, frozen=True, kw_only=True):
    """A dead letter with all that is known of it."""

    source: str
    headers: Annotated[
        list[tuple[str | None, str | None]],
        Meta(description="The outbox row's or the record's own; null where its list has nothing."),
    ]
    payload_encoding: Annotated[
        Literal["json", "base64"], Meta(description="`base64` where the payload is not JSON: then it is a string.")
    ]
    payload: msgspec.Raw
    redriven_at: str | None
    tries: list[Try]
    actions: list[Action]


class Page(msgspec.Struct, frozen=True):
    """Letters in order; ``next`` is what to ask for as ``after``, null at the end."""

    letters: list[Letter]
    next: str | None


class Refusal(msgspec.Struct, frozen=True):
    """Why a letter was not changed."""

    code: str
    message: str


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one letter. ``changed`` is false for a repeat.

    ``state`` is what it is in now, null if there is no such letter. ``last_error``: what Kafka or the consumer said,
    where a retry that was waited for ended dead again.
    """

    dead_id: int
    state: State | None
    changed: bool
    error: Refusal | None = None
    last_error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it is not as it was asked to be."""
        return self.error is not None or self.last_error is not None


class Changes(msgspec.Struct, frozen=True):
    """One result per letter, in the order of ids."""

    results: list[Change]


class Ids(msgspec.Struct, frozen=True):
    """Letters to be tried again."""

    ids: Annotated[list[DeadId], Meta(min_length=1, max_length=MAX_IDS)]


class Reason(msgspec.Struct, frozen=True):
    """Why a letter is discarded."""

    reason: Annotated[str, Meta(min_length=1, max_length=MAX_REASON)]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters; what is None or empty does not limit. ``retriable``: only those that somebody would try again.

    Raises `BadRequestError` with the field at fault.
    """

    states: tuple[str, ...] = ()
    conversation_id: str | None = None
    event_id: str | None = None
    shard: int | None = None
    origin: str | None = None
    retriable: bool = False

    def __post_init__(self) -> None:
        if not set(self.states) <= set(STATES):
            raise BadRequestError(f"expected {', '.join(STATES)}", field="state")
        if self.conversation_id is not None and not _UUID.match(self.conversation_id):
            raise BadRequestError("expected a UUID", field="conversation")
        if self.event_id is not None and not _UUID.match(self.event_id):
            raise BadRequestError("expected a UUID", field="event")
        if self.shard is not None and not 0 <= self.shard <= 63:
            raise BadRequestError("expected a number from 0 to 63", field="shard")
        if self.origin is not None and "\0" in self.origin:
            raise BadRequestError("holds a NUL", field="origin")


def refused(dead_id: int, state: State | None, error: WaybillError) -> Change:
    """A change that was not made."""
    return Change(dead_id, state, changed=False, error=Refusal(error.code, error.message))


def only(changes: list[Change]) -> Change:
    """The one change that was asked for. Raises what it was refused with."""
    (change,) = changes
    if change.error is not None:
        raise from_code(change.error.code, change.error.message)
    return change
