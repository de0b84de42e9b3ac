"""Events on their way to the app, in order, and the receipts, typing notices and presence it has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._frames import Event
    from .errors import Closed
    from .store import Saved, Store

BACKLOG_PAGE = 200

Value = TypeVar("Value")


class Inbox:
    """An async iterator over events; ``size`` is what the app has yet to take.

    What an earlier process stored and never handed on comes first, read from the store page by page. An event counts as
    rendered once the app asks for the next one, so that a crash while it is handled brings it again.
    """

    def __init__(self, store: Store, rendered: Callable[[Event], None]) -> None:
        self._store = store
        self._rendered = rendered
        self._events: deque[Event] = deque()
        self._backlog: deque[tuple[str, int, int]] = deque()
        self._page: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._handed: Event | None = None
        self._busy = False
        self._end: Closed | None = None
        self._ended = False

    @property
    def size(self) -> int:
        """The number of live events that wait."""
        return len(self._events)

    def begin(self, saved: list[Saved]) -> None:
        """Note what an earlier process left."""
        for one in saved:
            if one.last_rendered_seq < one.last_pulled_seq:
                self._backlog.append((one.conversation_id, one.last_rendered_seq, one.last_pulled_seq))

    def put(self, events: list[Event]) -> None:
        """Add events that are stored."""
        self._events.extend(events)
        self._wake.set()

    def forget(self, conversation_id: str, seq: int) -> None:
        """Drop what is above ``seq`` and not handed on yet."""
        self._events, self._page = (
            deque(one for one in waiting if one.conversation_id != conversation_id or one.seq <= seq)
            for waiting in (self._events, self._page)
        )
        self._backlog = deque(
            (one, after, min(upto, seq) if one == conversation_id else upto) for one, after, upto in self._backlog
        )

    def finish(self, end: Closed | None) -> None:
        """End the iteration once everything is taken; with ``end`` as its error, if there is one."""
        self._end, self._ended = end, True
        self._wake.set()

    def confirm(self) -> None:
        """Count the event handed on last as rendered."""
        if self._handed is not None:
            handed, self._handed = self._handed, None
            self._rendered(handed)

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Event:
        if self._busy:
            raise RuntimeError("events() is being iterated elsewhere")
        self._busy = True
        try:
            self.confirm()
            while True:
                if not self._page and self._backlog:
                    await self._read_backlog()
                    continue
                waiting = self._page or self._events
                if waiting:
                    self._handed = waiting.popleft()
                    return self._handed
                if self._ended:
                    raise self._end or StopAsyncIteration
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._busy = False

    async def _read_backlog(self) -> None:
        conversation_id, after, upto = self._backlog[0]
        events = await self._store.events(conversation_id, after, BACKLOG_PAGE) if after < upto else []
        page = [event for event in events if event.seq <= upto]
        if not page:
            self._backlog.popleft()
            return
        self._backlog[0] = (conversation_id, page[-1].seq, upto)
        self._page.extend(page)


class Newest(Generic[Value]):
    """An async iterator over news: bounded, since a newer one about the same takes the place of an older.

    ``lasts_s`` says for how many seconds one is worth telling; None is for ever.
    """

    def __init__(self, lasts_s: Callable[[Value], float] | None = None) -> None:
        self._lasts_s = lasts_s
        self._held: dict[object, tuple[Value, float]] = {}
        self._wake = asyncio.Event()
        self._end: Closed | None = None
        self._ended = False

    def put(self, about: object, value: Value) -> None:
        """Add one; ``about`` is what it replaces the older ones of."""
        until = inf if self._lasts_s is None else asyncio.get_running_loop().time() + self._lasts_s(value)
        self._held[about] = (value, until)
        self._wake.set()

    def finish(self, end: Closed | None) -> None:
        """See ``Inbox.finish``."""
        self._end, self._ended = end, True
        self._wake.set()

    def __aiter__(self) -> Newest[Value]:
        return self

    async def __anext__(self) -> Value:
        while True:
            while not self._held:
                if self._ended:
                    raise self._end or StopAsyncIteration
                self._wake.clear()
                await self._wake.wait()
            value, until = self._held.pop(next(iter(self._held)))
            if asyncio.get_running_loop().time() < until:
                return value
