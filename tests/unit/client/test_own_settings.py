"""A user's own settings of a conversation, and what is unread in all, as the SDK asks for and exposes them."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from waybill_client import Client, ConversationSettings, Timing, UnreadTotals, errors

from tests.waiting import until

from .frames_of_server import CHAT, conversation
from .stub_server import Stub, stub_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.server import ServerConnection

UNTIL = "2026-12-01T07:00:00.000000Z"


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    one = Stub()
    async with stub_server(one):
        yield one


@pytest.fixture
async def client(stub: Stub) -> AsyncIterator[Client]:
    async def quick(_: float) -> None:
        await asyncio.sleep(0)

    async with Client(stub.url, "t", "d", deliver=False, timing=Timing(random.random, sleep=quick)) as made:
        await made.ready()
        yield made


async def known(client: Client, **fields: Any) -> None:
    def is_known() -> bool:
        chat = client.conversations[CHAT]
        return {name: getattr(chat, name) for name in fields} == fields

    await until(is_known, timeout=5, what=f"{fields}")


def _totals_are(client: Client, totals: UnreadTotals | None) -> bool:
    return client.unread_totals == totals


async def test_they_are_set_and_known_at_once(stub: Stub, client: Client) -> None:
    async def settings(of: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] != "settings":
            return False
        until = UNTIL if "muted_until" in frame else None
        told = {"muted": frame.get("muted", False), "muted_until": until, "archived": frame.get("archived", False)}
        await of.send(socket, {"t": "settings", "rid": frame["rid"], "conversation_id": CHAT, **told})
        return True

    stub.on_frame = settings
    moment = datetime(2026, 12, 1, 8, tzinfo=timezone(timedelta(hours=1)))
    told = await client.set_settings(CHAT.upper(), muted=True, muted_until=moment)
    assert told == ConversationSettings(CHAT, muted=True, muted_until=UNTIL, archived=False)
    await known(client, muted=True, muted_until=UNTIL, archived=False)
    await client.set_settings(CHAT, archived=True)
    await known(client, muted=False, muted_until=None, archived=True)
    first, second = [{**frame, "rid": ""} for frame in stub.got if frame["t"] == "settings"]
    at = {"t": "settings", "rid": "", "conversation_id": CHAT}
    assert first == {**at, "muted": True, "muted_until": "2026-12-01T07:00:00+00:00"}
    assert second == {**at, "archived": True}


async def test_another_devices_come_with_a_frame(stub: Stub, client: Client) -> None:
    for told in ({"muted": True, "muted_until": UNTIL}, {"muted": True, "archived": True}, {}):
        await stub.send(stub.sockets[-1], conversation(0, 0, **told))
        await known(client, **({"muted": False, "muted_until": None, "archived": False} | told))


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ({"code": "bad_request", "field": "t", "message": "Invalid value"}, errors.Unsupported),
        ({"code": "bad_request", "field": "muted_until", "message": "no such time"}, errors.BadRequest),
        ({"code": "not_found", "field": "conversation_id", "message": ""}, errors.NotFound),
    ],
)
async def test_refusals(stub: Stub, client: Client, refusal: dict[str, Any], error: type[errors.WaybillError]) -> None:
    async def refuses(of: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] != "settings":
            return False
        await of.send(socket, {"t": "error", "rid": frame["rid"], **refusal})
        return True

    stub.on_frame = refuses
    with pytest.raises(error) as raised:
        await client.set_settings(CHAT, muted=True)
    assert type(raised.value) is error
    if error is errors.Unsupported:
        assert "settings" in str(raised.value)
        assert raised.value.definite


async def test_what_can_be_no_request_never_leaves(stub: Stub, client: Client) -> None:
    moment = datetime(2026, 12, 1, tzinfo=UTC)
    for asked in (
        {},
        {"archived": True, "muted_until": moment},
        {"muted": False, "muted_until": moment},
        {"muted": True, "muted_until": moment.replace(tzinfo=None)},
    ):
        with pytest.raises(ValueError, match="muted"):
            await client.set_settings(CHAT, **asked)  # type: ignore[arg-type]
    assert [frame for frame in stub.got if frame["t"] == "settings"] == []


async def test_a_server_of_before_there_were_settings(stub: Stub, client: Client) -> None:
    old = {name: value for name, value in conversation(0, 0).items() if name not in ("muted", "archived")}
    await stub.send(stub.sockets[-1], {**old, "title": "old"})
    await known(client, title="old", muted=False, muted_until=None, archived=False)
    assert client.stats.bad_frames == 0


async def test_totals_are_those_of_a_whole_listing(stub: Stub, client: Client) -> None:
    assert client.unread_totals is None
    listed = {"t": "listed", "count": 1, "since": "x"}
    for more, totals in (
        ({"unread": 7, "muted_unread": 2}, UnreadTotals(7, 2)),
        ({"unread": 0, "muted_unread": 0}, UnreadTotals(0, 0)),
        ({}, None),
    ):
        await stub.send(stub.sockets[-1], {**listed, **more})
        await until(partial(_totals_are, client, totals), timeout=5, what=f"{totals}")
