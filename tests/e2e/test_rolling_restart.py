"""Three gateways behind one address are restarted one after another, under load."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from deploy.local.lock import started
from deploy.local.running import Running, running
from tests.apps import App, displayed, hold, opened, read, talk, ticked
from tests.doors import HOST, door
from tests.metrics import readyz
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(80)]

GATEWAYS = 3
APPS = 120
DRAIN_S = 5.0
"""`WAYBILL_GATEWAY_DRAIN_S`: a gateway that ends sends its sessions away evenly over so long."""

AFTER_S = 1.0
"""A session that is sent away comes back within so long."""

GRACE_S = 20.0
SLACK = 3
"""Hellos that the pace of a busy machine may move into another second."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = {"WAYBILL_GATEWAY_DRAIN_S": str(DRAIN_S)}
    with running(tmp_path_factory.mktemp("stack"), gateways=GATEWAYS, environment=settings) as made:
        yield made


def peak(times: Iterable[float]) -> int:
    """Most of these within one second, whenever that begins."""
    ordered = sorted(times)
    return max((sum(at <= one < at + 1 for one in ordered) for at in ordered), default=0)


async def serves(private: str) -> bool:
    return await readyz(private) == 200


@pytest.mark.promise("I6", "I7", "protocol.3.reconnect")
async def test_it_loses_nothing_and_nobody_comes_back_in_a_crowd(stack: Running) -> None:
    """In any second at most twice as many sessions come back as are sent away in one: `sessions / DRAIN_S * 2`."""
    endpoints = stack.endpoints
    loop = asyncio.get_running_loop()
    ports = [urlsplit(url).port or 0 for url in endpoints.gateways]
    async with door(ports) as address:
        url = f"ws://{HOST}:{address.port}/v1/socket"
        apps = [App(url, endpoints.auth_secret, f"user{number}") for number in range(APPS)]
        async with opened(apps):
            group = await apps[0].client.create("group", [app.user_id for app in apps[1:]], "all")
            pairs = [apps[number : number + 2] for number in range(0, 20, 2)]
            directs = [await one.client.create("direct", [other.user_id]) for one, other in pairs]
            chats = [group.conversation_id, *(chat.conversation_id for chat in directs)]
            await displayed(await read(endpoints.postgres, chats), apps)
            places = [(one, chat) for pair, chat in zip(pairs, chats[1:], strict=True) for one in pair]
            async with talk(places, every_s=0.05), talk([(app, chats[0]) for app in apps], every_s=0.4):
                for number in range(GATEWAYS):
                    pid = stack.endpoints.pids_of("gateway")[number]
                    begun = loop.time()
                    os.kill(pid, signal.SIGTERM)
                    await until(lambda pid=pid: not started(pid), timeout=GRACE_S, what="its end")
                    took = loop.time() - begun
                    private = endpoints.gateways_private[number]
                    await until(lambda url=private: serves(url), timeout=60, what="another in its place")
                    hellos = [at for app in apps for at in app.recording.opened.values() if at >= begun]
                    assert took < DRAIN_S + AFTER_S + 5
                    assert len(hellos) > APPS / GATEWAYS / 2, "it had its share of the sessions"
                    assert peak(hellos) <= 2 * len(hellos) / DRAIN_S + SLACK
            held = await read(endpoints.postgres, chats)
            await displayed(held, apps)
            await ticked(endpoints.postgres, chats, apps)
            hold(held, apps)
            assert sum(app.sessions for app in apps) >= 2 * APPS
