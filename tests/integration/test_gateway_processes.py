"""A gateway of several processes, as it runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from deploy.local.lock import started
from deploy.local.ports import HOST, free_port
from tests.gateways import SECRET, Client, token, user
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.gateways import House

pytest_plugins = ["tests.integration.gateway_house"]

ROOT = Path(__file__).parents[2]
PROCESSES = 2
ACCEPTED = 'waybill_handshakes_total{status="101"}'

_numbers = itertools.count()


@dataclass
class Several:
    """A gateway of two processes, and what it has written about them."""

    process: subprocess.Popen[bytes]
    port: int
    private: str
    log: Path

    @property
    def children(self) -> dict[int, tuple[int, str]]:
        """By index: the process id, and where its health is, as told last."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return {
            line["process"]: (line["pid"], line["private"]) for line in lines if line.get("event") == "process is up"
        }

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *(pid for pid, _ in self.children.values())]

    async def ready(self) -> None:
        async def asked() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return (await ask(f"{self.private}/readyz"))[0] == 200

        await until(asked, timeout=60, what="all processes are ready")

    async def of_each(self, metric: str) -> list[float]:
        """A metric as each process has it."""
        return [await value(private, metric) for _, private in self.children.values()]

    async def device(self, stack: AsyncExitStack, user_id: str, device: str) -> Client:
        socket = await connect(
            f"ws://{HOST}:{self.port}/v1/socket", compression=None, subprotocols=[Subprotocol("waybill.v1")]
        )
        client = await stack.enter_async_context(Client(socket, acks=True))
        await client.hello(device, token=token(user_id))
        return client

    async def devices(self, stack: AsyncExitStack, user_id: str) -> list[Client]:
        """As many of a user's devices as it takes until each process has one."""
        made: list[Client] = []
        before = await self.of_each(ACCEPTED)
        while any(now <= was for now, was in zip(await self.of_each(ACCEPTED), before, strict=True)):
            assert len(made) < 60
            made.append(await self.device(stack, user_id, f"device-{next(_numbers)}"))
        return made


@asynccontextmanager
async def gateway(home: House, folder: Path, port: int) -> AsyncIterator[Several]:
    private_port = free_port({port})
    environment = {
        "WAYBILL_POSTGRES_URL": home.database.url("gateway"),
        "WAYBILL_KAFKA_BOOTSTRAP": home.stores.kafka,
        "WAYBILL_TOPIC_PREFIX": home.topics.prefix,
        "WAYBILL_REDIS_URL": home.redis_url,
        "WAYBILL_AUTH_SECRET": SECRET,
        "WAYBILL_INGEST_URL": f"http://{HOST}:{home.ingest_port}",
        "WAYBILL_GATEWAY_PORT": str(port),
        "WAYBILL_GATEWAY_PRIVATE_PORT": str(private_port),
        "WAYBILL_GATEWAY_NAME": "several",
        "WAYBILL_GATEWAY_DRAIN_S": "0.5",
        "WAYBILL_GATEWAY_PROCESSES": str(PROCESSES),
        "TMPDIR": str(folder),
    }
    made = started_with(environment, port, f"http://{HOST}:{private_port}", folder / f"gateway-{private_port}.log")
    try:
        await made.ready()
        yield made
    finally:
        made.process.terminate()
        await asyncio.to_thread(made.process.wait, 60)
        await until(lambda: not any(map(started, made.pids)), timeout=60, what="none of its processes is left")


async def test_processes_share_a_port_and_the_death_of_one_is_no_others(home: House, tmp_path: Path) -> None:
    ann, bob = user("ann"), user("bob")
    conversation = await home.group(ann, bob)
    async with gateway(home, tmp_path, free_port()) as several, AsyncExitStack() as stack:
        devices = await several.devices(stack, ann)
        # The first is that it was made.
        seqs = [1, *await home.messages(conversation, bob, 3)]
        await home.line.publish()
        for device in devices:
            await device.has(conversation, *seqs)

        async def counted() -> bool:
            counts = await several.of_each("waybill_sessions")
            return await value(several.private, "waybill_sessions") == len(devices) == sum(counts) > max(counts)

        await until(counted, timeout=30, what="the sessions of all processes are counted as one")
        pushes = await value(several.private, "waybill_pushes_total")
        assert pushes >= 3 * len(devices)

        (killed, _), (other, _) = several.children[1], several.children[2]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: several.children[1][0] != killed, timeout=60, what="another process")
        await several.ready()
        assert several.children[2][0] == other
        assert await value(several.private, "waybill_pushes_total") >= pushes
        left = [device for device in devices if not device._reading.done()]
        assert 0 < len(left) < len(devices)
        seqs += await home.messages(conversation, bob, 1)
        await home.line.publish()
        for device in left:
            await device.has(conversation, *seqs)
        again = await several.devices(stack, ann)

        several.process.terminate()
        assert await asyncio.to_thread(several.process.wait, 60) == 0
        assert {await device.closed() for device in (*left, *again)} == {4503}
        assert not any(map(started, several.pids))
    assert metrics_left(tmp_path) == []


async def test_processes_whose_parent_was_killed_drain_and_another_takes_the_port(home: House, tmp_path: Path) -> None:
    port = free_port()
    async with gateway(home, tmp_path, port) as first, AsyncExitStack() as stack:
        devices = await first.devices(stack, user("ann"))
        first.process.kill()
        for device in devices:
            await device.one("reconnect")
        async with gateway(home, tmp_path, port) as second:
            await second.devices(stack, user("bob"))
        await until(lambda: not any(map(started, first.pids)), timeout=60, what="no process of the first is left")
    assert metrics_left(tmp_path) == []


def started_with(environment: dict[str, str], port: int, private: str, log: Path) -> Several:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.gateway.main"], cwd=ROOT, env={**os.environ, **environment}, stderr=out
        )
    return Several(process, port, private, log)


def metrics_left(folder: Path) -> list[Path]:
    return list(folder.glob("waybill-gateway-*"))


async def ask(url: str) -> tuple[int, str]:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientError:
        return 0, ""


async def value(private: str, name: str) -> float:
    _, text = await ask(f"{private}/metrics")
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))
