"""Ingest for tests: in the test's own process, or as a process that can be paused and killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.local.ports import free_port
from services.ingest.main import serve
from services.ingest.settings import IngestSettings
from shared.auth import Scope, mint
from tests.databases import Database
from tests.waiting import until

SECRET = "a secret of at least 32 bytes for tests"
DIGEST_KEY = "a digest key for tests"
ROOT = Path(__file__).parents[1]

Json = dict[str, Any]


def new_id() -> str:
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    json: Any


class Ingest:
    """A client of one ingest. Everything speaks as `user`, unless a scope makes it a service."""

    def __init__(self, session: aiohttp.ClientSession, port: int, private_port: int) -> None:
        self.session = session
        self.url = f"http://127.0.0.1:{port}"
        self.private_url = f"http://127.0.0.1:{private_port}"

    async def call(
        self,
        method: str,
        path: str,
        user: str | None,
        *,
        scope: Scope = "user",
        headers: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Answer:
        given = dict(headers or {})
        if user is not None:
            given.setdefault("authorization", f"Bearer {mint(SECRET, user, scope=scope)}")
        async with self.session.request(method, self.url + path, headers=given, **kwargs) as answer:
            is_json = "json" in answer.headers.get("content-type", "")
            content = await answer.json(content_type=None) if is_json else await answer.text()
            return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, content)

    async def send_all(self, user: str, events: Sequence[Json], *, scope: Scope = "user") -> list[Json]:
        answer = await self.call("POST", "/v1/events", user, scope=scope, json={"events": list(events)})
        assert answer.status == 200, answer
        results: list[Json] = answer.json["results"]
        assert len(results) == len(events)
        return results

    async def send(self, user: str, conversation_id: str, *, scope: Scope = "user", **fields: Any) -> Json:
        """Send one event, by default a message, with a client id of its own; its result."""
        event: Json = {"conversation_id": conversation_id, "client_msg_id": new_id(), **fields}
        if event.get("type", "message") in ("message", "system"):
            event.setdefault("body", {"text": "hello"})
        return (await self.send_all(user, [event], scope=scope))[0]

    async def sent(self, user: str, conversation_id: str, *, scope: Scope = "user", **fields: Any) -> Json:
        """Send one event that has to be written; its `event`."""
        result = await self.send(user, conversation_id, scope=scope, **fields)
        assert result["status"] == 201, result
        event: Json = result["event"]
        return event

    async def create(self, user: str, *members: str, kind: str = "group", **fields: Any) -> str:
        answer = await self.call("POST", "/v1/conversations", user, json={"kind": kind, "members": members, **fields})
        assert answer.status in (200, 201), answer
        return str(answer.json["conversation_id"])

    async def page(self, user: str, conversation_id: str, *, scope: Scope = "user", **query: int) -> Json:
        query = query or {"after": 0}
        path = f"/v1/conversations/{conversation_id}/events"
        answer = await self.call("GET", path, user, scope=scope, params=query)
        assert answer.status == 200, answer
        page: Json = answer.json
        return page

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.private_url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")


@asynccontextmanager
async def running(database: Database, **settings: Any) -> AsyncIterator[Ingest]:
    """Ingest in this process."""
    port, private_port = free_port(), free_port()
    given = IngestSettings(
        **{
            "postgres_url": database.url("ingest"),
            "auth_secret": SECRET,
            "digest_key": DIGEST_KEY,
            "ingest_port": port,
            "ingest_private_port": private_port,
            **settings,
        }
    )
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        ingest = Ingest(session, port, private_port)
        serving = tasks.create_task(serve(given, stop))
        try:
            await until(lambda: serving.done() or _is_open(port), timeout=10, what="ingest opens its port")
            yield ingest
        finally:
            stop.set()


class IngestProcess(Ingest):
    """Ingest as a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]", *args: Any) -> None:
        super().__init__(*args)
        self.process = process

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@asynccontextmanager
async def process(database: Database, **environment: str) -> AsyncIterator[IngestProcess]:
    """Ingest as `python -m services.ingest.main`; killed at the end if it still runs."""
    port, private_port = free_port(), free_port()
    started = subprocess.Popen(  # noqa: ASYNC220 - starting takes no time that matters, and it is waited for below
        [sys.executable, "-m", "services.ingest.main"],
        cwd=ROOT,
        env=os.environ
        | {
            "WAYBILL_POSTGRES_URL": database.url("ingest"),
            "WAYBILL_AUTH_SECRET": SECRET,
            "WAYBILL_DIGEST_KEY": DIGEST_KEY,
            "WAYBILL_INGEST_PORT": str(port),
            "WAYBILL_INGEST_PRIVATE_PORT": str(private_port),
        }
        | environment,
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            await until(
                lambda: started.poll() is not None or _is_open(port),
                timeout=30,
                what="the ingest process opens its port",
            )
            assert started.poll() is None
            yield IngestProcess(started, session, port, private_port)
    finally:
        if started.poll() is None:
            started.kill()
        started.wait(10)


def _is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
