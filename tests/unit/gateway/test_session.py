"""The session core by itself: what goes out when, and what an ack takes back."""

from typing import Any, cast

import pytest

from services.gateway.feed import NEVER, Feed
from services.gateway.room import Room, Run
from services.gateway.session import Session, Taken
from shared.ranges import OPEN, RangeSet
from tests.followers import ALL, made, written

SOON = 1.0


def session(*, window: int = 4, resend_s: float = SOON, resends: int = 2) -> Session:
    return Session("ann", window=window, resend_s=resend_s, resends=resends)


def live(of: Session, name: str = "c", *, at: int = 0, visible: RangeSet = ALL, record: int = 0) -> Feed:
    feed = of.join(Room(name), cast("Any", None))
    feed.known(at, visible, "member")
    feed.fresh = False
    feed.begin(at, record)
    feed.room.know(at)
    of.loaded(feed)
    return feed


def take(of: Session, feed: Feed, *seqs: int, now: float = 0.0) -> Taken:
    feed.room.know(seqs[-1])
    return of.take(feed, Run([made(seq) for seq in seqs]), now)


def seqs(taken: Taken) -> list[int]:
    return [frame["seq"] for frame in written(taken.frames)]


def unacked(of: Session, feed: Feed) -> list[int]:
    return list(of.unacked(feed).seqs())


def member(seq: int, action: str, user_id: str = "ann", **more: Any) -> Run:
    return Run([made(seq, "member", body={"action": action, "user_id": user_id, **more})])


class TestEarly:
    def test_acks_before_the_frame_are_kept_up_to_a_bound(self) -> None:
        feed = session().join(Room("c"), cast("Any", None))
        assert feed.wait_for_frame([(1, 2), (2, 5)])
        assert feed.early == RangeSet([(1, 5)])
        assert not feed.wait_for_frame([(seq, seq) for seq in range(7, 2007, 2)])
        assert feed.early == RangeSet([(1, 5)])


class TestTaking:
    def test_a_run_goes_out_as_one_buffer_that_is_not_copied(self) -> None:
        of = session()
        feed = live(of)
        feed.room.know(2)
        run = Run([made(1), made(2)])
        taken = of.take(feed, run, 0.0)
        assert taken.frames is run.buffer
        assert (taken.events, taken.load) == (2, False)
        assert (feed.position, unacked(of, feed), of.in_flight) == (2, [1, 2], 2)

    @pytest.mark.promise("I12")
    def test_what_is_not_visible_is_passed_over(self) -> None:
        of = session()
        feed = live(of, visible=RangeSet([(1, 1), (4, OPEN)]))
        assert seqs(take(of, feed, 1, 2, 3, 4)) == [1, 4]
        assert (feed.position, unacked(of, feed), of.in_flight) == (4, [1, 4], 2)

    @pytest.mark.promise("I12")
    def test_who_has_left_passes_over_all_that_follows(self) -> None:
        of = session()
        feed = live(of, at=5, visible=RangeSet([(1, 5)]))
        assert not feed.member
        assert take(of, feed, 6, 7) == Taken(b"", 0, load=False)
        assert (feed.position, of.in_flight) == (7, 0)

    @pytest.mark.promise("I12")
    def test_who_has_left_still_gets_what_was_visible(self) -> None:
        of = session()
        feed = live(of, at=3, visible=RangeSet([(1, 5)]))
        assert seqs(take(of, feed, 4, 5, 6)) == [4, 5]
        assert feed.position == 6

    def test_a_title_is_told_again_to_those_who_may_see_it(self) -> None:
        of = session()
        feed, gone = live(of, "a"), live(of, "b", visible=RangeSet([(1, 1)]))
        run = Run([made(1), made(2, "conversation", body={"title": "x"})])
        for one in (feed, gone):
            one.room.know(2)
        assert of.take(feed, run, 0.0).load
        assert not of.take(gone, run, 0.0).load

    def test_what_is_known_from_a_read_is_not_told_again(self) -> None:
        of = session()
        feed = live(of)
        feed.as_of = 2
        feed.room.know(2)
        taken = of.take(feed, Run([made(1), made(2, "conversation", body={"title": "x"})]), 0.0)
        assert (taken.events, taken.load) == (2, False)

    @pytest.mark.promise("protocol.3.hidden_edit", "I12")
    def test_an_edit_of_what_is_hidden_needs_a_read_of_its_own(self) -> None:
        of = session()
        feed = live(of, at=5, visible=RangeSet([(4, OPEN)]))
        feed.room.know(7)
        taken = of.take(feed, Run([made(6), made(7, "edit", target_seq=3, body={"text": "secret"})]), 0.0)
        assert seqs(taken) == [6]
        assert (feed.position, feed.own, feed.behind) == (6, True, True)
        assert b"secret" not in taken.frames

    def test_an_edit_of_what_is_visible_goes_out(self) -> None:
        of = session()
        feed = live(of, at=5, visible=RangeSet([(4, OPEN)]))
        feed.room.know(6)
        taken = of.take(feed, Run([made(6, "edit", target_seq=4, body={"text": "new"})]), 0.0)
        assert [frame["body"] for frame in written(taken.frames)] == [{"text": "new"}]


class TestWindow:
    @pytest.mark.promise("protocol.3.window")
    def test_it_is_never_exceeded(self) -> None:
        of = session(window=2)
        feed = live(of)
        assert seqs(take(of, feed, 1, 2, 3, 4)) == [1, 2]
        assert (of.in_flight, of.room, feed.behind) == (2, 0, True)
        assert of.next_behind() is None
        assert of.next_read(100) is None

    @pytest.mark.promise("protocol.3.window")
    def test_it_counts_all_conversations(self) -> None:
        of = session(window=2)
        one, two = live(of, "a"), live(of, "b")
        assert seqs(take(of, one, 1)) == [1]
        assert seqs(take(of, two, 1, 2)) == [1]
        assert (of.in_flight, two.behind) == (2, True)

    def test_what_is_invisible_needs_no_room(self) -> None:
        of = session(window=1)
        feed = live(of, visible=RangeSet([(1, 1), (9, OPEN)]))
        assert seqs(take(of, feed, *range(1, 9))) == [1]
        assert (feed.position, feed.behind) == (8, False)

    def test_an_ack_opens_it(self) -> None:
        of = session(window=2)
        feed = live(of)
        take(of, feed, 1, 2, 3)
        of.ack(feed, [(1, 1)], 3)
        assert of.room == 1
        assert of.next_behind() is feed

    def test_what_was_pulled_before_it_is_pushed_takes_no_room(self) -> None:
        of = session(window=4)
        feed = live(of)
        of.ack(feed, [(2, 3)], 4)
        assert seqs(take(of, feed, 1, 2, 3, 4)) == [1, 2, 3, 4]
        assert (of.in_flight, unacked(of, feed)) == (2, [1, 4])

    def test_a_dropped_conversation_frees_it(self) -> None:
        of = session(window=1)
        feed = live(of)
        take(of, feed, 1, 2)
        of.drop("c")
        assert (of.in_flight, of.room, of.next_behind()) == (0, 1, None)
        of.drop("c")
        assert feed.held


class TestTurnsOfItsFeeds:
    def test_one_is_read_for_at_a_time_and_each_in_its_turn(self) -> None:
        of = session(window=10)
        feeds = [live(of, name) for name in "abc"]
        for feed in feeds:
            feed.room.know(9)
            of.fall_behind(feed)
            of.needs_read(feed)
        order = []
        for _ in range(6):
            reading = of.next_read(1)
            assert reading is not None
            assert of.next_read(1) is None
            order.append(reading.conversation_id)
            of.read_done(reading)
            again = of.next_behind()
            assert again is reading
            of.needs_read(again)
        assert order == list("abcabc")

    def test_nothing_is_read_for_a_few_events_only(self) -> None:
        of = session(window=8)
        feed = live(of)
        take(of, feed, *range(1, 9))
        feed.room.know(20)
        of.fall_behind(feed)
        of.needs_read(feed)
        of.ack(feed, [(1, 1)], 20)
        assert of.next_read(100) is None
        of.ack(feed, [(2, 2)], 20)
        assert of.next_read(100) is feed

    def test_a_read_that_ends_at_the_head_makes_it_live(self) -> None:
        of = session()
        feed = live(of)
        feed.room.know(1)
        of.fall_behind(feed)
        of.needs_read(feed)
        assert of.next_read(1) is feed
        take(of, feed, 1)
        of.read_done(feed)
        assert (feed.behind, of.next_behind(), of.reading) == (False, None, None)

    def test_what_falls_behind_while_it_is_read_for_comes_in_turn_afterwards(self) -> None:
        of = session()
        feed = live(of)
        feed.room.know(1)
        of.fall_behind(feed)
        of.needs_read(feed)
        assert of.next_read(1) is feed
        of.fall_behind(feed)
        assert of.next_behind() is None
        of.read_done(feed)
        assert of.next_behind() is feed

    def test_a_conversation_that_is_dropped_during_its_read_blocks_no_other(self) -> None:
        of = session()
        feed, other = live(of, "a"), live(of, "b")
        for one in (feed, other):
            one.room.know(3)
            of.fall_behind(one)
            of.needs_read(one)
        assert of.next_read(1) is feed
        of.drop("a")
        assert of.next_read(1) is None
        of.read_done(feed)
        assert of.next_read(1) is other
        assert of.next_behind() is None


class TestLoading:
    @pytest.mark.promise("I6")
    def test_nothing_that_comes_before_the_frame_is_forgotten(self) -> None:
        of = session()
        feed = of.join(Room("c"), cast("Any", None))
        assert feed.held
        feed.room.know(3)
        feed.known(3, ALL, "member")
        feed.begin(3, 3)
        feed.room.know(4)
        of.fall_behind(feed)
        assert of.next_behind() is None
        of.loaded(feed)
        assert of.next_behind() is feed

    def test_at_the_head_it_is_live(self) -> None:
        of = session()
        live(of, at=7)
        assert of.next_behind() is None

    def test_reload_holds_events_until_the_frame(self) -> None:
        of = session()
        feed = live(of)
        feed.room.know(1)
        of.fall_behind(feed)
        of.reload(feed)
        assert (of.next_behind(), feed.behind) == (None, False)
        of.fall_behind(feed)
        assert of.next_behind() is None
        of.loaded(feed)
        assert of.next_behind() is feed

    def test_a_read_that_ends_while_it_is_loading_does_not_read_on(self) -> None:
        of = session()
        feed = live(of)
        feed.room.know(2)
        of.fall_behind(feed)
        of.needs_read(feed)
        reading = of.next_read(1)
        assert reading is feed
        of.reload(feed)
        of.read_done(reading)
        assert (of.next_behind(), of.next_read(1)) == (None, None)

    def test_one_that_is_halted_gets_nothing_after_its_frame(self) -> None:
        of = session()
        feed = live(of)
        feed.halted = True
        feed.room.know(5)
        of.loaded(feed)
        of.fall_behind(feed)
        assert of.next_behind() is None
        assert not of.settle(feed)


class TestAcks:
    def test_by_ranges_in_any_order(self) -> None:
        of = session(window=10)
        feed = live(of)
        take(of, feed, *range(1, 7))
        new, ignored = of.ack(feed, [(5, 6), (1, 2), (2, 3)], 6)
        assert (list(new), ignored) == ([(1, 3), (5, 6)], 0)
        assert (unacked(of, feed), of.in_flight) == ([4], 1)
        new, ignored = of.ack(feed, [(4, 4)], 6)
        assert (list(new), ignored, of.in_flight, feed.low) == ([(4, 4)], 0, 0, 6)

    def test_a_repeat_is_nothing_new(self) -> None:
        of = session()
        feed = live(of)
        take(of, feed, 1)
        of.ack(feed, [(1, 1)], 1)
        assert of.ack(feed, [(1, 1)], 1) == ((), 0)
        assert of.in_flight == 0

    def test_what_the_server_knew_of_is_nothing_new(self) -> None:
        of = session()
        feed = live(of, at=2, record=5)
        take(of, feed, *range(3, 7))
        new, ignored = of.ack(feed, [(3, 6)], 6)
        assert (list(new), ignored, of.in_flight) == ([(6, 6)], 0, 0)

    def test_what_was_pulled_counts_and_is_pushed_all_the_same(self) -> None:
        of = session()
        feed = live(of, at=2)
        new, _ = of.ack(feed, [(1, 5)], 5)
        assert list(new) == [(1, 5)]
        assert feed.position == 2
        assert seqs(take(of, feed, 3, 4, 5)) == [3, 4, 5]
        assert of.in_flight == 0

    @pytest.mark.promise("I12", "protocol.3.ack")
    def test_above_the_head_and_invisible_ones_are_ignored_and_counted(self) -> None:
        of = session()
        feed = live(of, visible=RangeSet([(3, OPEN)]))
        new, ignored = of.ack(feed, [(1, 10)], 5)
        assert (list(new), ignored) == ([(3, 5)], 7)

    @pytest.mark.promise("protocol.3.ack")
    def test_one_that_ends_above_the_head_is_cut(self) -> None:
        of = session()
        feed = live(of)
        take(of, feed, 1, 2)
        new, ignored = of.ack(feed, [(1, 3)], 2)
        assert (list(new), ignored, of.in_flight) == ([(1, 2)], 1, 0)

    def test_the_largest_range_there_can_be(self) -> None:
        of = session()
        feed = live(of)
        new, ignored = of.ack(feed, [(1, OPEN)], 2)
        assert (list(new), ignored) == ([(1, 2)], OPEN - 2)

    def test_all_that_was_acked_is_known_for_the_refresh(self) -> None:
        of = session(window=10)
        feed = live(of, at=2, visible=RangeSet([(1, 4), (6, OPEN)]))
        take(of, feed, *range(3, 10))
        of.ack(feed, [(3, 7)], 9)
        of.ack(feed, [(9, 9)], 9)
        assert list(feed.acked()) == [(3, 4), (6, 7), (9, 9)]


class TestResend:
    @pytest.mark.promise("protocol.3.resend")
    def test_after_its_time_in_order_with_doubled_delays(self) -> None:
        of = session(resends=3)
        feed = live(of)
        take(of, feed, 1, 2, 3)
        assert of.due == 1.0
        of.ack(feed, [(2, 2)], 3)
        assert of.resends_due(0.9) == []
        assert [list(resend.seqs) for resend in of.resends_due(1.0)] == [[(1, 1), (3, 3)]]
        assert of.due == 3.0
        assert of.resends_due(2.9) == []
        assert [list(resend.seqs) for resend in of.resends_due(3.0)] == [[(1, 1), (3, 3)]]
        assert of.due == 7.0

    @pytest.mark.promise("protocol.3.resend")
    def test_it_ends_after_the_last_resend_is_not_acked_in_time(self) -> None:
        of = session(resends=2)
        take(of, live(of), 1)
        of.resends_due(1.0)
        assert not of.overdue(2.9)
        of.resends_due(3.0)
        assert not of.overdue(6.9)
        assert of.overdue(7.0)

    def test_without_resends_the_first_time_is_the_last(self) -> None:
        of = session(resends=0)
        take(of, live(of), 1)
        assert not of.overdue(0.9)
        assert of.overdue(1.0)

    def test_an_ack_ends_it(self) -> None:
        of = session()
        feed = live(of)
        take(of, feed, 1)
        of.ack(feed, [(1, 1)], 1)
        assert feed.sent is None
        assert of.resends_due(1.0) == []
        assert of.due == float("inf")
        assert not of.overdue(99.0)

    def test_a_former_members_events_are_due_too(self) -> None:
        of = session()
        feed = live(of, visible=RangeSet([(1, 2), (4, 4)]))
        take(of, feed, 1, 2, 3, 4)
        of.ack(feed, [(1, 1)], 4)
        assert [list(resend.seqs) for resend in of.resends_due(1.0)] == [[(2, 2), (4, 4)]]

    def test_what_could_not_be_read_is_no_try(self) -> None:
        of = session(resends=1)
        feed = live(of)
        take(of, feed, 1)
        resends: list[Any] = []
        for now in (1.0, 2.0, 3.0, 4.0):
            resends = of.resends_due(now)
            assert len(resends) == 1
            of.not_resent(resends[0], now, 1.0)
            assert of.due == now + 1.0
            assert not of.overdue(now)
        of.ack(feed, [(1, 1)], 1)
        of.not_resent(resends[0], 5.0, 1.0)
        assert of.resends_due(9.0) == []

    def test_what_is_written_together_is_due_together_and_what_comes_later_is_due_later(self) -> None:
        of = session(window=10, resend_s=10.0)
        feed = live(of)
        take(of, feed, 1, now=0.0)
        take(of, feed, 2, now=0.5)
        take(of, feed, 3, now=4.0)
        assert [(run.first, run.last, run.due) for run in feed.sent or ()] == [(1, 2, 10.5), (3, 3, 14.0)]
        assert [list(resend.seqs) for resend in of.resends_due(10.5)] == [[(1, 2)]]
        take(of, feed, 4, now=10.6)
        assert [(run.first, run.last) for run in feed.sent or ()] == [(1, 2), (3, 3), (4, 4)]


class TestMembership:
    def test_removed_sees_the_removal_and_nothing_after(self) -> None:
        of = session(window=10)
        feed = live(of, at=4)
        feed.room.know(7)
        run = Run([made(5, "member", body={"action": "remove", "user_id": "ann"}), made(6), made(7)])
        taken = of.take(feed, run, 0.0)
        assert (seqs(taken), taken.load) == ([5], True)
        assert (feed.position, feed.member, list(feed.visible)) == (7, False, [(1, 5)])

    def test_another_ones_removal_changes_nothing(self) -> None:
        of = session()
        feed = live(of, at=4)
        feed.room.know(5)
        taken = of.take(feed, member(5, "remove", "bob"), 0.0)
        assert (seqs(taken), taken.load, feed.member) == ([5], False, True)

    @pytest.mark.promise("I6", "protocol.3.conversation_frame")
    def test_added_again_its_frame_comes_before_the_event(self) -> None:
        of = session(window=10)
        feed = live(of, at=7, visible=RangeSet([(1, 5)]))
        feed.room.know(8)
        taken = of.take(feed, member(8, "add", role="admin"), 0.0)
        assert taken == Taken(b"", 0, load=True)
        assert (feed.loading, feed.role, list(feed.visible), feed.position) == (True, "admin", [(1, 5), (8, OPEN)], 7)
        of.loaded(feed)
        taken = of.take(feed, member(8, "add", role="admin"), 0.0)
        assert (seqs(taken), taken.load) == ([8], False)

    @pytest.mark.promise("I6")
    def test_added_again_with_history_goes_back_to_what_was_passed_over(self) -> None:
        of = session(window=10)
        feed = live(of, at=3, visible=RangeSet([(1, 5)]))
        feed.keeps_history = True
        take(of, feed, 4, 5, 6, 7)
        of.ack(feed, [(4, 4)], 7)
        feed.room.know(8)
        assert of.take(feed, member(8, "add"), 0.0).load
        assert (list(feed.visible), feed.role, feed.position) == ([(1, OPEN)], "member", 5)
        assert (unacked(of, feed), of.in_flight) == ([5], 1)

    def test_a_late_record_changes_nothing(self) -> None:
        of = session()
        feed = live(of, at=4)
        feed.as_of = 9
        feed.room.know(9)
        taken = of.take(feed, member(5, "remove"), 0.0)
        assert (seqs(taken), taken.load, list(feed.visible)) == ([5], False, [(1, OPEN)])

    def test_a_role_changes_nothing_visible(self) -> None:
        of = session()
        feed = live(of, at=4)
        feed.room.know(5)
        taken = of.take(feed, member(5, "role", role="admin"), 0.0)
        assert (seqs(taken), taken.load) == ([5], True)
        assert (feed.role, list(feed.visible), feed.as_of) == ("admin", [(1, OPEN)], 5)

    def test_an_older_read_changes_nothing(self) -> None:
        of = session()
        feed = live(of, at=4)
        feed.room.know(6)
        of.take(feed, Run([made(5), made(6, "member", sender_id="ann", body={"action": "leave"})]), 0.0)
        assert not feed.known(5, ALL, "admin")
        assert (list(feed.visible), feed.role) == ([(1, 6)], "member")

    def test_a_read_that_finds_more_goes_back_to_it(self) -> None:
        of = session(window=10)
        feed = live(of, at=9, visible=RangeSet([(1, 5)]))
        of.known(feed, 9, RangeSet([(1, 5), (8, OPEN)]), "member")
        assert feed.position == 7

    def test_may_see(self) -> None:
        feed = live(session(), visible=RangeSet([(2, 3), (5, OPEN)]))
        assert [feed.may_see(seq) for seq in (1, 2, 3, 4, 5, 6)] == [False, True, True, False, True, True]
        assert (feed.open_from, feed.member) == (5, True)
        feed.known(9, RangeSet([(2, 3)]), "member")
        assert (feed.open_from, feed.may_see(OPEN - 1)) == (NEVER, False)


class TestBounds:
    def test_acks_out_of_order_are_remembered_up_to_a_bound_and_all_told(self) -> None:
        of = session(window=10)
        feed = live(of, at=100_000)
        told = 0
        for start in range(1, 40_000, 2_000):
            new, ignored = of.ack(feed, [(seq, seq) for seq in range(start, start + 2_000, 2)], 100_000)
            told += len(new)
            assert not ignored
        assert told == 20_000
        assert len(feed.gaps) <= 1_000
        assert seqs(take(of, feed, 100_001)) == [100_001]
        assert of.ack(feed, [(100_001, 100_001)], 100_001) == (((100_001, 100_001),), 0)
        assert of.in_flight == 0

    def test_what_is_in_flight_is_remembered_over_the_bound(self) -> None:
        of = session(window=10)
        feed = live(of, at=0)
        take(of, feed, *range(1, 11))
        of.ack(feed, [(seq, seq) for seq in range(2, 11, 2)], 10_000)
        of.ack(feed, [(seq, seq) for seq in range(20, 5_000, 2)], 10_000)
        assert unacked(of, feed) == [1, 3, 5, 7, 9]
        assert of.in_flight == 5

    def test_a_halted_feed_sends_nothing_again(self) -> None:
        of = session()
        feed = live(of)
        take(of, feed, 1)
        of.halt(feed)
        assert not of.resends_due(100 * SOON)
        assert not of.overdue(10_000 * SOON)
