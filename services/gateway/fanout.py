"""From a conversation to the sessions that follow it.

Everything here runs between two awaits of the event loop: a record is offered to every feed of its conversation before
anything else can change one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from services.gateway.metrics import CURSOR_BREAKS, DROPPED_RECORDS, PUSH_SECONDS, PUSHES
from services.gateway.session import Offer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.gateway.session import Feed, Session

MEMBER = "waybill.event.member"
CONVERSATION = "waybill.event.conversation"
EDIT = "waybill.event.edit"


class Follower(Protocol):
    """What the fan-out needs of a session's connection."""

    user_id: str
    device_id: str
    session: Session

    @property
    def congested(self) -> bool:
        """Whether too much waits to be written."""

    def write(self, frame: bytes) -> None:
        """Queue a frame; never blocks."""

    def wake(self) -> None:
        """Some feed is behind."""

    def load(self, conversation_id: str) -> None:
        """Send the `conversation` frame (again), and follow the conversation from then on if it is new."""

    def hold_receipt(self, conversation_id: str, user_id: str, frame: bytes) -> None:
        """A receipt for a conversation whose `conversation` frame is not out yet."""


class Room:
    """A conversation with local sessions.

    ``head``: the highest seq that Kafka or a read for a session has told of; 0: none yet. ``committed``: the highest
    that a client was told of by `sent` or a page, maybe before Kafka brought it.
    """

    __slots__ = ("committed", "feeds", "head")

    def __init__(self) -> None:
        self.head = 0
        self.committed = 0
        self.feeds: dict[Follower, Feed] = {}

    def know(self, head: int) -> int:
        """Raise the known head; returns it."""
        self.head = max(self.head, head)
        return self.head

    @property
    def ackable(self) -> int:
        """The highest seq that a device may hold."""
        return max(self.head, self.committed)

    def seen(self, told: int, head: int) -> int:
        """A read that began when the known head was ``told`` has seen ``head``; returns the known head.

        What Kafka tells of is committed before. So a head that a later read of the primary does not see was never
        there, and nobody must wait for it.
        """
        if head < told == self.head:
            self.head = head
        return self.know(head)


class _Changing(msgspec.Struct, frozen=True):
    sender_id: str
    body: dict[str, msgspec.Raw]

    def text(self, name: str) -> str | None:
        """A string member of the body. A client may have put anything else into it: then None."""
        try:
            return _TEXT.decode(self.body.get(name, _NULL))
        except msgspec.MsgspecError:
            return None

    def created_with(self) -> list[str]:
        """The members that a conversation was created with."""
        return [*_NAMES.decode(self.body.get("members", _NONE)), self.sender_id]


class _Targeting(msgspec.Struct, frozen=True):
    target_seq: int


class _Receipt(msgspec.Struct, frozen=True):
    conversation_id: str
    user_id: str
    read_version: int
    device_id: str | None = None


_NULL, _NONE = msgspec.Raw(b"null"), msgspec.Raw(b"[]")
_TEXT = msgspec.json.Decoder(str | None)
_NAMES = msgspec.json.Decoder(list[str])
_CHANGING = msgspec.json.Decoder(_Changing)
_TARGETING = msgspec.json.Decoder(_Targeting)
_RECEIPT = msgspec.json.Decoder(_Receipt)


class Fanout:
    """All local sessions, by user and by conversation."""

    def __init__(self) -> None:
        self.rooms: dict[str, Room] = {}
        self.users: dict[str, set[Follower]] = {}

    def register(self, follower: Follower) -> None:
        """Before its conversations are listed: from now on an event that adds the user to one is not missed."""
        self.users.setdefault(follower.user_id, set()).add(follower)

    def enter(self, follower: Follower, conversation_id: str) -> Feed:
        """Before anything of the conversation is read: from now on its known head rises with every event."""
        feed = follower.session.join(conversation_id)
        self.rooms.setdefault(conversation_id, Room()).feeds[follower] = feed
        return feed

    def leave(self, follower: Follower, conversation_id: str) -> None:
        """Stop following one conversation."""
        follower.session.drop(conversation_id)
        room = self.rooms.get(conversation_id)
        if room is not None:
            room.feeds.pop(follower, None)
            if not room.feeds:
                del self.rooms[conversation_id]

    def unregister(self, follower: Follower) -> None:
        """The session has ended."""
        for conversation_id in list(follower.session.feeds):
            self.leave(follower, conversation_id)
        followers = self.users.get(follower.user_id, set())
        followers.discard(follower)
        if not followers:
            self.users.pop(follower.user_id, None)

    def heads(self, heads: Mapping[str, int]) -> None:
        """The heads of conversations as they are in the store: who is below reads."""
        for conversation_id, head in heads.items():
            room = self.rooms.get(conversation_id)
            if room is None:
                continue
            room.know(head)
            for follower, feed in room.feeds.items():
                if feed.position < head:
                    follower.session.fall_behind(feed)
                    follower.wake()

    def belongs(self, user_id: str, conversation_id: str) -> None:
        """The user is or was a member: its sessions follow the conversation if they do not yet."""
        for follower in self.users.get(user_id, ()):
            if conversation_id not in follower.session.feeds:
                self.enter(follower, conversation_id)
                follower.load(conversation_id)

    def committed(self, user_id: str, conversation_id: str, seq: int) -> None:
        """The user was told that the conversation has reached this seq: from now on it may be acked and marked."""
        self.belongs(user_id, conversation_id)
        room = self.rooms.get(conversation_id)
        if room is not None:
            room.committed = max(room.committed, seq)

    def wants(self, conversation_id: str, type_: str) -> bool:
        """Whether a record has to be looked at: a look-up, before any JSON is touched."""
        if conversation_id in self.rooms or type_ in (MEMBER, CONVERSATION):
            return True
        DROPPED_RECORDS.inc()
        return False

    def event(self, conversation_id: str, seq: int, type_: str, value: bytes, stamped_s: float) -> None:
        """An event came from Kafka; ``stamped_s``: when, in seconds since the epoch.

        Raises `msgspec.MsgspecError` if it has to be looked into and cannot be read.
        """
        change = _CHANGING.decode(value) if type_ in (MEMBER, CONVERSATION) else None
        target = _TARGETING.decode(value).target_seq if type_ == EDIT else 0
        if change is not None:
            self._bring_in(conversation_id, change)
        room = self.rooms.get(conversation_id)
        if room is None:
            return
        if seq > room.head + 1 and room.head:
            CURSOR_BREAKS.labels("gap").inc()
        room.know(seq)
        now = time.monotonic()
        pushed = 0
        for follower, feed in room.feeds.items():
            if change is not None and not feed.loading and seq > feed.as_of:
                self._apply(follower, feed, seq, change, type_)
            if target and seq > feed.position and feed.may_see(seq) and not feed.may_see(target):
                follower.session.fall_behind(feed)  # its edit comes without a body: present_frame knows how
                follower.wake()
                continue
            offer = follower.session.offer(feed, seq, now, congested=follower.congested)
            if offer is Offer.PUSH:
                follower.write(value)
                pushed += 1
            elif offer is Offer.READ:
                follower.wake()
        if pushed:
            PUSHES.inc(pushed)
            PUSH_SECONDS.observe(max(0.0, time.time() - stamped_s))

    def receipt(self, conversation_id: str, value: bytes) -> None:
        """A receipt came from Kafka: for all sessions of its user, and in a direct chat for the peer's.

        One with a ``device_id`` answers a refused mark and is for that device alone. Raises `msgspec.MsgspecError`.
        """
        room = self.rooms.get(conversation_id)
        if room is None:
            return
        receipt = _RECEIPT.decode(value)
        for follower in self.users.get(receipt.user_id, ()):
            feed = room.feeds.get(follower)
            if feed is not None and receipt.device_id in (None, follower.device_id):
                feed.read_version = max(feed.read_version, receipt.read_version)
                self._tell(follower, feed, receipt.user_id, value)
        if receipt.device_id is None:
            for follower, feed in room.feeds.items():
                if follower.user_id == receipt.user_id:
                    continue
                if not (feed.direct or feed.loading):
                    break  # a group: other members' receipts are told to nobody
                self._tell(follower, feed, receipt.user_id, value)

    def _tell(self, follower: Follower, feed: Feed, user_id: str, value: bytes) -> None:
        if feed.loading:
            follower.hold_receipt(feed.conversation_id, user_id, value)
        else:
            follower.write(value)

    def _bring_in(self, conversation_id: str, change: _Changing) -> None:
        action = change.text("action")
        if action == "create":
            for user_id in change.created_with():
                self.belongs(user_id, conversation_id)
        elif action == "add":
            self.belongs(change.text("user_id") or "", conversation_id)

    def _apply(self, follower: Follower, feed: Feed, seq: int, change: _Changing, type_: str) -> None:
        if type_ == CONVERSATION:
            if feed.may_see(seq):
                follower.load(feed.conversation_id)  # the title and the like
            return
        action = change.text("action")
        subject = change.sender_id if action == "leave" else change.text("user_id")
        if action is None or subject != follower.user_id:
            return
        before = feed.visible
        feed.changed_by(seq, action, change.text("role"))
        if feed.visible - before:
            follower.session.reload(feed)
        follower.load(feed.conversation_id)
