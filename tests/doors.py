"""A TCP port in front of several servers, as a load balancer is: a connection goes to the next one that takes it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from tests.relaying import HOST, Relaying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_CHUNK = 64 * 1024


class Door(Relaying):
    """Opened by `door`."""

    def __init__(self, targets: Sequence[int]) -> None:
        super().__init__()
        self._targets = targets
        self._next = 0

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
