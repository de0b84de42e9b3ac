"""The services that `waybill bench receipts` needs for whole ways: ingest once, the others as a side asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from secrets import token_hex
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from bench.cells import total
from bench.processes import cpu_s, descendants
from bench.receipts_drain import given
from bench.stage import make_topics
from deploy.local.endpoints import socket_of
from deploy.local.parts import ServicePart
from deploy.local.services import choose_ports, plan, public
from deploy.migrate import migrate_async
from shared.auth import mint
from shared.kafka import Topics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from deploy.local.stack import Stack

OURS, THEIRS = Topics("bench-ticks"), Topics("bench-plain-ticks")
"""Each side has topics and a gateway of its own: what one leaves there is nothing to the other."""

_TIMEOUT_S = 30.0
_QUIET_S = 60.0
_QUIET_POLL_S = 0.25
_MOST_ITEMS = 500


class Services:
    """Made by `running`. Has what `bench.stage.make_chats` asks for."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.auth_secret = token_hex(32)
        self._ports = choose_ports("auto", folder / "service_ports.json", 1)
        self.ingest = public(self._ports, "ingest")
        self._logs = folder / "logs"
        self._logs.mkdir(exist_ok=True)
        self._parts: dict[tuple[str, str], ServicePart] = {}
        self._stack = stack
        base = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}
        digest_key = token_hex(32)
        for topics in (OURS, THEIRS):
            for service in plan(
                stack,
                self._ports,
                gateways=1,
                secret=self.auth_secret,
                digest_key=digest_key,
                base={**base, **given(os.environ), "WAYBILL_TOPIC_PREFIX": topics.prefix},
            ):
                self._parts[topics.prefix, service.name] = ServicePart(service, self._logs)

    @contextlib.asynccontextmanager
    async def serving(self, topics: Topics, names: Sequence[str]) -> AsyncIterator[str]:
        """These services of a side while the block runs, the gateway among them; the gateway's address for sockets.

        Raises `StartError`.
        """
        parts = [self._parts[topics.prefix, name] for name in names]
        try:
            for part in parts:
                await part.start()
            await asyncio.gather(*(part.ready() for part in parts))
            yield socket_of(public(self._ports, "gateway"))
        finally:
            for part in reversed(parts):
                await part.stop()

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each service that runs, of the stores, and of this process."""
        of = {name: part.pid for (_, name), part in self._parts.items() if part.alive()} | self._stack.pids
        used = {name: sum(map(cpu_s, descendants(pid))) for name, pid in of.items()}
        return {**used, "bench": cpu_s(os.getpid())}

    async def quiet(self) -> None:
        """Wait until receipts and relay of our side have nothing left to do. Raises `TimeoutError`."""
        receipts, relay = (self._parts[OURS.prefix, name] for name in ("receipts", "relay"))
        async with asyncio.timeout(_QUIET_S):
            while await _works(receipts, relay):  # noqa: ASYNC110 - what other processes have left sets no event
                await asyncio.sleep(_QUIET_POLL_S)

    @contextlib.asynccontextmanager
    async def door(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A way into ingest as a service that may write as anybody."""
        token = mint(self.auth_secret, "bench", scope="service")
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=timeout) as http:
            yield http

    async def write(self, http: aiohttp.ClientSession, events: Sequence[object]) -> None:
        """Write events. Raises `RuntimeError` if one is refused."""
        for begin in range(0, len(events), _MOST_ITEMS):
            body = msgspec.json.encode({"events": events[begin : begin + _MOST_ITEMS]})
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{self.ingest}/v1/events", data=body, headers=headers) as answer:
                answer.raise_for_status()
                results = (await answer.json())["results"]
            if refused := [result for result in results if result["status"] != 201]:
                raise RuntimeError(f"refused: {refused[0]}")


@contextlib.asynccontextmanager
async def running(stack: Stack, folder: Path) -> AsyncIterator[Services]:
    """A migrated store, topics, and ingest at work while the block runs. Raises `StartError`, `MigrationError`."""
    await migrate_async(stack.postgres_url)
    for topics in (OURS, THEIRS):
        await make_topics(stack.kafka, topics)
    services = Services(stack, folder)
    ingest = services._parts[OURS.prefix, "ingest"]  # noqa: SLF001 - of the same module
    try:
        await ingest.start()
        await ingest.ready()
        yield services
    finally:
        await ingest.stop()


async def _works(receipts: ServicePart, relay: ServicePart) -> bool:
    lag = await _metric(receipts, "waybill_receipts_lag_records")
    return bool(lag or await _metric(relay, "waybill_outbox_oldest_unsent_seconds"))


async def _metric(part: ServicePart, name: str) -> float:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{part.service.private}/metrics") as answer:
        answer.raise_for_status()
        return total(await answer.text(), name)
