"""A light client: one socket, no store. It notes when frames come in and acks what it was given."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from websockets.asyncio.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from websockets.asyncio.client import ClientConnection

    from bench.reference.seed_outbox import Message

_ACK_EVERY_S = 0.1
_LISTED_S = 30.0


class Frame(msgspec.Struct):
    """What is read of a frame."""

    t: str
    conversation_id: str = ""
    client_msg_id: str = ""
    seq: int = 0
    user_id: str = ""
    delivered_seq: int = 0
    code: str = ""


_FRAME = msgspec.json.Decoder(Frame)
_ENCODER = msgspec.json.Encoder()

Heard = "Callable[[str, Frame, float], None]"
"""Told the user, the frame and the time of `perf_counter` at which it was read."""


class Socket:
    """One user's device, on the air."""

    def __init__(self, connection: ClientConnection, user: str, heard: Callable[[str, Frame, float], None]) -> None:
        self._connection = connection
        self._user = user
        self._heard = heard
        self._held: dict[str, list[int]] = {}
        self.listed = asyncio.Event()

    async def send(self, message: Message) -> float:
        """Write a `send` frame; the time just before."""
        frame = {
            "t": "send",
            "rid": message.client_msg_id,
            "conversation_id": message.conversation_id,
            "client_msg_id": message.client_msg_id,
            "body": message.body,
        }
        return await self._write(frame)

    async def hold(self, conversation_id: str, low: int, high: int) -> float:
        """Write an `ack` frame of a range; the time just before."""
        return await self._write({"t": "ack", "conversation_id": conversation_id, "ranges": [[low, high]]})

    async def mark(self, conversation_id: str, seq: int) -> float:
        """Write a `read` frame; the time just before."""
        return await self._write({"t": "read", "conversation_id": conversation_id, "seq": seq})

    async def _write(self, frame: Mapping[str, object]) -> float:
        text = _ENCODER.encode(frame).decode()
        before = time.perf_counter()
        await self._connection.send(text)
        return before

    async def hello(self, token: str) -> None:
        """Begin the session at the present."""
        device = f"{self._user}-bench"
        hello = {"t": "hello", "token": token, "device_id": device, "sync": "live", "client": "waybill-bench/1"}
        await self._write(hello)

    async def read(self) -> None:
        """Read until cancelled. Raises `RuntimeError` for an `error` frame, and what the connection raises."""
        async for text in self._connection:
            at = time.perf_counter()
            frame = _FRAME.decode(text)
            if frame.t == "listed":
                self.listed.set()
            elif frame.t == "error":
                raise RuntimeError(f"{self._user} got an error: {frame.code}")
            else:
                if frame.t == "event":
                    held = self._held.setdefault(frame.conversation_id, [frame.seq, frame.seq])
                    held[1] = max(held[1], frame.seq)
                self._heard(self._user, frame, at)
        raise RuntimeError(f"{self._user} was disconnected")

    async def ack(self) -> None:
        """Ack what was given, a few times a second, until cancelled."""
        while True:
            await asyncio.sleep(_ACK_EVERY_S)
            held, self._held = self._held, {}
            for conversation_id, (low, high) in held.items():
                await self.hold(conversation_id, low, high)


@asynccontextmanager
async def open_sockets(
    url: str, tokens: dict[str, str], heard: Callable[[str, Frame, float], None]
) -> AsyncIterator[dict[str, Socket]]:
    """A socket for each user, all listed; closed when the block is left, which an `error` frame ends, too."""
    connections: list[ClientConnection] = []
    sockets: dict[str, Socket] = {}
    try:
        for user in tokens:
            connection = await connect(url, subprotocols=["waybill.v1"], compression=None, max_queue=1024)  # type: ignore[list-item]  # their type of a subprotocol is a NewType of str
            connections.append(connection)
            sockets[user] = Socket(connection, user, heard)
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work) for socket in sockets.values() for work in (socket.read(), socket.ack())]
            for user, socket in sockets.items():
                await socket.hello(tokens[user])
            async with asyncio.timeout(_LISTED_S):
                for socket in sockets.values():
                    await socket.listed.wait()
            yield sockets
            for task in working:
                task.cancel()
    finally:
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)
