from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waybill_client import Client

from deploy.local.lock import started
from deploy.local.process import children_of
from deploy.local.running import NotRunningError, Running, running
from shared.auth import mint
from tests.waiting import until

if TYPE_CHECKING:
    from deploy.local.endpoints import Endpoints

pytestmark = [pytest.mark.promise("protocol.8.up"), pytest.mark.timeout(400), pytest.mark.long(90)]

WAYBILL = Path(sys.executable).with_name("waybill")
SERVICES = ("ingest", "relay", "gateway", "receipts", "console")
STORES = ("postgres", "kafka", "redis")


def pids(endpoints: Endpoints) -> dict[str, int]:
    return {name: endpoints.pids_of(name)[0] for name in (*SERVICES, *STORES)}


async def say(endpoints: Endpoints, *, seq: int) -> None:
    """A message from ada to ben, whose seq is then known."""
    ada, ben = (mint(endpoints.auth_secret, user) for user in ("ada", "ben"))
    async with Client(endpoints.socket, ada, "phone") as sender, Client(endpoints.socket, ben, "phone") as receiver:
        async with asyncio.timeout(90):
            await sender.ready(60)
            await receiver.ready(60)
            chat = await sender.create("direct", ["ben"])
            sent = await sender.send(chat.conversation_id, {"text": f"number {seq}"})
            assert sent.seq == seq
            async for event in receiver.events():
                if event.event_id == sent.event_id:
                    assert event.body == {"text": f"number {seq}"}
                    return


def test_all_parts_run_and_whatever_dies_comes_back_where_it_was(tmp_path: Path) -> None:
    with running(tmp_path) as stack:
        first = stack.endpoints
        assert set(first.pids) == {*SERVICES, *STORES}
        assert set(first.private) == set(SERVICES)
        assert all(ready(url) for url in first.private.values())
        asyncio.run(say(first, seq=2))
        before = pids(first)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        asyncio.run(all_new(stack, before))
        asyncio.run(say(stack.endpoints, seq=3))
        after = stack.endpoints
        assert (after.gateway, after.ingest, after.console) == (first.gateway, first.ingest, first.console)
        assert (after.private, after.postgres, after.kafka) == (first.private, first.postgres, first.kafka)
        assert (after.redis, after.auth_secret) == (first.redis, first.auth_secret)


async def all_new(stack: Running, before: dict[str, int]) -> None:
    def new() -> bool:
        now = pids(stack.endpoints)
        return all(now[name] != before[name] for name in before) and all(map(ready, stack.endpoints.private.values()))

    await until(new, timeout=120, what="another process for every part")


def ready(private: str) -> bool:
    try:
        with urllib.request.urlopen(f"{private}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_folder_is_one_stack_that_resumes_whatever_ended_it(tmp_path: Path) -> None:
    with running(tmp_path) as stack:
        first = stack.endpoints
        asyncio.run(say(first, seq=2))
        with pytest.raises(NotRunningError, match="in use by process"), running(tmp_path):
            pass
        assert stack.endpoints == first
        assert stack.stop() == 0
        assert not stack.file.exists()
        assert [name for name, pid in pids(first).items() if started(pid)] == []

    with running(tmp_path) as stack:
        second = stack.endpoints
        assert (second.gateway, second.postgres, second.auth_secret) == (
            first.gateway,
            first.postgres,
            first.auth_secret,
        )
        asyncio.run(say(second, seq=3))
        stack.process.kill()
        stack.process.wait()
        assert started(pids(second)["gateway"])

    with running(tmp_path) as stack:
        third = stack.endpoints
        assert third.gateway == first.gateway
        assert [name for name, pid in pids(second).items() if started(pid)] == []
        asyncio.run(say(third, seq=4))


def test_a_service_that_does_not_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    environment = {"WAYBILL_GATEWAY_WINDOW": "none"}
    with pytest.raises(NotRunningError) as failed, running(tmp_path, environment=environment):
        pass
    assert "gateway did not start" in str(failed.value)
    assert "WAYBILL_GATEWAY_WINDOW" in str(failed.value)
    assert not (tmp_path / "endpoints.json").exists()


def test_several_gateways_share_one_stack_and_end_with_whoever_started_them(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from deploy.local.process import children_of
from deploy.local.running import running
with running(Path({str(tmp_path)!r}), gateways=2, environment={{"WAYBILL_GATEWAY_PROCESSES": "2"}}) as stack:
    Path({str(tmp_path / "ready")!r}).touch()
    time.sleep(300)
"""
    owner = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait(lambda: (tmp_path / "ready").exists() or owner.poll() is not None)
        stack = Running(tmp_path, owner)
        endpoints = stack.endpoints
        assert endpoints.gateways[0] == endpoints.gateway
        assert len(set(endpoints.gateways)) == 2
        assert all(map(ready, endpoints.gateways_private))
        first = endpoints.pids_of("gateway")
        assert [children_of(pid) for pid in first] == [first[1:3], [], [], first[4:6], [], []]
        os.kill(first[1], signal.SIGKILL)
        wait(lambda: len({*stack.endpoints.pids_of("gateway")} - {first[1]}) == 6)
        endpoints = stack.endpoints
        assert {*first} - {*endpoints.pids_of("gateway")} == {first[1]}
    finally:
        owner.kill()
        owner.wait()
    processes = {*pids(endpoints).values(), *endpoints.pids_of("gateway")}
    wait(lambda: not stack.file.exists() and not any(map(started, processes)))


def wait(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
