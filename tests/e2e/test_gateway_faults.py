"""A gateway of two processes and real clients, while records are lost, Redis is emptied, freezes and dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import asyncpg
import pytest
import redis.asyncio
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from deploy.local.running import Running, running
from shared.auth import mint
from shared.kafka import PARTITIONS, Topics
from tests.apps import App, displayed, hold, latencies, opened, percentile, read, talk, ticked
from tests.metrics import metrics, readyz
from tests.relays import all_records, drained, ids_of
from tests.waiting import lasting, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(90)]

SETTINGS = {"WAYBILL_GATEWAY_PROCESSES": "2", "WAYBILL_GATEWAY_SWEEP_S": "2"}
TOPICS = Topics("waybill")
FETCH_S = 1.0
"""Longer than a consumer's fetch waits at the broker."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("stack"), environment=SETTINGS) as made:
        yield made


@pytest.fixture
async def owner(stack: Running) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(stack.endpoints.postgres)
    yield connection
    await connection.close(timeout=5)


@dataclass
class Crew:
    """Three users with their devices, in a group and in direct chats of two."""

    stack: Running
    apps: list[App]
    chats: list[str]

    def of(self, name: str) -> App:
        return next(app for app in self.apps if app.user_id.startswith(name))

    @property
    def places(self) -> list[tuple[App, str]]:
        """Where each can say something."""
        return [(app, chat) for app in self.apps for chat in self.chats if chat in app.client.conversations]

    async def seen(self) -> None:
        """Everything that is committed is displayed and ticked, and nothing is wrong with how."""
        url = self.stack.endpoints.postgres
        held = await read(url, self.chats)
        await displayed(held, self.apps)
        await ticked(url, self.chats, self.apps)
        hold(held, self.apps)


@asynccontextmanager
async def crew(stack: Running, of: str, devices: int = 2) -> AsyncIterator[Crew]:
    endpoints = stack.endpoints
    users = [f"{name}-{of}" for name in ("ann", "ben", "cat")]
    apps = [
        App(endpoints.socket, endpoints.auth_secret, user, f"device{number}")
        for user in users
        for number in range(devices)
    ]
    async with opened(apps):
        ann, ben = apps[0].client, apps[devices].client
        group = await ann.create("group", users[1:], "all")
        directs = [await ann.create("direct", [users[1]]), await ben.create("direct", [users[2]])]
        made = Crew(stack, apps, [group.conversation_id, *(chat.conversation_id for chat in directs)])
        await displayed(await read(endpoints.postgres, made.chats), apps)
        yield made


@contextmanager
def frozen(stack: Running, part: str) -> Iterator[None]:
    """None of its processes does anything; one may be killed meanwhile."""
    pids = stack.endpoints.pids_of(part)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def finds(stack: Running, kind: str) -> float:
    return (await metrics(stack.endpoints.private["gateway"]))[f'waybill_sweep_finds_total{{kind="{kind}"}}']


async def found_more(stack: Running, kind: str, before: float) -> None:
    async def more() -> bool:
        return await finds(stack, kind) > before

    await until(more, timeout=30, what=f"the sweep finds of {kind}")


_PASS_OVER = """
    UPDATE outbox_shard AS s SET cursor_id = o.id
    FROM (SELECT shard, max(id) AS id FROM outbox GROUP BY shard) AS o
    WHERE o.shard = s.shard AND o.id > s.cursor_id
"""


@pytest.mark.promise("I6", "I10")
async def test_what_never_came_to_kafka_is_found(stack: Running, owner: asyncpg.Connection) -> None:
    """Messages, ticks and a whole new chat are marked as published and are not."""
    async with crew(stack, "unsent") as people:
        cat = people.of("cat")
        before = {kind: await finds(stack, kind) for kind in ("event", "change", "receipt")}
        await drained(owner, timeout=60)
        last = await owner.fetchval("SELECT max(id) FROM outbox")
        with frozen(stack, "relay"):
            async with talk(people.places, every_s=0.05):
                await lasting(2)
                secret = await cat.client.create("direct", [people.of("ann").user_id])
                people.chats.append(secret.conversation_id)
                await cat.say(secret.conversation_id, "psst")
            # Ticks come of what was displayed, and are lost as well.
            await people.seen()
            await owner.execute(_PASS_OVER)
            os.kill(stack.endpoints.pids_of("relay")[0], signal.SIGKILL)
        for kind, count in before.items():
            assert await finds(stack, kind) > count, kind
        lost = await owner.fetch("SELECT topic, event_id::text FROM outbox WHERE id > $1", last)
        assert {row["topic"] for row in lost} == {"events.v1", "receipts.v1"}

        async def again() -> bool:
            return await readyz(stack.endpoints.private["relay"]) == 200

        await until(again, timeout=60, what="another relay")
        async with talk(people.places, every_s=0.05):
            await people.of("ben").say(people.chats[0], "did I miss anything?")
        await people.seen()
        records = await all_records(stack.endpoints.kafka, [TOPICS.events, TOPICS.receipts])
        assert not {*ids_of(records)} & {row["event_id"] for row in lost}, "they came after all"


@pytest.mark.promise("I6", "I10")
async def test_records_that_kafka_lost_before_anybody_read_them_are_found(
    stack: Running, owner: asyncpg.Connection
) -> None:
    endpoints = stack.endpoints
    async with crew(stack, "deleted") as people:
        await drained(owner, timeout=60)
        before = await finds(stack, "event")
        with frozen(stack, "gateway"):
            await lasting(FETCH_S)
            await written(stack, people.of("ann"), people.chats[0], 20)
            await drained(owner, timeout=60)
            await forget_records(endpoints.kafka)
        # Nobody says anything more: no later record tells of a gap.
        await people.seen()
        await found_more(stack, "event", before)


async def written(stack: Running, app: App, conversation_id: str, count: int) -> None:
    """Messages that did not come through a gateway."""
    token = mint(stack.endpoints.auth_secret, app.user_id)
    events = [
        {"conversation_id": conversation_id, "client_msg_id": f"http-{number}", "body": {"text": "by HTTP"}}
        for number in range(count)
    ]
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as session,
        session.post(f"{stack.endpoints.ingest}/v1/events", json={"events": events}) as answer,
    ):
        assert [one["status"] for one in (await answer.json())["results"]] == [201] * count


async def forget_records(kafka: str) -> None:
    """Delete every record of events."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        every = [TopicPartition(TOPICS.events, number) for number in range(PARTITIONS)]
        await admin.delete_records({partition: RecordsToDelete(before_offset=-1) for partition in every})
    finally:
        await admin.close()


@pytest.mark.promise("I10", "protocol.3.presence")
async def test_redis_emptied_frozen_and_killed_takes_nothing_but_presence(stack: Running) -> None:
    endpoints = stack.endpoints
    loop = asyncio.get_running_loop()
    async with crew(stack, "redis") as people, redis.asyncio.Redis.from_url(endpoints.redis) as store:
        users = {app.user_id for app in people.apps}
        for app in people.apps:
            await app.client.presence(users - {app.user_id})

        def all_say(state: bool | None) -> bool:
            return all(app.online[user][-1:] == [state] for app in people.apps for user in users - {app.user_id})

        async def all_told() -> bool:
            return await store.exists(*(f"waybill:sessions:{user}" for user in users)) == len(users)

        await until(lambda: all_say(True), timeout=30, what="all are online")
        begun = loop.time()
        async with talk(people.places, every_s=0.02):
            await lasting(1)
            await store.flushall()
            await until(all_told, timeout=30, what="an emptied Redis is told of everybody")
            with frozen(stack, "redis"):
                await until(lambda: all_say(None), timeout=30, what="presence is unknown")
                late = App(endpoints.socket, endpoints.auth_secret, people.of("cat").user_id, "late")
                async with asyncio.timeout(15):
                    await late.open()
                people.apps.append(late)
                await late.client.presence(users - {late.user_id})
            await until(lambda: all_say(True), timeout=30, what="presence is back")
            os.kill(stack.endpoints.pids_of("redis")[0], signal.SIGKILL)
            await lasting(2)
            await until(lambda: all_say(True), timeout=30, what="presence is there with another Redis")
        await people.seen()
        took = latencies([app for app in people.apps if app is not late], begun, loop.time())
        assert len(took) > 1000
        shares = {share: percentile(took, share) for share in (50, 99)}
        assert shares[50] < 1, shares
        assert shares[99] < 4, shares
        assert {app.sessions for app in people.apps} == {1}


@pytest.mark.promise("I6", "I7", "I10")
async def test_a_process_that_is_killed_takes_nothing_with_it(stack: Running) -> None:
    async with crew(stack, "killed", devices=4) as people:
        parent, killed, *others = stack.endpoints.pids_of("gateway")
        async with talk(people.places, every_s=0.02):
            await lasting(1)
            os.kill(killed, signal.SIGKILL)
            await until(
                lambda: len({*stack.endpoints.pids_of("gateway")} - {killed}) == 2 + len(others),
                timeout=60,
                what="another process in its place",
            )
            assert {parent, *others} <= {*stack.endpoints.pids_of("gateway")}
            await lasting(2)
        await people.seen()
        again = [app for app in people.apps if app.sessions > 1]
        assert 0 < len(again) < len(people.apps)
