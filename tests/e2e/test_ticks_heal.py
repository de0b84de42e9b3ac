"""Kafka is emptied under load, and with it acks and marks that it had confirmed: every tick is right again."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from shared.kafka import PARTITIONS, Topics, cluster_id, ensure_topics, reader
from shared.postgres import from_multirange
from shared.ranges import RangeSet, visible_head
from tests.apps import displayed, hold, opened, read, talk
from tests.devices import Device
from tests.metrics import metrics, readyz
from tests.relays import all_records
from tests.services import SECRET, Stores, services
from tests.waiting import lasting, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from services.console.demo.verdict import Truth
    from tests.databases import Database
    from tests.own_stack import OwnStack
    from tests.services import Services

pytest_plugins = ["tests.own_fixtures"]

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(50)]

REFRESH = {"WAYBILL_GATEWAY_ACK_REFRESH_S": "2"}
MarkRecord = tuple[str, str, str, str, int, int]
"""Conversation, user, device, kind, version, seq."""


@asynccontextmanager
async def reading(devices: Sequence[Device], chats: Sequence[str], *, every_s: float = 0.05) -> AsyncIterator[None]:
    """Meanwhile people read what they see, by turns on each device, and now and then mark something as unread."""
    chance = random.Random(3)

    async def go_on() -> None:
        places = [(one, chat) for one in devices for chat in chats if chat in one.client.conversations]
        for one, chat in itertools.cycle(places):
            if chance.random() < 0.1:
                await one.client.unread(chat, max(0, one.top(chat) - chance.randint(1, 5)))
            else:
                await one.client.read(chat, one.top(chat))
            await asyncio.sleep(every_s)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


@pytest.mark.promise("I8", "I10", "protocol.5.read_mark", "protocol.5.delivered")
async def test_every_tick_is_right_again_and_none_went_back(
    own_stack: OwnStack, own_database: Database, own_topics: Topics, tmp_path: Path
) -> None:
    """In one of the chats nothing is said or read any more: there only what goes out again can heal the ticks.

    Receipts is frozen meanwhile, so that what Kafka has confirmed is lost for sure.
    """
    stores = Stores(own_database, own_stack.kafka, own_stack.redis)
    async with services(stores, own_topics.prefix, tmp_path, REFRESH) as house:
        names = ["ann.phone", "ann.pad", "ann.desk", "ben.phone", "ben.pad", "cat.phone"]
        devices = {name: Device(house.socket, SECRET, *name.split(".")) for name in names}
        everybody, ann = list(devices.values()), devices["ann.phone"]
        async with opened(everybody):
            created = [
                await ann.client.create("group", ["ben", "cat"], "all"),
                await ann.client.create("direct", ["ben"]),
                await ann.client.create("direct", ["cat"]),
            ]
            group, direct, quiet = chats = [one.conversation_id for one in created]
            await displayed(await read(stores.postgres_url, chats), everybody)
            for one in everybody:
                await one.client.watch(group)
            await drill(own_stack, own_topics, house, devices, chats)
            assert quiet != direct


async def drill(
    stack: OwnStack, topics: Topics, house: Services, devices: dict[str, Device], chats: Sequence[str]
) -> None:
    everybody, url, receipts = list(devices.values()), house.stores.postgres_url, house.parts["receipts"]
    busy, quiet = chats[:2], chats[2]
    before = await cluster_id(stack.kafka)
    away = devices["ann.desk"]
    await away.close()
    here = [one for one in everybody if one is not away]
    places = [(one, chat) for one in here for chat in busy if chat in one.client.conversations]
    async with talk(places, every_s=0.04), reading(here, busy):
        await lasting(1)
        os.kill(receipts.pid, signal.SIGSTOP)
        await asyncio.gather(*(devices["ann.phone"].say(quiet, "the last word") for _ in range(5)))
        await displayed(await read(url, [quiet]), [one for one in here if quiet in one.client.conversations])
        last = devices["cat.phone"].top(quiet)
        await devices["cat.phone"].client.read(quiet, last)
        await devices["ann.pad"].client.unread(quiet, last - 1)
        await until(lambda: confirmed(stack, topics, quiet, last), timeout=60, what="acks and marks that Kafka has")
        await asyncio.to_thread(stack.empty, "kafka")
        await ensure_topics(stack.kafka, topics)
        await until(lambda: any_mark(stack, topics), timeout=60, what="marks in another Kafka")
        os.kill(receipts.pid, signal.SIGCONT)
        await until(lambda: well(house), timeout=60, what="all services have Kafka again")
        await away.open()
        await away.client.watch(chats[0])
        await lasting(1)
    held = await read(url, chats)
    await displayed(held, everybody)
    owner = await asyncpg.connect(url)
    try:
        wrong: list[str] = ["not looked at"]

        async def right() -> bool:
            wrong[:] = await faults(owner, held, everybody)
            return not wrong

        try:
            await until(right, timeout=60, what="right ticks")
        except TimeoutError:
            raise AssertionError(wrong) from None
        hold(held, everybody)
        never_back(everybody, chats[1:])
        await announced_upwards(owner)
        await from_the_beginning(owner, stack, topics, before)
        told = await metrics(house.private("receipts"))
        assert told['waybill_receipts_restarted_total{reason="new"}'] == 2 * PARTITIONS
    finally:
        await owner.close()


async def confirmed(stack: OwnStack, topics: Topics, chat: str, last: int) -> bool:
    """Whether Kafka has all that was said there: three devices' acks, and two marks."""
    values = [json.loads(record.value or b"") for record in await all_records(stack.kafka, [topics.acks])]
    here = [value for value in values if value["conversation_id"] == chat]
    acks = {
        (one["user_id"], one["device_id"])
        for one in here
        if one["kind"] == "delivered" and one["ranges"][-1][1] == last
    }
    marks = {(one["user_id"], one["kind"], one["seq"]) for one in here if one["kind"] != "delivered"}
    return len(acks) == 3 and {("cat", "read", last), ("ann", "unread", last - 1)} <= marks


async def marks_of(stack: OwnStack, topics: Topics) -> Counter[MarkRecord]:
    values = [json.loads(record.value or b"") for record in await all_records(stack.kafka, [topics.acks])]
    return Counter(
        (one["conversation_id"], one["user_id"], one["device_id"], one["kind"], one["version"], one["seq"])
        for one in values
        if one["kind"] != "delivered"
    )


async def any_mark(stack: OwnStack, topics: Topics) -> bool:
    with suppress(KafkaError):  # its partitions have no leaders yet
        return bool(await marks_of(stack, topics))
    return False


async def well(house: Services) -> bool:
    return all([await readyz(house.private(name)) == 200 for name in house.parts])


async def faults(owner: asyncpg.Connection, held: Truth, devices: Sequence[Device]) -> list[str]:
    """What is not as the devices hold it: of Postgres, and of what devices know of their own and of others' marks."""
    cursors = {
        (str(row[0]), row[1], row[2]): from_multirange(row[3])
        for row in await owner.fetch("SELECT conversation_id, user_id, device_id, delivered FROM device_cursor")
    }
    marks = {
        (str(row[0]), row[1]): tuple(row)[2:]
        for row in await owner.fetch(
            "SELECT conversation_id, user_id, delivered_seq, read_version, read_seq FROM receipt"
        )
    }
    found = []
    for (chat, user), visible in held.visible.items():
        mine = [one for one in devices if one.user_id == user]
        head = visible_head(visible, max(held.events[chat]))
        version, seq = max(
            (known.read_version, known.read_seq) for known in (one.client.conversations[chat] for one in mine)
        )
        if marks.get((chat, user)) != (head, version, seq):
            found.append(f"{user} in {chat}: {marks.get((chat, user))} is not {(head, version, seq)}")
        for one in mine:
            name = one.recording.device_id
            if cursors.get((chat, user, name)) != RangeSet((at, at) for id_, at, _ in one.display if id_ == chat):
                found.append(f"{name} in {chat}: {cursors.get((chat, user, name))}")
        found += [
            f"{user} in {chat} on {one.recording.device_id}: {known_by(one, chat, user)}"
            for one in devices
            if chat in one.client.conversations and known_by(one, chat, user) != (head, version, seq)
        ]
    return found


def known_by(one: Device, chat: str, user: str) -> tuple[int, int, int] | None:
    """The marks of a user as this device knows them."""
    if one.user_id == user:
        own = one.client.conversations[chat]
        return own.delivered_seq, own.read_version, own.read_seq
    ticks = [tick for tick in one.recording.ticks if (tick.conversation_id, tick.user_id) == (chat, user)]
    return (ticks[-1].delivered_seq, *ticks[-1].read) if ticks else None


def never_back(devices: Sequence[Device], chats: Sequence[str]) -> None:
    """No record of marks that a socket brought is below an earlier one, but where it repeats one that was told.

    Of one's own, and of others in these chats, which nobody folds. What is read from the store may be newer than
    records that are still on their way; those are merged.
    """
    for one in devices:
        told: dict[tuple[str, str], list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        for frame in one.heard:
            chat, user = frame.get("conversation_id", ""), frame.get("user_id")
            if frame["t"] != "receipt" or "cause" not in frame or (user != one.user_id and chat not in chats):
                continue
            before = told[chat, user]
            now = frame["delivered_seq"], (frame["read_version"], frame["read_seq"])
            if now not in before:
                assert all(now[0] >= delivered and now[1] >= read for delivered, read in before), frame
                before.append(now)
        assert told, one.recording.device_id


async def from_the_beginning(owner: asyncpg.Connection, stack: OwnStack, topics: Topics, before: str) -> None:
    """All that the new Kafka has was applied, and is where the stored offsets stand."""
    now = await cluster_id(stack.kafka)
    assert now != before
    kafka = reader(stack.kafka, client_id="tests")
    await kafka.start()
    try:
        partitions = [TopicPartition(topics.acks, number) for number in range(PARTITIONS)]
        ends = {tp.partition: end for tp, end in (await kafka.end_offsets(partitions)).items()}
    finally:
        await kafka.stop()

    async def read_to_the_end() -> bool:
        rows = await owner.fetch("SELECT partition, next FROM ack_offset WHERE cluster_id = $1", now)
        stored = dict(map(tuple, rows))
        return stored.keys() == ends.keys() and all(stored[partition] >= end for partition, end in ends.items())

    await until(read_to_the_end, timeout=60, what="all that the new Kafka has is applied")
    logged = await owner.fetch(
        "SELECT conversation_id::text, user_id, device_id, kind, coalesce((detail ->> 'version')::int, 0), from_seq"
        " FROM transition WHERE service = 'receipts' AND kind IN ('read', 'unread')"
    )
    assert not await marks_of(stack, topics) - Counter(map(tuple, logged))


async def announced_upwards(owner: asyncpg.Connection) -> None:
    """No record takes back what an earlier one said of the same user."""
    rows = await owner.fetch("SELECT payload FROM outbox WHERE topic = 'receipts.v1' ORDER BY shard, id")
    told: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        said = json.loads(row["payload"])
        marks = said["delivered_seq"], (said["read_version"], said["read_seq"])
        told[said["conversation_id"], said["user_id"]].append(marks)
    assert told
    for marks in told.values():
        assert all(one[0] <= other[0] and one[1] <= other[1] for one, other in pairwise(marks))
