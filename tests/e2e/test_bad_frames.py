"""Every frame that the protocol does not allow: the named error with its field, and the session goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.gateways import Client, Gateway, House, house, token, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]

CONVERSATION = "CONVERSATION"
"""Stands for the id of a conversation of the sender."""
FOREIGN = "FOREIGN"
"""Stands for the id of one that the sender was never in."""
UNKNOWN = "00000000-0000-4000-8000-000000000000"

DEEP = "[" * 10_000 + "]" * 10_000


def frame(t: str, **fields: Any) -> str:
    return json.dumps({"t": t, **fields})


def send(rid: Any = "r", **fields: Any) -> str:
    return frame("send", **{"rid": rid, "conversation_id": CONVERSATION, "client_msg_id": "m", "body": {}, **fields})


def ack(ranges: Any, conversation_id: Any = CONVERSATION) -> str:
    return frame("ack", conversation_id=conversation_id, ranges=ranges)


class Bad(NamedTuple):
    """``field``, ``rid``: what the error has; ``code``: which one it is."""

    text: str | bytes
    field: str | None
    rid: str | None = None
    code: str = "bad_request"


BAD = {
    "not json": Bad("hello?", "t"),
    "empty": Bad("", "t"),
    "half": Bad('{"t":"ping","rid":"r"', "t"),
    "trailing": Bad('{"t":"ping"} x', "t"),
    "an array": Bad("[]", "t"),
    "a number": Bad("7", "t"),
    "binary": Bad(b'{"t":"ping"}', "t"),
    "no t": Bad('{"rid":"r"}', "t", "r"),
    "t is a number": Bad('{"t":7,"rid":"r"}', "t", "r"),
    "unknown t": Bad(frame("dance", rid="r"), "t", "r"),
    "a second hello": Bad(frame("hello", device_id="phone"), "t"),
    "a frame of the server": Bad(frame("welcome"), "t"),
    "deep": Bad(
        '{"t":"send","rid":"r","conversation_id":"' + UNKNOWN + '","client_msg_id":"m","body":' + DEEP + "}",
        "body",
        "r",
    ),
    "deep in nothing known": Bad('{"t":"ping","rid":"r","x":' + DEEP + "}", "x", "r"),
    "nan in a body": Bad(
        '{"t":"send","rid":"r","conversation_id":"CONVERSATION","client_msg_id":"m","body":{"a":NaN}}', "body", "r"
    ),
    "nan as seq": Bad('{"t":"read","conversation_id":"CONVERSATION","seq":NaN}', "seq"),
    "infinity as seq": Bad('{"t":"read","conversation_id":"CONVERSATION","seq":Infinity}', "seq"),
    "nul in a body": Bad(send(body={"a": "\0"}), "body", "r"),
    "nul in an id": Bad(send(client_msg_id="a\0b"), "client_msg_id", "r"),
    "lone surrogate in a body": Bad(send(body={"a": "\ud800"}), "body", "r"),
    "lone surrogate in an id": Bad(send(client_msg_id="\ud800"), "client_msg_id", "r"),
    "lone surrogate in rid": Bad(frame("ping", rid="\udfff"), "rid"),
    "a name twice in a body": Bad(
        '{"t":"send","rid":"r","conversation_id":"CONVERSATION","client_msg_id":"m","body":{"a":1,"a":2}}', "body", "r"
    ),
    "nested over 64": Bad(send(body=json.loads('{"a":' * 65 + "1" + "}" * 65)), "body", "r"),
    "body is no object": Bad(send(body=[1]), "body", "r"),
    "body is missing": Bad('{"t":"send","rid":"r","conversation_id":"CONVERSATION","client_msg_id":"m"}', "body", "r"),
    "body too large": Bad(send(body={"a": "x" * 70_000}), "body", "r", "too_large"),
    "conversation_id is missing": Bad(frame("send", rid="r", client_msg_id="m", body={}), "conversation_id", "r"),
    "conversation_id is no uuid": Bad(send(conversation_id="abc"), "conversation_id", "r"),
    "conversation_id is a number": Bad(send(conversation_id=7), "conversation_id", "r"),
    "client_msg_id is missing": Bad(
        frame("send", rid="r", conversation_id=CONVERSATION, body={}), "client_msg_id", "r"
    ),
    "client_msg_id with a space": Bad(send(client_msg_id="a b"), "client_msg_id", "r"),
    "client_msg_id of 65": Bad(send(client_msg_id="a" * 65), "client_msg_id", "r"),
    "client_msg_id is empty": Bad(send(client_msg_id=""), "client_msg_id", "r"),
    "client_msg_id ends in a line feed": Bad(send(client_msg_id="a\n"), "client_msg_id", "r"),
    "client_msg_id is reserved": Bad(send(client_msg_id="create:x"), "client_msg_id", "r"),
    "type is unknown": Bad(send(type="shout"), "type", "r"),
    "system by a user": Bad(send(type="system"), "type", "r", "forbidden"),
    "a target of a message": Bad(send(target_seq=1), "target_seq", "r"),
    "an edit without target": Bad(send(type="edit"), "target_seq", "r"),
    "a recall with a body": Bad(send(type="recall", target_seq=1), "body", "r"),
    "target beyond int64": Bad(send(type="edit", target_seq=2**63), "target_seq", "r"),
    "target is 0": Bad(send(type="edit", target_seq=0), "target_seq", "r"),
    "target is text": Bad(send(type="edit", target_seq="1"), "target_seq", "r"),
    "target is a fraction": Bad(send(type="edit", target_seq=1.5), "target_seq", "r"),
    "target is not there": Bad(send(type="edit", target_seq=99), "target_seq", "r", "not_found"),
    "traceparent is none": Bad(send(traceparent="00-1"), "traceparent", "r"),
    "send to another's": Bad(send(conversation_id=FOREIGN), "conversation_id", "r", "not_found"),
    "send to nowhere": Bad(send(conversation_id=UNKNOWN), "conversation_id", "r", "not_found"),
    "member without action": Bad(send(type="member"), "body.action", "r"),
    "member with a bad id": Bad(send(type="member", body={"action": "add", "user_id": "a b"}), "body.user_id", "r"),
    "title is a number": Bad(send(type="conversation", body={"title": 7}), "body.title", "r"),
    "conversation with an action": Bad(send(type="conversation", body={"action": "create"}), "body.action", "r"),
    "rid is missing": Bad(frame("send", conversation_id=CONVERSATION, client_msg_id="m", body={}), "rid"),
    "rid is a number": Bad(send(rid=7), "rid"),
    "rid is null": Bad(send(rid=None), "rid"),
    "rid of 65": Bad(send(rid="r" * 65), "rid"),
    "pull without rid": Bad(frame("pull", conversation_id=CONVERSATION, after=0), "rid"),
    "create without rid": Bad(frame("create", kind="group", members=[]), "rid"),
    "ping with a bad rid": Bad(frame("ping", rid=[]), "rid"),
    "ack without ranges": Bad(frame("ack", conversation_id=CONVERSATION), "ranges"),
    "ack of nothing": Bad(ack([]), "ranges"),
    "ack of no list": Bad(ack("1-2"), "ranges"),
    "ack of an inverted range": Bad(ack([[1, 1], [3, 2]]), "ranges.1"),
    "ack of a negative range": Bad(ack([[-2, -1]]), "ranges.0.0"),
    "ack from 0": Bad(ack([[0, 1]]), "ranges.0.0"),
    "ack beyond int64": Bad(ack([[1, 2**63]]), "ranges.0.1"),
    "ack far beyond int64": Bad(ack([[1, 10**40]]), "ranges.0.1"),
    "ack of a range of one": Bad(ack([[1]]), "ranges.0"),
    "ack of a range of three": Bad(ack([[1, 2, 3]]), "ranges.0"),
    "ack of text": Bad(ack([["1", "2"]]), "ranges.0.0"),
    "ack of booleans": Bad(ack([[True, True]]), "ranges.0.0"),
    "ack of 1001 ranges": Bad(ack([[n, n] for n in range(1, 1002)]), "ranges"),
    "ack of a bad id": Bad(ack([[1, 1]], "abc"), "conversation_id"),
    "read without seq": Bad(frame("read", conversation_id=CONVERSATION), "seq"),
    "read of 0": Bad(frame("read", conversation_id=CONVERSATION, seq=0), "seq"),
    "read beyond int64": Bad(frame("read", conversation_id=CONVERSATION, seq=2**63), "seq"),
    "read with a negative version": Bad(frame("read", conversation_id=CONVERSATION, seq=1, version=-1), "version"),
    "read of another's": Bad(frame("read", conversation_id=FOREIGN, seq=1), "conversation_id", None, "not_found"),
    "unread without version": Bad(frame("unread", conversation_id=CONVERSATION, seq=1), "version"),
    "unread with version 0": Bad(frame("unread", conversation_id=CONVERSATION, seq=1, version=0), "version"),
    "pull of another's": Bad(
        frame("pull", rid="r", conversation_id=FOREIGN, after=0), "conversation_id", "r", "not_found"
    ),
    "pull of nowhere": Bad(
        frame("pull", rid="r", conversation_id=UNKNOWN, after=0), "conversation_id", "r", "not_found"
    ),
    "pull without a side": Bad(frame("pull", rid="r", conversation_id=CONVERSATION), "after", "r"),
    "pull to both sides": Bad(frame("pull", rid="r", conversation_id=CONVERSATION, after=1, before=2), "after", "r"),
    "pull below 0": Bad(frame("pull", rid="r", conversation_id=CONVERSATION, after=-1), "after", "r"),
    "pull of 0": Bad(frame("pull", rid="r", conversation_id=CONVERSATION, after=0, limit=0), "limit", "r"),
    "pull of 501": Bad(frame("pull", rid="r", conversation_id=CONVERSATION, after=0, limit=501), "limit", "r"),
    "create of an unknown kind": Bad(frame("create", rid="r", kind="crowd", members=[]), "kind", "r"),
    "create without members": Bad(frame("create", rid="r", kind="group"), "members", "r"),
    "create with a bad member": Bad(frame("create", rid="r", kind="group", members=["ok", "a b"]), "members.1", "r"),
    "create with a long member": Bad(frame("create", rid="r", kind="group", members=["a" * 65]), "members.0", "r"),
    "create of a chat with oneself": Bad(frame("create", rid="r", kind="direct", members=[]), "members", "r"),
    "create of a chat of three": Bad(frame("create", rid="r", kind="direct", members=["x", "y"]), "members", "r"),
    "create of a direct chat with an id": Bad(
        frame("create", rid="r", kind="direct", members=["x"], conversation_id=UNKNOWN), "conversation_id", "r"
    ),
    "create with an id of version 1": Bad(
        frame("create", rid="r", kind="group", members=[], conversation_id="00000000-0000-1000-8000-000000000000"),
        "conversation_id",
        "r",
    ),
    "create with 501 members": Bad(
        frame("create", rid="r", kind="group", members=[f"u{n}" for n in range(501)]), "members", "r"
    ),
    "create with a nul in the title": Bad(frame("create", rid="r", kind="group", members=[], title="\0"), "title", "r"),
    "create with a title that is none": Bad(frame("create", rid="r", kind="group", members=[], title=7), "title", "r"),
    "create with an unknown history": Bad(
        frame("create", rid="r", kind="group", members=[], history="some"), "history", "r"
    ),
    "watch without on": Bad(frame("watch", conversation_id=CONVERSATION), "on"),
    "watch with a number": Bad(frame("watch", conversation_id=CONVERSATION, on=1), "on"),
    "watch of a bad id": Bad(frame("watch", conversation_id="abc", on=True), "conversation_id"),
    "watch of another's": Bad(frame("watch", conversation_id=FOREIGN, on=True), "conversation_id", None, "not_found"),
    "typing nowhere": Bad(frame("typing"), "conversation_id"),
    "typing of a bad id": Bad(frame("typing", conversation_id=[]), "conversation_id"),
    "typing to another's": Bad(frame("typing", conversation_id=FOREIGN), "conversation_id", None, "not_found"),
    "presence without users": Bad(frame("presence"), "users"),
    "presence of text": Bad(frame("presence", users="ann"), "users"),
    "presence of a bad name": Bad(frame("presence", users=["ok", "a b"]), "users.1"),
    "presence of 201": Bad(frame("presence", users=[f"u{n}" for n in range(201)]), "users"),
    "token is missing": Bad(frame("token"), "token"),
    "token is a number": Bad(frame("token", token=7), "token"),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def place(
    shared_database: Any, stores: Any, shared_prefix: str
) -> AsyncIterator[tuple[House, Gateway, str, dict[str, str]]]:
    async with house(shared_database, stores, shared_prefix, stores.redis_url) as home:
        await home.ingest()
        gateway = await home.gateway(gateway_hello_s=1.0)
        ann = user("ann")
        ids = {CONVERSATION: await home.group(ann), FOREIGN: await home.group(user("bob"))}
        yield home, gateway, ann, ids


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(place: tuple[House, Gateway, str, dict[str, str]]) -> AsyncIterator[Client]:
    """One session for all: whatever is said to it, it goes on."""
    made = await place[1].client(place[2], "of-all")
    yield made
    await made.close()


Place = tuple[House, Gateway, str, dict[str, str]]


async def answered(place: Place, session: Client, bad: Bad) -> None:
    text = bad.text
    if isinstance(text, str):
        for name, found in place[3].items():
            text = text.replace(name, found)
    before = len(session.got)
    await session.socket.send(text)
    error = await _error(session, before)
    assert (error["code"], error.get("field"), error.get("rid")) == (bad.code, bad.field, bad.rid), error
    await session.pong()
    assert len([one for one in session.got[before:] if one["t"] == "error"]) == 1


async def _error(session: Client, before: int) -> dict[str, Any]:
    def errors() -> list[dict[str, Any]]:
        return [one for one in session.got[before:] if one["t"] == "error"]

    return (await until(errors, timeout=10, what="error"))[0]


HELLO: dict[str, dict[str, Any]] = {
    "no device": {},
    "device is a number": {"device_id": 7},
    "device with a space": {"device_id": "a b"},
    "device of 65": {"device_id": "a" * 65},
    "sync is unknown": {"device_id": "d", "sync": "some"},
    "client is a number": {"device_id": "d", "client": 7},
    "cursors are a list": {"device_id": "d", "cursors": []},
    "a negative cursor": {"device_id": "d", "cursors": {UNKNOWN: -1}},
    "a cursor beyond int64": {"device_id": "d", "cursors": {UNKNOWN: 2**63}},
    "a cursor that is text": {"device_id": "d", "cursors": {UNKNOWN: "1"}},
    "a cursor that is a fraction": {"device_id": "d", "cursors": {UNKNOWN: 1.5}},
    "a cursor of three": {"device_id": "d", "cursors": {UNKNOWN: [1, UNKNOWN, "x"]}},
    "a cursor of one": {"device_id": "d", "cursors": {UNKNOWN: [1]}},
    "a cursor without a seq": {"device_id": "d", "cursors": {UNKNOWN: [None, UNKNOWN]}},
    "a cursor with an event id that is none": {"device_id": "d", "cursors": {UNKNOWN: [1, "e"]}},
    "since is a number": {"device_id": "d", "since": 7},
    "10,001 cursors": {"device_id": "d", "cursors": {f"{n:032x}": 1 for n in range(10_001)}},
}


async def refused_hello(place: Place, fields: dict[str, Any]) -> None:
    await closes(place, frame("hello", token=token(place[2]), **fields), 4400)


async def closes(place: Place, text: str | bytes | None, code: int) -> None:
    """What closes a session that has not begun; None: nothing is said."""
    async with connect(place[1].url, max_size=None) as socket:
        if text is not None:
            await socket.send(text)
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 10)
        assert socket.close_code == code, (socket.close_code, socket.close_reason)


async def frame_too_large(place: Place) -> None:
    client = await place[1].client(place[2])
    await client.socket.send(json.dumps({"t": "ping", "rid": "r", "x": "é" * 50_000}, ensure_ascii=False))
    assert await client.closed() == 1009


async def largest_frame(place: Place) -> None:
    client = await place[1].client(place[2])
    text = json.dumps({"t": "ping", "rid": "r", "x": ""})
    await client.socket.send(text.replace('""', '"' + "x" * (98304 - len(text)) + '"'))
    await client.one("pong", rid="r")
    await client.close()


async def token_ends_in_session(place: Place) -> None:
    client = await place[1].open()
    await client.hello(token=token(place[2], ttl_s=-7))
    await client.one("expiring")
    await client.pong()
    assert await client.closed() == 4401


Case = Callable[[Place], Awaitable[None]]

ENDS: dict[str, Case] = {
    "no hello in time": lambda place: closes(place, None, 4408),
    "first frame is not json": lambda place: closes(place, "hi", 4400),
    "first frame is binary": lambda place: closes(place, b"{}", 4400),
    "first frame is a ping": lambda place: closes(place, frame("ping"), 4400),
    "first frame is 10,000 deep": lambda place: closes(place, DEEP, 4400),
    "first frame is huge": lambda place: closes(place, "x" * (1024 * 1024 + 1), 1009),
    "no token": lambda place: closes(place, frame("hello", device_id="d"), 4401),
    "a bad token": lambda place: closes(place, frame("hello", device_id="d", token="x.y.z"), 4401),
    "a token with a lone surrogate": lambda place: closes(
        place, '{"t":"hello","device_id":"d","token":"\\ud800"}', 4400
    ),
    "a token of a user that is none": lambda place: closes(
        place, frame("hello", device_id="d", token=token("a b")), 4401
    ),
    "frame too large": frame_too_large,
    "the largest frame": largest_frame,
    "the token ends in the session": token_ends_in_session,
}


def _case(bad: Bad) -> Callable[[Place, Client], Awaitable[None]]:
    return lambda place, session: answered(place, session, bad)


def _hello(fields: dict[str, Any]) -> Callable[[Place, Client], Awaitable[None]]:
    return lambda place, session: refused_hello(place, fields)


def _end(case: Case) -> Callable[[Place, Client], Awaitable[None]]:
    return lambda place, session: case(place)


CASES = {
    **{name: _case(bad) for name, bad in BAD.items()},
    **{f"hello: {name}": _hello(fields) for name, fields in HELLO.items()},
    **{f"ends: {name}": _end(case) for name, case in ENDS.items()},
}


@pytest.mark.promise("protocol.3.bad_frame", "protocol.9.rid", "protocol.9.cursors", "protocol.9.ranges")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_bad_frame(place: Place, session: Client, name: str) -> None:
    await CASES[name](place, session)
