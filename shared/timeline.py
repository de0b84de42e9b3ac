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
    from collections.abc import Iterable

    from shared.postgres import Pool

_SQL = statements(__file__)
_AFTER = _SQL["page_after"]
_BEFORE = _SQL["page_before"]

MAX_PAGE_BYTES = 1024 * 1024
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
    with unavailable_if_away():
        rows = await pool.fetch(_BEFORE if backward else _AFTER, conversation_id, user_id, start, limit)
    if not rows:
        raise NotFoundError("no such conversation", field="conversation_id")
    visible = from_multirange(rows[0]["visible"])
    head = visible_head(visible, rows[0]["last_seq"])
    found = _fitting((row["seq"], row["frame"].encode()) for row in rows if row["seq"] is not None)
    seqs = [seq for seq, _ in found]
    left = visible.up_to(head)
    if backward:
        lowest = min(seqs, default=min(start, head + 1))
        complete = not left.up_to(lowest - 1)
        found.reverse()
        onward = lowest if seqs else 1
    else:
        left -= RangeSet([(0, max(seqs, default=start))])
        complete = left.lowest is None
        onward = head if left.lowest is None else left.lowest - 1
    events = [b"{" + frame.removeprefix(_FRAME) for _, frame in found]
    return Page(conversation_id, events, onward, head, complete)


def _fitting(rows: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The first rows that fit into a page, at least one."""
    out: list[tuple[int, bytes]] = []
    size = 0
    for seq, frame in rows:
        size += len(frame)
        if out and size > MAX_PAGE_BYTES:
            break
        out.append((seq, frame))
    return out
