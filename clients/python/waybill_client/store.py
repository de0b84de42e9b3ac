"""What a device keeps, and the store in memory.

A durable store implements ``Store``; the SDK does the rest. One client at a time uses a store, and who opened it closes
it. ``queue`` and the reading methods may overlap with the others, which come one after another. A writing call that
raises stops the client with ``Crashed``: nothing goes on that is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from . import changes
from ._frames import Event, Sent, encode
from .outbox import Key, send_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An own message.

    ``body`` is its JSON in UTF-8, as it left the app. ``state`` is ``sending``, ``sent`` (committed at ``seq``, its
    event not yet received) or ``refused`` (with the error's code).
    """

    conversation_id: str
    client_msg_id: str
    type: str
    body: bytes | None
    target_seq: int | None = None
    state: str = "sending"
    event_id: str | None = None
    seq: int | None = None
    error: str | None = None
    strict: bool = False

    @property
    def key(self) -> Key:
        """What the session knows it by."""
        return ("send", self.conversation_id, self.client_msg_id)

    def fields(self) -> bytes:
        """Return its frame from the first field after ``rid``."""
        return send_fields(self.conversation_id, self.client_msg_id, self.type, self.body, self.target_seq)


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation's cursors and own read mark.

    ``last_pulled_seq``: everything visible up to it is stored, and ``event_id`` is the id held there, if known.
    ``last_rendered_seq``: the app has taken everything up to it. ``acked_seq``: the server was told up to it.
    """

    conversation_id: str
    last_pulled_seq: int = 0
    last_rendered_seq: int = 0
    acked_seq: int = 0
    read_version: int = 0
    read_seq: int = 0
    event_id: str | None = None


class Store(Protocol):
    """The store of one device. A method returns once its work is as safe as this store can make it."""

    async def load(self) -> tuple[list[Saved], list[Outgoing]]:
        """Return all conversations, and own messages in state ``sending`` or ``sent`` in the order of ``queue``."""

    async def queue(self, message: Outgoing) -> None:
        """Keep an own message before it leaves. The same key again changes nothing."""

    async def settle(self, key: Key, sent: Sent | None, error: str | None) -> None:
        """Note an own message as committed, or as refused with an error code. An unknown key is no error."""

    async def save(self, events: Sequence[Event], conversations: Sequence[Saved], rendered: Mapping[str, int]) -> None:
        """Keep all of this in one step or none of it.

        A held seq with the same event id stays as it is. ``conversations`` replace what is held but for
        ``last_rendered_seq``, which only ``rendered`` raises. Edits, recalls and deletes change what they aim at; a
        delete erases the body for good. An ``Outgoing`` whose event comes in has done its duty and goes.
        """

    async def rewind(self, conversation_id: str, seq: int, user_id: str | None) -> list[Outgoing]:
        """Drop all events above ``seq`` and lower the cursors; return own messages that may be lost.

        These are dropped events of ``user_id`` with a body, and all ``sent`` messages: nobody saw their events. All of
        them are ``sending`` again, with their ``client_msg_id``.
        """

    async def events(self, conversation_id: str, after: int, limit: int) -> list[Event]:
        """Return at most ``limit`` held events above ``after``, ascending, in their present state."""

    async def event_id(self, conversation_id: str, seq: int) -> str | None:
        """Return the event id held at a seq, None if none is."""


@dataclass(slots=True)
class _Held:
    saved: Saved
    events: dict[int, Event] = field(default_factory=dict)
    edits: dict[int, list[int]] = field(default_factory=dict)


class MemoryStore:
    """A ``Store`` that lives as long as its object. It may be handed to the next client of the same device.

    ``max_events`` bounds what is kept per conversation; the oldest go first.
    """

    def __init__(self, max_events: int = 10_000) -> None:
        self._max_events = max_events
        self._held: dict[str, _Held] = {}
        self._outgoing: dict[Key, Outgoing] = {}

    async def load(self) -> tuple[list[Saved], list[Outgoing]]:
        """See ``Store``."""
        outgoing = [message for message in self._outgoing.values() if message.state != "refused"]
        return [held.saved for held in self._held.values()], outgoing

    async def queue(self, message: Outgoing) -> None:
        """See ``Store``."""
        self._outgoing.setdefault(message.key, message)

    async def settle(self, key: Key, sent: Sent | None, error: str | None) -> None:
        """See ``Store``."""
        message = self._outgoing.pop(key, None)
        if message is None:
            return
        if sent is None:
            self._outgoing[key] = replace(message, state="refused", error=error)
            return
        held = self._held.get(key[1])
        there = held.events.get(sent.seq) if held is not None else None
        is_past = held is not None and sent.seq <= held.saved.last_pulled_seq
        if (there is None and not is_past) or (there is not None and there.event_id != sent.event_id):
            self._outgoing[key] = replace(message, state="sent", event_id=sent.event_id, seq=sent.seq)

    async def save(self, events: Sequence[Event], conversations: Sequence[Saved], rendered: Mapping[str, int]) -> None:
        """See ``Store``."""
        for event in events:
            self._keep(self._of(event.conversation_id), event)
        for saved in conversations:
            held = self._of(saved.conversation_id)
            held.saved = replace(saved, last_rendered_seq=held.saved.last_rendered_seq)
        for conversation_id, seq in rendered.items():
            held = self._of(conversation_id)
            held.saved = replace(held.saved, last_rendered_seq=max(seq, held.saved.last_rendered_seq))

    async def rewind(self, conversation_id: str, seq: int, user_id: str | None) -> list[Outgoing]:
        """See ``Store``."""
        held = self._of(conversation_id)
        dropped = [held.events.pop(above) for above in sorted(held.events) if above > seq]
        # Their seqs will be other events'.
        held.edits = {target: [at for at in edits if at <= seq] for target, edits in held.edits.items()}
        again = [
            Outgoing(conversation_id, event.client_msg_id, event.type, _body_bytes(event), event.target_seq)
            for event in dropped
            if event.sender_id == user_id
            and not event.client_msg_id.startswith("create:")
            and (event.body is not None or changes.hides(event))
        ]
        for message in list(self._outgoing.values()):
            if message.conversation_id == conversation_id and message.state == "sent":
                del self._outgoing[message.key]
                again.append(replace(message, state="sending", event_id=None, seq=None))
        for message in again:
            self._outgoing[message.key] = message
        last = held.events.get(seq)
        held.saved = replace(
            held.saved,
            last_pulled_seq=min(held.saved.last_pulled_seq, seq),
            last_rendered_seq=min(held.saved.last_rendered_seq, seq),
            acked_seq=min(held.saved.acked_seq, seq),
            event_id=last.event_id if last else None,
        )
        return again

    async def events(self, conversation_id: str, after: int, limit: int) -> list[Event]:
        """See ``Store``."""
        held = self._held.get(conversation_id)
        if held is None:
            return []
        return [held.events[seq] for seq in sorted(seq for seq in held.events if seq > after)[:limit]]

    async def event_id(self, conversation_id: str, seq: int) -> str | None:
        """See ``Store``."""
        held = self._held.get(conversation_id)
        event = held.events.get(seq) if held else None
        return event.event_id if event else None

    def outgoing(self) -> list[Outgoing]:
        """Return own messages that are not done: ``sending``, ``sent`` without their event, ``refused``."""
        return list(self._outgoing.values())

    def _of(self, conversation_id: str) -> _Held:
        held = self._held.get(conversation_id)
        if held is None:
            held = self._held[conversation_id] = _Held(Saved(conversation_id))
        return held

    def _keep(self, held: _Held, event: Event) -> None:
        held.events.setdefault(event.seq, event)
        own = ("send", event.conversation_id, event.client_msg_id)
        message = self._outgoing.get(own)
        if message is not None and message.event_id == event.event_id:
            del self._outgoing[own]
        if event.type in changes.CHANGES and event.target_seq is not None:
            self._change(held, event, event.target_seq)
        if len(held.events) > self._max_events:
            self._let_go(held, held.events.pop(next(iter(held.events))))

    def _let_go(self, held: _Held, event: Event) -> None:
        edits = held.edits.get(event.target_seq or 0, [])
        if event.type == "edit" and event.seq in edits:
            edits.remove(event.seq)
            if not edits:
                del held.edits[event.target_seq or 0]

    def _change(self, held: _Held, change: Event, target_seq: int) -> None:
        target = held.events.get(target_seq)
        if target is not None:
            held.events[target_seq] = changes.apply(target, change)
        if change.type == "edit":
            held.edits.setdefault(target_seq, []).append(change.seq)
            return
        for seq in held.edits.pop(target_seq, []):
            if seq in held.events:
                held.events[seq] = replace(held.events[seq], body=None)


def _body_bytes(event: Event) -> bytes | None:
    return None if event.body is None else encode(event.body)
