"""What people do to dead letters. A repeat changes nothing; a change and the note of it are one statement."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from services.console.dead.letters import look, oldest_ids
from services.console.dead.schemas import MAX_IDS, MAX_REASON, MAX_WHO, Change, refused
from shared.clock import Backoff
from shared.contracts.words import MAX_SEQ
from shared.errors import BadRequestError, ConflictError, NotFoundError, TimedOutError
from shared.logging import logger
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.console.dead.schemas import Filter, State
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_RETRY = _SQL["retry"]
_DISCARD = _SQL["discard"]

_TIMEOUT_S = 10.0
_LOOK_BASE_S = 0.1
_LOOK_CAP_S = 1.0

_SETTLED: dict[State, str] = {
    "sent": "it was sent already",
    "discarded": "it was discarded",
    "rewound": "its shard was rewound, so the relay has published it anew",
    "retrying": "it is being tried again just now",
}

_STREAMS = ("events.v1", "receipts.v1")

log = logger(__name__)


async def retry(pool: Pool, ids: Iterable[int], who: str) -> list[Change]:
    """Ask for these dead letters (at most `MAX_IDS`) to be tried again; a result each, in the order of ids.

    The relay publishes its own, a consumer processes what it has read. One that is `retrying` already stays so. Refused
    in its result: one that is not there (`not_found`), that is settled, or that nobody tries again (`conflict`). Raises
    `BadRequestError` with the field, and `UnavailableError`: then asking again is safe.
    """
    asked, by = _ids(ids), _text(who, "who", MAX_WHO)
    with unavailable_if_away():
        rows = await pool.fetch(_RETRY, asked, by, timeout=_TIMEOUT_S)
    changes = [_retried(dead_id, row) for dead_id, row in _by_id(asked, rows)]
    _tell("dead letter is tried again", changes, who=by)
    return changes


async def retry_matching(pool: Pool, wanted: Filter, who: str, *, cap: int) -> list[Change]:
    """As `retry`, for at most ``cap`` (1 to `MAX_IDS`) dead letters that match and can be, the oldest first."""
    if not 1 <= cap <= MAX_IDS:
        raise BadRequestError(f"expected a number from 1 to {MAX_IDS}", field="limit")
    _text(who, "who", MAX_WHO)
    ids = await oldest_ids(pool, replace(wanted, states=("dead",), retriable=True), cap)
    return await retry(pool, ids, who) if ids else []


async def discard(pool: Pool, ids: Iterable[int], reason: str, who: str) -> list[Change]:
    """Give these dead letters (at most `MAX_IDS`) up for good; a result each, in the order of ids.

    One that is `discarded` already keeps its first reason. Refused in its result: one that is not there (`not_found`),
    that was sent or rewound, or that is just being tried again (`conflict`). Raises as `retry` does.
    """
    asked, by, why = _ids(ids), _text(who, "who", MAX_WHO), _text(reason, "reason", MAX_REASON)
    with unavailable_if_away():
        rows = await pool.fetch(_DISCARD, asked, by, why, timeout=_TIMEOUT_S)
    changes = [_discarded(dead_id, row) for dead_id, row in _by_id(asked, rows)]
    _tell("dead letter is discarded", changes, who=by, reason=why)
    return changes


async def settled(pool: Pool, changes: Sequence[Change], timeout_s: float) -> list[Change]:
    """The same results once no letter is `retrying` any more, or after ``timeout_s``: then with the error `timeout`."""
    waiting = {change.dead_id: change for change in changes if change.state == "retrying"}
    ended: dict[int, Change] = {}
    backoff = Backoff(_LOOK_BASE_S, _LOOK_CAP_S)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while waiting:
        for letter in await look(pool, list(waiting)):
            if letter.state != "retrying":
                error = letter.error if letter.state == "dead" else None
                change = waiting.pop(letter.dead_id)
                ended[letter.dead_id] = msgspec.structs.replace(change, state=letter.state, last_error=error)
        left = deadline - asyncio.get_running_loop().time()
        if not waiting or left <= 0:
            break
        await asyncio.sleep(min(left, backoff.next()))
    late = TimedOutError(f"it is still being tried again after {timeout_s:g} s")
    ended |= {dead_id: refused(dead_id, change.state, late) for dead_id, change in waiting.items()}
    return [ended.get(change.dead_id, change) for change in changes]


def _ids(ids: Iterable[int]) -> list[int]:
    found = sorted(set(ids))
    if not 1 <= len(found) <= MAX_IDS:
        raise BadRequestError(f"expected 1 to {MAX_IDS} letters", field="ids")
    if not 1 <= found[0] <= found[-1] <= MAX_SEQ:
        raise BadRequestError("expected the numbers of letters", field="ids")
    return found


def _text(text: str, field: str, most: int) -> str:
    plain = text.strip()
    if not 1 <= len(plain) <= most or "\0" in plain:
        raise BadRequestError(f"expected 1 to {most} characters", field=field)
    return plain


def _by_id(asked: Sequence[int], rows: Sequence[Record]) -> list[tuple[int, Record | None]]:
    found = {row["dead_id"]: row for row in rows}
    return [(dead_id, found.get(dead_id)) for dead_id in asked]


def _retried(dead_id: int, row: Record | None) -> Change:
    if row is None:
        return refused(dead_id, None, NotFoundError(f"letter {dead_id}: no such dead letter"))
    before: State = row["before"]
    if row["changed"] or before == "retrying":
        return Change(dead_id, "retrying", row["changed"])
    if before != "dead":
        why = _SETTLED[before]
    elif row["origin"] in _STREAMS:
        why = (
            f"a gateway read it from {row['origin']}, and pushes what the relay publishes: retry the relay's letter, "
            "or publish the shard again (`waybill relay rewind`); this one can be discarded only"
        )
    else:
        why = f"nobody tries what was read from {row['origin']} again; it can be discarded only"
    return refused(dead_id, before, ConflictError(f"letter {dead_id}: {why}"))


def _discarded(dead_id: int, row: Record | None) -> Change:
    if row is None:
        return refused(dead_id, None, NotFoundError(f"letter {dead_id}: no such dead letter"))
    before: State = row["before"]
    if row["changed"] or before == "discarded":
        return Change(dead_id, "discarded", row["changed"])
    return refused(dead_id, before, ConflictError(f"letter {dead_id}: {_SETTLED[before]}"))


def _tell(event: str, changes: Sequence[Change], **further: str) -> None:
    for change in changes:
        if change.changed:
            log.info(event, dead_id=change.dead_id, **further)
