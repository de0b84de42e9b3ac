"""Dead letters for tests of the desk: put there by hand, or by what the relay calls."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tests.relays import Writer, conversation, shard_of

if TYPE_CHECKING:
    import asyncpg

RELAY = "relay-of-tests"
TOPIC = "events.v1"
TOO_LARGE = "too large: 1200000 of 1000000 bytes"
BEGIN = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)

_BURY = """
    INSERT INTO dead_letter (
        origin, shard, outbox_id, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at,
        state, attempts, error, died_at)
    VALUES ($1, $2, $3, $4, 7, $5, 'events.v1', 'waybill.event.message', '/waybill/ingest', $6, $7, $8, $9, 2, $10, $11)
    RETURNING dead_id
"""


async def bury(
    owner: asyncpg.Connection,
    number: int = 1,
    *,
    state: str = "dead",
    origin: str = "outbox",
    headers: list[str | None] | None = None,
    payload: bytes = b'{"seq":7}',
    event_id: uuid.UUID | None = None,
    after_s: float = 0,
    outbox_id: int | None = None,
) -> int:
    """A letter of a conversation of tests that died ``after_s`` seconds after `BEGIN`; its id."""
    made: int = await owner.fetchval(
        _BURY,
        origin,
        shard_of(number),
        outbox_id,
        conversation(number),
        event_id or uuid.uuid4(),
        headers or [],
        payload,
        BEGIN,
        state,
        TOO_LARGE,
        BEGIN + timedelta(seconds=after_s),
    )
    return made


async def state_of(owner: asyncpg.Connection, dead_id: int) -> str:
    found: str = await owner.fetchval("SELECT state FROM dead_letter WHERE dead_id = $1", dead_id)
    return found


async def actions(owner: asyncpg.Connection, dead_id: int) -> list[tuple[str, str, str | None]]:
    """What was noted of a letter: action, who, reason."""
    rows = await owner.fetch(
        "SELECT action, who, reason FROM dead_letter_action WHERE dead_id = $1 ORDER BY at", dead_id
    )
    return [tuple(row) for row in rows]


async def hold(owner: asyncpg.Connection, number: int = 1) -> int:
    """Give the shard of a conversation of tests to `RELAY`, under epoch 1; its number."""
    shard = shard_of(number)
    await owner.execute(
        """
        UPDATE outbox_shard SET owner = $2, epoch = 1, lease_until = clock_timestamp() + interval '1 minute'
        WHERE shard = $1
        """,
        shard,
        RELAY,
    )
    return shard


async def park(relay: asyncpg.Connection, owner: asyncpg.Connection, outcomes: list[str], number: int = 1) -> list[int]:
    """Write a row of a conversation of tests for each outcome, and park them as the relay does; their ids."""
    shard = await hold(owner, number)
    await Writer(owner, [number]).write(len(outcomes))
    rows = await owner.fetch("SELECT id, event_id FROM outbox WHERE shard = $1 ORDER BY id", shard)
    ids = [row["id"] for row in rows][-len(outcomes) :]
    events = [row["event_id"] for row in rows][-len(outcomes) :]
    parked = await relay.fetchval(
        "SELECT park_rows($1, 1, $2, $3, '{}', '{}', '{}', '{}', $4, $5, $6, $7, $8, $9, $10)",
        RELAY,
        shard,
        ids[-1],
        ids,
        [conversation(number)] * len(ids),
        [TOPIC] * len(ids),
        events,
        outcomes,
        [None if outcome == "waiting" else TOO_LARGE for outcome in outcomes],
        [60_000 if outcome == "failed" else None for outcome in outcomes],
    )
    assert parked
    return ids


async def settle(
    relay: asyncpg.Connection, ids: list[int], outcomes: list[str], *, offset: int | None = None, number: int = 1
) -> int | None:
    """Write down what became of parked rows, as the relay does; how many are left in their queue."""
    tried = await relay.fetch(
        "SELECT attempts FROM outbox_parked WHERE shard = $1 AND id = ANY ($2) ORDER BY id", shard_of(number), ids
    )
    left: int | None = await relay.fetchval(
        "SELECT settle_parked($1, 1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        RELAY,
        shard_of(number),
        conversation(number),
        TOPIC,
        ids,
        [row["attempts"] for row in tried],
        outcomes,
        [offset if outcome == "sent" else None for outcome in outcomes],
        [None if outcome == "sent" else TOO_LARGE for outcome in outcomes],
        [60_000 if outcome == "failed" else None for outcome in outcomes],
    )
    return left


async def settle_letter(
    relay: asyncpg.Connection, dead_id: int, *, offset: int | None = None, error: str | None = None, number: int = 1
) -> bool:
    """Write down what became of a letter that was tried again, as the relay does."""
    done: bool = await relay.fetchval(
        "SELECT settle_letter($1, 1, $2, $3, (SELECT attempts FROM dead_letter WHERE dead_id = $3), $4, $5)",
        RELAY,
        shard_of(number),
        dead_id,
        offset,
        error,
    )
    return done
