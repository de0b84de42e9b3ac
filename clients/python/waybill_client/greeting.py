"""What ``hello`` says of the conversations that a device holds. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .timeline import Timeline

MAX_CURSORS = 10_000
MAX_IDS = 5_000
"""``hello`` may be 1 MiB: ten thousand cursors with event ids could be more."""

Cursor = int | list[int | str]


def cursors(timelines: Collection[Timeline], since: str | None) -> tuple[dict[str, Cursor], str | None]:
    """Return the cursors to name, and ``since`` where it may be said.

    ``since`` vouches for every conversation that is not named. So where not all can be named, those come first that it
    would vouch for wrongly; if even they are too many, it is left out, and the server lists everything. Then the newest
    come first: it is their last events that a failover may have lost.
    """
    named = list(timelines)
    if len(named) > MAX_IDS:
        named.sort(key=lambda timeline: (timeline.lacks_told(), timeline.updated_at or ""), reverse=True)
    if len(named) > MAX_CURSORS:
        since = None if named[MAX_CURSORS].lacks_told() else since
        del named[MAX_CURSORS:]
    for timeline in timelines:
        timeline.hello_cursor = None
    found: dict[str, Cursor] = {}
    for number, timeline in enumerate(named):
        cursor = timeline.hello_cursor = timeline.acked_cursor()
        event_id = timeline.ids.get(cursor) if number < MAX_IDS else None
        found[timeline.conversation_id] = cursor if event_id is None else [cursor, event_id]
    return found, since
