"""A minute without Kafka, under load: half of it frozen, half of it dead."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from services.console.demo import truth
from tests.apps import App, displayed, hold, latencies, opened, percentile, read, repeats, talk, ticked
from tests.metrics import metrics, readyz
from tests.services import SECRET, Stores, services
from tests.waiting import lasting, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from shared.kafka import Topics
    from tests.databases import Database
    from tests.own_stack import OwnStack

pytest_plugins = ["tests.own_fixtures"]

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(130)]

OUTAGE_S = 60.0
NOTICED_S = 10.0
"""By then everybody knows that Kafka is away."""

PROMISED_S = 2.0
"""How far delivery may be behind then (design §6: the sweep)."""

EVERY_S = 0.05


@asynccontextmanager
async def asked(private: str) -> AsyncIterator[set[int]]:
    """What `readyz` answers meanwhile."""
    statuses: set[int] = set()

    async def ask() -> None:
        while True:
            statuses.add(await readyz(private))
            await asyncio.sleep(0.5)

    asking = asyncio.create_task(ask())
    try:
        yield statuses
    finally:
        asking.cancel()


@pytest.mark.promise("I6", "I8", "I10")
async def test_the_sweep_carries_delivery_for_a_minute(
    own_stack: OwnStack, own_database: Database, own_topics: Topics, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    stores = Stores(own_database, own_stack.kafka, own_stack.redis)
    async with services(stores, own_topics.prefix, tmp_path) as house:
        users = ["ann", "ben", "cat", "dan"]
        apps = [App(house.socket, SECRET, user, device) for user in users for device in ("phone", "tablet")]
        async with opened(apps), asked(house.private("gateway")) as statuses:
            ann, cat = apps[0], apps[4]
            created = [
                await ann.client.create("group", users[1:], "all"),
                await ann.client.create("direct", ["ben"]),
                await cat.client.create("direct", ["dan"]),
            ]
            chats = [one.conversation_id for one in created]
            await displayed(await read(stores.postgres_url, chats), apps)
            places = [(app, chat) for app in apps for chat in chats if chat in app.client.conversations]
            async with talk(places, every_s=EVERY_S):
                await lasting(2)
                begun = loop.time()
                own_stack.fault("kafka", signal.SIGSTOP)
                await lasting(OUTAGE_S / 2)
                own_stack.fault("kafka", signal.SIGKILL)
                await lasting(OUTAGE_S / 2)
                over = loop.time()
                assert await truth.behind(stores.postgres_url, chats) > 0, "ticks wait for Kafka"
                await asyncio.to_thread(own_stack.restart, "kafka")

                async def well() -> bool:
                    return all([await readyz(house.private(name)) == 200 for name in house.parts])

                await until(well, timeout=60, what="all services have Kafka again")
                back = loop.time()
                await lasting(3)
            held = await read(stores.postgres_url, chats)
            await displayed(held, apps)
            await ticked(stores.postgres_url, chats, apps)
            hold(held, apps)

            assert statuses == {200}, "a gateway without Kafka serves"
            assert {app.sessions for app in apps} == {1}, "nobody was sent away"
            told = await metrics(house.private("gateway"))
            assert repeats(apps) <= told["waybill_resends_total"], "repeats that no missing ack explains"
            assert told['waybill_sweep_finds_total{kind="event"}'] > 0
            behind = latencies(apps, begun + NOTICED_S, over)
            assert len(behind) > (OUTAGE_S - NOTICED_S) / EVERY_S
            shares = {share: percentile(behind, share) for share in (50, 90, 99)}
            assert shares[50] <= PROMISED_S, shares
            assert shares[99] <= 3 * PROMISED_S, shares
            live = latencies(apps, back, loop.time())
            assert percentile(live, 50) < 0.75 * shares[50], "Kafka carries again"
