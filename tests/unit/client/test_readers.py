"""Who has an event, asked of a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from waybill_client import Client, MessageReceipts, Receipt, Timing, errors

from .frames_of_server import CHAT
from .stub_server import Stub, stub_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.server import ServerConnection


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    one = Stub()
    async with stub_server(one):
        yield one


@pytest.fixture
async def client(stub: Stub) -> AsyncIterator[Client]:
    timing = Timing(lambda: 0.5, sleep=lambda _: asyncio.sleep(0))
    async with Client(stub.url, "secret", "d", timing=timing, deliver=False) as made:
        await made.ready()
        yield made


def answers(stub: Stub, *answered: dict[str, Any]) -> list[dict[str, Any]]:
    """The next `receipts` frames get these answers; returns the frames as they come."""
    waiting, asked = list(answered), []

    async def on_frame(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] != "receipts":
            return False
        asked.append(frame)
        await stub.send(socket, {"rid": frame["rid"], **waiting.pop(0)})
        return True

    stub.on_frame = on_frame
    return asked


def told(*users: str, more: str | None = None) -> dict[str, Any]:
    marks = [{"user_id": one, "delivered_seq": 4, "read_seq": 3, "read_version": 1} for one in users]
    counts = {"members": 5, "delivered": 4, "read": 3}
    return {"t": "receipts", "conversation_id": CHAT, "seq": 3, **counts, "users": marks, "next": more}


def receipt(user_id: str) -> Receipt:
    return Receipt(CHAT, user_id, 4, 3, 1)


@pytest.mark.promise("protocol.6.receipts")
async def test_a_page(stub: Stub, client: Client) -> None:
    asked = answers(stub, told("ann", "bob", more="bob"), told())
    found = await client.receipts_of(CHAT.upper(), 3)
    assert found == MessageReceipts(CHAT, 3, 5, 4, 3, (receipt("ann"), receipt("bob")), "bob")
    found = await client.receipts_of(CHAT, 3, "unread", after="bob", limit=7)
    assert (found.users, found.next) == ((), None)
    first, second = ({name: value for name, value in frame.items() if name != "rid"} for frame in asked)
    assert first == {"t": "receipts", "conversation_id": CHAT, "seq": 3, "state": "read", "limit": 100}
    assert second == {**first, "state": "unread", "after": "bob", "limit": 7}


@pytest.mark.promise("protocol.6.receipts")
async def test_all_pages(stub: Stub, client: Client) -> None:
    asked = answers(stub, told("ann", "bob", more="bob"), told("cyd", "dan", more="dan"), told("eve"))
    users = [one.user_id async for one in client.all_receipts_of(CHAT, 3, "delivered", page=2)]
    assert users == ["ann", "bob", "cyd", "dan", "eve"]
    assert [(one.get("after"), one["limit"], one["state"]) for one in asked] == [
        (None, 2, "delivered"),
        ("bob", 2, "delivered"),
        ("dan", 2, "delivered"),
    ]


async def test_what_the_user_may_not_see(stub: Stub, client: Client) -> None:
    answers(stub, {"t": "error", "code": "not_found", "message": "no such event", "field": "seq"})
    with pytest.raises(errors.NotFound) as refused:
        await client.receipts_of(CHAT, 99)
    assert refused.value.field == "seq"


async def test_a_server_that_does_not_know_of_it(stub: Stub, client: Client) -> None:
    answers(stub, {"t": "error", "code": "bad_request", "message": "invalid value 'receipts'", "field": "t"})
    with pytest.raises(errors.Unsupported, match="receipts"):
        await client.receipts_of(CHAT, 3)


async def test_over_the_rate_it_is_asked_again(stub: Stub, client: Client) -> None:
    late = {"t": "error", "code": "rate_limited", "message": "too many pulls", "retry_after_ms": 10}
    asked = answers(stub, late, told("ann"))
    assert (await client.receipts_of(CHAT, 3)).users == (receipt("ann"),)
    assert len(asked) == 2


@pytest.mark.parametrize("bad", [{"users": 5}, {"users": [5]}, {"members": "5"}, {"users": [{"user_id": "ann"}]}])
async def test_an_answer_that_cannot_be_read_is_counted(stub: Stub, client: Client, bad: dict[str, Any]) -> None:
    answers(stub, {**told(), **bad})
    with pytest.raises(errors.Unanswered):
        await client.receipts_of(CHAT, 3, timeout_s=0.2)
    assert client.stats.bad_frames == 1


async def test_an_answer_that_nobody_waits_for(stub: Stub, client: Client) -> None:
    await stub.send(stub.sockets[-1], {**told(), "rid": "x"})
    answers(stub, told())
    await client.receipts_of(CHAT, 3)
    assert client.stats.late_answers == 1
