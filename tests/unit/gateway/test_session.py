"""The session core by itself: what goes out when, and what an ack takes back."""

import pytest

from services.gateway.session import Feed, Offer, Read, Session
from shared.ranges import EMPTY, OPEN, RangeSet

ALL = RangeSet([(1, OPEN)])


def session(*, window: int = 4, resend_s: float = 1.0, resends: int = 2, page: int = 100) -> Session:
    return Session(window=window, resend_s=resend_s, resends=resends, page=page)


def live(of: Session, name: str = "c", *, at: int = 0, visible: RangeSet = ALL) -> Feed:
    feed = of.join(name)
    feed.known(at, visible, "member")
    feed.position = at
    of.loaded(feed, at)
    return feed


def read_of(of: Session) -> Read:
    read = of.next_read()
    assert read is not None
    return read


class TestEarly:
    def test_acks_before_the_frame_are_kept_up_to_a_bound(self) -> None:
        feed = session().join("c")
        assert feed.wait_for_frame([(1, 2), (2, 5)])
        assert feed.early == RangeSet([(1, 5)])
        assert not feed.wait_for_frame([(seq, seq) for seq in range(7, 2007, 2)])
        assert feed.early == RangeSet([(1, 5)])


class TestLive:
    def test_the_next_event_is_pushed(self) -> None:
        of = session()
        feed = live(of)
        assert of.offer(feed, 1, 0.0) is Offer.PUSH
        assert (feed.position, list(feed.unacked), of.in_flight) == (1, [1], 1)

    @pytest.mark.promise("I6")
    def test_a_repeat_is_dropped(self) -> None:
        of = session()
        feed = live(of, at=5)
        assert [of.offer(feed, seq, 0.0) for seq in (1, 5)] == [Offer.DROP, Offer.DROP]
        assert of.offer(feed, 6, 0.0) is Offer.PUSH
        assert of.offer(feed, 6, 0.0) is Offer.DROP
        assert of.in_flight == 1

    @pytest.mark.promise("I6")
    def test_a_gap_is_read_and_everything_after_it_waits(self) -> None:
        of = session()
        feed = live(of)
        assert of.offer(feed, 2, 0.0) is Offer.READ
        assert of.offer(feed, 1, 0.0) is Offer.READ
        read = read_of(of)
        assert read.feed is feed
        assert of.offer(feed, 3, 0.0) is Offer.DROP
        of.read_done(read, [1, 2], complete=True, head=2, known_head=3, now=0.0)
        assert feed.position == 2
        of.read_done(read_of(of), [3], complete=True, head=3, known_head=3, now=0.0)
        assert of.next_read() is None
        assert of.offer(feed, 4, 0.0) is Offer.PUSH

    @pytest.mark.promise("I12")
    def test_what_is_not_visible_is_passed_over(self) -> None:
        of = session()
        feed = live(of, visible=RangeSet([(1, 1), (4, OPEN)]))
        offers = [of.offer(feed, seq, 0.0) for seq in (1, 2, 3, 4)]
        assert offers == [Offer.PUSH, Offer.DROP, Offer.DROP, Offer.PUSH]
        assert sorted(feed.unacked) == [1, 4]

    def test_congestion_turns_it_behind(self) -> None:
        of = session()
        feed = live(of)
        assert of.offer(feed, 1, 0.0, congested=True) is Offer.READ
        assert feed.position == 0
        assert read_of(of).feed is feed


class TestWindow:
    def test_it_is_never_exceeded_by_pushes(self) -> None:
        of = session(window=2)
        feed = live(of)
        offers = [of.offer(feed, seq, 0.0) for seq in (1, 2, 3, 4)]
        assert offers == [Offer.PUSH, Offer.PUSH, Offer.READ, Offer.READ]
        assert (of.in_flight, of.room) == (2, 0)
        assert of.next_read() is None

    def test_it_counts_all_conversations(self) -> None:
        of = session(window=2)
        one, two = live(of, "a"), live(of, "b")
        assert of.offer(one, 1, 0.0) is Offer.PUSH
        assert of.offer(two, 1, 0.0) is Offer.PUSH
        assert of.offer(two, 2, 0.0) is Offer.READ

    def test_an_ack_opens_it_for_a_read(self) -> None:
        of = session(window=2)
        feed = live(of)
        for seq in (1, 2, 3):
            of.offer(feed, seq, 0.0)
        of.ack(feed, [(1, 1)], 3)
        assert read_of(of).limit == 1

    def test_what_a_read_may_bring_is_taken_already(self) -> None:
        of = session(window=3)
        behind, other = live(of, "a"), live(of, "b")
        of.offer(behind, 2, 0.0)
        read = read_of(of)
        assert (read.limit, of.room) == (3, 0)
        assert of.offer(other, 1, 0.0) is Offer.READ
        of.read_done(read, [1, 2], complete=True, head=2, known_head=2, now=0.0)
        assert (of.room, of.in_flight) == (1, 2)

    def test_a_failed_read_gives_its_room_back(self) -> None:
        of = session(window=3)
        feed = live(of)
        of.offer(feed, 2, 0.0)
        of.read_failed(read_of(of))
        assert of.room == 3
        assert read_of(of).feed is feed

    def test_a_page_bounds_a_read(self) -> None:
        of = session(window=10, page=3)
        feed = live(of)
        of.fall_behind(feed)
        assert read_of(of).limit == 3

    def test_a_dropped_conversation_frees_it(self) -> None:
        of = session(window=1)
        feed = live(of)
        of.offer(feed, 1, 0.0)
        of.drop("c")
        assert (of.in_flight, of.room) == (0, 1)
        of.drop("c")

    def test_conversations_are_read_in_turn(self) -> None:
        of = session(window=10, page=1)
        for name in "abc":
            of.fall_behind(live(of, name))
        order = []
        for _ in range(6):
            read = read_of(of)
            order.append(read.feed.conversation_id)
            of.read_done(read, [read.feed.position + 1], complete=False, head=9, known_head=9, now=0.0)
        assert order == list("abcabc")


class TestLoading:
    @pytest.mark.promise("I6")
    def test_no_event_goes_out_before_its_frame_and_none_is_forgotten(self) -> None:
        of = session()
        feed = of.join("c")
        feed.known(3, ALL, "member")
        assert of.offer(feed, 4, 0.0) is Offer.DROP
        feed.position = 3
        of.loaded(feed, 4)
        assert read_of(of).feed is feed

    def test_at_the_head_it_is_live(self) -> None:
        of = session()
        live(of, at=7)
        assert of.next_read() is None

    def test_a_read_short_of_the_known_head_is_done_again(self) -> None:
        of = session()
        feed = live(of)
        of.offer(feed, 2, 0.0)
        of.read_done(read_of(of), [1], complete=True, head=1, known_head=2, now=0.0)
        assert read_of(of).feed is feed

    def test_reload_holds_events_until_the_frame(self) -> None:
        of = session()
        feed = live(of)
        of.fall_behind(feed)
        of.reload(feed)
        assert of.next_read() is None
        assert of.offer(feed, 1, 0.0) is Offer.DROP
        of.fall_behind(feed)
        assert of.next_read() is None
        of.loaded(feed, 1)
        assert read_of(of).feed is feed

    def test_a_read_that_ends_while_it_is_loading_does_not_read_on(self) -> None:
        of = session()
        feed = live(of)
        of.fall_behind(feed)
        read = read_of(of)
        of.reload(feed)
        of.read_failed(read)
        assert of.next_read() is None

    def test_invisible_events_at_the_end_are_passed_over_by_a_read(self) -> None:
        of = session()
        feed = live(of, visible=RangeSet([(1, 2)]))
        of.fall_behind(feed)
        of.read_done(read_of(of), [1, 2], complete=True, head=9, known_head=9, now=0.0)
        assert feed.position == 9
        assert of.next_read() is None


class TestAcks:
    def test_by_ranges_in_any_order(self) -> None:
        of = session(window=10)
        feed = live(of)
        for seq in range(1, 7):
            of.offer(feed, seq, 0.0)
        new, ignored = of.ack(feed, [(5, 6), (1, 2), (2, 3)], 6)
        assert (list(new), ignored) == ([(1, 3), (5, 6)], 0)
        assert (sorted(feed.unacked), of.in_flight) == ([4], 1)

    def test_a_repeat_is_nothing_new(self) -> None:
        of = session()
        feed = live(of)
        of.offer(feed, 1, 0.0)
        of.ack(feed, [(1, 1)], 1)
        assert of.ack(feed, [(1, 1)], 1) == (EMPTY, 0)
        assert of.in_flight == 0

    def test_what_was_pulled_counts_and_is_not_pushed_less(self) -> None:
        of = session()
        feed = live(of, at=2)
        new, _ = of.ack(feed, [(1, 5)], 5)
        assert list(new) == [(1, 5)]
        assert feed.position == 2

    @pytest.mark.promise("I12")
    def test_above_the_head_and_invisible_ones_are_ignored_and_counted(self) -> None:
        of = session()
        feed = live(of, visible=RangeSet([(3, OPEN)]))
        new, ignored = of.ack(feed, [(1, 10)], 5)
        assert (list(new), ignored) == ([(3, 5)], 7)

    def test_the_largest_range_there_can_be(self) -> None:
        of = session()
        feed = live(of)
        new, ignored = of.ack(feed, [(1, OPEN)], 2)
        assert (list(new), ignored) == ([(1, 2)], OPEN - 2)


class TestResend:
    def test_after_its_time_in_order_with_doubled_delays(self) -> None:
        of = session(resends=3)
        feed = live(of)
        for seq in (1, 2, 3):
            of.offer(feed, seq, 0.0)
        of.ack(feed, [(2, 2)], 3)
        assert of.resends_due(0.9) == []
        assert [resend.seqs for resend in of.resends_due(1.0)] == [[1, 3]]
        assert of.next_due() == 3.0
        assert of.resends_due(2.9) == []
        assert [resend.seqs for resend in of.resends_due(3.0)] == [[1, 3]]
        assert of.next_due() == 7.0

    def test_it_ends_after_the_last_resend_is_not_acked_in_time(self) -> None:
        of = session(resends=2)
        live_feed = live(of)
        of.offer(live_feed, 1, 0.0)
        of.resends_due(1.0)
        assert not of.overdue(2.9)
        of.resends_due(3.0)
        assert not of.overdue(6.9)
        assert of.overdue(7.0)

    def test_without_resends_the_first_time_is_the_last(self) -> None:
        of = session(resends=0)
        of.offer(live(of), 1, 0.0)
        assert not of.overdue(0.9)
        assert of.overdue(1.0)

    def test_an_ack_ends_it(self) -> None:
        of = session()
        feed = live(of)
        of.offer(feed, 1, 0.0)
        of.ack(feed, [(1, 1)], 1)
        assert of.next_due() is None
        assert not of.overdue(99.0)

    def test_what_could_not_be_read_is_no_try(self) -> None:
        of = session(resends=1)
        feed = live(of)
        of.offer(feed, 1, 0.0)
        for now in (1.0, 2.0, 3.0, 4.0):
            (resend,) = of.resends_due(now)
            of.not_resent(resend)
            assert of.next_due() == now + 1.0
            assert not of.overdue(now)
        of.ack(feed, [(1, 1)], 1)
        of.not_resent(resend)
        assert of.next_due() is None


class TestMembership:
    def test_removed_sees_the_removal_and_nothing_after(self) -> None:
        of = session(window=10)
        feed = live(of, at=4)
        feed.changed_by(5, "remove", None)
        assert [of.offer(feed, seq, 0.0) for seq in (5, 6, 7)] == [Offer.PUSH, Offer.DROP, Offer.DROP]
        assert feed.position == 7

    def test_added_again_sees_from_the_adding_on(self) -> None:
        of = session(window=10)
        feed = live(of, at=7, visible=RangeSet([(1, 5)]))
        feed.changed_by(8, "add", "admin")
        assert (list(feed.visible), feed.role, feed.position) == ([(1, 5), (8, OPEN)], "admin", 7)
        assert of.offer(feed, 8, 0.0) is Offer.PUSH

    @pytest.mark.promise("I6")
    def test_added_again_with_history_goes_back_to_what_was_passed_over(self) -> None:
        of = session(window=10)
        feed = live(of, at=7, visible=RangeSet([(1, 5)]))
        feed.keeps_history = True
        feed.changed_by(8, "add", None)
        assert (list(feed.visible), feed.role, feed.position) == ([(1, OPEN)], "member", 5)

    def test_a_late_record_changes_nothing(self) -> None:
        feed = live(session(), at=9)
        feed.changed_by(8, "remove", None)
        assert list(feed.visible) == [(1, OPEN)]

    def test_a_role_changes_nothing_visible(self) -> None:
        feed = live(session(), at=4)
        feed.changed_by(5, "role", "admin")
        assert (feed.role, list(feed.visible), feed.as_of) == ("admin", [(1, OPEN)], 5)

    def test_an_older_read_changes_nothing(self) -> None:
        feed = live(session(), at=4)
        feed.changed_by(6, "leave", None)
        feed.known(5, ALL, "admin")
        assert (list(feed.visible), feed.role) == ([(1, 6)], "member")

    def test_may_see(self) -> None:
        feed = live(session(), visible=RangeSet([(2, 3), (5, OPEN)]))
        assert [feed.may_see(seq) for seq in (1, 2, 3, 4, 5, 6)] == [False, True, True, False, True, True]
