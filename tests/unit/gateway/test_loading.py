"""Where pushing starts, and what a client is told of a conversation."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.gateway.listing import Listed, Marks
from services.gateway.loading import LATER, Begin, loaded
from services.gateway.metrics import CURSOR_BREAKS
from shared.contracts import frames
from shared.errors import UnavailableError
from shared.ranges import OPEN, RangeSet
from tests.followers import ALL, written
from tests.lone_gateway import House, Wire

EVENT = "0197c3d1-0000-7000-8000-00000000000a"
JOINED = RangeSet([(3, OPEN)])
LEFT = RangeSet([(1, 6)])
LISTED = Listed(
    conversation_id="c",
    kind="group",
    title="T",
    keeps_history=False,
    as_of=9,
    role="member",
    visible=ALL,
    head=9,
    record=4,
    mine=Marks("ann", 4, 5, 2),
    unread=1,
    updated_at=None,
    peer=None,
)


def read(**more: Any) -> Listed:
    return msgspec.structs.replace(LISTED, **more)


def begin(**hello: Any) -> Begin:
    said = frames.parse(msgspec.json.encode({"t": "hello", "device_id": "phone", **hello}).decode())
    assert isinstance(said, frames.Hello)
    return Begin.of(said)


class TestCursor:
    """Protocol §3, case by case."""

    @pytest.mark.promise("protocol.3.hello_sync")
    @pytest.mark.parametrize(("sync", "cursor"), [("full", 4), ("live", 9)])
    def test_with_neither_cursors_nor_since(self, sync: str, cursor: int) -> None:
        assert begin(sync=sync).cursor(LISTED) == (cursor, None)

    @pytest.mark.promise("protocol.3.hello_cursors")
    @pytest.mark.parametrize("sync", ["full", "live"])
    @pytest.mark.parametrize("cursors", [{}, {"d": 7}])
    def test_with_cursors_that_do_not_name_it(self, sync: str, cursors: dict[str, int]) -> None:
        assert begin(sync=sync, cursors=cursors).cursor(LISTED) == (0, None)
        assert begin(sync=sync, cursors=cursors).cursor(read(visible=JOINED)) == (2, None)

    @pytest.mark.promise("protocol.3.hello_since")
    @pytest.mark.parametrize("sync", ["full", "live"])
    @pytest.mark.parametrize("hello", [{}, {"cursors": {}}, {"cursors": {"d": 7}}])
    def test_with_since_and_no_cursor_of_it(self, sync: str, hello: dict[str, Any]) -> None:
        assert begin(sync=sync, since="x.1", **hello).cursor(LISTED) == (4, None)

    @pytest.mark.promise("protocol.3.hello_cursors")
    @pytest.mark.parametrize("more", [{}, {"since": "x.1"}, {"sync": "live"}])
    def test_with_a_cursor_of_it(self, more: dict[str, Any]) -> None:
        assert begin(cursors={"c": 4}, **more).cursor(LISTED) == (4, None)
        assert begin(cursors={"C": [4, EVENT]}, **more).cursor(LISTED) == (4, None)

    @pytest.mark.promise("I7", "protocol.9.metric_labels")
    @pytest.mark.parametrize(
        ("cursor", "more", "expected"),
        [
            (3, {}, (3, "behind")),
            (0, {}, (0, "behind")),
            (5, {}, (5, "ahead_of_record")),
            (9, {}, (9, "ahead_of_record")),
            (10, {}, (9, "ahead_of_head")),
            (10, {"record": 9}, (9, "ahead_of_head")),
            (2, {"visible": JOINED, "record": 2}, (2, None)),
            (0, {"visible": JOINED, "record": 2}, (0, None)),
            (2, {"visible": JOINED, "record": 3}, (2, "behind")),
            (6, {"visible": LEFT, "head": 6, "record": 6}, (6, None)),
            (9, {"visible": LEFT, "head": 6, "record": 6}, (6, "ahead_of_head")),
        ],
    )
    def test_that_is_not_where_it_should_be(
        self, cursor: int, more: dict[str, Any], expected: tuple[int, str | None]
    ) -> None:
        assert begin(cursors={"c": cursor}).cursor(read(**more)) == expected

    @pytest.mark.promise("protocol.3.reset")
    @pytest.mark.parametrize("cursor", [3, 4, 9, 30])
    def test_with_another_event_there(self, cursor: int) -> None:
        assert begin(cursors={"c": [cursor, EVENT]}).cursor(read(mismatch=True)) == (cursor, "reset")


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with House(monkeypatch) as made:
        yield made


class Reading:
    """A session that is being listed."""

    def __init__(self, house: House, wire: Wire) -> None:
        self.connection = wire.handler
        self.house = house
        self.feed = house.fanout.enter(self.connection, "c")

    def take(self, one: Listed, begin: Begin = LATER) -> list[dict[str, Any]]:
        return written(b"".join(loaded(self.connection, self.feed, one, begin)))

    @property
    def start(self) -> tuple[int, bool, bool]:
        """Where pushing goes on, and whether it is behind or halted."""
        return self.feed.position, self.feed.behind, self.feed.halted

    @property
    def acked(self) -> list[tuple[Any, ...]]:
        return [(*device[:1], tuple(ranges)) for device, ranges in self.house.acks.of("hold")]


@pytest.fixture
async def reading(house: House) -> Reading:
    return Reading(house, await house.open())


def counted(kind: str) -> float:
    return float(CURSOR_BREAKS.labels(kind)._value.get())


class TestLoaded:
    @pytest.mark.promise("protocol.3.conversation_frame")
    def test_a_new_one(self, reading: Reading) -> None:
        (frame,) = reading.take(LISTED)
        assert (frame["t"], frame["cursor"], frame["head"]) == ("conversation", 4, 9)
        assert (reading.start, reading.feed.room.head) == ((4, True, False), 9)
        assert (reading.feed.read_version, reading.feed.as_of, reading.feed.direct) == (2, 9, False)

    def test_at_its_head_it_is_live(self, reading: Reading) -> None:
        reading.take(read(record=9))
        assert reading.start == (9, False, False)

    @pytest.mark.promise("I6")
    def test_what_came_meanwhile_makes_it_behind(self, reading: Reading) -> None:
        reading.feed.room.know(10)
        reading.take(read(record=9))
        assert reading.start == (9, True, False)

    @pytest.mark.promise("protocol.3.peer_receipt")
    def test_the_peers_receipt_follows_a_direct_one(self, reading: Reading) -> None:
        told = reading.take(read(kind="direct", title=None, peer=Marks("bob", 1, 2, 3)))
        assert [frame["t"] for frame in told] == ["conversation", "receipt"]
        assert (reading.feed.direct, reading.feed.room.direct) == (True, True)

    @pytest.mark.promise("protocol.3.cursor_ahead")
    def test_a_cursor_above_the_head_is_answered_with_the_head(self, reading: Reading) -> None:
        before = counted("ahead_of_head")
        (frame,) = reading.take(LISTED, begin(cursors={"c": 12}))
        assert (frame["cursor"], frame["head"], frame.get("reset")) == (9, 9, None)
        assert reading.start == (9, False, False)
        assert counted("ahead_of_head") - before == 1
        ((service, kind, *what),) = (note for note in reading.house.transitions.of("note") if note[0] == "cursor")
        assert (service, kind, what[-2:]) == ("cursor", "ahead_of_head", [12, 9])

    @pytest.mark.promise("protocol.3.reset")
    def test_another_event_at_the_cursor_halts_it(self, reading: Reading) -> None:
        (frame,) = reading.take(read(mismatch=True), begin(cursors={"c": [6, EVENT]}))
        assert (frame["cursor"], frame["reset"]) == (6, True)
        assert reading.start == (6, False, True)
        assert reading.acked == []
        reading.house.fanout.heads({"c": 11})
        reading.connection.wake()
        assert not reading.house.catch_up._turns

    @pytest.mark.promise("protocol.3.hello_cursors", "I8")
    @pytest.mark.parametrize(("cursor", "acked"), [(3, []), (4, []), (6, [("c", ((5, 6),))])])
    def test_a_cursor_is_an_ack(self, reading: Reading, cursor: int, acked: list[Any]) -> None:
        reading.take(LISTED, begin(cursors={"c": cursor}))
        assert reading.acked == acked
        assert reading.start == (cursor, True, False)

    def test_what_is_not_visible_is_not_acked(self, reading: Reading) -> None:
        reading.take(read(visible=JOINED, record=2), begin(cursors={"c": 4}))
        assert reading.acked == [("c", ((3, 4),))]

    def test_acks_that_came_before_it_count_then(self, reading: Reading) -> None:
        reading.feed.wait_for_frame([(5, 6), (11, 12)])
        reading.feed.room.committed = 11
        reading.take(LISTED)
        assert reading.acked == [("c", ((5, 6), (11, 11)))]
        assert not reading.feed.early

    @pytest.mark.promise("protocol.3.left_conversation")
    @pytest.mark.parametrize(("cursor", "told"), [({"c": 6}, []), ({"c": 5}, [5]), ({"c": 8}, [6]), ({}, [0])])
    def test_one_that_the_user_has_left(self, reading: Reading, cursor: dict[str, int], told: list[int]) -> None:
        """It is told of while the device lacks something of it, or names what is not there."""
        one = read(visible=LEFT, head=6, record=6)
        assert [frame["cursor"] for frame in reading.take(one, begin(cursors=cursor))] == told
        assert reading.feed.room.feeds, "and followed: the user may be added again"
        assert reading.feed.position == (9 if not told or told == [6] else told[0])

    def test_what_changed_while_it_was_read_is_read_again(self, reading: Reading) -> None:
        reading.take(LISTED)
        reading.feed.as_of = 11
        assert reading.take(read(as_of=10)) == []
        assert (reading.connection, "c") in reading.house.loader._wanted

    @pytest.mark.promise("protocol.3.conversation_frame")
    def test_again_it_goes_on_where_it_was(self, reading: Reading) -> None:
        reading.take(read(record=9))
        reading.connection.session.reload(reading.feed)
        (frame,) = reading.take(read(as_of=10, head=10, visible=RangeSet([(1, 10)])), begin(cursors={"c": 2}))
        assert (frame["cursor"], frame["visible"]) == (9, [[1, 10]])
        assert reading.start == (9, True, False)
        assert not reading.feed.member

    @pytest.mark.promise("I7", "protocol.9.visible")
    def test_who_has_left_is_told_no_cursor_above_what_it_sees(self, reading: Reading) -> None:
        """The feed passes over what follows. A client that did so, too, would lack it once it is added to all of it."""
        reading.take(read(record=6))
        reading.feed.position = 9
        reading.connection.session.reload(reading.feed)
        (frame,) = reading.take(read(visible=LEFT, head=6, record=6))
        assert (frame["cursor"], frame["head"], frame["visible"]) == (6, 6, [[1, 6]])
        assert reading.feed.position == 9

    @pytest.mark.promise("protocol.3.hello_since")
    def test_one_that_was_asleep_goes_on_above_the_head_of_then(self, reading: Reading) -> None:
        reading.feed.asleep = True
        reading.feed.begin(7, 0)
        reading.feed.room.know(9)
        (frame,) = reading.take(read(record=4))
        assert (frame["cursor"], reading.start, reading.acked) == (7, (7, True, False), [])
        assert reading.feed.record == RangeSet([(1, 4)])


class TestLoader:
    async def test_many_are_read_at_once(self, house: House) -> None:
        ann, bob = await house.open("ann"), await house.open("bob")
        for name in "abc":
            house.store.make(name, "ann", "bob", head=2)
            house.say(name, 1)
        before = house.store.asked.count("list_conversations")
        await house.quiet()
        assert house.store.asked.count("list_conversations") - before == 1
        assert [[wire.seqs(name) for name in "abc"] for wire in (ann, bob)] == [[[1, 2]] * 3] * 2

    async def test_asked_for_twice_it_is_told_once(self, house: House) -> None:
        house.store.make("c", "ann", head=2)
        wire = await house.open(cursors={"c": 2})
        for _ in range(3):
            wire.handler.load("c")
        await house.quiet()
        assert len(wire.of("conversation")) == 2

    async def test_while_the_store_is_away_it_waits(self, house: House) -> None:
        house.store.make("c", "ann", head=2)
        wire = await house.open(cursors={"c": 2})
        house.store.fails["list_conversations"] += [UnavailableError("away"), UnavailableError("away")]
        wire.handler.load("c")
        await house.until(lambda: len(wire.of("conversation")) == 2, "its frame")
        assert wire.closed is None

    async def test_what_the_user_is_no_member_of_is_not_followed(self, house: House) -> None:
        house.store.make("c", "bob")
        wire = await house.open()
        house.fanout.belongs("ann", "c")
        await house.quiet()
        assert (wire.handler.session.feeds, house.fanout.rooms["c"].feeds) == ({}, {})

    async def test_a_session_that_ended_meanwhile(self, house: House) -> None:
        house.store.make("c", "ann", "bob", head=2)
        ann, bob = await house.open("ann", cursors={"c": 2}), await house.open("bob", cursors={"c": 2})
        house.store.after["list_conversations"].append(lambda: ann.handler.gone(1006))
        for wire in (ann, bob):
            wire.handler.load("c")
        await house.quiet()
        assert [len(wire.of("conversation")) for wire in (ann, bob)] == [1, 2]

    async def test_a_session_that_cannot_be_told_hurts_no_other(self, house: House) -> None:
        house.store.make("c", "ann", "bob", head=2)
        ann, bob = await house.open("ann", cursors={"c": 2}), await house.open("bob", cursors={"c": 2})

        def fails(_: bytes) -> None:
            raise ValueError

        ann.handler.write = fails
        for wire in (ann, bob):
            wire.handler.load("c")
        await house.quiet()
        assert (ann.closed, len(bob.of("conversation"))) == ((4500, "a fault of the server"), 2)

    async def test_what_cannot_be_read_at_all_leaves_nobody_waiting_for_ever(self, house: House) -> None:
        house.store.make("c", "ann", head=2)
        wire = await house.open(cursors={"c": 2})
        house.store.fails["list_conversations"].append(ValueError())
        wire.handler.load("c")
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed == (4500, "a fault of the server")
        await house.until(lambda: not house.busy, "the next attempt")
        again = await house.open(cursors={"c": 2})
        again.handler.load("c")
        await house.until(lambda: len(again.of("conversation")) == 2, "the next one is read")
