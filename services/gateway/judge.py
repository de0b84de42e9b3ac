"""What the sweep read is held against what Kafka brought, and whoever lacks something is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from services.gateway.events import EVENT_TYPE, entry
from services.gateway.metrics import SWEEP_FINDS, SWEEP_ROWS
from services.gateway.sweep_rules import ChangeRecords, ReceiptRecords, Row
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from services.gateway.sweep_rules import Turn

_LOOP = LOOP_ERRORS.labels("sweep")
_CONTENTS_AT_ONCE = 200
_HEADS_AT_ONCE = 200


class Session(Protocol):
    """Of a session, what it follows."""

    @property
    def feeds(self) -> Mapping[str, object]:
        """By conversation."""


class Follower(Protocol):
    """A local session; ``number``: of it among its device's, 0 if it has none yet."""

    @property
    def device_id(self) -> str:
        """The device."""

    @property
    def number(self) -> int:
        """Above that of every earlier session of the device."""

    @property
    def session(self) -> Session:
        """What it follows."""


class Room(Protocol):
    """A conversation with local sessions. ``top``: the last seq that came in order, for all of them."""

    top: int


class Fanout(Protocol):
    """Where what was found goes to. To be told of something again is harmless."""

    @property
    def rooms(self) -> Mapping[str, Room]:
        """By conversation."""

    @property
    def users(self) -> Mapping[str, Collection[Follower]]:
        """By user."""

    def heads(self, heads: Mapping[str, int], /) -> object:
        """Who is below reads."""

    def event(
        self, conversation_id: str, seq: int, type_: str, value: bytes, /, *, stamped: float, committed: float
    ) -> object:
        """As if Kafka had brought it."""

    def receipt(self, conversation_id: str, value: bytes, /) -> object:
        """As if Kafka had brought it."""


class Content(Protocol):
    """A row of the outbox with its payload."""

    def __getitem__(self, name: str, /) -> Any: ...


class Judge:
    """``contents(rows)``: the rows with their payloads, as many as are still there; may raise `UnavailableError`.

    ``found``: is told of events that Kafka did not bring: conversation, first and last seq.
    """

    def __init__(
        self,
        fanout: Fanout,
        contents: Callable[[Sequence[Row]], Awaitable[Sequence[Content]]],
        found: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self._fanout = fanout
        self._contents = contents
        self._tell = found
        self._found = False
        self.receipts = ReceiptRecords()
        self.changes = ChangeRecords()

    def clear(self) -> None:
        """Ids and seqs begin anew."""
        self.receipts.clear()
        self.changes.clear()

    async def judge(self, turn: Turn) -> bool:
        """Tell what is unknown here; whether there was anything.

        If it could not be done to the end, call it again with the same turn.
        """
        self._found = False
        if turn.unseen is None:
            SWEEP_ROWS.inc(turn.rows)
            turn.changes = self.changes.unseen(turn.changes)
            turn.unseen = [
                Row(shard, id_)
                for shard, end in turn.ends.items()
                for id_ in self.receipts.unseen(shard, turn.receipts.get(shard, ()), end)
            ]
        while some := turn.changes[:_CONTENTS_AT_ONCE]:
            for row in await self._contents([change.row for change in some]):
                self._change(row)
            del turn.changes[: len(some)]
        await self._heads(turn.heads)
        while unseen := turn.unseen[:_CONTENTS_AT_ONCE]:
            for row in await self._contents(unseen):
                self._receipt(row)
            del turn.unseen[: len(unseen)]
        return self._found

    def _find(self, kind: str, amount: int = 1) -> None:
        SWEEP_FINDS.labels(kind).inc(amount)
        self._found = True

    async def _heads(self, heads: Mapping[str, int]) -> None:
        rooms = self._fanout.rooms
        found = {id_: seq for id_, seq in heads.items() if (room := rooms.get(id_)) is not None and room.top < seq}
        conversations = list(found)
        for start in range(0, len(conversations), _HEADS_AT_ONCE):
            some = conversations[start : start + _HEADS_AT_ONCE]
            self._find("event", len(some))
            for id_ in some:
                room = rooms.get(id_)
                self._tell(id_, room.top + 1 if room is not None and room.top else found[id_], found[id_])
            self._fanout.heads({id_: found[id_] for id_ in some})
            await asyncio.sleep(0)

    def _change(self, row: Content) -> None:
        """A change that Kafka did not bring: is there anybody here who does not know it?"""
        conversation_id, seq, payload = row["conversation_id"], row["seq"], row["payload"]
        room = self._fanout.rooms.get(conversation_id)
        try:
            change = entry(seq, row["type"].removeprefix(EVENT_TYPE), payload).change
            if (room is not None and room.top < seq) or (change and self._lacks(conversation_id, change.added)):
                self._find("change")
                self._tell(conversation_id, seq, seq)
                self._fanout.event(conversation_id, seq, row["type"], payload, stamped=0.0, committed=row["committed"])
        except msgspec.MsgspecError:
            _LOOP.inc()
            logger(__name__).warning("an event of the outbox cannot be read", conversation=conversation_id, seq=seq)

    def _lacks(self, conversation_id: str, user_ids: Iterable[str]) -> bool:
        """Whether a session of one of these users does not follow the conversation."""
        users = self._fanout.users
        return any(
            conversation_id not in follower.session.feeds for user_id in user_ids for follower in users.get(user_id, ())
        )

    def _receipt(self, row: Content) -> None:
        if row["conversation_id"] in self._fanout.rooms:
            self._find("receipt")
            self.receipts.tell(Row(row["shard"], row["id"]))
            self._fanout.receipt(row["conversation_id"], row["payload"])
