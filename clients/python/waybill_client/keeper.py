"""The one writer of the store: what arrives is stored in batches, then acked and handed to the app, in that order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ._frames import Event, Sent
from .errors import Conflict
from .outbox import Key
from .outputs import Output, Rewound
from .store import Saved, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from .inbox import Inbox
    from .session import Session

RENDERED_DELAY_S = 0.1
"""How long the note that the app took an event may wait; a crash within it hands those events on again."""

Settled = tuple[Key, Sent | None, str | None]
"""An own message with its answer, or with its error code."""
Job = Event | Rewound | Settled


class Keeper:
    """Collects jobs while the store is busy, so that a durable store commits once for many events.

    An app that takes events more slowly than they come holds the acks back: over ``max_queued`` waiting events none
    leaves until half of them is taken. The server's window then closes, and it keeps nothing for this device but a
    cursor. Reading goes on, since the answers to requests come over the same socket.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        inbox: Inbox,
        dispatch: Callable[[list[Output]], None],
        *,
        max_queued: int,
        deliver: bool,
        on_rewind: Callable[[str, int], None] | None,
    ) -> None:
        self._session = session
        self._store = store
        self._inbox = inbox
        self._dispatch = dispatch
        self._max_queued = max_queued
        self._deliver = deliver
        self._on_rewind = on_rewind
        self._jobs: list[Job] = []
        self._arrived = 0
        self._touched: set[str] = set()
        self._rendered: dict[str, int] = {}
        self._held: dict[str, list[int]] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._saving = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, job: Job) -> None:
        """Queue something to store."""
        self._jobs.append(job)
        if isinstance(job, Event):
            self._arrived += 1
            self._touched.add(job.conversation_id)
        elif isinstance(job, Rewound):
            self._inbox.forget(job.conversation_id, job.seq)
            self._held.pop(job.conversation_id, None)
            self._rendered.pop(job.conversation_id, None)
        self._wake.set()

    def touch(self, conversation_id: str) -> None:
        """Queue a conversation's cursors and marks to be stored."""
        self._touched.add(conversation_id)
        self._wake.set()

    def rendered(self, event: Event) -> None:
        """The app has taken an event."""
        self._rendered[event.conversation_id] = event.seq
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RENDERED_DELAY_S, self._rendered_due)
        if self._held and self._inbox.size <= self._max_queued // 2:
            held, self._held = self._held, {}
            self._release(held)
        self._room.set()

    async def run(self) -> None:
        """Store what comes, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()  # here, not in the batch: a wake-up that finds nothing to store must not come again
            await self.save()

    async def save(self) -> None:
        """Store all that is queued."""
        async with self._saving:
            while self._jobs or self._touched or self._rendered:
                await self._save_batch()

    async def room(self) -> None:
        """Return once the app has taken enough of what waits.

        Only for a server that does not keep to its window: acks are held back long before this.
        """
        limit = self._max_queued + 4 * self._session.window
        while self._arrived + self._inbox.size > limit:
            self._room.clear()
            await self._room.wait()

    def stop(self) -> None:
        """Take no more notes of time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _save_batch(self) -> None:
        jobs, self._jobs = self._jobs, []
        touched, self._touched = self._touched, set()
        rendered, self._rendered = self._rendered, {}
        # Read before the first await: each cursor then stands at the last event of this very batch.
        saved = [one for conversation_id in touched if (one := self._saved(conversation_id)) is not None]
        events: list[Event] = []
        for job in jobs:
            if isinstance(job, Event):
                events.append(job)
            elif isinstance(job, Rewound):
                await self._store.save(events, [], {})
                self._hand_on(events)
                events = []
                self._inbox.forget(job.conversation_id, job.seq)
                await self._rewind(job)
            else:
                await self._store.settle(*job)
        if not self._deliver:
            rendered |= {event.conversation_id: event.seq for event in events}
        if events or saved or rendered:
            await self._store.save(events, saved, rendered)
        self._hand_on(events)

    def _hand_on(self, events: list[Event]) -> None:
        if not events:
            return
        self._arrived -= len(events)
        if self._deliver:
            self._inbox.put(events)
        seqs: dict[str, list[int]] = {}
        for event in events:
            seqs.setdefault(event.conversation_id, []).append(event.seq)
        if self._inbox.size <= self._max_queued:
            self._release(seqs)
            self._room.set()
            return
        self._session.stats.acks_held += len(events)
        for conversation_id, more in seqs.items():
            self._held.setdefault(conversation_id, []).extend(more)

    def _release(self, seqs: dict[str, list[int]]) -> None:
        now = asyncio.get_running_loop().time()
        for conversation_id, some in seqs.items():
            self._dispatch(self._session.stored(conversation_id, some, now))

    async def _rewind(self, job: Rewound) -> None:
        again = await self._store.rewind(job.conversation_id, job.seq, self._session.user_id)
        if self._on_rewind is not None:
            self._on_rewind(job.conversation_id, job.seq)
        now = asyncio.get_running_loop().time()
        for message in again:
            if (message.target_seq or 0) > job.seq:
                # Its target went too, and that seq will be another event's.
                await self._store.settle(message.key, None, Conflict.code)
            else:
                self._dispatch(self._session.request(message.key, message.fields(), now, strict=message.strict))

    def _rendered_due(self) -> None:
        self._timer = None
        self._wake.set()

    def _saved(self, conversation_id: str) -> Saved | None:
        timeline = self._session.timelines.get(conversation_id)
        if timeline is None:
            return None
        return Saved(
            conversation_id,
            last_pulled_seq=timeline.cursor,
            acked_seq=timeline.acked_cursor(),
            read_version=timeline.mark[0],
            read_seq=timeline.mark[1],
            event_id=timeline.ids.get(timeline.cursor),
        )
