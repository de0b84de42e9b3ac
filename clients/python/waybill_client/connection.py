"""The socket: dials, says hello, reads, writes, and comes back after a loss. It knows no meaning of any frame."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.typing import Subprotocol

from . import reconnect
from ._frames import encode
from .errors import Closed, TokenRefused, Unauthenticated

SUBPROTOCOL = Subprotocol("waybill.v1")
MAX_FRAME_BYTES = 8 * 1024 * 1024
"""A page holds about 1 MiB of events; more than this is no frame of a Waybill server."""
MAX_UNWRITTEN = 20_000
"""Frames that wait for a slow socket; over it the connection is given up, since nothing in it is lost by that."""

Token = str | Callable[[], Awaitable[str]]
OnFrame = Callable[[str, str, float], None]

log = logging.getLogger("waybill_client")


class Peer(Protocol):
    """What a connection serves."""

    def hello(self, token: str) -> Mapping[str, Any]:
        """Return the first frame."""

    def receive(self, frame: Mapping[str, Any]) -> None:
        """Take a frame."""

    async def room(self) -> None:
        """Return once more can be taken; until then nothing is read."""

    def disconnected(self) -> None:
        """The connection is over."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, and the sources of time and chance; tests replace them."""

    random: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    open_s: float = 10.0
    welcome_s: float = 10.0
    write_s: float = 30.0
    close_s: float = 2.0
    token_s: float = 30.0
    ping_s: float = 20.0


class Connection:
    """One socket after another, until ``run`` returns."""

    def __init__(
        self,
        url: str,
        token: Token,
        peer: Peer,
        *,
        timing: Timing,
        on_frame: OnFrame | None,
        options: Mapping[str, Any],
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"not a WebSocket URL: {url!r}")
        # A proxy of the environment is never meant for this machine itself.
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._options = {"proxy": None if local else True, **options}
        self._url = url
        self._token = token
        self._peer = peer
        self._timing = timing
        self._on_frame = on_frame
        self._socket: ClientConnection | None = None
        self._unwritten: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._welcome: asyncio.Timeout | None = None
        self._lived_from: float | None = None
        self._after_s: float | None = None
        self._leave = asyncio.Event()
        self.last_failure: Exception | None = None
        self.failures = 0

    def write(self, data: bytes) -> None:
        """Queue a frame for the present socket; without one it is dropped (the session writes it again)."""
        if self._socket is None:
            return
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self.leave(None)
            return
        self._unwritten.append(data)
        self._wake.set()

    def welcomed(self) -> None:
        """The server took the hello: the session counts as lived from now on."""
        self._lived_from = asyncio.get_running_loop().time()
        if self._welcome is not None:
            self._welcome.reschedule(None)

    def leave(self, after_s: float | None) -> None:
        """Close the present socket and come back after ``after_s`` seconds, or, with None, as after any loss."""
        if self._socket is not None:
            self._after_s = after_s
            self._leave.set()

    async def fresh_token(self) -> str | None:
        """Ask the app for a new token; None if it gave a fixed one. Raises what the app raises, or ``TimeoutError``."""
        if isinstance(self._token, str):
            return None
        async with asyncio.timeout(self._timing.token_s):
            return await self._token()

    async def flush(self) -> None:
        """Wait until what is queued is written, at most ``close_s`` seconds."""
        try:
            async with asyncio.timeout(self._timing.close_s):
                while self._socket is not None and self._unwritten:
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            log.info("closing with %d frames unwritten", len(self._unwritten))

    async def run(self) -> Closed:
        """Keep a session open; return why there can be none any more. Cancel to end it; the socket is then closed."""
        backoff = reconnect.Backoff(self._timing.random)
        while True:
            self._lived_from = self._after_s = None
            code: int | None = None
            reason, at_least_s = "", 0.0
            try:
                code, reason = await self._session(await self._first_token())
            except Unauthenticated as error:
                return TokenRefused(str(error))
            except (OSError, InvalidHandshake, InvalidMessage, TimeoutError) as error:
                self.last_failure = error
                self.failures += 1
                if isinstance(error, InvalidStatus):
                    at_least_s = reconnect.retry_after_s(error.response.headers.get("Retry-After"))
                log.warning("no session: %s: %s", type(error).__name__, error)
            except _ProviderError as error:
                self.last_failure = error
                self.failures += 1
                log.warning("the token provider failed", exc_info=error.__cause__)
            finally:
                self._socket = None
                self._peer.disconnected()
            stop = reconnect.fatal(code, reason)
            if stop is None and code == reconnect.TOKEN and isinstance(self._token, str):
                stop = TokenRefused(reason)
            if stop is not None:
                return stop
            if code is not None and not self._was_welcomed():
                self.failures += 1
            wait_s = at_least_s + backoff.wait_s(lived_s=self._lived_s(), code=code, after_s=self._after_s)
            log.info("session over (%s %s), back in %.2f s", code, reason, wait_s)
            await self._timing.sleep(wait_s)

    def _was_welcomed(self) -> bool:
        return self._lived_from is not None

    def _lived_s(self) -> float:
        return 0.0 if self._lived_from is None else asyncio.get_running_loop().time() - self._lived_from

    async def _first_token(self) -> str:
        if isinstance(self._token, str):
            return self._token
        try:
            async with asyncio.timeout(self._timing.token_s):
                return await self._token()
        except Unauthenticated:
            raise
        except Exception as error:
            raise _ProviderError(str(error)) from error

    async def _session(self, token: str) -> tuple[int | None, str]:
        """Hold one socket from hello to its end; return the close code and reason."""
        timing = self._timing
        socket = await connect(
            self._url,
            subprotocols=[SUBPROTOCOL],
            compression=None,
            open_timeout=timing.open_s,
            ping_interval=timing.ping_s,
            ping_timeout=timing.ping_s,
            close_timeout=timing.close_s,
            max_size=MAX_FRAME_BYTES,
            user_agent_header=None,
            **self._options,
        )
        self._unwritten.clear()
        self._leave.clear()
        self._socket = socket
        try:
            self.write(encode(self._peer.hello(token)))
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._write(socket)), group.create_task(self._left(socket))]
                try:
                    async with asyncio.timeout(timing.welcome_s) as self._welcome:
                        await self._read(socket)
                finally:
                    for helper in helpers:
                        helper.cancel()
        except* (TimeoutError, ConnectionClosed) as group_error:
            self.last_failure = group_error.exceptions[0]
        finally:
            self._socket = None
            await socket.close()
        return socket.close_code, socket.close_reason or ""

    async def _read(self, socket: ClientConnection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                text = await socket.recv()
            except ConnectionClosed:
                return
            if self._on_frame is not None and isinstance(text, str):
                self._on_frame("in", text, loop.time())
            try:
                frame = json.loads(text)
            except (ValueError, RecursionError):
                frame = None
            self._peer.receive(frame if isinstance(frame, dict) else {})
            await self._peer.room()

    async def _write(self, socket: ClientConnection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._unwritten:
                data = self._unwritten[0]
                if self._on_frame is not None:
                    self._on_frame("out", _shown(data), loop.time())
                try:
                    async with asyncio.timeout(self._timing.write_s):
                        await socket.send(data, text=True)
                except ConnectionClosed:
                    return
                self._unwritten.popleft()
            self._written.set()
            self._wake.clear()
            await self._wake.wait()

    async def _left(self, socket: ClientConnection) -> None:
        await self._leave.wait()
        await socket.close()


class _ProviderError(Exception):
    """The app's token provider failed for a reason of its own; asked again later."""


def _shown(data: bytes) -> str:
    """Return a frame for an observer: tokens are nobody's business."""
    text = data.decode()
    if text.startswith(('{"t":"hello"', '{"t":"token"')):
        return json.dumps({**json.loads(text), "token": "…"}, ensure_ascii=False, separators=(",", ":"))
    return text
