"""Several gateway processes behind one port: this process starts them, starts them again, and speaks for them.

Each listens on the public port with SO_REUSEPORT, and the kernel deals connections out. Each has its own health on a
port of loopback; the one private port of the gateway is served here: ready when all are, and one set of metrics. Those
are kept by prometheus_client in files of a folder, so that what a process that died had counted stays counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from services.gateway.child import ASK_S, Child
from services.gateway.metrics import PROCESS_ENDS, PROCESSES
from services.gateway.parent import METRICS
from shared.clock import Backoff
from shared.health import private_app
from shared.logging import logger
from shared.runtime import http, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.gateway.settings import GatewaySettings
    from shared.health import Check

_PORT_S = 15.0
"""Processes of a gateway that was killed close the public port at once, but not in no time."""
_PORT_POLL_S = 0.1
_BEYOND_DRAIN_S = 9.0
"""For acks to be confirmed and connections to be closed once all clients were told."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How children that end are dealt with. Times in seconds.

    One that ends within ``early_s`` of its start counts as one that cannot run: when a child does so ``tries`` times
    within ``within_s``, the parent ends all with exit code 1, for whoever started it to see.
    """

    grace_s: float
    """What a child that was asked to end may take."""
    early_s: float = 10.0
    tries: int = 5
    within_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0


class EarlyEnds:
    """Counts the ends of one child that came too soon."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._at: deque[float] = deque()

    def hopeless(self, now: float, lived_s: float) -> bool:
        """Whether this end was one too many."""
        if lived_s >= self._rules.early_s:
            self._at.clear()
            return False
        self._at.append(now)
        while self._at[0] <= now - self._rules.within_s:
            self._at.popleft()
        return len(self._at) >= self._rules.tries


class Processes:
    """The children, kept running from `run` until its ``stop`` is set."""

    def __init__(self, children: Sequence[Child], rules: Rules, metrics: str) -> None:
        self.hopeless = False
        self._children = children
        self._rules = rules
        self._metrics = metrics
        self._stopping = False

    async def run(self, stop: asyncio.Event, host: str, port: int) -> None:
        """Keep all children running and answer for them on a private port; at the end all are gone."""
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            checks = {f"process {child.index}": self._check(child, session) for child in self._children}
            app = private_app(checks, metrics=self.metrics, check_s=ASK_S + 0.5)
            async with http(app, host, port):
                keeping = [tasks.create_task(self._keep(child, session, stop)) for child in self._children]
                await stop.wait()
                self._stopping = True
                await asyncio.wait(keeping)

    def metrics(self) -> bytes:
        """All children's metrics as one, and this process's own."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._metrics)  # type: ignore[no-untyped-call]  # it brings no types
        up = sum(child.private is not None for child in self._children)
        PROCESSES.labels("up").set(up)
        PROCESSES.labels("down").set(len(self._children) - up)
        registry.register(PROCESSES)
        registry.register(PROCESS_ENDS)
        return generate_latest(registry)

    def _check(self, child: Child, session: aiohttp.ClientSession) -> Check:
        async def check() -> str | None:
            return "stopping" if self._stopping else await child.ready(session)

        return check

    async def _keep(self, child: Child, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        backoff = Backoff(self._rules.base_s, self._rules.cap_s)
        early = EarlyEnds(self._rules)
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            how = await self._life(child, session, stop)
            if stop.is_set():
                return
            lived_s = now() - began
            PROCESS_ENDS.labels(how).inc()
            logger(__name__).warning("process ended", process=child.index, pid=child.pid, how=how, lived_s=lived_s)
            if early.hopeless(now(), lived_s):
                logger(__name__).error("a process ends again and again; giving up", process=child.index)
                self.hopeless = True
                stop.set()
                return
            if lived_s >= self._rules.early_s:
                backoff.reset()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next()):
                    await stop.wait()
            if stop.is_set():
                return

    async def _life(self, child: Child, session: aiohttp.ClientSession, stop: asyncio.Event) -> str:
        """One life of a child, from its start until nothing is left of it; how it ended."""
        try:
            await child.start()
        except OSError as error:
            logger(__name__).warning("process was not started", process=child.index, error=str(error))
            return "not_started"
        try:
            ended, failed, _ = tasks = (
                asyncio.create_task(child.ended()),
                asyncio.create_task(child.failed(session, lambda: _say_up(child))),
                asyncio.create_task(stop.wait()),
            )
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return "ended"
                if stop.is_set():
                    await self._stop(child)
                    return "stopped"
                return failed.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        finally:
            child.kill_now()
            await child.ended()
            # What it counted stays; how many sessions it had does not.
            mark_process_dead(child.pid, self._metrics)  # type: ignore[no-untyped-call]  # it brings no types

    async def _stop(self, child: Child) -> None:
        if not await child.stop(self._rules.grace_s):
            logger(__name__).warning("process was killed: it did not end in time", process=child.index)


def supervise(settings: GatewaySettings, count: int) -> int:
    """Run a gateway of ``count`` processes until SIGTERM or SIGINT; the exit code."""
    hopeless = False

    async def serve(stop: asyncio.Event) -> None:
        nonlocal hopeless
        with (
            await reserved(settings.host, settings.gateway_port, stop) as held,
            tempfile.TemporaryDirectory(prefix="waybill-gateway-") as metrics,
        ):
            children = [
                Child(index, argv(), environment(settings, os.environ, index, held.getsockname()[1], metrics))
                for index in range(1, count + 1)
            ]
            processes = Processes(children, Rules(grace_s=settings.gateway_drain_s + _BEYOND_DRAIN_S), metrics)
            await processes.run(stop, settings.private_host, settings.gateway_private_port)
            hopeless = processes.hopeless

    run("gateway", settings.log_level, serve)
    return int(hopeless)


async def reserved(host: str, port: int, stop: asyncio.Event) -> socket.socket:
    """A socket that keeps the public port for the children, however many of them run; a port of 0 becomes a free one.

    Waits a little for one in use. Raises `OSError` when it stays so, or ``stop`` is set meanwhile.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    deadline = asyncio.get_running_loop().time() + _PORT_S
    while True:
        try:
            # Another gateway that shares its port, too, would not be noticed, and would take a part of the connections.
            with _bound(family, address, shared=False) as alone:
                address = alone.getsockname()
            return _bound(family, address, shared=True)
        except OSError as error:
            late = stop.is_set() or asyncio.get_running_loop().time() > deadline
            if late or error.errno != errno.EADDRINUSE:
                raise
        await asyncio.sleep(_PORT_POLL_S)


def _bound(family: socket.AddressFamily, address: Any, *, shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def argv() -> list[str]:
    """How a child is run: as this process was."""
    return [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "services.gateway.main"]


def environment(
    settings: GatewaySettings, base: Mapping[str, str], index: int, port: int, metrics: str
) -> dict[str, str]:
    """The environment of a child: ``base``, but for what makes it one of several."""
    own = {
        "WAYBILL_GATEWAY_PROCESSES": "1",
        "WAYBILL_GATEWAY_NAME": f"{settings.gateway_name}-{index}",
        "WAYBILL_GATEWAY_PORT": str(port),
        "WAYBILL_GATEWAY_PRIVATE_PORT": "0",
        "WAYBILL_PRIVATE_HOST": "127.0.0.1",
        METRICS: metrics,
    }
    # Settings are read whatever the case of their names.
    return {name: value for name, value in base.items() if name.upper() not in own} | own


def _say_up(child: Child) -> None:
    logger(__name__).info("process is up", process=child.index, pid=child.pid, private=child.private)
