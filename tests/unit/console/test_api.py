from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from deploy.local.ports import HOST, free_port
from services.console.main import serve
from services.console.settings import ConsoleSettings
from shared.auth import mint
from shared.health import private_app
from shared.runtime import http
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECRET = "secret-of-thirty-two-characters-x"


async def broken() -> str:
    return "no connection"


async def fine() -> None:
    return None


@asynccontextmanager
async def console(services: dict[str, str]) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    port, private = free_port(), free_port()
    settings = ConsoleSettings(
        auth_secret=SECRET,
        console_port=port,
        console_private_port=private,
        console_services={**services, "console": f"http://{HOST}:{private}"},
    )
    stop = asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
        group.create_task(serve(settings, stop))

        async def answers() -> bool:
            try:
                async with session.get(f"http://{HOST}:{port}/"):
                    return True
            except aiohttp.ClientError:
                return False

        await until(answers, timeout=10, what="the console")
        try:
            yield session, f"http://{HOST}:{port}"
        finally:
            stop.set()


def authorization(scope: str = "admin") -> dict[str, str]:
    return {"Authorization": f"Bearer {mint(SECRET, 'ops', scope=scope)}"}


@pytest.mark.promise("protocol.6.health")
async def test_health_is_gathered_from_every_service() -> None:
    good, bad, nobody = free_port(), free_port(), free_port()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(http(private_app({"store": fine}), HOST, good))
        await stack.enter_async_context(http(private_app({"store": broken}), HOST, bad))
        services = {name: f"http://{HOST}:{port}" for name, port in (("a", good), ("b", bad), ("c", nobody))}
        session, url = await stack.enter_async_context(console(services))
        async with session.get(f"{url}/api/health", headers=authorization()) as answer:
            assert answer.status == 200
            said = await answer.json()
    assert said["status"] == "failing"
    assert said["services"]["a"] == {"status": "ok", "failing": {}}
    assert said["services"]["b"] == {"status": "failing", "failing": {"store": "no connection"}}
    assert said["services"]["c"]["status"] == "away"
    assert said["services"]["console"]["status"] == "ok"


async def test_health_is_ok_when_all_are() -> None:
    async with console({}) as (session, url), session.get(f"{url}/api/health", headers=authorization()) as answer:
        assert (await answer.json())["status"] == "ok"


async def test_a_strange_answer_is_away() -> None:
    async with (
        console({}) as (session, url),
        console({"other": url}) as (_, second),
        session.get(f"{second}/api/health", headers=authorization()) as answer,
    ):
        assert (await answer.json())["services"]["other"]["status"] == "away"


@pytest.mark.promise("protocol.4.problem")
async def test_only_an_admin_sees_it() -> None:
    async with console({}) as (session, url):
        for headers, status, code in (
            ({}, 401, "unauthenticated"),
            ({"Authorization": "Bearer x"}, 401, "unauthenticated"),
            (authorization("user"), 403, "forbidden"),
            (authorization("service"), 403, "forbidden"),
        ):
            async with session.get(f"{url}/api/health", headers=headers) as answer:
                assert answer.status == status
                assert answer.content_type == "application/problem+json"
                assert (await answer.json())["code"] == code
        for path, status in (("/nowhere", 404), ("/api/nowhere", 404)):
            async with session.get(f"{url}{path}", headers=authorization()) as answer:
                assert answer.status == status
                said = await answer.json(content_type="application/problem+json")
                assert {"type", "title", "status", "detail", "code"} == set(said)
                assert (said["status"], said["code"]) == (404, "not_found")


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    async with console({}) as (session, url), session.get(f"{url}/") as answer:
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        text = await answer.text()
        assert "src=" not in text
        assert "innerHTML" not in text
