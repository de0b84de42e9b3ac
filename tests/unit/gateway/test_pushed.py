"""Pushes on their way to the log; that each is there once is checked by the session machine."""

from typing import Any, cast

import pytest

from services.gateway.fanout import Fanout
from services.gateway.pushed import Pushed, Pushes
from services.gateway.session import Session
from shared.ranges import RangeSet
from tests.followers import ALL, Follower, come, follow, say


class Following:
    """A follower whose pushes are noted."""

    def __init__(self, pushes: Pushes, name: str = "ann", *, at: int = 0, visible: RangeSet = ALL) -> None:
        self.now = 10.0
        self.fanout = Fanout(clock=lambda: self.now)
        self.follower = Follower(name)
        self.follower.session = Session(name, window=100, resend_s=5, resends=5, pushes=pushes)
        self.feed = follow(self.fanout, self.follower, at=at, visible=visible)


def ranges(taken: list[Pushed]) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in taken]


@pytest.fixture
def pushes() -> Pushes:
    return Pushes()


def test_what_goes_on_is_one_range_with_the_time_of_its_first(pushes: Pushes) -> None:
    of = Following(pushes, at=4)
    say(of.fanout, 5)
    of.now = 10.7
    say(of.fanout, 6, 7)
    assert len(pushes) == 1
    assert pushes.take(10) == [Pushed(10.0, "c", "ann", "phone", "ann/phone", 5, 7)]
    assert (len(pushes), pushes.take(10)) == (0, [])
    of.now = 11.0
    say(of.fanout, 8)
    assert pushes.take(10) == [Pushed(11.0, "c", "ann", "phone", "ann/phone", 8, 8)]


def test_what_is_passed_over_is_not_told_of(pushes: Pushes) -> None:
    of = Following(pushes, visible=RangeSet([(1, 2), (5, 6)]))
    come(of.fanout, 1, 2, 3, 4, 5, 6)
    say(of.fanout, 7)
    assert ranges(pushes.take(10)) == [(1, 2), (5, 6)]


def test_an_end_keeps_the_range_and_not_the_session(pushes: Pushes) -> None:
    of = Following(pushes)
    say(of.fanout, 1, 2)
    of.fanout.unregister(of.follower)
    assert (len(pushes), len(pushes._feeds)) == (1, 0)
    assert ranges(pushes.take(10)) == [(1, 2)]


def test_what_was_pushed_before_the_feed_went_back_is_no_first_push(pushes: Pushes) -> None:
    of = Following(pushes, visible=RangeSet([(1, 2), (5, 1 << 60)]))
    say(of.fanout, 1, 2, 3, 4, 5, 6)
    of.follower.session.known(of.feed, 6, ALL, "member")
    assert of.feed.position == 2
    of.fanout.hand_out(of.feed, 12.0)
    assert ranges(pushes.take(10)) == [(1, 2), (5, 6), (3, 4)]
    say(of.fanout, 7)
    assert ranges(pushes.take(10)) == [(7, 7)]
    assert not of.feed.repeated


def test_what_was_not_written_waits_before_the_others(pushes: Pushes) -> None:
    of, other = Following(pushes), Following(pushes, "bob")
    say(of.fanout, 1)
    say(other.fanout, 1)
    taken = pushes.take(1)
    say(of.fanout, 2)
    pushes.put_back(taken)
    assert [(one.user_id, one.first) for one in pushes.take(10)] == [("ann", 1), ("bob", 1), ("ann", 2)]


def test_what_sessions_leave_behind_is_bounded_and_the_oldest_goes() -> None:
    dropped: list[int] = []
    pushes = Pushes(most=2, dropped=dropped.append)
    for name in "abc":
        of = Following(pushes, name)
        say(of.fanout, 1)
        of.fanout.unregister(of.follower)
    assert dropped == [1]
    taken = pushes.take(10)
    assert [one.user_id for one in taken] == ["b", "c"]
    pushes.put_back([*taken, *taken])
    assert (dropped, len(pushes)) == ([1, 2], 2)


def test_without_a_log_nothing_is_kept() -> None:
    of = Following(cast("Any", None))
    say(of.fanout, 1, 2)
    of.fanout.unregister(of.follower)
    assert (of.follower.seqs, of.feed.unlogged) == ([1, 2], 0)
