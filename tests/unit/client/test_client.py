from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from waybill_client import Client, Event, MemoryStore, Timing, errors
from waybill_client.reconnect import retry_after_s
from websockets.asyncio.server import serve

from tests.frames import sdk_watched

from .frames_of_server import CHAT, ME, conversation, event, receipt, welcome
from .stub_server import Stub, stub_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response


class Sleeps(list[float]):
    """Records the waits between connections and makes them short."""

    def __init__(self) -> None:
        self.nine = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        if len(self) == 9:
            self.nine.set()
        await asyncio.sleep(0)


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    one = Stub()
    async with stub_server(one):
        yield one


@pytest.fixture
def sleeps() -> Sleeps:
    return Sleeps()


@pytest.fixture
def timing(sleeps: Sleeps) -> Timing:
    return Timing(lambda: 0.5, sleep=sleeps)


async def take(client: Client, count: int) -> list[Event]:
    events = client.events()
    async with asyncio.timeout(5):
        return [await anext(events) for _ in range(count)]


async def test_hello_send_event_ack(stub: Stub, timing: Timing) -> None:
    seen: list[tuple[str, str, float]] = []
    store = MemoryStore()
    async with Client(
        stub.url, "secret", "d", store, timing=timing, ack_delay_s=0.01, on_frame=lambda *frame: seen.append(frame)
    ) as client:
        await client.ready()
        answer = await client.send(CHAT.upper(), {"text": "grüß", "n": 1})
        assert (answer.seq, answer.duplicate) == (1, False)
        (got,) = await take(client, 1)
        assert (got.seq, got.body, got.sender_id) == (1, {"text": "grüß", "n": 1}, ME)
        await stub.until(lambda: 1 in stub.acked)
        assert client.conversations[CHAT].cursor == 1
        assert client.conversation(CHAT) == client.conversations[CHAT]
        assert len(client.conversations) == 1
        assert client.user_id == ME
    hello = stub.hellos[0]
    assert hello["client"].startswith("waybill-client/")
    assert stub.sockets[0].subprotocol == "waybill.v1"
    assert [json.loads(text)["t"] for way, text, _ in seen if way == "out"][:2] == ["hello", "send"]
    assert next(json.loads(text)["t"] for way, text, _ in seen if way == "in") == "welcome"
    assert not any("secret" in text for _, text, _ in seen)
    assert store.outgoing() == []
    assert isinstance(client.closed, errors.Closed)
    with pytest.raises(StopAsyncIteration):
        await anext(client.events())
    with pytest.raises(errors.Closed):
        await client.send(CHAT, {})


async def test_frames_that_are_not_in_the_document_are_found(stub: Stub, timing: Timing) -> None:
    stub.write(event_id="no UUID")
    own: list[str] = []
    with sdk_watched() as faults:
        async with Client(stub.url, "t", "d", timing=timing, on_frame=lambda way, *_: own.append(way)) as client:
            await take(client, 1)
    (fault,) = faults
    assert fault.startswith("in: event_id: 'no UUID' does not match")
    assert own[:2] == ["out", "in"]


async def test_a_send_is_resent_with_its_id_after_a_loss(stub: Stub, timing: Timing, sleeps: Sleeps) -> None:
    async def cut_the_first(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] == "send" and len(stub.hellos) == 1:
            stub.seqs[frame["client_msg_id"]] = stub.write(sender=ME, client_msg_id=frame["client_msg_id"])
            await socket.close(1011)
            return True
        return False

    stub.on_frame = cut_the_first
    async with Client(stub.url, "t", "d", timing=timing) as client:
        answer = await client.send(CHAT, {"text": "x"})
        assert (answer.seq, answer.duplicate) == (1, True)
        assert [one.seq for one in await take(client, 1)] == [1]
    assert len({frame["client_msg_id"] for frame in stub.got if frame["t"] == "send"}) == 1
    assert len(stub.events) == 1
    assert sleeps == [0.25]
    assert client.stats.resends == 1


async def test_events_go_on_after_a_reconnect_without_repeats(stub: Stub, timing: Timing) -> None:
    for _ in range(5):
        stub.write()
    async with Client(stub.url, "t", "d", timing=timing) as client:
        assert [one.seq for one in await take(client, 5)] == [1, 2, 3, 4, 5]
        stub.write()
        await stub.sockets[0].close(4500)
        assert [one.seq for one in await take(client, 1)] == [6]
    assert stub.hellos[1]["cursors"][CHAT] == [5, "e5"]


async def test_a_store_outlives_the_client(stub: Stub, timing: Timing) -> None:
    for _ in range(4):
        stub.write()
    store = MemoryStore()
    async with Client(stub.url, "t", "d", store, timing=timing) as client:
        assert [one.seq for one in await take(client, 2)] == [1, 2]
        await stub.until(lambda: 4 in stub.acked)
    async with Client(stub.url, "t", "d", store, timing=timing) as client:
        assert [one.seq for one in await take(client, 2)] == [3, 4]
        await client.ready()
    assert stub.hellos[1]["cursors"][CHAT] == [4, "e4"]


async def test_an_error_in_the_block_hands_the_last_event_on_again(stub: Stub, timing: Timing) -> None:
    stub.write()
    store = MemoryStore()
    with contextlib.suppress(ZeroDivisionError):
        async with Client(stub.url, "t", "d", store, timing=timing) as client:
            await take(client, 1)
            raise ZeroDivisionError
    async with Client(stub.url, "t", "d", store, timing=timing) as client:
        assert [one.seq for one in await take(client, 1)] == [1]


async def test_a_message_survives_the_client_that_queued_it(stub: Stub, timing: Timing) -> None:
    store = MemoryStore()
    async with Client("ws://127.0.0.1:9/", "t", "d", store, timing=Timing(lambda: 1.0)) as client:
        with pytest.raises(errors.Unanswered) as failure:
            await client.send(CHAT, {"text": "later"}, client_msg_id="m", timeout_s=0.05)
        assert not failure.value.definite
        with pytest.raises(errors.Unanswered) as failure:
            await client.ready(0.05)
        assert isinstance(failure.value.__cause__, OSError)
    async with Client(stub.url, "t", "d", store, timing=timing) as client:
        await stub.until(lambda: "m" in stub.seqs)
        assert [one.body for one in await take(client, 1)] == [{"text": "later"}]


async def test_closing_tells_those_who_wait(stub: Stub, timing: Timing) -> None:
    client = Client("ws://127.0.0.1:9/", "t", "d", timing=Timing(lambda: 1.0))
    async with client:
        waiting = asyncio.create_task(client.send(CHAT, {}))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(errors.Closed):
            await waiting
    await client.close()


async def test_4401_asks_for_another_token(stub: Stub, timing: Timing, sleeps: Sleeps) -> None:
    async def only_the_third(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] == "hello" and frame["token"] != "t3":
            await socket.close(4401)
            return True
        return False

    given = iter(["t1", "t2", "t3"])

    async def token() -> str:
        return next(given)

    stub.on_frame = only_the_third
    async with Client(stub.url, token, "d", timing=timing) as client:
        await client.ready()
    assert [hello["token"] for hello in stub.hellos] == ["t1", "t2", "t3"]
    assert sleeps == [0.25, 0.5]


async def test_4401_stops_a_client_with_a_fixed_token(stub: Stub, timing: Timing) -> None:
    async def refuse(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        await socket.close(4401)
        return True

    stub.on_frame = refuse
    async with Client(stub.url, "t", "d", timing=timing) as client:
        with pytest.raises(errors.TokenRefused):
            await client.ready()
    assert len(stub.hellos) == 1


async def test_a_provider_may_fail_and_may_stop_the_client(stub: Stub, timing: Timing) -> None:
    answers: list[Exception] = [OSError("the app's own trouble"), errors.Unauthenticated("signed out")]

    async def token() -> str:
        raise answers.pop(0)

    async with Client(stub.url, token, "d", timing=timing) as client:
        with pytest.raises(errors.TokenRefused):
            await client.ready()
    assert answers == []


@pytest.mark.parametrize(
    ("code", "kind"), [(4400, errors.BadHello), (4403, errors.NotAllowed), (4409, errors.Replaced)]
)
async def test_codes_that_stop(stub: Stub, timing: Timing, code: int, kind: type[errors.Closed]) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        await client.ready()
        await stub.sockets[0].close(code)
        with pytest.raises(kind):
            await take(client, 1)
        with pytest.raises(kind):
            await client.send(CHAT, {})
        assert isinstance(client.closed, kind)
        assert client.closed.close_code == code
    assert len(stub.hellos) == 1


async def test_reconnect_is_obeyed_to_the_millisecond(stub: Stub, timing: Timing, sleeps: Sleeps) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        await client.ready()
        await stub.send(stub.sockets[0], {"t": "reconnect", "after_ms": 1234, "reason": "drain"})
        await stub.until(lambda: len(stub.hellos) == 2)
    assert sleeps == [1.234]


async def test_4429_comes_back_slower(stub: Stub, timing: Timing, sleeps: Sleeps) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        await client.ready()
        await stub.sockets[0].close(4429)
        await stub.until(lambda: len(stub.hellos) == 2)
    assert sleeps == [5.25]


@pytest.mark.promise("protocol.3.jitter")
async def test_waits_grow_to_their_cap(sleeps: Sleeps, timing: Timing) -> None:
    async with Client("ws://127.0.0.1:9/", "t", "d", timing=timing):
        async with asyncio.timeout(5):
            await sleeps.nine.wait()
    assert sleeps[:9] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


async def test_a_server_that_never_welcomes_is_left(stub: Stub, sleeps: Sleeps) -> None:
    async def silence(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        return len(stub.hellos) == 1

    stub.on_frame = silence
    async with Client(stub.url, "t", "d", timing=Timing(lambda: 0.5, sleep=sleeps, welcome_s=0.05)) as client:
        await client.ready()
    assert len(stub.hellos) == 2


async def test_expiring_brings_a_fresh_token(stub: Stub, timing: Timing) -> None:
    given = iter(["old", "new"])

    async def token() -> str:
        return next(given)

    async with Client(stub.url, token, "d", timing=timing) as client:
        await client.ready()
        await stub.send(stub.sockets[0], {"t": "expiring", "in_s": 60})
        await stub.until(lambda: {"t": "token", "token": "new"} in stub.got)


async def test_refusals_are_typed(stub: Stub, timing: Timing) -> None:
    async def refuse(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] == "hello":
            return False
        await stub.send(socket, {"t": "error", "rid": frame["rid"], "code": "not_member", "message": "gone"})
        return True

    stub.on_frame = refuse
    store = MemoryStore()
    async with Client(stub.url, "t", "d", store, timing=timing) as client:
        with pytest.raises(errors.NotMember, match="gone"):
            await client.send(CHAT, {"text": "x"})
        with pytest.raises(errors.Refused):
            await client.pull(CHAT, after=0)
    (kept,) = store.outgoing()
    assert (kept.state, kept.error) == ("refused", "not_member")


@pytest.mark.parametrize("body", [{"n": float("nan")}, {"s": "\ud800"}, {"o": object()}])
async def test_no_json_never_leaves(stub: Stub, timing: Timing, body: dict[str, Any]) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        with pytest.raises(errors.BadRequest):
            await client.send(CHAT, body)


async def test_create_gives_a_group_its_id(stub: Stub, timing: Timing) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        group = await client.create("group", ["bob"], title="T", history="all")
        assert UUID(group.conversation_id).version == 4
        await client.create("direct", ["bob"])
    first, second = stub.got
    assert (first["members"], first["title"], first["history"]) == (["bob"], "T", "all")
    assert "conversation_id" not in second


async def test_pull_returns_a_page_and_moves_nothing(stub: Stub, timing: Timing) -> None:
    for _ in range(3):
        stub.write()
    async with Client(stub.url, "t", "d", timing=timing) as client:
        await client.ready()
        page = await client.pull(CHAT, before=3, limit=1)
        assert ([one.seq for one in page.events], page.next, page.complete) == ([2], 2, False)
        with pytest.raises(ValueError, match="exactly one"):
            await client.pull(CHAT)
        assert [one.seq for one in await take(client, 3)] == [1, 2, 3]


async def test_marks_and_receipts(stub: Stub, timing: Timing) -> None:
    stub.write()
    async with Client(stub.url, "t", "d", timing=timing) as client:
        await take(client, 1)
        await client.read(CHAT, 1)
        await client.unread(CHAT, 0)
        with pytest.raises(ValueError, match="not known"):
            await client.read(CHAT, 2)
        await stub.until(lambda: [one["t"] for one in stub.got if "read" in one["t"]] == ["read", "unread"])
        await stub.send(stub.sockets[0], receipt("bob", 1, 0, 1))
        async with asyncio.timeout(5):
            grown = await anext(client.receipts())
        assert (grown.user_id, grown.delivered_seq, grown.read_seq) == ("bob", 1, 1)
        mark = client.conversations[CHAT]
        assert (mark.read_version, mark.read_seq) == (1, 0)


async def test_watch_typing_and_presence(stub: Stub, timing: Timing) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        await client.watch(CHAT.upper())
        await client.presence(user for user in ("bob", "bob", "carl"))
        await client.ready()
        await client.typing(CHAT)
        await client.typing(CHAT)
        await client.watch(CHAT, on=False)
        with pytest.raises(ValueError, match="200"):
            await client.presence(f"u{number}" for number in range(201))
        await stub.until(lambda: len(stub.got) == 4)
        assert stub.got == [
            {"t": "watch", "conversation_id": CHAT, "on": True},
            {"t": "presence", "users": ["bob", "carl"]},
            {"t": "typing", "conversation_id": CHAT},
            {"t": "watch", "conversation_id": CHAT, "on": False},
        ]
        typing_ = {"t": "typing", "conversation_id": CHAT, "for_ms": 5000}
        presence = {"t": "presence", "user_id": "bob", "online": True, "since": None}
        for frame in ({**typing_, "user_id": "gone", "for_ms": 0}, {**typing_, "user_id": "bob"}, presence):
            await stub.send(stub.sockets[-1], frame)
        async with asyncio.timeout(5):
            assert (await anext(client.typings())).user_id == "bob"
            assert (await anext(client.presences())).online is True
            await stub.send(stub.sockets[-1], {**presence, "online": None})
            assert (await anext(client.presences())).online is None
    for iterator in (client.typings(), client.presences()):
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
    with pytest.raises(errors.Closed):
        await client.typing(CHAT)


async def test_a_refused_upgrade_is_waited_for_as_long_as_it_says(sleeps: Sleeps, timing: Timing) -> None:
    async def busy(connection: ServerConnection, _: Request) -> Response:
        response = connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "the server drains")
        response.headers["Retry-After"] = "7"
        return response

    async with serve(lambda _: asyncio.sleep(0), "127.0.0.1", 0, process_request=busy) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"ws://127.0.0.1:{port}/", "t", "d", timing=timing):
            async with asyncio.timeout(5):
                await sleeps.nine.wait()
    assert sleeps[:3] == [7.25, 7.5, 8.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("0", 0),
        ("20", 20),
        ("99999", 300),
        ("-1", 0),
        ("1.5", 0),
        ("Fri, 31 Dec 1999", 0),
        ("²", 0),
    ],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


async def test_the_app_may_ack_itself(stub: Stub, timing: Timing) -> None:
    for _ in range(3):
        stub.write()
    async with Client(stub.url, "t", "d", timing=timing, auto_ack=False, ack_delay_s=0.01) as client:
        await take(client, 3)
        await client.ack(CHAT, [(1, 2)])
        await stub.until(lambda: bool(stub.acked))
    assert stub.acked == {1, 2}


async def test_a_slow_app_closes_the_window_but_gets_its_answers(stub: Stub, timing: Timing) -> None:
    stub.window = 8
    stub.limits = {"window": 8}
    for _ in range(60):
        stub.write()
    async with Client(stub.url, "t", "d", timing=timing, max_queued=10, ack_events=1) as client:
        await stub.until(lambda: stub.pushed >= 16)
        await asyncio.sleep(0.05)
        assert stub.pushed < 30
        assert client.stats.acks_held > 0
        sent = await client.send(CHAT, {"text": "while nothing is taken"})
        assert sent.seq == 61
        assert [one.seq for one in await take(client, 61)] == list(range(1, 62))


async def test_a_server_without_a_window_is_not_read_from(stub: Stub, timing: Timing) -> None:
    stub.limits = {"window": 2}
    for _ in range(100):
        stub.write()
    async with Client(stub.url, "t", "d", timing=timing, max_queued=4) as client:
        await asyncio.sleep(0.1)
        assert client.stats.events < 20
        assert [one.seq for one in await take(client, 100)] == list(range(1, 101))


async def test_a_client_that_takes_no_events_still_acks(stub: Stub, timing: Timing) -> None:
    for _ in range(30):
        stub.write()
    store = MemoryStore()
    async with Client(stub.url, "t", "d", store, timing=timing, deliver=False, max_queued=5, ack_delay_s=0.01):
        await stub.until(lambda: len(stub.acked) == 30)
    (saved,), _ = await store.load()
    assert (saved.last_pulled_seq, saved.last_rendered_seq) == (30, 30)


async def test_a_reset_finds_the_last_common_event_and_sends_again(stub: Stub, timing: Timing) -> None:
    rewinds: list[tuple[str, int]] = []
    async with Client(
        stub.url, "t", "d", timing=timing, ack_delay_s=0.01, on_rewind=lambda *what: rewinds.append(what)
    ) as client:
        stub.write()
        await client.ready()
        await client.send(CHAT, {"text": "will be lost"}, client_msg_id="mine")
        assert [one.seq for one in await take(client, 2)] == [1, 2]
        await stub.until(lambda: 2 in stub.acked)
        stub.events[1:] = [event(2, event_id="of another timeline")]
        stub.seqs.clear()

        async def reset(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
            if frame["t"] == "hello" and frame["cursors"][CHAT] == [2, "e2"]:
                await stub.send(socket, welcome())
                await stub.send(socket, conversation(2, 0, reset=True))
                return True
            return False

        stub.on_frame = reset
        await stub.sockets[0].close(1011)
        assert [(one.seq, one.event_id) for one in await take(client, 2)] == [(2, "of another timeline"), (3, "e3")]
        assert stub.events[2]["client_msg_id"] == "mine"
        assert rewinds == [(CHAT, 1)]


async def test_a_store_that_fails_stops_the_client(stub: Stub, timing: Timing) -> None:
    class Broken(MemoryStore):
        async def save(self, *_: Any) -> None:
            raise OSError("disk full")

    stub.write()
    async with Client(stub.url, "t", "d", Broken(), timing=timing) as client:
        with pytest.raises(errors.Crashed, match="disk full"):
            await take(client, 1)
    assert stub.acked == set()


async def test_two_loops_at_once_are_refused(stub: Stub, timing: Timing) -> None:
    async with Client(stub.url, "t", "d", timing=timing) as client:
        waiting = asyncio.create_task(anext(client.events()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            await anext(client.events())
        waiting.cancel()
        await asyncio.wait([waiting])
        stub.write()
        await client.ready()
        await stub.push()
        assert [one.seq for one in await take(client, 1)] == [1]


async def test_a_cancelled_send_still_leaves(stub: Stub, timing: Timing) -> None:
    async def later(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        return frame["t"] == "send" and len(stub.hellos) == 1

    stub.on_frame = later
    async with Client(stub.url, "t", "d", timing=timing) as client:
        sending = asyncio.create_task(client.send(CHAT, {"text": "x"}, client_msg_id="m"))
        await stub.until(lambda: any(frame["t"] == "send" for frame in stub.got))
        sending.cancel()
        await asyncio.wait([sending])
        await stub.sockets[0].close(1011)
        assert (await client.send(CHAT, {"text": "x"}, client_msg_id="m")).seq == 1
        assert len(stub.events) == 1


async def test_pending_requests_are_bounded() -> None:
    async with Client("ws://127.0.0.1:9/", "t", "d", max_pending=1, timing=Timing(lambda: 1.0)) as client:
        first = asyncio.create_task(client.send(CHAT, {}))
        await asyncio.sleep(0.01)
        with pytest.raises(errors.QueueFull):
            await client.send(CHAT, {})
        await client.close()
        await asyncio.wait([first])
        assert isinstance(first.exception(), errors.Closed)


def test_a_wrong_url_or_sync_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="WebSocket URL"):
        Client("http://127.0.0.1", "t", "d")
    with pytest.raises(ValueError, match="sync"):
        Client("ws://127.0.0.1", "t", "d", sync="some")
