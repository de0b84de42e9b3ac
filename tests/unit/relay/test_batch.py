import uuid
from collections import deque
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords

from services.relay.batch import Batch, Part, Queue, build
from shared.kafka import MAX_RECORD_BYTES

KNOWN = ("events.v1", "receipts.v1")
CONVERSATION = uuid.UUID("A987FBC9-4BED-3078-8F07-9141BA07C9F3")
AT = (datetime(2026, 11, 29, 20, 0, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def row(id_: int, **changes: Any) -> tuple[Any, ...]:
    made = {
        "shard": 5,
        "id": id_,
        "conversation_id": CONVERSATION,
        "seq": id_,
        "event_id": uuid.UUID(int=id_),
        "topic": "events.v1",
        "type": "waybill.event.message",
        "source": "/waybill/ingest",
        "headers": None,
        "payload": b"{}",
        "created_at": AT.to_bytes(8),
        **changes,
    }
    return tuple(made.values())


def builder() -> BatchBuilder:
    return BatchBuilder(MAX_RECORD_BYTES, 0)


def built(*rows: tuple[Any, ...], at_most: int = 100, parked: Collection[Queue] = ()) -> tuple[Batch, list[int]]:
    """The batch, and the ids of the rows that are left."""
    waiting: deque[Any] = deque(rows)
    batch = build(waiting, at_most, builder, KNOWN, parked)
    return batch, [left[1] for left in waiting]


def records(part: Part) -> list[Any]:
    assert isinstance(part.builder, BatchBuilder)
    read = MemoryRecords(bytes(part.builder._build())).next_batch()
    assert isinstance(read, DefaultRecordBatch)
    return list(read)


def test_key_and_headers() -> None:
    batch, _ = built(
        row(3, headers=["traceparent", "00-a-b-01"]), row(4, seq=None, headers=["user_id", "ann", "kind", "read"])
    )
    event, receipt = records(batch.parts["events.v1"])
    assert event.key == b"a987fbc9-4bed-3078-8f07-9141ba07c9f3"
    assert event.headers == [
        ("ce_specversion", b"1.0"),
        ("ce_id", str(uuid.UUID(int=3)).encode()),
        ("ce_source", b"/waybill/ingest"),
        ("ce_type", b"waybill.event.message"),
        ("ce_subject", event.key),
        ("ce_time", b"2026-11-29T20:00:00.000000Z"),
        ("content-type", b"application/json"),
        ("seq", b"3"),
        ("traceparent", b"00-a-b-01"),
    ]
    assert receipt.headers[-3:] == [("seq", b"4"), ("user_id", b"ann"), ("kind", b"read")]


def test_a_part_per_topic_with_its_own_ends() -> None:
    batch, left = built(row(1), row(2, topic="receipts.v1"), row(5), row(6, topic="receipts.v1"), row(7))
    assert left == []
    assert (batch.to_id, batch.rows) == (7, 5)
    ends = {part.topic: (part.from_id, part.to_id, part.rows) for part in batch.parts.values()}
    assert ends == {"events.v1": (1, 7, 3), "receipts.v1": (2, 6, 2)}


def test_at_most_so_many_rows() -> None:
    batch, left = built(row(1), row(2), row(3), at_most=2)
    assert (batch.to_id, left) == (2, [3])


def test_a_full_part_ends_the_whole_batch() -> None:
    large = b"x" * 400_000
    batch, left = built(row(1, payload=large), row(2, payload=large), row(3, payload=large), row(4))
    assert (batch.to_id, left) == (2, [3, 4])
    assert batch.refused is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payload": b"x" * MAX_RECORD_BYTES}, "too large"),
        ({"headers": ["half"]}, "not serialisable"),
        ({"headers": ["lone", "\ud800"]}, "not serialisable"),
        ({"payload": "text"}, "not serialisable"),
    ],
)
def test_a_bad_row_is_refused_and_what_stands_before_it_is_not(changes: dict[str, Any], reason: str) -> None:
    batch, left = built(row(1), row(2, topic="receipts.v1", **changes), row(3))
    assert (batch.to_id, left) == (1, [2, 3])
    assert list(batch.parts) == ["events.v1"]
    assert batch.refused is not None
    assert (batch.refused.id, batch.refused.event_id) == (2, str(uuid.UUID(int=2)))
    assert batch.refused.reason.startswith(reason)


def test_a_bad_row_that_is_not_the_first_of_its_topic_is_refused_too() -> None:
    first, left = built(row(1), row(2, payload=b"x" * MAX_RECORD_BYTES), row(3))
    assert (first.to_id, left, first.refused) == (1, [2, 3], None), "there was no room beside the first"
    second, left = built(row(2, payload=b"x" * MAX_RECORD_BYTES), row(3))
    assert (second.rows, left) == (0, [2, 3])
    assert second.refused is not None


def test_a_topic_that_is_not_known_ends_the_batch() -> None:
    batch, left = built(row(1), row(2, topic="else.v1"))
    assert (batch.to_id, batch.unknown, left) == (1, "else.v1", [2])


def test_nothing_to_build() -> None:
    batch, _ = built()
    assert (batch.rows, batch.parts) == (0, {})


def test_rows_of_a_parked_conversation_and_topic_wait_and_others_pass() -> None:
    other = uuid.uuid4()
    batch, left = built(
        row(1), row(2, topic="receipts.v1"), row(3, conversation_id=other), row(4), parked={(CONVERSATION, "events.v1")}
    )
    assert left == []
    assert [waiting[1] for waiting in batch.waiting] == [1, 4]
    assert (batch.to_id, batch.rows) == (4, 2)
    assert {part.topic: part.rows for part in batch.parts.values()} == {"events.v1": 1, "receipts.v1": 1}


def test_waiting_rows_are_bounded_like_those_that_leave() -> None:
    batch, left = built(row(1), row(2), row(3), at_most=2, parked={(CONVERSATION, "events.v1")})
    assert ([waiting[1] for waiting in batch.waiting], batch.to_id, left) == ([1, 2], 2, [3])
