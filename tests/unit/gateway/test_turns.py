"""Who is read for, in which turn, and once for all who miss the same."""

from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.fanout import Fanout
from services.gateway.feed import Feed
from services.gateway.turns import Need, Own, Turns
from services.gateway.wire import ready
from shared.ranges import OPEN, RangeSet
from tests.followers import ALL, Follower, come, faults, follow, made, say, value, visit

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 3


class House:
    """Sessions whose reads the test does. ``timelines``: the heads that reads find."""

    def __init__(self) -> None:
        self.fanout = Fanout(ring=4, clock=lambda: 0.0)
        self.turns = Turns(self.fanout, page=PAGE)
        self.queued = 0
        self.turns.queued = self._queue
        self.later: list[Callable[[], None]] = []
        self.turns.later = self.later.append

    def _queue(self) -> None:
        self.queued += 1

    def follower(self, user_id: str = "ann", device_id: str = "phone", *, window: int = 100) -> Follower:
        made_ = Woken(self.turns, user_id, device_id, window=window)
        self.fanout.register(made_)
        return made_

    def behind(self, follower: Follower, name: str = "c", *, at: int = 0, head: int = 3, **more: Any) -> Feed:
        feed = follow(self.fanout, follower, name, at=at, head=head, **more)
        follower.wake()
        return feed

    def begin(self) -> Need:
        """The next read that is needed."""
        while self.queued:
            self.queued -= 1
            need = self.turns.next()
            if need is not None:
                return need
        raise AssertionError("there is nothing to read")

    def end(self, need: Need, head: int, most: int = 1_000, **bodies: Any) -> None:
        """It saw the timeline up to ``head``."""
        position = need.key.position
        entries = [made(seq, body=bodies) for seq in range(position + 1, min(head, position + PAGE) + 1)]
        run = self.turns.shared(need, head, entries)
        while self.turns.hand_out(need, run, most):
            pass

    def end_own(self, need: Need, head: int, *seqs: int, visible: RangeSet, role: str = "member") -> None:
        self.turns.own(need, Own(head, role, visible, [(seq, ready(value(seq, body=None))) for seq in seqs]))

    @property
    def idle(self) -> bool:
        return not self.queued and not len(self.turns)


class Woken(Follower):
    """One that is served as soon as it is behind."""

    def __init__(self, turns: Turns, user_id: str, device_id: str, *, window: int) -> None:
        super().__init__(user_id, device_id, window=window)
        self._turns = turns

    def wake(self) -> None:
        super().wake()
        if not self.ended:
            self._turns.wake(self)


@pytest.fixture
def house() -> House:
    return House()


class TestSingleFlight:
    def test_one_read_serves_all_who_stand_at_the_same_place(self, house: House) -> None:
        crowd = [house.follower(f"u{number}") for number in range(500)]
        for one in crowd:
            house.behind(one)
        assert house.queued == 1
        need = house.begin()
        assert (len(need.feeds), need.told, need.key.user_id) == (500, 3, None)
        house.end(need, 3)
        assert all(one.seqs == [1, 2, 3] for one in crowd)
        assert house.idle
        assert not any(one.session.behind for one in crowd)

    def test_who_comes_during_the_read_is_served_by_it(self, house: House) -> None:
        ann, bob = house.follower(), house.follower("bob")
        house.behind(ann)
        need = house.begin()
        house.behind(bob)
        assert house.queued == 0
        house.end(need, 3)
        assert (ann.seqs, bob.seqs) == ([1, 2, 3], [1, 2, 3])

    def test_who_comes_back_after_it_finds_the_ring(self, house: House) -> None:
        house.behind(house.follower())
        house.end(house.begin(), 3)
        late = house.follower("bob")
        house.behind(late, at=1)
        assert (late.seqs, house.idle) == ([2, 3], True)

    def test_other_places_and_conversations_are_read_apart(self, house: House) -> None:
        house.behind(house.follower("ann"), "a", at=0)
        house.behind(house.follower("bob"), "a", at=1)
        house.behind(house.follower("cyd"), "b", at=0)
        keys = [house.begin().key for _ in range(3)]
        assert [(key.room.conversation_id, key.position) for key in keys] == [("a", 0), ("a", 1), ("b", 0)]

    def test_a_page_goes_out_in_portions(self, house: House) -> None:
        crowd = [house.follower(f"u{number}") for number in range(5)]
        for one in crowd:
            house.behind(one)
        need = house.begin()
        run = house.turns.shared(need, 3, [made(seq) for seq in (1, 2, 3)])
        assert house.turns.hand_out(need, run, 2)
        assert [bool(one.written) for one in crowd] == [True, True, False, False, False]
        assert house.turns.hand_out(need, run, 2)
        assert not house.turns.hand_out(need, run, 2)
        assert all(one.seqs == [1, 2, 3] for one in crowd)

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_a_session_that_cannot_be_written_to_keeps_the_page_from_nobody(
        self, house: House, failing: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        faults(monkeypatch)
        crowd = [house.follower(f"u{number}") for number in range(3)]
        for one in crowd:
            house.behind(one)

        def fails(_: bytes) -> None:
            raise OSError("broken")

        monkeypatch.setattr(crowd[failing], "write", fails)
        house.end(house.begin(), 3)
        assert [one.seqs for one in crowd if one is not crowd[failing]] == [[1, 2, 3], [1, 2, 3]]
        assert [one.ended for one in crowd] == [number == failing for number in range(3)]
        assert house.idle

    def test_nor_one_that_the_ring_could_help_meanwhile(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        faults(monkeypatch)
        ann, bob = house.follower("ann"), house.follower("bob")
        for one in (ann, bob):
            house.behind(one, head=1)
        house.fanout.rooms["c"].fill([made(1)], 1)

        def fails(_: bytes) -> None:
            raise OSError("broken")

        monkeypatch.setattr(ann, "write", fails)
        house.queued -= 1
        assert house.turns.next() is None
        assert (ann.ended, bob.seqs, house.idle) == (True, [1], True)


class TestFairness:
    def test_reads_are_done_in_the_order_in_which_they_were_asked_for(self, house: House) -> None:
        for name in "abcd":
            house.behind(house.follower(name), name)
        assert [house.begin().key.room.conversation_id for _ in range(4)] == list("abcd")

    def test_a_session_waits_for_one_read_at_a_time_and_its_conversations_take_turns(self, house: House) -> None:
        ann = house.follower(window=1_000)
        for name in "abc":
            house.behind(ann, name, head=6)
        order = []
        for _ in range(6):
            assert house.queued == 1
            need = house.begin()
            order.append(need.key.room.conversation_id)
            house.end(need, 6)
        assert order == list("abcabc")
        assert house.idle

    def test_one_with_much_to_read_does_not_hold_up_one_that_comes_later(self, house: House) -> None:
        house.behind(house.follower("ann", window=1_000), "long", head=100)
        first = house.begin()
        house.behind(house.follower("bob"), "short", head=1)
        house.end(first, 100)
        assert [house.begin().key.room.conversation_id for _ in range(2)] == ["short", "long"]


class TestBackpressure:
    def test_a_full_window_reads_nothing(self, house: House) -> None:
        ann = house.follower(window=3)
        feed = house.behind(ann, head=9)
        house.end(house.begin(), 9)
        assert (ann.seqs, house.idle, feed.behind) == ([1, 2, 3], True, True)
        ann.session.ack(feed, [(1, 3)], 9)
        ann.wake()
        house.end(house.begin(), 9)
        assert ann.seqs == [1, 2, 3, 4, 5, 6]

    def test_one_that_fills_up_before_its_turn_has_nothing_read(self, house: House) -> None:
        ann = house.follower(window=2)
        house.behind(ann, "a", head=9)
        other = house.behind(ann, "b", at=0, head=0)
        say(house.fanout, 1, 2, name="b")
        assert ann.session.room == 0
        house.queued -= 1
        assert house.turns.next() is None
        ann.session.ack(other, [(1, 2)], 2)
        ann.wake()
        assert house.begin().key.room.conversation_id == "a"

    def test_a_congested_socket_reads_nothing(self, house: House) -> None:
        ann = house.follower()
        ann.congested = True
        house.behind(ann)
        assert house.idle
        ann.congested = False
        ann.wake()
        need = house.begin()
        ann.congested = True
        house.end(need, 3)
        assert (ann.written, house.idle) == ([], True)
        ann.congested = False
        ann.wake()
        assert ann.seqs == [1, 2, 3], "the ring has the page by now"

    def test_nor_does_it_ask_for_the_next_conversation(self, house: House) -> None:
        ann = house.follower()
        for name in "ab":
            house.behind(ann, name)
        need = house.begin()
        ann.congested = True
        house.end(need, 3)
        assert house.idle
        ann.congested = False
        ann.wake()
        assert house.begin().key.room.conversation_id == "b"

    def test_one_that_clogs_before_its_turn_has_nothing_read(self, house: House) -> None:
        ann = house.follower()
        house.behind(ann)
        ann.congested = True
        house.queued -= 1
        assert house.turns.next() is None
        assert len(house.turns) == 0
        ann.congested = False
        ann.wake()
        assert len(house.begin().feeds) == 1

    def test_what_the_ring_got_meanwhile_is_not_read(self, house: House) -> None:
        ann = house.follower()
        house.behind(ann, at=2, head=3)
        house.fanout.rooms["c"].fill([made(1), made(2), made(3)], 3)
        house.queued -= 1
        assert house.turns.next() is None
        assert (ann.seqs, house.idle) == ([3], True)

    def test_of_a_page_only_what_the_window_has_room_for_goes_out(self, house: House) -> None:
        ann, bob = house.follower(window=2), house.follower("bob")
        house.behind(ann)
        house.behind(bob)
        house.end(house.begin(), 3)
        assert (ann.seqs, bob.seqs) == ([1, 2], [1, 2, 3])


class TestEnds:
    def test_one_that_failed_is_done_again_behind_the_others(self, house: House) -> None:
        ann = house.follower()
        house.behind(ann, "a")
        need = house.begin()
        house.behind(house.follower("bob"), "b")
        house.turns.failed(need)
        house.behind(house.follower("cyd"), "a")
        assert house.begin().key.room.conversation_id == "b"
        again = house.begin()
        assert (again is need, len(again.feeds)) == (True, 2)
        house.end(again, 3)
        assert ann.seqs == [1, 2, 3]

    def test_one_that_cannot_be_done_is_asked_for_anew_in_a_while(self, house: House) -> None:
        ann = house.follower()
        feed = house.behind(ann)
        house.turns.broken(house.begin())
        assert (house.idle, len(house.later), feed.behind) == (True, 1, True)
        house.later.pop()()
        house.end(house.begin(), 3)
        assert ann.seqs == [1, 2, 3]

    def test_a_conversation_that_is_not_there_is_not_followed(self, house: House) -> None:
        ann = house.follower()
        house.behind(ann)
        house.behind(ann, "d")
        house.turns.gone(house.begin())
        assert list(ann.session.feeds) == ["d"]
        assert house.fanout.rooms["c"].feeds == {}
        ann.wake()
        assert house.begin().key.room.conversation_id == "d"

    def test_one_that_brought_nothing_is_asked_for_again_in_a_while_and_not_at_once(self, house: House) -> None:
        ann = house.follower()
        house.behind(ann, head=3)
        need = house.begin()
        house.fanout.rooms["c"].know(5)
        house.end(need, 0)
        assert (house.idle, len(house.later)) == (True, 1)
        house.later.pop()()
        assert not house.idle

    def test_a_head_that_was_never_there_keeps_nobody_behind(self, house: House) -> None:
        ann = house.follower()
        feed = follow(house.fanout, ann, at=2)
        say(house.fanout, 1_000)
        assert feed.behind
        house.end(house.begin(), 2)
        assert (feed.behind, feed.room.head, house.idle, house.later) == (False, 2, True, [])
        say(house.fanout, 3)
        assert ann.seqs == [3]

    def test_who_left_during_the_read_gets_nothing(self, house: House) -> None:
        ann, bob = house.follower("ann"), house.follower("bob")
        house.behind(ann)
        house.behind(bob)
        need = house.begin()
        house.fanout.unregister(ann)
        house.end(need, 3)
        assert (ann.written, bob.seqs) == ([], [1, 2, 3])

    def test_who_got_it_elsewhere_during_the_read_gets_it_once(self, house: House) -> None:
        ann, bob = house.follower("ann"), house.follower("bob")
        feed = house.behind(ann)
        house.behind(bob, at=1)
        first, second = house.begin(), house.begin()
        house.end(second, 3)
        assert bob.seqs == [2, 3]
        house.fanout.rooms["c"].fill([made(1)], 3)
        house.fanout.hand_out(feed, 0.0, fresh=True)
        house.end(first, 3)
        assert (ann.seqs, feed.behind, house.idle) == ([1, 2, 3], False, True)

    def test_a_longer_way_is_gone_page_by_page_and_becomes_live(self, house: House) -> None:
        ann = house.follower()
        feed = house.behind(ann, head=7)
        reads = 0
        while not house.idle:
            house.end(house.begin(), 7)
            reads += 1
        assert (ann.seqs, reads, feed.behind) == ([1, 2, 3, 4, 5, 6, 7], 3, False)
        say(house.fanout, 8)
        assert ann.seqs[-1] == 8

    def test_a_page_that_reaches_the_ring_brings_all_to_its_end(self, house: House) -> None:
        ann, bob = house.follower("ann"), house.follower("bob")
        follow(house.fanout, bob, at=3)
        say(house.fanout, 4, 5)
        house.behind(ann, head=5)
        house.end(house.begin(), 5)
        assert (ann.seqs, bob.seqs, house.idle) == ([1, 2, 3, 4, 5], [4, 5], True)


HIDDEN = RangeSet([(4, OPEN)])


class TestOwn:
    """Reads for one user alone."""

    @pytest.mark.promise("protocol.3.hidden_edit", "I12")
    def test_an_edit_of_what_is_hidden_is_read_for_that_user(self, house: House) -> None:
        ann, bob = house.follower("ann"), house.follower("bob")
        feed = follow(house.fanout, ann, at=5, visible=HIDDEN)
        follow(house.fanout, bob, at=5)
        say(house.fanout, 6, type_="edit", target_seq=3, body={"text": "secret"})
        assert (ann.seqs, bob.got) == ([], [(6, {"text": "secret"})])
        need = house.begin()
        assert (need.key.user_id, need.key.position) == ("ann", 5)
        house.end_own(need, 6, 6, visible=HIDDEN)
        assert (ann.got, feed.own, feed.behind, house.idle) == ([(6, None)], False, False, True)
        say(house.fanout, 7)
        assert ann.seqs == [6, 7]

    def test_a_page_for_all_that_has_one_leads_to_a_read_for_that_user(self, house: House) -> None:
        ann = house.follower()
        feed = house.behind(ann, at=5, head=7, visible=HIDDEN)
        need = house.begin()
        assert need.key.user_id is None
        run = house.turns.shared(need, 7, [made(6), made(7, "edit", target_seq=3, body={"text": "secret"})])
        assert not house.turns.hand_out(need, run, 10)
        assert (ann.seqs, feed.own) == ([6], True)
        need = house.begin()
        assert need.key.user_id == "ann"
        house.end_own(need, 7, 7, visible=HIDDEN)
        assert ann.got == [(6, {}), (7, None)]

    def test_who_sees_a_part_only_is_read_for_alone(self, house: House) -> None:
        visible = RangeSet([(1, 2), (6, OPEN)])
        ann, tablet = house.follower("ann"), house.follower("ann", "tablet")
        feeds = [house.behind(one, head=8, visible=visible) for one in (ann, tablet)]
        need = house.begin()
        assert (need.key.user_id, len(need.feeds)) == ("ann", 2)
        house.end_own(need, 8, 1, 2, 6, visible=visible)
        assert (ann.seqs, tablet.seqs, [feed.position for feed in feeds]) == ([1, 2, 6], [1, 2, 6], [6, 6])
        assert house.begin().key.user_id is None, "from here on all see the same"

    def test_what_is_invisible_at_the_end_is_passed_over(self, house: House) -> None:
        visible = RangeSet([(1, 2)])
        ann = house.follower()
        feed = house.behind(ann, head=9, visible=visible)
        house.end_own(house.begin(), 9, 1, 2, visible=visible)
        assert (ann.seqs, feed.position, house.idle) == ([1, 2], 9, True)

    def test_a_window_that_fills_up_keeps_its_place(self, house: House) -> None:
        visible = RangeSet([(1, 2), (6, 9)])
        ann = house.follower(window=2)
        feed = house.behind(ann, head=9, visible=visible)
        house.end_own(house.begin(), 9, 1, 2, 6, visible=visible)
        assert (ann.seqs, feed.position, feed.behind) == ([1, 2], 2, True)

    @pytest.mark.promise("protocol.3.conversation_frame")
    def test_a_membership_that_was_missed_is_told_before_its_events(self, house: House) -> None:
        ann = house.follower()
        feed = house.behind(ann, head=9, visible=RangeSet([(1, 2)]))
        house.end_own(house.begin(), 9, 1, 2, 6, visible=RangeSet([(1, 2), (6, OPEN)]))
        assert (ann.seqs, ann.loads, feed.loading) == ([], ["c"], True)

    def test_a_role_that_was_missed_is_told(self, house: House) -> None:
        visible = RangeSet([(1, 2), (6, OPEN)])
        ann = house.follower()
        feed = house.behind(ann, head=6, visible=visible)
        house.end_own(house.begin(), 6, 1, 2, 6, visible=visible, role="admin")
        assert (ann.seqs, ann.loads, feed.role) == ([1, 2, 6], ["c"], "admin")

    def test_an_older_read_than_what_is_known_changes_nothing(self, house: House) -> None:
        ann = house.follower()
        feed = house.behind(ann, head=9, visible=RangeSet([(3, 4), (9, OPEN)]))
        house.end_own(house.begin(), 7, 3, 4, visible=RangeSet([(3, 4)]))
        assert (ann.seqs, ann.loads, list(feed.visible)) == ([], [], [(3, 4), (9, OPEN)])
        assert not house.idle


def test_a_live_event_during_a_read_waits_for_its_end(house: House) -> None:
    ann = house.follower()
    feed = house.behind(ann, head=2)
    need = house.begin()
    come(house.fanout, 3)
    visit(house.fanout)
    assert ann.written == []
    house.end(need, 2)
    assert (ann.seqs, feed.behind) == ([1, 2, 3], False)
    assert feed.visible == ALL
