"""One installation of a chat app: it sends lines, displays what comes, and its recording notes both."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from waybill_client import Client, MemoryStore, Unconfirmed

from services.console.demo.recording import Pushed, Recording, Shown, Tick

if TYPE_CHECKING:
    from waybill_client import Event, Receipt

    from services.console.demo.observer import Observer

READ_EVERY = 10
"""A device marks every tenth event that it displays as read."""

MOST_WAITING = 48
"""Messages of one device that may wait for their answer; more have to wait before they leave the app."""


_AGAIN_S = 1.0


class Device:
    """The app on one device. It may be closed and opened again; its store lasts, its memory does not."""

    def __init__(self, url: str, token: str, recording: Recording, observer: Observer) -> None:
        self.recording = recording
        self._url = url
        self._token = token
        self._observer = observer
        self._store = MemoryStore()
        self._client: Client | None = None
        self._app: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(MOST_WAITING)
        self._sending: set[asyncio.Task[None]] = set()
        self._session = 0

    @property
    def client(self) -> Client:
        """The open client. Raises `RuntimeError` while the app is closed."""
        if self._client is None:
            raise RuntimeError(f"{self.recording.device_id} is closed")
        return self._client

    async def open(self, group: asyncio.TaskGroup, timeout_s: float = 30.0) -> None:
        """Start the app; returns once its chats are listed."""
        listed = asyncio.Event()
        self._app = group.create_task(self._live(listed, timeout_s), name=self.recording.device_id)
        await listed.wait()

    async def close(self) -> None:
        """End the app in an orderly way: what it displayed counts as taken."""
        if self._app is not None:
            self._app.cancel()
            await asyncio.wait([self._app])

    async def send(self, group: asyncio.TaskGroup, conversation_id: str, text: str, client_msg_id: str) -> None:
        """Hand a message to the app; returns once the app has taken it, not once it is sent."""
        await self._room.acquire()
        task = group.create_task(self._send(conversation_id, text, client_msg_id))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def settle(self, timeout_s: float) -> None:
        """Wait until all that was sent is answered; what is not by then is given up."""
        if self._sending:
            _, late = await asyncio.wait(self._sending, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _send(self, conversation_id: str, text: str, client_msg_id: str) -> None:
        try:
            while client_msg_id not in self.recording.acked:
                try:
                    sent = await self.client.send(conversation_id, {"text": text}, client_msg_id=client_msg_id)
                except Unconfirmed:
                    # Not known to be committed: the same id again. `settle` bounds how long that goes on.
                    await asyncio.sleep(_AGAIN_S)
                else:
                    self.recording.acked[client_msg_id] = (sent.conversation_id, sent.event_id)
                    self._observer.acked += 1
        finally:
            self._room.release()

    async def _live(self, listed: asyncio.Event, timeout_s: float) -> None:
        client = Client(self._url, self._token, self.recording.device_id, self._store, on_frame=self._frame)
        async with client:
            await client.ready(timeout_s)
            self._client = client
            opened = asyncio.get_running_loop().time()
            listed.set()
            ticks = asyncio.create_task(self._show_ticks(client))
            try:
                async for event in client.events():
                    self._show(event)
                    if len(self.recording.shown) % READ_EVERY == 0:
                        await client.read(event.conversation_id, event.seq)
            except asyncio.CancelledError:
                # `close` asked for it. Leaving the block without an error is what tells the SDK that all was taken.
                pass
            finally:
                ticks.cancel()
                self.recording.online.append((opened, asyncio.get_running_loop().time()))
                self._client = None

    async def _show_ticks(self, client: Client) -> None:
        async for receipt in client.receipts():
            self.recording.ticks.append(_tick(receipt))
            self._observer.ticked(receipt.conversation_id, receipt.user_id, receipt.delivered_seq)

    def _show(self, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        self.recording.shown.append(Shown(event.conversation_id, event.seq, event.event_id, now))
        own = event.client_msg_id in self.recording.written
        self._observer.displayed(event.conversation_id, self.recording.user_id, event.seq)
        if not own:
            self._observer.arrived(event.client_msg_id, now)

    def _frame(self, direction: str, text: str, at: float) -> None:
        try:
            frame = json.loads(text)
        except ValueError:
            return
        match direction, frame.get("t"):
            case "out", "hello":
                self._session += 1
                self.recording.opened[self._session] = at
            case "in", "welcome":
                self.recording.resend_s[self._session] = frame["limits"]["resend_s"]
            case "out", "send":
                self.recording.written.setdefault(frame["client_msg_id"], at)
                self._observer.left(frame["client_msg_id"], at)
            case "in", "event":
                self.recording.pushed.append(_pushed(self._session, frame, at))
            case "in", "conversation":
                self.recording.starts.setdefault((self._session, frame["conversation_id"]), frame["cursor"])


def _pushed(session: int, frame: dict[str, Any], at: float) -> Pushed:
    return Pushed(session, frame["conversation_id"], frame["seq"], frame["event_id"], frame["client_msg_id"], at)


def _tick(receipt: Receipt) -> Tick:
    return Tick(
        receipt.conversation_id, receipt.user_id, receipt.delivered_seq, (receipt.read_version, receipt.read_seq)
    )
