"""A TCP port in front of several servers, as a load balancer is: a connection goes to the next one that takes it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

HOST = "127.0.0.1"
_CHUNK = 64 * 1024


class Door:
    """Opened by `door`."""

    def __init__(self, targets: Sequence[int]) -> None:
        self.port = 0
        self._targets = targets
        self._next = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            back, there = await self._server_that_takes_it()
            writers.append(there)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pump(reader, there))
                ways.create_task(_pump(back, writer))
        except* OSError:
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _server_that_takes_it(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in self._targets:
            target = self._targets[self._next % len(self._targets)]
            self._next += 1
            with suppress(ConnectionRefusedError):
                return await asyncio.open_connection(HOST, target)
        raise ConnectionRefusedError


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@asynccontextmanager
async def door(targets: Sequence[int]) -> AsyncIterator[Door]:
    """``targets``: ports on loopback."""
    made = Door(targets)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
