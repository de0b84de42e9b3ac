"""The AsyncAPI document: valid by AsyncAPI's own schema, and saying what the models say."""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError as Invalid
from jsonschema.validators import extend
from pydantic import BaseModel, ValidationError

from deploy import asyncapi, reference
from services.relay.batch import build
from shared.contracts import records
from shared.contracts.closes import CLOSE_CODES
from shared.dead_letter import bury
from tests.frames import check_frame, check_sent
from tests.schemas import MismatchError, compiled, is_type, pattern
from tests.unit.contracts.frames_of_both import FROM_CLIENT, RECORDS, TO_CLIENT

ROOT = Path(__file__).parents[3]
DOCUMENT = json.loads((reference.FOLDER / "asyncapi.json").read_text(encoding="utf-8"))
SCHEMAS = DOCUMENT["components"]["schemas"]
OFFICIAL = Draft7Validator(
    json.loads((ROOT / "tests" / "vendor" / "asyncapi" / "3.0.0.json").read_text(encoding="utf-8"))
)
MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        *asyncapi.from_client(),
        *asyncapi.to_client(),
        records.ReceiptRecord,
        records.AckRecord,
        records.EventHeaders,
        records.ReceiptHeaders,
        records.DeadHeaders,
    )
}
GOOD = FROM_CLIENT | TO_CLIENT | RECORDS


def test_it_is_valid() -> None:
    assert [error.message for error in OFFICIAL.iter_errors(DOCUMENT)] == []


@pytest.mark.parametrize(
    "break_",
    [
        lambda it: it.pop("info"),
        lambda it: it.update(asyncapi="2.6.0"),
        lambda it: it["channels"]["socket"].update(messages=[]),
        lambda it: it["operations"]["takeSend"].update(action="publish"),
        lambda it: it["components"]["schemas"]["Event"].update(type="thing"),
        lambda it: it["components"]["messages"]["Event"].update(payloads={}),
        lambda it: it["channels"]["events"]["bindings"]["kafka"].update(partitions="64"),
    ],
)
def test_a_broken_one_would_not_be(break_: Any) -> None:
    broken = copy.deepcopy(DOCUMENT)
    break_(broken)
    assert not OFFICIAL.is_valid(broken)


def test_all_that_it_refers_to_is_there() -> None:
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(DOCUMENT)))
    assert len(references) > 90
    for path in references:
        found = DOCUMENT
        for step in path.split("/"):
            found = found[step]


def test_every_frame_of_either_direction_is_said_by_an_operation() -> None:
    socket = DOCUMENT["channels"]["socket"]["messages"].keys()
    assert socket == {model.__name__ for model in (*asyncapi.from_client(), *asyncapi.to_client())}
    taken, told = set(), set()
    for operation in DOCUMENT["operations"].values():
        named = {one["$ref"].split("/")[-1] for one in operation.get("messages", ())}
        answers = {one["$ref"].split("/")[-1] for one in operation.get("reply", {}).get("messages", ())}
        (taken if operation["action"] == "receive" else told).update(named)
        told |= answers
    assert taken == {model.__name__ for model in asyncapi.from_client()}
    assert told == {model.__name__ for model in asyncapi.to_client()}


@pytest.mark.promise("protocol.3.close_codes")
def test_it_names_every_close_code() -> None:
    told = {one["code"] for one in DOCUMENT["channels"]["socket"]["x-close-codes"]}
    used = {
        int(code)
        for path in (ROOT / "services" / "gateway").glob("*.py")
        for code in re.findall(r"\bClose\(\s*(\d{4})", path.read_text(encoding="utf-8"))
    }
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    table = page[page.index("### Close codes") : page.index("## 4. Errors")]
    written = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(", ")}
    assert len(used) > 5
    assert used <= told == CLOSE_CODES.keys() == written


# What the document's schemas allow is what the models allow.


def model_takes(name: str, value: Any) -> bool:
    try:
        MODELS[name].model_validate(value)
    except ValidationError:
        return False
    return True


_CHECKS = {name: compiled(schema, SCHEMAS) for name, schema in SCHEMAS.items()}


def schema_takes(name: str, value: Any) -> bool:
    try:
        _CHECKS[name](value)
    except MismatchError:
        return False
    return True


def _pattern(_validator: Any, given: str, value: Any, _schema: Any) -> Any:
    if isinstance(value, str) and pattern(given).search(value) is None:
        yield Invalid(given)


_Strict = extend(
    Draft7Validator,
    validators={"pattern": _pattern},
    type_checker=Draft7Validator.TYPE_CHECKER.redefine("integer", lambda _, value: is_type(value, "integer")),
)
_REFERENCE = {
    name: _Strict({"components": {"schemas": SCHEMAS}, "allOf": [{"$ref": f"#/components/schemas/{name}"}]})
    for name in GOOD
}

ID = "0198c2a4-0000-7000-8000-00000000000a"
# No range that ends before it begins: see `deploy.asyncapi`.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 500, 501, 2**63 - 1, 2**63, 1.0, 0.5, 1e300]),
    st.sampled_from(["", "a", "a b", "a\n", "x" * 64, "x" * 65, ID, ID.upper(), ID + "\n", "1", "01", "0", "-1", "٣"]),
    st.sampled_from(["message", "direct", "group", "read", "internal", "2026-01-01T00:00:00.000000Z"]),
    st.sampled_from([[], {}, [[1, 2]], [[1]], [[1, None]], [[0, 1]], [[1, 2, 3]], ["ann"], ["a b"], ["a"] * 201]),
    st.sampled_from([{"a": [5, ID]}, {"a": [5, None]}, {"a": [5, "id"]}, {"a": [5]}, {"a": -1}, {"a": True}]),
)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_one_is_taken_by_all(name: str) -> None:
    for value in GOOD[name]:
        assert model_takes(name, value)
        assert schema_takes(name, value)
        assert _REFERENCE[name].is_valid(value)


@given(st.data())
@settings(max_examples=500)
def test_models_and_schemas_judge_alike(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOOD)))
    value = dict(data.draw(st.sampled_from(GOOD[name])))
    for _ in range(data.draw(st.integers(1, 2))):
        field = data.draw(st.sampled_from(sorted(SCHEMAS[name]["properties"])))
        if data.draw(st.booleans()):
            value.pop(field, None)
        else:
            value[field] = data.draw(ODD)
    takes = schema_takes(name, value)
    assert takes == model_takes(name, value), (name, value)
    assert takes == _REFERENCE[name].is_valid(value), (name, value)


def test_every_schema_is_compiled() -> None:
    assert GOOD.keys() == MODELS.keys()
    with pytest.raises(NotImplementedError):
        compiled({"if": {}}, {})
    with pytest.raises(NotImplementedError):
        compiled({"type": "thing"}, {})(1)


# What is really written to Kafka.


def test_headers_of_a_record_are_as_described() -> None:
    row = (5, 7, uuid.UUID(ID), 7, uuid.UUID(ID), "events.v1", "waybill.event.message", "/waybill/ingest")
    further = ["traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "late", "1"]
    written: list[list[tuple[str, bytes]]] = []

    class Builder:
        def append(self, *, headers: list[tuple[str, bytes]], **_: Any) -> object:
            written.append(headers)
            return object()

        def size(self) -> int:
            return 1

    receipt = (*row[:5], "receipts.v1", "waybill.receipt.read", "/waybill/receipts")
    rows = deque(
        [
            (*row, None, b"{}", (0).to_bytes(8)),
            (*row, further, b"{}", (5).to_bytes(8)),
            (*receipt, ["user_id", "bob", "kind", "read"], b"{}", (9).to_bytes(8)),
        ]
    )
    build(rows, 10, Builder, ("events.v1", "receipts.v1"))
    event, late, mark = [{name: value.decode() for name, value in headers} for headers in written]
    for name, headers in (("EventHeaders", event), ("EventHeaders", late), ("ReceiptHeaders", mark)):
        _CHECKS[name](headers)
        assert headers.keys() <= SCHEMAS[name]["properties"].keys()
    assert not schema_takes("ReceiptHeaders", event)


async def test_headers_of_a_dead_record_are_as_described() -> None:
    written: dict[str, Any] = {}

    class Producer:
        async def send_and_wait(self, topic: str, value: bytes, **more: Any) -> None:
            written.update(topic=topic, value=value, **more)

    record = SimpleNamespace(topic="waybill.acks.v1", partition=3, offset=9, key=b"k", value=b"x" * 10**6, headers=())
    await bury(Producer(), "waybill.dead.v1", record, "not JSON")  # type: ignore[arg-type]
    headers = {name: value.decode() for name, value in written["headers"]}
    _CHECKS["DeadHeaders"](headers)
    assert headers.keys() == SCHEMAS["DeadHeaders"]["properties"].keys()


# What the tests use to hold the frames that they see against it.


@pytest.mark.parametrize(
    ("direction", "frame", "path"),
    [
        ("in", [], "the whole"),
        ("in", {}, "t"),
        ("in", {"t": ["event"]}, "t"),
        ("in", {"t": "shout"}, "t"),
        ("in", {"t": "send"}, "t"),
        ("out", {"t": "event"}, "t"),
        ("in", {"t": "pong"}, "server_time"),
        ("in", {"t": "typing", "conversation_id": ID, "user_id": "ann", "for_ms": "5"}, "for_ms"),
        ("in", {"t": "typing", "conversation_id": ID.upper(), "user_id": "ann", "for_ms": 5}, "conversation_id"),
        ("in", {"t": "reconnect", "after_ms": 5, "reason": "", "why": ""}, "why"),
        ("in", {"t": "error", "code": "forbidden", "message": "", "field": None}, "field"),
        ("in", {"t": "error", "code": "sorry", "message": ""}, "code"),
        ("out", {"t": "ack", "conversation_id": ID, "ranges": [[1, 2], [1]]}, "ranges.1"),
    ],
)
def test_a_frame_that_is_not_in_the_document_is_found(direction: Any, frame: Any, path: str) -> None:
    with pytest.raises(MismatchError, match=f"^{re.escape(path)}: "):
        check_frame(direction, frame)


def test_an_unknown_field_of_an_event_in_a_page_is_found() -> None:
    (page,) = TO_CLIENT["Page"]
    check_frame("in", page)
    page = copy.deepcopy(page)
    page["events"][0]["mood"] = 1
    with pytest.raises(MismatchError, match=r"^events\.mood: "):
        check_frame("in", page)


def test_what_the_codec_refuses_was_said_on_purpose() -> None:
    check_sent("hello?")
    check_sent('{"t":"ping","rid":7}')
    check_sent('{"t":"ping","rid":"r","more":1}')
