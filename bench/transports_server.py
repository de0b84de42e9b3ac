"""The servers of `bench.transports`: one process, one transport, steered by lines of JSON on its standard input.

`python -m bench.transports_server NAME` first tells its port. Then each line in has one line out:
`{"do": "state"}` → `{"cpu": s, "rss": bytes, "open": connections, "heard": messages}`;
`{"do": "write", "rounds": n, "frames": k}` → `{"cpu": s}`, after `n` times `k` frames to each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.server import ServerConnection

    from services.gateway.wire import Wire

PAYLOAD = b'{"t":"event"}'.ljust(254)
"""What goes out, again and again."""
ROUND_S = 0.02
"""Between two rounds of writes: long enough that a client has read what came before."""


class Server(Protocol):
    """A transport with its connections."""

    heard: int
    """Messages that came in; each was turned into a string."""

    def serving(self) -> AbstractAsyncContextManager[int]:
        """Listen on loopback while the block runs; gives the port."""

    def write(self, frames: int) -> None:
        """Write a frame so many times to each connection."""

    def count(self) -> int:
        """How many connections are open."""


class Wires:
    """The gateway's own."""

    def __init__(self) -> None:
        from services.gateway.wire import ready  # noqa: PLC0415 - picows is measured where the gateway is not installed

        self.heard = 0
        self._frame = ready(PAYLOAD)
        self._wires: set[Wire] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """See `Server`."""
        from services.gateway.listener import serving  # noqa: PLC0415 - as above
        from services.gateway.upgrade import Policy  # noqa: PLC0415 - as above

        async with serving("127.0.0.1", 0, self._accepted, policy=Policy()) as listener:
            self._wires = listener.wires
            yield listener.port

    def write(self, frames: int) -> None:
        """See `Server`."""
        frame = self._frame
        for wire in self._wires:
            for _ in range(frames):
                wire.write(frame)

    def count(self) -> int:
        """See `Server`."""
        return len(self._wires)

    def _accepted(self, _: Wire) -> _Counting:
        return _Counting(self)


class _Counting:
    __slots__ = ("_of",)

    def __init__(self, of: Wires) -> None:
        self._of = of

    def message(self, _: str | bytes) -> None:
        """One more."""
        self._of.heard += 1

    def writable(self) -> None:
        """Nothing."""

    def gone(self, code: int) -> None:
        """Nothing."""


class Websockets:
    """`websockets`' asyncio server; each connection has a task that reads and one that writes what is queued."""

    def __init__(self) -> None:
        self.heard = 0
        self._queues: dict[ServerConnection, tuple[deque[bytes], asyncio.Event]] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """See `Server`."""
        from websockets.asyncio.server import serve  # noqa: PLC0415 - as above

        async with serve(
            self._accepted,
            "127.0.0.1",
            0,
            compression=None,
            ping_interval=None,
            max_queue=16,
        ) as server:
            yield next(iter(server.sockets)).getsockname()[1]

    def write(self, frames: int) -> None:
        """See `Server`."""
        for queue, some in self._queues.values():
            queue.extend([PAYLOAD] * frames)
            some.set()

    def count(self) -> int:
        """See `Server`."""
        return len(self._queues)

    async def _accepted(self, socket: ServerConnection) -> None:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415 - as above

        mine: tuple[deque[bytes], asyncio.Event] = (deque(), asyncio.Event())
        self._queues[socket] = mine
        writing = asyncio.create_task(self._write(socket, *mine))
        with contextlib.suppress(ConnectionClosed):
            async for _ in socket:
                self.heard += 1
        writing.cancel()
        del self._queues[socket]

    async def _write(self, socket: ServerConnection, queue: deque[bytes], some: asyncio.Event) -> None:
        while True:
            await some.wait()
            some.clear()
            while queue:
                await socket.send(queue.popleft(), text=True)


class Picows:
    """`picows`, which this project does not depend on."""

    def __init__(self) -> None:
        self.heard = 0
        self._module: Any = importlib.import_module("picows")
        self._transports: set[Any] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """See `Server`."""
        of, text = self, self._module.WSMsgType.TEXT

        class Listener(self._module.WSListener):  # type: ignore[misc, name-defined]  # it is not there where types are checked
            def on_ws_connected(self, transport: Any) -> None:
                of._transports.add(transport)

            def on_ws_disconnected(self, transport: Any) -> None:
                of._transports.discard(transport)

            def on_ws_frame(self, _: Any, frame: Any) -> None:
                if frame.msg_type == text:
                    frame.get_payload_as_utf8_text()
                    of.heard += 1

        server = await self._module.ws_create_server(lambda _: Listener(), "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
        server.close()

    def write(self, frames: int) -> None:
        """See `Server`."""
        text = self._module.WSMsgType.TEXT
        for transport in self._transports:
            for _ in range(frames):
                transport.send(text, PAYLOAD)

    def count(self) -> int:
        """See `Server`."""
        return len(self._transports)


SERVERS: dict[str, Callable[[], Server]] = {"wire": Wires, "websockets": Websockets, "picows": Picows}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _answer(server: Server, asked: dict[str, Any]) -> dict[str, float]:
    if asked["do"] == "state":
        return {"cpu": _cpu(), "rss": _rss(), "open": server.count(), "heard": server.heard}
    before, due = _cpu(), time.monotonic()
    for _ in range(asked["rounds"]):
        server.write(asked["frames"])
        due += ROUND_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    return {"cpu": _cpu() - before}


async def _main(name: str) -> None:
    server = SERVERS[name]()
    loop = asyncio.get_running_loop()
    async with server.serving() as port:
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        print(json.dumps({"port": port}), flush=True)
        while line := await lines.readline():
            print(json.dumps(await _answer(server, json.loads(line))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
