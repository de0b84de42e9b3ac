from __future__ import annotations

import json
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from shared.dead_letter import BadRecord
from shared.kafka import Topics


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
