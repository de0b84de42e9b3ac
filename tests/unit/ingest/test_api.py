"""The HTTP door without a store: what is wrong is named, and the door stays open."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import jwt
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from services.ingest.admission import Send
from services.ingest.api import Door, public_app
from services.ingest.conversations import ConversationState, Plan
from services.ingest.writer import Answer, Written
from shared.auth import Verifier, mint
from shared.errors import UnavailableError
from shared.readers import Reader, Readers
from shared.runtime import http
from shared.settings import AuthSettings
from shared.timeline import Page
from tests.ingest import SECRET, free_port

GROUP = "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"
LIMIT = 200_000

pytestmark = pytest.mark.asyncio(loop_scope="module")


class FakeLanes:
    """Writes nothing, but says it did. A conversation can be made to fail."""

    def __init__(self) -> None:
        self.sends: list[Send] = []
        self.error: Exception | None = None

    async def send(self, sends: Sequence[Send]) -> list[Answer]:
        if self.error is not None:
            raise self.error
        self.sends.extend(sends)
        return [
            Written(
                conversation_id=send.draft.conversation_id,
                client_msg_id=send.draft.client_msg_id,
                event_id=GROUP,
                seq=at + 1,
                created_at="2026-01-01T00:00:00.000000Z",
                duplicate=False,
            )
            for at, send in enumerate(sends)
        ]


class FakeConversations:
    async def create(self, planned: Plan) -> bool:
        return False

    async def state(self, conversation_id: str, reader: str | None) -> ConversationState:
        raise RuntimeError("a secret of ours")


async def fake_page(conversation_id: str, user_id: str | None, /, **asked: int | None) -> Page:
    return Page(conversation_id, [json.dumps([user_id, asked]).encode()], 1, 2, complete=True)


async def fake_readers(conversation_id: str, user_id: str | None, /, **asked: Any) -> Readers:
    return Readers(conversation_id, asked["seq"], 1, 1, 1, [Reader(f"{user_id} {asked}", 1, 1, 0)], None)


async def unasked(*_: Any, **__: Any) -> Any:
    raise AssertionError("nobody asks for it here")


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, lanes: FakeLanes) -> None:
        self.session, self.url, self.lanes = session, url, lanes

    async def call(self, method: str, path: str, token: str | None = "", **kwargs: Any) -> tuple[int, Any]:
        headers = kwargs.pop("headers", {})
        if token is not None:
            headers = {"authorization": f"Bearer {token or mint(SECRET, 'ann')}"} | headers
        async with self.session.request(method, self.url + path, headers=headers, **kwargs) as answer:
            content = json.loads(await answer.read())
            if answer.status >= 400:
                assert answer.content_type == "application/problem+json"
                assert content["status"] == answer.status
                assert {"type", "title", "detail", "code"} <= set(content)
            return answer.status, content

    async def item(self, text: str | bytes) -> Any:
        raw = text.encode() if isinstance(text, str) else text
        status, content = await self.call("POST", "/v1/events", data=b'{"events":[%b]}' % raw)
        assert status == 200, content
        return content["results"][0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[Client]:
    lanes, port = FakeLanes(), free_port()
    behind = Door(
        verifier=Verifier(AuthSettings(auth_secret=SECRET)),
        lanes=lanes,
        conversations=FakeConversations(),
        pages=fake_page,
        readers=fake_readers,
        history=unasked,
        set_settings=unasked,
        unread=unasked,
        digest_key=b"a digest key for tests",
        max_body=64 * 1024,
        max_request=LIMIT,
    )
    async with http(public_app(behind), "127.0.0.1", port), aiohttp.ClientSession() as session:
        yield Client(session, f"http://127.0.0.1:{port}", lanes)


@pytest.fixture
def client(door: Client) -> Client:
    door.lanes.sends.clear()
    door.lanes.error = None
    return door


def item(**fields: Any) -> str:
    return json.dumps({"conversation_id": GROUP, "client_msg_id": "one", "body": {"text": "hi"}} | fields)


def with_body(body: str) -> str:
    return item(body=0).replace('"body": 0', f'"body": {body}')


DEEP = "[" * 10_000 + "]" * 10_000

BAD_ITEMS: dict[str, tuple[str, str | None]] = {
    "not an object": ("5", None),
    "null": ("null", None),
    "no conversation": ('{"client_msg_id":"one","body":{}}', "conversation_id"),
    "no client id": (f'{{"conversation_id":"{GROUP}","body":{{}}}}', "client_msg_id"),
    "conversation of a wrong type": (item(conversation_id=5), "conversation_id"),
    "conversation is no UUID": (item(conversation_id="x"), "conversation_id"),
    "UUID without hyphens": (item(conversation_id=GROUP.replace("-", "")), "conversation_id"),
    "UUID with a line feed": (item(conversation_id=GROUP + "\n"), "conversation_id"),
    "client id with a space": (item(client_msg_id="a b"), "client_msg_id"),
    "client id of 65": (item(client_msg_id="a" * 65), "client_msg_id"),
    "client id empty": (item(client_msg_id=""), "client_msg_id"),
    "client id with NUL": (item(client_msg_id="a\0"), "client_msg_id"),
    "client id is a number": (item(client_msg_id=1), "client_msg_id"),
    "client id is reserved": (item(client_msg_id=f"create:{GROUP}"), "client_msg_id"),
    "sender with a space": (item(sender_id="a b"), "sender_id"),
    "sender of 65": (item(sender_id="a" * 65), "sender_id"),
    "unknown type": (item(type="shout"), "type"),
    "type is null": (item(type=None), "type"),
    "no body": (f'{{"conversation_id":"{GROUP}","client_msg_id":"one"}}', "body"),
    "body null": (item(body=None), "body"),
    "body is an array": (item(body=[]), "body"),
    "body is a string": (item(body="hi"), "body"),
    "body holds a name twice": (with_body('{"a":1,"a":2}'), "body"),
    "body holds a name twice, deep": (with_body('{"x":[{"a":1,"\\u0061":2}]}'), "body"),
    "body holds NUL": (item(body={"text": "a\0b"}), "body"),
    "body holds NUL in a name": (item(body={"a\0": 1}), "body"),
    "body holds half a surrogate": (with_body('{"a":"\\ud800"}'), "body"),
    "body holds the other half": (with_body('{"a":"\\udc00x"}'), "body"),
    "body holds NaN": (with_body('{"a":NaN}'), "body"),
    "body holds Infinity": (with_body('{"a":-Infinity}'), "body"),
    "body holds 01": (with_body('{"a":01}'), "body"),
    "body of 65 levels": (with_body('{"a":' * 65 + "1" + "}" * 65), "body"),
    "body of 10,000 levels": (with_body(f'{{"a":{DEEP}}}'), "body"),
    "body is 10,000 levels": (with_body(DEEP), "body"),
    "message with a target": (item(target_seq=1), "target_seq"),
    "edit without a target": (item(type="edit"), "target_seq"),
    "edit without a body": (item(type="edit", target_seq=1, body=None), "body"),
    "recall with a body": (item(type="recall", target_seq=1), "body"),
    "delete without a target": (item(type="delete", body=None), "target_seq"),
    "target 0": (item(type="edit", target_seq=0), "target_seq"),
    "target negative": (item(type="edit", target_seq=-1), "target_seq"),
    "target beyond int64": (item(type="edit", target_seq=2**63), "target_seq"),
    "target far beyond": (item(type="edit", target_seq=10**30), "target_seq"),
    "target a fraction": (item(type="edit", target_seq=1.5), "target_seq"),
    "target a string": (item(type="edit", target_seq="1"), "target_seq"),
    "target a boolean": (item(type="edit", target_seq=True), "target_seq"),
    "member without an action": (item(type="member", body={}), "body.action"),
    "member with an unknown action": (item(type="member", body={"action": "ban"}), "body.action"),
    "member with a number": (item(type="member", body={"action": 1}), "body.action"),
    "add nobody": (item(type="member", body={"action": "add"}), "body.user_id"),
    "add a bad name": (item(type="member", body={"action": "add", "user_id": "a b"}), "body.user_id"),
    "add with a bad role": (item(type="member", body={"action": "add", "user_id": "b", "role": "king"}), "body.role"),
    "role without a role": (item(type="member", body={"action": "role", "user_id": "b"}), "body.role"),
    "leave for another": (item(type="member", body={"action": "leave", "user_id": "bob"}), "body.user_id"),
    "conversation with an action": (item(type="conversation", body={"action": "create"}), "body.action"),
    "title is a number": (item(type="conversation", body={"title": 5}), "body.title"),
    "title of 257": (item(type="conversation", body={"title": "x" * 257}), "body.title"),
    "traceparent": (item(traceparent="00-x"), "traceparent"),
}


@pytest.mark.promise("protocol.6.bad_body", "protocol.6.events", "protocol.1.ids", "protocol.1.body_refused")
@pytest.mark.parametrize(("text", "field"), BAD_ITEMS.values(), ids=BAD_ITEMS)
async def test_a_bad_item_fails_alone(client: Client, text: str, field: str | None) -> None:
    good = item(client_msg_id="good")
    status, content = await client.call("POST", "/v1/events", data=f'{{"events":[{good},{text},{good}]}}'.encode())
    assert status == 200, content
    before, result, after = content["results"]
    assert (before["status"], after["status"]) == (201, 201)
    assert (result["status"], result["error"]["code"]) == (400, "bad_request")
    assert result["error"].get("field") == field
    assert len(client.lanes.sends) == 2


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello",
    "binary": b"\x00\xff\xfe",
    "cut off": b'{"events":[{"conv',
    "an array": b"[]",
    "a number": b"5",
    "null": b"null",
    "no events": b"{}",
    "events null": b'{"events":null}',
    "events an object": b'{"events":{}}',
    "events twice closed": b'{"events":[]}}',
    "NaN outside the items": b'{"x":NaN,"events":[]}',
    "a trailing comma": b'{"events":[],}',
    "10,000 levels": DEEP.encode(),
    "501 events": b'{"events":[%b]}' % b",".join([b"{}"] * 501),
    "broken and large": b'{"events":[' + b'"' * 150_001,
}


@pytest.mark.promise("protocol.6.bad_body", "protocol.4.problem")
@pytest.mark.parametrize("text", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_a_body_that_is_wrong_as_a_whole(client: Client, text: bytes) -> None:
    status, content = await client.call("POST", "/v1/events", data=text)
    assert (status, content["code"], content["field"]) == (400, "bad_request", "events")
    assert client.lanes.sends == []
    assert (await client.item(item()))["status"] == 201


async def test_invalid_utf_8_in_an_item(client: Client) -> None:
    result = await client.item(item(body={"text": "??"}).encode().replace(b"??", b"\xff\xfe"))
    assert (result["status"], result["error"]["field"]) == (400, "body")


@pytest.mark.promise("protocol.1.body_size")
async def test_sizes(client: Client) -> None:
    fits = '{"text":"' + "x" * (64 * 1024 - 11) + '"}'
    assert len(fits) == 64 * 1024
    assert (await client.item(with_body(f" {fits}\n")))["status"] == 201
    result = await client.item(with_body(fits.replace("x", "é", 1)))
    assert (result["status"], result["error"]["code"], result["error"]["field"]) == (413, "too_large", "body")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * (LIMIT // 5)

    for data in (b" " * (LIMIT + 1), chunks()):
        status, content = await client.call("POST", "/v1/events", data=data)
        assert (status, content["code"]) == (413, "too_large")
    assert (await client.item(item()))["status"] == 201


BAD_CREATES: dict[str, tuple[Any, str]] = {
    "not an object": ([], "members"),
    "no kind": ({"members": []}, "kind"),
    "unknown kind": ({"kind": "club", "members": []}, "kind"),
    "no members": ({"kind": "group"}, "members"),
    "members a string": ({"kind": "group", "members": "bob"}, "members"),
    "a member with a space": ({"kind": "group", "members": ["bob", "a b"]}, "members.1"),
    "a member of 65": ({"kind": "group", "members": ["a" * 65]}, "members.0"),
    "501 members": ({"kind": "group", "members": [f"u{n}" for n in range(501)]}, "members"),
    "direct with nobody": ({"kind": "direct", "members": []}, "members"),
    "direct with oneself": ({"kind": "direct", "members": ["ann"]}, "members"),
    "direct with two others": ({"kind": "direct", "members": ["bob", "cid"]}, "members"),
    "direct with an id": ({"kind": "direct", "members": ["bob"], "conversation_id": GROUP}, "conversation_id"),
    "id is no UUID": ({"kind": "group", "members": [], "conversation_id": "x"}, "conversation_id"),
    "id of version 1": (
        {"kind": "group", "members": [], "conversation_id": "6fa459ea-ee8a-11ee-894e-db77e160355e"},
        "conversation_id",
    ),
    "id of version 5": (
        {"kind": "group", "members": [], "conversation_id": "886313e1-3b8a-5372-9b90-0c9aee199e5d"},
        "conversation_id",
    ),
    "nil id": (
        {"kind": "group", "members": [], "conversation_id": "0" * 8 + "-0000-0000-0000-" + "0" * 12},
        "conversation_id",
    ),
    "title of 257": ({"kind": "group", "members": [], "title": "x" * 257}, "title"),
    "title with NUL": ({"kind": "group", "members": [], "title": "a\0"}, "title"),
    "title a number": ({"kind": "group", "members": [], "title": 5}, "title"),
    "unknown history": ({"kind": "group", "members": [], "history": "none"}, "history"),
    "creator with a space": ({"kind": "group", "members": [], "creator_id": "a b"}, "creator_id"),
}


@pytest.mark.promise("protocol.6.bad_body", "protocol.3.create")
@pytest.mark.parametrize(("body", "field"), BAD_CREATES.values(), ids=BAD_CREATES)
async def test_a_bad_create(client: Client, body: Any, field: str) -> None:
    status, content = await client.call("POST", "/v1/conversations", json=body)
    assert (status, content["code"], content["field"]) == (400, "bad_request", field)
    assert (await client.call("POST", "/v1/conversations", json={"kind": "group", "members": []}))[0] == 201


async def test_a_create_that_is_not_json(client: Client) -> None:
    for data in (b"", b"{", b'{"title":"\\ud800"}', DEEP.encode(), b"\xff"):
        status, content = await client.call("POST", "/v1/conversations", data=data)
        assert (status, content["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "after"),
        ("after=1&before=2", "after"),
        ("after=-1", "after"),
        ("after=x", "after"),
        ("after=", "after"),
        ("after=1.0", "after"),
        ("after=+1", "after"),
        ("after=%D9%A1", "after"),
        (f"after={2**63}", "after"),
        ("before=0", "before"),
        (f"before={10**30}", "before"),
        ("after=1&limit=0", "limit"),
        ("after=1&limit=501", "limit"),
        ("after=1&limit=x", "limit"),
    ],
)
async def test_a_bad_page(client: Client, query: str, field: str) -> None:
    status, content = await client.call("GET", f"/v1/conversations/{GROUP}/events?{query}")
    assert (status, content["code"], content["field"]) == (400, "bad_request", field)


@pytest.mark.promise("protocol.6.receipts")
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "seq"),
        ("seq=0", "seq"),
        (f"seq={2**63}", "seq"),
        ("seq=x", "seq"),
        ("seq=1&state=seen", "state"),
        ("seq=1&state=", "state"),
        ("seq=1&after=", "after"),
        ("seq=1&after=a%20b", "after"),
        ("seq=1&after=" + "a" * 65, "after"),
        ("seq=1&limit=0", "limit"),
        ("seq=1&limit=501", "limit"),
    ],
)
async def test_bad_receipts(client: Client, query: str, field: str) -> None:
    status, content = await client.call("GET", f"/v1/conversations/{GROUP}/receipts?{query}")
    assert (status, content["code"], content["field"]) == (400, "bad_request", field)


@pytest.mark.promise("protocol.6.receipts")
async def test_receipts_are_asked_for(client: Client) -> None:
    path = f"/v1/conversations/{GROUP.upper()}/receipts"
    for query, token, asked in (
        ("seq=7", "", "ann {'seq': 7, 'state': 'read', 'after': None, 'limit': 100}"),
        (
            f"seq={2**63 - 1}&state=unread&after=bob&limit=500",
            mint(SECRET, "shop", scope="service"),
            f"None {{'seq': {2**63 - 1}, 'state': 'unread', 'after': 'bob', 'limit': 500}}",
        ),
    ):
        status, content = await client.call("GET", f"{path}?{query}", token=token)
        assert (status, content["conversation_id"], content["users"][0]["user_id"]) == (200, GROUP, asked)
        assert set(content) == {"conversation_id", "seq", "members", "delivered", "read", "users", "next"}
    for scope in ("admin", "gateway"):
        token = mint(SECRET, "root", scope=scope)
        assert (await client.call("GET", f"{path}?seq=1", token=token))[0] == 403
    assert (await client.call("GET", f"/v1/conversations/{GROUP[:-1]}/receipts?seq=1"))[1]["field"] == "conversation_id"
    assert (await client.call("GET", f"{path}?seq=1", token=None))[0] == 401


async def test_a_page_is_asked_for(client: Client) -> None:
    path = f"/v1/conversations/{GROUP.upper()}/events"
    for query, token, asked in (
        ("after=0", "", ["ann", {"limit": 100, "after": 0}]),
        (f"before={2**63 - 1}&limit=500", "", ["ann", {"limit": 500, "before": 2**63 - 1}]),
        ("after=3&limit=1", mint(SECRET, "shop", scope="service"), [None, {"limit": 1, "after": 3}]),
    ):
        told = {"conversation_id": GROUP, "events": [asked], "next": 1, "head": 2, "complete": True}
        assert await client.call("GET", f"{path}?{query}", token) == (200, told)
    for suffix in ("", "/events?after=0"):
        status, content = await client.call("GET", f"/v1/conversations/x y{suffix}")
        assert (status, content["code"], content["field"]) == (400, "bad_request", "conversation_id")


@pytest.mark.promise("protocol.2.token", "protocol.4.problem")
async def test_tokens(client: Client) -> None:
    now = int(time.time())

    def signed(secret: str = SECRET, **claims: Any) -> str:
        return jwt.encode({"sub": "ann", "exp": now + 60} | claims, secret, algorithm="HS256")

    bad: list[str | None] = [
        None,
        "x",
        jwt.encode({"sub": "ann", "exp": now + 60}, None, algorithm="none"),
        signed("another secret of at least 32 bytes"),
        signed(exp=now - 60),
        signed(nbf=now + 60),
        signed(sub="a b"),
        signed(scope="king"),
        jwt.encode({"sub": "ann"}, SECRET, algorithm="HS256"),
    ]
    for token in bad:
        for method, path in (
            ("POST", "/v1/events"),
            ("POST", "/v1/conversations"),
            ("GET", f"/v1/conversations/{GROUP}"),
            ("GET", f"/v1/conversations/{GROUP}/events?after=0"),
        ):
            status, content = await client.call(method, path, token, json={"events": []} if method == "POST" else None)
            assert (status, content["code"]) == (401, "unauthenticated"), token
    async with client.session.post(f"{client.url}/v1/events", headers={"authorization": "Basic x"}) as answer:
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.lanes.sends == []
    assert (await client.call("POST", "/v1/events", signed(exp=now - 5), json={"events": []}))[0] == 200


@pytest.mark.promise("protocol.4.problem")
async def test_the_frameworks_own_errors_are_problems_too(client: Client) -> None:
    for method, path, expected in (
        ("GET", "/nowhere", (404, "not_found")),
        ("PUT", "/v1/events", (405, "bad_request")),
        ("DELETE", f"/v1/conversations/{GROUP}", (405, "bad_request")),
    ):
        status, content = await client.call(method, path)
        assert (status, content["code"]) == expected


@pytest.mark.promise("protocol.4.problem", "protocol.4.indefinite")
async def test_unavailable_says_when_to_come_back(client: Client) -> None:
    client.lanes.error = UnavailableError("too many", retry_after_ms=1200)
    headers = {"authorization": f"Bearer {mint(SECRET, 'ann')}"}
    data = f'{{"events":[{item()}]}}'
    async with client.session.post(f"{client.url}/v1/events", data=data, headers=headers) as answer:
        content = await answer.json(content_type="application/problem+json")
        assert (answer.status, content["code"], content["retry_after_ms"]) == (503, "unavailable", 1200)
        assert int(answer.headers["retry-after"]) == math.ceil(1.2)


async def test_a_fault_of_ours_is_told_without_its_words(client: Client) -> None:
    with capture_logs() as logged:
        status, content = await client.call("GET", f"/v1/conversations/{GROUP}")
    assert [entry["log_level"] for entry in logged] == ["error"]
    assert (status, content["code"]) == (500, "internal")
    assert "secret" not in json.dumps(content)
    assert (await client.item(item()))["status"] == 201


async def test_events_in_any_case_and_with_unknown_fields(client: Client) -> None:
    result = await client.item(item(conversation_id=GROUP.upper(), future={"x": [1]}))
    assert result["event"] == {
        "conversation_id": GROUP,
        "client_msg_id": "one",
        "event_id": GROUP,
        "seq": 1,
        "created_at": "2026-01-01T00:00:00.000000Z",
        "duplicate": False,
    }
    assert await client.call("POST", "/v1/events", json={"events": [], "future": 1}) == (200, {"results": []})


async def test_openapi_describes_bodies_and_problems(client: Client) -> None:
    _, document = await client.call("GET", "/openapi.json", None)
    operation = document["paths"]["/v1/events"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Sends"}
    assert "application/problem+json" in operation["responses"]["default"]["content"]
    assert {"Sends", "SendItem", "Create", "Results", "PageFields", "Conversation", "HttpProblem"} <= set(
        document["components"]["schemas"]
    )
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
    async with client.session.get(f"{client.url}/docs") as answer:
        assert answer.status == 200


async def test_a_large_request_lets_others_in_between(client: Client) -> None:
    """Parsing is done in slices: a small request that comes later is not held up until all is parsed."""
    big = [json.loads(item(client_msg_id=str(n), body={"text": "x" * 300})) for n in range(400)]
    answers = await asyncio.gather(
        client.call("POST", "/v1/events", json={"events": big}), *(client.item(item()) for _ in range(5))
    )
    assert answers[0][0] == 200
