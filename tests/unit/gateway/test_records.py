"""What is no event and no receipt is seen before it reaches a session."""

import json
import types
from typing import Any

import msgspec
import pytest

from services.gateway.records import Envelope, check, envelope
from shared.kafka import header

GROUP = "0197c3d1-0000-7000-8000-000000000001"
EVENT = {"t": "event", "conversation_id": GROUP, "seq": 2, "event_id": GROUP, "sender_id": "ann", "body": {}}
RECEIPT = {
    "t": "receipt",
    "conversation_id": GROUP,
    "user_id": "ann",
    "delivered_seq": 2,
    "read_seq": 0,
    "read_version": 0,
}
AN_EVENT = Envelope(GROUP, "waybill.event.message", 2, is_event=True, committed=0.0)
A_RECEIPT = Envelope(GROUP, "waybill.receipt.read", 900, is_event=False, committed=0.0)


def text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def record(
    value: bytes | None = text(EVENT),
    key: bytes | None = GROUP.encode(),
    type_: bytes | None = b"waybill.event.message",
    seq: bytes | None = b"2",
    time: bytes | None = None,
) -> Any:
    headers = [("ce_type", type_), ("seq", seq), ("ce_time", time)]
    return types.SimpleNamespace(key=key, value=value, headers=headers)


def test_an_event_and_a_receipt() -> None:
    assert envelope(record()) == AN_EVENT
    check(text(EVENT), AN_EVENT)
    assert envelope(record(text(RECEIPT), type_=b"waybill.receipt.read", seq=b"900")) == A_RECEIPT
    check(text({**RECEIPT, "kind": "read", "cause": "read"}), A_RECEIPT)


@pytest.mark.parametrize("seq", [None, b"", b"x", b"-1"])
def test_a_receipt_without_its_id_in_the_outbox_is_one_all_the_same(seq: bytes | None) -> None:
    assert envelope(record(text(RECEIPT), type_=b"waybill.receipt.delivered", seq=seq)).seq == 0


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(b"1970-01-01T00:01:00.500000Z", 60.5), (None, 0.0), (b"", 0.0), (b"yesterday", 0.0), (b"\xff", 0.0)],
)
def test_when_an_event_was_committed(time: bytes | None, seconds: float) -> None:
    assert envelope(record(time=time)).committed == seconds


@pytest.mark.promise("protocol.7.dead", "protocol.9.kafka")
@pytest.mark.parametrize(
    "bad",
    [
        record(key=None),
        record(key=b"junk"),
        record(key=b"\xff"),
        record(key=GROUP.upper().encode()),
        record(value=None),
        record(value=b"junk"),
        record(value=b"[]"),
        record(value=b'{"t":"event"'),
        record(type_=None),
        record(type_=b"\xff"),
        record(type_=b"other"),
        record(seq=None),
        record(seq=b"two"),
        record(seq=b"0"),
    ],
)
def test_a_bad_envelope(bad: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        envelope(bad)


@pytest.mark.promise("protocol.7.dead", "protocol.9.kafka")
@pytest.mark.parametrize(
    ("value", "of"),
    [
        (text({**EVENT, "seq": 3}), AN_EVENT),
        (text({**EVENT, "seq": "2"}), AN_EVENT),
        (text({**EVENT, "conversation_id": GROUP.replace("1", "2")}), AN_EVENT),
        (text({**EVENT, "t": "receipt"}), AN_EVENT),
        (text({"t": "event"}), AN_EVENT),
        (text(EVENT)[:-1] + b",}", AN_EVENT),
        (text({**RECEIPT, "conversation_id": GROUP.replace("1", "2")}), A_RECEIPT),
        (text({**RECEIPT, "user_id": "a b"}), A_RECEIPT),
        (text({**RECEIPT, "read_seq": -1}), A_RECEIPT),
        (text(EVENT), A_RECEIPT),
    ],
)
def test_a_value_that_is_not_what_its_envelope_says(value: bytes, of: Envelope) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        check(value, of)


def test_a_header() -> None:
    headers = [("null", None), ("bytes", b"\xff"), ("seq", b"7"), ("seq", b"8")]
    assert [header(headers, name) for name in ("null", "bytes", "seq", "gone")] == [None, None, "7", None]
