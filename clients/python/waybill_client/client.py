"""The public client: one device of one user."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any, Literal, Self
from uuid import uuid4

from . import healing
from ._frames import ConversationSettings, Created, Event, Page, Sent, encode, settings_fields
from ._version import __version__
from .connection import Connection, OnFrame, Timing, Token
from .engine import Engine
from .errors import Closed, QueueFull, Unanswered
from .readers import Readers
from .session import Session, Settings
from .signals import Signals
from .stats import Stats
from .store import MemoryStore, Outgoing, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping
    from datetime import datetime
    from types import TracebackType

CLOSE_S = 5.0

log = logging.getLogger("waybill_client")


class Client(Signals, Readers):
    """A session that stays open: it reconnects, sends again and catches up by itself.

    Use it as an async context manager, in one event loop::

        async with Client("ws://127.0.0.1:8400/v1/socket", token, "phone-1") as client:
            await client.send(conversation_id, {"text": "hello"})

    ``url``: the gateway's socket. ``token``: a token, or an async function that returns a fresh one; the function is
    asked before each connect and when the token nears its end. If it raises ``Unauthenticated`` the client stops; any
    other error is logged and it is asked again. A fixed token stops the client when it has expired.
    ``device_id``: names this installation; a second client with the same one replaces this one.
    ``store``: where the device keeps its state, by default memory; who opened it closes it.
    ``sync``: ``full`` brings all that the store does not hold, ``live`` begins at the present.
    ``auto_ack``: an event is acked once it is stored. With False the app calls ``ack``.
    ``deliver``: False for a client that never iterates ``events()``: they are stored and acked all the same.
    ``max_queued``: events that may wait for the app before acks are held back. ``max_pending``: requests that may wait
    for an answer. ``send_timeout_s``: the default patience of ``send``, ``create`` and ``pull``, in seconds; None waits
    for ever.
    ``on_frame``: sees each frame as ``(direction, text, loop_time)``, direction ``in`` or ``out``; tokens are blanked.
    It runs within the reader, so it must be quick and must not raise.
    ``on_rewind``: told ``(conversation_id, seq)`` when the server lost what is above ``seq``: events above it are void.
    ``timing``: waits of the connection in seconds, and the sources of chance and sleep.
    ``connect_options``: further arguments of ``websockets.connect``, such as ``ssl`` or ``proxy``.
    """

    def __init__(
        self,
        url: str,
        token: Token,
        device_id: str,
        store: Store | None = None,
        sync: Literal["full", "live"] = "full",
        *,
        auto_ack: bool = True,
        deliver: bool = True,
        ack_delay_s: float = 0.1,
        ack_events: int = 50,
        max_queued: int = 1_000,
        max_pending: int = 10_000,
        send_timeout_s: float | None = 60.0,
        on_frame: OnFrame | None = None,
        on_rewind: Callable[[str, int], None] | None = None,
        timing: Timing | None = None,
        connect_options: Mapping[str, Any] | None = None,
    ) -> None:
        if sync not in ("full", "live"):
            raise ValueError(f"sync is 'full' or 'live', not {sync!r}")
        self.stats = Stats()
        self._store: Store = store if store is not None else MemoryStore()
        self._timing = timing if timing is not None else Timing(random.random)
        settings = Settings(
            client=f"waybill-client/{__version__}",
            sync=sync,
            auto_ack=auto_ack,
            ack_delay_s=ack_delay_s,
            ack_events=ack_events,
        )
        self._session = Session(device_id, settings, random=self._timing.random, stats=self.stats)
        self._engine = Engine(
            self._session,
            self._store,
            max_queued=max_queued,
            deliver=deliver,
            on_rewind=on_rewind,
            timing=self._timing,
        )
        self._connection = self._engine.connection = Connection(
            url, token, self._engine, timing=self._timing, on_frame=on_frame, options=connect_options or {}
        )
        self._max_pending = max_pending
        self._send_timeout_s = send_timeout_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Read the store and begin to connect; returns without waiting for the server (see ``ready``)."""
        if self._task is not None:
            raise RuntimeError("a Client is entered once")
        saved, outgoing = await self._store.load()
        self._session.restore(saved, outgoing, asyncio.get_running_loop().time())
        self._engine.inbox.begin(saved)
        self._task = asyncio.create_task(self._engine.run(), name=f"waybill {self._session.device_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error in the block, the event handed on last does not count as taken."""
        await self._close(taken=kind is None)

    async def close(self) -> None:
        """Store and ack what has arrived and close the socket, in a few seconds at most. A second call does nothing.

        What waits for an answer gets ``Closed``; messages not yet ``sent`` stay in the store. The event handed on last
        counts as taken. Raises what the store raises.
        """
        await self._close(taken=True)

    async def _close(self, *, taken: bool) -> None:
        task, engine = self._task, self._engine
        if task is None or engine.closed is not None:
            return
        if taken:
            engine.inbox.confirm()
        try:
            async with asyncio.timeout(CLOSE_S):
                await engine.drain()
        except TimeoutError:
            log.warning("closed before all was stored; the server sends the rest again")
        finally:
            engine.finish(Closed("closed by the app"), quiet=True)
            task.cancel()
            await asyncio.wait([task])

    async def ready(self, timeout_s: float | None = 10.0) -> None:
        """Wait until the conversations are listed for the first time.

        Raises ``Closed`` if the client has stopped, ``Unanswered`` after ``timeout_s`` seconds; its cause is then the
        last failure to connect. The client goes on trying all the same.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.listed.wait()
        except TimeoutError:
            raise Unanswered(f"no session within {timeout_s} s") from self._connection.last_failure
        self._engine.check_open()

    async def send(
        self,
        conversation_id: str,
        body: Mapping[str, Any] | None,
        type: str = "message",  # noqa: A002 -- the wire's own name
        *,
        target_seq: int | None = None,
        client_msg_id: str | None = None,
        strict: bool = False,
        timeout_s: float | None = None,
    ) -> Sent:
        """Send one event and return once the server has committed it.

        The message is stored first, then sent again with the same ``client_msg_id`` until there is an answer: across
        reconnects, and with a durable store across restarts. ``body`` must be JSON without NaN; ``edit``, ``recall``
        and ``delete`` name a ``target_seq``. With ``strict`` it leaves only when every earlier send of this
        conversation is answered, which keeps their order through errors too.

        Raises ``Refused`` (see ``errors``) if the server says no, ``Unconfirmed`` for a fault that stays,
        ``Unanswered`` after ``timeout_s`` (default: ``send_timeout_s``), ``QueueFull``, ``Closed``. After
        ``Unanswered`` or a cancellation the message stays queued and still leaves; call again with the same
        ``client_msg_id`` to wait for it.
        """
        self._engine.check_open()
        message = Outgoing(
            conversation_id.lower(),
            client_msg_id if client_msg_id is not None else str(uuid4()),
            type,
            None if body is None else encode(body),
            target_seq,
            strict=strict,
        )
        fields = message.fields()
        outbox = self._session.outbox
        outbox.check(message.key, fields)
        if message.key not in outbox and len(outbox) >= self._max_pending:
            raise QueueFull(f"{self._max_pending} requests wait already")
        timeout_s = timeout_s if timeout_s is not None else self._send_timeout_s
        await self._store.queue(message)
        sent: Sent = await self._engine.ask(message.key, fields, timeout_s, keep=True, strict=strict)
        return sent

    async def create(
        self,
        kind: Literal["direct", "group"],
        members: Iterable[str],
        title: str | None = None,
        conversation_id: str | None = None,
        history: Literal["joined", "all"] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Created:
        """Create a conversation, or find the direct one that exists.

        A group gets its id here unless one is given, so that asking again can't make a second group. Errors as with
        ``send``, but the request does not outlive this call.
        """
        fields: dict[str, Any] = {"kind": kind, "members": list(members)}
        if kind == "group":
            conversation_id = conversation_id or str(uuid4())
        optional = {"title": title, "conversation_id": conversation_id, "history": history}
        fields |= {name: value for name, value in optional.items() if value is not None}
        key = ("create", "", str(uuid4()))
        data = encode(fields)[1:]
        self._session.outbox.check(key, data)
        created: Created = await self._engine.ask(
            key, data, timeout_s if timeout_s is not None else self._send_timeout_s, keep=False
        )
        return created

    async def pull(
        self,
        conversation_id: str,
        *,
        after: int | None = None,
        before: int | None = None,
        limit: int = 100,
        timeout_s: float | None = None,
    ) -> Page:
        """Return a page of the timeline in its present state; exactly one of ``after``, ``before`` (exclusive).

        It changes no cursor and its events do not appear in ``events()``. Errors as with ``create``.
        """
        if (after is None) == (before is None):
            raise ValueError("exactly one of after and before")
        bound = {"before": before} if before is not None else {"after": after or 0}
        return await healing.pull(
            self._engine,
            conversation_id.lower(),
            {**bound, "limit": limit},
            timeout_s if timeout_s is not None else self._send_timeout_s,
        )

    async def set_settings(
        self,
        conversation_id: str,
        *,
        muted: bool | None = None,
        muted_until: datetime | None = None,
        archived: bool | None = None,
        timeout_s: float | None = None,
    ) -> ConversationSettings:
        """Set the user's own settings of a conversation, for all its devices; what is None stays as it is.

        ``muted_until``: the end of ``muted=True``, with a time zone; without it is for ever. Of two calls at once
        either may be the last. Errors as with ``create``, and ``Unsupported`` from a server that is older.
        """
        conversation_id = conversation_id.lower()
        settings: ConversationSettings = await self._engine.ask(
            ("settings", conversation_id, str(uuid4())),
            settings_fields(conversation_id, muted=muted, muted_until=muted_until, archived=archived),
            timeout_s if timeout_s is not None else self._send_timeout_s,
            keep=False,
        )
        return settings

    def events(self) -> AsyncIterator[Event]:
        """Iterate over what happens, each seq once, in order per conversation; what is stored already comes first.

        There is one stream per client: a second loop goes on where the first stopped, two at once raise
        ``RuntimeError``. It ends when the client is closed, and raises ``Closed`` if it stopped by itself. Cancelling
        loses nothing. An event counts as taken when the next one is asked for.
        """
        return self._engine.inbox

    @property
    def user_id(self) -> str | None:
        """The user this client acts as; None before the first session."""
        return self._session.user_id

    @property
    def closed(self) -> Closed | None:
        """Why the client has stopped for good, None while it works."""
        return self._engine.closed
