"""The public port: upgrade, `hello`, and how each session ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed, NegotiationError

from services.gateway.close import Close
from services.gateway.connection import Connection
from services.gateway.metrics import SESSIONS, SESSIONS_ENDED
from services.gateway.requests import handle
from shared.auth import bearer
from shared.contracts import frames
from shared.errors import BadRequestError, UnauthenticatedError, WaybillError
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from websockets.asyncio.server import Server, ServerConnection
    from websockets.http11 import Request, Response
    from websockets.typing import Subprotocol

    from services.gateway.connection import Parts
    from shared.auth import Claims
    from shared.contracts.frames import Hello

PATH = "/v1/socket"
SUBPROTOCOL = "waybill.v1"
_FLUSH_S = 2.0
_CLOSE_S = 2.0
_MAX_QUEUE = 16
_REASON_BYTES = 120
"""A close frame has room for 123 bytes of reason."""


class Sockets:
    """All sessions of this gateway."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._sockets: set[ServerConnection] = set()
        self._open: set[Connection] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._draining = False

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[Server]:
        """Accept sessions while the block runs. At its end no session is left."""
        server = await serve(
            self._accepted,
            host,
            port,
            compression=None,
            max_size=frames.HELLO_BYTES,
            max_queue=_MAX_QUEUE,
            ping_interval=None,
            close_timeout=_CLOSE_S,
            open_timeout=self._parts.settings.gateway_hello_s,
            select_subprotocol=_select,
            process_request=self._request,
            server_header=None,
        )
        try:
            yield server
        finally:
            self._draining = True
            server.close(close_connections=False)
            await self.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await server.wait_closed()

    async def drain(self) -> None:
        """Tell all clients to come back after a spread of delays, and end their sessions."""
        self._draining = True
        spread_ms = int(self._parts.settings.gateway_drain_s * 1000)
        for connection in self._open:
            after_ms = random.randint(0, spread_ms)
            connection.say({"t": "reconnect", "after_ms": after_ms, "reason": "the server drains"})
            connection.end(Close(4503, "the server drains"))
        try:
            async with asyncio.timeout(_FLUSH_S + 2 * _CLOSE_S), asyncio.TaskGroup() as closing:
                for socket in self._sockets - {connection.socket for connection in self._open}:
                    closing.create_task(socket.close(4503, "the server drains"))
                closing.create_task(self._none_open.wait())
        except TimeoutError:
            for socket in self._sockets:
                socket.transport.abort()

    def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.partition("?")[0] != PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, "not found\n")
        if self._draining:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the server drains\n")
        return None

    async def _accepted(self, socket: ServerConnection) -> None:
        close = Close(4500, "a fault of the server")
        self._sockets.add(socket)
        self._none_open.clear()
        try:
            hello, claims = await self._hello(socket)
            close = await self._session(socket, claims, hello)
        except Close as early:
            close = early
        except ConnectionClosed:
            close = Close(1001, "the client is gone")
        except Exception:  # noqa: BLE001 - one session's fault is not the service's
            logger(__name__).exception("a session failed")
        SESSIONS_ENDED.labels(str(close.code)).inc()
        reason = close.reason.encode()[:_REASON_BYTES].decode(errors="ignore")
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            await socket.close(close.code, reason)
        self._sockets.discard(socket)
        if not self._sockets:
            self._none_open.set()

    async def _hello(self, socket: ServerConnection) -> tuple[Hello, Claims]:
        """The first frame, and whom it speaks for."""
        headers = socket.request.headers.get_all("Authorization") if socket.request else []
        try:
            async with asyncio.timeout(self._parts.settings.gateway_hello_s):
                text = await socket.recv()
        except TimeoutError:
            raise Close(4408, "no hello in time") from None
        try:
            hello = _as_hello(text)
        except BadRequestError as error:
            raise Close(4400, f"{error.field}: {error.message}") from None
        if len(headers) > 1:
            raise Close(4401, "one Authorization header, not several")
        try:
            claims = await self._parts.verifier.verify(bearer(next(iter(headers), None)) or hello.token)
        except UnauthenticatedError as error:
            raise Close(4401, error.message) from None
        except WaybillError as error:
            raise Close(error.close_code, error.message) from None
        if claims.scope != "user":
            raise Close(4403, f"a token of scope {claims.scope} opens no session")
        if claims.device not in (None, hello.device_id):
            raise Close(4403, "the token is of another device")
        return hello, claims

    async def _session(self, socket: ServerConnection, claims: Claims, hello: Hello) -> Close:
        """Run a session to its end; returns how it ended."""
        if self._draining:
            raise Close(4503, "the server drains")
        connection = Connection(socket, self._parts, claims, hello, str(uuid.uuid4()))
        self._open.add(connection)
        SESSIONS.inc()
        self._parts.presence.opened(connection.session_id, connection.user_id)
        close = Close(4500, "a fault of the server")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(connection.following.run())
                tasks.create_task(connection.writer())
                tasks.create_task(connection.clock.run())
                tasks.create_task(_read(connection, socket))
        except* Close as ends:
            close = _first(ends)
        finally:
            self._parts.fanout.unregister(connection)
            self._parts.presence.closed(connection.session_id)
            self._open.discard(connection)
            SESSIONS.dec()
        await connection.flush(_FLUSH_S)
        return close


async def _read(connection: Connection, socket: ServerConnection) -> None:
    await connection.following.listed.wait()
    try:
        while True:
            await connection.below_limit()
            await handle(connection, await socket.recv())
    except ConnectionClosed:
        raise Close(1001, "the client is gone") from None


def _as_hello(text: str | bytes) -> Hello:
    if isinstance(text, bytes):
        raise BadRequestError("a binary frame", field="t")
    hello = frames.parse(text)
    if not isinstance(hello, frames.Hello):
        raise BadRequestError("expected a hello", field="t")
    return hello


def _first(group: BaseExceptionGroup[Close]) -> Close:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _select(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    for name in offered:
        if name == SUBPROTOCOL:
            return name
    if offered:
        raise NegotiationError(f"only {SUBPROTOCOL} is spoken here")
    return None
