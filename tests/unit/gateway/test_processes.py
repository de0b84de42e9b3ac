"""Several processes of a gateway: who is started again, who is given up, and who speaks for all."""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from prometheus_client import Gauge
from pydantic import SecretStr

import services.gateway
from deploy.local.lock import started
from deploy.local.ports import HOST, free_port
from services.gateway.child import Child
from services.gateway.metrics import SESSIONS
from services.gateway.parent import INDEX, METRICS, PIPE, Parent
from services.gateway.processes import EarlyEnds, Processes, Rules, environment, reserved
from services.gateway.settings import GatewaySettings
from shared.metrics import LOOP_LAG
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

STAND_IN = """
import http.server, json, os, signal, socket, sys, threading
does = os.environ.get("DOES", "").split()
if "die" in does:
    sys.exit(3)
if "metrics" in does:
    from prometheus_client import Counter, Gauge, Histogram
    Counter("served", "s").inc(5)
    Gauge("open", "o", multiprocess_mode="livesum").set(2)
    Histogram("took", "t", buckets=[1]).observe(0.5)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stay" in does else lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        bad = self.path == "/readyz" and "fail" in does
        self.send_response(503 if bad else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"failing": {"postgres": "it is away"} if bad else {}}).encode())
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
pipe = socket.socket(fileno=int(os.environ["WAYBILL_GATEWAY_PROCESS_PIPE"]))
if "mute" not in does:
    pipe.send(b"%d\\n" % server.server_address[1])
server.serve_forever(0.02)
"""

RULES = Rules(grace_s=20, early_s=0, base_s=0.01, cap_s=0.02)
"""No end is too early."""


class Stage:
    def __init__(self, folder: Path, does: tuple[str, ...], rules: Rules, timing: dict[str, Any]) -> None:
        self.port = free_port()
        self.stop = asyncio.Event()
        self.children = [
            Child(
                index,
                [sys.executable, *([] if "metrics" in what else ["-S"]), "-c", STAND_IN],
                {"DOES": what, METRICS: str(folder), "PATH": os.environ["PATH"]},
                **{"watch_s": 30, "up_s": 60, **timing},
            )
            for index, what in enumerate(does, start=1)
        ]
        self.processes = Processes(self.children, rules, str(folder))
        self.task = asyncio.create_task(self.processes.run(self.stop, HOST, self.port))

    async def ask(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{self.port}{path}") as answer:
            return answer.status, await answer.text()

    async def readyz(self) -> tuple[int, str]:
        try:
            return await self.ask("/readyz")
        except aiohttp.ClientError:
            return 0, ""

    async def ready(self) -> None:
        async def asked() -> bool:
            return (await self.readyz())[0] == 200

        await until(asked, timeout=60, what="all are ready")

    async def another(self, index: int, before: int) -> None:
        """Wait for another process in the place of a child that was `before`."""
        child = self.children[index]
        await until(lambda: child.pid != before and child.private, timeout=60, what="another process")

    async def value(self, name: str) -> float | None:
        """Of a metric without its labels' names."""
        _, text = await self.ask("/metrics")
        return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[0] != "#"}.get(name)


@asynccontextmanager
async def stage(folder: Path, *does: str, rules: Rules = RULES, **timing: Any) -> AsyncIterator[Stage]:
    made = Stage(folder, does, rules, timing)
    try:
        yield made
    finally:
        made.stop.set()
        await asyncio.wait_for(made.task, 60)
        assert [child.pid for child in made.children if started(child.pid)] == []


async def test_it_is_ready_when_all_are_and_names_who_is_not(tmp_path: Path) -> None:
    async with stage(tmp_path, "", "fail", "mute") as made:
        await until(lambda: made.children[1].private and made.children[0].private, timeout=60, what="two are up")
        status, text = await made.ask("/readyz")
        assert status == 503
        assert '"failing":{"process 2":"postgres: it is away","process 3":"not up"}' in text
        assert (await made.ask("/healthz"))[0] == 200
    async with stage(tmp_path, "", "") as made:
        await made.ready()


async def test_a_process_that_dies_is_started_again_and_its_counts_stay(tmp_path: Path) -> None:
    async with stage(tmp_path, "metrics", "metrics") as made:
        await made.ready()
        assert [await made.value(name) for name in ("served_total", "open")] == [10, 4]
        before = made.children[0].pid
        ended = await made.value('waybill_gateway_process_ends_total{how="ended"}') or 0
        os.kill(before, signal.SIGKILL)
        await made.another(0, before)
        await made.ready()
        assert [await made.value(name) for name in ("served_total", "open")] == [15, 4]
        assert await made.value("took_count") == 3
        assert await made.value('took_bucket{le="1.0"}') == 3
        assert await made.value('waybill_gateway_process_ends_total{how="ended"}') == ended + 1
        assert await made.value('waybill_gateway_processes{state="up"}') == 2


async def test_a_process_that_cannot_run_ends_the_gateway(tmp_path: Path) -> None:
    rules = Rules(grace_s=20, early_s=30, tries=3, base_s=0.01, cap_s=0.02)
    async with stage(tmp_path, "", "die", rules=rules) as made:
        await asyncio.wait_for(asyncio.shield(made.task), 60)
        assert made.processes.hopeless


async def test_to_be_stopped_is_not_hopeless(tmp_path: Path) -> None:
    async with stage(tmp_path, "", "", rules=Rules(grace_s=20, early_s=1000, tries=1)) as made:
        await made.ready()
    assert not made.processes.hopeless


async def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, "", watch_s=0.2, misses=2) as made:
        await made.ready()
        before = made.children[0].pid
        os.kill(before, signal.SIGSTOP)
        await made.another(0, before)
        await made.ready()


async def test_a_process_that_never_says_where_its_health_is_is_killed(tmp_path: Path) -> None:
    async with stage(tmp_path, "mute", up_s=0.2) as made:
        await until(lambda: made.children[0].pid, timeout=20, what="a process")
        before = made.children[0].pid
        await until(lambda: made.children[0].pid != before, timeout=60, what="another process")


async def test_a_process_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    async with stage(tmp_path, "", "stay", rules=Rules(grace_s=0.2)) as made:
        await made.ready()


async def test_it_is_not_ready_while_it_stops(tmp_path: Path) -> None:
    async with stage(tmp_path, "stay", rules=Rules(grace_s=60)) as made:
        await made.ready()
        made.stop.set()
        assert await made.readyz() == (503, '{"status":"failing","failing":{"process 1":"stopping"}}')
        os.kill(made.children[0].pid, signal.SIGKILL)


def test_only_ends_that_come_too_soon_one_after_another_are_counted() -> None:
    ends = EarlyEnds(Rules(grace_s=0, early_s=10, tries=3, within_s=60))
    assert [ends.hopeless(now, 1.0) for now in (0, 1, 2)] == [False, False, True]
    ends = EarlyEnds(Rules(grace_s=0, early_s=10, tries=3, within_s=60))
    assert [ends.hopeless(now, 1.0) for now in (0, 1, 60, 61, 120)] == [False, False, False, False, False]
    ends = EarlyEnds(Rules(grace_s=0, early_s=10, tries=3, within_s=60))
    assert [ends.hopeless(*end) for end in ((0, 1), (1, 1), (20, 19), (21, 1), (22, 1))] == [False] * 5


async def test_the_parent_is_told_and_its_death_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    stop = asyncio.Event()
    parent = Parent.of({PIPE: str(theirs.detach()), INDEX: "3"})
    assert parent is not None
    assert parent.index == 3
    parent.opened(9123)
    assert ours.recv(64) == b"9123\n"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(parent.watch(stop))
        await asyncio.sleep(0)
        assert not stop.is_set()
        ours.close()
        await asyncio.wait_for(stop.wait(), 10)


def test_a_process_that_is_alone_has_no_parent() -> None:
    assert Parent.of({}) is None


async def test_the_public_port_is_kept_for_those_who_share_it() -> None:
    with await reserved(HOST, 0, asyncio.Event()) as held:
        port = held.getsockname()[1]
        with socket.socket() as child, socket.socket() as stranger:
            child.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            child.bind((HOST, port))
            child.listen()
            with pytest.raises(OSError, match="in use"):
                stranger.bind((HOST, port))


async def test_a_port_that_another_gateway_shares_is_waited_for_and_then_refused() -> None:
    stop = asyncio.Event()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        waiting = asyncio.create_task(reserved(HOST, port, stop))
        await asyncio.sleep(0)
        stop.set()
        with pytest.raises(OSError, match="in use"):
            await asyncio.wait_for(waiting, 10)
        waiting = asyncio.create_task(reserved(HOST, port, asyncio.Event()))
        await asyncio.sleep(0)
    with await asyncio.wait_for(waiting, 10) as held:
        assert held.getsockname()[1] == port


def test_a_child_has_its_parents_settings_but_for_its_own() -> None:
    settings = GatewaySettings.model_construct(gateway_name="g", auth_secret=SecretStr("s"))
    base = {"waybill_gateway_processes": "4", "WAYBILL_GATEWAY_WINDOW": "9", "WAYBILL_GATEWAY_PRIVATE_PORT": "9400"}
    assert environment(settings, base, 2, 8400, "/metrics") == {
        "WAYBILL_GATEWAY_WINDOW": "9",
        "WAYBILL_GATEWAY_PROCESSES": "1",
        "WAYBILL_GATEWAY_NAME": "g-2",
        "WAYBILL_GATEWAY_PORT": "8400",
        "WAYBILL_GATEWAY_PRIVATE_PORT": "0",
        "WAYBILL_PRIVATE_HOST": "127.0.0.1",
        METRICS: "/metrics",
    }


def test_every_gauge_says_how_those_of_several_processes_make_one() -> None:
    names = [f"services.gateway.{module.name}" for module in pkgutil.iter_modules(services.gateway.__path__)]
    modules = [importlib.import_module(name) for name in (*names, "shared.metrics")]
    gauges = {value for module in modules for value in vars(module).values() if isinstance(value, Gauge)}
    assert {SESSIONS, LOOP_LAG} <= gauges
    assert [gauge for gauge in gauges if not gauge._multiprocess_mode.startswith("live")] == []
