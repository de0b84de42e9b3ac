"""I6 under everything that can go wrong: a store, a Kafka that loses, repeats and reorders, and a client that is slow.

The machine runs the real `Fanout` and `Session`; what their shell reads, and when, is the machine's choice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.fanout import CONVERSATION, MEMBER, Fanout
from services.gateway.session import Feed, Read, Session
from shared.ranges import OPEN, RangeSet

WINDOW = 4
RESEND_S = 5.0
NAMES = ("a", "b")
US = "ann"


@dataclass
class Timeline:
    """A conversation in the store. Seq n is `events[n - 1]`: its type and its action."""

    history: str
    events: list[tuple[str, str | None]] = field(default_factory=lambda: [(CONVERSATION, "create")])
    visible: RangeSet = field(default_factory=lambda: RangeSet([(1, OPEN)]))
    kafka: list[int] = field(default_factory=list)

    @property
    def head(self) -> int:
        return len(self.events)

    @property
    def member(self) -> bool:
        return self.visible.highest == OPEN

    def write(self, type_: str = "waybill.event.message", action: str | None = None) -> None:
        self.events.append((type_, action))
        self.kafka.append(self.head)

    def change(self) -> None:
        """The user is removed, or added again."""
        if self.member:
            self.write(MEMBER, "remove")
            self.visible = self.visible.up_to(self.head)
        else:
            self.write(MEMBER, "add")
            first = 1 if self.history == "all" else self.head
            self.visible |= RangeSet([(first, OPEN)])

    def record(self, name: str, seq: int) -> bytes:
        type_, action = self.events[seq - 1]
        body = {} if action is None else {"action": action, "user_id": US, "members": [US]}
        frame = {"t": "event", "conversation_id": name, "seq": seq, "sender_id": "bob", "type": type_, "body": body}
        return json.dumps(frame).encode()


class Device:
    """The client's side of a session, which checks each frame as it comes."""

    user_id = US
    device_id = "phone"

    def __init__(self, store: dict[str, Timeline]) -> None:
        self.session = Session(window=WINDOW, resend_s=RESEND_S, resends=10_000, page=3)
        self.store = store
        self.congested = False
        self.to_load: dict[str, None] = {}
        self.told: dict[str, RangeSet] = {}
        self.last: dict[str, int] = {}
        self.unacked: set[tuple[str, int]] = set()
        self.received: set[tuple[str, int]] = set()

    def write(self, frame: bytes) -> None:
        event = json.loads(frame)
        self.event(event["conversation_id"], event["seq"])

    def event(self, name: str, seq: int) -> None:
        visible = self.store[name].visible
        assert seq in visible, f"{seq} of {name} is not visible"
        assert name in self.told, f"{seq} of {name} before its conversation frame"
        assert seq in self.told[name], f"{seq} of {name} before the frame that lets it be seen"
        between = RangeSet([(self.last[name] + 1, seq - 1)]) if seq > self.last[name] + 1 else RangeSet()
        assert not visible & between, f"{seq} of {name} after {self.last[name]}"
        assert not self.told[name] & between, f"{seq} of {name} after {self.last[name]} looks like a gap"
        assert seq > self.last[name], f"{seq} of {name} twice or late"
        self.last[name] = seq
        self.received.add((name, seq))
        self.unacked.add((name, seq))

    def wake(self) -> None: ...

    def load(self, conversation_id: str) -> None:
        self.to_load[conversation_id] = None

    def hold_receipt(self, conversation_id: str, user_id: str, frame: bytes) -> None: ...


@dataclass
class Snapshot:
    """What a read of the store saw."""

    head: int
    visible: RangeSet


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store: dict[str, Timeline] = {}
        self.fanout = Fanout()
        self.loading: tuple[str, Snapshot] | None = None
        self.reading: tuple[Read, Snapshot, list[int]] | None = None
        self.start: dict[str, int] = {}

    @initialize(histories=st.tuples(*[st.sampled_from(["joined", "all"])] * len(NAMES)))
    def begin(self, histories: tuple[str, ...]) -> None:
        self.store = {name: Timeline(history) for name, history in zip(NAMES, histories, strict=True)}
        self.connect({})
        self.shell_runs()

    # The client.

    def connect(self, cursors: dict[str, int]) -> None:
        self.device = Device(self.store)
        self.start = cursors
        self.loading = self.reading = None
        self.fanout.register(self.device)
        for name in NAMES:
            self.fanout.enter(self.device, name)
            self.device.load(name)

    @rule(back=st.integers(0, 4), ahead=st.sampled_from([False, False, False, True]))
    def reconnect(self, back: int, *, ahead: bool) -> None:
        """With the cursors that it has, older ones, or ones that no store knows."""
        cursors = {}
        for name, timeline in self.store.items():
            held = max(self.device.last.get(name, 0), self.start.get(name, 0))
            cursors[name] = timeline.head + 3 if ahead else max(0, held - back)
        self.fanout.unregister(self.device)
        self.connect(cursors)
        self.shell_begins()

    @rule(data=st.data())
    @precondition(lambda self: self.device.unacked)
    def ack(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.device.unacked)), min_size=1, max_size=6))
        for name, seq in set(some):
            feed = self.device.session.feeds[name]
            self.device.session.ack(feed, [(seq, seq)], self.fanout.rooms[name].head)
            self.device.unacked.discard((name, seq))

    @rule()
    def congestion(self) -> None:
        self.device.congested = not self.device.congested

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for resend in self.device.session.resends_due(self.now):
            assert resend.seqs == sorted(resend.seqs)
            for seq in resend.seqs:
                assert (resend.feed.conversation_id, seq) in self.device.unacked, f"{seq} again though it was acked"
        assert not self.device.session.resends_due(self.now)

    # The store.

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def write(self, name: str, count: int) -> None:
        for _ in range(count):
            self.store[name].write()

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
            at = data.draw(st.sampled_from([0, 0, 0, len(queue) - 1]))
            self._event(name, queue.pop(at))

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        if self.store[name].kafka:
            self.store[name].kafka.pop(0)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def repeat(self, name: str, data: st.DataObject) -> None:
        waiting = set(self.store[name].kafka)
        seq = data.draw(st.integers(1, self.store[name].head))
        if seq not in waiting:
            self._event(name, seq)

    @rule(name=st.sampled_from(NAMES))
    def consumer_restarts(self, name: str) -> None:
        """What was in Kafka is passed over; heads are compared."""
        self.store[name].kafka.clear()
        self.fanout.heads({name: self.store[name].head})

    def _event(self, name: str, seq: int) -> None:
        timeline = self.store[name]
        type_ = timeline.events[seq - 1][0]
        if self.fanout.wants(name, type_):
            self._at(name)
            self.fanout.event(name, seq, type_, timeline.record(name, seq), 0.0)

    def _at(self, name: str) -> None:
        # `Fanout` asks the real clock; what it pushed is dated back to the machine's.
        for sent in self.device.session.feeds[name].unacked.values():
            sent.due = min(sent.due, self.now + RESEND_S * 2.0**sent.tries)

    # The shell: one loop that loads and reads.

    @precondition(lambda self: self.loading is None and self.reading is None)
    @rule()
    def shell_begins(self) -> None:
        if self.device.to_load:
            name = next(iter(self.device.to_load))
            del self.device.to_load[name]
            self.loading = name, self._snapshot(name)
        elif not self.device.congested and (read := self.device.session.next_read()):
            name = read.feed.conversation_id
            seen = self._snapshot(name)
            above = [seq for seq in seen.visible.up_to(seen.head).seqs() if seq > read.feed.position]
            self.reading = read, seen, above[: read.limit]

    @rule()
    def shell_runs(self) -> None:
        """Until nothing is left to do for it."""
        self.shell_ends()
        for _ in range(50):
            self.shell_begins()
            if self.loading is None and self.reading is None:
                return
            self.shell_ends()

    @precondition(lambda self: self.loading is not None or self.reading is not None)
    @rule()
    def shell_ends(self) -> None:
        if self.loading is not None:
            (name, seen), self.loading = self.loading, None
            self._loaded(name, seen)
        elif self.reading is not None:
            (read, seen, seqs), self.reading = self.reading, None
            self._read(read, seen, seqs)

    @precondition(lambda self: self.reading is not None)
    @rule()
    def read_fails(self) -> None:
        assert self.reading is not None
        self.device.session.read_failed(self.reading[0])
        self.reading = None

    def _snapshot(self, name: str) -> Snapshot:
        return Snapshot(self.store[name].head, self.store[name].visible)

    def _loaded(self, name: str, seen: Snapshot) -> None:
        feed = self.device.session.feeds[name]
        fresh, feed.fresh = feed.fresh, False
        feed.keeps_history = self.store[name].history == "all"
        feed.known(seen.head, seen.visible, "member")
        if fresh:
            end = seen.visible.up_to(seen.head).highest or 0
            cursor = min(self.start.get(name, 0), end)
            feed.position = cursor if cursor < end else seen.head
            self.device.last[name] = self.start[name] = cursor
        self.device.told[name] = feed.visible
        self.device.session.loaded(feed, self.fanout.rooms[name].know(seen.head))

    def _read(self, read: Read, seen: Snapshot, seqs: list[int]) -> None:
        session, feed = self.device.session, read.feed
        name = feed.conversation_id
        if feed.loading:
            session.read_failed(read)
            return
        if seen.head >= feed.as_of and seen.visible != feed.visible:
            session.read_failed(read)
            session.reload(feed)
            self.device.load(name)
            return
        feed.known(seen.head, seen.visible, "member")
        for seq in seqs:
            self.device.event(name, seq)
        known = self.fanout.rooms[name].know(seen.head)
        complete = len(seqs) < read.limit
        session.read_done(read, seqs, complete=complete, head=seen.head, known_head=known, now=self.now)

    # What has to be true.

    @invariant()
    def window_holds(self) -> None:
        if not self.store:
            return
        session = self.device.session
        reserved = self.reading[0].limit if self.reading is not None else 0
        assert session.in_flight + reserved <= WINDOW
        assert session.in_flight == sum(len(feed.unacked) for feed in session.feeds.values())
        assert session.room == WINDOW - session.in_flight - reserved
        on_the_way = {(name, seq) for name, feed in session.feeds.items() for seq in feed.unacked}
        assert on_the_way == self.device.unacked

    @invariant()
    def live_means_at_the_known_head(self) -> None:
        for name in self.store:
            feed: Feed = self.device.session.feeds[name]
            busy = feed.loading or feed.reading or feed in self.device.session._behind
            assert busy or feed.position >= self.fanout.rooms[name].head

    def teardown(self) -> None:
        """When all is quiet, and one more event has come, the client has everything."""
        if not self.store:
            return
        self.device.congested = False
        for name, timeline in self.store.items():
            timeline.write()
            timeline.kafka.clear()
            self._event(name, timeline.head)
        for _ in range(1000):
            if self.loading is None and self.reading is None:
                self.shell_begins()
            if self.loading is None and self.reading is None and not self.device.unacked:
                break
            self.shell_ends()
            for name, seq in sorted(self.device.unacked):
                feed = self.device.session.feeds[name]
                self.device.session.ack(feed, [(seq, seq)], self.fanout.rooms[name].head)
            self.device.unacked.clear()
        for name, timeline in self.store.items():
            wanted = {(name, seq) for seq in timeline.visible.up_to(timeline.head).seqs() if seq > self.start[name]}
            assert wanted <= self.device.received
            assert self.device.session.feeds[name].position == timeline.head


TestSession = pytest.mark.promise("I6", "I7", "protocol.3.window")(Machine.TestCase)
TestSession.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
