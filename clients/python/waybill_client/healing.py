"""Finding the last event on which this device and the server agree, after the server lost commits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from uuid import uuid4

from ._frames import Page, encode
from .errors import WaybillError

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("waybill_client")

PAGE = 200
ANSWER_S = 30.0


async def heal(engine: Engine, conversation_id: str) -> None:
    """Pull ``before`` until a held event id agrees, drop what is above, and say hello again."""
    session = engine.session
    timeline = session.timeline(conversation_id)
    before = max(timeline.cursor, timeline.head) + 1
    try:
        while True:
            page: Page = await pull(engine, conversation_id, {"before": before, "limit": PAGE}, ANSWER_S)
            agreed = await _last_agreed(engine, page)
            if agreed is not None or page.complete or not page.events:
                break
            before = page.next
    except WaybillError as error:
        log.warning("could not compare %s with the server: %s", conversation_id, error)
        session.heal_failed(conversation_id)
        return
    engine.dispatch(session.rewind(conversation_id, agreed or 0))
    await engine.keeper.save()
    engine.connection.leave(0.0)


async def pull(engine: Engine, conversation_id: str, fields: dict[str, int], timeout_s: float | None) -> Page:
    """Ask for one page."""
    key = ("pull", conversation_id, str(uuid4()))
    data = encode({"conversation_id": conversation_id, **fields})[1:]
    page: Page = await engine.ask(key, data, timeout_s, keep=False)
    return page


async def _last_agreed(engine: Engine, page: Page) -> int | None:
    held = engine.session.timeline(page.conversation_id).ids
    for event in reversed(page.events):
        # The session's memory comes first: what it took last may not be in the store yet.
        ours = held.get(event.seq) or await engine.store.event_id(page.conversation_id, event.seq)
        if ours == event.event_id:
            return event.seq
    return None
