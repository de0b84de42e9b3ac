"""Marks against the cursors of devices, over everything or a part of it."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from uuid import UUID

from services.console.audit.findings import Finding, Report, readable
from shared.clock import Backoff
from shared.contracts.words import is_name
from shared.errors import BadRequestError
from shared.postgres import RETRIABLE, unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from shared.postgres import Pool

_SQL = statements(__file__)
_USERS = _SQL["users"]
_CONVERSATIONS_OF = _SQL["conversations_of"]
_DIFFERENCES = _SQL["differences"]
_MEND = _SQL["mend"]

BATCH = 500
"""Users that are looked at in one statement."""

_TRIES = 5

Some = TypeVar("Some")

_LOWEST, _HIGHEST = UUID(int=0), UUID(int=2**128 - 1)


class Key(NamedTuple):
    """A user in a conversation; in the order of both tables' keys."""

    conversation_id: UUID
    user_id: str


class Scope(NamedTuple):
    """What is looked at: all, a conversation, a user, or one in the other."""

    conversation_id: UUID | None = None
    user_id: str | None = None


class Repair(NamedTuple):
    """``lower``: also marks that are merely ahead of what the devices hold. ``who`` asks; it is written down."""

    who: str
    repair: bool = False
    lower: bool = False


def scope_of(conversation: str | None, user: str | None) -> Scope:
    """Raises `BadRequestError` with the field."""
    try:
        conversation_id = None if conversation is None else UUID(conversation)
    except ValueError:
        raise BadRequestError("expected a UUID", field="conversation") from None
    if user is not None and not is_name(user):
        raise BadRequestError("expected 1 to 64 characters of A–Z a–z 0–9 . _ : @ -", field="user")
    return Scope(conversation_id, user)


async def check(pool: Pool, scope: Scope, how: Repair, told: Callable[[Finding], None]) -> Report:
    """Look at every user with marks, in the order of keys; ``told`` of each difference as it is found.

    What is read is read without a lock, in short statements. A user with a difference is looked at again while nobody
    can change it, and is mended then if that is asked for. Raises `UnavailableError` if the store stays away.
    """
    report = Report()
    async for keys in _pages(pool, scope):
        report.checked += len(keys)
        suspects = await patiently(
            partial(pool.fetch, _DIFFERENCES, [key.conversation_id for key in keys], [key.user_id for key in keys])
        )
        for suspect in suspects:
            key = Key(suspect["conversation_id"], suspect["user_id"])
            rows = await patiently(partial(pool.fetch, _MEND, *key, how.repair, how.lower, how.who))
            for row in rows:
                finding = Finding(
                    kind=row["kind"],
                    conversation_id=str(key.conversation_id),
                    user_id=key.user_id,
                    device_id=row["device_id"],
                    found=readable(row["found"]),
                    wanted=readable(row["wanted"]),
                    mended=row["mended"],
                )
                report.add(finding)
                told(finding)
    return report


def complete(marks: Sequence[Key], devices: Sequence[Key], most: int) -> list[Key]:
    """The keys of both lists up to where both are known: each holds ``most`` keys, or all that there are.

    Pure. A user with many devices may fill its list alone.
    """
    ends = [keys[-1] for keys in (marks, devices) if len(keys) >= most]
    keys = sorted({*marks, *devices})
    return keys[: bisect_right(keys, min(ends))] if ends else keys


async def _pages(pool: Pool, scope: Scope) -> AsyncIterator[list[Key]]:
    conversation_id, user_id = scope
    if conversation_id is not None and user_id is not None:
        yield [Key(conversation_id, user_id)]
    elif user_id is not None:
        after = _LOWEST
        while rows := await patiently(partial(pool.fetch, _CONVERSATIONS_OF, user_id, after, BATCH)):
            keys = [Key(row["conversation_id"], row["user_id"]) for row in rows]
            yield keys
            after = keys[-1].conversation_id
    else:
        key, last = Key(conversation_id or _LOWEST, ""), conversation_id or _HIGHEST
        while keys := await _users(pool, key, last):
            yield keys
            key = keys[-1]


async def _users(pool: Pool, after: Key, last: UUID) -> list[Key]:
    rows = await patiently(partial(pool.fetch, _USERS, *after, last, BATCH))
    lists: tuple[list[Key], list[Key]] = ([], [])
    for row in rows:
        lists[row["of_device"]].append(Key(row["conversation_id"], row["user_id"]))
    return complete(*lists, BATCH)


async def patiently(call: Callable[[], Awaitable[Some]]) -> Some:
    """Call it again for a while where the store is away, or somebody holds a lock for long; then `UnavailableError`."""
    backoff = Backoff()
    for _ in range(_TRIES):
        try:
            return await call()
        except RETRIABLE:
            await asyncio.sleep(backoff.next())
    with unavailable_if_away():
        return await call()
