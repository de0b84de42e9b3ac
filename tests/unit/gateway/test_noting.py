"""What a session brings into the log of state changes beside its pushes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.close import Close
from services.gateway.limits import Limits, Patience, Rate
from services.gateway.transitions import Refusal
from shared.errors import ConflictError, TimedOutError, UnavailableError
from tests.lone_gateway import House, Wire
from tests.timelines import Row

C = "0197c3d1-0000-7000-8000-0000000000c1"
OTHER = "0197c3d1-0000-7000-8000-0000000000c2"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with House(monkeypatch) as made:
        made.store.make(C, "ann", "bob", head=3)
        yield made


@pytest.fixture
async def wire(house: House) -> Wire:
    """Of ann's phone, which has everything."""
    return await house.open(cursors={C: 3})


def notes(house: House, kind: str) -> list[tuple[Any, ...]]:
    """The cause, and what is told with it."""
    return [rest for noted, *rest in house.transitions.of("note") if noted == kind]


def refusals(house: House) -> list[tuple[str, str, str | None, str | None]]:
    return [
        (one.kind, one.cause, one.conversation_id, one.trace_id)
        for (one,) in house.transitions.of("refused")
        if isinstance(one, Refusal) and (one.user_id, one.device_id) == ("ann", "phone")
    ]


def send(**more: Any) -> dict[str, Any]:
    return {"t": "send", "rid": "1", "conversation_id": C, "client_msg_id": "m", "body": {}, **more}


async def test_a_session_begins_and_ends(house: House, wire: Wire) -> None:
    of = wire.handler
    assert notes(house, "session") == [["opened", "ann", "phone", of.session_id, {"number": 1}]]
    of.end(Close(4408, "x"))
    of.end(Close(1000, "x"))
    assert notes(house, "session")[1:] == [["ended", "ann", "phone", of.session_id, {"code": 4408}]]


async def test_one_that_never_began_has_no_end(house: House) -> None:
    wire = house.wire()
    wire.handler.end(Close(4408, "x"))
    assert notes(house, "session") == []


async def test_a_void_token_is_noted_when_it_is_brought(house: House, wire: Wire) -> None:
    house.store.revocations.append(Row(id=1, user_id="ann", device_id=None, jti=None, before=1.0))
    wire.say({"t": "token", "token": "ann:200"})
    await house.quiet()
    assert [cause for cause, *_ in notes(house, "session")] == ["opened", "revoked", "ended"]


async def test_what_goes_again_is_told_by_range_however_it_was_found(house: House, wire: Wire) -> None:
    house.live(C, 3)
    wire.say({"t": "ack", "conversation_id": C, "ranges": [[5, 5]]})
    house.forward(5.1)
    house.fanout.rooms[C].forget()
    house.forward(10.1)
    await house.quiet()
    session_id = wire.handler.session_id
    assert notes(house, "resent") == [
        ["no_ack", C, "ann", "phone", session_id, seq, seq] for _ in range(2) for seq in (4, 6)
    ]
    assert [(one.first, one.last) for one in house.transitions.pushes.take(10)] == [(4, 6)]


async def test_an_ack_of_what_is_not_there_was_in_vain(house: House, wire: Wire) -> None:
    wire.say({"t": "ack", "conversation_id": C, "ranges": [[9, 9], [1, 1]]})
    wire.say({"t": "ack", "conversation_id": OTHER.upper(), "ranges": [[1, 1]]})
    wire.say({"t": "ack", "conversation_id": C, "ranges": [[1, 3]]})
    assert refusals(house) == [
        ("delivered", "refused:beyond_head", C, None),
        ("delivered", "refused:not_found", OTHER, None),
    ]


async def test_what_is_refused_here_is_told(house: House, wire: Wire) -> None:
    wire.handler.rates = Limits({"sends": Rate(1.0, 1)}, {}, patience=Patience(30, 10.0, 0.0)).session("ann")
    wire.say(send(), send(traceparent=f"00-{TRACE}-00f067aa0ba902b7-01"))
    wire.say({"t": "read", "conversation_id": OTHER, "seq": 1})
    wire.say({"t": "unread", "conversation_id": OTHER, "seq": 1, "version": 1})
    wire.say({"t": "typing", "conversation_id": OTHER}, {"t": "send"})
    assert refusals(house) == [
        ("sent", "refused:rate_limited", C, TRACE),
        ("read", "refused:not_found", OTHER, None),
        ("unread", "refused:not_found", OTHER, None),
    ]
    assert len(wire.of("error")) == 5


async def test_what_was_handed_on_is_told_if_nobody_knows_what_became_of_it(
    house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.say(send(), send(), send())
    answers = [call[-1] for call in house.sends.of("submit")]
    answers[0](UnavailableError("away", retry_after_ms=5))
    answers[1](ConflictError("ingest has logged it"))

    async def create(*_: Any) -> Any:
        raise TimedOutError("no answer")

    monkeypatch.setattr(house.sends, "create", create, raising=False)
    wire.say({"t": "create", "rid": "2", "kind": "group", "members": ["bob"], "conversation_id": OTHER})
    await house.quiet()
    wire.handler.end(Close(1000, "x"))
    answers[2](TimedOutError("no answer"))
    assert refusals(house) == [
        ("sent", "unanswered:unavailable", C, None),
        ("created", "unanswered:timeout", OTHER, None),
        ("sent", "unanswered:timeout", C, None),
    ]
