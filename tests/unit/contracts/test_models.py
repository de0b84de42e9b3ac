"""The fast codec takes and refuses what the pydantic models take and refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from shared.contracts import frames, models
from shared.errors import BadRequestError

CONVERSATION = "0198c2a4-0000-7000-8000-00000000000A"
FROM_CLIENT: TypeAdapter[Any] = TypeAdapter(models.FromClient)

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**63 - 1, 2**63, 2**64, 500, 501]),
    st.sampled_from([0.5, 1e300]),
    st.sampled_from(
        ["", "a", "a b", "x" * 64, "x" * 65, CONVERSATION, CONVERSATION.lower(), CONVERSATION + "\n", "message"]
    ),
    st.sampled_from(["2026-12-01T08:00:00.5+01:00", "2026-02-30T08:00:00Z", "0001-01-01T00:00:00+09:00", "2026-12-01"]),
    st.sampled_from(["edit", "direct", "group", "all", "full", "live", "member", "a\n"]),
    st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=3),
    st.lists(st.sampled_from(["ann", "b b", "c"]), max_size=3),
    st.dictionaries(
        st.sampled_from(["a", CONVERSATION]),
        st.one_of(
            st.integers(-1, 5),
            st.none(),
            st.lists(st.sampled_from([0, 5, -1, 2**63, None, True, 1.5, "a", CONVERSATION]), max_size=3),
        ),
        max_size=2,
    ),
)
GOOD: dict[str, dict[str, Any]] = {
    "hello": {"device_id": "phone", "cursors": {CONVERSATION: 5, "a": [5, CONVERSATION]}, "sync": "live"},
    "send": {"rid": "1", "conversation_id": CONVERSATION, "client_msg_id": "m", "body": {"a": [1]}},
    "create": {"rid": "1", "kind": "group", "members": ["ann"], "title": "T"},
    "ack": {"conversation_id": CONVERSATION, "ranges": [[1, 2], [4, 4]]},
    "read": {"conversation_id": CONVERSATION, "seq": 1, "version": 0},
    "unread": {"conversation_id": CONVERSATION, "seq": 0, "version": 1},
    "pull": {"rid": "1", "conversation_id": CONVERSATION, "after": 0, "limit": 5},
    "settings": {
        "rid": "1",
        "conversation_id": CONVERSATION,
        "muted": True,
        "muted_until": "2026-12-01T08:00:00Z",
        "archived": True,
    },
    "watch": {"conversation_id": CONVERSATION, "on": True},
    "typing": {"conversation_id": CONVERSATION},
    "presence": {"users": ["ann"]},
    "token": {"token": "t"},
    "ping": {"rid": "1"},
}


def codec_takes(frame: dict[str, Any]) -> bool:
    try:
        frames.parse(json.dumps(frame))
    except BadRequestError as error:
        if not error.field:
            raise
        return False
    return True


def models_take(frame: dict[str, Any]) -> bool:
    try:
        FROM_CLIENT.validate_python(frame)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("type_", GOOD)
def test_both_take_a_good_frame(type_: str) -> None:
    frame = {"t": type_, **GOOD[type_], "unknown": 1}
    assert codec_takes(frame)
    assert models_take(frame)


@given(st.data())
@settings(max_examples=600)
def test_both_judge_alike(data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(sorted(GOOD)))
    frame = {"t": type_, **GOOD[type_]}
    # A body is judged by ingest, not by the codec: only its absence is alike.
    names = sorted(frame.keys() - {"t", "body"})
    name = data.draw(st.sampled_from(names))
    if data.draw(st.booleans()):
        del frame[name]
    else:
        frame[name] = data.draw(VALUES)
    assert codec_takes(frame) == models_take(frame), frame
