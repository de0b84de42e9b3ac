"""I6 under everything that can go wrong: a store, a Kafka that loses, repeats and reorders, and a client that is slow.

The machine runs the real `Fanout`, `Turns`, `Session` and `loaded`; what their shells read, and when, is the machine's
choice: a read sees the store as it was when it began, whatever happens before its end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.events import entry
from services.gateway.fanout import Fanout
from services.gateway.listing import Listed, Marks
from services.gateway.loading import LATER, Begin, loaded
from services.gateway.pushed import Pushes
from services.gateway.session import Session
from services.gateway.turns import Need, Own, Turns
from services.gateway.wire import ready
from shared.ranges import OPEN, RangeSet, visible_head
from tests.ready import payloads

WINDOW = 6
PAGE = 3
RESEND_S = 5.0
NAMES = ("a", "b")
US = "ann"


@dataclass
class Event:
    type: str = "message"
    action: str | None = None
    target: int = 0


@dataclass
class Timeline:
    """A conversation in the store. Seq n is `events[n - 1]`."""

    history: str
    events: list[Event] = field(default_factory=lambda: [Event("conversation", "create")])
    visible: RangeSet = field(default_factory=lambda: RangeSet([(1, OPEN)]))
    kafka: list[int] = field(default_factory=list)

    @property
    def head(self) -> int:
        return len(self.events)

    @property
    def member(self) -> bool:
        return self.visible.highest == OPEN

    def write(self, event: Event | None = None) -> None:
        self.events.append(event or Event())
        self.kafka.append(self.head)

    def change(self) -> None:
        """The user is removed, or added again."""
        if self.member:
            self.write(Event("member", "remove"))
            self.visible = self.visible.up_to(self.head)
        else:
            self.write(Event("member", "add"))
            self.visible |= RangeSet([(1 if self.history == "all" else self.head, OPEN)])

    def record(self, name: str, seq: int, visible: RangeSet | None = None) -> bytes:
        """The event as it is published, or, given what a user may see, as a read for them finds it."""
        event = self.events[seq - 1]
        body: dict[str, Any] | None = {"user_id": US, "members": [US]}
        if event.action is not None:
            body = {**(body or {}), "action": event.action}
        frame: dict[str, Any] = {"t": "event", "conversation_id": name, "seq": seq, "sender_id": "bob"}
        if event.target:
            frame["target_seq"] = event.target
            if visible is not None and event.target not in visible:
                body = None
        return json.dumps({**frame, "type": event.type, "body": body}).encode()


class Device:
    """The client's side of a session, which checks each frame as it comes; to the gateway, its connection."""

    user_id = US
    device_id = "phone"
    number = 1

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.store = machine.store
        self.session = Session(US, window=WINDOW, resend_s=RESEND_S, resends=10_000, pushes=machine.pushes)
        self.session_id = f"session-{len(machine.first)}"
        self.first = machine.first.setdefault(self.session_id, set())
        self.parts = SimpleNamespace(transitions=SimpleNamespace(note=lambda *_, **__: None))
        self.congested = False
        self.ended = False
        self.to_load: dict[str, None] = {}
        self.told: dict[str, RangeSet] = {}
        self.last: dict[str, int] = {}
        self.unacked: set[tuple[str, int]] = set()
        self.received: set[tuple[str, int]] = set()

    def write(self, frames: bytes) -> None:
        for text in payloads(frames):
            frame = json.loads(text)
            if frame["t"] == "conversation":
                self.conversation(frame)
            else:
                self.event(frame)

    def conversation(self, frame: dict[str, Any]) -> None:
        name = frame["conversation_id"]
        self.told[name] = RangeSet([(low, OPEN if high is None else high) for low, high in frame["visible"]])
        self.last.setdefault(name, frame["cursor"])

    def event(self, frame: dict[str, Any]) -> None:
        name, seq = frame["conversation_id"], frame["seq"]
        visible = self.store[name].visible
        assert seq in visible, f"{seq} of {name} is not visible"
        assert name in self.told, f"{seq} of {name} before its conversation frame"
        assert seq in self.told[name], f"{seq} of {name} before the frame that lets it be seen"
        between = RangeSet([(self.last[name] + 1, seq - 1)]) if seq > self.last[name] + 1 else RangeSet()
        assert not visible & between, f"{seq} of {name} after {self.last[name]}"
        assert not self.told[name] & between, f"{seq} of {name} after {self.last[name]} looks like a gap"
        assert seq > self.last[name], f"{seq} of {name} twice or late"
        target = frame.get("target_seq")
        assert target is None or target in visible or frame["body"] is None, f"{seq} of {name} shows what is hidden"
        self.last[name] = seq
        self.received.add((name, seq))
        self.first.add((name, seq))
        self.unacked.add((name, seq))

    def handed_out(self) -> None:
        assert self.session.due < float("inf")

    def wake(self) -> None:
        self.machine.turns.wake(self)

    def load(self, conversation_id: str) -> None:
        self.to_load[conversation_id] = None

    def receipt(self, *_: object) -> None: ...

    def take_ack(self, feed: Any, ranges: Any, head: int) -> None:
        self.session.ack(feed, ranges, head)


@dataclass
class Snapshot:
    """What a read of the store saw."""

    head: int
    visible: RangeSet


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pushes = Pushes()
        self.first: dict[str, set[tuple[str, int]]] = {}
        self.logged: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.store: dict[str, Timeline] = {}
        self.fanout = Fanout(ring=4, clock=lambda: self.now)
        self.turns = Turns(self.fanout, page=PAGE)
        self.queue = 0
        self.turns.queued = self._queued
        self.woken_later: list[Any] = []
        self.turns.later = self.woken_later.append
        self.loading: tuple[str, Snapshot, Device] | None = None
        self.reading: list[tuple[Need, Snapshot]] = []

    def _queued(self) -> None:
        self.queue += 1

    @initialize(histories=st.tuples(*[st.sampled_from(["joined", "all"])] * len(NAMES)))
    def begin(self, histories: tuple[str, ...]) -> None:
        self.store = {name: Timeline(history) for name, history in zip(NAMES, histories, strict=True)}
        self.connect({})
        self.all_is_read()

    # The client.

    def connect(self, cursors: dict[str, int]) -> None:
        self.device = Device(self)
        self.cursors = cursors
        self.start: dict[str, int] = {}
        self.fanout.register(self.device)
        for name in NAMES:
            self.fanout.enter(self.device, name)
            self.device.load(name)

    @rule(back=st.integers(0, 4), ahead=st.sampled_from([False, False, False, True]))
    def reconnect(self, back: int, *, ahead: bool) -> None:
        """With the cursors that it has, older ones, or ones that no store knows."""
        cursors = {}
        for name, timeline in self.store.items():
            held = max(self.device.last.get(name, 0), self.cursors.get(name, 0))
            cursors[name] = timeline.head + 3 if ahead else max(0, held - back)
        self.device.ended = True
        self.fanout.unregister(self.device)
        self.connect(cursors)

    @rule(data=st.data())
    @precondition(lambda self: self.device.unacked)
    def ack(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.device.unacked)), min_size=1, max_size=6))
        self._ack(set(some))

    @rule()
    @precondition(lambda self: self.device.unacked)
    def ack_all(self) -> None:
        self._ack(set(self.device.unacked))

    def _ack(self, some: set[tuple[str, int]]) -> None:
        for name in NAMES:
            seqs = RangeSet([(seq, seq) for of, seq in some if of == name])
            feed = self.device.session.feeds.get(name)
            if seqs and feed is not None:
                _, ignored = self.device.session.ack(feed, tuple(seqs), self.fanout.rooms[name].head)
                assert not ignored
        self.device.unacked -= some
        self.device.wake()

    @rule(congested=st.booleans())
    def congestion(self, *, congested: bool) -> None:
        self.device.congested = congested
        if not congested:
            self.device.wake()

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for resend in self.device.session.resends_due(self.now):
            name = resend.feed.conversation_id
            for seq in resend.seqs.seqs():
                assert (name, seq) in self.device.unacked, f"{seq} again though it was acked"
        assert not self.device.session.resends_due(self.now)

    # The store.

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def write(self, name: str, count: int) -> None:
        for _ in range(count):
            self.store[name].write()

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def edit(self, name: str, data: st.DataObject) -> None:
        timeline = self.store[name]
        timeline.write(Event("edit", target=data.draw(st.integers(1, timeline.head))))

    @rule(name=st.sampled_from(NAMES))
    def membership(self, name: str) -> None:
        self.store[name].change()

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 3))
    def live(self, name: str, count: int) -> None:
        """As on most days: what is written comes at once."""
        for _ in range(count):
            self.store[name].write()
            self._event(name, self.store[name].kafka.pop())

    @rule(name=st.sampled_from(NAMES))
    def live_membership(self, name: str) -> None:
        self.store[name].change()
        self._event(name, self.store[name].kafka.pop())

    # Kafka.

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def deliver(self, name: str, data: st.DataObject) -> None:
        """The next record, most of the time; or any other, which the network reordered."""
        queue = self.store[name].kafka
        if queue:
            self._event(name, queue.pop(data.draw(st.sampled_from([0, 0, 0, len(queue) - 1]))))

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        if self.store[name].kafka:
            self.store[name].kafka.pop(0)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def repeat(self, name: str, data: st.DataObject) -> None:
        seq = data.draw(st.integers(1, self.store[name].head))
        if seq not in self.store[name].kafka:
            self._event(name, seq)

    @rule(name=st.sampled_from(NAMES))
    def sweep(self, name: str) -> None:
        """What was in Kafka is passed over; heads are compared."""
        self.store[name].kafka.clear()
        self.fanout.heads({name: self.store[name].head})

    def _event(self, name: str, seq: int) -> None:
        timeline = self.store[name]
        type_ = "waybill.event." + timeline.events[seq - 1].type
        if self.fanout.wants(name, type_):
            self.fanout.event(name, seq, type_, timeline.record(name, seq))

    @rule()
    def turn(self) -> None:
        self.fanout.turn(self.now)

    @rule()
    def turns_until_quiet(self) -> None:
        while self.fanout.turn(self.now):
            pass

    # The shells.

    @precondition(lambda self: self.loading is None and self.device.to_load)
    @rule()
    def load_begins(self) -> None:
        name = next(iter(self.device.to_load))
        del self.device.to_load[name]
        self.loading = name, self._snapshot(name), self.device

    @precondition(lambda self: self.loading is not None)
    @rule()
    def load_ends(self) -> None:
        assert self.loading is not None
        (name, seen, device), self.loading = self.loading, None
        feed = device.session.feeds.get(name)
        if feed is None or device is not self.device:
            return
        fresh = feed.fresh
        head = visible_head(seen.visible, seen.head)
        listed = Listed(
            conversation_id=name,
            kind="group",
            title="t",
            keeps_history=self.store[name].history == "all",
            as_of=seen.head,
            role="member",
            visible=seen.visible,
            head=head,
            record=0,
            mine=Marks(US, 0, 0, 0),
            unread=0,
            updated_at=None,
            peer=None,
        )
        begin = Begin(cursors={name: (seq, None) for name, seq in self.cursors.items()}) if fresh else LATER
        # What stands at a cursor that nobody can have is beside the point here.
        frames = loaded(device, feed, listed, begin if name in self.cursors or not fresh else Begin("full", {}))
        if fresh:
            self.start[name] = min(feed.position, head)
            device.last[name] = self.start[name]
            device.told[name] = seen.visible
        device.write(b"".join(frames))
        device.wake()

    @precondition(lambda self: self.queue > 0)
    @rule()
    def read_begins(self) -> None:
        self.queue -= 1
        need = self.turns.next()
        if need is not None:
            self.reading.append((need, self._snapshot(need.key.room.conversation_id)))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def read_ends(self, data: st.DataObject) -> None:
        need, seen = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        self._read(need, seen)

    @precondition(lambda self: self.reading)
    @rule(outcome=st.sampled_from(["failed", "broken"]))
    def read_fails(self, outcome: str) -> None:
        need, _ = self.reading.pop(0)
        getattr(self.turns, outcome)(need)

    @rule()
    def later(self) -> None:
        woken, self.woken_later[:] = list(self.woken_later), []
        for wake in woken:
            wake()

    def _read(self, need: Need, seen: Snapshot) -> None:
        name, position = need.key.room.conversation_id, need.key.position
        timeline = self.store[name]
        if need.key.user_id is None:
            seqs = range(position + 1, min(seen.head, position + PAGE) + 1)
            entries = [entry(seq, timeline.events[seq - 1].type, timeline.record(name, seq)) for seq in seqs]
            run = self.turns.shared(need, seen.head, entries)
            while self.turns.hand_out(need, run, 1):
                pass
        else:
            above = [seq for seq in seen.visible.up_to(seen.head).seqs() if seq > position][:PAGE]
            events = [(seq, ready(timeline.record(name, seq, seen.visible))) for seq in above]
            self.turns.own(need, Own(seen.head, "member", seen.visible, events))

    def _snapshot(self, name: str) -> Snapshot:
        return Snapshot(self.store[name].head, self.store[name].visible)

    @rule()
    def all_is_read(self) -> None:
        """Until nothing is left to do for the shells."""
        for _ in range(200):
            while self.fanout.turn(self.now):
                pass
            if self.loading is not None:
                self.load_ends()
            elif self.device.to_load:
                self.load_begins()
            elif self.reading:
                self._read(*self.reading.pop())
            elif self.queue:
                self.read_begins()
            elif self.woken_later:
                self.later()
            else:
                return
        raise AssertionError("the shells never come to rest")

    @rule(most=st.sampled_from([1, 3, 1_000]), lost=st.booleans())
    def pushes_are_logged(self, most: int, *, lost: bool) -> None:
        """Each once, whether or not the log had to be asked twice."""
        taken = self.pushes.take(most)
        if lost:
            self.pushes.put_back(taken)
            return
        for one in taken:
            assert (one.user_id, one.device_id) == (US, "phone")
            assert 0.0 <= one.at <= self.now
            seqs = {(one.conversation_id, seq) for seq in range(one.first, one.last + 1)}
            assert seqs, one
            assert not seqs & self.logged[one.session_id], f"{one} is logged twice"
            self.logged[one.session_id] |= seqs

    # What has to be true.

    @invariant()
    def window_holds(self) -> None:
        if not self.store:
            return
        session = self.device.session
        assert session.in_flight <= WINDOW
        assert session.in_flight == sum(feed.in_flight for feed in session.feeds.values())
        on_the_way = {(name, seq) for name, feed in session.feeds.items() for seq in session.unacked(feed).seqs()}
        assert on_the_way == self.device.unacked, f"{on_the_way} {self.device.unacked}"
        assert session.in_flight == len(on_the_way)

    @invariant()
    def who_misses_something_is_in_somebodys_turn(self) -> None:
        for name in self.store:
            feed = self.device.session.feeds[name]
            session = self.device.session
            busy = feed.loading or feed in session.behind or feed in session.reads or feed is session.reading
            assert feed.behind or feed not in session.behind
            assert busy or feed.room.queued or feed.position >= feed.room.top
            assert not feed.behind or busy

    def teardown(self) -> None:
        """When all is quiet, and one more event has come, the client has everything."""
        if not self.store:
            return
        self.device.congested = False
        self.device.wake()
        for name, timeline in self.store.items():
            timeline.write()
            timeline.kafka.clear()
            self._event(name, timeline.head)
        for _ in range(200):
            self.all_is_read()
            if not self.device.unacked:
                break
            self.ack_all()
        for name, timeline in self.store.items():
            wanted = {(name, seq) for seq in timeline.visible.up_to(timeline.head).seqs() if seq > self.start[name]}
            assert wanted <= self.device.received
            assert self.device.session.feeds[name].position == timeline.head, name
        self.pushes_are_logged(1_000_000, lost=False)
        assert {name: seqs for name, seqs in self.first.items() if seqs} == self.logged
        assert not len(self.pushes)


TestSession = pytest.mark.promise("I6", "I7", "protocol.3.window")(Machine.TestCase)
TestSession.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
