import json
from dataclasses import dataclass, field

import pytest

from services.receipts import records
from services.receipts.records import Delivered, Read, Unread, parse
from shared.errors import BadRequestError
from shared.ranges import OPEN

ID = "0191d5a0-3f4b-7c1e-9a52-8d1c2b3a4f5e"
BASE: dict[str, object] = {
    "conversation_id": ID,
    "user_id": "anna",
    "device_id": "phone",
    "kind": "delivered",
    "at": "2026-01-02T03:04:05.000006Z",
}


@dataclass
class Record:
    value: bytes | None
    key: bytes | None = ID.encode()
    topic: str = "waybill.acks.v1"
    partition: int = 0
    offset: int = 0
    timestamp: int = 0
    headers: list[tuple[str, bytes]] = field(default_factory=list)


def record(**changed: object) -> Record:
    return Record(json.dumps(BASE | changed).encode())


def test_the_three_kinds() -> None:
    delivered = parse(record(ranges=[[1, 3], [2, OPEN]]))
    assert isinstance(delivered, Delivered)
    assert delivered.ranges == [(1, 3), (2, OPEN)]
    read = parse(record(kind="read", seq=4, version=0))
    assert isinstance(read, Read)
    assert (read.seq, read.version) == (4, 0)
    unread = parse(record(kind="unread", seq=0, version=1))
    assert isinstance(unread, Unread)
    assert (unread.user_id, unread.device_id, unread.seq, unread.version) == ("anna", "phone", 0, 1)


def test_what_is_not_known_is_ignored_and_an_id_may_be_in_upper_case() -> None:
    ack = parse(record(conversation_id=ID.upper(), kind="read", seq=4, version=0, new="field"))
    assert ack.conversation_id.lower() == ID


def test_a_thousand_ranges_are_read_and_one_more_is_not() -> None:
    assert isinstance(parse(record(ranges=[[seq, seq] for seq in range(1, 1001)])), Delivered)
    with pytest.raises(BadRequestError) as caught:
        parse(record(ranges=[[seq, seq] for seq in range(1, 1002)]))
    assert caught.value.field == "ranges"


@pytest.mark.promise("protocol.9.kafka")
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (Record(None), "value"),
        (Record(b""), "value"),
        (Record(b"not json"), "value"),
        (Record(b"[]"), "value"),
        (Record(b"\xff{}"), "value"),
        (Record(b"[" * 10_000), "value"),
        (Record(json.dumps(BASE | {"ranges": [[1, 1]]}).encode(), key=None), "key"),
        (Record(json.dumps(BASE | {"ranges": [[1, 1]]}).encode(), key=ID.upper().encode()), "key"),
        (Record(json.dumps(BASE | {"ranges": [[1, 1]]}).encode(), key=b"\xff"), "key"),
        (record(), "ranges"),
        (record(ranges=[]), "ranges"),
        (record(ranges=[[1]]), "ranges.0"),
        (record(ranges=[[1, 2, 3]]), "ranges.0"),
        (record(ranges=[[1, 2], [0, 2]]), "ranges.1.0"),
        (record(ranges=[[3, 2]]), "ranges.0"),
        (record(ranges=[[1, OPEN + 1]]), "ranges.0.1"),
        (record(ranges=[[1, 2.5]]), "ranges.0.1"),
        (record(ranges=[["1", 2]]), "ranges.0.0"),
        (record(kind="read", version=0), "seq"),
        (record(kind="read", seq=1), "version"),
        (record(kind="read", seq=0, version=0), "seq"),
        (record(kind="read", seq=1, version=-1), "version"),
        (record(kind="unread", seq=1, version=0), "version"),
        (record(kind="unread", seq=-1, version=1), "seq"),
        (record(kind="seen"), "kind"),
        (record(kind=None), "kind"),
        (record(conversation_id="x", ranges=[[1, 1]]), "conversation_id"),
        (record(user_id="an na", ranges=[[1, 1]]), "user_id"),
        (record(device_id="p" * 65, ranges=[[1, 1]]), "device_id"),
        (record(at="yesterday", ranges=[[1, 1]]), "at"),
        (record(at=None, ranges=[[1, 1]]), "at"),
    ],
)
def test_another_shape_names_its_field(bad: Record, field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(bad)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["conversation_id", "user_id", "device_id"])
def test_what_is_too_long_for_an_id_is_not_kept(name: str) -> None:
    """Looked up, it would be: as many and as long as somebody cares to write."""
    before = records._name.cache_info().currsize, records._uuid.cache_info().currsize
    for n in range(3):
        with pytest.raises(BadRequestError):
            parse(record(**{"kind": "read", "seq": 4, "version": 0, name: f"{n}" * 70_000}))
    after = records._name.cache_info().currsize, records._uuid.cache_info().currsize
    assert sum(after) - sum(before) <= 2, "of the ids that are as they should be"
