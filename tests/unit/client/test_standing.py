"""Watches, presence and typing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from waybill_client import outputs
from waybill_client._frames import Presence, Typing
from waybill_client.session import Session, Settings
from waybill_client.standing import Standing

from .frames_of_server import CHAT, conversation, receipt, welcome

WATCH = {"t": "watch", "conversation_id": CHAT, "on": True}
PRESENCE = {"t": "presence", "users": ["bob"]}
LISTED = {"t": "listed", "count": 0, "since": "s"}


def wrote(done: list[outputs.Output]) -> list[dict[str, Any]]:
    return [json.loads(output.data) for output in done if isinstance(output, outputs.Write)]


@pytest.fixture
def one() -> Session:
    return Session("d", Settings(), random=lambda: 1.0)


def connect(one: Session) -> list[dict[str, Any]]:
    one.hello("t")
    one.receive(welcome(), 0.0)
    return wrote(one.receive(LISTED, 0.0))


def test_what_was_asked_for_is_said_on_each_connection(one: Session) -> None:
    assert one.watch(CHAT, on=True) == []
    assert one.presence(["bob"]) == []
    assert connect(one) == [WATCH, PRESENCE]
    assert wrote(one.presence([])) == [{"t": "presence", "users": []}]
    assert wrote(one.watch("other", on=True)) == [{**WATCH, "conversation_id": "other"}]
    assert wrote(one.watch("other", on=False)) == [{**WATCH, "conversation_id": "other", "on": False}]
    assert connect(one) == [WATCH]
    assert wrote(one.presence(["bob"])) == [PRESENCE]


def test_typing_is_said_at_most_every_two_seconds_and_never_late(one: Session) -> None:
    assert one.typing(CHAT, 0.0) == []
    connect(one)
    assert wrote(one.typing(CHAT, 0.0)) == [{"t": "typing", "conversation_id": CHAT}]
    assert one.typing(CHAT, 1.9) == []
    assert len(one.typing("other", 1.9)) == 1
    assert len(one.typing(CHAT, 2.0)) == 1
    one.disconnected()
    assert one.typing(CHAT, 9.0) == []
    assert connect(one) == []


def test_what_others_do_comes_out(one: Session) -> None:
    told = {"t": "typing", "conversation_id": CHAT, "user_id": "bob", "for_ms": 5000}
    assert one.receive(told, 0.0) == [outputs.Typed(Typing(CHAT, "bob", 5000))]
    for online, since in ((True, "2026-01-01T00:00:00.000000Z"), (False, None), (None, None)):
        told = {"t": "presence", "user_id": "bob", "online": online, "since": since}
        assert one.receive(told, 0.0) == [outputs.Seen(Presence("bob", online, since))]
    assert one.receive({"t": "presence", "user_id": "bob", "online": "yes", "since": None}, 0.0) == []
    assert one.receive({"t": "typing", "conversation_id": CHAT, "user_id": "bob"}, 0.0) == []
    assert one.stats.bad_frames == 2


def test_what_was_dropped_for_its_rate_is_said_again_later(one: Session) -> None:
    one.watch(CHAT, on=True)
    connect(one)
    one.receive(conversation(9, 9, visible=[[10, None]]), 0.0)
    one.read(CHAT, 5)
    for _ in range(3):
        one.receive({"t": "error", "code": "rate_limited", "message": "", "retry_after_ms": 400}, 1.0)
    assert one.next_at() == 1.8
    assert one.tick(1.7) == []
    mark = {"t": "read", "conversation_id": CHAT, "seq": 5, "version": 0}
    assert wrote(one.tick(1.8)) == [WATCH, mark]
    assert one.tick(9.0) == []
    one.receive({"t": "error", "code": "rate_limited", "message": "", "retry_after_ms": 400}, 10.0)
    one.receive(receipt("anna", 0, 0, 5), 10.0)
    assert wrote(one.tick(11.6)) == [WATCH], "longer each time, and without the mark that the server has by now"


def test_another_error_without_a_rid_says_nothing_again(one: Session) -> None:
    one.watch(CHAT, on=True)
    connect(one)
    one.receive({"t": "error", "code": "not_found", "message": ""}, 1.0)
    assert one.next_at() is None


def test_the_wait_grows_to_a_minute() -> None:
    standing = Standing(lambda: 0.0)
    now, waits = 0.0, []
    for _ in range(9):
        standing.refused(now, None)
        assert standing.again_at is not None
        waits.append(standing.again_at - now)
        now = standing.again_at
        assert standing.due(now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    standing.begin()
    standing.refused(0.0, None)
    assert standing.again_at == 1.0
