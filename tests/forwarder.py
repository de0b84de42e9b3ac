"""A broker seen through another port: it can move, be silent, or come and go, while the broker itself stays well."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.relaying import HOST, Relaying

PRODUCE = 0
"""Kafka's key of this request."""


class Forwarder(Relaying):
    """Hands Kafka's requests and answers on, frame by frame, between clients and a port on loopback.

    ``advertised``: the port that answers name as the broker's; None is the broker's own. ``silent``: keys of requests
    that the broker gets and whose answers nobody gets.
    """

    def __init__(self, target: int) -> None:
        super().__init__()
        self.advertised: int | None = None
        self.silent: set[int] = set()
        self.swallowed = 0
        self._target = target

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        keys: dict[bytes, int] = {}
        try:
            from_broker, to_broker = await asyncio.open_connection(HOST, self._target)
            writers.append(to_broker)
            ways = [self._requests(reader, to_broker, keys), self._answers(from_broker, writer, keys)]
            tasks = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: dict[bytes, int]
    ) -> None:
        async for frame in _frames(reader):
            # A request begins with its key, its version and the number that the answer bears.
            keys[frame[4:8]] = int.from_bytes(frame[:2])
            await _write(writer, frame)

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: dict[bytes, int]
    ) -> None:
        async for frame in _frames(reader):
            if keys.pop(frame[:4], None) in self.silent:
                self.swallowed += 1
                continue
            told = frame
            if self.advertised is not None:
                told = frame.replace(_place(self._target), _place(self.advertised))
            await _write(writer, told)


def _place(port: int) -> bytes:
    """A broker's address as it stands in every answer that names one, whose length it does not change."""
    return HOST.encode() + struct.pack(">i", port)


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(4))
            yield await reader.readexactly(size)


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(struct.pack(">i", len(frame)) + frame)
    await writer.drain()


@asynccontextmanager
async def forwarder(target: int) -> AsyncIterator[Forwarder]:
    made = Forwarder(target)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
