from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingest.batches import PLAIN, cut


@dataclass(frozen=True)
class Item:
    conversation_id: str
    type: str
    size: int
    number: int


def queue(*items: tuple[str, str] | tuple[str, str, int]) -> deque[Item]:
    return deque(Item(item[0], item[1], item[2] if len(item) > 2 else 1, at) for at, item in enumerate(items))


def numbers(batch: list[Item]) -> list[int]:
    return [item.number for item in batch]


def test_plain_events_share_a_batch() -> None:
    waiting = queue(("a", "message"), ("b", "message"), ("a", "system"))
    assert numbers(cut(waiting, max_items=10, max_bytes=100)) == [0, 1, 2]
    assert not waiting


def test_a_change_is_alone_in_its_conversation() -> None:
    waiting = queue(
        ("a", "message"), ("a", "edit"), ("b", "member"), ("b", "message"), ("a", "message"), ("c", "message")
    )
    assert numbers(cut(waiting, max_items=10, max_bytes=100)) == [0, 2, 5]
    assert numbers(cut(waiting, max_items=10, max_bytes=100)) == [1, 3]
    assert numbers(cut(waiting, max_items=10, max_bytes=100)) == [4]
    assert not waiting


def test_limits_of_items_and_bytes() -> None:
    waiting = queue(("a", "message", 50), ("b", "message", 40), ("c", "message", 20), ("d", "message", 1))
    assert numbers(cut(waiting, max_items=10, max_bytes=100)) == [0, 1]
    assert numbers(cut(waiting, max_items=1, max_bytes=100)) == [2]
    assert numbers(cut(queue(("a", "message", 500)), max_items=1, max_bytes=100)) == [0]
    assert cut(queue(), max_items=1, max_bytes=1) == []


def test_a_crowded_conversation_is_not_walked_to_its_end() -> None:
    waiting = queue(*[("a", "edit")] * 100, ("b", "message"))
    assert numbers(cut(waiting, max_items=10, max_bytes=100)) == [0]
    assert [item.number for item in waiting] == list(range(1, 101))


@pytest.mark.promise("protocol.9.order_in")
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["message", "message", "system", "edit", "member"]),
            st.integers(0, 60),
        ),
        max_size=60,
    ),
    st.integers(1, 8),
    st.integers(1, 100),
)
def test_order_holds_within_each_conversation(
    items: list[tuple[str, str, int]], max_items: int, max_bytes: int
) -> None:
    waiting = queue(*items)
    whole = list(waiting)
    written: list[Item] = []
    while waiting:
        batch = cut(waiting, max_items=max_items, max_bytes=max_bytes)
        assert 0 < len(batch) <= max_items
        assert sum(item.size for item in batch) <= max_bytes or sum(item.size for item in batch[1:]) + batch[
            0
        ].size <= (max(max_bytes, batch[0].size))
        for item in batch:
            same = [other for other in batch if other.conversation_id == item.conversation_id]
            assert item.type in PLAIN or same == [item]
        assert [item.number for item in waiting] == sorted(item.number for item in waiting)
        written += batch
    for name in "abc":
        of_one = [item for item in whole if item.conversation_id == name]
        assert [item for item in written if item.conversation_id == name] == of_one
    assert len(written) == len(whole)
