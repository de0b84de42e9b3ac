from typing import Any

import msgspec
import pytest

from shared.contracts.sends import Draft, SendItem, draft
from shared.errors import BadRequestError

GROUP = "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"


def made(**fields: Any) -> Draft:
    values = {"conversation_id": GROUP, "client_msg_id": "one", **fields}
    return draft(msgspec.json.decode(msgspec.json.encode(values), type=SendItem), "ann")


@pytest.mark.promise("protocol.3.send_types")
@pytest.mark.parametrize(
    "fields",
    [
        {"body": {}},
        {"type": "message", "body": {"text": "hi"}, "target_seq": None},
        {"type": "system", "body": {"a": 1}},
        {"type": "edit", "target_seq": 1, "body": {}},
        {"type": "recall", "target_seq": 2**63 - 1},
        {"type": "recall", "target_seq": 1, "body": None},
        {"type": "delete", "target_seq": 1},
        {"type": "member", "body": {"action": "add", "user_id": "bob"}},
        {"type": "member", "body": {"action": "add", "user_id": "bob", "role": "admin", "note": 1}},
        {"type": "member", "body": {"action": "remove", "user_id": "bob"}},
        {"type": "member", "body": {"action": "role", "user_id": "bob", "role": "member"}},
        {"type": "member", "body": {"action": "leave"}},
        {"type": "member", "body": {"action": "leave", "user_id": "ann"}},
        {"type": "conversation", "body": {"title": "x" * 256}},
        {"type": "conversation", "body": {"title": None}},
        {"type": "conversation", "body": {"colour": "red"}},
    ],
)
def test_shapes_that_are_right(fields: dict[str, Any]) -> None:
    one = made(**fields)
    assert one.type == fields.get("type", "message")
    assert (one.body is None) == (fields.get("body") is None)


def test_what_a_member_event_says() -> None:
    add = made(type="member", body={"action": "add", "user_id": "bob"})
    assert (add.action, add.subject, add.role) == ("add", "bob", None)
    leave = made(type="member", body={"action": "leave"})
    assert (leave.action, leave.subject, leave.role) == ("leave", "ann", None)


@pytest.mark.parametrize(
    ("body", "sets_title", "title"), [({"title": "x"}, True, "x"), ({"title": None}, True, None), ({}, False, None)]
)
def test_what_a_conversation_event_sets(body: dict[str, Any], sets_title: bool, title: str | None) -> None:
    one = made(type="conversation", body=body)
    assert (one.sets_title, one.title) == (sets_title, title)


@pytest.mark.promise("protocol.9.targets", "protocol.9.creation_event")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "body"),
        ({"body": None}, "body"),
        ({"body": {}, "target_seq": 1}, "target_seq"),
        ({"type": "edit", "body": {}}, "target_seq"),
        ({"type": "edit", "target_seq": 1}, "body"),
        ({"type": "recall", "target_seq": 1, "body": {}}, "body"),
        ({"type": "delete"}, "target_seq"),
        ({"type": "member", "body": {"action": "leave", "user_id": "bob"}}, "body.user_id"),
        ({"type": "member", "body": {"action": "add", "user_id": None}}, "body.user_id"),
        ({"type": "member", "body": {"action": "role", "user_id": "bob"}}, "body.role"),
        ({"type": "conversation", "body": {"action": None}}, "body.action"),
        ({"type": "conversation", "body": {"title": ["x"]}}, "body.title"),
        ({"client_msg_id": f"create:{GROUP}", "body": {}}, "client_msg_id"),
        ({"client_msg_id": "create:", "body": {}}, "client_msg_id"),
    ],
)
def test_shapes_that_are_wrong(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        made(**fields)
    assert refused.value.field == field
