"""The doors to what a user has for itself, without a store: who may act for whom, and what is wrong is named."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fastapi import FastAPI

from services.ingest import own_api
from services.ingest.member_settings import OwnSettings, SettingsRequest
from services.ingest.unread import Totals, Unread
from shared import problems
from shared.auth import Scope, Verifier, mint
from shared.runtime import http
from shared.settings import AuthSettings
from tests.ingest import SECRET, free_port

GROUP = "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"
PATH = f"/v1/conversations/{GROUP.upper()}/settings"
MOMENT = "2026-12-01T08:00:00+01:00"

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Behind:
    """Takes everything, and keeps what it was asked."""

    def __init__(self) -> None:
        self.verifier = Verifier(AuthSettings(auth_secret=SECRET))
        self.asked: list[tuple[Any, ...]] = []

    async def set_settings(
        self, conversation_id: str, user_id: str, request: SettingsRequest, /, *, trace_id: str | None
    ) -> OwnSettings:
        until = request.until()
        self.asked.append(
            (conversation_id, user_id, request.muted, until, request.archived, request.device_id, trace_id)
        )
        return OwnSettings(conversation_id, True, None, False)

    async def unread(self, user_id: str, /) -> Totals:
        self.asked.append((user_id,))
        return Totals(user_id, 3, 2, Unread(1, 1))


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, behind: Behind) -> None:
        self.session, self.url, self.behind = session, url, behind

    async def call(
        self, method: str, path: str, user: str | None = "ann", scope: Scope = "user", **more: Any
    ) -> tuple[int, Any]:
        headers = more.pop("headers", {}) | (
            {} if user is None else {"authorization": f"Bearer {mint(SECRET, user, scope=scope)}"}
        )
        async with self.session.request(method, self.url + path, headers=headers, **more) as answer:
            return answer.status, json.loads(await answer.read())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> AsyncIterator[Client]:
    behind, port, app = Behind(), free_port(), FastAPI()
    problems.install(app)
    own_api.add(app, behind, {})
    async with http(app, "127.0.0.1", port), aiohttp.ClientSession() as session:
        yield Client(session, f"http://127.0.0.1:{port}", behind)


@pytest.fixture
def client(opened: Client) -> Client:
    opened.behind.asked.clear()
    return opened


@pytest.mark.promise("protocol.6.settings")
async def test_settings_are_asked_for(client: Client) -> None:
    trace = "a" * 32
    headers = {"traceparent": f"00-{trace}-{'b' * 16}-01"}
    assert await client.call("PUT", PATH, json={"muted": True, "muted_until": MOMENT}, headers=headers) == (
        200,
        {"conversation_id": GROUP, "muted": True, "muted_until": None, "archived": False},
    )
    [(conversation_id, user_id, muted, until, *rest)] = client.behind.asked
    assert (conversation_id, user_id, muted, rest) == (GROUP, "ann", True, [None, None, trace])
    assert until.isoformat() == "2026-12-01T07:00:00+00:00"


@pytest.mark.promise("protocol.6.settings")
@pytest.mark.parametrize(
    ("user", "scope", "named", "answer"),
    [
        ("ann", "user", {}, "ann"),
        ("ann", "user", {"user_id": "ann", "device_id": "phone"}, "ann"),
        ("shop", "service", {"user_id": "ann", "device_id": "phone"}, "ann"),
        ("gw", "gateway", {"user_id": "ann", "device_id": "phone"}, "ann on phone"),
        ("ann", "user", {"user_id": "bob"}, (403, "user_id")),
        ("shop", "service", {}, (400, "user_id")),
        ("gw", "gateway", {"device_id": "phone"}, (400, "user_id")),
        ("root", "admin", {"user_id": "ann"}, (403, None)),
        (None, "user", {}, (401, None)),
    ],
)
async def test_whose_settings_one_may_set(
    client: Client, user: str | None, scope: Scope, named: dict[str, str], answer: str | tuple[int, str | None]
) -> None:
    status, content = await client.call("PUT", PATH, user, scope, json={"archived": True, **named})
    if isinstance(answer, tuple):
        assert (status, content.get("field")) == answer
        assert client.behind.asked == []
        return
    [(_, user_id, _, _, archived, device_id, _)] = client.behind.asked
    assert (status, archived) == (200, True)
    assert answer == user_id + ("" if device_id is None else f" on {device_id}")


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "muted"),
    "not JSON": (b"{", "muted"),
    "an array": (b"[]", "muted"),
    "nothing to set": (b"{}", "muted"),
    "nulls": (b'{"muted":null,"archived":null}', "muted"),
    "muted a number": (b'{"muted":1}', "muted"),
    "archived a string": (b'{"archived":"true"}', "archived"),
    "a time alone": (b'{"muted_until":"2026-12-01T08:00:00Z"}', "muted"),
    "a time of what is not muted": (b'{"muted":false,"muted_until":"2026-12-01T08:00:00Z"}', "muted_until"),
    "a time beside archived": (b'{"archived":true,"muted_until":"2026-12-01T08:00:00Z"}', "muted_until"),
    "a time without a zone": (b'{"muted":true,"muted_until":"2026-12-01T08:00:00"}', "muted_until"),
    "no such day": (b'{"muted":true,"muted_until":"2026-02-30T08:00:00Z"}', "muted_until"),
    "before all times": (b'{"muted":true,"muted_until":"0001-01-01T00:00:00+09:00"}', "muted_until"),
    "a number": (b'{"muted":true,"muted_until":1796112000}', "muted_until"),
    "a bad name": (b'{"muted":true,"user_id":"a b"}', "user_id"),
    "a bad device": (b'{"muted":true,"device_id":""}', "device_id"),
}


@pytest.mark.promise("protocol.6.bad_body", "protocol.6.settings")
@pytest.mark.parametrize(("text", "field"), BAD.values(), ids=BAD)
async def test_bad_settings(client: Client, text: bytes, field: str) -> None:
    status, content = await client.call("PUT", PATH, data=text)
    assert (status, content["code"], content["field"]) == (400, "bad_request", field)
    assert client.behind.asked == []


async def test_what_is_no_conversation_or_too_much(client: Client) -> None:
    status, content = await client.call("PUT", "/v1/conversations/x/settings", json={"muted": True})
    assert (status, content["field"]) == (400, "conversation_id")
    status, content = await client.call("PUT", PATH, data=b" " * 5_000)
    assert (status, content["code"]) == (413, "too_large")


@pytest.mark.promise("protocol.6.unread")
@pytest.mark.parametrize(
    ("user", "scope", "query", "answer"),
    [
        ("ann", "user", {}, "ann"),
        ("ann", "user", {"user_id": "ann"}, "ann"),
        ("shop", "service", {"user_id": "ann"}, "ann"),
        ("ann", "user", {"user_id": "ben"}, (403, "user_id")),
        ("ann", "user", {"user_id": "b b"}, (400, "user_id")),
        ("shop", "service", {}, (400, "user_id")),
        ("shop", "service", {"user_id": ""}, (400, "user_id")),
        ("gw", "gateway", {"user_id": "ann"}, (403, None)),
        ("root", "admin", {"user_id": "ann"}, (403, None)),
        (None, "user", {}, (401, None)),
    ],
)
async def test_whose_totals_one_may_read(
    client: Client, user: str | None, scope: Scope, query: dict[str, str], answer: str | tuple[int, str | None]
) -> None:
    status, content = await client.call("GET", "/v1/unread", user, scope, params=query)
    if isinstance(answer, tuple):
        assert (status, content.get("field")) == answer
        assert client.behind.asked == []
        return
    told = {"user_id": answer, "unread": 3, "conversations": 2, "muted": {"unread": 1, "conversations": 1}}
    assert (status, content) == (200, told)
    assert client.behind.asked == [(answer,)]
