"""What a device does when the server lost commits: it ends with its timeline, and sends its own messages again."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from waybill_client import Client, MemoryStore, Timing, errors

from tests.waiting import until

from .frames_of_server import CHAT, ME, conversation, event, welcome
from .stub_server import Stub, stub_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.server import ServerConnection


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    one = Stub()
    async with stub_server(one):
        yield one


async def quick(_: float) -> None:
    await asyncio.sleep(0)


TIMING = Timing(lambda: 0.5, sleep=quick)


async def held(store: MemoryStore) -> list[tuple[int, str]]:
    return [(one.seq, one.event_id) for one in await store.events(CHAT, 0, 10_000)]


async def same(stub: Stub, store: MemoryStore) -> None:
    """Wait until the device holds the server's timeline and owes it nothing."""

    async def alike() -> bool:
        return await held(store) == [(one["seq"], one["event_id"]) for one in stub.events] and not store.outgoing()

    await until(alike, timeout=5, what="the server's timeline")


async def test_another_event_at_a_held_seq_is_healed_without_being_told(stub: Stub) -> None:
    for _ in range(3):
        stub.write()
    store, rewinds = MemoryStore(), list[tuple[str, int]]()
    async with Client(
        stub.url, "t", "d", store, timing=TIMING, deliver=False, on_rewind=lambda *what: rewinds.append(what)
    ):
        await same(stub, store)
        stub.lose(1)
        for _ in range(3):
            stub.write()
        await stub.send(stub.sockets[-1], stub.events[2])
        await same(stub, store)
    assert rewinds == [(CHAT, 1)]
    assert stub.hellos[-1]["cursors"][CHAT] == [1, "e1"]


async def test_new_events_on_top_of_lost_ones_hide_nothing(stub: Stub) -> None:
    for _ in range(4):
        stub.write()
    store = MemoryStore()
    async with Client(stub.url, "t", "d", store, timing=TIMING, deliver=False):
        await same(stub, store)
        stub.lose(2)
        for _ in range(3):
            stub.write()
        await stub.push()  # the fifth, which fits on top of what was lost
        await stub.send(stub.sockets[-1], stub.events[3])
        await same(stub, store)
    assert stub.hellos[-1]["cursors"][CHAT] == [2, "e2"]


async def test_a_device_that_began_at_the_present_goes_back_no_further(stub: Stub) -> None:
    for _ in range(700):
        stub.write()
    store = MemoryStore()

    async def from_the_head(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] != "hello" or "cursors" in frame:
            return False
        stub.sockets.append(socket)
        stub.hellos.append(frame)
        stub.pushed = len(stub.events)
        await stub.send(socket, welcome())
        await stub.send(socket, conversation(stub.pushed, stub.pushed))
        await stub.send(socket, {"t": "listed", "count": 1, "since": "x"})
        return True

    stub.on_frame = from_the_head
    async with Client(stub.url, "t", "d", store, sync="live", timing=TIMING, deliver=False, ack_delay_s=0.01):
        await until(lambda: len(stub.sockets) == 1, timeout=5, what="a session")
        stub.write()
        await stub.push()
        await stub.until(lambda: 701 in stub.acked)
        stub.lose(690)
        for _ in range(15):
            stub.write()
        await stub.sockets[-1].close(1011)
        await stub.until(lambda: 705 in stub.acked)
        assert [seq for seq, _ in await held(store)] == [701, 702, 703, 704, 705]
    assert stub.hellos[-1]["cursors"][CHAT] == 700


async def test_a_comparison_that_fails_is_tried_again(stub: Stub) -> None:
    stub.write()
    store, failures = MemoryStore(), list[str]()

    async def away(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] != "pull" or len(failures) == 3:
            return False
        failures.append(frame["rid"])
        code = ("internal", "rate_limited", "internal")[len(failures) - 1]
        await stub.send(socket, {"t": "error", "rid": frame["rid"], "code": code, "message": "", "retry_after_ms": 1})
        return True

    async with Client(stub.url, "t", "d", store, timing=Timing(lambda: 0.0, sleep=quick), deliver=False):
        await same(stub, store)
        stub.on_frame = away
        stub.lose(0)
        stub.write()
        await stub.send(stub.sockets[-1], stub.events[0])
        await same(stub, store)
    assert len(failures) == 3


async def test_a_comparison_that_is_refused_ends(stub: Stub) -> None:
    stub.write()
    store = MemoryStore()

    async def refuse(stub: Stub, socket: ServerConnection, frame: dict[str, Any]) -> bool:
        if frame["t"] != "pull":
            return False
        await stub.send(socket, {"t": "error", "rid": frame["rid"], "code": "not_found", "message": ""})
        return True

    async with Client(stub.url, "t", "d", store, timing=TIMING, deliver=False):
        await same(stub, store)
        stub.on_frame = refuse

        async def asked_again() -> bool:
            await stub.send(stub.sockets[-1], event(1, event_id="x1"))
            return len([one for one in stub.got if one["t"] == "pull"]) > 1

        await until(asked_again, timeout=5, what="another comparison at the next sign")
    assert len(stub.hellos) == 1


async def test_a_change_aimed_at_a_lost_event_is_not_sent_again(stub: Stub) -> None:
    store = MemoryStore()
    async with Client(stub.url, "t", "d", store, timing=TIMING, deliver=False, ack_delay_s=0.01) as client:
        await client.send(CHAT, {"n": 1}, client_msg_id="kept")
        await client.send(CHAT, {"n": 2}, client_msg_id="lost")
        await client.send(CHAT, {"n": 3}, "edit", target_seq=1, client_msg_id="edits-kept")
        await client.send(CHAT, None, "delete", target_seq=2, client_msg_id="deletes-lost")
        await stub.until(lambda: 4 in stub.acked)
        stub.lose(1)
        stub.write()
        await stub.sockets[-1].close(1011)
        await stub.until(lambda: "edits-kept" in stub.seqs)
        await until(lambda: [one.state for one in store.outgoing()] == ["refused"], timeout=5, what="the refusal")
    (refused,) = store.outgoing()
    assert (refused.client_msg_id, refused.error) == ("deletes-lost", errors.Conflict.code)
    assert "deletes-lost" not in stub.seqs


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_the_server_loses_all_end_with_its_timeline(stub: Stub, seed: int) -> None:
    """Failovers that lose some last commits, cut connections, writes of others; own messages are there at the end."""
    chance = random.Random(seed)
    store, wanted = MemoryStore(), set[str]()
    async with Client(stub.url, "t", "d", store, timing=TIMING, deliver=False, ack_delay_s=0.002) as client:
        sends: list[asyncio.Task[Any]] = []
        for number in range(60):
            act = chance.choice(["write", "write", "send", "send", "cut", "lose", "rest"])
            if act == "write":
                stub.write()
                await stub.push()
            elif act == "send":
                name = f"own{number}"
                wanted.add(name)
                sends.append(asyncio.create_task(client.send(CHAT, {"n": number}, client_msg_id=name)))
                await asyncio.sleep(0)
            elif act == "cut" and stub.sockets:
                await stub.sockets[-1].close(1011)
            elif act == "lose" and stub.sockets:
                stub.lose(max(0, len(stub.events) - chance.randrange(6)))
                for _ in range(chance.randrange(6)):
                    stub.write()
                # With its failover a server loses its sessions.
                await stub.sockets[-1].close(1011)
            else:
                await asyncio.sleep(0.002)
        # What was lost after its `sent`, without another sign of it, is noticed by the next hello.
        await asyncio.gather(*sends)
        stub.write()
        await stub.sockets[-1].close(1011)
        await same(stub, store)
    own = [one["client_msg_id"] for one in stub.events if one["sender_id"] == ME]
    assert sorted(own) == sorted(wanted)
