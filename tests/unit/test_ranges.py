import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ranges import EMPTY, OPEN, RangeSet, delivered_mark, held_up_to, visible_head

TOP = 24

pairs = st.lists(
    st.tuples(st.integers(0, TOP), st.integers(0, 6)).map(lambda p: (p[0], min(p[0] + p[1], TOP))), max_size=5
)
sets = pairs.map(RangeSet)


def seqs(ranges: RangeSet) -> set[int]:
    return set(ranges.seqs())


def test_construction() -> None:
    assert list(RangeSet([(6, 9), (1, 5), (3, 4)])) == [(1, 9)]
    assert list(RangeSet([(1, 2), (4, 5)])) == [(1, 2), (4, 5)]
    assert RangeSet([(1, 5), (6, 9)]) == RangeSet([(1, 9)])
    assert hash(RangeSet([(1, 5), (6, 9)])) == hash(RangeSet([(1, 9)]))
    assert RangeSet() == EMPTY
    assert not EMPTY
    assert repr(RangeSet([(1, 2)])) == "RangeSet([(1, 2)])"
    assert RangeSet([(1, 2)]) != [(1, 2)]
    with pytest.raises(ValueError, match="2 > 1"):
        RangeSet([(2, 1)])


def test_edges() -> None:
    open_ended = RangeSet([(5, OPEN)])
    assert OPEN in open_ended
    assert open_ended.highest == OPEN
    assert RangeSet([(1, OPEN)]) - RangeSet([(5, OPEN)]) == RangeSet([(1, 4)])
    assert RangeSet([(1, 4)]) | open_ended == RangeSet([(1, OPEN)])
    assert RangeSet([(OPEN, OPEN)]) | RangeSet([(1, OPEN)]) == RangeSet([(1, OPEN)])
    assert (EMPTY.lowest, EMPTY.highest) == (None, None)
    assert open_ended.up_to(4) == EMPTY
    assert open_ended.up_to(-1) == EMPTY
    assert len(RangeSet([(1, 2), (4, 4)])) == 2
    assert RangeSet([(1, 2), (4, 4)]).count() == 3


def test_a_client_that_acks_in_many_pieces_does_not_hold_the_loop() -> None:
    held = RangeSet((seq, seq) for seq in range(1, 200_001, 2))
    more = RangeSet((seq, seq) for seq in range(198_000, 200_000, 2))
    began = time.perf_counter()
    assert more - held == more
    assert time.perf_counter() - began < 2  # about 1 ms; square it would be 100 million steps


@given(pairs)
def test_it_is_the_set_of_its_seqs_in_sorted_separate_ranges(given_pairs: list[tuple[int, int]]) -> None:
    ranges = RangeSet(given_pairs)
    assert seqs(ranges) == {seq for low, high in given_pairs for seq in range(low, high + 1)}
    inner = list(ranges)
    assert all(low <= high for low, high in inner)
    assert all(one[1] + 1 < other[0] for one, other in pairwise(inner))
    assert ranges == RangeSet(reversed(given_pairs))
    assert ranges.count() == len(seqs(ranges))
    assert (ranges.lowest, ranges.highest) == (min(seqs(ranges), default=None), max(seqs(ranges), default=None))
    for seq in range(TOP + 2):
        assert (seq in ranges) == (seq in seqs(ranges))


@given(sets, sets)
def test_operations_are_those_of_sets(one: RangeSet, other: RangeSet) -> None:
    assert seqs(one | other) == seqs(one) | seqs(other)
    assert seqs(one & other) == seqs(one) & seqs(other)
    assert seqs(one - other) == seqs(one) - seqs(other)
    assert one & other == other & one
    assert one | other == other | one
    assert (one - other) | (one & other) == one


@given(sets, st.integers(-1, TOP + 2))
def test_up_to(ranges: RangeSet, head: int) -> None:
    assert seqs(ranges.up_to(head)) == {seq for seq in seqs(ranges) if seq <= head}


@pytest.mark.promise("protocol.5.delivered")
@given(sets, sets, st.integers(0, TOP + 2))
def test_marks_mean_what_they_say(held: RangeSet, visible: RangeSet, head: int) -> None:
    seen = {seq for seq in seqs(visible) if seq <= head}
    assert visible_head(visible, head) == max(seen, default=0)
    missing = seen - seqs(held)
    up_to = held_up_to(held, visible, head)
    if missing:
        assert up_to == min(missing) - 1
    else:
        assert up_to == max(seen, default=0)
    assert {seq for seq in seen if seq <= up_to} <= seqs(held)
    mark = delivered_mark(held, visible, head)
    stored = {seq for seq in seen & seqs(held) if {below for below in seen if below <= seq} <= seqs(held)}
    assert mark == max(stored, default=0)
