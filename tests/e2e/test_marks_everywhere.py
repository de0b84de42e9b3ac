"""Two users on five devices that come and go while both send, read and unread: at the end one truth of the marks."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from waybill_client import Client, Timing

from shared.auth import mint
from tests.apps import App, displayed, hold, opened, read, ticked
from tests.doors import HOST, Door, door
from tests.services import SECRET, Stores, services
from tests.waiting import lasting, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.databases import Database
    from tests.stack import Stores as Servers

pytestmark = [pytest.mark.timeout(300), pytest.mark.long(30)]

DEVICES = (("ann", "phone"), ("ann", "tablet"), ("ann", "desk"), ("ben", "phone"), ("ben", "tablet"))
ROUNDS = 10
ROUND_S = 0.7

Marks = tuple[int, int, int]
"""Delivered seq, read version, read seq."""


@dataclass
class Device:
    """``cut``: the app is open and has no network. ``saying``: what it has not got an answer to."""

    app: App
    door: Door
    saying: set[asyncio.Task[None]]
    cut: bool = False
    closed: bool = False

    async def goes(self, how: str) -> None:
        """``how``: online, cut, or closed, once it has its answers."""
        if how != "cut" and self.cut:
            await self.door.open()
            self.cut = False
        if how == "closed" and not self.closed:
            await asyncio.gather(*self.saying)
            await self.app.close()
            self.closed = True
        if how != "closed" and self.closed:
            await self.app.open()
            self.closed = False
        if how == "cut" and not self.cut:
            await self.door.close()
            self.cut = True

    async def acts(self, chance: random.Random, chat: str) -> None:
        """Says something, reads up to somewhere, or takes a mark back on purpose, as its user sees the chat here."""
        known = self.app.client.conversation(chat)
        assert known is not None
        what = chance.choice(("say", "read", "read", "unread"))
        if what == "say":
            task = asyncio.create_task(self.app.say(chat, "hello"))
            self.saying.add(task)
            task.add_done_callback(self.saying.discard)
        elif what == "read":
            await self.app.client.read(chat, chance.randint(1, known.head))
        else:
            await self.app.client.unread(chat, chance.randint(0, known.head))


async def marks_of(owner_url: str, chats: Sequence[str]) -> dict[tuple[str, str], Marks]:
    """What Postgres holds, by chat and user."""
    connection = await asyncpg.connect(owner_url)
    try:
        rows = await connection.fetch(
            "SELECT conversation_id::text AS chat, user_id, delivered_seq, read_version, read_seq FROM receipt"
            " WHERE conversation_id = ANY ($1::uuid[])",
            chats,
        )
    finally:
        await connection.close()
    return {(row["chat"], row["user_id"]): (row["delivered_seq"], row["read_version"], row["read_seq"]) for row in rows}


async def shown_at(app: App, chat: str) -> dict[str, Marks]:
    """What a device shows of a chat: of its own user, and of the other one by its ticks; and what it has stored."""
    own = app.client.conversation(chat)
    assert own is not None
    saved = next(one for one in (await app._store.load())[0] if one.conversation_id == chat)
    assert (saved.read_version, saved.read_seq) <= (own.read_version, own.read_seq)
    shown = {app.user_id: (own.delivered_seq, saved.read_version, saved.read_seq)}
    for one in app.recording.ticks:
        if one.conversation_id == chat and one.user_id != app.user_id:
            delivered, *pair = shown.get(one.user_id, (0, 0, 0))
            shown[one.user_id] = (max(delivered, one.delivered_seq), *max((pair[0], pair[1]), one.read))
    return shown


async def agree(owner_url: str, chats: Sequence[str], apps: Sequence[App]) -> dict[tuple[str, str], Marks]:
    """Wait until every device shows, and has stored, what Postgres holds; returns that."""
    held: dict[tuple[str, str], Marks] = {}
    shown: dict[tuple[str, str], dict[str, Marks]] = {}

    async def all_do() -> bool:
        held.update(await marks_of(owner_url, chats))
        for app in apps:
            for chat in chats:
                shown[app.recording.device_id, chat] = await shown_at(app, chat)
        return all(marks == {user: held[chat, user] for user in ("ann", "ben")} for (_, chat), marks in shown.items())

    try:
        await until(all_do, timeout=60, what="the same marks everywhere")
    except TimeoutError:
        raise AssertionError(f"Postgres: {held}; devices: {shown}") from None
    return held


async def told_to_a_new_device(url: str, user_id: str, chats: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By chat the `conversation` frame, and the first receipt of somebody else."""
    frames: list[dict[str, Any]] = []

    def keep(way: str, text: str, _: float) -> None:
        if way == "in":
            frames.append(json.loads(text))

    async with Client(url, mint(SECRET, user_id), "new", sync="live", deliver=False, on_frame=keep) as client:
        await client.ready(30)
        for chat in chats:
            await client.watch(chat)

        def found() -> tuple[dict[str, Any], dict[str, Any]] | None:
            listed = {frame["conversation_id"]: frame for frame in frames if frame["t"] == "conversation"}
            others = {
                frame["conversation_id"]: frame
                for frame in reversed(frames)
                if frame["t"] == "receipt" and frame["user_id"] != user_id
            }
            return (listed, others) if listed.keys() == others.keys() == set(chats) else None

        return await until(found, timeout=20, what="the frames of a new device")


async def unread_by_recount(owner_url: str, chat: str, user_id: str, read_seq: int) -> int:
    connection = await asyncpg.connect(owner_url)
    try:
        found: int = await connection.fetchval(
            "SELECT count(*) FROM event WHERE conversation_id = $1 AND seq > $3 AND sender_id <> $2"
            " AND type IN ('message', 'system')",
            chat,
            user_id,
            read_seq,
        )
        return found
    finally:
        await connection.close()


@pytest.mark.promise("I8", "protocol.5.read_mark", "protocol.5.delivered", "protocol.5.receipt_goes_to")
async def test_marks_are_the_same_everywhere_at_the_end(
    stores: Servers, database: Database, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    chance = random.Random(5)
    async with (
        services(Stores(database, stores.kafka, redis_url), topic_prefix, tmp_path) as house,
        AsyncExitStack() as stack,
    ):
        port = urlsplit(house.socket).port or 0
        devices = []
        for user_id, name in DEVICES:
            way = await stack.enter_async_context(door([port]))
            app = App(f"ws://{HOST}:{way.port}/v1/socket", SECRET, user_id, name)
            app._timing = Timing(random.random, sleep=_soon)
            devices.append(Device(app, way, set()))
        apps = [device.app for device in devices]
        async with opened(apps):
            ann = apps[0].client
            chats = [
                (await ann.create("direct", ["ben"])).conversation_id,
                (await ann.create("group", ["ben"], "both")).conversation_id,
            ]
            await displayed(await read(database.owner_url, chats), apps)
            states: list[str] = []
            for number in range(ROUNDS):
                for device in devices:
                    state = chance.choice(("online", "online", "cut", "closed"))
                    states.append(state)
                    await device.goes(state)
                for device in devices:
                    if not device.closed:
                        for chat in chats:
                            await device.app.client.watch(chat)
                            for _ in range(chance.randint(0, 3)):
                                await device.acts(chance, chat)
                await lasting(ROUND_S if number % 3 else 0.05)
            assert set(states) == {"online", "cut", "closed"}
            for device in devices:
                await device.goes("online")
                for chat in chats:
                    await device.app.client.watch(chat)
            await asyncio.gather(*(task for device in devices for task in device.saying))

            everything = await read(database.owner_url, chats)
            await displayed(everything, apps)
            await ticked(database.owner_url, chats, apps)
            held = await agree(database.owner_url, chats, apps)
            hold(everything, apps)

            heads = {chat: max(everything.events[chat]) for chat in chats}
            assert {held[chat, user][0] for chat in chats for user in ("ann", "ben")} == set(heads.values())
            assert any(version > 1 for _, version, _ in held.values()), "marks were taken back more than once"
            for user_id, other in (("ann", "ben"), ("ben", "ann")):
                listed, others = await told_to_a_new_device(house.socket, user_id, chats)
                for chat in chats:
                    frame = listed[chat]
                    own = frame["delivered_seq"], frame["read_version"], frame["read_seq"]
                    assert own == held[chat, user_id]
                    peer = others[chat]
                    assert (peer["delivered_seq"], peer["read_version"], peer["read_seq"]) == held[chat, other]
                    assert frame["unread"] == await unread_by_recount(
                        database.owner_url, chat, user_id, frame["read_seq"]
                    )
            for chat in chats:
                found = await apps[0].client.receipts_of(chat, heads[chat], "delivered")
                told = {one.user_id: (one.delivered_seq, one.read_version, one.read_seq) for one in found.users}
                assert told == {user: marks for (one, user), marks in held.items() if one == chat and user in told}
                assert (found.members, found.delivered) == (1, 1)


async def _soon(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.3))
