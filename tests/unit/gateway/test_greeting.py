"""A session's beginning, from its `hello` to `listed`, while others go on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway import greeting as first_frames
from services.gateway import hello as greeting
from shared.contracts import decode as decoding
from shared.errors import UnavailableError
from shared.ranges import RangeSet
from tests.followers import visit
from tests.lone_gateway import House, Wire


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with House(monkeypatch) as made:
        yield made


def hello(house: House, user_id: str = "ann", **more: Any) -> Wire:
    wire = house.wire()
    wire.say({"t": "hello", "token": user_id, "device_id": "phone", **more})
    return wire


async def listed(house: House, *wires: Wire) -> None:
    await house.until(lambda: all("listed" in wire.types for wire in wires), "all are listed")
    await house.quiet()


async def long_enough(house: House) -> None:
    """Until the other loops have done what they can."""
    for _ in range(50):
        visit(house.fanout)
        await asyncio.sleep(0)


class TestOrder:
    @pytest.mark.promise("protocol.3.hello", "protocol.3.listing_order")
    async def test_welcome_then_conversations_then_listed(self, house: House) -> None:
        house.store.make("a", "ann", head=2)
        house.store.make("b", "ann", head=2)
        house.store.make("c", "bob")
        wire = await house.open(cursors={"a": 2, "b": 2})
        assert wire.types == ["welcome", "conversation", "conversation", "listed"]
        assert wire.writes == 1
        assert wire.of("welcome")[0]["limits"]["window"] == 256
        assert wire.of("listed")[0]["count"] == 2
        assert wire.most == house.settings.gateway_frame_bytes

    @pytest.mark.promise("protocol.3.listed_totals")
    async def test_what_is_unread_in_all_is_told_where_all_is_listed(self, house: House) -> None:
        for name, head in (("a", 3), ("b", 5), ("c", 9)):
            house.store.make(name, "ann", head=head)
        house.store.of["c"].settings["ann"] = ("", True)
        first = await house.open(cursors={})
        [told] = first.of("listed")
        assert (told["unread"], told["muted_unread"]) == (8, 9)
        house.store.of["a"].write()
        second = await house.open(device_id="pad", since=told["since"])
        assert second.of("listed")[0].keys() == {"t", "count", "since"}
        for of in house.store.of.values():
            of.write()
        third = await house.open(device_id="tv", since=told["since"])
        assert (third.of("listed")[0]["unread"], third.of("listed")[0]["count"]) == (11, 3)
        assert (await house.open("nobody")).of("listed")[0]["unread"] == 0

    @pytest.mark.promise("protocol.3.hello", "protocol.3.hello_cursors")
    @pytest.mark.parametrize("query", ["changed_since", "list_conversations"])
    async def test_a_word_of_a_conversation_meanwhile_comes_neither_before_welcome_nor_instead_of_the_cursors(
        self, house: House, query: str
    ) -> None:
        """Another device of the user has sent something: from then on all its sessions follow the conversation."""
        of = house.store.make("c", "ann", head=5)
        of.records["ann", "phone"] = RangeSet([(1, 4)])
        goes_on = asyncio.Event()
        house.store.before[query].append(lambda: house.fanout.committed("ann", "c", 5))
        house.store.lasts[query].append(goes_on)
        wire = hello(house, cursors={"c": 2})
        await house.until(lambda: query in house.store.asked, "the listing")
        await long_enough(house)
        goes_on.set()
        await listed(house, wire)
        assert wire.types == ["welcome", "conversation", "listed", "event", "event", "event"]
        assert (wire.of("conversation")[0]["cursor"], wire.seqs()) == (2, [3, 4, 5])

    @pytest.mark.promise("protocol.3.hello_since")
    async def test_nor_does_the_first_event_of_one_that_did_not_change(self, house: House) -> None:
        of = house.store.make("c", "ann", head=5)
        house.store.make("d", "ann")
        first = await house.open(cursors={"c": 5, "d": 1})
        goes_on = asyncio.Event()
        house.store.before["list_conversations"].append(lambda: (of.write(), house.say("c", 6)))
        house.store.lasts["list_conversations"].append(goes_on)
        wire = hello(house, since=first.of("listed")[0]["since"], cursors={"d": 1})
        await house.until(lambda: of.head == 6, "the listing")
        await long_enough(house)
        goes_on.set()
        await listed(house, wire)
        assert wire.types == ["welcome", "conversation", "listed", "conversation", "event"]
        assert (wire.of("conversation")[1]["cursor"], wire.seqs()) == (5, [6])

    @pytest.mark.promise("protocol.2.expiry")
    async def test_a_token_that_is_to_expire_soon_is_told_of_after_welcome(self, house: House) -> None:
        goes_on = asyncio.Event()
        house.store.lasts["changed_since"].append(goes_on)
        wire = hello(house, "ann:30")
        await house.until(lambda: "changed_since" in house.store.asked, "the listing")
        house.forward(1.0)
        assert wire.types == []
        goes_on.set()
        await listed(house, wire)
        house.forward(1.0)
        assert wire.types == ["welcome", "listed", "expiring"]
        assert 25 <= wire.of("expiring")[0]["in_s"] <= 30

    async def test_receipts_wait_for_their_conversation(self, house: House) -> None:
        house.store.make("c", "ann", "bob", kind="direct", head=2)

        def receipt() -> None:
            house.fanout.receipt("c", b'{"t":"receipt","conversation_id":"c","user_id":"bob","read_version":0}')

        house.store.after["list_conversations"].append(receipt)
        wire = await house.open(cursors={"c": 2})
        assert wire.types == ["welcome", "conversation", "listed", "receipt"]


class TestTogether:
    async def test_hellos_that_come_together_are_read_together(self, house: House) -> None:
        for name in "abc":
            house.store.make(name, "ann", "bob", "cyd", head=3)
        wires = [hello(house, user_id, cursors={}) for user_id in ("ann", "bob", "cyd")]
        await listed(house, *wires)
        assert [wire.seqs("a") for wire in wires] == [[1, 2, 3]] * 3
        assert house.store.asked.count("changed_since") == 1
        assert house.store.asked.count("list_conversations") == 1
        assert house.store.asked.count("events_of") == 3

    async def test_one_that_fails_does_not_hurt_the_others(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        house.store.make("c", "ann", "bob", head=2)
        ann, bob = hello(house, "ann"), hello(house, "bob")

        def fails(_: bytes) -> None:
            raise ValueError

        ann.handler.write = fails
        await listed(house, bob)
        assert (ann.closed, bob.closed) == ((4500, "a fault of the server"), None)

    async def test_those_that_take_nothing_hold_nobody_up(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(first_frames, "_CHUNK", 1)
        for name in "abc":
            house.store.make(name, "ann", "bob", "cyd", "dan", head=2)
        slow = [hello(house, user_id) for user_id in ("ann", "bob", "cyd")]
        for wire in slow:
            wire.congested = True
        await house.until(lambda: all("conversation" in wire.types for wire in slow), "the first frames")
        quick = hello(house, "dan")
        await house.until(lambda: "listed" in quick.types, "the one that takes what it is told")
        assert not any("listed" in wire.types for wire in slow)
        for wire in slow:
            wire.congested = False
            wire.handler.writable()
        await listed(house, *slow)

    async def test_one_that_is_gone_meanwhile_leaves_nothing(self, house: House) -> None:
        house.store.make("c", "ann", "bob", head=2)
        ann, bob = hello(house, "ann"), hello(house, "bob")
        house.store.after["changed_since"].append(lambda: ann.handler.gone(1006))
        await listed(house, bob)
        assert (ann.frames, list(house.fanout.users)) == ([], ["bob"])
        assert len(house.fanout.rooms["c"].feeds) == 1


class TestRefused:
    @pytest.mark.promise("protocol.3.hello", "protocol.3.close_codes")
    @pytest.mark.parametrize(
        ("first", "code"),
        [
            (b"binary", 4400),
            ({"t": "ping"}, 4400),
            ({"t": "hello"}, 4400),
            ({"t": "hello", "device_id": "phone"}, 4401),
            ({"t": "hello", "device_id": "phone", "token": "ann::tablet"}, 4403),
        ],
    )
    async def test_a_first_frame_that_is_none(self, house: House, first: Any, code: int) -> None:
        wire = house.wire()
        wire.say(first)
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed is not None
        assert (wire.closed[0], wire.frames) == (code, [])
        assert (house.sessions, house.fanout.users) == (set(), {})

    async def test_one_that_is_no_json_is_not_looked_at_twice(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decoding, "members", None)
        monkeypatch.setattr(greeting.frames, "members", None)
        wire = house.wire()
        wire.handler.message('{"t":"hello","device_id":"' + '\\"' * 10_000)
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed == (4400, "t: not valid JSON")

    async def test_two_headers(self, house: House) -> None:
        wire = house.wire()
        wire.authorization = ["Bearer ann", "Bearer bob"]
        wire.say({"t": "hello", "device_id": "phone"})
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed == (4401, "one Authorization header, not several")

    @pytest.mark.promise("protocol.2.hello_token")
    async def test_the_headers_token_beats_the_one_in_hello(self, house: House) -> None:
        wire = house.wire()
        wire.authorization = ["Bearer ann"]
        wire.say({"t": "hello", "device_id": "phone", "token": "bob"})
        await listed(house, wire)
        assert wire.of("welcome")[0]["user_id"] == "ann"
        assert wire.authorization == []

    @pytest.mark.parametrize("query", ["changed_since", "list_conversations"])
    async def test_a_store_that_is_away_sends_it_elsewhere(self, house: House, query: str) -> None:
        house.store.make("c", "ann")
        house.store.fails[query].append(UnavailableError("away"))
        wire = hello(house)
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed == (4503, "away")
        (frame,) = wire.frames
        assert frame["t"] == "reconnect"
        assert 500 <= frame["after_ms"] <= 2000
        await house.quiet()
        assert house.fanout.users == {}

    @pytest.mark.promise("I7")
    async def test_so_does_one_that_the_sweep_has_found_meanwhile(self, house: House) -> None:
        house.store.make("c", "ann")
        house.store.after["list_conversations"].append(house.greeter.forget)
        wire = hello(house)
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed == (4503, "the store was replaced")

    @pytest.mark.promise("I7")
    async def test_another_store_in_the_middle_of_it_has_it_come_again(self, house: House) -> None:
        house.store.make("c", "ann")
        await house.open("bob")

        def replaced() -> None:
            house.store.incarnation = "0197c3d1-0000-4000-8000-000000000002"

        house.store.after["changed_since"].append(replaced)
        first = hello(house)
        await house.until(lambda: first.closed, "the end")
        assert (first.closed, first.types) == ((4503, "the store was replaced"), ["reconnect"])
        house.greeter.forget()
        second = await house.open()
        assert second.of("listed")[0]["since"].startswith("0197c3d1-0000-4000-8000-000000000002.")
