"""The one call that writes events: locks, checks, numbers, inserts and commits, with no round trip in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import msgspec

from services.ingest.admission import refusal
from shared.clock import wire_time
from shared.errors import TimedOutError, WaybillError
from shared.postgres import OF_A_ROW, unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from uuid import UUID

    from services.ingest.admission import Send
    from shared.postgres import Pool, Record

_APPEND_EVENTS = statements(__file__)["append_events"]


class BadRowError(Exception):
    """The store refused the whole batch because of something in it; nothing was written."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it was committed: the fields of `sent` but `rid` (protocol §3)."""

    conversation_id: str
    client_msg_id: str
    event_id: str
    seq: int
    created_at: str
    duplicate: bool


Answer = Written | WaybillError
"""What one send is answered."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What depends on settings.

    ``edit_window_s``: for how long a sender may edit; ``recall_window_s``: recall and delete. None: for ever.
    ``group_size``: members that a group may have.
    """

    edit_window_s: float | None = None
    recall_window_s: float | None = None
    group_size: int = 10_000


class Writer:
    """Writes batches through a pool that has a connection for each lane. ``timeout_s`` bounds a call."""

    def __init__(self, pool: Pool, timeout_s: float, rules: Rules | None = None) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._rules = rules or Rules()

    async def write(self, sends: Sequence[Send], moderated: Collection[int] = ()) -> list[Answer]:
        """Write a batch; what was written or why not, in order. Returns after the commit.

        ``moderated``: places in the batch that moderation has refused; that is their answer, unless the store has a
        better reason. A conversation with an event other than `message` and `system` has no second event in the batch.
        Raises `BadRowError`; `UnavailableError` and `TimedOutError` if it is not known what was written.
        """
        rows = await self._call(sends, moderated, write=True)
        return [_answer(send, row) for send, row in zip(sends, rows, strict=True)]

    async def would_pass(self, sends: Sequence[Send]) -> list[bool]:
        """Which of these would be written as new if nothing changed until then. Raises as `write` does."""
        return [row["outcome"] == "new" for row in await self._call(sends, (), write=False)]

    async def _call(self, sends: Sequence[Send], moderated: Collection[int], *, write: bool) -> list[Record]:
        drafts = [send.draft for send in sends]
        with unavailable_if_away():
            try:
                async with self._pool.acquire(timeout=self._timeout_s) as connection:
                    return await connection.fetch(
                        _APPEND_EVENTS,
                        [draft.conversation_id for draft in drafts],
                        [draft.sender_id for draft in drafts],
                        [draft.client_msg_id for draft in drafts],
                        [draft.type for draft in drafts],
                        [send.digest for send in sends],
                        [None if draft.body is None else draft.body.text for draft in drafts],
                        [draft.target_seq for draft in drafts],
                        [send.as_service for send in sends],
                        [draft.action for draft in drafts],
                        [draft.subject for draft in drafts],
                        [draft.role for draft in drafts],
                        [draft.title for draft in drafts],
                        [draft.sets_title for draft in drafts],
                        [draft.traceparent for draft in drafts],
                        [send.device_id for send in sends],
                        ["moderated" if at in moderated else None for at in range(len(sends))] if moderated else None,
                        self._rules.edit_window_s,
                        self._rules.recall_window_s,
                        self._rules.group_size,
                        write,
                        timeout=self._timeout_s,
                    )
            except TimeoutError:
                raise TimedOutError("the store did not answer in time") from None
            except asyncpg.PostgresError as error:
                if (error.sqlstate or "")[:2] in OF_A_ROW:
                    raise BadRowError(f"{type(error).__name__} {error.sqlstate}") from None
                raise


def _answer(send: Send, row: Record) -> Answer:
    outcome: str = row["outcome"]
    if outcome not in ("new", "duplicate"):
        return refusal(outcome)
    event_id: UUID = row["event_id"]
    return Written(
        conversation_id=send.draft.conversation_id,
        client_msg_id=send.draft.client_msg_id,
        event_id=str(event_id),
        seq=row["seq"],
        created_at=wire_time(row["created_at"]),
        duplicate=outcome == "duplicate",
    )
