"""The shards of the outbox: what holds them, and what people do to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import asyncpg
import msgspec
from msgspec import Meta

from shared.clock import wire_time
from shared.contracts.words import MAX_SEQ
from shared.errors import BadRequestError, ConflictError
from shared.logging import logger
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_SQL = statements(__file__)
_SHARDS = _SQL["shards"]
_REWIND = _SQL["rewind"]
_RESUME = _SQL["resume"]

_TIMEOUT_S = 10.0
_REWIND_S = 30.0
"""It forgets what was noted of every row since."""

_MAX_WHO = 200

OutboxId = Annotated[int, Meta(ge=1, le=MAX_SEQ)]

log = logger(__name__)


class Shard(msgspec.Struct, frozen=True):
    """A shard. ``held``: its lease lasts, by the database's clock. ``parked``: rows that wait or are tried again."""

    shard: int
    owner: str | None
    epoch: int
    lease_until: str | None
    held: bool
    cursor_id: Annotated[int, Meta(description="Every row up to it is in Kafka, parked or dead.")]
    stopped_at: str | None
    stopped_reason: Annotated[str | None, Meta(description="Why it stands still; null while it moves.")]
    parked: int


class Shards(msgspec.Struct, frozen=True):
    """All of them, by number."""

    shards: list[Shard]


class Rewind(msgspec.Struct, frozen=True):
    """The id of the outbox from which on a shard is published again."""

    id: OutboxId


class Rewound(msgspec.Struct, frozen=True):
    """A shard that is published again from ``id`` on; its cursor stood at ``cursor_before``."""

    shard: int
    id: int
    cursor_before: int
    ids_back: Annotated[
        int, Meta(description="How many ids of the whole outbox lie between: other shards' among them.")
    ]


class Resumed(msgspec.Struct, frozen=True):
    """``changed``: whether the shard stood still."""

    shard: int
    changed: bool


async def shards(pool: Pool) -> Shards:
    """Every shard as it is now. Raises `UnavailableError`."""
    with unavailable_if_away():
        rows = await pool.fetch(_SHARDS, timeout=_TIMEOUT_S)
    return Shards(
        [
            Shard(
                shard=row["shard"],
                owner=row["owner"],
                epoch=row["epoch"],
                lease_until=wire_time(row["lease_until"]) if row["lease_until"] else None,
                held=row["held"],
                cursor_id=row["cursor_id"],
                stopped_at=wire_time(row["stopped_at"]) if row["stopped_at"] else None,
                stopped_reason=row["stopped_reason"],
                parked=row["parked"],
            )
            for row in rows
        ]
    )


async def rewind(pool: Pool, shard: int, from_id: int, who: str) -> Rewound:
    """Have a shard published again from an id on; readers of Kafka then see its records twice.

    Raises `BadRequestError` with the field, `ConflictError` for an id that was not published yet or is not kept any
    more, `UnavailableError`.
    """
    _check(shard)
    if not 1 <= from_id <= MAX_SEQ:
        raise BadRequestError("expected an id of the outbox", field="id")
    by = who.strip()
    if not 1 <= len(by) <= _MAX_WHO or "\0" in by:
        raise BadRequestError(f"expected 1 to {_MAX_WHO} characters", field="who")
    with unavailable_if_away():
        try:
            before: int = await pool.fetchval(_REWIND, shard, from_id, by, timeout=_REWIND_S)
        except asyncpg.RaiseError as error:
            raise ConflictError(str(error), field="id") from None
    log.info("shard is rewound", shard=shard, from_id=from_id, cursor_before=before, who=by)
    return Rewound(shard, from_id, before, before - from_id + 1)


async def resume(pool: Pool, shard: int, who: str) -> Resumed:
    """Let a shard go on; one that did not stand still is left alone. Raises `BadRequestError`, `UnavailableError`."""
    _check(shard)
    with unavailable_if_away():
        changed: bool = await pool.fetchval(_RESUME, shard, timeout=_TIMEOUT_S)
    if changed:
        log.info("shard is resumed", shard=shard, who=who)
    return Resumed(shard, changed)


def _check(shard: int) -> None:
    if not 0 <= shard <= 63:
        raise BadRequestError("expected a number from 0 to 63", field="shard")
