from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.audit.rules import LOWERING, NOTED, Difference, Stored, differences, mends, repaired
from services.receipts.fold import Held, Mark
from shared.ranges import OPEN, RangeSet
from tests.unit.receipts.histories import Change, Scene, acks, batched

ALL = RangeSet([(1, OPEN)])
DEVICES = {"phone": RangeSet([(1, 4), (8, 9)]), "laptop": RangeSet([(4, 6)])}
GOOD = Stored(ALL, 10, DEVICES, RangeSet([(1, 6), (8, 9)]), 6, (0, 9))

_seqs = st.integers(1, 14)
_ranges = st.lists(st.tuples(_seqs, _seqs).map(lambda pair: (min(pair), max(pair))), max_size=3).map(RangeSet)
storeds = st.builds(
    Stored,
    visible=st.none() | st.sampled_from([ALL, RangeSet([(3, 5), (9, OPEN)]), RangeSet([(2, 6)]), RangeSet([(11, 12)])]),
    head=st.integers(0, 12),
    devices=st.dictionaries(st.sampled_from(["phone", "laptop", "tablet"]), _ranges, max_size=3),
    delivered=_ranges,
    delivered_seq=st.integers(0, 14),
    read=st.tuples(st.integers(0, 3), st.integers(0, 14)),
)


def test_what_is_right_has_no_difference() -> None:
    assert differences(GOOD) == []
    assert differences(Stored(ALL, 1)) == []


@pytest.mark.promise("I8")
@given(st.lists(acks | st.builds(Change, grow=st.integers(0, 4)), max_size=30))
def test_no_history_of_acks_leads_to_a_difference(history: list[Held | Mark | Change]) -> None:
    scene = Scene()
    for step in history:
        if isinstance(step, Change):
            scene.change(step)
        else:
            scene.apply(batched([step]))
    for user, marks in scene.marks.items():
        visible = scene.visible[user]
        stored = Stored(visible, scene.head, marks.devices, marks.delivered, marks.delivered_seq, marks.read)
        assert differences(stored) == [] if visible is not None else marks.devices == {}


@given(storeds)
def test_a_repair_leaves_only_what_it_may_not_touch(stored: Stored) -> None:
    after = repaired(stored)
    assert after is None or {one.kind for one in differences(after)} <= NOTED | LOWERING
    lowered = repaired(stored, lower=True)
    assert lowered is None or {one.kind for one in differences(lowered)} <= NOTED


@given(storeds, st.booleans())
def test_a_repair_changes_something_if_and_only_if_it_mends_a_difference(stored: Stored, lower: bool) -> None:
    will_mend = any(mends(one.kind, lower=lower) for one in differences(stored))
    assert (repaired(stored, lower=lower) != stored) == will_mend


@pytest.mark.promise("I8")
@given(storeds)
def test_a_repair_lowers_nothing_that_can_be(stored: Stored) -> None:
    after = repaired(stored)
    if after is None:
        return
    for device_id, held in stored.devices.items():
        assert after.devices[device_id] == held & stored.valid
    assert not (stored.delivered & stored.valid) - after.delivered
    if stored.delivered_seq <= (stored.valid.highest or 0):
        assert after.delivered_seq >= stored.delivered_seq
    assert after.read >= stored.read


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (replace(GOOD, visible=None), Difference("no_member", seqs=GOOD.delivered)),
        (replace(GOOD, delivered=RangeSet([(1, 4), (8, 9)])), Difference("union_behind", seqs=RangeSet([(5, 6)]))),
        (replace(GOOD, delivered=RangeSet([(1, 6), (8, 10)])), Difference("union_ahead", seqs=RangeSet([(10, 10)]))),
        (replace(GOOD, delivered_seq=4), Difference("mark_behind", found=4, wanted=6)),
        (replace(GOOD, delivered_seq=10), Difference("mark_ahead", found=10, wanted=6)),
        (replace(GOOD, delivered_seq=9), Difference("mark_kept", found=9, wanted=6)),
        (replace(GOOD, read=(2, 11)), Difference("read_beyond_head", found=11, wanted=10)),
        (replace(GOOD, devices={"tv": RangeSet([(2, 12)])}), Difference("beyond_head", "tv", RangeSet([(11, 12)]))),
    ],
)  # fmt: skip
def test_each_difference_says_what_is_wrong(stored: Stored, expected: Difference) -> None:
    assert expected in differences(stored)


def test_a_read_mark_that_cannot_be_gets_a_new_version_at_the_last_seq_that_can_be_read() -> None:
    after = repaired(Stored(RangeSet([(3, 5), (9, OPEN)]), 12, read=(4, 7)))
    assert after is not None
    assert after.read == (5, 5)
    after = repaired(Stored(RangeSet([(3, 5)]), 12, read=(0, 2)))
    assert after is not None
    assert after.read == (1, 0)
