"""Pages of a timeline, as ingest answers them over HTTP and the gateway on the socket (protocol §3, `page`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shared.errors import NotFoundError
from shared.postgres import from_multirange, unavailable_if_away
from shared.ranges import RangeSet, visible_head
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.postgres import Pool

_SQL = statements(__file__)
_AFTER = _SQL["page_after"]
_BEFORE = _SQL["page_before"]

MAX_PAGE_BYTES = 1024 * 1024
"""Events beyond it wait for the next page, but a page has at least one."""

_TIMEOUT_S = 5.0
_FRAME = b'{"t":"event",'


@dataclass(frozen=True, slots=True)
class Page:
    """``events``: JSON objects, ascending by seq. ``next``, ``head``, ``complete`` as the protocol says."""

    conversation_id: str
    events: list[bytes]
    next: int
    head: int
    complete: bool

    def encode(self, **first: str) -> bytes:
        """The page's bytes; ``first`` are further members in front of it (`t`, `rid`). Bodies are not parsed."""
        start = msgspec.json.encode({**first, "conversation_id": self.conversation_id})
        end = msgspec.json.encode({"next": self.next, "head": self.head, "complete": self.complete})
        return b"".join((start[:-1], b',"events":[', b",".join(self.events), b"],", end[1:]))


async def page(
    pool: Pool,
    conversation_id: str,
    user_id: str | None,
    *,
    limit: int,
    after: int | None = None,
    before: int | None = None,
) -> Page:
    """A page above ``after`` or below ``before`` (exclusive; exactly one is given) of what the user may see.

    ``user_id`` None: a service, which sees all. Raises `NotFoundError` for a conversation that is not there and for one
    that the user was never a member of, alike; `UnavailableError`.
    """
    backward = before is not None
    start = before if before is not None else after or 0
    statement = _BEFORE if backward else _AFTER
    with unavailable_if_away():
        async with pool.acquire(timeout=_TIMEOUT_S) as connection:
            rows = await connection.fetch(
                statement, conversation_id, user_id, start, limit, MAX_PAGE_BYTES, timeout=_TIMEOUT_S
            )
    if not rows:
        raise NotFoundError("no such conversation", field="conversation_id")
    visible = from_multirange(rows[0]["visible"])
    head = visible_head(visible, rows[0]["last_seq"])
    found = [(row["seq"], b"{" + row["frame"].removeprefix(_FRAME)) for row in rows if row["seq"] is not None]
    if backward:
        found.reverse()
    seqs = [seq for seq, _ in found]
    onward, complete = (before_page if backward else after_page)(start, visible, head, seqs)
    return Page(conversation_id, [event for _, event in found], onward, head, complete)


def after_page(cursor: int, visible: RangeSet, head: int, seqs: Sequence[int]) -> tuple[int, bool]:
    """`next` and `complete` of a page above ``cursor`` that holds ``seqs``, ascending.

    ``head``: the last seq that ``visible`` holds. `next` passes over what lies between it and the next visible seq.
    """
    left = visible.up_to(head) - RangeSet([(0, seqs[-1] if seqs else cursor)])
    return (head, True) if left.lowest is None else (left.lowest - 1, False)


def before_page(cursor: int, visible: RangeSet, head: int, seqs: Sequence[int]) -> tuple[int, bool]:
    """`next` and `complete` of a page below ``cursor`` that holds ``seqs``, ascending. Without any, `next` is 1."""
    left = visible.up_to(min(head, (seqs[0] if seqs else cursor) - 1))
    return seqs[0] if seqs else 1, not left
