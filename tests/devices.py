"""Apps that keep more than what they display: their frames, and how their stores looked in between."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from waybill_client import Event, MemoryStore, Timing

from tests.apps import App

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from waybill_client import Saved

_PAGE = 500
_ALL = 10_000
_WAIT_S = 0.2


class Look(NamedTuple):
    """How an event looks on a device once the event ``came`` is stored. ``newest``: the last change that it shows."""

    came: int
    newest: int
    body: Any


class KeptStore(MemoryStore):
    """Notes how an event looks after each event that is or changes it, by conversation and seq."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: dict[tuple[str, int], list[Look]] = defaultdict(list)

    async def save(self, events: Sequence[Event], conversations: Sequence[Saved], rendered: Mapping[str, int]) -> None:
        """One by one: nothing of it waits, so it is still one step."""
        for event in events:
            await super().save([event], [], {})
            seq = event.target_seq or event.seq
            for held in await self.events(event.conversation_id, seq - 1, 1):
                if held.seq == seq:
                    self.looks[event.conversation_id, seq].append(Look(event.seq, newest(held), held.body))
        await super().save([], conversations, rendered)


class Device(App):
    """``heard``, ``said``: its frames as they came and went. Its waits between two tries to connect are short."""

    def __init__(self, url: str, secret: str, user_id: str, device_id: str) -> None:
        super().__init__(url, secret, user_id, device_id)
        self.heard: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.kept = self._store = KeptStore()
        self._timing = Timing(random.random, sleep=_soon)

    def _frame(self, direction: str, text: str, at: float) -> None:
        super()._frame(direction, text, at)
        (self.heard if direction == "in" else self.said).append(json.loads(text))

    async def held(self, conversation_id: str) -> dict[int, Event]:
        """What it stores of a conversation, by seq."""
        return {event.seq: event for event in await self.kept.events(conversation_id, 0, _ALL)}

    async def pages(self, conversation_id: str) -> dict[int, Event]:
        """What this user may see of it, as the server has it now."""
        found: dict[int, Event] = {}
        after = 0
        while True:
            page = await self.client.pull(conversation_id, after=after, limit=_PAGE)
            found |= {event.seq: event for event in page.events}
            if page.complete:
                return found
            after = page.next

    def top(self, conversation_id: str) -> int:
        """The last seq of it that is displayed; 0: none."""
        return next((seq for id_, seq, _ in reversed(self.display) if id_ == conversation_id), 0)

    def pushed(self, conversation_id: str) -> set[int]:
        """The seqs of it that sockets brought as events."""
        return {one.seq for one in self.recording.pushed if one.conversation_id == conversation_id}

    async def write(self, conversation_id: str, text: str, type_: str = "message", target: int | None = None) -> int:
        """Write an event with a text; its seq."""
        return (await self.client.send(conversation_id, {"text": text}, type_, target_seq=target)).seq

    async def take(self, conversation_id: str, how: str, target: int) -> int:
        """`recall` or `delete` an event; the seq of that."""
        return (await self.client.send(conversation_id, None, how, target_seq=target)).seq

    async def member(self, conversation_id: str, action: str, user_id: str) -> int:
        """`add` or `remove` somebody; the seq of that."""
        return (await self.client.send(conversation_id, {"action": action, "user_id": user_id}, "member")).seq


def newest(event: Event) -> int:
    """The last change that it shows; 0: none."""
    return max(event.edited_by or 0, event.recalled_by or 0, event.deleted_by or 0)


def shape(event: Event) -> tuple[Any, ...]:
    """What has to be the same on all devices.

    An edit that comes once its target is gone brings nothing, so of those it does not matter whether one is noted.
    """
    said = event.seq, event.event_id, event.type, event.sender_id, event.client_msg_id, event.body, event.target_seq
    edited_by = None if event.recalled_by or event.deleted_by else event.edited_by
    return (*said, edited_by, event.recalled_by, event.deleted_by)


async def _soon(seconds: float) -> None:
    await asyncio.sleep(min(seconds, _WAIT_S))
