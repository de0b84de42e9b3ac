"""An in-process WebSocket server that keeps the least of the protocol, and fails where a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from .frames_of_server import CHAT, ME, before_page, conversation, event, page, sent, welcome

Scripted = Callable[["Stub", ServerConnection, dict[str, Any]], Awaitable[bool]]


class Stub:
    """``on_frame`` may take a frame itself by returning True. Events are `e1` …, and after losses `e1.1` …."""

    def __init__(self) -> None:
        self.hellos: list[dict[str, Any]] = []
        self.got: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.sockets: list[ServerConnection] = []
        self.seqs: dict[str, int] = {}
        self.acked: set[int] = set()
        self.losses = 0
        self.silent = False
        self.frame: dict[str, Any] = {}
        self.limits: dict[str, Any] = {}
        self.window: int | None = None
        self.pushed = 0
        self.on_frame: Scripted | None = None
        self.changed = asyncio.Event()
        self.url = ""

    def write(self, **more: Any) -> int:
        seq = len(self.events) + 1
        event_id = f"e{seq}.{self.losses}" if self.losses else f"e{seq}"
        self.events.append(event(seq, **{"event_id": event_id, **more}))
        return seq

    def lose(self, keep: int) -> None:
        """Forget all but the first ``keep`` events, as a failover to a replica that lagged does."""
        self.losses += 1
        del self.events[keep:]
        kept = {one["client_msg_id"] for one in self.events}
        self.seqs = {name: seq for name, seq in self.seqs.items() if name in kept}
        self.acked = {seq for seq in self.acked if seq <= keep}

    async def push(self) -> None:
        """Push what is new to the newest session, as far as its window lets."""
        while self.sockets and self.pushed < len(self.events) and not self.silent:
            unacked = sum(1 for seq in range(1, self.pushed + 1) if seq not in self.acked)
            if self.window is not None and unacked >= self.window:
                return
            self.pushed += 1
            await self.send(self.sockets[-1], self.events[self.pushed - 1])

    async def send(self, socket: ServerConnection, frame: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionClosed):
            await socket.send(json.dumps(frame))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def handle(self, socket: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            async for text in socket:
                frame = json.loads(text)
                (self.hellos if frame["t"] == "hello" else self.got).append(frame)
                self.changed.set()
                if self.on_frame is None or not await self.on_frame(self, socket, frame):
                    await self.answer(socket, frame)

    async def answer(self, socket: ServerConnection, frame: dict[str, Any]) -> None:
        match frame["t"]:
            case "hello":
                self.sockets.append(socket)
                cursor = frame.get("cursors", {}).get(CHAT, 0)
                self.pushed = cursor if isinstance(cursor, int) else cursor[0]
                self.acked |= set(range(1, self.pushed + 1))
                head = len(self.events)
                # As the protocol has it: where the server has another event than the client named, or none.
                self.silent = not isinstance(cursor, int) and (
                    cursor[0] > head or self.events[cursor[0] - 1]["event_id"] != cursor[1]
                )
                told = {**self.frame, "reset": True} if self.silent else self.frame
                await self.send(socket, welcome(**self.limits))
                await self.send(socket, conversation(head, min(head, self.pushed), **told))
                await self.send(socket, {"t": "listed", "count": 1, "since": "x"})
                await self.push()
            case "send":
                known = frame["client_msg_id"] in self.seqs
                if not known:
                    target = {"target_seq": frame["target_seq"]} if "target_seq" in frame else {}
                    said = {name: frame.get(name) for name in ("client_msg_id", "body", "type")}
                    self.seqs[frame["client_msg_id"]] = self.write(sender=ME, **said, **target)
                seq = self.seqs[frame["client_msg_id"]]
                await self.send(socket, sent(frame, seq, duplicate=known, event_id=self.events[seq - 1]["event_id"]))
                await self.push()
            case "create":
                chat = frame.get("conversation_id", CHAT)
                await self.send(
                    socket, {"t": "created", "rid": frame["rid"], "conversation_id": chat, "existing": False}
                )
            case "pull":
                rid, limit, head = frame["rid"], frame["limit"], len(self.events)
                if "before" in frame:
                    answer = before_page(rid, self.events, before=frame["before"], limit=limit)
                else:
                    found = self.events[frame["after"] : frame["after"] + limit]
                    complete = frame["after"] + limit >= head
                    answer = page(rid, found, after=frame["after"], head=head, complete=complete)
                await self.send(socket, answer)
            case "ack":
                for low, high in frame["ranges"]:
                    self.acked |= set(range(low, high + 1))
                self.changed.set()
                await self.push()


@contextlib.asynccontextmanager
async def stub_server(stub: Stub) -> AsyncIterator[Server]:
    async with serve(stub.handle, "127.0.0.1", 0, subprotocols=["waybill.v1"], compression=None) as server:
        port = server.sockets[0].getsockname()[1]
        stub.url = f"ws://127.0.0.1:{port}/v1/socket"
        yield server
