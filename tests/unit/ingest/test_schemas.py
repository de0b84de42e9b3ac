"""The documented models and the decoders that do the work agree on what they take."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from services.ingest import schemas
from services.ingest.conversations import ConversationState, CreateRequest, MemberState
from services.ingest.member_settings import OwnSettings, SettingsRequest
from services.ingest.unread import Totals, Unread
from services.ingest.writer import Written
from shared.contracts.sends import SendItem
from shared.errors import BadRequestError
from shared.readers import Reader, Readers

AT = "2026-01-02T03:04:05.000006Z"
GROUP = "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"

_names = st.sampled_from(["ann", "a" * 64, "a" * 65, "", "a b", "é", "a\n", 5, None])
_uuids = st.sampled_from([GROUP, GROUP.upper(), GROUP[:-1], GROUP.replace("-", ""), GROUP + "\n", 5, None])
_seqs = st.sampled_from([1, 0, -1, 2**63 - 1, 2**63, 1.5, "1", True, None])

_items = st.fixed_dictionaries(
    {},
    optional={
        "conversation_id": _uuids,
        "client_msg_id": _names,
        "sender_id": _names,
        "type": st.sampled_from(["message", "edit", "shout", 5]),
        "target_seq": _seqs,
        "device_id": _names,
        "traceparent": st.sampled_from([f"00-{'a' * 32}-{'b' * 16}-01", "x", None]),
        "unknown": st.just(1),
    },
)
_creates = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["direct", "group", "club", None]),
        "members": st.one_of(st.lists(_names, max_size=3), st.just(["a"] * 501), st.just("ann"), st.none()),
        "title": st.sampled_from(["", "x" * 256, "😀" * 256, "x" * 257, 5, None]),
        "conversation_id": _uuids,
        "history": st.sampled_from(["joined", "all", "none", None]),
        "creator_id": _names,
    },
)


_moments = ["2026-12-01T08:00:00Z", "2026-12-01T08:00:00.25-03:30", "2026-13-01T08:00:00Z", "2026-12-01", 5, None]
_settings = st.fixed_dictionaries(
    {},
    optional={
        "muted": st.sampled_from([True, False, None, 1, "yes"]),
        "muted_until": st.sampled_from(_moments),
        "archived": st.sampled_from([True, False, None, 0]),
        "user_id": _names,
        "device_id": _names,
    },
)


def takes(decoder: type[Any], value: object) -> bool:
    try:
        msgspec.json.decode(json.dumps(value), type=decoder)
    except (msgspec.ValidationError, BadRequestError):
        return False
    return True


def documented(model: type[BaseModel], value: object) -> bool:
    try:
        model.model_validate_json(json.dumps(value))
    except ValidationError:
        return False
    return True


@given(_items)
def test_send_items(value: dict[str, object]) -> None:
    assert takes(SendItem, value) == documented(schemas.SendItem, value)


@given(_creates)
def test_creates(value: dict[str, object]) -> None:
    assert takes(CreateRequest, value) == documented(schemas.Create, value)


@given(_settings)
def test_settings(value: dict[str, object]) -> None:
    assert takes(SettingsRequest, value) == documented(schemas.Settings, value)


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        (
            schemas.SentFields,
            Written(
                conversation_id=GROUP,
                client_msg_id="one",
                event_id=GROUP,
                seq=1,
                created_at="2026-01-01T00:00:00.000000Z",
                duplicate=False,
            ),
        ),
        (
            schemas.Conversation,
            ConversationState(GROUP, "group", None, 1, AT, AT, [MemberState("ann", "admin", [(1, 4), (7, None)])]),
        ),
        (schemas.OwnSettings, OwnSettings(GROUP, True, AT, False)),
        (schemas.OwnSettings, OwnSettings(GROUP, False, None, True)),
        (schemas.Totals, Totals("ann", 5, 2, Unread(1, 1))),
        (schemas.Receipts, Readers(GROUP, 3, 2, 1, 1, [Reader("ann", 3, 4, 1)], "ann")),
    ],
)
def test_answers(model: type[BaseModel], answer: msgspec.Struct) -> None:
    told = msgspec.json.encode(answer)
    assert model.model_validate_json(told).model_dump(mode="json") == json.loads(told)
    assert set(model.model_fields) == set(answer.__struct_fields__)
