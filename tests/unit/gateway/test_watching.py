"""Receipts of a group on their way to those who watch it: folded, bounded, and none lost for good."""

import heapq
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway import watching as watching_module
from services.gateway.fanout import Fanout
from services.gateway.feed import Feed
from services.gateway.folding import MOST, Fold
from services.gateway.metrics import WATCH_RECEIPTS
from services.gateway.telling import Telling
from services.gateway.watching import FOLD_S
from shared.ranges import RangeSet
from tests.followers import ALL, Follower, faults, follow, written


class Time:
    """Seconds, and what is to be done when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self.due, (self.now + seconds, self._number, then))

    def forward(self, seconds: float = 0.0) -> None:
        end = self.now + seconds
        while self.due and self.due[0][0] <= end:
            self.now = max(self.now, self.due[0][0])
            heapq.heappop(self.due)[2]()
        self.now = end


class Group:
    """A group with local sessions, and receipts that come."""

    def __init__(self) -> None:
        self.time = Time()
        self.fanout = Fanout(clock=self.time)
        self.fanout.watching.later = self.time.later

    def follow(self, user_id: str, device_id: str = "phone", *, watch: bool = True) -> tuple[Follower, Feed]:
        follower = Follower(user_id, device_id)
        feed = follow(self.fanout, follower)
        if watch:
            self.fanout.watching.watch(feed)
        return follower, feed

    def receipt(self, user_id: str, read_seq: int = 1, **more: Any) -> None:
        told = {"t": "receipt", "conversation_id": "c", "user_id": user_id, "read_version": 0, "read_seq": read_seq}
        self.fanout.receipt("c", json.dumps({**told, **more}).encode())


def told(follower: Follower) -> list[tuple[str, int]]:
    return [(frame["user_id"], frame["read_seq"]) for frame in follower.written]


@pytest.fixture
def group() -> Group:
    return Group()


class TestRounds:
    @pytest.mark.promise("protocol.3.watch")
    def test_the_first_goes_out_at_once_and_then_one_of_each_member_a_second(self, group: Group) -> None:
        ann, _ = group.follow("ann")
        for seq in (1, 2):
            group.receipt("bob", seq)
        assert ann.written == [], "what comes in the same turn is folded"
        group.time.forward()
        assert told(ann) == [("bob", 2)]
        for seq in (3, 4):
            group.receipt("bob", seq)
            group.receipt("cyd", seq)
            group.time.forward(0.4)
        assert len(told(ann)) == 1
        group.time.forward(0.3)
        assert told(ann)[1:] == [("bob", 4), ("cyd", 4)]
        assert ann.writes == 2
        group.time.forward(10.0)
        assert group.time.due == [], "nothing is due where nothing comes"

    def test_so_many_members_in_a_second_and_the_others_in_the_next_in_their_order(self, group: Group) -> None:
        ann, _ = group.follow("ann")
        for number in range(MOST + 20):
            group.receipt(f"u{number}")
        group.time.forward()
        assert told(ann) == [(f"u{number}", 1) for number in range(MOST)]
        for number in range(MOST + 20):
            group.receipt(f"u{number}", 2)
        group.time.forward(1.0)
        assert told(ann)[MOST : MOST + 21] == [(f"u{MOST + number}", 2) for number in range(20)] + [("u0", 2)]
        assert len(told(ann)) == 2 * MOST
        group.time.forward(1.0)
        assert len(told(ann)) == 2 * MOST + 20

    def test_all_who_stand_at_the_same_place_share_one_buffer(self, group: Group) -> None:
        buffers: list[bytes] = []
        for number in range(200):
            watcher, _ = group.follow(f"w{number}")
            watcher.write = buffers.append  # type: ignore[method-assign]
        before = WATCH_RECEIPTS._value.get()
        for number in range(50):
            group.receipt(f"u{number}")
        group.time.forward()
        assert len(buffers) == 200
        assert len({id(one) for one in buffers}) == 1
        assert [frame["user_id"] for frame in written(buffers[0])] == [f"u{number}" for number in range(50)]
        assert WATCH_RECEIPTS._value.get() - before == 200 * 50

    @pytest.mark.promise("protocol.5.receipt_goes_to")
    def test_ones_own_marks_come_at_once_and_once(self, group: Group) -> None:
        ann, _ = group.follow("ann")
        pad, _ = group.follow("ann", "pad")
        for user_id in ("bob", "ann", "cyd"):
            group.receipt(user_id)
        assert [[user for _, user, _ in one.receipts] for one in (ann, pad)] == [["ann"], ["ann"]]
        group.time.forward()
        assert told(ann) == told(pad) == [("bob", 1), ("cyd", 1)]
        group.receipt("ann", 2)
        group.time.forward(1.0)
        assert (len(ann.receipts), ann.writes) == (2, 1)

    def test_many_are_told_in_portions(self, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watching_module, "_PORTION", 2)
        crowd = [group.follow(f"w{number}")[0] for number in range(5)]
        group.receipt("bob", 1)
        later: list[Callable[[], None]] = []
        group.fanout.watching.later = lambda _, then: later.append(then)
        group.time.forward()
        assert sum(one.writes for one in crowd) == 2
        group.receipt("bob", 2)
        group.fanout.unregister(crowd[0])
        for _ in range(2):
            later.pop(0)()
        assert [told(one) for one in crowd] == [[], *[[("bob", 1)]] * 4]
        [again] = later
        later.clear()
        again()
        while later:
            later.pop(0)()
        assert [told(one) for one in crowd[1:]] == [[("bob", 1), ("bob", 2)]] * 4

    def test_a_fault_at_one_is_nobody_elses(self, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        said = faults(monkeypatch)
        ann, _ = group.follow("ann")
        cyd, _ = group.follow("cyd")

        def fails(*_: object) -> None:
            raise RuntimeError("a fault")

        ann.write = fails  # type: ignore[method-assign]
        group.receipt("bob")
        group.time.forward()
        assert (ann.ended, told(cyd), len(said)) == (True, [("bob", 1)], 1)


class TestSlow:
    def test_who_takes_nothing_hears_the_newest_of_all_later(self, group: Group) -> None:
        slow, _ = group.follow("ann")
        quick, _ = group.follow("cyd")
        slow.congested = True
        for seq in range(1, 6):
            for user_id in ("bob", "dan"):
                group.receipt(user_id, seq)
            group.time.forward(1.0)
        group.receipt("eve", 1)
        group.time.forward(1.0)
        assert (told(slow), len(told(quick))) == ([], 11)
        slow.congested = False
        group.time.forward(1.0)
        assert told(slow) == [("bob", 5), ("dan", 5), ("eve", 1)]
        group.time.forward(10.0)
        assert (len(told(slow)), len(told(quick)), group.time.due) == (3, 11, [])

    def test_what_is_kept_for_it_is_bounded_by_the_members(self, group: Group) -> None:
        slow, feed = group.follow("ann")
        slow.congested = True
        for seq in range(1, 400):
            for number in range(10):
                group.receipt(f"u{number}", seq)
            group.time.forward(1.0)
        assert feed.room.watchers is not None
        assert len(feed.room.watchers.fold._log) <= 2 * 10 + MOST
        slow.congested = False
        group.time.forward(1.0)
        assert told(slow) == [(f"u{number}", 399) for number in range(10)]
        assert feed.room.watchers.fold._log == []

    def test_it_hears_of_so_many_a_second_when_it_is_back(self, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watching_module, "Fold", partial(Fold, 3))
        slow, _ = group.follow("ann")
        slow.congested = True
        for number in range(8):
            group.receipt(f"u{number}")
        group.time.forward(5.0)
        slow.congested = False
        seen = []
        for _ in range(4):
            group.time.forward(1.0)
            seen.append(len(told(slow)))
        assert seen == [3, 6, 8, 8]

    def test_who_says_meanwhile_that_it_watches_misses_nothing(self, group: Group) -> None:
        slow, feed = group.follow("ann")
        slow.congested = True
        group.receipt("bob")
        group.time.forward(1.0)
        group.fanout.watching.watch(feed)
        slow.congested = False
        group.time.forward(1.0)
        assert told(slow) == [("bob", 1)]

    def test_until_its_conversation_frame_is_out_it_waits_too(self, group: Group) -> None:
        ann, feed = group.follow("ann")
        feed.loading = feed.asleep = True
        group.receipt("bob")
        group.time.forward()
        assert (told(ann), ann.loads) == ([], ["c"])
        feed.loading = False
        group.time.forward(1.0)
        assert told(ann) == [("bob", 1)]


class TestMembership:
    @pytest.mark.promise("I12")
    def test_who_left_hears_nothing_until_the_user_is_back(self, group: Group) -> None:
        ann, feed = group.follow("ann")
        feed.see(RangeSet([(1, 1)]))
        group.receipt("bob", 1)
        group.receipt("cyd", 1)
        group.time.forward(5.0)
        assert (told(ann), group.time.due) == ([], [])
        feed.see(ALL)
        group.receipt("bob", 2)
        group.time.forward()
        assert told(ann) == [("cyd", 1), ("bob", 2)]

    def test_who_watches_no_more_hears_nothing_and_what_is_kept_goes(self, group: Group) -> None:
        ann, feed = group.follow("ann")
        group.receipt("bob")
        group.fanout.watching.unwatch(feed)
        assert not feed.room.watched
        group.time.forward(2.0)
        group.receipt("bob")
        assert (told(ann), group.time.due) == ([], [])
        group.fanout.watching.unwatch(feed)

    def test_who_ends_in_the_middle_of_a_round(self, group: Group) -> None:
        ann, _ = group.follow("ann")
        cyd, _ = group.follow("cyd")
        cyd.write = lambda _: group.fanout.unregister(ann)  # type: ignore[method-assign]
        ann.write = lambda _: group.fanout.unregister(cyd)  # type: ignore[method-assign]
        group.receipt("bob")
        group.time.forward()
        assert sum(len(one.session.feeds) for one in (ann, cyd)) == 1

    def test_a_store_that_was_replaced_takes_what_waits_with_it(self, group: Group) -> None:
        ann, _ = group.follow("ann")
        group.receipt("bob")
        group.fanout.forget()
        group.time.forward(5.0)
        assert told(ann) == []

    def test_in_a_direct_chat_there_is_nothing_to_watch(self, group: Group) -> None:
        ann, feed = group.follow("ann")
        feed.direct = feed.room.direct = True
        group.receipt("bob")
        group.time.forward(5.0)
        assert ([user for _, user, _ in ann.receipts], told(ann)) == (["bob"], [])


class TestCost:
    def test_without_watchers_no_frame_is_made(self, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[bytes] = []
        monkeypatch.setattr("services.gateway.telling.ready", made.append)
        ann, _ = group.follow("ann", watch=False)
        for number in range(10):
            group.receipt(f"u{number}")
        group.fanout.receipt("elsewhere", b"never looked at")
        assert (made, ann.receipts, group.time.due) == ([], [], [])

    @pytest.mark.parametrize("watching", [1, 40])
    def test_a_receipt_is_made_once_and_costs_nothing_per_watcher(
        self, group: Group, monkeypatch: pytest.MonkeyPatch, watching: int
    ) -> None:
        """10,000 members read within a second; each watcher gets a write a second and each member once."""
        calls: dict[str, int] = defaultdict(int)

        def counted(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def call(*arguments: Any) -> Any:
                calls[name] += 1
                return real(*arguments)

            monkeypatch.setattr(owner, name, call)

        counted(Fold, "put")
        counted(Fold, "_part")
        counted(Telling, "_tell")
        crowd = [group.follow(f"w{number}")[0] for number in range(watching)]
        writes = [0] * watching
        frames = [0] * watching

        def write(at: int, buffer: bytes) -> None:
            writes[at] += 1
            frames[at] += buffer.count(b'"receipt"')

        for at, one in enumerate(crowd):
            one.write = partial(write, at)  # type: ignore[method-assign]
        for number in range(10_000):
            group.receipt(f"u{number}")
        group.time.forward(60.0)
        assert (calls["put"], calls["_part"], calls["_tell"]) == (10_000, 20, 0)
        assert (writes, frames) == ([20] * watching, [10_000] * watching)


USERS = st.integers(0, 3).map(lambda number: f"u{number}")


class Machine(RuleBasedStateMachine):
    """Sessions watch, leave, take nothing for a while; members' marks grow; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(watching_module, "Fold", partial(Fold, 2))
        self._patch.setattr(watching_module, "_PORTION", 2)
        self.group = Group()
        self.seq = 0
        self.marks: dict[str, int] = {}
        self.watch: dict[Feed, dict[str, int]] = {}
        self.heard: dict[Feed, dict[str, list[tuple[float, int]]]] = {}
        for number in range(3):
            follower, feed = self.group.follow(f"u{number % 2}", f"d{number}", watch=False)
            self.heard[feed] = defaultdict(list)
            follower.write = partial(self._written, feed)  # type: ignore[method-assign]
        self.feeds = list(self.heard)

    def _written(self, feed: Feed, buffer: bytes) -> None:
        assert feed.member
        assert not feed.owner.congested
        assert not feed.loading
        frames = written(buffer)
        assert len(frames) <= 2
        for frame in frames:
            assert frame["user_id"] != feed.owner.user_id
            self.heard[feed][frame["user_id"]].append((self.group.time.now, frame["read_seq"]))

    @rule(user_ids=st.lists(USERS, min_size=1, max_size=4), tenths=st.sampled_from([0, 0, 3, 10, 25]))
    def read(self, user_ids: list[str], tenths: int) -> None:
        for user_id in user_ids:
            self.seq += 1
            self.marks[user_id] = self.seq
            for expected in self.watch.values():
                expected[user_id] = self.seq
            self.group.receipt(user_id, self.seq)
        self.group.time.forward(tenths / 10)

    @rule(at=st.integers(0, 2), off=st.booleans(), on=st.booleans())
    def watches(self, at: int, *, off: bool, on: bool) -> None:
        if off:
            self.watch.pop(self.feeds[at], None)
            self.group.fanout.watching.unwatch(self.feeds[at])
        if on:
            self.watch.setdefault(self.feeds[at], {})
            self.group.fanout.watching.watch(self.feeds[at])

    @rule(at=st.integers(0, 2), congested=st.booleans(), loading=st.booleans(), member=st.booleans())
    def changes(self, at: int, *, congested: bool, loading: bool, member: bool) -> None:
        self.feeds[at].owner.congested = congested  # type: ignore[misc]
        self.feeds[at].loading = loading
        self.feeds[at].see(ALL if member else RangeSet([(1, 1)]))

    @precondition(lambda self: self.watch)
    @rule()
    def becomes_quiet(self) -> None:
        """Everybody takes what there is: then each watcher has the newest marks of every member."""
        for feed in self.feeds:
            feed.owner.congested = feed.loading = False  # type: ignore[misc]
            feed.see(ALL)
        self.read(["u3"], 0)  # whoever came back goes on with the next receipt of anybody
        self.group.time.forward(20.0)
        for feed, expected in self.watch.items():
            heard = self.heard[feed]
            for user_id, seq in expected.items():
                if user_id != feed.owner.user_id:
                    assert heard[user_id], (feed.owner, user_id)
                    assert heard[user_id][-1][1] == seq == self.marks[user_id]
        assert self.group.time.due == []
        watchers = self.feeds[0].room.watchers
        assert watchers is not None
        assert (watchers.fold._log, watchers.fold._numbers, watchers.fold.waits) == ([], {}, False)

    @invariant()
    def each_member_once_a_second_and_never_back(self) -> None:
        for heard in self.heard.values():
            for times in heard.values():
                for (before, old), (now, new) in pairwise(times):
                    assert now - before >= FOLD_S - 1e-9
                    assert new > old

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        watchers = self.feeds[0].room.watchers
        if watchers is not None:
            assert len(watchers.fold._waiting) <= 4
            assert len(watchers.fold._log) <= 2 * 4 + 2

    def teardown(self) -> None:
        self._patch.undo()


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase


@given(st.lists(st.tuples(st.sampled_from(["put", "step"]), st.integers(0, 30)), max_size=120), st.integers(1, 7))
def test_nobody_is_passed_over_however_often_others_change(steps: list[tuple[str, int]], most: int) -> None:
    """Who has waited for longest is in the next step, though others who were in the last one have changed since."""
    fold = Fold(most)
    waiting: list[str] = []
    for what, number in steps:
        user_id = f"u{number}"
        if what == "put":
            fold.put(user_id, str(number).encode())
            if user_id not in waiting:
                waiting.append(user_id)
        else:
            before = fold.number
            fold.step()
            part = fold.part(before)
            told_, waiting = waiting[:most], waiting[most:]
            assert list(part._users if part is not None else ()) == told_
            assert fold.waits == bool(waiting)
