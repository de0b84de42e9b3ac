"""Waybill as `waybill bench gateway` runs it: the services side by side on one stack, and a fresh gateway per cell.

None of them runs while the peer is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import sys
from secrets import token_hex
from typing import TYPE_CHECKING

import aiohttp
import asyncpg

from bench.cells import total
from bench.processes import cpu_s, descendants, rss_kib
from bench.stage import say
from deploy.local.endpoints import socket_of
from deploy.local.parts import ServicePart
from deploy.local.services import choose_ports, plan, public
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from deploy.local.stack import Stack
    from shared.kafka import Topics

_SQL = statements(__file__)

PREFIX = "WAYBILL_GATEWAY_"
"""Of settings that may be given to the gateway from outside; every other setting is the bench's own."""

_TIMEOUT_S = 30.0
_QUIET_S = 60.0
_QUIET_POLL_S = 0.25


class Gateway:
    """A gateway that serves. ``pids``: its processes."""

    def __init__(self, part: ServicePart, address: str) -> None:
        self._part = part
        self.socket = socket_of(address)

    @property
    def pids(self) -> list[int]:
        """The process and all below it."""
        return descendants(self._part.pid)

    def rss_kib(self) -> int:
        """Resident memory of its processes."""
        return sum(rss_kib(pid) for pid in self.pids)

    async def metric(self, name: str) -> float:
        """A metric now, summed over its samples. Raises `ValueError` if there is none of this name."""
        return await _metric(self._part, name)


class Services:
    """Ingest, relay and receipts, which live from the first `gateway` to `stop`, and one gateway at a time.

    ``profiles``: a folder that takes each gateway's profile and log; without it there is no profiler.
    """

    def __init__(self, stack: Stack, folder: Path, topics: Topics, profiles: Path | None) -> None:
        self.secret = token_hex(32)
        self._stack = stack
        self._profiles = profiles
        self._topics = topics
        self._ports = choose_ports("auto", folder / "service_ports.json", 1)
        self.ingest = public(self._ports, "ingest")
        self._logs = folder / "logs"
        self._logs.mkdir()
        base = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}
        services = plan(
            stack,
            self._ports,
            gateways=1,
            secret=self.secret,
            digest_key=token_hex(32),
            base={**base, **given(os.environ), "WAYBILL_TOPIC_PREFIX": topics.prefix},
        )
        self._service = {service.name: service for service in services}
        self._others = [ServicePart(self._service[name], self._logs) for name in ("ingest", "receipts", "relay")]

    @property
    def pids(self) -> list[int]:
        """The processes that run, without the gateway's."""
        return [part.pid for part in self._others if part.alive()]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each service that runs, of Postgres, and of this process."""
        of = {part.name: part.pid for part in self._others if part.alive()}
        of |= {"postgres": self._stack.pids["postgres"], "bench": os.getpid()}
        return {name: sum(map(cpu_s, [pid] if name == "bench" else descendants(pid))) for name, pid in of.items()}

    @contextlib.asynccontextmanager
    async def gateway(self, label: str) -> AsyncIterator[Gateway]:
        """A fresh gateway on an empty timeline while the block runs; the other services are started if they are down.

        At its end the others get the time to finish what they have, so that nothing of it burdens the next cell.
        Raises `StartError`.
        """
        await self._empty()
        await self._start(self._others)
        service = self._service["gateway"]
        if self._profiles is not None:
            file = self._profiles.absolute() / label
            argv = (sys.executable, "-P", "-m", "bench.profiled", str(file))
            service = dataclasses.replace(service, argv=argv)
        part = ServicePart(service, self._logs)
        try:
            await self._start([part])
            yield Gateway(part, public(self._ports, "gateway"))
        finally:
            await part.stop()
            if self._profiles is not None:
                shutil.move(part.log, self._profiles / f"{label}.log")
        await self._quiet()

    async def stop(self) -> None:
        """End all of them."""
        for part in self._others:
            await part.stop()

    async def _start(self, parts: list[ServicePart]) -> None:
        new = [part for part in parts if not part.alive()]
        for part in new:
            await part.start()
        await asyncio.gather(*(part.ready() for part in new))

    async def _empty(self) -> None:
        # The load client names its users alike in every run: one's sessions would list the conversations of all.
        db = await asyncpg.connect(self._stack.postgres_url, timeout=_TIMEOUT_S)
        try:
            await db.execute(_SQL["empty"], timeout=_TIMEOUT_S)
        finally:
            await db.close(timeout=_TIMEOUT_S)

    async def _quiet(self) -> None:
        try:
            async with asyncio.timeout(_QUIET_S):
                while await self._works():  # noqa: ASYNC110 - what other processes have left sets no event
                    await asyncio.sleep(_QUIET_POLL_S)
        except TimeoutError:
            say(f"receipts and relay still work on the last cell after {_QUIET_S:g} s; the next one may suffer")

    async def _works(self) -> bool:
        _, receipts, relay = self._others
        lag = await _metric(receipts, "waybill_receipts_lag_records")
        return bool(lag or await _metric(relay, "waybill_outbox_oldest_unsent_seconds"))


def given(environment: Mapping[str, str]) -> dict[str, str]:
    """The gateway's settings in an environment."""
    return {name: value for name, value in environment.items() if name.startswith(PREFIX)}


async def _metric(part: ServicePart, name: str) -> float:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.get(f"{part.service.private}/metrics") as answer,
    ):
        answer.raise_for_status()
        return total(await answer.text(), name)
