from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from deploy.local.lock import started
from deploy.local.parts import ServicePart
from deploy.local.ports import HOST, free_port
from deploy.local.process import StartError
from deploy.local.services import Service
from deploy.local.supervisor import Supervisor
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(os.environ.get("STATUS", "200")))
        self.end_headers()
        self.wfile.write(b"what fails")
    def log_message(self, *_): pass
def stop(*_):
    with open("order", "a") as order: order.write(os.environ["NAME"] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("begins", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def part(folder: Path, name: str, program: str = SERVER, **environment: str) -> ServicePart:
    port = free_port()
    argv = (sys.executable, "-S", "-c", program, str(port))
    return ServicePart(Service(name, argv, f"http://{HOST}:{port}", {"NAME": name, **environment}), folder)


class Stage:
    def __init__(self, parts: Sequence[ServicePart]) -> None:
        self.pids: list[list[int]] = []
        self.lines: list[str] = []
        self.hurry = asyncio.Event()
        self.supervisor = Supervisor(
            parts, changed=lambda: self.pids.append([part.pid for part in parts]), told=self.lines.append
        )


@asynccontextmanager
async def running(parts: Sequence[ServicePart]) -> AsyncIterator[Stage]:
    stage = Stage(parts)
    try:
        async with asyncio.timeout(30):
            await stage.supervisor.start()
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            keeping = group.create_task(stage.supervisor.keep())
            yield stage
            keeping.cancel()
    finally:
        await stage.supervisor.stop(stage.hurry)


@pytest.mark.promise("protocol.8.up")
async def test_what_dies_is_started_again_at_the_same_address(tmp_path: Path) -> None:
    parts = [part(tmp_path, "one"), part(tmp_path, "two")]
    async with running(parts) as stage:
        first, other = parts[0].pid, parts[1].pid
        for _ in range(3):
            before = parts[0].pid
            os.kill(before, signal.SIGKILL)
            await until(lambda: parts[0].pid != before, timeout=15, what="another process")  # noqa: B023 - awaited before the loop goes on
            await until(lambda: stage.lines[-1].endswith(f"process {parts[0].pid}"), timeout=15, what="it serves")
        assert parts[0].pid != first
        assert parts[1].pid == other
        assert stage.pids[-1] == [parts[0].pid, other]
        assert stage.lines[0] == f"one (process {first}) ended; it is started again"


async def test_parts_are_stopped_in_order(tmp_path: Path) -> None:
    parts = [part(tmp_path, name) for name in ("one", "two", "three")]
    async with running(parts):
        pass
    assert (tmp_path / "order").read_text().split() == ["one", "two", "three"]
    assert not any(one.alive() for one in parts)


async def test_a_part_that_ends_at_once_fails_the_start_with_its_own_last_lines(tmp_path: Path) -> None:
    (tmp_path / "bad.log").write_text("of an earlier life\n")
    parts = [part(tmp_path, "good"), part(tmp_path, "bad", "import sys; sys.exit('port 1 is taken')")]
    with pytest.raises(StartError, match="bad did not start: it ended") as failed:
        async with running(parts):
            pass
    assert str(failed.value).endswith("port 1 is taken")
    assert "earlier life" not in str(failed.value)
    assert not any(one.alive() for one in parts)


async def test_a_part_that_does_not_get_ready_fails_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.parts.READY_SECONDS", 3.0)
    with pytest.raises(StartError, match=r"not ready after 3 s; it said what fails"):
        async with running([part(tmp_path, "slow", STATUS="503")]):
            pass


async def test_a_program_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    missing = ServicePart(Service("gone", ("/nowhere/python",), f"http://{HOST}:1", {}), tmp_path)
    with pytest.raises(StartError, match="gone did not start"):
        async with running([missing]):
            pass


async def test_a_part_that_does_not_come_back_is_tried_again_and_told(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    program = f"import os, sys\nif os.path.exists({str(flag)!r}): sys.exit('still broken')\n{SERVER}"
    parts = [part(tmp_path, "one", program)]
    async with running(parts) as stage:
        flag.touch()
        os.kill(parts[0].pid, signal.SIGKILL)
        await until(lambda: sum("still broken" in said for said in stage.lines) >= 2, timeout=30, what="two tries")
        flag.unlink()
        await until(lambda: "serves again" in stage.lines[-1], timeout=30, what="it serves")


async def test_hurry_kills_what_takes_its_time(tmp_path: Path) -> None:
    stubborn = SERVER.replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    parts = [part(tmp_path, "stubborn", stubborn)]
    loop = asyncio.get_running_loop()
    async with running(parts) as stage:
        began = loop.time()
        loop.call_later(0.3, stage.hurry.set)
    assert loop.time() - began < 10
    assert not parts[0].alive()


async def test_a_part_of_several_processes_has_all_their_ids_and_hurry_ends_all(tmp_path: Path) -> None:
    other = "[sys.executable, '-S', '-c', 'import time; time.sleep(600)']"
    program = f"import subprocess, sys\nother = subprocess.Popen({other})\n{SERVER}"
    parts = [part(tmp_path, "several", program)]
    async with running(parts) as stage:
        pids = parts[0].pids
        assert pids[0] == parts[0].pid
        assert len(pids) == 2
        assert all(map(started, pids))
        stage.hurry.set()
    await until(lambda: not any(map(started, pids)), timeout=10, what="none of them is left")
    assert parts[0].pids == pids[:1]
