import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.receipts.batch import PositionLostError, Span, batches, start
from tests.unit.receipts.test_records import Record


def at(partition: int, offset: int, size: int = 10) -> Record:
    return Record(b"x" * size, partition=partition, offset=offset)


def test_a_span_reaches_from_the_expected_offset_over_gaps_to_behind_the_last_record() -> None:
    [batch] = batches({3: [at(3, 7), at(3, 9)], 5: [at(5, 0)]}, {3: 4, 5: 0}, max_bytes=1000)
    assert batch.spans == {3: Span(4, 10), 5: Span(0, 1)}
    assert [(r.partition, r.offset) for r in batch.records] == [(3, 7), (3, 9), (5, 0)]


@given(
    st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 60), min_size=1), max_size=4),
    st.integers(1, 100),
)
def test_batches_follow_each_other_without_hole_or_overlap(offsets: dict[int, set[int]], max_bytes: int) -> None:
    fetched = {part: [at(part, offset) for offset in sorted(some)] for part, some in offsets.items()}
    following = dict.fromkeys(offsets, 0)
    seen = []
    for batch in batches(fetched, following.copy(), max_bytes=max_bytes):
        assert len(batch.records) == 1 or batch.size - 10 < max_bytes
        assert {r.partition for r in batch.records} == set(batch.spans)
        for part, span in batch.spans.items():
            assert span.since == following[part]
            following[part] = span.upto
        seen += batch.records
    assert seen == [record for records in fetched.values() for record in records]
    assert following == {part: max(some) + 1 for part, some in offsets.items()}


def test_a_record_larger_than_a_batch_is_one() -> None:
    assert [len(b.records) for b in batches({0: [at(0, 0, 999), at(0, 1, 5)]}, {0: 0}, max_bytes=100)] == [1, 1]


@pytest.mark.parametrize("expected", [{0: 6}, {1: 0}, {}])
def test_records_that_are_not_the_expected_ones_are_not_taken(expected: dict[int, int]) -> None:
    with pytest.raises(PositionLostError):
        list(batches({0: [at(0, 5)]}, expected, max_bytes=100))


@pytest.mark.parametrize(
    ("stored", "begin", "end", "first"),
    [(None, 3, 9, 3), (3, 3, 9, 3), (9, 3, 9, 9), (2, 3, 9, 3), (10, 3, 9, 3), (0, 0, 0, 0)],
)
def test_an_offset_out_of_range_starts_at_the_beginning(stored: int | None, begin: int, end: int, first: int) -> None:
    assert start(stored, begin, end) == first
