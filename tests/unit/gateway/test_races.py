"""The races that the gateway's design names, each one forced.

Real fan-out, turns, sessions and reads over a store whose answers are of the moment that the test chooses. After each
race no further event comes: what was lost in it stays lost. "Brought" is by Kafka.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.ranges import OPEN, RangeSet
from tests.lone_gateway import NEVER, House, Wire

pytestmark = pytest.mark.promise("I6")


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with House(monkeypatch) as made:
        yield made


def brings(house: House, count: int = 1) -> Any:
    """Something is written and brought, and feeds are visited."""
    return lambda: house.live("c", count)


def told(wire: Wire) -> list[str]:
    """What the client was told of the conversation, each event by its seq, and `listed`."""
    names = {"event": lambda frame: str(frame["seq"]), "conversation": lambda frame: f"c@{frame['cursor']}"}
    return [names[frame["t"]](frame) for frame in wire.frames if frame["t"] in names]


class TestRecordBetweenListingAndRegistration:
    @pytest.mark.parametrize(
        ("moment", "query"),
        [("before", "conversations_of_users"), ("after", "conversations_of_users"), ("after", "changed_since")],
    )
    async def test_of_a_conversation_that_did_not_change_since(self, house: House, moment: str, query: str) -> None:
        """Only its head is read: a record before that must be in it, and one after it must be known."""
        of = house.store.make("c", "ann", head=5)
        of.records["ann", "phone"] = RangeSet([(1, 5)])
        first = await house.open(cursors={"c": 5})
        first.handler.gone(1000)
        house.fanout.tidy(NEVER)
        getattr(house.store, moment)[query].append(brings(house))
        wire = await house.open(since=first.of("listed")[0]["since"])
        assert told(wire) == ["c@5", "6"]

    async def test_nothing_is_listed_where_nothing_came(self, house: House) -> None:
        """Else the test above would show nothing."""
        house.store.make("c", "ann", head=5)
        first = await house.open(cursors={"c": 5})
        wire = await house.open(since=first.of("listed")[0]["since"])
        assert (told(wire), wire.of("listed")[0]["count"]) == ([], 0)

    @pytest.mark.parametrize(
        ("moment", "query"),
        [
            ("before", "changed_since"),
            ("after", "changed_since"),
            ("before", "list_conversations"),
            ("after", "list_conversations"),
        ],
    )
    async def test_of_one_that_is_listed(self, house: House, moment: str, query: str) -> None:
        house.store.make("c", "ann", head=5)
        getattr(house.store, moment)[query].append(brings(house))
        wire = await house.open(cursors={"c": 5})
        assert told(wire) == ["c@5", "6"]

    @pytest.mark.parametrize("query", ["changed_since", "list_conversations"])
    async def test_that_makes_the_user_a_member_of_it(self, house: House, query: str) -> None:
        of = house.store.make("c", "bob", head=4)
        house.store.make("d", "ann")
        house.store.after[query].append(lambda: house.say("c", of.add("ann")))
        wire = await house.open(cursors={"d": 1})
        assert [frame["conversation_id"] for frame in wire.of("conversation")] == ["d", "c"]
        assert told(wire)[-2:] == ["c@4", "5"]
        assert wire.types[:3] == ["welcome", "conversation", "listed"]


class TestRecordDuringTheReadThatEndsCatchUp:
    @pytest.mark.parametrize("count", [1, 3])
    async def test_it_follows_what_was_read(self, house: House, count: int) -> None:
        house.store.make("c", "ann", head=3)
        house.store.after["events_of"].append(brings(house, count))
        wire = await house.open(cursors={})
        assert wire.seqs() == list(range(1, 4 + count))
        assert not wire.handler.session.feeds["c"].behind

    async def test_its_own_loss_is_found_by_the_head_that_follows(self, house: House) -> None:
        """Of two that come meanwhile the first one is lost."""
        of = house.store.make("c", "ann", head=3)
        house.store.after["events_of"].append(lambda: (of.write(), house.live("c")))
        wire = await house.open(cursors={})
        assert wire.seqs() == [1, 2, 3, 4, 5]


class TestRecordRightAfterTheOneThatAddsAConnectedUser:
    @pytest.mark.parametrize("moment", ["before", "after"])
    async def test_it_is_pushed_after_the_frame(self, house: House, moment: str) -> None:
        of = house.store.make("c", "bob", head=4)
        wire = await house.open()
        getattr(house.store, moment)["list_conversations"].append(brings(house))
        house.say("c", of.add("ann"))
        await house.quiet()
        assert told(wire) == ["c@4", "5", "6"]

    async def test_at_once(self, house: House) -> None:
        of = house.store.make("c", "bob", head=4)
        wire = await house.open()
        house.come("c", of.add("ann"), of.write(), of.write())
        await house.quiet()
        assert told(wire) == ["c@4", "5", "6", "7"]


class TestStaleSharedRead:
    async def test_one_that_began_before_the_listing_of_who_joins_it(self, house: House) -> None:
        """Both records after it are lost; only that listing knows of them."""
        of = house.store.make("c", "ann", "bob", head=3)
        read = asyncio.Event()
        house.store.lasts["events_of"].append(read)
        ann = await self._reading(house, "ann")
        of.write()
        of.write()
        bob = await self._reading(house, "bob")
        assert house.store.asked.count("events_of") == 1, "they do share it"
        read.set()
        await house.quiet()
        assert (ann.seqs(), bob.seqs()) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])

    @pytest.mark.promise("protocol.3.delete", "protocol.9.present_state")
    @pytest.mark.parametrize("brought", [[4], [5]])
    async def test_one_that_began_before_a_delete_serves_nobody_who_joins_later(
        self, house: House, brought: list[int]
    ) -> None:
        """Whether the delete itself is brought, or lost and only what follows it."""
        of = house.store.make("c", "ann", "bob", "cyd", head=3)
        read = asyncio.Event()
        house.store.lasts["events_of"].append(read)
        ann = await self._reading(house, "ann")
        of.write("delete", target_seq=2, body=None)
        of.write()
        house.say("c", *brought)
        bob = self._hello(house, "bob")
        await house.until(lambda: bob.seqs() == [1, 2, 3, 4, 5], "bob's own read")
        assert ann.seqs() == []
        read.set()
        await house.quiet()
        cyd = await house.open("cyd", cursors={})
        bodies = [{frame["seq"]: frame["body"] for frame in wire.of("event")} for wire in (ann, bob, cyd)]
        assert [wire.seqs() for wire in (ann, bob, cyd)] == [[1, 2, 3, 4, 5]] * 3
        assert [body[2] for body in bodies[1:]] == [None, None]

    @pytest.mark.promise("protocol.3.delete")
    async def test_nor_does_the_ring_that_it_reaches(self, house: House) -> None:
        of = house.store.make("c", "ann", "bob", head=3)
        read = asyncio.Event()
        house.store.lasts["events_of"].append(read)
        ann = await self._reading(house, "ann")
        house.say("c", of.write("delete", target_seq=2, body=None))
        read.set()
        await house.quiet()
        bob = await house.open("bob", cursors={})
        assert (ann.seqs(), bob.seqs()) == ([1, 2, 3, 4], [1, 2, 3, 4])
        assert [frame["body"] for frame in bob.of("event")][1] is None

    async def _reading(self, house: House, user_id: str) -> Wire:
        wire = self._hello(house, user_id)
        await house.until(lambda: wire.handler.session.reading, "a read")
        return wire

    def _hello(self, house: House, user_id: str) -> Wire:
        wire = house.wire()
        wire.say({"t": "hello", "token": user_id, "device_id": "phone", "cursors": {}})
        return wire


class TestReplayedRecord:
    async def test_of_below_the_head_that_was_loaded(self, house: House) -> None:
        gaps: list[tuple[str, int, int]] = []
        house.fanout.gap = lambda *gap: gaps.append(gap)
        house.store.make("c", "ann", head=30)
        wire = await house.open(cursors={"c": 30})
        house.say("c", 25)
        room = house.fanout.rooms["c"]
        assert (room.head, room.top, room.run(24)) == (30, 30, None)
        house.live("c")
        assert (wire.seqs(), gaps) == ([31], [])

    @pytest.mark.promise("I12")
    async def test_of_a_removal_that_was_taken_back_since(self, house: House) -> None:
        """What was read at 30 stands, whether the record comes from Kafka or in a page."""
        of = house.store.make("c", "ann", history="all", head=24)
        of.remove("ann")
        of.add("ann")
        for _ in range(4):
            of.write()
        house.store.before["events_of"].append(lambda: house.say("c", 25))
        wire = await house.open(cursors={"c": 20})
        house.say("c", 25, 26, 30)
        await house.quiet()
        assert told(wire) == ["c@20", *map(str, range(21, 31))]
        assert list(wire.handler.session.feeds["c"].visible) == [(1, OPEN)]
        house.live("c")
        assert wire.seqs()[-1] == 31


class TestRemovalThatIsTheLostRecord:
    @pytest.mark.promise("I12")
    @pytest.mark.parametrize("found_by", ["the next record", "the sweep"])
    async def test_the_user_gets_it_and_nothing_after_it(self, house: House, found_by: str) -> None:
        of = house.store.make("c", "ann", "bob", head=3)
        ann, bob = await house.open("ann", cursors={"c": 3}), await house.open("bob", cursors={"c": 3})
        house.live("c")
        of.remove("ann")
        of.write()
        if found_by == "the sweep":
            house.fanout.heads({"c": 6})
        else:
            house.say("c", 6)
        await house.quiet()
        house.live("c", 2)
        await house.quiet()
        assert told(ann) == ["c@3", "4", "5", "c@5"]
        assert ann.of("conversation")[-1]["visible"] == [[1, 5]]
        assert bob.seqs() == [4, 5, 6, 7, 8]

    @pytest.mark.promise("I12")
    async def test_in_the_same_run_as_what_follows_it(self, house: House) -> None:
        """The read that finds it serves both, and what follows is in the ring by then."""
        of = house.store.make("c", "ann", "bob", head=4)
        ann, bob = await house.open("ann", cursors={"c": 4}), await house.open("bob", cursors={"c": 4})
        of.remove("ann")
        house.store.before["events_of"].append(lambda: house.come("c", of.write(), of.write()))
        house.say("c", of.write())
        await house.quiet()
        assert (ann.seqs(), bob.seqs()) == ([5], [5, 6, 7, 8])

    @pytest.mark.promise("I12", "protocol.3.hidden_edit")
    async def test_while_a_read_for_the_user_alone_is_needed(self, house: House) -> None:
        of = house.store.make("c", "bob", head=3)
        of.add("ann")
        ann = await house.open("ann", cursors={"c": 4})
        house.store.before["events_after"].append(lambda: of.remove("ann"))
        house.say("c", of.write("edit", target_seq=2, body={"text": "secret"}))
        await house.quiet()
        house.live("c", 2)
        await house.quiet()
        assert ann.seqs() == [5, 6]
        assert ann.of("event")[0]["body"] is None
        assert ann.of("conversation")[-1]["visible"] == [[4, 6]]
