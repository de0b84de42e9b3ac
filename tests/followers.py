"""Sessions without a socket, and the events that come to them: for tests of what lies between Kafka and a session."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from services.gateway import handout
from services.gateway.events import EVENT_TYPE, entry
from services.gateway.session import Session
from shared.ranges import OPEN, RangeSet
from tests.ready import payloads

if TYPE_CHECKING:
    import pytest

    from services.gateway.events import Entry
    from services.gateway.fanout import Fanout
    from services.gateway.feed import Feed

ALL = RangeSet([(1, OPEN)])
FOREVER = float("inf")


def value(seq: int, type_: str = "message", name: str = "c", *, event: int = 0, **more: Any) -> bytes:
    """An event's frame, as it is in Kafka. ``event``: makes another id of it."""
    frame = {
        "t": "event",
        "conversation_id": name,
        "seq": seq,
        "event_id": f"{seq:08x}-0000-7000-8000-{event:012x}",
        "type": type_,
        "sender_id": "bob",
        "body": {},
    }
    return json.dumps({**frame, **more}, separators=(",", ":")).encode()


def made(seq: int, type_: str = "message", **more: Any) -> Entry:
    """An event as the gateway handles it."""
    return entry(seq, type_, value(seq, type_, **more))


def written(frames: bytes) -> list[dict[str, Any]]:
    """Ready frames, read back."""
    return [json.loads(text) for text in payloads(frames)]


def faults(patch: pytest.MonkeyPatch) -> list[str]:
    """What is logged of sessions that could not be served. The log itself takes its time to show where."""
    told: list[str] = []
    patch.setattr(handout, "logger", lambda _: SimpleNamespace(exception=told.append))
    return told


class Follower:
    """A session's connection that keeps what it is told."""

    def __init__(self, user_id: str, device_id: str = "phone", *, window: int = 100) -> None:
        self.user_id, self.device_id, self.number = user_id, device_id, 1
        self.session_id = f"{user_id}/{device_id}"
        self.session = Session(user_id, window=window, resend_s=5, resends=5)
        self.congested = False
        self.written: list[dict[str, Any]] = []
        self.writes = 0
        self.woken = 0
        self.loads: list[str] = []
        self.receipts: list[tuple[str, str, dict[str, Any]]] = []
        self.timed = 0
        self.ended = False

    def __repr__(self) -> str:
        return f"{self.user_id}/{self.device_id}"

    def write(self, frames: bytes) -> None:
        self.writes += 1
        self.written += written(frames)

    def handed_out(self) -> None:
        self.timed += 1

    def wake(self) -> None:
        self.woken += 1

    def load(self, conversation_id: str) -> None:
        self.loads.append(conversation_id)

    def receipt(self, feed: Feed, user_id: str, frame: bytes) -> None:
        self.receipts.append((feed.conversation_id, user_id, written(frame)[0]))

    def broken(self) -> None:
        self.ended = True

    @property
    def seqs(self) -> list[int]:
        """Of the events that were written, in their order."""
        return [frame["seq"] for frame in self.written]

    @property
    def got(self) -> list[tuple[int, object]]:
        """Seq and body of them."""
        return [(frame["seq"], frame["body"]) for frame in self.written]


def follow(
    fanout: Fanout,
    follower: Follower,
    name: str = "c",
    *,
    at: int = 0,
    head: int | None = None,
    visible: RangeSet = ALL,
    direct: bool = False,
) -> Feed:
    """As when its `conversation` frame is out: it was read at ``head``, and events above ``at`` are to come."""
    fanout.register(follower)
    feed = fanout.enter(follower, name)
    head = at if head is None else head
    feed.known(head, visible, "member")
    feed.fresh = False
    feed.direct = feed.room.direct = direct
    feed.begin(at, at)
    feed.room.know(head)
    follower.session.loaded(feed)
    return feed


def come(fanout: Fanout, *seqs: int, type_: str = "message", name: str = "c", **more: Any) -> None:
    """Records come from Kafka, and no feed was visited yet."""
    for seq in seqs:
        if fanout.wants(name, EVENT_TYPE + type_):
            fanout.event(name, seq, EVENT_TYPE + type_, value(seq, type_, name, **more))


def say(fanout: Fanout, *seqs: int, type_: str = "message", name: str = "c", **more: Any) -> None:
    """Records come from Kafka, and go to whom they can."""
    come(fanout, *seqs, type_=type_, name=name, **more)
    visit(fanout)


def visit(fanout: Fanout) -> None:
    """All queued feeds."""
    while fanout.turn(FOREVER):
        pass
