from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from waybill_client.ranges import Ranges

span = st.tuples(st.integers(1, 40), st.integers(0, 10)).map(lambda one: (one[0], one[0] + one[1]))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "above", "to"]), span)))
def test_a_set_of_ranges_is_a_set(steps: list[tuple[str, tuple[int, int]]]) -> None:
    ranges, model = Ranges(), set[int]()
    for what, (low, high) in steps:
        if what == "add":
            ranges.add(low, high)
            model |= set(range(low, high + 1))
        elif what == "remove":
            ranges.remove(low, high)
            model -= set(range(low, high + 1))
        elif what == "above":
            ranges.drop_above(low)
            model = {one for one in model if one <= low}
        else:
            ranges.drop_to(low)
            model = {one for one in model if one > low}
        assert {one for a, b in ranges for one in range(a, b + 1)} == model
        assert ranges.first == min(model, default=None)
        assert all((one in ranges) == (one in model) for one in range(55))
        spans = list(ranges)
        assert all(b + 1 < c for (_, b), (c, _) in pairwise(spans))


def test_take_gives_the_lowest_ranges_in_the_wires_form() -> None:
    ranges = Ranges()
    for seq in (1, 2, 5, 9):
        ranges.add(seq, seq)
    assert ranges.take(2) == [[1, 2], [5, 5]]
    assert list(ranges) == [(9, 9)]
