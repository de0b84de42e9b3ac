"""Pages of a timeline, within what the reader may see (protocol §3 `page`, §9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shared.errors import NotFoundError
from shared.postgres import from_multirange, unavailable_if_away
from shared.ranges import RangeSet, visible_head
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.postgres import Pool

MAX_PAGE_BYTES = 1024 * 1024
"""Events beyond it wait for the next page, but a page has at least one."""

_SQL = statements(__file__)
_AFTER = _SQL["page_after"]
_BEFORE = _SQL["page_before"]

_TYPED = b'{"t":"event",'
_UNTYPED = b"{"

Direction = Literal["after", "before"]


@dataclass(frozen=True, slots=True)
class Position:
    """``next``: the cursor to go on from. ``complete``: nothing more that way."""

    next: int
    head: int
    complete: bool


def position(direction: Direction, cursor: int, visible: RangeSet, head: int, seqs: Sequence[int]) -> Position:
    """Where a page ends that began at ``cursor`` and holds ``seqs``, ascending. Pure.

    ``head`` is the conversation's; what is told is the last seq that the reader may see.
    """
    seen = visible.up_to(head)
    told = visible_head(visible, head)
    if direction == "after":
        last = seqs[-1] if seqs else min(cursor, told)
        missing = (seen - RangeSet([(0, last)])).lowest
        return Position(told if missing is None else missing - 1, told, missing is None)
    first = seqs[0] if seqs else cursor
    return Position(first, told, (seen & RangeSet([(0, first - 1)])).lowest is None)


class Timeline:
    """Timelines in the store. ``timeout_s`` bounds each call."""

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def page(
        self, conversation_id: str, reader: str | None, direction: Direction, cursor: int, limit: int
    ) -> bytes:
        """A page as JSON: `{conversation_id, events, next, head, complete}`; ``reader`` None sees all.

        The events' bodies are copied as they are stored. Raises `NotFoundError`; `UnavailableError`.
        """
        statement = _AFTER if direction == "after" else _BEFORE
        with unavailable_if_away():
            async with self._pool.acquire(timeout=self._timeout_s) as connection:
                rows = await connection.fetch(
                    statement, conversation_id, reader, cursor, limit, MAX_PAGE_BYTES, timeout=self._timeout_s
                )
        if not rows or rows[0]["visible"] is None:
            raise NotFoundError("no such conversation")
        visible, head = from_multirange(rows[0]["visible"]), rows[0]["head"]
        found = [(row["seq"], row["frame"]) for row in rows if row["seq"] is not None]
        if direction == "before":
            found.reverse()
        at = position(direction, cursor, visible, head, [seq for seq, _ in found])
        return b'{"conversation_id":"%b","events":[%b],"next":%d,"head":%d,"complete":%b}' % (
            conversation_id.encode(),
            b",".join(untyped(frame) for _, frame in found),
            at.next,
            at.head,
            b"true" if at.complete else b"false",
        )


def untyped(frame: bytes) -> bytes:
    """A stored `event` frame without its `t`."""
    return _UNTYPED + frame.removeprefix(_TYPED)
