import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ranges import OPEN, RangeSet, visible_head
from shared.timeline import Page, after_page, before_page


def test_a_page_is_joined_from_bytes() -> None:
    page = Page("x", [b'{"seq":1, "body":{"a":1.0}}', b'{"seq":2}'], 2, 3, complete=False)
    assert page.encode() == (
        b'{"conversation_id":"x","events":[{"seq":1, "body":{"a":1.0}},{"seq":2}],"next":2,"head":3,"complete":false}'
    )
    framed = json.loads(page.encode(t="page", rid='"'))
    assert list(framed) == ["t", "rid", "conversation_id", "events", "next", "head", "complete"]
    assert json.loads(Page("x", [], 1, 0, complete=True).encode())["events"] == []


@pytest.mark.promise("protocol.9.visible")
def test_next_passes_over_what_is_not_visible() -> None:
    visible = RangeSet([(1, 5), (9, OPEN)])
    assert after_page(3, visible, 12, [4, 5]) == (8, False)
    assert after_page(3, visible, 12, [4]) == (4, False)
    assert after_page(8, visible, 12, [9, 10, 11, 12]) == (12, True)
    assert after_page(12, visible, 12, []) == (12, True)
    assert after_page(50, visible, 12, []) == (12, True)
    assert before_page(11, visible, 12, [5, 9, 10]) == (5, False)
    assert before_page(9, visible, 12, [1, 2, 3, 4, 5]) == (1, True)
    assert before_page(1, visible, 12, []) == (1, True)


@pytest.mark.promise("protocol.9.former_members")
def test_a_former_member() -> None:
    visible = RangeSet([(3, 5)])
    assert after_page(0, visible, 5, [3, 4, 5]) == (5, True)
    assert after_page(70, visible, 5, []) == (5, True)
    assert before_page(90, visible, 5, [4, 5]) == (4, False)
    assert before_page(3, visible, 5, []) == (1, True)


@pytest.mark.promise("protocol.6.page", "protocol.3.pull")
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 6),
)
def test_going_on_from_next_reads_all_that_is_visible_once(
    pairs: list[tuple[int, int]], is_member: bool, last_seq: int, limit: int
) -> None:
    visible = RangeSet([(low, low + length) for low, length in pairs] + ([(last_seq, OPEN)] if is_member else []))
    head = visible_head(visible, last_seq)
    seen = list(visible.up_to(head).seqs())
    read: list[int] = []
    cursor, complete = 0, False
    while not complete:
        page = [seq for seq in seen if seq > cursor][:limit]
        onward, complete = after_page(cursor, visible, head, page)
        assert complete or onward > cursor
        assert onward <= head
        read += page
        cursor = onward
    assert read == seen
    assert cursor == head
    read, cursor, complete = [], last_seq + 1, False
    while not complete:
        page = [seq for seq in seen if seq < cursor][-limit:]
        onward, complete = before_page(cursor, visible, head, page)
        assert complete or onward < cursor
        read = page + read
        cursor = onward
    assert read == seen
