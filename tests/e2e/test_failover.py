"""Postgres fails over, under load, to a standby that lacks the last commits."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from deploy.local import ports
from deploy.migrate import migrate
from shared.kafka import Topics
from tests.apps import App, displayed, latencies, opened, percentile, read, talk, ticked
from tests.databases import ROLE_PASSWORD, Database
from tests.metrics import metrics
from tests.own_stack import OwnStack
from tests.relays import all_records, drained, ids_of
from tests.services import SECRET, Services, Stores, services
from tests.stack import FOLDER_PREFIX
from tests.standby import copied, standby
from tests.waiting import lasting, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(90)]

TOPICS = Topics("waybill")


@pytest.fixture
def stack() -> Iterator[OwnStack]:
    """Its Postgres is given up by the test."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        # Postgres of a root's test run has another user, who must be able to reach its own folder below.
        Path(folder).chmod(0o711)
        with OwnStack(Path(folder)) as made:
            migrate(made.postgres_url, role_password=ROLE_PASSWORD)
            yield made


class Replica:
    """A standby that follows, until it is cut off; then it takes the primary's place at its address."""

    def __init__(self, stack: OwnStack, exits: ExitStack) -> None:
        self._stack = stack
        self._exits = exits
        self._following = exits.enter_context(ExitStack())
        self._home = stack.state / "standby"
        self._log = stack.state / "standby.log"

    def follow(self) -> None:
        primary = self._stack._children["postgres"].command
        copied(primary, self._stack.postgres_url, primary.folder / "copy")
        (primary.folder / "copy").rename(self._home)
        self._following.enter_context(standby(self._home, self._log, ports.free_port()))

    async def cut_off(self, owner: asyncpg.Connection) -> None:
        """It has all that is committed by now, and nothing later."""
        now = await owner.fetchval("SELECT pg_current_wal_lsn()")
        behind = "SELECT count(*) FROM pg_stat_replication WHERE flush_lsn >= $1::pg_lsn"
        await until(lambda: owner.fetchval(behind, now), timeout=30, what="the standby has all")
        await asyncio.to_thread(self._following.close)

    def take_over(self) -> None:
        """At the primary's address, still read-only."""
        self._exits.enter_context(standby(self._home, self._log, self._stack.ports["postgres"], alone=True))


async def messages(url: str) -> dict[str, str]:
    """Event id by `client_msg_id`, of messages. None has two: both are unique in their conversation."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT client_msg_id, event_id::text FROM event WHERE type = 'message'")
    finally:
        await connection.close(timeout=5)
    found = dict(map(tuple, rows))
    assert len(found) == len(rows)
    return found


def in_order(app: App) -> bool:
    """Whether the screen shows each conversation's events once, ascending."""
    last: dict[str, int] = {}
    for conversation_id, seq, _ in app.display:
        if seq <= last.get(conversation_id, 0):
            return False
        last[conversation_id] = seq
    return True


@pytest.mark.promise("I4", "I6", "I7", "I10", "protocol.3.reset")
async def test_every_device_ends_with_the_new_timeline_and_its_own_messages(stack: OwnStack, tmp_path: Path) -> None:
    """Of the commits that are lost, the last ones are with a frozen Kafka: it writes them when all is over.

    One device was away since before, one goes away with events that are lost, and both come back.
    """
    stores = Stores(Database("waybill", stack.postgres_url), stack.kafka, stack.redis)
    with ExitStack() as exits:
        replica = Replica(stack, exits)
        async with services(stores, TOPICS.prefix, tmp_path) as house:
            users = ["ann", "ben", "cat", "dan"]
            apps = {
                (user, device): App(house.socket, SECRET, user, device)
                for user in users
                for device in ("phone", "tablet")
            }
            async with opened(list(apps.values())):
                await drill(house, stack, replica, apps)


async def drill(house: Services, stack: OwnStack, replica: Replica, apps: dict[tuple[str, str], App]) -> None:
    everybody, url = list(apps.values()), stack.postgres_url
    ann, cat = apps["ann", "phone"], apps["cat", "phone"]
    created = [
        await ann.client.create("group", ["ben", "cat", "dan"], "all"),
        await ann.client.create("direct", ["ben"]),
        await cat.client.create("direct", ["dan"]),
    ]
    chats = [one.conversation_id for one in created]
    await displayed(await read(url, chats), everybody)
    longest_away, holds_lost = apps["ben", "tablet"], apps["dan", "tablet"]
    await asyncio.to_thread(replica.follow)
    here = [app for app in everybody if app is not longest_away]
    places = [(app, chat) for app in here for chat in chats if chat in app.client.conversations]

    async with talk(places, every_s=0.03):
        await lasting(1)
    await displayed(await read(url, chats), everybody)
    await longest_away.close()
    owner = await asyncpg.connect(url)
    await replica.cut_off(owner)
    await owner.close()
    safe = await messages(url)

    async with talk(places, every_s=0.03):
        await lasting(1.5)
    stack.fault("kafka", signal.SIGSTOP)
    async with talk(places, every_s=0.03):
        await lasting(1.5)
    await displayed(await read(url, chats), here)
    lost = {id_: event_id for id_, event_id in (await messages(url)).items() if id_ not in safe}
    assert len(lost) > 80
    assert all(set(lost.values()) & {event_id for _, _, event_id in app.display} for app in here)
    await holds_lost.close()

    talking = [(app, chat) for app, chat in places if app is not holds_lost]
    async with talk(talking, every_s=0.05):
        await lasting(0.5)
        stack.fault("postgres", signal.SIGKILL)
        await asyncio.to_thread(replica.take_over)
        await lasting(1)
        promoted = await asyncpg.connect(url)
        assert await promoted.fetchval("SELECT pg_promote()")
        noticed = "SELECT count(*) FROM transition WHERE service = 'gateway' AND kind = 'store' AND cause = 'changed'"
        await until(lambda: promoted.fetchval(noticed), timeout=60, what="the gateway notices")
        stack.fault("kafka", signal.SIGCONT)
        await until(
            lambda: all(app.sessions > 1 for app in here if app is not holds_lost), timeout=60, what="reconnects"
        )
        await longest_away.open()
        await holds_lost.open()
        await lasting(3)
    loop = asyncio.get_running_loop()
    held = await read(url, chats)
    await displayed(held, everybody)
    for app in everybody:
        assert app.shown == set(held.expected(app.user_id)), app.recording.device_id
        assert in_order(app), app.recording.device_id
    there = await messages(url)
    written = {id_ for app in everybody for id_ in app.written}
    assert there.keys() == written
    assert not {there[id_] for id_ in lost} & set(lost.values()), "they are other events now"
    assert longest_away.rewinds == []
    assert all(app.rewinds for app in everybody if app is not longest_away)
    told = await metrics(house.private("gateway"))
    assert told['waybill_cursor_breaks_total{kind="reset"}'] > 0

    begun = loop.time()
    async with talk(places, every_s=0.05):
        await lasting(2)
    await displayed(await read(url, chats), everybody)
    took = latencies(everybody, begun, loop.time())
    assert percentile(took, 50) < 1, "Kafka carries"
    await ticked(url, chats, everybody)

    await drained(promoted, timeout=60)
    published = ids_of(await all_records(stack.kafka, [TOPICS.events]))
    missing = set((await messages(url)).values()) - {*published}
    assert not missing, f"{len(missing)} events of the new timeline never came to Kafka"
    await promoted.close()
