"""A client that reads nothing for a minute, among 200 that do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.apps import App, displayed, hold, latencies, opened, percentile, read, talk
from tests.metrics import metrics
from tests.services import SECRET, Stores, services
from tests.waiting import lasting

if TYPE_CHECKING:
    from tests.databases import Database
    from tests.stack import Stores as Servers

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(110)]

SILENT_S = 60.0
"""Less than two pings (`heartbeat_s` is 25 s) go without an answer in that time: the session is not closed for them."""

READERS = 200
EVERY_S = 0.5
LARGE_EVERY_S = 0.1
LARGE = "x" * 30_000
MOST_GROWTH = 4 * 1024 * 1024
"""Bytes. Kept for the silent one, its window alone would be twice that, and all that is said 18 MB."""


def resident(pid: int) -> int:
    """Bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(kib) * 1024


@pytest.mark.promise("I6", "I7")
async def test_it_costs_the_others_nothing_and_loses_nothing(
    stores: Servers, database: Database, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    """The silent one is in a second group, too, where a lot is said: its socket, its buffers and its window fill up.

    Reading again, it gets everything once and in order, in the session that it has.
    """
    loop = asyncio.get_running_loop()
    async with services(Stores(database, stores.kafka, redis_url), topic_prefix, tmp_path) as house:
        readers = [App(house.socket, SECRET, f"reader{number}") for number in range(READERS)]
        # A client that waits for pongs would leave by itself.
        silent = App(house.socket, SECRET, "silent", ping_s=10 * SILENT_S)
        apps = [*readers, silent]
        async with opened(apps):
            users = [app.user_id for app in apps]
            founder = readers[0].client
            all_ = (await founder.create("group", users[1:], "all")).conversation_id
            few = (await founder.create("group", [users[1], silent.user_id], "few")).conversation_id
            await displayed(await read(database.owner_url, [all_, few]), apps)
            gateway = house.parts["gateway"].pid
            async with (
                talk([(app, all_) for app in apps], every_s=EVERY_S),
                talk([(app, few) for app in readers[:2]], every_s=LARGE_EVERY_S, text=LARGE),
            ):
                await lasting(5)
                before, begun = resident(gateway), loop.time()
                socket = silent.client._connection._socket
                assert socket is not None
                socket.transport.pause_reading()
                held = len(silent.recording.pushed)
                await lasting(SILENT_S)
                after, over = resident(gateway), loop.time()
                assert len(silent.recording.pushed) <= held + 300, "it reads nothing"
                states = await metrics(house.private("gateway"))
                socket.transport.resume_reading()
            everything = await read(database.owner_url, [all_, few])
            await displayed(everything, apps)
            hold(everything, apps)

            took = latencies(readers, begun, over)
            shares = {share: percentile(took, share) for share in (50, 99)}
            assert len(took) > 0.9 * READERS * SILENT_S / EVERY_S
            # All 200 are in this one process, and these bounds are for its pace. Who waits for the silent one waits a
            # minute.
            assert shares[50] < 1, shares
            assert shares[99] < 4, shares
            assert {app.sessions for app in apps} == {1}
            assert after - before < MOST_GROWTH
            assert states['waybill_sessions_by_state{state="stalled"}'] == 1
