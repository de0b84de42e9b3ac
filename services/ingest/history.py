"""What an event has said before it was edited: its versions, the oldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from shared.errors import ForbiddenError, NotFoundError, NotMemberError
from shared.postgres import unavailable_if_away
from shared.statements import statements
from shared.timeline import MAX_PAGE_BYTES

if TYPE_CHECKING:
    from shared.postgres import Pool, Record

    Readers = Literal["admins", "members", "off"]

_VERSIONS = statements(__file__)["versions"]
_TIMEOUT_S = 5.0


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """The event itself, or one of its edits. ``body`` null: hidden or erased; ``expired``: erased by age."""

    seq: int
    event_id: str
    sender_id: str
    body: msgspec.Raw
    created_at: str
    expired: bool = False


class History(msgspec.Struct, frozen=True):
    """A page of versions. ``next``: the cursor to go on from; ``complete``: there are no more."""

    conversation_id: str
    seq: int
    versions: list[Version]
    next: int
    complete: bool


async def history(
    pool: Pool,
    who: Readers,
    conversation_id: str,
    user_id: str | None,
    /,
    *,
    seq: int,
    after: int = 0,
    limit: int = 100,
) -> History:
    """At most ``limit`` versions of an event with a seq above ``after``, and about 1 MiB of them.

    ``user_id`` None: a service, which may always. ``who`` else may: admins of the group, members, or nobody. Members
    see the versions that were visible to them, also after they left. Raises `NotFoundError`, `NotMemberError`,
    `ForbiddenError`, `UnavailableError`.
    """
    with unavailable_if_away():
        async with pool.acquire(timeout=_TIMEOUT_S) as connection:
            rows = await connection.fetch(
                _VERSIONS, conversation_id, user_id, seq, after, limit + 1, MAX_PAGE_BYTES, timeout=_TIMEOUT_S
            )
    if not rows or not rows[0]["is_reader"]:
        raise NotFoundError("no such conversation", field="conversation_id")
    if user_id is not None:
        _check(who, rows[0])
    if not rows[0]["is_there"]:
        raise NotFoundError("no such message", field="seq")
    found = [_version(row) for row in rows[:limit] if row["seq"] is not None]
    total = rows[0]["total"] if found else 0
    return History(conversation_id, seq, found, found[-1].seq if found else after, complete=len(found) == total)


def _check(who: Readers, row: Record) -> None:
    if who == "off":
        raise ForbiddenError("earlier texts are not shown")
    if who == "admins":
        if not row["belongs"]:
            raise NotMemberError("no longer a member", field="conversation_id")
        if row["role"] != "admin":
            raise ForbiddenError("only admins see earlier texts")


def _version(row: Record) -> Version:
    body: str | None = row["body"]
    return Version(
        row["seq"],
        row["event_id"],
        row["sender_id"],
        msgspec.Raw(b"null" if body is None else body.encode()),
        row["created_at"],
        row["expired"],
    )
