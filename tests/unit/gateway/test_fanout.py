"""From a conversation to the sessions that follow it."""

import json
from typing import Any, cast

import msgspec
import pytest

from services.gateway import handout
from services.gateway.events import EVENT_TYPE
from services.gateway.fanout import Fanout
from services.gateway.metrics import CURSOR_BREAKS, PUSHES
from shared.ranges import OPEN, RangeSet
from tests.followers import FOREVER, Follower, come, faults, follow, made, say, value, visit

MESSAGE = "waybill.event.message"
SIZE = len(made(1).frame) + 200


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fanout() -> Fanout:
    return Fanout(clock=Clock())


def receipt(fanout: Fanout, user_id: str, name: str = "c", **more: Any) -> None:
    told = {"t": "receipt", "conversation_id": name, "user_id": user_id, "read_version": 0, "read_seq": 1, **more}
    fanout.receipt(name, json.dumps(told).encode())


def counted(metric: Any, **labels: str) -> float:
    return float((metric.labels(**labels) if labels else metric)._value.get())


class TestRooms:
    def test_only_conversations_with_sessions_and_membership_are_wanted(self, fanout: Fanout) -> None:
        follow(fanout, Follower("ann"))
        assert fanout.wants("c", MESSAGE)
        assert not fanout.wants("d", MESSAGE)
        assert fanout.wants("d", EVENT_TYPE + "member")
        assert fanout.wants("d", EVENT_TYPE + "conversation")

    def test_nothing_is_left_of_a_session_that_ended(self, fanout: Fanout) -> None:
        ann, other = Follower("ann"), Follower("ann", "tablet")
        follow(fanout, ann)
        follow(fanout, ann, "d")
        feed = follow(fanout, other)
        fanout.unregister(ann)
        assert (fanout.users, ann.session.feeds) == ({"ann": {other}}, {})
        assert {name: list(room.feeds.values()) for name, room in fanout.rooms.items()} == {"c": [feed], "d": []}
        fanout.unregister(other)
        assert fanout.users == {}
        fanout.unregister(other)

    def test_leaving_twice_is_fine(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        follow(fanout, ann)
        fanout.leave(ann, "c")
        fanout.leave(ann, "c")
        fanout.leave(ann, "never")
        assert (fanout.rooms["c"].feeds, ann.session.feeds) == ({}, {})

    def test_an_event_for_nobody(self, fanout: Fanout) -> None:
        say(fanout, 2, type_="member", sender_id="x", body={"action": "leave"})
        assert fanout.rooms == {}

    @pytest.mark.promise("protocol.3.ack")
    def test_what_the_user_was_told_of_may_be_acked_before_kafka_brings_it(self, fanout: Fanout) -> None:
        ann, tablet = Follower("ann"), Follower("ann", "tablet")
        follow(fanout, ann, at=1)
        fanout.register(tablet)
        fanout.committed("ann", "c", 3)
        fanout.committed("ann", "c", 2)
        fanout.committed("bob", "gone", 2)
        room = fanout.rooms["c"]
        assert (room.head, room.ackable, list(fanout.rooms)) == (1, 3, ["c"])
        assert (ann.loads, tablet.loads) == ([], ["c"])


class TestLingering:
    def test_a_room_outlives_its_last_session_for_a_while(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        follow(fanout, ann)
        say(fanout, 1, 2)
        fanout.unregister(ann)
        say(fanout, 3)
        clock = cast("Clock", fanout.clock)
        clock.now += 119.9
        fanout.tidy(clock.now)
        assert fanout.rooms["c"].top == 3
        clock.now += 0.2
        fanout.tidy(clock.now)
        assert (fanout.rooms, fanout.ring_bytes, fanout.wants("c", MESSAGE)) == ({}, 0, False)

    def test_who_comes_back_finds_what_came_meanwhile(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        follow(fanout, ann)
        say(fanout, 1)
        fanout.unregister(ann)
        say(fanout, 2, 3)
        again = Follower("ann")
        feed = follow(fanout, again, at=1, head=3)
        assert feed.behind
        assert again.session.next_behind() is feed
        fanout.hand_out(feed, 0.0, fresh=True)
        assert again.seqs == [2, 3]
        fanout.tidy(1e9)
        assert "c" in fanout.rooms

    def test_the_one_that_is_empty_for_longest_goes_when_there_are_too_many(self) -> None:
        fanout = Fanout(most_idle=2, clock=Clock())
        for name in "abc":
            ann = Follower("ann")
            follow(fanout, ann, name)
            fanout.unregister(ann)
        assert list(fanout.rooms) == ["b", "c"]


class TestMemory:
    def test_a_ring_holds_so_many_events(self) -> None:
        fanout = Fanout(ring=3)
        follow(fanout, Follower("ann"))
        say(fanout, 1, 2, 3, 4, 5)
        room = fanout.rooms["c"]
        assert (room.run(1), room.run(2) is not None) == (None, True)
        assert fanout.ring_bytes == room.size == 3 * SIZE

    def test_and_so_many_bytes(self) -> None:
        fanout = Fanout(ring_bytes=2 * SIZE)
        follow(fanout, Follower("ann"))
        say(fanout, 1, 2, 3, 4)
        assert fanout.ring_bytes == 2 * SIZE

    def test_all_rings_together_hold_so_many_and_the_one_that_had_nothing_for_longest_is_emptied(self) -> None:
        fanout = Fanout(rings_bytes=5 * SIZE)
        ann = Follower("ann")
        for name in "abc":
            follow(fanout, ann, name)
            say(fanout, 1, 2, name=name)
        assert {name: room.size for name, room in fanout.rooms.items()} == {"a": 0, "b": 2 * SIZE, "c": 2 * SIZE}
        assert fanout.ring_bytes == 4 * SIZE
        say(fanout, 3, name="b")
        say(fanout, 3, name="a")
        assert {name: room.size for name, room in fanout.rooms.items()} == {"a": SIZE, "b": 3 * SIZE, "c": 0}

    def test_a_ring_that_was_emptied_loses_nobody_an_event(self) -> None:
        fanout = Fanout(rings_bytes=3 * SIZE)
        ann = Follower("ann")
        follow(fanout, ann, "a")
        follow(fanout, ann, "b")
        come(fanout, 1, 2, name="a")
        come(fanout, 1, 2, name="b")
        assert fanout.rooms["a"].size == 0
        visit(fanout)
        assert [(frame["conversation_id"], frame["seq"]) for frame in ann.written] == [("b", 1), ("b", 2)]
        feed = ann.session.feeds["a"]
        assert (feed.behind, ann.woken, feed.position) == (True, 1, 0)

    def test_what_is_old_leaves_the_ring_since_its_body_may_have_been_erased_by_age(self) -> None:
        clock = Clock()
        fanout = Fanout(clock=clock)
        ann = Follower("ann")
        follow(fanout, ann, "a")
        follow(fanout, ann, "b")
        say(fanout, 1, 2, name="a")
        say(fanout, 1, name="b")
        fanout.tidy(clock())
        clock.now += 301.0
        say(fanout, 3, name="a")
        fanout.tidy(clock())
        assert {name: room.size for name, room in fanout.rooms.items()} == {"a": SIZE, "b": 0}
        assert fanout.ring_bytes == SIZE
        say(fanout, 2, name="b")
        assert (fanout.ring_bytes, ann.seqs) == (2 * SIZE, [1, 2, 1, 3, 2])

    def test_the_only_ring_is_never_emptied(self) -> None:
        fanout = Fanout(rings_bytes=1)
        ann = Follower("ann")
        follow(fanout, ann)
        say(fanout, 1)
        assert ann.seqs == [1]

    def test_a_read_counts_too_and_one_for_a_closed_room_does_not(self) -> None:
        fanout = Fanout(clock=Clock())
        ann = Follower("ann")
        room = follow(fanout, ann, head=2).room
        fanout.seen(room, 2, 2, [made(1), made(2)])
        assert fanout.ring_bytes == 2 * SIZE
        fanout.unregister(ann)
        fanout.tidy(1e9)
        fanout.seen(room, 2, 2, [made(1), made(2)])
        assert (fanout.ring_bytes, len(fanout._rings.filled)) == (0, 0)


class TestDelivery:
    @pytest.mark.promise("I6", "protocol.3.event_everywhere")
    def test_one_frame_goes_to_all_once(self, fanout: Fanout) -> None:
        followers = [Follower("ann"), Follower("ann", "tablet"), Follower("bob")]
        for follower in followers:
            follow(fanout, follower, at=1)
        say(fanout, 2)
        say(fanout, 2)
        say(fanout, 1)
        assert [follower.seqs for follower in followers] == [[2], [2], [2]]

    def test_what_a_turn_brings_for_a_session_is_one_write(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        follow(fanout, ann)
        come(fanout, 1, 2, 3)
        assert ann.written == []
        visit(fanout)
        assert (ann.seqs, ann.writes, ann.timed) == ([1, 2, 3], 1, 1)

    def test_pushes_are_counted_per_session(self, fanout: Fanout) -> None:
        for user_id in ("ann", "bob"):
            follow(fanout, Follower(user_id))
        before = counted(PUSHES)
        say(fanout, 1, 2, 3)
        assert counted(PUSHES) - before == 6

    @pytest.mark.promise("I6")
    def test_after_a_gap_it_reads_and_what_follows_waits(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = follow(fanout, ann)
        say(fanout, 2)
        say(fanout, 1)
        say(fanout, 3)
        assert (ann.written, feed.position, feed.behind, ann.woken) == ([], 0, True, 1)
        assert ann.session.next_behind() is feed

    @pytest.mark.promise("protocol.9.metric_labels")
    def test_a_gap_is_counted_and_told_once(self, fanout: Fanout) -> None:
        told: list[tuple[str, int, int]] = []
        fanout.gap = lambda *gap: told.append(gap)
        follow(fanout, Follower("ann"))
        before = counted(CURSOR_BREAKS, kind="gap")
        say(fanout, 1, 2, 5, 5, 4, 6)
        assert told == [("c", 3, 4)]
        assert counted(CURSOR_BREAKS, kind="gap") - before == 1

    def test_what_a_read_knew_of_before_kafka_brings_it_is_no_gap(self, fanout: Fanout) -> None:
        told: list[tuple[str, int, int]] = []
        fanout.gap = lambda *gap: told.append(gap)
        follow(fanout, Follower("ann"), at=1)
        fanout.rooms["c"].know(4)
        say(fanout, 5)
        assert told == []

    def test_a_congested_session_reads_later(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann"), Follower("bob")
        feed = follow(fanout, ann)
        follow(fanout, bob)
        ann.congested = True
        say(fanout, 1)
        assert (ann.written, ann.woken, bob.seqs) == ([], 1, [1])
        assert ann.session.next_behind() is feed

    def test_a_session_with_a_full_window_waits_and_others_do_not(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann", window=2), Follower("bob")
        feed = follow(fanout, ann)
        follow(fanout, bob)
        say(fanout, 1, 2, 3)
        assert (ann.seqs, bob.seqs, feed.behind) == ([1, 2], [1, 2, 3], True)

    @pytest.mark.promise("I6")
    def test_while_it_loads_only_the_known_head_rises(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        fanout.register(ann)
        feed = fanout.enter(ann, "c")
        say(fanout, 7)
        assert (ann.written, fanout.rooms["c"].head, feed.position) == ([], 7, 0)

    def test_one_that_is_asleep_is_loaded_by_its_first_event(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        fanout.register(ann)
        feed = fanout.enter(ann, "c")
        feed.asleep = True
        feed.begin(4, 0)
        feed.room.know(4)
        say(fanout, 3)
        assert ann.loads == []
        say(fanout, 5)
        assert (ann.loads, ann.written) == (["c"], [])

    def test_another_store_is_told_of_and_its_event_goes_to_nobody(self, fanout: Fanout) -> None:
        told: list[bool] = []
        fanout.other_store = lambda: told.append(True)
        ann = Follower("ann")
        follow(fanout, ann)
        say(fanout, 1, 2)
        say(fanout, 2)
        assert told == []
        say(fanout, 2, event=9)
        assert (told, ann.seqs) == ([True], [1, 2])


class TestFairness:
    def test_a_large_conversation_is_visited_in_portions(self, fanout: Fanout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handout, "_PORTION", 10)
        order: list[str] = []
        crowd, ann = [Follower(f"u{number}") for number in range(35)], Follower("ann")
        for one in crowd:
            follow(fanout, one, "large")
        follow(fanout, ann, "direct")
        come(fanout, 1, 2, name="large")
        come(fanout, 1, name="direct")
        turns = 0
        while fanout.turn(0.0):  # until a time that is over: one portion
            turns += 1
            order.append(f"{sum(bool(one.written) for one in crowd)}/{len(ann.written)}")
        assert order == ["10/0", "10/1", "20/1", "30/1"]
        assert all(one.seqs == [1, 2] for one in crowd)

    def test_an_event_that_comes_during_a_round_reaches_all(
        self, fanout: Fanout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handout, "_PORTION", 2)
        crowd = [Follower(f"u{number}") for number in range(5)]
        for one in crowd:
            follow(fanout, one)
        come(fanout, 1)
        assert fanout.turn(0.0)
        come(fanout, 2)
        visit(fanout)
        assert [one.seqs for one in crowd] == [[1, 2]] * 5
        assert not fanout.turn(FOREVER)

    def test_who_comes_and_goes_during_a_round_hurts_nobody(
        self, fanout: Fanout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handout, "_PORTION", 2)
        crowd = [Follower(f"u{number}") for number in range(6)]
        for one in crowd:
            follow(fanout, one)
        come(fanout, 1)
        assert fanout.turn(0.0)
        fanout.unregister(crowd[0])
        fanout.unregister(crowd[4])
        late = Follower("late")
        feed = follow(fanout, late, at=0, head=0)
        visit(fanout)
        assert [one.seqs for one in crowd] == [[1], [1], [1], [1], [], [1]]
        assert feed.behind, "its listing was short of the head that is known"

    def test_it_says_when_there_is_something_to_do(self, fanout: Fanout) -> None:
        queued: list[bool] = []
        fanout.out.queued = lambda: queued.append(True)
        follow(fanout, Follower("ann"))
        come(fanout, 1, 2)
        assert len(queued) == 1
        visit(fanout)
        come(fanout, 3)
        assert len(queued) == 2

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_a_recipient_whose_write_fails_stops_nobody_else(
        self, fanout: Fanout, failing: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = faults(monkeypatch)
        crowd = [Follower(f"u{number}") for number in range(3)]
        for one in crowd:
            follow(fanout, one)

        def fails(_: bytes) -> None:
            raise OSError("broken")

        monkeypatch.setattr(crowd[failing], "write", fails)
        say(fanout, 1)
        say(fanout, 2)
        assert [one.seqs for one in crowd if one is not crowd[failing]] == [[1, 2], [1, 2]]
        assert [one.ended for one in crowd] == [number == failing for number in range(3)]
        assert len(told) == 2


class TestHeads:
    def test_of_the_store_wake_who_is_below(self, fanout: Fanout) -> None:
        below, at, loads, sleeps = Follower("ann"), Follower("bob"), Follower("cyd"), Follower("dan")
        feed = follow(fanout, below, at=3)
        follow(fanout, at, at=5)
        for one in (loads, sleeps):
            fanout.register(one)
            fanout.enter(one, "c")
        sleeps.session.feeds["c"].asleep = True
        sleeps.session.feeds["c"].begin(3, 0)
        assert fanout.heads({"c": 5, "gone": 9}) == 2
        assert (below.woken, at.woken, loads.woken) == (1, 0, 0)
        assert below.session.next_behind() is feed
        assert (loads.loads, sleeps.loads) == ([], ["c"])
        assert fanout.rooms["c"].head == 5
        assert fanout.heads({"c": 5}) == 0, "who reads or loads already is not found again"


class TestAnotherStore:
    @pytest.mark.promise("I7")
    def test_nothing_of_the_old_one_is_left_and_its_sessions_get_nothing_more(self, fanout: Fanout) -> None:
        ann, idle = Follower("ann"), Follower("bob")
        feed = follow(fanout, ann)
        follow(fanout, idle, "d")
        say(fanout, 1, 2, 3)
        fanout.unregister(idle)
        come(fanout, 4)
        fanout.forget()
        visit(fanout)
        say(fanout, 3, 4, event=9)
        assert (ann.seqs, feed.held, feed.behind) == ([1, 2, 3], True, False)
        assert fanout.ring_bytes == 0
        assert fanout.heads({"c": 4}) == 0
        fanout.unregister(ann)

    @pytest.mark.promise("I7")
    def test_a_read_of_the_old_one_that_ends_late_tells_new_sessions_nothing(self, fanout: Fanout) -> None:
        old = follow(fanout, Follower("ann"), head=5).room
        fanout.forget()
        new = Follower("ann")
        feed = follow(fanout, new, head=2)
        fanout.seen(old, 5, 5, [made(seq) for seq in range(1, 6)])
        assert (feed.room.head, feed.room.top, feed.room.run(0), fanout.ring_bytes) == (2, 2, None, 0)
        say(fanout, 3, event=9)
        assert feed.room.head == 3


class TestMembers:
    @pytest.mark.promise("I6")
    def test_created_conversations_bring_in_all_local_sessions(self, fanout: Fanout) -> None:
        ann, bob, cyd = Follower("ann"), Follower("bob"), Follower("cyd")
        for one in (ann, bob, cyd):
            fanout.register(one)
        body = {"action": "create", "members": ["bob", "ann"]}
        say(fanout, 1, type_="conversation", body=body, sender_id="bob")
        assert (ann.loads, bob.loads, cyd.loads) == (["c"], ["c"], [])
        assert ann.session.feeds["c"].loading
        assert fanout.rooms["c"].head == 1

    def test_added_users_are_brought_in_once(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        fanout.register(ann)
        for _ in range(2):
            say(fanout, 5, type_="member", body={"action": "add", "user_id": "ann"})
        assert ann.loads == ["c"]

    def test_a_removed_user_gets_the_removal_and_its_frame(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann"), Follower("bob")
        follow(fanout, ann, at=1)
        follow(fanout, bob, at=1)
        say(fanout, 2, type_="member", body={"action": "remove", "user_id": "ann"})
        say(fanout, 3)
        assert (ann.seqs, ann.loads) == ([2], ["c"])
        assert (bob.seqs, bob.loads) == ([2, 3], [])

    def test_leaving_is_about_the_sender(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = follow(fanout, ann, at=1)
        say(fanout, 2, type_="member", sender_id="ann", body={"action": "leave"})
        assert list(feed.visible) == [(1, 2)]

    @pytest.mark.promise("I6", "protocol.3.conversation_frame")
    def test_added_again_the_frame_comes_first(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = follow(fanout, ann, at=1)
        say(fanout, 2, type_="member", body={"action": "remove", "user_id": "ann"})
        say(fanout, 3)
        say(fanout, 4, type_="member", body={"action": "add", "user_id": "ann", "role": "admin"})
        say(fanout, 5)
        assert ann.seqs == [2]
        assert (feed.loading, feed.role, list(feed.visible), feed.position) == (True, "admin", [(1, 2), (4, OPEN)], 3)

    def test_a_new_role_and_title_are_told_to_members_only(self, fanout: Fanout) -> None:
        ann, gone = Follower("ann"), Follower("bob")
        feed = follow(fanout, ann, at=1)
        follow(fanout, gone, at=1, visible=RangeSet([(1, 1)]))
        say(fanout, 2, type_="member", body={"action": "role", "user_id": "ann", "role": "admin"})
        assert (feed.role, ann.loads) == ("admin", ["c"])
        say(fanout, 3, type_="conversation", body={"title": "x"})
        assert (ann.loads, gone.loads) == (["c", "c"], [])

    def test_late_membership_changes_nothing(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = follow(fanout, ann, at=9)
        say(fanout, 4, type_="member", body={"action": "remove", "user_id": "ann"})
        assert (list(feed.visible), ann.loads) == ([(1, OPEN)], [])

    @pytest.mark.parametrize(
        "body", [{"action": 5}, {"action": "add", "user_id": 7}, {"action": "add", "members": {}}, {"big": 1e308}]
    )
    def test_strange_bodies_are_pushed(self, fanout: Fanout, body: dict[str, Any]) -> None:
        ann = Follower("ann")
        follow(fanout, ann, at=1)
        say(fanout, 2, type_="member", body=body)
        assert ann.seqs == [2]

    def test_what_cannot_be_read_is_said(self, fanout: Fanout) -> None:
        feed = follow(fanout, Follower("ann"), at=1)
        for type_ in ("member", "conversation", "edit"):
            with pytest.raises(msgspec.MsgspecError):
                fanout.event("c", 2, EVENT_TYPE + type_, b'{"t":"event"}')
        assert (feed.room.head, feed.room.top) == (1, 1)


class TestEdits:
    @pytest.mark.promise("protocol.3.hidden_edit", "I12")
    def test_of_what_is_hidden_it_is_read(self, fanout: Fanout) -> None:
        sees, hidden, gone = Follower("ann"), Follower("bob"), Follower("cyd")
        follow(fanout, sees, at=5)
        one = follow(fanout, hidden, at=5, visible=RangeSet([(4, OPEN)]))
        other = follow(fanout, gone, at=5, visible=RangeSet([(1, 4)]))
        say(fanout, 6, type_="edit", target_seq=3, body={"text": "secret"})
        assert (sees.seqs, hidden.seqs, gone.seqs) == ([6], [], [])
        assert (one.behind, one.own, other.behind) == (True, True, False)
        say(fanout, 6, type_="edit", target_seq=3)
        assert sees.seqs == [6]


class TestReceipts:
    def test_a_session_that_ends_over_a_receipt_is_nobody_elses_fault(
        self, fanout: Fanout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = faults(monkeypatch)
        ann, tablet, desk = Follower("ann"), Follower("ann", "tablet"), Follower("ann", "desk")
        for one in (ann, tablet, desk):
            follow(fanout, one, direct=True)

        def ends(*_: object) -> None:
            fanout.unregister(tablet)

        def fails(*_: object) -> None:
            raise RuntimeError("a fault")

        tablet.receipt, desk.receipt = ends, fails  # type: ignore[method-assign]
        receipt(fanout, "ann")
        assert len(ann.receipts) == 1
        assert len(told) == 1

    def test_of_a_conversation_of_unknown_kind_wake_one_of_many_sleepers(self, fanout: Fanout) -> None:
        many = [Follower(f"user{number}") for number in range(20)]
        for one in many:
            fanout.register(one)
            fanout.enter(one, "c").asleep = True
        receipt(fanout, "bob")
        assert sum(bool(one.loads) for one in many) == 1
        assert not any(one.receipts for one in many)

    @pytest.mark.promise("protocol.5.receipt_goes_to")
    def test_of_a_direct_chat_go_to_both(self, fanout: Fanout) -> None:
        ann, tablet, bob = Follower("ann"), Follower("ann", "tablet"), Follower("bob")
        for one in (ann, tablet, bob):
            follow(fanout, one, direct=True)
        receipt(fanout, "ann", read_version=3)
        assert [[user for _, user, _ in one.receipts] for one in (ann, tablet, bob)] == [["ann"], ["ann"], ["ann"]]
        assert ann.session.feeds["c"].read_version == 3
        assert bob.session.feeds["c"].read_version == 0

    @pytest.mark.promise("protocol.5.receipt_goes_to")
    def test_of_a_group_go_to_their_user_and_to_nobody_who_does_not_watch(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann"), Follower("bob")
        for one in (bob, ann):
            follow(fanout, one)
        receipt(fanout, "ann")
        assert [len(one.receipts) for one in (ann, bob)] == [1, 0]

    @pytest.mark.promise("protocol.5.read_refused")
    def test_a_refused_mark_is_answered_to_its_device(self, fanout: Fanout) -> None:
        ann, tablet, bob = Follower("ann"), Follower("ann", "tablet"), Follower("bob")
        for one in (ann, tablet, bob):
            follow(fanout, one, direct=True)
        receipt(fanout, "ann", device_id="tablet", read_version=2)
        assert [len(one.receipts) for one in (ann, tablet, bob)] == [0, 1, 0]

    def test_of_what_was_not_read_yet_go_to_all_who_may_want_them(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann"), Follower("bob")
        for one in (ann, bob):
            fanout.register(one)
            fanout.enter(one, "c")
        receipt(fanout, "bob")
        assert [[user for _, user, _ in one.receipts] for one in (ann, bob)] == [["bob"], ["bob"]]

    def test_of_nobody_here_are_dropped(self, fanout: Fanout) -> None:
        receipt(fanout, "ann")
        ann = Follower("ann")
        follow(fanout, ann)
        fanout.leave(ann, "c")
        receipt(fanout, "ann")
        assert ann.receipts == []

    def test_who_leaves_watches_no_more(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = follow(fanout, ann)
        fanout.watching.watch(feed)
        assert feed.room.watched
        fanout.unregister(ann)
        assert not feed.room.watched

    def test_what_cannot_be_read_is_said(self, fanout: Fanout) -> None:
        follow(fanout, Follower("ann"))
        with pytest.raises(msgspec.MsgspecError):
            fanout.receipt("c", b"{}")


def test_a_record_of_the_tests_is_one_of_kafka() -> None:
    assert json.loads(value(3, name="c"))["event_id"].startswith("00000003-")


class TestRest:
    def test_a_large_room_rests_and_then_brings_all_that_came_in_one_write(self, fanout: Fanout) -> None:
        rests: list[tuple[float, Any]] = []
        fanout.out.later = lambda seconds, then: rests.append((seconds, then))
        many = [Follower(f"user{number}") for number in range(150)]
        for one in many:
            follow(fanout, one)
        small = Follower("small")
        follow(fanout, small, "d")
        say(fanout, 1)
        assert [one.seqs for one in many] == [[1]] * 150
        say(fanout, 2)
        say(fanout, 3)
        say(fanout, 1, name="d")
        visit(fanout)
        assert [one.seqs for one in many] == [[1]] * 150
        assert small.seqs == [1]
        [(seconds, then)] = rests
        assert 0.001 < seconds < 0.05
        then()
        visit(fanout)
        assert [one.seqs for one in many] == [[1, 2, 3]] * 150
        rests[1][1]()
        assert not fanout.turn(FOREVER)
        assert len(rests) == 2
