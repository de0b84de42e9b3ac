import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts import frames
from shared.contracts.decode import LOOK_BYTES
from shared.errors import BadRequestError

GROUP = "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"
EVENT = "0198c2a4-0000-7000-8000-00000000000a"
MOMENT, BEFORE_ALL = "2026-12-01T08:00:00Z", "0001-01-01T00:00:00+09:00"
DEEP = "[" * 10_000 + "]" * 10_000


def frame(t: str, **fields: Any) -> str:
    return json.dumps({"t": t, **fields})


GOOD: list[tuple[str, type[frames.Frame]]] = [
    (frame("hello", device_id="phone"), frames.Hello),
    (
        frame("hello", device_id="phone", token="x", client="a/1", sync="live", cursors={}, since="s", more=1),
        frames.Hello,
    ),
    (frame("hello", device_id="phone", cursors={GROUP: 0, "x": [5, EVENT], "y": [5, None]}), frames.Hello),
    (frame("send", rid="r", conversation_id=GROUP, client_msg_id="one", body={}), frames.Send),
    (frame("create", rid="r", kind="group", members=[]), frames.Create),
    (frame("ack", conversation_id=GROUP, ranges=[[1, 1], [5, 2**63 - 1]]), frames.Ack),
    (frame("read", conversation_id=GROUP, seq=1), frames.Read),
    (frame("read", conversation_id=GROUP, seq=1, version=0), frames.Read),
    (frame("unread", conversation_id=GROUP, seq=0, version=1), frames.Unread),
    (frame("pull", rid="", conversation_id=GROUP, after=0), frames.Pull),
    (frame("pull", rid="r" * 64, conversation_id=GROUP, before=1, limit=500), frames.Pull),
    (frame("settings", rid="r", conversation_id=GROUP, muted=True), frames.Settings),
    (
        frame("settings", rid="r", conversation_id=GROUP, muted=True, muted_until="2026-12-01T08:00:00Z"),
        frames.Settings,
    ),
    (frame("settings", rid="r", conversation_id=GROUP, archived=False, muted=None), frames.Settings),
    (frame("watch", conversation_id=GROUP, on=False), frames.Watch),
    (frame("typing", conversation_id=GROUP.upper()), frames.Typing),
    (frame("presence", users=[]), frames.Presence),
    (frame("presence", users=["ann"] * 200), frames.Presence),
    (frame("token", token="x"), frames.Token),
    (frame("ping"), frames.Ping),
    (frame("ping", rid="r"), frames.Ping),
]


@pytest.mark.parametrize(("text", "kind"), GOOD)
def test_good_frames(text: str, kind: type[frames.Frame]) -> None:
    assert type(frames.parse(text)) is kind


def test_cursors_name_the_event_held_there() -> None:
    told = {GROUP.upper(): [7, EVENT.upper()], "a": [3, None], "b": 2, "c": [0, EVENT]}
    hello = frames.parse(frame("hello", device_id="d", cursors=told))
    assert isinstance(hello, frames.Hello)
    assert hello.cursor_ids() == {GROUP: (7, EVENT), "a": (3, None), "b": (2, None), "c": (0, None)}
    assert frames.Hello(device_id="d", cursors={}).cursor_ids() == {}
    assert frames.Hello(device_id="d").cursor_ids() is None


BAD: dict[str, tuple[str, str]] = {
    "not JSON": ("hello", "t"),
    "empty": ("", "t"),
    "an array": ("[]", "t"),
    "no t": ("{}", "t"),
    "unknown t": (frame("shout"), "t"),
    "t is a number": ('{"t":5}', "t"),
    "no device": (frame("hello"), "device_id"),
    "device with a space": (frame("hello", device_id="a b"), "device_id"),
    "device of 65": (frame("hello", device_id="a" * 65), "device_id"),
    "unknown sync": (frame("hello", device_id="a", sync="half"), "sync"),
    "cursors a list": (frame("hello", device_id="a", cursors=[]), "cursors"),
    "no rid": (frame("send", conversation_id=GROUP, client_msg_id="one", body={}), "rid"),
    "rid a number": (frame("send", rid=1, conversation_id=GROUP, client_msg_id="one", body={}), "rid"),
    "rid of 65": (frame("ping", rid="r" * 65), "rid"),
    "conversation no UUID": (frame("read", conversation_id="x", seq=1), "conversation_id"),
    "seq 0": (frame("read", conversation_id=GROUP, seq=0), "seq"),
    "seq negative": (frame("read", conversation_id=GROUP, seq=-1), "seq"),
    "seq beyond int64": (frame("read", conversation_id=GROUP, seq=2**63), "seq"),
    "seq far beyond": (frame("read", conversation_id=GROUP, seq=10**40), "seq"),
    "seq a string": (frame("read", conversation_id=GROUP, seq="1"), "seq"),
    "version negative": (frame("read", conversation_id=GROUP, seq=1, version=-1), "version"),
    "unread without version": (frame("unread", conversation_id=GROUP, seq=1), "version"),
    "ranges empty": (frame("ack", conversation_id=GROUP, ranges=[]), "ranges"),
    "a range of one": (frame("ack", conversation_id=GROUP, ranges=[[1]]), "ranges.0"),
    "a range of three": (frame("ack", conversation_id=GROUP, ranges=[[1, 2], [1, 2, 3]]), "ranges.1"),
    "range from 0": (frame("ack", conversation_id=GROUP, ranges=[[0, 2]]), "ranges.0.0"),
    "range negative": (frame("ack", conversation_id=GROUP, ranges=[[1, -2]]), "ranges.0.1"),
    "range beyond": (frame("ack", conversation_id=GROUP, ranges=[[1, 2**63]]), "ranges.0.1"),
    "1,001 ranges": (frame("ack", conversation_id=GROUP, ranges=[[1, 1]] * 1001), "ranges"),
    "limit 0": (frame("pull", rid="r", conversation_id=GROUP, after=0, limit=0), "limit"),
    "limit 501": (frame("pull", rid="r", conversation_id=GROUP, after=0, limit=501), "limit"),
    "before 0": (frame("pull", rid="r", conversation_id=GROUP, before=0), "before"),
    "ack of no conversation": (frame("ack", ranges=[[1, 1]]), "conversation_id"),
    "ack of no UUID": (frame("ack", conversation_id=GROUP + "\n", ranges=[[1, 1]]), "conversation_id"),
    "ack of a number": (frame("ack", conversation_id=5, ranges=[[1, 1]]), "conversation_id"),
    "watch of no UUID": (frame("watch", conversation_id="x", on=True), "conversation_id"),
    "watch without on": (frame("watch", conversation_id=GROUP), "on"),
    "on is a number": (frame("watch", conversation_id=GROUP, on=1), "on"),
    "on is null": (frame("watch", conversation_id=GROUP, on=None), "on"),
    "settings without rid": (frame("settings", conversation_id=GROUP, muted=True), "rid"),
    "settings of no UUID": (frame("settings", rid="r", conversation_id="x", muted=True), "conversation_id"),
    "muted a number": (frame("settings", rid="r", conversation_id=GROUP, muted=1), "muted"),
    "archived a string": (frame("settings", rid="r", conversation_id=GROUP, archived="yes"), "archived"),
    "a time without a zone": (
        frame("settings", rid="r", conversation_id=GROUP, muted=True, muted_until="2026-12-01T08:00:00"),
        "muted_until",
    ),
    "typing nowhere": (frame("typing"), "conversation_id"),
    "typing of no UUID": (frame("typing", conversation_id="x"), "conversation_id"),
    "presence of nobody named": (frame("presence"), "users"),
    "presence of one": (frame("presence", users="ann"), "users"),
    "presence of a bad name": (frame("presence", users=["ann", "a b"]), "users.1"),
    "presence of a number": (frame("presence", users=[7]), "users.0"),
    "presence of 201": (frame("presence", users=["ann"] * 201), "users"),
    "NaN": ('{"t":"ping","rid":NaN}', "rid"),
    "NaN in a body": (
        f'{{"t":"send","rid":"r","conversation_id":"{GROUP}","client_msg_id":"a","body":{{"a":NaN}}}}',
        "body",
    ),
    "half a surrogate": ('{"t":"ping","rid":"\\ud800"}', "rid"),
    "deep nesting": (f'{{"t":"send","rid":"r","body":{DEEP}}}', "body"),
}


@pytest.mark.promise("protocol.3.bad_frame")
@pytest.mark.parametrize(("text", "field"), BAD.values(), ids=BAD)
def test_bad_frames(text: str, field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        frames.parse(text)
    frames.explain(text, refused.value)
    assert refused.value.field == field


# What is checked once a frame is decoded names its field, too.
@pytest.mark.promise("protocol.9.ranges", "protocol.9.cursors")
@pytest.mark.parametrize(
    ("text", "field"),
    [
        (frame("ack", conversation_id=GROUP, ranges=[[1, 2], [5, 4]]), "ranges.1"),
        (frame("pull", rid="r", conversation_id=GROUP), "after"),
        (frame("pull", rid="r", conversation_id=GROUP, after=1, before=5), "after"),
        (frame("settings", rid="r", conversation_id=GROUP), "muted"),
        (frame("settings", rid="r", conversation_id=GROUP, muted_until="2026-12-01T08:00:00Z"), "muted"),
        (frame("settings", rid="r", conversation_id=GROUP, archived=True, muted_until=MOMENT), "muted_until"),
        (frame("settings", rid="r", conversation_id=GROUP, muted=False, muted_until=MOMENT), "muted_until"),
        (
            frame("settings", rid="r", conversation_id=GROUP, muted=True, muted_until="2026-02-30T08:00:00Z"),
            "muted_until",
        ),
        (frame("settings", rid="r", conversation_id=GROUP, muted=True, muted_until=BEFORE_ALL), "muted_until"),
        (frame("hello", device_id="a", cursors={GROUP: -1}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [1]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [1, EVENT, 3]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [EVENT, 1]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [1, "id"]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [1, ""]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [1, EVENT + "\n"]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [0, "id"]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [-1, EVENT]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [2**63, EVENT]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: [1, 2]}), f"cursors.{GROUP}"),
        (frame("hello", device_id="a", cursors={GROUP: 2**63}), None),
        (frame("hello", device_id="a", cursors={GROUP: "5"}), None),
    ],
)
def test_bad_values(text: str, field: str | None) -> None:
    with pytest.raises(BadRequestError) as refused:
        frames.parse(text)
    if field is not None:
        assert refused.value.field == field


@pytest.mark.promise("protocol.9.rid")
@pytest.mark.parametrize(
    ("text", "rid"),
    [
        (frame("send", rid="r"), "r"),
        (f'{{"t":"send","rid":"r","body":{DEEP}}}', "r"),
        ('{"t":"send","body":{"rid":"inner"},"rid":"outer","x":NaN}', "outer"),
        ('{"t":"send","body":{"rid":"inner"}}', None),
        ('{"rid":5}', None),
        ('{"rid":"%s"}' % ("r" * 65), None),
        ('{"rid":"\\ud800"}', None),
        ("not JSON", None),
        ("", None),
        ("[]", None),
        (frame("send", rid="é"), "é"),
        ('{"rid":"\ud800"}', None),
    ],
)
def test_rid_of_a_bad_frame(text: str, rid: str | None) -> None:
    assert frames.explain(text, BadRequestError("bad")) == rid


FAR = "x" * LOOK_BYTES


# A text that is JSON is read as a whole; of any other, no more than the beginning is looked at.
@pytest.mark.parametrize(
    ("text", "rid", "field"),
    [
        (frame("send", body=FAR, rid="r"), "r", "t"),
        (f'{{"t":"ping","x":"{FAR}","rid":"r"', None, "t"),
        (f'{{"t":"ping","rid":"r","x":"{FAR}","y":NaN}}', "r", "t"),
        (f'{{"t":"ping","rid":"r","x":{{"a":NaN,"b":"{FAR}"}}}}', "r", "x"),
        (f'{{"t":"ping","rid":"r","x":{"[" * 20_000}', "r", "x"),
        (f'{{"t":"ping","rid":"r","x":{"1" * LOOK_BYTES}', "r", "t"),
        ('{"t":"ping","rid":"' + '\\"' * LOOK_BYTES, None, "t"),
        ('{"t":"ping","rid":"r","\\ud800":NaN}', "r", "t"),
    ],
)
def test_how_far_a_bad_frame_is_looked_at(text: str, rid: str | None, field: str) -> None:
    error = BadRequestError("bad", field="t")
    assert (frames.explain(text, error), error.field) == (rid, field)


def test_a_second_look_does_not_depend_on_the_size_of_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(frames, "members", lambda text: looked.append(len(text)) or {})
    frames.explain('{"t":"' + '\\"' * 500_000, BadRequestError("bad"))
    assert looked == [LOOK_BYTES + 1]


@given(st.text(max_size=60))
def test_any_text_is_a_frame_or_bad_request(text: str) -> None:
    for whole in (text, f'{{"t":"ping","rid":{text}}}', f'{{"t":"ack","ranges":{text}}}'):
        frames.explain(whole, BadRequestError("bad"))
        with suppress(BadRequestError):
            frames.parse(whole)
