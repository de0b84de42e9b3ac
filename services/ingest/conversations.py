"""Conversations: how one is made, and what it is now (protocol §3 `create`, §6, §9)."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from shared.contracts import body as bodies
from shared.contracts.sends import MAX_TITLE
from shared.contracts.words import ConversationId, History, Kind, Name, Role, direct_id
from shared.errors import BadRequestError, ConflictError, NotFoundError, NotMemberError, TimedOutError
from shared.kafka import partition_of
from shared.postgres import from_multirange, unavailable_if_away
from shared.ranges import OPEN
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool
    from shared.ranges import RangeSet

MAX_MEMBERS = 500
"""Members that a conversation may be made with."""

_SQL = statements(__file__)
_START = _SQL["start_conversation"]
_STATE = _SQL["conversation_state"]

_OWN_ID = re.compile(r"\A.{14}[47].{4}[89abAB]")
"""What a client may choose: a UUID of version 4 or 7 (RFC 9562 §4)."""


class CreateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/conversations`."""

    kind: Kind
    members: Annotated[list[Name], Meta(max_length=MAX_MEMBERS)]
    title: Annotated[str, Meta(max_length=MAX_TITLE)] | None = None
    conversation_id: ConversationId | None = None
    history: History = "joined"
    creator_id: Name | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversation to be made. ``members`` has the creator first; ``body`` is the creation event's, as JSON text."""

    conversation_id: str
    kind: Kind
    title: str | None
    history: History
    creator: str
    members: tuple[str, ...]
    body: str


def plan(request: CreateRequest, creator: str) -> Plan:
    """Check a request. Raises `BadRequestError` with the field at fault."""
    members = tuple(dict.fromkeys((creator, *request.members)))
    title = request.title
    if title is not None and "\0" in title:
        raise BadRequestError("holds a NUL", field="title")
    chosen = request.conversation_id
    if request.kind == "direct":
        if chosen is not None:
            raise BadRequestError("a direct chat has an id of its own", field="conversation_id")
        if len(members) != 2:
            raise BadRequestError("a direct chat is with one other user", field="members")
        conversation_id, title = direct_id(*members), None
    elif chosen is None:
        conversation_id = str(uuid.uuid4())
    elif _OWN_ID.match(chosen):
        conversation_id = chosen.lower()
    else:
        raise BadRequestError("expected a UUID of version 4 or 7", field="conversation_id")
    told = {"action": "create", "kind": request.kind, "title": title, "members": members}
    return Plan(
        conversation_id, request.kind, title, request.history, creator, members, msgspec.json.encode(told).decode()
    )


class MemberState(msgspec.Struct, frozen=True):
    """A member; ``visible`` as inclusive ranges, the last without an end."""

    user_id: str
    role: Role
    visible: list[tuple[int, int | None]]


class ConversationState(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/conversations/{id}` (protocol §9)."""

    conversation_id: str
    kind: Kind
    title: str | None
    head: int
    created_at: str
    updated_at: str
    members: list[MemberState]


class Conversations:
    """Conversations in the store. ``timeout_s`` bounds each call; ``group_size``: members that a group may have."""

    def __init__(self, pool: Pool, digest_key: bytes, timeout_s: float, *, group_size: int = 10_000) -> None:
        self._pool = pool
        self._digest_key = digest_key
        self._timeout_s = timeout_s
        self._group_size = group_size

    async def create(self, planned: Plan) -> bool:
        """Make a conversation with its first event, or find it; whether it existed.

        Raises `ConflictError` if something else has its id or it would be too large, and `UnavailableError` or
        `TimedOutError` if it is not known to be made.
        """
        body = bodies.parse(planned.body.encode())
        with unavailable_if_away():
            try:
                async with self._pool.acquire(timeout=self._timeout_s) as connection:
                    outcome = await connection.fetchval(
                        _START,
                        planned.conversation_id,
                        partition_of(planned.conversation_id),
                        planned.kind,
                        planned.title,
                        planned.history,
                        planned.creator,
                        planned.members,
                        planned.body,
                        bodies.digest(self._digest_key, "conversation", None, body),
                        self._group_size,
                        timeout=self._timeout_s,
                    )
            except TimeoutError:
                raise TimedOutError("the store did not answer in time") from None
        if outcome == "full":
            raise ConflictError(f"a group has at most {self._group_size} members", field="members")
        if outcome == "conflict":
            raise ConflictError("this id belongs to another conversation", field="conversation_id")
        return bool(outcome == "existing")

    async def state(self, conversation_id: str, reader: str | None) -> ConversationState:
        """What a conversation is now; ``reader`` None sees all. Raises `NotFoundError`, `NotMemberError`."""
        with unavailable_if_away():
            async with self._pool.acquire(timeout=self._timeout_s) as connection:
                rows = await connection.fetch(_STATE, conversation_id, reader, timeout=self._timeout_s)
        if not rows or (reader is not None and not rows[0]["reads"]):
            raise NotFoundError("no such conversation")
        first = rows[0]
        if reader is not None and not first["belongs"]:
            raise NotMemberError("not a member any more")
        return ConversationState(
            conversation_id,
            first["kind"],
            first["title"],
            first["last_seq"],
            first["created_at"],
            first["updated_at"],
            [
                MemberState(row["user_id"], row["role"], wire_ranges(from_multirange(row["visible"])))
                for row in rows
                if row["user_id"] is not None
            ],
        )


def wire_ranges(ranges: RangeSet) -> list[tuple[int, int | None]]:
    """Inclusive ranges as the protocol writes them: null where there is no end."""
    return [(low, None if high == OPEN else high) for low, high in ranges]
