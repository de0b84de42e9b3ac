"""The console in the test's own process, and tokens for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from deploy.local.ports import HOST, free_port
from services.console.main import serve
from services.console.settings import ConsoleSettings
from shared.auth import mint
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

SECRET = "secret-of-thirty-two-characters-x"

NO_POSTGRES = "postgres://nobody@127.0.0.1:1/none"


def authorization(scope: str = "admin") -> dict[str, str]:
    return {"Authorization": f"Bearer {mint(SECRET, 'ops', scope=scope)}"}


@dataclass(frozen=True)
class Console:
    """A console that serves. ``private``: the base address of its health."""

    session: aiohttp.ClientSession
    url: str
    private: str

    async def ask(
        self, method: str, path: str, *, json: object = None, data: bytes | None = None, scope: str = "admin"
    ) -> tuple[int, dict[str, object]]:
        """Status and body of a call's answer."""
        async with self.session.request(
            method, f"{self.url}{path}", json=json, data=data, headers=authorization(scope)
        ) as answer:
            return answer.status, await answer.json(content_type=None)


@asynccontextmanager
async def console(services: Mapping[str, str], postgres_url: str = NO_POSTGRES) -> AsyncIterator[Console]:
    """A console that looks at these services, and at itself unless ``services`` says otherwise."""
    port, private = free_port(), free_port()
    settings = ConsoleSettings(
        auth_secret=SECRET,
        postgres_url=postgres_url,
        console_port=port,
        console_private_port=private,
        console_services={"console": f"http://{HOST}:{private}", **services},
    )
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
        group.create_task(serve(settings, stop))

        async def answers() -> bool:
            try:
                async with session.get(f"http://{HOST}:{port}/"):
                    return True
            except aiohttp.ClientError:
                return False

        await until(answers, timeout=10, what="the console")
        try:
            yield Console(session, f"http://{HOST}:{port}", f"http://{HOST}:{private}")
        finally:
            stop.set()
