"""A conversation's ring: a cursor over the timeline that others read from."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway import room as room_module
from services.gateway.events import Entry
from services.gateway.room import Came, Room, Run
from tests.followers import made

FRAME = len(made(1).frame)


def room(*seqs: int, head: int = 0) -> Room:
    """To which these events came in this order, the head having been read before."""
    out = Room("c")
    if head:
        out.know(head)
    for seq in seqs:
        out.came(made(seq))
    return out


def held(of: Room) -> list[int]:
    return [entry.seq for entry in of._events or ()]


def seqs(run: Run | None) -> list[int] | None:
    return None if run is None else [entry.seq for entry in run.entries]


class TestWhatComes:
    def test_the_next_one_lengthens_the_ring(self) -> None:
        of = room(head=4)
        assert [of.came(made(seq)) for seq in (5, 6)] == [Came.NEXT, Came.NEXT]
        assert (held(of), of.top, of.head) == ([5, 6], 6, 6)

    def test_the_first_one_of_all_is_the_next_one_whatever_its_seq(self) -> None:
        of = Room("c")
        assert of.came(made(7)) is Came.NEXT
        assert (held(of), of.top, of.head) == ([7], 7, 7)

    @pytest.mark.promise("I6")
    def test_an_old_one_changes_nothing(self) -> None:
        of = room(5, 6, head=4)
        run = of.run(4)
        assert [of.came(made(seq)) for seq in (6, 5, 1)] == [Came.OLD, Came.OLD, Came.OLD]
        assert (held(of), of.top, of.head) == ([5, 6], 6, 6)
        assert of.run(4) is run

    def test_another_event_with_the_seq_of_one_that_it_holds_is_another_stores(self) -> None:
        of = room(5, 6, head=4)
        assert [of.came(made(seq, event=7)) for seq in (4, 5, 6)] == [Came.OLD, Came.OTHER, Came.OTHER]
        assert held(of) == [5, 6]
        of.came(made(7, event=7))
        assert of.came(made(7, event=7)) is Came.OLD

    @pytest.mark.promise("I6")
    def test_after_a_gap_it_begins_anew(self) -> None:
        of = room(5, 6, head=4)
        assert of.came(made(9)) is Came.GAP
        assert (held(of), of.top, of.head) == ([9], 9, 9)
        assert of.run(6) is None
        assert seqs(of.run(8)) == [9]

    def test_a_gap_to_the_head_that_was_read_is_one_too(self) -> None:
        of = room(head=4)
        assert of.came(made(6)) is Came.GAP

    def test_its_size_is_that_of_its_frames_and_a_little_more(self) -> None:
        of = room(5, 6, head=4)
        assert of.size == 2 * (FRAME + 200)
        of.forget()
        assert of.size == 0


class TestKnowing:
    def test_the_first_read_says_where_the_ring_will_begin(self) -> None:
        of = Room("c")
        assert of.know(30) == 30
        assert (of.top, of.told, of.head) == (30, 30, 30)
        assert of.know(20) == 30
        assert of.know(40) == 40
        assert of.top == 30

    @pytest.mark.promise("I6")
    def test_a_head_that_was_never_there_is_forgotten(self) -> None:
        of = room(2, head=1)
        of.came(made(1000))
        assert of.seen(1000, 2) == 2
        assert (of.head, of.top, held(of)) == (2, 2, [])
        assert of.came(made(3)) is Came.NEXT

    @pytest.mark.promise("I6")
    def test_a_read_that_is_older_than_what_is_known_lowers_nothing(self) -> None:
        of = room(2, 3, head=1)
        assert of.seen(1, 1) == 3
        assert of.seen(2, 3) == 3
        assert held(of) == [2, 3]

    def test_what_a_user_was_told_of_may_be_acked(self) -> None:
        of = room(head=4)
        of.committed = 6
        assert (of.head, of.ackable) == (4, 6)
        of.know(9)
        assert of.ackable == 9


class TestRuns:
    def test_it_is_made_once_for_all_who_stand_at_the_same_place(self) -> None:
        of = room(5, 6, 7, head=4)
        assert of.run(4) is of.run(4)
        assert seqs(of.run(4)) == [5, 6, 7]
        assert seqs(of.run(5)) == [6, 7]
        assert of.run(5) is not of.run(4)

    def test_it_is_made_anew_when_there_is_more(self) -> None:
        of = room(5, head=4)
        before = of.run(4)
        of.came(made(6))
        assert seqs(of.run(4)) == [5, 6]
        assert seqs(before) == [5]

    def test_of_one_event_it_is_the_frame_itself(self) -> None:
        of = Room("c")
        entry = made(1)
        of.came(entry)
        run = of.run(0)
        assert run is not None
        assert run.buffer is entry.frame

    def test_there_is_none_outside_of_the_ring(self) -> None:
        of = room(5, 6, head=4)
        assert [of.run(position) for position in (3, 6, 7)] == [None, None, None]

    def test_one_write_brings_so_many_bytes_and_the_next_one_goes_on(self) -> None:
        of = Room("c")
        for seq in range(1, 8):
            of.came(made(seq, body={"text": "x" * 20_000}))
        assert seqs(of.run(0)) == [1, 2, 3, 4]
        assert seqs(of.run(4)) == [5, 6, 7]

    def test_a_few_are_kept_only(self) -> None:
        of = room(*range(1, 200))
        for position in range(150):
            of.run(position)
        assert len(of._runs or ()) <= 64

    def test_what_its_taker_has_to_look_at(self) -> None:
        plain = Run([made(4), made(5)])
        assert (plain.last, plain.lowest, plain.concerns, plain.titles) == (5, 4, None, False)
        edits = Run([made(4), made(5, "edit", target_seq=2)])
        assert edits.lowest == 2
        bodies: list[dict[str, Any]] = [{"action": "add", "user_id": "ann"}, {"action": "remove", "user_id": "bob"}]
        members = Run([made(4, "member", body=bodies[0]), made(5, "member", body=bodies[1])])
        assert (members.concerns, members.titles) == ({"ann", "bob"}, False)
        titles = Run([made(4, "conversation", body={"title": "x"})])
        assert (titles.concerns, titles.titles) == (None, True)


class TestFresh:
    @pytest.mark.promise("protocol.9.present_state", "protocol.3.delete", "protocol.3.recall")
    @pytest.mark.parametrize("type_", ["edit", "recall", "delete"])
    def test_what_was_changed_since_is_not_as_a_read_would_find_it(self, type_: str) -> None:
        of = room(5, 6, head=4)
        assert seqs(of.fresh_run(4)) == [5, 6]
        of.came(made(7, type_, target_seq=5))
        of.came(made(8))
        assert [seqs(of.fresh_run(position)) for position in (4, 5, 6, 7)] == [None, None, [7, 8], [8]]
        assert seqs(of.run(4)) == [5, 6, 7, 8], "who is live takes it as it came"
        assert [of.entries(low, 8) is None for low in (5, 6, 7, 8)] == [True, True, False, False]

    def test_nothing_is_while_more_is_known_to_be_there(self) -> None:
        of = room(5, 6, head=4)
        of.know(7)
        assert (of.fresh_run(4), of.entries(5, 6)) == (None, None)
        of.came(made(7))
        assert seqs(of.fresh_run(4)) == [5, 6, 7]

    def test_entries_of_a_part(self) -> None:
        of = room(5, 6, 7, head=4)
        assert [entry.seq for entry in of.entries(5, 6) or ()] == [5, 6]
        assert [of.entries(low, high) for low, high in ((4, 6), (6, 8))] == [None, None]
        assert Room("c").entries(1, 1) is None

    @pytest.mark.promise("protocol.3.delete")
    def test_the_version_is_another_one_after_each_change_and_never_an_earlier_one(self) -> None:
        of = room(1, 2)
        versions = [of.version]
        for seq in (3, 4, 7):
            of.came(made(seq, "delete", target_seq=1) if seq == 3 else made(seq))
            versions.append(of.version)
            of.fill([made(one) for one in range(1, seq + 1)], seq)
            versions.append(of.version)
        of.forget()
        versions.append(of.version)
        first, deleted, gap, empty = sorted(set(versions))
        assert versions == [first, deleted, deleted, deleted, deleted, gap, gap, empty]


class TestFilling:
    def test_an_empty_ring_takes_what_reaches_its_end(self) -> None:
        of = room(head=4)
        assert not of.fill([made(2), made(3), made(4)], 4)
        assert (held(of), of.top) == ([2, 3, 4], 4)
        assert seqs(of.fresh_run(1)) == [2, 3, 4]

    def test_it_says_whether_its_end_rose(self) -> None:
        of = room(head=4)
        assert of.fill([made(seq) for seq in range(2, 7)], 6)
        assert (held(of), of.top, of.head) == ([2, 3, 4, 5, 6], 6, 6)

    @pytest.mark.parametrize("read", [(1, 3), (6, 8)])
    def test_an_empty_ring_takes_nothing_that_does_not_reach_it(self, read: tuple[int, int]) -> None:
        of = room(head=4)
        assert not of.fill([made(seq) for seq in range(read[0], read[1] + 1)], read[1])
        assert (held(of), of.top) == ([], 4)

    def test_it_is_lengthened_backwards(self) -> None:
        of = room(5, 6, head=4)
        before = of.run(4)
        assert not of.fill([made(2), made(3), made(4)], 6)
        assert held(of) == [2, 3, 4, 5, 6]
        assert seqs(of.fresh_run(1)) == [2, 3, 4, 5, 6]
        assert of.run(4) is not before

    def test_what_the_read_has_newer_replaces_what_was_there(self) -> None:
        of = room(5, 6, head=4)
        of.came(made(7, "edit", target_seq=5))
        assert of.fresh_run(4) is None
        assert not of.fill([made(4), made(5, body={"text": "new"}), made(6)], 7)
        assert b"new" in (run.buffer if (run := of.fresh_run(4)) else b"")
        assert held(of) == [4, 5, 6, 7]

    @pytest.mark.promise("protocol.3.delete")
    def test_it_takes_nothing_that_was_read_before_the_newest_change(self) -> None:
        of = room(5, 6, head=4)
        of.came(made(7, "delete", target_seq=3))
        assert not of.fill([made(2), made(3), made(4)], 6)
        assert held(of) == [5, 6, 7]

    def test_it_takes_nothing_that_leaves_what_was_changed_in_place(self) -> None:
        of = room(5, 6, head=4)
        of.came(made(7, "delete", target_seq=6))
        assert not of.fill([made(2), made(3), made(4)], 7)
        assert of.fresh_run(1) is None

    def test_it_takes_nothing_that_leaves_a_hole(self) -> None:
        of = room(5, 6, head=4)
        assert not of.fill([made(2), made(3)], 6)
        assert held(of) == [5, 6]


class TestShortening:
    def test_the_oldest_go_first(self) -> None:
        of = room(*range(1, 11))
        of.shorten(4, 10**9)
        assert (held(of), of.size) == ([7, 8, 9, 10], sum(len(made(seq).frame) + 200 for seq in range(7, 11)))
        assert (of.run(5), seqs(of.run(6))) == (None, [7, 8, 9, 10])

    def test_by_bytes(self) -> None:
        of = room(*range(1, 10))
        of.shorten(100, 3 * (FRAME + 200))
        assert held(of) == [7, 8, 9]
        of.shorten(100, 0)
        assert (held(of), of.size, of.top) == ([], 0, 9)
        assert of.came(made(10)) is Came.NEXT

    def test_of_what_is_short_enough_nothing_goes(self) -> None:
        of = room(1, 2)
        run = of.run(0)
        of.shorten(2, 10**9)
        assert of.run(0) is run
        Room("c").shorten(0, 0)

    def test_what_was_there_at_the_last_call_goes_with_the_next_one(self) -> None:
        of = room(1, 2)
        of.age()
        assert held(of) == [1, 2]
        of.came(made(3))
        of.age()
        assert (held(of), of.size, of.run(1), seqs(of.run(2))) == ([3], FRAME + 200, None, [3])
        of.age()
        assert (held(of), of.size, of.top) == ([], 0, 3)
        assert of.came(made(4)) is Came.NEXT
        of.fill([made(2), made(3)], 4)
        assert held(of) == [2, 3, 4]
        Room("c").age()


class TestFeeds:
    def test_the_list_is_the_same_one_until_it_is_dropped(self) -> None:
        of = Room("c")
        key: Any = object()
        of.feeds[key] = key
        listed = of.listed()
        assert listed == [key]
        assert of.listed() is listed
        of.order = None
        assert of.listed() is not listed


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(["message", "delete"]), st.integers(1, 3)),
    st.tuples(st.just("bring"), st.just(""), st.integers(0, 3)),
    st.tuples(st.just("fill"), st.just(""), st.integers(0, 8)),
    st.tuples(st.just("shorten"), st.just(""), st.integers(1, 6)),
    st.tuples(st.just("age"), st.just(""), st.just(0)),
    st.tuples(st.just("forget"), st.just(""), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_what_is_fresh_is_what_a_read_would_find(steps: list[tuple[str, str, int]]) -> None:
    """Up to what the ring was told of: what it was not told of, it cannot know."""
    of, store, brought = Room("c"), [("message", 0)], 1
    of.know(1)

    def now(seq: int, head: int) -> Entry:
        gone = any(type_ == "delete" and target == seq for type_, target in store[:head])
        type_, target = store[seq - 1]
        return made(seq, type_, body=None if gone else {"at": seq}, **({"target_seq": target} if target else {}))

    for kind, type_, number in steps:
        if kind == "write":
            store.append((type_, max(1, len(store) - number) if type_ == "delete" else 0))
        elif kind == "bring":
            brought = min(len(store), brought + number) if number else brought
            if brought > of.top:
                of.came(now(brought, brought))
        elif kind == "fill":
            first = max(1, len(store) - number)
            of.fill([now(seq, len(store)) for seq in range(first, len(store) + 1)], len(store))
        elif kind == "shorten":
            of.shorten(number, 10**9)
        elif kind == "age":
            of.age()
        else:
            of.forget()
        for position in range(of.top):
            run = of.fresh_run(position)
            if run is not None:
                assert [entry.frame for entry in run.entries] == [
                    now(entry.seq, of.head).frame for entry in run.entries
                ]
                assert [entry.seq for entry in run.entries] == list(range(position + 1, run.last + 1))


def test_the_size_of_a_write_is_what_the_tests_above_take_it_for() -> None:
    assert room_module.RUN_BYTES == 64 * 1024
