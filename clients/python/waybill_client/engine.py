"""What a client does behind its public face: carries outputs out, stores before it acks, keeps time.

Owns all tasks. The way of an event: socket → ``Session.receive`` → ``Deliver`` → store → ack and ``Inbox``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from . import healing
from ._frames import (
    ConversationSettings,
    Created,
    Event,
    MessageReceipts,
    Page,
    Presence,
    Receipt,
    Sent,
    Typing,
    encode,
)
from .errors import Closed, Crashed, Unanswered, Unauthenticated, WaybillError
from .inbox import Inbox, Newest
from .keeper import Keeper
from .outputs import (
    Answered,
    Changed,
    Deliver,
    Disagrees,
    Failed,
    GoAway,
    Listed,
    Output,
    ReceiptGrew,
    Rewound,
    Seen,
    TokenWanted,
    Typed,
    Welcomed,
    Write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .connection import Connection, Timing
    from .outbox import Key
    from .session import Session
    from .store import Store

log = logging.getLogger("waybill_client")

Answer = Sent | Created | Page | ConversationSettings | MessageReceipts


class Engine:
    """Session, store and socket put together. All methods run in the client's event loop."""

    def __init__(
        self,
        session: Session,
        store: Store,
        *,
        max_queued: int,
        deliver: bool,
        on_rewind: Callable[[str, int], None] | None,
        timing: Timing,
    ) -> None:
        self.session = session
        self.store = store
        self.random, self.sleep = timing.random, timing.sleep
        self.inbox = Inbox(store, self._rendered)
        self.keeper = Keeper(
            session,
            store,
            self.inbox,
            self.dispatch,
            max_queued=max_queued,
            deliver=deliver,
            on_rewind=on_rewind,
        )
        self.receipts = Newest[Receipt]()
        self.typings = Newest[Typing](lambda typing: typing.for_ms / 1000)
        self.presences = Newest[Presence]()
        self.connection: Connection
        self.closed: Closed | None = None
        self.listed = asyncio.Event()
        self._waiters: dict[Key, list[asyncio.Future[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._group: asyncio.TaskGroup

    # Life.

    async def run(self) -> None:
        """Work until the connection ends for good, or until cancelled; never raises anything else."""
        stop: Closed
        try:
            async with asyncio.TaskGroup() as self._group:
                keeper = self._group.create_task(self.keeper.run())
                stop = await self.connection.run()
                keeper.cancel()
        except Exception as error:
            log.exception("the client crashed")
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            stop = Crashed(f"{type(cause).__name__}: {cause}")
            stop.__cause__ = error
        self.finish(stop, quiet=False)

    def finish(self, stop: Closed, *, quiet: bool) -> None:
        """Let nobody wait any longer. ``quiet`` = the app itself closed, so its iterators just end."""
        if self.closed is not None:
            return
        self.closed = stop
        self.keeper.stop()
        if self._timer is not None:
            self._timer.cancel()
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(stop)
        self._waiters.clear()
        self.inbox.finish(None if quiet else stop)
        for news in (self.receipts, self.typings, self.presences):
            news.finish(None if quiet else stop)
        self.listed.set()

    async def drain(self) -> None:
        """Store and ack what has arrived; called while the connection still stands."""
        await self.keeper.save()
        self.dispatch(self.session.flush_acks())
        await self.connection.flush()

    # Requests.

    async def ask(self, key: Key, fields: bytes, timeout_s: float | None, *, keep: bool, strict: bool = False) -> Any:
        """Begin a request and wait for its answer. ``keep`` = it goes on when the caller gives up."""
        self.check_open()
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        self.dispatch(self.session.request(key, fields, self._now(), strict=strict))
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise Unanswered(f"no answer within {timeout_s} s") from None
        finally:
            waiters = self._waiters.get(key, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[key]
                    if not keep:
                        self.session.outbox.answered(key)

    def check_open(self) -> None:
        """Raise why the client is closed, if it is."""
        if self.closed is not None:
            raise self.closed

    # The connection's peer; see there.

    def hello(self, token: str) -> Mapping[str, Any]:
        """Return the first frame of a connection."""
        return self.session.hello(token)

    def receive(self, frame: Mapping[str, Any]) -> None:
        """Take a frame."""
        self.dispatch(self.session.receive(frame, self._now()))

    def disconnected(self) -> None:
        """The connection is over."""
        self.session.disconnected()
        self.session.stats.connect_failures = self.connection.failures

    async def room(self) -> None:
        """Return once more can be taken."""
        await self.keeper.room()

    # Outputs.

    def dispatch(self, outputs: list[Output]) -> None:
        """Carry out what the session wants."""
        for output in outputs:
            match output:
                case Write(data):
                    self.connection.write(data)
                case Deliver(event):
                    self.keeper.add(event)
                case Answered(key, value):
                    self._end(key, value, None)
                case Failed(key, error):
                    self._end(key, None, error)
                case Changed(conversation_id):
                    self.keeper.touch(conversation_id)
                case ReceiptGrew(receipt):
                    self.receipts.put((receipt.conversation_id, receipt.user_id), receipt)
                case Rewound():
                    self.keeper.add(output)
                case _:
                    self._steer(output)
        self._arm()

    def _steer(self, output: Output) -> None:
        match output:
            case Disagrees(conversation_id):
                self._group.create_task(healing.heal(self, conversation_id))
            case Welcomed():
                self.connection.welcomed()
            case Listed():
                self.listed.set()
            case Typed(typing):
                self.typings.put((typing.conversation_id, typing.user_id), typing)
            case Seen(presence):
                self.presences.put(presence.user_id, presence)
            case TokenWanted():
                self._group.create_task(self._renew_token())
            case GoAway(after_s, reason):
                log.info("asked to reconnect in %.2f s: %s", after_s, reason)
                self.connection.leave(after_s)

    def _rendered(self, event: Event) -> None:
        self.keeper.rendered(event)

    def _end(self, key: Key, value: Answer | None, error: WaybillError | None) -> None:
        waiters = self._waiters.pop(key, [])
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(value)
            else:
                waiter.set_exception(error)
        if error is not None and not waiters:
            log.error("%s of an earlier run was refused: %s %s", key, error.code, error)
        if key[0] == "send":
            self.keeper.add((key, value if isinstance(value, Sent) else None, error.code if error else None))

    async def _renew_token(self) -> None:
        try:
            token = await self.connection.fresh_token()
        except Unauthenticated:
            return
        except Exception:
            # The session ends with 4401 if nothing better comes; the provider is asked again then.
            log.warning("the token provider failed", exc_info=True)
            return
        if token is not None:
            self.connection.write(encode({"t": "token", "token": token}))

    # Time.

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _arm(self) -> None:
        at = self.session.next_at()
        if at is None or self.closed is not None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.dispatch(self.session.tick(self._now()))
