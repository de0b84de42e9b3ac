from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack

import pytest

from deploy.local.ports import HOST, free_port
from shared.health import private_app
from shared.runtime import http
from tests.console import authorization, console

CALLS = (
    ("GET", "/api/health"),
    ("GET", "/api/dead"),
    ("GET", "/api/dead?limit=none"),
    ("GET", "/api/dead/1"),
    ("POST", "/api/dead/retry"),
    ("POST", "/api/dead/1/retry"),
    ("POST", "/api/dead/1/discard"),
    ("GET", "/api/relay/shards"),
    ("POST", "/api/relay/shards/1/resume"),
    ("POST", "/api/relay/shards/1/rewind"),
)


async def broken() -> str:
    return "no connection"


async def fine() -> None:
    return None


@pytest.mark.promise("protocol.6.health")
async def test_health_is_gathered_from_every_service() -> None:
    good, bad, nobody = free_port(), free_port(), free_port()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(http(private_app({"store": fine}), HOST, good))
        await stack.enter_async_context(http(private_app({"store": broken}), HOST, bad))
        services = {name: f"http://{HOST}:{port}" for name, port in (("a", good), ("b", bad), ("c", nobody))}
        desk = await stack.enter_async_context(console(services))
        status, said = await desk.ask("GET", "/api/health")
    assert status == 200
    assert said["status"] == "failing"
    assert said["services"]["a"] == {"status": "ok", "failing": {}}
    assert said["services"]["b"] == {"status": "failing", "failing": {"store": "no connection"}}
    assert said["services"]["c"]["status"] == "away"
    assert list(said["services"]["console"]["failing"]) == ["postgres"]


async def test_health_is_ok_when_all_are() -> None:
    good = free_port()
    async with (
        http(private_app({"store": fine}), HOST, good),
        console({"console": f"http://{HOST}:{good}"}) as desk,
    ):
        assert (await desk.ask("GET", "/api/health"))[1]["status"] == "ok"


async def test_while_postgres_is_away_the_console_serves_and_says_so() -> None:
    async with console({}) as desk:
        async with desk.session.get(f"{desk.private}/readyz") as answer:
            assert answer.status == 503
            assert list((await answer.json())["failing"]) == ["postgres"]
        assert (await desk.ask("GET", "/api/health"))[0] == 200
        for method, path in (("GET", "/api/dead"), ("GET", "/api/relay/shards"), ("POST", "/api/dead/1/retry")):
            status, said = await desk.ask(method, path)
            assert (status, said["code"]) == (503, "unavailable")


async def test_a_strange_answer_is_away() -> None:
    async with (
        console({}) as other,
        console({"other": other.url}) as desk,
    ):
        assert (await desk.ask("GET", "/api/health"))[1]["services"]["other"]["status"] == "away"


@pytest.mark.promise("protocol.4.problem")
async def test_only_an_admin_sees_it() -> None:
    async with console({}) as desk:
        for headers, status, code in (
            ({}, 401, "unauthenticated"),
            ({"Authorization": "Bearer x"}, 401, "unauthenticated"),
            (authorization("user"), 403, "forbidden"),
            (authorization("service"), 403, "forbidden"),
        ):
            for method, path in CALLS:
                async with desk.session.request(method, f"{desk.url}{path}", headers=headers) as answer:
                    assert answer.status == status, path
                    assert answer.content_type == "application/problem+json"
                    assert (await answer.json())["code"] == code
        for path, status in (("/nowhere", 404), ("/api/nowhere", 404)):
            async with desk.session.get(f"{desk.url}{path}", headers=authorization()) as answer:
                assert answer.status == status
                said = await answer.json(content_type="application/problem+json")
                assert {"type", "title", "status", "detail", "code"} == set(said)
                assert (said["status"], said["code"]) == (404, "not_found")


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with console({}) as desk, desk.session.get(f"{desk.url}/") as answer:
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        text = await answer.text()
        assert "src=" not in text
        for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert risky not in text


async def test_the_description_is_whole() -> None:
    async with console({}) as desk:
        status, said = await desk.ask("GET", "/openapi.json")
    assert status == 200
    assert {f"{method.upper()} {path}" for path, calls in said["paths"].items() for method in calls} == {
        "GET /api/health",
        "GET /api/dead",
        "POST /api/dead/retry",
        "GET /api/dead/{dead_id}",
        "POST /api/dead/{dead_id}/retry",
        "POST /api/dead/{dead_id}/discard",
        "GET /api/relay/shards",
        "POST /api/relay/shards/{shard}/resume",
        "POST /api/relay/shards/{shard}/rewind",
    }
    schemas = said["components"]["schemas"]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(said)))
    assert named <= set(schemas)
    assert {"Letter", "Detail", "Change", "Ids", "Reason", "Shard", "Rewound", "Problem"} <= named
    assert set(schemas["Detail"]["properties"]) > set(schemas["Letter"]["properties"])
    for path, calls in said["paths"].items():
        for method, call in calls.items():
            if path != "/api/health":
                assert "$ref" in call["responses"]["200"]["content"]["application/json"]["schema"], (method, path)
                assert "application/problem+json" in call["responses"]["default"]["content"]
