"""Finding the last event on which this device and the server agree, after the server lost commits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from uuid import uuid4

from . import reconnect
from ._frames import Page, encode
from .errors import RateLimited, Refused, WaybillError

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("waybill_client")

PAGE = 200
ANSWER_S = 30.0


async def heal(engine: Engine, conversation_id: str) -> None:
    """Pull ``before`` until a held event id agrees, drop what is above, and say hello again."""
    backoff = reconnect.Backoff(engine.random)
    while engine.closed is None:
        try:
            seq = await _last_agreed(engine, conversation_id)
        except WaybillError as error:
            log.warning("could not compare %s with the server: %s", conversation_id, error)
            if isinstance(error, Refused) and not isinstance(error, RateLimited):
                engine.session.heal_failed(conversation_id)
                return
            # The server pushes nothing of the conversation until then, so nothing else would bring this about.
            await engine.sleep(backoff.wait_s(lived_s=0.0, code=None, after_s=None))
            continue
        engine.dispatch(engine.session.rewind(conversation_id, seq))
        await engine.keeper.save()
        engine.connection.leave(None)
        return


async def pull(engine: Engine, conversation_id: str, fields: dict[str, int], timeout_s: float | None) -> Page:
    """Ask for one page."""
    key = ("pull", conversation_id, str(uuid4()))
    data = encode({"conversation_id": conversation_id, **fields})[1:]
    page: Page = await engine.ask(key, data, timeout_s, keep=False)
    return page


async def _last_agreed(engine: Engine, conversation_id: str) -> int:
    """Return the highest seq up to which both hold the same; where nothing is, the one below all that is held here.

    What lies below that was never here (a device that began at the present), or is not kept any more. Every event of a
    page is compared, not only the last ones: events of the new timeline may have been pushed on top of lost ones before
    anybody noticed the loss.
    """
    timeline = engine.session.timeline(conversation_id)
    first = await engine.store.events(conversation_id, 0, 1)
    held = [*timeline.ids, *(event.seq for event in first)]
    floor = min(held) - 1 if held else timeline.cursor
    before = max(timeline.cursor, timeline.head) + 1
    agreed: int | None = None
    while True:
        page = await pull(engine, conversation_id, {"before": before, "limit": PAGE}, ANSWER_S)
        for event in reversed(page.events):
            # The session's memory comes first: what it took last may not be stored yet. A promised id says nothing
            # here: it may be of the server's new timeline, while what is held below is of the old one.
            ours = timeline.ids.get(event.seq) or await engine.store.event_id(conversation_id, event.seq)
            if ours is not None and ours != event.event_id:
                agreed = None
            elif ours is not None and agreed is None:
                agreed = event.seq
        if agreed is not None:
            return agreed
        if page.complete or not page.events or page.next <= floor + 1 or page.next >= before:
            return min(floor, page.head)
        before = page.next
