"""The Python SDK against a real gateway: what both have to understand alike."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from waybill_client import Client, MemoryStore, Timing, errors

from tests.frames import sdk_watched
from tests.gateways import Gateway, House, token, user
from tests.waiting import until

pytest_plugins = ["tests.integration.gateway_house"]


@pytest.fixture(autouse=True)
def _frames_are_in_the_document() -> Iterator[None]:
    with sdk_watched() as faults:
        yield
    assert faults[:3] == []


async def _quick(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.05))


class Phone:
    """A client, what it stores, and its frames by direction."""

    def __init__(self, gateway: Gateway, user_id: str, device: str = "phone") -> None:
        self.frames: list[tuple[str, dict[str, Any]]] = []
        self.store = MemoryStore()
        self.client = Client(
            gateway.url,
            token(user_id),
            device,
            self.store,
            deliver=False,
            ack_delay_s=0.01,
            timing=Timing(random.random, sleep=_quick),
            on_frame=lambda way, text, _: self.frames.append((way, json.loads(text))),
        )

    def said(self, t: str) -> list[dict[str, Any]]:
        return [frame for way, frame in self.frames if way == "out" and frame["t"] == t]

    def heard(self, t: str) -> list[dict[str, Any]]:
        return [frame for way, frame in self.frames if way == "in" and frame["t"] == t]

    async def timeline(self, conversation_id: str) -> list[tuple[int, str]]:
        return [(event.seq, event.event_id) for event in await self.store.events(conversation_id, 0, 1000)]


@contextlib.asynccontextmanager
async def phones(*made: Phone) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for phone in made:
            await stack.enter_async_context(phone.client)
        for phone in made:
            await phone.client.ready()
        yield


async def alike(home: House, conversation_id: str, *made: Phone) -> None:
    """Wait until all hold the timeline that Postgres has, and owe it nothing."""

    async def are() -> bool:
        await home.line.publish()
        rows = await home.owner.fetch(
            "SELECT seq, event_id::text FROM event WHERE conversation_id = $1 ORDER BY seq", conversation_id
        )
        there = [(row["seq"], row["event_id"]) for row in rows]
        return all([await phone.timeline(conversation_id) == there and not phone.store.outgoing() for phone in made])

    await until(are, timeout=20, what="the same timeline everywhere")


async def lose(home: House, conversation_id: str, keep: int) -> None:
    """What a failover to a replica does that lacks the last commits."""
    async with home.owner.transaction():
        await home.owner.execute("DELETE FROM event WHERE conversation_id = $1 AND seq > $2", conversation_id, keep)
        await home.owner.execute("DELETE FROM outbox WHERE conversation_id = $1 AND seq > $2", conversation_id, keep)
        await home.owner.execute(
            "UPDATE conversation SET last_seq = $2 WHERE conversation_id = $1", conversation_id, keep
        )
        await home.owner.execute("UPDATE store SET incarnation = gen_random_uuid()")


@pytest.mark.promise("protocol.3.reset", "I7")
async def test_after_lost_commits_every_device_has_the_new_timeline_and_its_own_messages_are_sent_again(
    home: House,
) -> None:
    await home.ingest()
    gateway = await home.gateway(gateway_sweep_s=0.2, gateway_drain_s=0.1)
    ann, bob = user("ann"), user("bob")
    group = await home.group(ann, bob)
    anns, bobs = Phone(gateway, ann), Phone(gateway, bob)
    async with phones(anns, bobs):
        for name in ("kept", "lost-1", "lost-2"):
            await anns.client.send(group, {"text": name}, client_msg_id=name)
        await alike(home, group, anns, bobs)
        await lose(home, group, 2)
        await home.write(group, bob, {"text": "instead"})
        await alike(home, group, anns, bobs)
        rows = await home.owner.fetch(
            "SELECT client_msg_id FROM event WHERE conversation_id = $1 AND sender_id = $2 AND type = 'message'",
            group,
            ann,
        )
        assert sorted(row["client_msg_id"] for row in rows) == ["kept", "lost-1", "lost-2"]
        assert any(frame.get("reset") for frame in anns.heard("conversation"))
        assert (anns.client.stats.rewinds, bobs.client.stats.rewinds) == (1, 1)
        # A message that was `sent` and whose event need not have come yet, so that no cursor names it.
        answer = await anns.client.send(group, {"text": "unseen"}, client_msg_id="unseen")
        await lose(home, group, answer.seq - 1)
        await alike(home, group, anns, bobs)
        assert await home.owner.fetchval("SELECT count(*) FROM event WHERE client_msg_id = 'unseen'") == 1


@pytest.mark.promise("protocol.3.hello_since")
async def test_a_reconnect_says_since_and_brings_nothing_again(home: House, gateway: Gateway) -> None:
    ann = user("ann")
    groups = [await home.group(ann) for _ in range(3)]
    phone = Phone(gateway, ann)
    async with phones(phone):
        await alike(home, groups[0], phone)
        await until(lambda: phone.client.stats.events == 3, timeout=5, what="all three")
        phone.client._engine.connection.leave(0.0)
        await until(lambda: len(phone.heard("listed")) == 2, timeout=10, what="a second listing")
        first, second = phone.said("hello")
        assert "since" not in first
        assert second["since"] == phone.heard("listed")[0]["since"]
        assert all(isinstance(second["cursors"][group][1], str) for group in groups)
        await home.write(groups[1], ann)
        await alike(home, groups[1], phone)
        assert (phone.client.stats.repeats, phone.client.stats.gaps) == (0, 0)


@pytest.mark.promise("protocol.3.watch", "protocol.3.typing", "protocol.3.presence")
async def test_receipts_typing_and_presence_of_others(home: House, gateway: Gateway) -> None:
    ann, bob, eve = user("ann"), user("bob"), user("eve")
    group = await home.group(ann, bob, user("cat"))
    await home.owner.execute(
        "INSERT INTO receipt (conversation_id, user_id, delivered_seq, read_seq) VALUES ($1, $2, 1, 1)", group, bob
    )
    anns, bobs, eves = Phone(gateway, ann), Phone(gateway, bob), Phone(gateway, eve)
    async with phones(anns, bobs, eves), asyncio.timeout(20):
        await anns.client.watch(group)
        marks = await anext(anns.client.receipts())
        assert (marks.user_id, marks.delivered_seq, marks.read_seq) == (bob, 1, 1)
        await bobs.client.typing(group)
        typing = await anext(anns.client.typings())
        assert (typing.conversation_id, typing.user_id, typing.for_ms) == (group, bob, 5000)
        await anns.client.presence([bob, eve])
        known: dict[str, tuple[bool | None, bool]] = {}
        async for state in anns.client.presences():
            known[state.user_id] = (state.online, state.since is not None)
            if known == {bob: (True, True), eve: (None, False)}:
                break


@pytest.mark.promise("protocol.3.session_number")
async def test_a_device_that_was_replaced_stops(gateway: Gateway) -> None:
    ann = user("ann")
    old, new = Phone(gateway, ann), Phone(gateway, ann)
    async with phones(old):
        async with phones(new):
            await until(lambda: old.client.closed is not None, timeout=10, what="the end of the older one")
            assert isinstance(old.client.closed, errors.Replaced)
            with pytest.raises(errors.Replaced):
                await old.client.typing("x")
            assert new.client.closed is None
        assert len(old.said("hello")) == 1
