"""Reading dead letters: a page of them, and one with all that is known of it."""

from __future__ import annotations

import base64
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

import msgspec

from services.console.dead.schemas import Action, Detail, Letter, Page, Place, Reading, Try
from shared.clock import wire_time
from shared.contracts.words import MAX_SEQ, UUID
from shared.errors import BadRequestError, NotFoundError
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import asyncpg

    from services.console.dead.schemas import Filter
    from shared.postgres import Pool, Record

MAX_LIMIT = 500

_SQL = statements(__file__)
_NEWEST = _SQL["newest"]
_OLDEST = _SQL["oldest"]
_LETTERS = _SQL["letters"]
_OF_EVENT = _SQL["of_event"]
_CONTENTS = _SQL["contents"]
_TRIES = _SQL["tries"]
_ACTIONS = _SQL["actions"]

_TIMEOUT_S = 5.0

_AFTER = re.compile(r"\A(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z)_(\d{1,19})\Z")
_UUID = re.compile(UUID)
_DIGITS = re.compile(r"\A[0-9]{1,19}\Z")


async def page(pool: Pool, wanted: Filter, *, newest: bool = True, after: str | None = None, limit: int = 50) -> Page:
    """At most ``limit`` (1 to 500) letters that match, by their deaths, behind the page that said ``after``.

    Raises `BadRequestError` with the field, `UnavailableError`.
    """
    if not 1 <= limit <= MAX_LIMIT:
        raise BadRequestError(f"expected a number from 1 to {MAX_LIMIT}", field="limit")
    at, dead_id = _position(after) if after is not None else _start(newest=newest)
    async with _snapshot(pool) as connection:
        statement = _NEWEST if newest else _OLDEST
        ids = [row[0] for row in await connection.fetch(statement, *_parameters(wanted), at, dead_id, limit + 1)]
        rows = await connection.fetch(_LETTERS, ids[:limit])
    onward = f"{wire_time(rows[-1]['died_at'])}_{rows[-1]['dead_id']}" if len(ids) > limit else None
    return Page([_letter(row) for row in rows], onward)


async def show(pool: Pool, name: str) -> Detail:
    """The letter with this id, or the newest one of the event with this id.

    Raises `BadRequestError` for a name that is neither, `NotFoundError`, `UnavailableError`.
    """
    async with _snapshot(pool) as connection:
        if _UUID.match(name):
            dead_id = await connection.fetchval(_OF_EVENT, name)
        elif _DIGITS.match(name) and int(name) <= MAX_SEQ:
            dead_id = int(name)
        else:
            raise BadRequestError("expected a letter's number or an event's UUID", field="dead_id")
        row = await connection.fetchrow(_LETTERS, [dead_id])
        if row is None:
            raise NotFoundError("no such dead letter")
        contents = await connection.fetchrow(_CONTENTS, dead_id)
        tries = await connection.fetch(_TRIES, dead_id)
        actions = await connection.fetch(_ACTIONS, dead_id)
    assert contents is not None
    encoding, payload = readable(contents["payload"])
    return Detail(
        **msgspec.structs.asdict(_letter(row)),
        source=contents["source"],
        headers=pairs(contents["headers"]),
        payload_encoding=encoding,
        payload=payload,
        redriven_at=_time(contents["redriven_at"]),
        tries=[Try(t["attempt"], wire_time(t["at"]), t["error"], t["owner"], t["epoch"]) for t in tries],
        actions=[Action(wire_time(a["at"]), a["action"], a["who"], a["reason"]) for a in actions],
    )


async def oldest_ids(pool: Pool, wanted: Filter, limit: int) -> list[int]:
    """The ids of at most ``limit`` letters that match, those that died first. Raises `UnavailableError`."""
    with unavailable_if_away():
        rows = await pool.fetch(_OLDEST, *_parameters(wanted), *_start(newest=False), limit, timeout=_TIMEOUT_S)
    return [row[0] for row in rows]


async def look(pool: Pool, ids: Sequence[int]) -> list[Letter]:
    """These letters, as they are now; those that are not there are left out. Raises `UnavailableError`."""
    with unavailable_if_away():
        return [_letter(row) for row in await pool.fetch(_LETTERS, ids, timeout=_TIMEOUT_S)]


def readable(payload: bytes) -> tuple[Literal["json", "base64"], msgspec.Raw]:
    """A payload as a JSON value: its own text if it is JSON, digits and spaces included, else base64 in a string."""
    try:
        payload.decode()
        return "json", msgspec.json.decode(payload, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "base64", msgspec.Raw(msgspec.json.encode(base64.b64encode(payload).decode()))


def text_or_base64(key: bytes | None) -> tuple[Literal["text", "base64"] | None, str | None]:
    """A record's key as it can be told; None for none."""
    if key is None:
        return None, None
    try:
        return "text", key.decode()
    except UnicodeDecodeError:
        return "base64", base64.b64encode(key).decode()


def pairs(headers: Sequence[str | None]) -> list[tuple[str | None, str | None]]:
    """A row's list of names and values as pairs; the last value is None where the list is odd."""
    return list(zip_longest(headers[::2], headers[1::2]))


@asynccontextmanager
async def _snapshot(pool: Pool) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy[Record]]:
    with unavailable_if_away():
        async with (
            pool.acquire(timeout=_TIMEOUT_S) as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            yield connection


def _start(*, newest: bool) -> tuple[datetime, int]:
    return (datetime.max.replace(tzinfo=UTC), MAX_SEQ) if newest else (datetime.min.replace(tzinfo=UTC), 0)


def _position(after: str) -> tuple[datetime, int]:
    found = _AFTER.match(after)
    if found is None or int(found[2]) > MAX_SEQ:
        raise BadRequestError("expected the `next` of a page", field="after")
    try:
        return datetime.fromisoformat(found[1]), int(found[2])
    except ValueError:
        raise BadRequestError("expected the `next` of a page", field="after") from None


def _parameters(wanted: Filter) -> tuple[Sequence[str], str | None, str | None, int | None, str | None, bool]:
    return wanted.states, wanted.conversation_id, wanted.event_id, wanted.shard, wanted.origin, wanted.retriable


def _letter(row: Record) -> Letter:
    offset = row["kafka_offset"]
    read_at = row["origin_offset"]
    encoding, key = text_or_base64(row["record_key"])
    return Letter(
        dead_id=row["dead_id"],
        state=row["state"],
        origin=row["origin"],
        shard=row["shard"],
        outbox_id=row["outbox_id"],
        conversation_id=row["conversation_id"],
        seq=row["seq"],
        event_id=row["event_id"],
        topic=row["topic"],
        type=row["type"],
        payload_bytes=row["payload_bytes"],
        attempts=row["attempts"],
        error=row["error"],
        created_at=wire_time(row["created_at"]),
        died_at=wire_time(row["died_at"]),
        settled_at=_time(row["settled_at"]),
        retry=row["retry"],
        place=None if offset is None else Place(row["topic"], row["shard"], offset),
        read_from=None
        if read_at is None
        else Reading(row["origin"], row["origin_partition"], read_at, row["origin_cluster"]),
        key=key,
        key_encoding=encoding,
        payload_cut_from=row["cut_from"],
    )


def _time(at: datetime | None) -> str | None:
    return None if at is None else wire_time(at)
