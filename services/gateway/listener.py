"""The sockets' port: it accepts connections, and knows them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl as tls
from http import HTTPStatus
from typing import TYPE_CHECKING

from services.gateway import addresses, upgrade
from services.gateway.metrics import HANDSHAKES
from services.gateway.wire import Wire
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from services.gateway.upgrade import Answer, Asked, Policy
    from services.gateway.wire_base import Handler, WireBase

_BACKLOG = 4096
_ACCEPTORS = 16
"""Descriptors of the one listening socket. The loop accepts a single connection of each in a turn: with one, thousands
that come back at once overflow the backlog, and wait for seconds until their client's kernel tries again."""

_CUT_OFF = "cut off"


class Listener:
    """All wires of this process. Made by `serving`."""

    def __init__(self, factory: Callable[[Wire], Handler], policy: Policy) -> None:
        self.factory = factory
        """Makes the handler of an accepted connection; its response is out then."""
        self.policy = policy
        self.wires: set[Wire] = set()
        """Those that were accepted and are not gone."""
        self.opening: dict[WireBase, None] = {}
        """Those that have not been accepted, or never will be."""
        self.draining = False
        """Whether each further request is answered 503."""
        self.bytes_read = 0
        self.bytes_written = 0
        """Since the start, without TLS' part; written without the handshakes'."""
        self.port = 0
        self._loop = asyncio.get_running_loop()
        self._with_output: list[WireBase] = []
        self._addresses: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._empty = asyncio.Event()
        self._empty.set()

    def stop_accepting(self) -> None:
        """Close the port. What is connected stays; a request that is still under way is answered 503."""
        self.draining = True
        for server in self._servers:
            server.close()

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until no connection is left, for at most so long; returns whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set()

    # For the wires.

    def has_output(self, wire: WireBase) -> None:
        """This wire is to be flushed in the loop's next turn."""
        if not self._with_output:
            self._loop.call_soon(self._flush)
        self._with_output.append(wire)

    def _flush(self) -> None:
        wires, self._with_output = self._with_output, []
        for wire in wires:
            try:
                wire.flush()
            except Exception:  # noqa: BLE001 - the other wires must not suffer from it
                logger(__name__).exception("a wire could not be written to")
                wire.abort()

    def arrived(self, wire: WireBase) -> bool:
        """A connection; returns whether it may go on to its request."""
        if len(self.opening) >= self.policy.most_opening:
            # The oldest gives way: those who never finish must not keep out everybody else.
            HANDSHAKES.labels(_CUT_OFF).inc()
            oldest = next(iter(self.opening))
            del self.opening[oldest]
            oldest.abort()
        if not addresses.is_trusted(wire.peer, self.policy.trusted_proxies):
            # Twice the limit may be connected, so that most who are over it are told; beyond that nobody is heard.
            self._count(wire, wire.peer)
            if self._over(wire, 2 * self.policy.most_per_address):
                HANDSHAKES.labels(_CUT_OFF).inc()
                return False
        self.opening[wire] = None
        self._empty.clear()
        return True

    def decide(self, wire: Wire, head: bytes) -> Asked | Answer:
        """Whether this request is accepted. If so, the wire is one of `wires` from here on."""
        try:
            asked = upgrade.read(head, self.policy)
        except Exception:  # noqa: BLE001 - the next connection must not suffer from it
            logger(__name__).exception("a request could not be read")
            return upgrade.answer(upgrade.BROKEN)
        if isinstance(asked, upgrade.Answer):
            return asked
        if self.draining:
            return self._later(HTTPStatus.SERVICE_UNAVAILABLE, "the server drains")
        if wire.counted is None:
            wire.peer = addresses.client_of(wire.peer, asked.forwarded, self.policy.trusted_proxies)
            self._count(wire, wire.peer)
        if self._over(wire, self.policy.most_per_address):
            return self._later(HTTPStatus.TOO_MANY_REQUESTS, "too many connections of this address")
        if 0 < self.policy.most_connections <= len(self.wires):
            return self._later(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
        self.opening.pop(wire, None)
        self.wires.add(wire)
        self.answered(HTTPStatus.SWITCHING_PROTOCOLS)
        return asked

    def answered(self, status: int) -> None:
        """A request was answered so."""
        HANDSHAKES.labels(str(status)).inc()

    def left(self, wire: WireBase) -> None:
        """A connection is gone."""
        self.opening.pop(wire, None)
        self.wires.discard(wire)
        self._uncount(wire)
        if not self.opening and not self.wires:
            self._empty.set()

    def _later(self, status: HTTPStatus, text: str) -> Answer:
        return upgrade.answer(upgrade.later(status, text, self.policy))

    def _count(self, wire: WireBase, address: str) -> None:
        if self.policy.most_per_address:
            wire.counted = addresses.subscriber(address)
            self._addresses[wire.counted] = self._addresses.get(wire.counted, 0) + 1

    def _uncount(self, wire: WireBase) -> None:
        if wire.counted is not None:
            left = self._addresses[wire.counted] - 1
            if left:
                self._addresses[wire.counted] = left
            else:
                del self._addresses[wire.counted]
            wire.counted = None

    def _over(self, wire: WireBase, most: int) -> bool:
        return wire.counted is not None and self._addresses[wire.counted] > most

    def started(self, servers: list[asyncio.Server]) -> None:
        """The port is open."""
        self._servers = servers
        self.port = servers[0].sockets[0].getsockname()[1]

    async def end(self) -> None:
        """Close the port, and end each connection that is left: told 1001, and soon cut off."""
        self.stop_accepting()
        for wire in [*self.wires]:
            wire.close(1001, "the server ends")
        for opening in [*self.opening]:
            opening.abort()
        # Each wire cuts itself off when its time is over.
        await self.emptied(3 * self.policy.close_s)


@contextlib.asynccontextmanager
async def serving(
    host: str,
    port: int,
    factory: Callable[[Wire], Handler],
    *,
    policy: Policy,
    ssl: tls.SSLContext | None = None,
    reuse_port: bool = False,
) -> AsyncIterator[Listener]:
    """Accept connections while the block runs; at its end none is left.

    With ``reuse_port`` several processes share one port. Raises `OSError` if the port cannot be opened.
    """
    loop = asyncio.get_running_loop()
    listener = Listener(factory, policy)
    listening = await loop.create_server(
        asyncio.Protocol, host, port, reuse_address=True, reuse_port=reuse_port, start_serving=False
    )
    servers: list[asyncio.Server] = []
    try:
        for one in [one for one in listening.sockets for _ in range(_ACCEPTORS)]:
            _prepare(one, policy)
            server = await loop.create_server(
                lambda: Wire(listener, loop),
                sock=socket.socket(fileno=os.dup(one.fileno())),
                ssl=ssl,
                ssl_handshake_timeout=policy.handshake_s if ssl else None,
                ssl_shutdown_timeout=policy.close_s if ssl else None,
                backlog=_BACKLOG,
            )
            servers.append(server)
        listening.close()
        listener.started(servers)
        yield listener
    finally:
        listening.close()
        for server in servers:
            server.close()
        await listener.end()


def _prepare(listening: socket.socket, policy: Policy) -> None:
    """Set what accepted connections inherit: once, not for each. The loop itself sets TCP_NODELAY."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if policy.send_buffer_bytes:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, policy.send_buffer_bytes)


def tls_context(certificate: Path, key: Path) -> tls.SSLContext:
    """For TLS 1.2 and newer, from PEM files. Raises `OSError`, `ssl.SSLError` if they cannot be read or do not fit."""
    context = tls.create_default_context(tls.Purpose.CLIENT_AUTH)
    context.minimum_version = tls.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context
