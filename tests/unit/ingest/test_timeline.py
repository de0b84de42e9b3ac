import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingest.timeline import Position, position, untyped
from shared.ranges import OPEN, RangeSet


def test_untyped() -> None:
    frame = b'{"t":"event","conversation_id":"x","body":{"t":"event"}}'
    assert json.loads(untyped(frame)) == {"conversation_id": "x", "body": {"t": "event"}}


def test_next_passes_over_what_is_not_visible() -> None:
    visible = RangeSet([(1, 5), (9, OPEN)])
    assert position("after", 3, visible, 12, [4, 5]) == Position(8, 12, complete=False)
    assert position("after", 3, visible, 12, [4]) == Position(4, 12, complete=False)
    assert position("after", 8, visible, 12, [9, 10, 11, 12]) == Position(12, 12, complete=True)
    assert position("before", 11, visible, 12, [5, 9, 10]) == Position(5, 12, complete=False)


def test_a_former_member() -> None:
    visible = RangeSet([(3, 5)])
    assert position("after", 0, visible, 90, [3, 4, 5]) == Position(5, 5, complete=True)
    assert position("after", 70, visible, 90, []) == Position(5, 5, complete=True)
    assert position("before", 3, visible, 90, []) == Position(3, 5, complete=True)


@pytest.mark.promise("protocol.6.page")
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 6),
)
def test_going_on_from_next_reads_all_that_is_visible_once(
    pairs: list[tuple[int, int]], is_member: bool, head: int, limit: int
) -> None:
    visible = RangeSet([(low, low + length) for low, length in pairs] + ([(head, OPEN)] if is_member else []))
    seen = list(visible.up_to(head).seqs())
    read: list[int] = []
    cursor = 0
    for _ in range(50):
        page = [seq for seq in seen if seq > cursor][:limit]
        at = position("after", cursor, visible, head, page)
        assert at.next >= cursor
        assert at.next <= at.head or not seen
        read += page
        cursor = at.next
        if at.complete:
            break
    assert read == seen
    assert cursor == at.head == (seen[-1] if seen else 0)
    read, cursor = [], head + 1
    for _ in range(50):
        page = [seq for seq in seen if seq < cursor][-limit:]
        at = position("before", cursor, visible, head, page)
        read = page + read
        cursor = at.next
        if at.complete:
            break
    assert read == seen
