from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from services.receipts.fold import Held, Mark, fold
from services.receipts.records import Ack, Delivered, Read, Unread
from shared.ranges import RangeSet
from tests.unit.receipts.histories import acks, batched

NOW = datetime.now(UTC)
ID = "0191d5a0-3f4b-7c1e-9a52-8d1c2b3a4f5e"


def as_record(ack: Held | Mark) -> Ack:
    if isinstance(ack, Held):
        return Delivered(
            conversation_id=ack.conversation_id,
            user_id=ack.user_id,
            device_id=ack.device_id,
            at=NOW,
            ranges=[[low, high] for low, high in ack.ranges],
        )
    kind = Unread if ack.kind == "unread" else Read
    return kind(
        conversation_id=ack.conversation_id,
        user_id=ack.user_id,
        device_id=ack.device_id,
        at=NOW,
        seq=ack.seq,
        version=ack.version,
    )


@given(st.lists(acks, max_size=30))
def test_ranges_are_joined_per_device_and_marks_stay_in_order(history: list[Held | Mark]) -> None:
    assert fold(map(as_record, history)) == batched(history)


def test_ids_are_written_in_lower_case() -> None:
    upper = Held(ID.upper(), "anna", "phone", RangeSet([(1, 2)]))
    lower = Held(ID, "anna", "phone", RangeSet([(4, 5)]))
    assert fold(map(as_record, [upper, lower])).held == [Held(ID, "anna", "phone", RangeSet([(1, 2), (4, 5)]))]


def test_the_largest_batch_folds_at_once() -> None:
    many = [
        Held(ID, "anna", "phone", RangeSet((2 * n, 2 * n) for n in range(at, at + 1000)))
        for at in range(1, 20_000, 1000)
    ]
    [held] = fold(map(as_record, many)).held
    assert len(held.ranges) == 20_000
