from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from shared.dead_letter import BadRecord, bury
from shared.kafka import MAX_RECORD_BYTES, Topics


@dataclass
class Record:
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    topic: str = "waybill.acks.v1"
    partition: int = 3
    offset: int = 41
    timestamp: int = 0
    key: bytes | None = b"k"
    value: bytes | None = b"v"


def test_a_bad_record_keeps_where_it_was_read_and_what_it_holds() -> None:
    bad = BadRecord.of(Record([("a", b"1"), ("a", None)]), "value: not valid JSON")
    assert bad == (3, 41, b"k", b"v", '[["a","1"],["a",""]]', "value: not valid JSON")


@given(
    st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3),
    st.text(max_size=8) | st.sampled_from(["\0", "\ud800: x", "x" * 5000]),
)
def test_no_text_holds_what_postgres_does_not_take(headers: list[tuple[str, bytes | None]], error: str) -> None:
    bad = BadRecord.of(Record(headers), error)
    texts = [bad.error, *(text for pair in json.loads(bad.headers) for text in pair)]
    assert not any("\0" in text for text in texts)
    assert all(text.encode().decode() == text for text in texts)
    assert len(bad.error) <= 1000
    assert len(json.loads(bad.headers)) == len(headers)


def test_headers_are_bounded() -> None:
    bad = BadRecord.of(Record([("n" * 5000, b"v" * 5000)] * 99), "e")
    pairs = json.loads(bad.headers)
    assert len(pairs) == 32
    assert {len(text) for pair in pairs for text in pair} == {1000}


def test_a_topic_is_named_as_in_the_outbox() -> None:
    topics = Topics("a.b")
    assert topics.in_outbox(topics.acks) == "acks.v1"
    assert topics.of_outbox(topics.in_outbox(topics.events)) == topics.events


class Topic:
    """As a producer that refuses what is larger than a record may be."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes | None, list[tuple[str, bytes]]]] = []

    async def send_and_wait(
        self, topic: str, value: bytes, *, key: bytes | None, partition: int, headers: list[tuple[str, bytes]]
    ) -> None:
        builder = DefaultRecordBatchBuilder(
            2, 0, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1, batch_size=MAX_RECORD_BYTES
        )
        assert builder.append(0, 0, key, value, headers) is not None
        assert len(builder.build()) <= MAX_RECORD_BYTES, topic
        assert partition >= 0
        self.sent.append((value, key, headers))


@pytest.mark.parametrize(
    "record",
    [
        Record([("h", b"x" * 990_000)], value=b"v" * 9_000),
        Record([("h", b"x" * 90_000)], value=b"v" * 900_000),
        Record([(f"{n}", b"") for n in range(60_000)], value=b"v" * 700_000),
        Record(key=b"k" * 990_000),
        Record([("n" * 990_000, None)], key=None, value=None),
    ],
)
async def test_a_copy_is_never_too_large_for_the_topic(record: Record) -> None:
    made: Any = (topic := Topic())
    await bury(made, "waybill.dead.v1", record, "value: not valid JSON")
    [(value, key, headers)] = topic.sent
    assert (record.value or b"").startswith(value)
    assert key is None or (record.key or b"").startswith(key)
    assert {"dead_source", "dead_offset", "dead_error", "dead_attempts", "dead_cut"} <= {name for name, _ in headers}


async def test_a_copy_of_what_fits_is_whole() -> None:
    made: Any = (topic := Topic())
    record = Record([("a", b"1"), ("dead_cut", b"1")], value=b"v" * 890_000, key=b"k" * 36)
    await bury(made, "waybill.dead.v1", record, "value: not valid JSON")
    [(value, key, headers)] = topic.sent
    assert (value, key, headers[0]) == (record.value, record.key, ("a", b"1"))
    assert "dead_cut" not in dict(headers)
