"""A session's beginning: whom it speaks for, its number, its conversations. Hellos that come together share reads."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from services.gateway import noting
from services.gateway.close import Close
from services.gateway.greeting import Found, tell
from services.gateway.listing import (
    changed_since,
    conversations_of_users,
    list_conversations,
    store_incarnation,
)
from services.gateway.loading import Begin
from services.gateway.since import known_since
from shared.auth import bearer
from shared.contracts import frames
from shared.errors import BadRequestError, UnauthenticatedError, UnavailableError, WaybillError
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from services.gateway.connection import Connection
    from services.gateway.fanout import Fanout
    from services.gateway.listing import Belongings
    from services.gateway.opening import Opened, Opener
    from services.gateway.since import Since
    from shared.auth import Claims
    from shared.contracts.frames import Hello
    from shared.postgres import Pool

_GATHER_S = 0.008
_MOST = 200
_MOST_ROWS = 2_000


async def greet(connection: Connection, data: str | bytes) -> None:
    """Take the first message of a session, list its conversations, and open it; or end it."""
    try:
        said = _as_hello(data)
        claims = await _claims(connection, said)
        connection.begin(said.device_id, claims)
        await connection.parts.greeter.open(connection, claims)
        await connection.parts.greeter.tell(connection, said)
        if not connection.ended:
            connection.open()
            connection.release()
    except Close as close:
        connection.end(close)
    except UnavailableError as error:
        after_ms = random.randint(500, 2000)
        connection.say({"t": "reconnect", "after_ms": after_ms, "reason": error.message})
        connection.end(Close(4503, error.message))
    except Exception:  # noqa: BLE001 - one session's fault is not the service's
        logger(__name__).exception("a session could not begin")
        connection.broken()


def _as_hello(data: str | bytes) -> Hello:
    if isinstance(data, bytes):
        raise Close(4400, "t: a binary frame")
    try:
        said = frames.parse(data)
    except BadRequestError as error:
        raise Close(4400, f"{error.field}: {error.message}") from None
    if not isinstance(said, frames.Hello):
        raise Close(4400, "t: expected a hello")
    return said


async def _claims(connection: Connection, said: Hello) -> Claims:
    """Whom the session speaks for. A token in the request's headers beats the one in `hello`."""
    headers = connection.wire.authorization
    if len(headers) > 1:
        raise Close(4401, "one Authorization header, not several")
    try:
        claims = await connection.parts.verifier.verify(bearer(next(iter(headers), None)) or said.token)
    except UnauthenticatedError as error:
        raise Close(4401, error.message) from None
    except WaybillError as error:
        raise Close(error.close_code, error.message) from None
    if claims.scope != "user":
        raise Close(4403, f"a token of scope {claims.scope} opens no session")
    if claims.device not in (None, said.device_id):
        raise Close(4403, "the token is of another device")
    return claims


class _Row(NamedTuple):
    """A session with the conversations to read for it. ``whole``: they are all that the user has."""

    guest: _Guest
    begin: Begin
    ids: list[str]
    whole: bool


class _Guest:
    """A session that is to be listed."""

    __slots__ = ("connection", "done", "hello")

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.connection = connection
        self.hello = hello
        self.done: asyncio.Future[Found] = asyncio.get_running_loop().create_future()


class Greeter:
    """Opens and lists sessions. ``at_once``: most batches that are read at a time."""

    def __init__(
        self,
        pool: Pool,
        fanout: Fanout,
        opener: Opener,
        *,
        at_once: int,
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._pool = pool
        self._fanout = fanout
        self._opener = opener
        self._spawn = spawn
        self._turns = asyncio.Semaphore(at_once)
        self._guests: deque[_Guest] = deque()
        self._gathering = False
        self._incarnation: str | None = None
        self._opening: dict[str, int] = {}

    def forget(self) -> None:
        """The store became another one."""
        self._incarnation = None

    async def open(self, connection: Connection, claims: Claims) -> None:
        """Raise the device's session number. Raises `Close`, `UnavailableError`."""
        opened = await self._count(connection, claims)
        if connection.ended:
            return
        if opened.number is None:
            noting.revoked(connection)
            raise Close(4401, "the token was revoked")
        connection.number = opened.number
        noting.opened(connection)
        # From now on an event that brings the user into a conversation is not missed.
        self._fanout.register(connection)
        connection.parts.social.opened(connection)

    async def _count(self, connection: Connection, claims: Claims) -> Opened:
        """Those that are just being opened count, too; those that this one replaces do not."""
        user_id, device_id = connection.user_id, connection.device_id
        opening = self._opening.get(user_id, 0)
        others = sum(one.device_id != device_id for one in self._fanout.users.get(user_id, ()))
        if others + opening >= connection.parts.settings.gateway_user_sessions:
            raise Close(4429, "too many sessions of this user")
        self._opening[user_id] = opening + 1
        try:
            return await self._opener.open(user_id, device_id, connection.session_id, claims)
        finally:
            self._opening[user_id] -= 1
            if not self._opening[user_id]:
                del self._opening[user_id]

    async def tell(self, connection: Connection, said: Hello) -> None:
        """Say `welcome`, the conversations, and `listed`. Raises `UnavailableError`."""
        if connection.ended:
            return
        guest = _Guest(connection, said)
        self._guests.append(guest)
        if not self._gathering:
            self._gathering = True
            self._spawn(self._gather())
        found = await guest.done
        # In the session's own task: one that takes nothing must not hold up whoever is read together with it.
        if found.since.incarnation != self._incarnation:
            raise UnavailableError("the store was replaced", retry_after_ms=1000)
        await tell(connection, found)

    async def _gather(self) -> None:
        await asyncio.sleep(_GATHER_S)
        while True:
            await self._turns.acquire()
            some = [self._guests.popleft() for _ in range(min(_MOST, len(self._guests)))]
            if not self._guests:
                self._gathering = False
            self._spawn(self._batch(some))
            if not self._gathering:
                return

    async def _batch(self, some: list[_Guest]) -> None:
        try:
            await self._read(some)
        except BaseException as error:
            for guest in some:
                if not guest.done.done():
                    guest.done.set_exception(error if isinstance(error, Exception) else UnavailableError("stopping"))
            if not isinstance(error, Exception):
                raise
        finally:
            self._turns.release()

    async def _read(self, some: list[_Guest]) -> None:
        incarnation = self._incarnation = self._incarnation or await store_incarnation(self._pool)
        await self._enter_first(some)
        changes = await changed_since(
            self._pool,
            [(one.connection.user_id, known_since(one.hello.since, incarnation)) for one in some],
        )
        self._incarnation = changes.since.incarnation
        if changes.since.incarnation != incarnation:
            raise UnavailableError("the store was replaced", retry_after_ms=1000)
        rows: list[_Row] = []
        for guest, belongings in zip(some, changes.users, strict=True):
            begin = Begin.of(guest.hello)
            ids = self._enter(guest, begin, belongings)
            rows.append(_Row(guest, begin, ids, len(ids) == len(belongings.ids)))
            await asyncio.sleep(0)
        await self._list_all(rows, changes.since)

    async def _enter_first(self, some: list[_Guest]) -> None:
        """Follow the conversations of those who say `since`: of what did not change only the head is read, below."""
        guests = [one for one in some if one.hello.since is not None]
        found = await conversations_of_users(self._pool, {one.connection.user_id for one in guests}) if guests else {}
        for guest in guests:
            for conversation_id in () if guest.connection.ended else found[guest.connection.user_id]:
                if conversation_id not in guest.connection.session.feeds:
                    self._fanout.enter(guest.connection, conversation_id)

    def _enter(self, guest: _Guest, begin: Begin, belongings: Belongings) -> list[str]:
        """Follow all conversations; returns those that are to be listed."""
        connection = guest.connection
        if connection.ended:
            return []
        feeds = connection.session.feeds
        listed: list[str] = []
        for conversation_id, head, changed in zip(*belongings, strict=True):
            feed = feeds.get(conversation_id)
            if feed is None or changed or conversation_id in (begin.cursors or {}):
                if feed is None:
                    self._fanout.enter(connection, conversation_id)
                listed.append(conversation_id)
            elif feed.fresh:
                feed.asleep = True
                feed.begin(head, 0)
                if feed.room.know(head) > head:
                    feed.wake()
        return listed

    async def _list_all(self, rows: list[_Row], since: Since) -> None:
        """Read for sessions, those with few conversations together, one with many for itself."""
        together: list[_Row] = []
        size = 0
        for row in sorted(rows, key=lambda row: len(row.ids)):
            if together and size + len(row.ids) > _MOST_ROWS:
                await self._list(together, since)
                together, size = [], 0
            together.append(row)
            size += len(row.ids)
        if together:
            await self._list(together, since)

    async def _list(self, rows: list[_Row], since: Since) -> None:
        wanted = [row.begin.wanted(row.guest.connection, id_) for row in rows for id_ in row.ids]
        listing = await list_conversations(self._pool, wanted)
        if (listing.since or since).incarnation != since.incarnation:
            raise UnavailableError("the store was replaced", retry_after_ms=1000)
        found_rows = iter(listing.rows)
        for guest, begin, ids, whole in rows:
            found = [listed for listed in (next(found_rows) for _ in ids) if listed is not None]
            if not guest.done.done():
                guest.done.set_result(Found(begin, found, since, whole))
