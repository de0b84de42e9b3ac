"""Copies of events: rows that are parked and letters that died, as the relay makes them, and what is in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shared.kafka import partition_of

if TYPE_CHECKING:
    from tests.timeline_stage import Stage

RELAY = "relay-of-tests"


async def park(
    connection: Any, stage: Stage, conversation_id: str, outcomes: dict[int, str], *, topic: str = "events.v1"
) -> None:
    """Park these seqs of a conversation, as the relay that holds the shard does."""
    shard = partition_of(conversation_id)
    await stage.owner.execute(
        "UPDATE outbox_shard SET owner = $2, epoch = 1, cursor_id = 0 WHERE shard = $1", shard, RELAY
    )
    rows = await stage.owner.fetch(
        "SELECT id, seq, event_id FROM outbox WHERE conversation_id = $1 AND seq = ANY ($2) ORDER BY id",
        conversation_id,
        list(outcomes),
    )
    told = [outcomes[row["seq"]] for row in rows]
    done = await connection.fetchval(
        "SELECT park_rows($1, 1, $2, $3, '{}', '{}', '{}', '{}', $4, $5, $6, $7, $8, $9, $10)",
        RELAY,
        shard,
        rows[-1]["id"],
        [row["id"] for row in rows],
        [conversation_id] * len(rows),
        [topic] * len(rows),
        [row["event_id"] for row in rows],
        told,
        [None if outcome == "waiting" else "too large" for outcome in told],
        [60_000 if outcome == "failed" else None for outcome in told],
    )
    assert done


async def settle(stage: Stage, conversation_id: str, outcomes: dict[int, str]) -> None:
    """Write down what became of parked rows."""
    rows = await stage.owner.fetch(
        "SELECT p.id, o.seq, p.attempts FROM outbox_parked AS p JOIN outbox AS o USING (shard, id)"
        " WHERE p.conversation_id = $1 AND o.seq = ANY ($2) ORDER BY p.id",
        conversation_id,
        list(outcomes),
    )
    told = [outcomes[row["seq"]] for row in rows]
    await stage.relay.fetchval(
        "SELECT settle_parked($1, 1, $2, $3, 'events.v1', $4, $5, $6, $7, $8, $9)",
        RELAY,
        partition_of(conversation_id),
        conversation_id,
        [row["id"] for row in rows],
        [row["attempts"] for row in rows],
        told,
        [7 if outcome == "sent" else None for outcome in told],
        [None if outcome == "sent" else "too large" for outcome in told],
        [60_000 if outcome == "failed" else None for outcome in told],
    )


async def copies(stage: Stage, conversation_id: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The frames of dead letters and of parked rows, by ('letter' or 'row', seq)."""
    rows = await stage.owner.fetch(
        """
        SELECT 'letter' AS what, d.seq, d.payload FROM dead_letter AS d WHERE d.conversation_id = $1
        UNION ALL
        SELECT 'row', o.seq, o.payload FROM outbox_parked AS p JOIN outbox AS o ON o.shard = p.shard AND o.id = p.id
        WHERE p.conversation_id = $1
        """,
        conversation_id,
    )
    return {(row["what"], row["seq"]): json.loads(row["payload"]) for row in rows}
