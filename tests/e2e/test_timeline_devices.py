"""Recall, edits and members, on devices that are there, away or just coming back: all end with the same timeline.

The sweep is as good as off, so what comes at once comes by Kafka, and what was missed by the next `hello`.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from deploy.local.running import Running, running
from shared.ranges import OPEN, RangeSet
from tests.apps import displayed, hold, opened, read, talk
from tests.devices import Device, newest, shape
from tests.doors import HOST, Door, door
from tests.waiting import lasting, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from waybill_client import Event

pytestmark = [pytest.mark.timeout(400), pytest.mark.long(40)]

SETTINGS = {"WAYBILL_GATEWAY_PROCESSES": "2", "WAYBILL_GATEWAY_SWEEP_S": "300"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("stack"), environment=SETTINGS) as made:
        yield made


@dataclass
class Crew:
    """Devices by user and name. ``door``: the way of all devices named `door`, which can be shut."""

    stack: Running
    tag: str
    devices: dict[tuple[str, str], Device]
    door: Door

    def __getitem__(self, name: str) -> Device:
        user, _, device = name.partition(".")
        return self.devices[user, device]

    def user(self, name: str) -> str:
        return f"{name}-{self.tag}"

    @property
    def all(self) -> list[Device]:
        return list(self.devices.values())

    async def alike(self, *chats: str) -> None:
        """Every device displays all of these, as it came, and holds it as the server has it now."""
        held = await read(self.stack.endpoints.postgres, chats)
        await displayed(held, self.all)
        for chat in chats:
            for device in self.all:
                assert shapes(await device.held(chat)) == shapes(await device.pages(chat)), device.recording.device_id
        hold(held, self.all)


def shapes(events: dict[int, Event]) -> list[tuple[Any, ...]]:
    return [shape(events[seq]) for seq in sorted(events)]


@asynccontextmanager
async def crew(stack: Running, tag: str, *names: str) -> AsyncIterator[Crew]:
    """Devices named `user.device`, all open."""
    endpoints = stack.endpoints
    async with AsyncExitStack() as exits:
        way = await exits.enter_async_context(door([urlsplit(endpoints.gateway).port or 0]))
        urls = {"door": f"ws://{HOST}:{way.port}/v1/socket"}
        devices = {}
        for user, _, device in (name.partition(".") for name in names):
            url = urls.get(device, endpoints.socket)
            devices[user, device] = Device(url, endpoints.auth_secret, f"{user}-{tag}", device)
        made = Crew(stack, tag, devices, way)
        await exits.enter_async_context(opened(made.all))
        yield made


@pytest.fixture
async def owner(stack: Running) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(stack.endpoints.postgres)
    yield connection
    await connection.close(timeout=5)


GONE = "a text that is gone"


@pytest.mark.promise("I7", "I9", "protocol.3.recall", "protocol.3.delete")
async def test_who_was_away_finds_tombstones_in_their_order_and_never_the_bodies(stack: Running) -> None:
    """One device is closed and opened again, another one loses its network, while messages, old and new, go."""
    async with crew(stack, "gone", "ann.phone", "ann.door", "ben.phone", "ben.pad", "cat.phone") as people:
        ann, ben = people["ann.phone"], people["ben.phone"]
        chat = (await ann.client.create("group", [people.user("ben"), people.user("cat")])).conversation_id
        old = [await ann.write(chat, f"{GONE} old {number}") for number in range(3)]
        stays = await ann.write(chat, "stays")
        bens = await ben.write(chat, f"{GONE} of ben")
        await people.alike(chat)

        away = [people["ben.pad"], people["ann.door"]]
        await away[0].close()
        await people.door.close()
        edits = [await ann.write(chat, f"{GONE} edit {number}", "edit", old[1]) for number in range(2)]
        new = [await ann.write(chat, f"{GONE} new {number}") for number in range(4)]
        edits += [await ann.write(chat, f"{GONE} edit", "edit", target) for target in new]
        recalled = {target: await ann.take(chat, "recall", target) for target in (old[0], new[0], new[2], bens)}
        deleted = {target: await ann.take(chat, "delete", target) for target in (old[1], old[2], new[1], new[3])}
        last = await ann.write(chat, "stays, edited", "edit", stays)
        before = [len(device.heard) for device in away]

        async with talk([(ann, chat), (ben, chat)], every_s=0.02):
            await people.door.open()
            await away[0].open()
            await until(lambda: away[1].sessions == 2, timeout=60, what="a device that has its network again")
            await lasting(0.5)
        await people.alike(chat)

        for device in people.all:
            held = await device.held(chat)
            for target in {**recalled, **deleted}:
                tombstone = held[target]
                assert tombstone.body is None
                assert (tombstone.recalled_by, tombstone.deleted_by) == (recalled.get(target), deleted.get(target))
            assert [held[seq].body for seq in edits] == [None] * len(edits)
            assert (held[stays].body, held[stays].edited_by) == ({"text": "stays, edited"}, last)
        for device, length in zip(away, before, strict=True):
            assert device.sessions == 2
            assert GONE not in json.dumps(device.heard[length:]), "it was told what is gone"
            assert all(look.body is None for seq in (*new, *edits) for look in device.kept.looks[chat, seq])


ROUNDS = 10
EDITS = 6
"""Of each of the two devices in a round."""


@pytest.mark.promise("I7", "I9", "protocol.3.edited_by", "protocol.9.present_state")
async def test_of_edits_at_once_the_later_seq_wins_everywhere_and_none_is_set_back(
    stack: Running, owner: asyncpg.Connection
) -> None:
    """Two devices edit the same message; others come back in between, at what later edits have made of it."""
    async with crew(
        stack, "race", "ann.phone", "ann.pad", "ben.phone", "ben.pad", "cat.phone", "cat.door", "dan.phone"
    ) as people:
        ann, dan = people["ann.phone"], people["dan.phone"]
        users = [people.user(name) for name in ("ben", "cat", "dan")]
        chat = (await ann.client.create("group", users)).conversation_id
        await people.alike(chat)
        texts: dict[int, Any] = {}
        winners: dict[int, int] = {}
        pulled: list[list[Event]] = []

        async def edit(device: Device, target: int) -> None:
            for number in range(EDITS):
                text = f"{device.recording.device_id} {number}"
                texts[await device.write(chat, text, "edit", target)] = {"text": text}

        async def come_back() -> None:
            """While some edits are there and others are not."""
            some = len(texts) + EDITS
            await until(lambda: len(texts) >= some, timeout=60, what="some edits")
            sessions = people["cat.door"].sessions
            await asyncio.gather(people["ben.pad"].open(), people.door.open())
            await until(lambda: people["cat.door"].sessions > sessions, timeout=60, what="the network is back")

        async def pull(target: int, racing: Sequence[asyncio.Task[None]]) -> None:
            pulled.append(seen := [])
            while not all(one.done() for one in racing):
                seen += (await dan.client.pull(chat, before=target + 1, limit=1)).events

        for _ in range(ROUNDS):
            await people["ben.pad"].close()
            await people.door.close()
            target = await ann.write(chat, "first")
            async with asyncio.TaskGroup() as group:
                racing = [group.create_task(edit(people[name], target)) for name in ("ann.phone", "ann.pad")]
                group.create_task(come_back())
                group.create_task(pull(target, racing))
            winners[target] = max(seq for seq in texts if seq > target)
        await people.alike(chat)

        rows = await owner.fetch(
            "SELECT seq, edited_by FROM event WHERE conversation_id = $1 AND type = 'message'", chat
        )
        assert dict(map(tuple, rows)) == winners
        overtaken: dict[str, int] = defaultdict(int)
        for device in people.all:
            held = await device.held(chat)
            for target, winner in winners.items():
                assert (held[target].edited_by, held[target].body) == (winner, texts[winner])
                looks = device.kept.looks[chat, target]
                assert all(one.newest <= other.newest for one, other in pairwise(looks)), "it was set back"
                assert all(look.body == texts.get(look.newest, {"text": "first"}) for look in looks)
                overtaken[device.recording.device_id] += sum(look.newest > look.came > target for look in looks)
        for name in ("ben.pad", "cat.door"):
            assert overtaken[people[name].recording.device_id] > ROUNDS, "it came back in between"
        for seen in pulled:
            assert all(newest(one) <= newest(other) for one, other in pairwise(seen))
            assert all(one.body == texts.get(newest(one), {"text": "first"}) for one in seen)


STAYS = 3
BETWEEN = 12
"""Messages of each group, at least, that who was removed must not see."""


@pytest.mark.promise("I6", "I12", "protocol.9.visible", "protocol.9.former_members")
async def test_who_is_removed_and_added_again_sees_what_the_stays_cover_and_the_others_see_all(stack: Running) -> None:
    """In a group that keeps its history for who comes, and in one that does not, at 50 messages a second.

    Of the devices of who goes, one is there all the time, one comes back between the removal and the adding, and one
    after both.
    """
    async with crew(
        stack, "stays", "ann.phone", "ben.phone", "ben.pad", "cat.phone", "cat.between", "cat.after"
    ) as people:
        ann, ben = people["ann.phone"], people["ben.phone"]
        cats = [people[f"cat.{name}"] for name in ("phone", "between", "after")]
        cat, others = people.user("cat"), [people.user("ben"), people.user("cat")]
        chats = {
            history: (await ann.client.create("group", others, history=history)).conversation_id
            for history in ("joined", "all")
        }
        turns: dict[str, list[int]] = {chat: [] for chat in chats.values()}
        secrets: list[str] = []
        await people.alike(*chats.values())

        async def gone(chat: str, removal: int) -> None:
            """The others go on, and who was removed has got the removal and nothing else."""
            await until(lambda: ann.top(chat) >= removal + BETWEEN, timeout=60, what="messages that go on")
            here = [cats[0], cats[1]]
            await until(lambda: all(one.top(chat) == removal for one in here), timeout=60, what="the removal")
            for one in here:
                assert max(one.pushed(chat)) == removal
                page = await one.client.pull(chat, after=removal - 1)
                assert [event.seq for event in page.events] == [removal]
                assert (page.head, page.complete) == (removal, True)

        async with talk([(one, chat) for one in (ann, ben) for chat in chats.values()], every_s=0.02):
            for _ in range(STAYS):
                await lasting(0.3)
                await asyncio.gather(cats[1].close(), cats[2].close())
                for chat, of in turns.items():
                    of.append(await ann.member(chat, "remove", cat))
                await cats[1].open()
                await asyncio.gather(*(gone(chat, of[-1]) for chat, of in turns.items()))
                for chat, of in turns.items():
                    target = await ann.write(chat, secret := f"hidden {len(secrets)} of {chat}")
                    secrets.append(secret)
                    assert all(max(one.pushed(chat)) == of[-1] for one in cats[:2])
                    of.append(await ann.member(chat, "add", cat))
                    # An edit of what was said meanwhile is seen, but not what it says.
                    await ann.write(chat, f"{secret}, edited", "edit", target)
                await cats[2].open()
        await people.alike(*chats.values())

        held = await read(stack.endpoints.postgres, list(chats.values()))
        stays = [1, *turns[chats["joined"]], OPEN]
        expected = {
            chats["joined"]: RangeSet(zip(stays[::2], stays[1::2], strict=True)),
            chats["all"]: RangeSet([(1, OPEN)]),
        }
        for chat, visible in expected.items():
            assert held.visible[chat, cat] == visible
            everything = set(held.events[chat])
            for one in people.all:
                sees = {seq for seq in everything if seq in visible} if one in cats else everything
                assert {seq for id_, seq, _ in one.shown if id_ == chat} == sees, one.recording.device_id
                assert one.pushed(chat) <= sees, one.recording.device_id
        for one in cats:
            told = json.dumps(one.heard)
            assert not [secret for secret in secrets if chats["joined"] in secret and secret in told]
            assert all(secret in told for secret in secrets if chats["all"] in secret)


@pytest.mark.promise("protocol.3.conversation_frame", "protocol.3.event_everywhere", "protocol.3.settings")
async def test_who_is_added_has_it_at_once_on_all_devices_and_sets_it_for_all_of_them(stack: Running) -> None:
    """Added, then muted and archived on one device; of three others one is away."""
    async with crew(stack, "added", "ann.phone", "ben.phone", "dan.phone", "dan.pad", "dan.desk", "dan.door") as people:
        ann, dan = people["ann.phone"], people["dan.phone"]
        dans = [people[f"dan.{name}"] for name in ("phone", "pad", "desk", "door")]
        made = await ann.client.create("group", [people.user("ben")], "before dan")
        chat = made.conversation_id
        await ann.write(chat, "before dan")
        await people.door.close()
        added = await ann.member(chat, "add", people.user("dan"))
        first = await ann.write(chat, "welcome")
        await until(lambda: all(one.top(chat) == first for one in dans[:3]), timeout=60, what="what came since")
        for one in dans[:3]:
            frames = [frame for frame in one.heard if frame.get("conversation_id") == chat]
            assert frames[0]["t"] == "conversation"
            assert (frames[0]["title"], frames[0]["visible"]) == ("before dan", [[added, None]])
            assert (one.sessions, one.pushed(chat)) == (1, {added, first})
        await people.door.open()
        await people.alike(chat)

        await people.door.close()
        told = [len(one.heard) for one in people.all]
        await dan.client.set_settings(chat, muted=True, archived=True)
        for one in dans[:3]:
            await until(lambda one=one: own(one, chat) == (True, True), timeout=60, what="settings of another device")
        assert own(dans[3], chat) == (False, False)
        await people.door.open()
        await until(lambda: own(dans[3], chat) == (True, True), timeout=60, what="settings made meanwhile")
        [*_, hello] = [frame for frame in dans[3].said if frame["t"] == "hello"]
        assert "since" in hello
        for one, length in zip(people.all, told, strict=True):
            heard = [frame for frame in one.heard[length:] if frame["t"] == "conversation"]
            states = {(frame["muted"], frame["archived"]) for frame in heard}
            assert states == ({(True, True)} if one in dans else set()), one.recording.device_id


def own(one: Device, chat: str) -> tuple[bool, bool]:
    known = one.client.conversations[chat]
    return known.muted, known.archived
