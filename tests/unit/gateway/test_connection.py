"""One session over a wire that the test holds: what it answers, what it sends again, and how it ends."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway import asking, group_receipts, requests
from services.gateway.acks import Device, Mark
from services.gateway.answers import Committed, Created, OwnSettings
from services.gateway.close import Close
from services.gateway.limits import Limits, Patience, Rate
from services.gateway.metrics import IGNORED_ACKS, RESENDS
from services.gateway.wire import ready
from shared.contracts import frames
from shared.errors import NotFoundError, UnavailableError
from shared.readers import Reader, Readers
from tests.lone_gateway import House, Wire
from tests.timelines import Row

C = "0197c3d1-0000-7000-8000-0000000000c1"
OTHER = "0197c3d1-0000-7000-8000-0000000000c2"
QUIET = "0197c3d1-0000-7000-8000-0000000000c3"


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with House(monkeypatch) as made:
        made.store.make(C, "ann", "bob", head=3)
        yield made


@pytest.fixture
async def wire(house: House) -> Wire:
    """Of ann's phone, which has everything."""
    return await house.open(cursors={C: 3})


def count(metric: Any) -> float:
    return float(metric._value.get())


class TestHello:
    @pytest.mark.promise("protocol.3.hello", "protocol.3.close_codes")
    async def test_it_has_its_time(self, house: House) -> None:
        wire = house.wire()
        house.forward(9.9)
        assert wire.closed is None
        house.forward(0.2)
        assert wire.closed == (4408, "no hello in time")
        assert house.sessions == set()

    async def test_its_time_is_not_that_of_the_listing(self, house: House) -> None:
        goes_on = asyncio.Event()
        house.store.lasts["changed_since"].append(goes_on)
        wire = house.wire()
        wire.say({"t": "hello", "token": "ann", "device_id": "phone"})
        await house.until(lambda: "changed_since" in house.store.asked, "the listing")
        house.forward(20.0)
        assert wire.closed is None
        goes_on.set()
        await house.quiet()
        assert "listed" in wire.types

    async def test_nor_that_of_checking_its_token(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        goes_on = asyncio.Event()
        verify = house.parts.verifier.verify

        async def slow(token: str | None) -> Any:
            await goes_on.wait()
            return await verify(token)

        monkeypatch.setattr(house.parts.verifier, "verify", slow)
        wire = house.wire()
        wire.say({"t": "hello", "token": "ann", "device_id": "phone"})
        house.forward(20.0)
        assert wire.closed is None
        goes_on.set()
        await house.quiet()
        assert "listed" in wire.types
        house.forward(25.0)
        assert wire.pings > 0

    @pytest.mark.promise("protocol.3.hello")
    async def test_what_follows_it_at_once_waits_for_listed(self, house: House) -> None:
        wire = house.wire()
        wire.say({"t": "hello", "token": "ann", "device_id": "phone", "cursors": {C: 3}}, {"t": "ping", "rid": "1"})
        await house.quiet()
        assert wire.types == ["welcome", "conversation", "listed", "pong"]

    async def test_a_second_one_is_refused(self, wire: Wire) -> None:
        wire.say({"t": "hello", "device_id": "phone"})
        assert (wire.of("error")[0]["code"], wire.of("error")[0]["field"]) == ("bad_request", "t")


class TestHeartbeat:
    @pytest.mark.promise("protocol.3.heartbeat")
    async def test_two_pings_without_an_answer_end_it(self, house: House, wire: Wire) -> None:
        wire.answers = False
        house.forward(24.9)
        assert wire.pings == 0
        house.forward(0.2)
        assert wire.pings == 1
        house.forward(25.0)
        assert (wire.pings, wire.closed) == (2, None)
        house.forward(25.0)
        assert wire.closed == (4408, "no answer to pings")

    @pytest.mark.promise("protocol.3.heartbeat")
    async def test_who_answers_stays(self, house: House, wire: Wire) -> None:
        house.forward(251.0)
        assert (wire.pings, wire.closed) == (10, None)


class TestResend:
    @pytest.mark.promise("protocol.3.resend")
    async def test_from_the_ring_with_doubled_delays_and_an_end(self, house: House, wire: Wire) -> None:
        house.live(C, 2)
        before = count(RESENDS)
        reads = len(house.store.asked)
        seen = []
        for seconds in (4.9, 0.2, 10.0, 20.0, 40.0, 80.0, 159.0):
            house.forward(seconds)
            seen.append(len(wire.seqs()) // 2)
        assert seen == [1, 2, 3, 4, 5, 6, 6]
        assert wire.seqs() == [4, 5] * 6
        assert count(RESENDS) - before == 10
        assert (wire.closed, len(house.store.asked)) == (None, reads)
        house.forward(2.0)
        assert wire.closed == (4408, "no acks")

    @pytest.mark.promise("protocol.3.resend", "protocol.3.ack")
    async def test_what_is_acked_is_not_sent_again(self, house: House, wire: Wire) -> None:
        house.live(C, 3)
        wire.say({"t": "ack", "conversation_id": C.upper(), "ranges": [[5, 5]]})
        house.forward(5.1)
        assert wire.seqs() == [4, 5, 6, 4, 6]
        wire.say({"t": "ack", "conversation_id": C, "ranges": [[4, 4], [6, 6]]})
        house.forward(300.0)
        assert wire.seqs() == [4, 5, 6, 4, 6]
        assert [tuple(ranges) for _, ranges in house.acks.of("hold")][1:3] == [((5, 5),), ((4, 4), (6, 6))]

    @pytest.mark.promise("protocol.9.present_state", "protocol.3.delete")
    async def test_what_was_changed_since_is_read(self, house: House, wire: Wire) -> None:
        of = house.store.of[C]
        house.live(C)
        house.say(C, of.write("delete", target_seq=4, body=None))
        house.forward(5.1)
        assert wire.seqs() == [4, 5]
        await house.quiet()
        assert [(frame["seq"], frame["body"]) for frame in wire.of("event")[2:]] == [(4, None), (5, None)]

    async def test_what_the_ring_has_no_more_is_read(self, house: House, wire: Wire) -> None:
        house.live(C, 2)
        house.fanout.rooms[C].forget()
        house.forward(5.1)
        await house.quiet()
        assert wire.seqs() == [4, 5, 4, 5]

    async def test_what_is_acked_while_it_is_read_is_not_written(self, house: House, wire: Wire) -> None:
        house.live(C, 2)
        house.fanout.rooms[C].forget()
        ack = {"t": "ack", "conversation_id": C, "ranges": [[4, 4]]}
        house.store.after["events_at"].append(lambda: wire.say(ack))
        house.forward(5.1)
        await house.quiet()
        assert wire.seqs() == [4, 5, 5]

    @pytest.mark.promise("protocol.3.resend")
    async def test_what_cannot_be_read_is_no_try(self, house: House, wire: Wire) -> None:
        house.live(C)
        house.fanout.rooms[C].forget()
        house.store.fails["events_at"] += [UnavailableError("away")] * 20
        for _ in range(21):
            house.forward(5.1)
            await house.quiet()
        assert (wire.seqs(), wire.closed) == ([4, 4], None)

    async def test_all_conversations_of_a_session_are_read_at_once_and_one_read_at_a_time(self, house: House) -> None:
        house.settings.gateway_window = 30
        names = [f"0197c3d1-0000-7000-8000-0000000001{n:02}" for n in range(10)]
        for name in names:
            house.store.make(name, "ann")
        wire = await house.open(cursors={C: 3, **dict.fromkeys(names, 1)})
        for name in names:
            house.live(name, 2)
            house.fanout.rooms[name].forget()
        goes_on = asyncio.Event()
        house.store.lasts["events_at"].append(goes_on)
        house.forward(5.1)
        await asyncio.sleep(0)
        house.live(C, 4)
        house.fanout.rooms[C].forget()
        house.forward(5.5)
        await asyncio.sleep(0)
        assert house.store.asked.count("events_at") == 1
        goes_on.set()
        await house.quiet()
        assert [wire.seqs(name) for name in names] == [[2, 3, 2, 3]] * 10
        house.forward(0.5)
        await house.quiet()
        assert (wire.seqs(C), house.store.asked.count("events_at")) == ([4, 5, 6, 7] * 2, 2)

    async def test_a_read_has_at_most_the_rows_of_the_window(self, house: House) -> None:
        house.store.make(OTHER, "ann")
        wire = await house.open(cursors={C: 3, OTHER: 1})
        wire.handler.session.window = 5
        for name in (C, OTHER):
            house.live(name, 2)
            house.fanout.rooms[name].forget()
        wire.handler.session.window = 3
        house.forward(5.1)
        await house.quiet()
        assert (wire.seqs(C), wire.seqs(OTHER)) == ([4, 5, 4, 5], [2, 3])
        house.forward(0.5)
        await house.quiet()
        assert (wire.seqs(C), wire.seqs(OTHER)) == ([4, 5, 4, 5], [2, 3, 2, 3])

    async def test_of_all_sessions_two_read_at_a_time(self, house: House) -> None:
        wires = [await house.open(device_id=f"d{n}", cursors={C: 3}) for n in range(5)]
        house.live(C)
        house.fanout.rooms[C].forget()
        gates = [asyncio.Event(), asyncio.Event()]
        house.store.lasts["events_at"] += gates
        house.forward(5.1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert house.store.asked.count("events_at") == 2
        for gate in gates:
            gate.set()
        await house.quiet()
        assert [wire.seqs() for wire in wires] == [[4, 4]] * 5

    async def test_what_was_read_for_who_takes_no_more_goes_later(self, house: House, wire: Wire) -> None:
        house.live(C)
        house.fanout.rooms[C].forget()
        house.store.after["events_at"].append(lambda: setattr(wire, "congested", True))
        house.forward(5.1)
        await house.quiet()
        assert wire.seqs() == [4]
        wire.drain()
        house.forward(0.3)
        await house.quiet()
        assert wire.seqs() == [4, 4]

    async def test_a_fault_in_the_read_ends_this_session_alone(self, house: House, wire: Wire) -> None:
        house.live(C)
        house.fanout.rooms[C].forget()
        house.store.fails["events_at"].append(ValueError())
        house.forward(5.1)
        await house.quiet()
        assert wire.closed == (4500, "a fault of the server")

    async def test_who_takes_nothing_gets_nothing_again(self, house: House, wire: Wire) -> None:
        house.live(C)
        wire.congested = True
        house.forward(100.0)
        assert (wire.seqs(), wire.closed) == ([4], None)
        wire.drain()
        house.forward(0.3)
        assert wire.seqs() == [4, 4]

    @pytest.mark.promise("I12", "protocol.3.hidden_edit")
    async def test_an_edit_of_what_is_hidden_is_never_taken_from_the_ring(self, house: House) -> None:
        of = house.store.of[C]
        of.add("cyd")
        cyd = await house.open("cyd", cursors={C: 4})
        house.say(C, of.write("edit", target_seq=2, body={"text": "secret"}))
        await house.quiet()
        house.forward(5.1)
        await house.quiet()
        assert [(frame["seq"], frame["body"]) for frame in cyd.of("event")] == [(5, None), (5, None)]


class TestToken:
    @pytest.mark.promise("protocol.2.expiry")
    async def test_it_is_told_of_and_then_ends_the_session(self, house: House) -> None:
        wire = await house.open(ttl=100.0, cursors={C: 3})
        house.forward(39.0)
        assert wire.of("expiring") == []
        house.forward(1.1)
        assert [frame["in_s"] for frame in wire.of("expiring")] == [60]
        house.forward(69.8)
        assert (wire.closed, len(wire.of("expiring"))) == (None, 1)
        house.forward(0.2)
        assert wire.closed == (4401, "the token has expired")

    @pytest.mark.promise("protocol.2.expiry")
    async def test_one_that_has_just_expired_still_has_the_leeway(self, house: House) -> None:
        wire = await house.open(ttl=-5.0, cursors={C: 3})
        house.forward(4.0)
        assert (wire.types, wire.closed) == (["welcome", "conversation", "listed", "expiring"], None)
        house.forward(2.0)
        assert wire.closed == (4401, "the token has expired")

    @pytest.mark.promise("protocol.3.token_frame")
    async def test_a_fresh_one_goes_on(self, house: House) -> None:
        wire = await house.open(ttl=100.0)
        house.forward(41.0)
        wire.say({"t": "token", "token": "ann:200"})
        await house.quiet()
        house.forward(139.0)
        assert len(wire.of("expiring")) == 1
        house.forward(2.0)
        assert (len(wire.of("expiring")), wire.closed) == (2, None)

    @pytest.mark.promise("protocol.3.token_frame")
    @pytest.mark.parametrize("token", ["bob", "ann:50:tablet", ""])
    async def test_another_ones_ends_it(self, house: House, wire: Wire, token: str) -> None:
        wire.say({"t": "token", "token": token})
        await house.quiet()
        assert wire.closed is not None
        assert wire.closed[0] == 4401

    async def test_one_that_was_revoked_ends_it(self, house: House, wire: Wire) -> None:
        house.store.revocations.append(Row(id=1, user_id="ann", device_id=None, jti=None, before=1.0))
        wire.say({"t": "token", "token": "ann:200"})
        await house.quiet()
        assert wire.closed == (4401, "the token was revoked")


class TestReceipts:
    def _tell(self, house: House, user_id: str, read_seq: int) -> None:
        told = {"t": "receipt", "conversation_id": C, "user_id": user_id, "read_version": 0, "read_seq": read_seq}
        house.fanout.receipt(C, json.dumps(told).encode())

    def _read(self, wire: Wire) -> list[tuple[str, int]]:
        return [(frame["user_id"], frame["read_seq"]) for frame in wire.of("receipt")]

    @pytest.mark.promise("protocol.5.receipt_goes_to")
    async def test_ones_own_come_at_once_and_others_of_a_group_do_not(self, house: House, wire: Wire) -> None:
        self._tell(house, "ann", 1)
        self._tell(house, "bob", 2)
        assert self._read(wire) == [("ann", 1)]

    @pytest.mark.promise("protocol.3.watch")
    async def test_who_watches_hears_of_all_so_far_and_then_of_each_once_a_second(
        self, house: House, wire: Wire
    ) -> None:
        house.store.of[C].marks["bob"] = (2, 1, 0)
        wire.say({"t": "watch", "conversation_id": C, "on": True})
        await house.quiet()
        assert self._read(wire) == [("bob", 1)]
        for seq in (2, 3):
            self._tell(house, "bob", seq)
        self._tell(house, "cyd", 1)
        self._tell(house, "ann", 3)
        assert self._read(wire)[1:] == [("ann", 3)]
        house.forward(0.0)
        assert self._read(wire)[2:] == [("bob", 3), ("cyd", 1)]
        self._tell(house, "bob", 9)
        house.forward(0.9)
        assert len(wire.of("receipt")) == 4
        house.forward(0.2)
        assert self._read(wire)[4:] == [("bob", 9)]
        wire.say({"t": "watch", "conversation_id": C, "on": False})
        self._tell(house, "bob", 10)
        house.forward(2.0)
        assert len(wire.of("receipt")) == 5

    @pytest.mark.promise("protocol.3.watch")
    async def test_many_who_begin_to_watch_share_a_read_and_nobody_gets_one_of_before(self, house: House) -> None:
        marks = house.store.of[C].marks
        marks["bob"] = (1, 1, 0)
        users = [f"u{number}" for number in range(20)]
        for user_id in [*users, "late"]:
            house.store.of[C].add(user_id)
        wires = [await house.open(user_id) for user_id in [*users, "late"]]
        goes_on = asyncio.Event()
        house.store.lasts["marks_so_far"].append(goes_on)
        watch = {"t": "watch", "conversation_id": C, "on": True}
        wires[0].say(watch)
        await house.until(lambda: "marks_so_far" in house.store.asked, "the first read")
        marks["bob"] = (2, 2, 0)
        for wire in wires[1:-1]:
            wire.say(watch)
        house.store.of[C].remove("late")  # of which this gateway has not heard
        wires[-1].say(watch)
        await house.until(lambda: wires[-1].paused, "the last frame")
        goes_on.set()
        await house.quiet()
        assert house.store.asked.count("marks_so_far") == 2
        assert [self._read(wire) for wire in wires] == [[("bob", 1)], *[[("bob", 2)]] * 19, []]

    async def test_of_so_many_members_and_not_of_oneself(self, house: House, wire: Wire) -> None:
        of = house.store.of[C]
        of.marks["ann"] = (1, 1, 0)
        for number in range(600):
            of.marks[f"u{number:03}"] = (1, 1, 0)
        wire.say({"t": "watch", "conversation_id": C, "on": True})
        await house.quiet()
        assert [user for user, _ in self._read(wire)] == [f"u{number:03}" for number in range(500)]
        of.add("zoe")
        wire = await house.open("zoe", cursors={C: 3})
        wire.say({"t": "watch", "conversation_id": C, "on": True})
        await house.quiet()
        assert [user for user, _ in self._read(wire)] == ["ann", *(f"u{number:03}" for number in range(499))]

    async def test_without_postgres_each_is_told_and_the_next_reads_again(self, house: House, wire: Wire) -> None:
        house.store.of[C].marks["bob"] = (2, 1, 0)
        for error in (UnavailableError("away"), ZeroDivisionError("a fault")):
            house.store.fails["marks_so_far"].append(error)
            wire.say({"t": "watch", "conversation_id": C, "on": True})
            await house.quiet()
        assert [frame["code"] for frame in wire.of("error")] == ["unavailable"] * 2
        wire.say({"t": "watch", "conversation_id": C, "on": True})
        await house.quiet()
        assert (self._read(wire), wire.closed) == ([("bob", 1)], None)

    @pytest.mark.promise("I12")
    async def test_what_is_held_for_who_is_removed_meanwhile_is_dropped(self, house: House, wire: Wire) -> None:
        wire.say({"t": "watch", "conversation_id": C, "on": True})
        await house.quiet()
        self._tell(house, "bob", 2)
        house.say(C, house.store.of[C].remove("ann"))
        house.forward(1.1)
        await house.quiet()
        assert self._read(wire) == []
        wire.say({"t": "watch", "conversation_id": C, "on": True})
        assert wire.of("error")[0]["code"] == "not_member"

    async def test_who_takes_nothing_hears_the_newest_later(self, house: House, wire: Wire) -> None:
        wire.congested = True
        for seq in (1, 2, 3):
            self._tell(house, "ann", seq)
        assert self._read(wire) == []
        wire.drain()
        assert self._read(wire) == [("ann", 3)]

    async def test_for_a_conversation_that_is_loaded_again_they_wait(self, house: House, wire: Wire) -> None:
        wire.handler.session.reload(wire.handler.session.feeds[C])
        self._tell(house, "ann", 2)
        wire.handler.release()
        assert self._read(wire) == []
        wire.handler.load(C)
        await house.quiet()
        assert wire.types[-2:] == ["conversation", "receipt"]

    async def test_what_is_held_is_bounded_by_the_conversations(self, house: House, wire: Wire) -> None:
        wire.congested = True
        feed = wire.handler.session.feeds[C]
        for number in range(5_000):
            wire.handler.receipt(feed, f"u{number}", ready(b"{}"))
            wire.handler.receipt(feed, "ann", ready(b'{"t":"receipt","n":%d}' % number))
        assert wire.closed is None
        assert wire.handler.held is not None
        assert len(wire.handler.held) == 2
        wire.drain()
        assert [frame["n"] for frame in wire.of("receipt")] == [4_999]

    @pytest.mark.promise("I12")
    @pytest.mark.parametrize("member", [True, False])
    async def test_the_marks_so_far_come_after_the_conversation_frame(
        self, house: House, wire: Wire, *, member: bool
    ) -> None:
        if not member:
            house.store.of[C].remove("ann")
        feed = wire.handler.session.feeds[C]
        wire.handler.session.reload(feed)
        feed.watching = True
        before = len(wire.frames)
        wire.handler.so_far(feed, ready(b'{"t":"receipt","user_id":"bob","read_seq":1}'))
        assert len(wire.frames) == before
        wire.handler.load(C)
        await house.quiet()
        told = [frame["t"] for frame in wire.frames[before:]]
        assert told == (["conversation", "receipt"] if member else ["conversation", "event"])

    @pytest.mark.promise("protocol.6.receipts")
    async def test_who_has_a_seq(self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        async def readers(_: Any, conversation_id: str, user_id: str, /, **more: Any) -> Readers:
            asked.append((conversation_id, user_id, more))
            if len(asked) == 2:
                raise NotFoundError("no such event", field="seq")
            return Readers(conversation_id, 3, 2, 2, 1, [Reader("bob", 3, 3, 0)], "bob")

        monkeypatch.setattr(group_receipts, "readers", readers)
        ask = {"t": "receipts", "rid": "7", "conversation_id": C.upper(), "seq": 3}
        wire.say(ask, {**ask, "rid": "8", "state": "unread", "after": "bob", "limit": 5}, {**ask, "state": "seen"})
        await house.quiet()
        assert asked == [
            (C, "ann", {"seq": 3, "state": "read", "after": None, "limit": 100}),
            (C, "ann", {"seq": 3, "state": "unread", "after": "bob", "limit": 5}),
        ]
        assert wire.of("receipts") == [
            {
                "t": "receipts",
                "rid": "7",
                "conversation_id": C,
                "seq": 3,
                "members": 2,
                "delivered": 2,
                "read": 1,
                "users": [{"user_id": "bob", "delivered_seq": 3, "read_seq": 3, "read_version": 0}],
                "next": "bob",
            }
        ]
        errors = [(frame["rid"], frame["code"], frame["field"]) for frame in wire.of("error")]
        assert errors == [("8", "not_found", "seq"), ("7", "bad_request", "state")]


class TestFrames:
    @pytest.mark.promise("protocol.3.bad_frame")
    @pytest.mark.parametrize(
        ("frame", "field", "rid"),
        [
            (b"\x00", "t", None),
            ({"t": "nonsense"}, "t", None),
            ({"t": "pull", "rid": "7", "conversation_id": C}, "after", "7"),
            ({"t": "ack", "conversation_id": C, "ranges": [[3, 2]]}, "ranges.0", None),
        ],
    )
    async def test_a_bad_one_is_answered_and_the_session_goes_on(
        self, wire: Wire, frame: Any, field: str, rid: str | None
    ) -> None:
        wire.say(frame, {"t": "ping"})
        (error,) = wire.of("error")
        assert (error["code"], error["field"], error.get("rid")) == ("bad_request", field, rid)
        assert wire.types[-1] == "pong"

    async def test_a_fault_of_ours_in_one_ends_nothing(
        self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(house.sends, "submit", fails, raising=False)
        send = {"t": "send", "rid": "7", "conversation_id": C, "client_msg_id": "m", "body": {}}
        wire.say(send, {"t": "ping"})
        (error,) = wire.of("error")
        assert (error["code"], error["rid"], wire.types[-1], wire.closed) == ("internal", "7", "pong", None)

    async def test_nor_in_what_it_waits_for(self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fails(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(requests, "page", fails)
        wire.say({"t": "pull", "rid": "7", "conversation_id": C, "after": 0}, {"t": "ping"})
        await house.quiet()
        assert (wire.of("error")[0]["code"], wire.types[-1], wire.closed) == ("internal", "pong", None)

    @pytest.mark.promise("protocol.3.pull")
    async def test_they_are_answered_in_order_though_one_has_to_wait(
        self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on = asyncio.Event()

        async def page(*_: Any, **__: Any) -> None:
            await goes_on.wait()
            raise NotFoundError("none such", field="conversation_id")

        monkeypatch.setattr(requests, "page", page)
        wire.say(
            {"t": "ping", "rid": "1"},
            {"t": "pull", "rid": "2", "conversation_id": OTHER, "after": 0},
            {"t": "ping", "rid": "3"},
        )
        house.live(C)
        await asyncio.sleep(0)
        assert wire.types[-2:] == ["pong", "event"], "events do not wait"
        assert (wire.paused, wire.handler.state) == (True, "busy")
        goes_on.set()
        await house.quiet()
        assert [frame.get("rid") for frame in wire.frames[-2:]] == ["2", "3"]
        assert (wire.paused, wire.handler.state) == (False, "open")

    async def test_so_many_read_at_a_time_and_who_waits_for_long_is_told(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on = asyncio.Event()
        under_way = 0

        async def page(*_: Any, **__: Any) -> None:
            nonlocal under_way
            under_way += 1
            await goes_on.wait()
            raise NotFoundError("none such", field="conversation_id")

        monkeypatch.setattr(requests, "page", page)
        monkeypatch.setattr(asking, "_TURN_S", 0.01)
        wires = [await house.open(device_id=f"d{n}", cursors={C: 3}) for n in range(4)]
        pull, watch = {"t": "pull", "rid": "1", "conversation_id": C, "after": 0}, {"t": "watch", "conversation_id": C}
        for wire, frame in zip(wires, (pull, pull, {**watch, "on": True}, {"t": "token", "token": "ann"}), strict=True):
            wire.say(frame)
        await house.until(lambda: wires[2].of("error") and wires[3].of("error"), "the answers")
        assert (under_way, {"marks_so_far", "of_user"} & set(house.store.asked)) == (2, set())
        assert [wire.of("error")[0]["code"] for wire in wires[2:]] == ["unavailable"] * 2
        assert wires[2].of("error")[0]["retry_after_ms"] > 0
        goes_on.set()
        await house.quiet()
        assert [wire.of("error")[0]["code"] for wire in wires[:2]] == ["not_found"] * 2
        wires[3].say({"t": "token", "token": "ann"})
        await house.quiet()
        assert (len(wires[3].of("error")), wires[3].closed, "of_user" in house.store.asked) == (1, None, True)

    async def test_a_mark_that_needs_a_read_counts_as_a_pull(self, house: House, wire: Wire) -> None:
        feed = wire.handler.session.feeds[C]
        limits = Limits({"pulls": Rate(1.0, 1)}, {})
        wire.handler.rates = limits.session("ann")
        read = {"t": "read", "conversation_id": C, "seq": 2}
        wire.say(read, read)
        assert wire.of("error") == []
        feed.fresh = True
        wire.say(read, read, {**read, "version": 0})
        await house.quiet()
        assert [frame["code"] for frame in wire.of("error")] == ["rate_limited"]
        assert len(house.acks.of("mark")) == 4

    async def test_one_that_ends_while_it_waits(
        self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on = asyncio.Event()

        async def page(*_: Any, **__: Any) -> None:
            await goes_on.wait()
            raise NotFoundError("none such", field="conversation_id")

        monkeypatch.setattr(requests, "page", page)
        wire.say({"t": "pull", "rid": "2", "conversation_id": OTHER, "after": 0}, {"t": "ping"})
        await asyncio.sleep(0)
        wire.handler.gone(1006)
        goes_on.set()
        await house.quiet()
        assert "pong" not in wire.types
        assert wire.handler.state == "busy"

    @pytest.mark.promise("protocol.3.ack")
    async def test_an_ack_of_what_is_not_there_is_counted(self, house: House, wire: Wire) -> None:
        before = count(IGNORED_ACKS)
        wire.say({"t": "ack", "conversation_id": OTHER, "ranges": [[1, 5]]})
        wire.say({"t": "ack", "conversation_id": C, "ranges": [[3, 6]]})
        assert count(IGNORED_ACKS) - before == 1 + 3
        assert house.acks.of("hold")[-1:] == [(Device(C, "ann", "phone"), ((1, 3),))], "of `hello`"

    async def test_acks_of_a_group_may_wait_as_long_as_the_session(self, house: House) -> None:
        house.store.make(OTHER, "ann", "bob", kind="direct", head=3)
        wire = await house.open(cursors={C: 3, OTHER: 3})
        house.acks.later.clear()
        house.live(C)
        house.live(OTHER)
        wire.say(*[{"t": "ack", "conversation_id": name, "ranges": [[4, 4]]} for name in (C, OTHER)])
        assert [device.conversation_id for device, _ in house.acks.later] == [C]
        wire.handler.gone(1006)
        assert house.acks.of("hurry") == [(Device(C, "ann", "phone"),)]

    async def test_an_ack_brings_what_waited_for_the_window(self, house: House) -> None:
        house.settings.gateway_window = 4
        wire = await house.open(cursors={C: 3})
        house.live(C, 6)
        assert wire.seqs() == [4, 5, 6, 7]
        wire.say({"t": "ack", "conversation_id": C, "ranges": [[4, 6]]})
        await house.quiet()
        assert wire.seqs() == [4, 5, 6, 7, 8, 9]

    @pytest.mark.promise("protocol.3.read")
    async def test_marks_carry_the_version_that_was_told(self, house: House, wire: Wire) -> None:
        wire.handler.session.feeds[C].read_version = 4
        wire.say(
            {"t": "read", "conversation_id": C, "seq": 2},
            {"t": "unread", "conversation_id": C, "seq": 1, "version": 5},
            {"t": "read", "conversation_id": OTHER, "seq": 1},
        )
        device = Device(C, "ann", "phone")
        assert house.acks.of("mark") == [(Mark(device, "read", 2, 4),), (Mark(device, "unread", 1, 5),)]
        assert wire.of("error")[0]["code"] == "not_found"

    @pytest.mark.promise("protocol.3.typing")
    async def test_typing_and_presence_are_handed_on(self, house: House, wire: Wire) -> None:
        wire.say({"t": "typing", "conversation_id": C}, {"t": "presence", "users": ["bob"]})
        assert house.social.of("typed") == [(wire.handler, C)]
        assert house.social.of("watch") == [(wire.handler, ["bob"])]
        house.say(C, house.store.of[C].remove("ann"))
        wire.say({"t": "typing", "conversation_id": C}, {"t": "typing", "conversation_id": OTHER})
        assert [frame["code"] for frame in wire.of("error")] == ["not_member", "not_found"]

    async def test_rates_are_told_of_before_they_end_the_session(self, house: House, wire: Wire) -> None:
        limits = Limits({"frames": Rate(1.0, 2)}, {}, patience=Patience(3, 10.0, 0.0))
        wire.handler.rates = limits.session("ann")
        wire.say(*[{"t": "ping"}] * 3)
        assert wire.types[-3:] == ["pong", "pong", "error"]
        assert wire.of("error")[0]["code"] == "rate_limited"
        assert wire.of("error")[0]["retry_after_ms"] == 1_000
        wire.say(*[{"t": "ping"}] * 9)
        assert wire.closed == (4429, "far over the rate")
        assert len(wire.of("error")) == 3

    async def test_a_frame_over_the_rate_is_not_looked_at_twice(
        self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[str] = []

        def explain(text: str, _: object) -> str:
            looked.append(text)
            return "r"

        monkeypatch.setattr(requests.frames, "explain", explain)
        limits = Limits({"frames": Rate(1.0, 2)}, {}, patience=Patience(30, 10.0, 0.0))
        wire.handler.rates = limits.session("ann")
        for _ in range(5):
            wire.handler.message('{"rid":"r",')
        told = [(error["code"], error.get("rid")) for error in wire.of("error")]
        assert told == [("bad_request", "r")] * 2 + [("rate_limited", None)] * 3
        assert len(looked) == 2


class TestSends:
    def _send(self, rid: str, name: str = C) -> dict[str, Any]:
        return {"t": "send", "rid": rid, "conversation_id": name, "client_msg_id": f"m{rid}", "body": {}}

    @pytest.mark.promise("protocol.3.send")
    async def test_they_are_answered_as_ingest_does(self, house: House, wire: Wire) -> None:
        wire.say(self._send("1"), self._send("2"))
        (user, device, _, first), (*_, second) = house.sends.of("submit")
        assert (user, device) == (wire.handler.user_id, wire.handler.device_id)
        second(UnavailableError("away", retry_after_ms=5))
        first(Committed("e", 4, "now", duplicate=False))
        assert [(frame["t"], frame["rid"]) for frame in wire.frames[-2:]] == [("error", "2"), ("sent", "1")]
        assert wire.of("sent")[0] == {
            "t": "sent",
            "rid": "1",
            "conversation_id": C,
            "client_msg_id": "m1",
            "event_id": "e",
            "seq": 4,
            "created_at": "now",
            "duplicate": False,
        }
        assert house.fanout.rooms[C].ackable == 4, "it may be acked before Kafka brings it"

    async def test_too_many_stop_the_reading_until_one_is_answered(self, house: House) -> None:
        house.settings.gateway_session_sends = 2
        wire = await house.open()
        wire.say(*[self._send(str(number)) for number in range(4)])
        assert (len(house.sends.of("submit")), wire.paused) == (2, True)
        house.sends.of("submit")[0][-1](Committed("e", 4, "now", duplicate=False))
        await house.quiet()
        assert (len(house.sends.of("submit")), wire.paused) == (3, True)

    async def test_too_much_stops_the_reading_until_enough_is_answered(self, house: House) -> None:
        house.settings.gateway_session_send_bytes = 100
        wire = await house.open()
        wire.say(*[{**self._send(str(number)), "body": {"x": "y" * 42}} for number in range(4)])
        submitted = house.sends.of("submit")
        assert (len(submitted), wire.paused) == (2, True)
        submitted[0][-1](UnavailableError("away"))
        await house.quiet()
        assert (len(house.sends.of("submit")), wire.paused) == (3, True)
        for one in house.sends.of("submit")[1:]:
            one[-1](UnavailableError("away"))
        await house.quiet()
        house.sends.of("submit")[3][-1](UnavailableError("away"))
        assert (len(wire.of("error")), wire.paused, wire.handler._send_bytes) == (4, False, 0)

    async def test_what_waits_holds_no_more_than_its_body(self, house: House, wire: Wire) -> None:
        tracemalloc.start()
        try:
            wire.say(*[{**self._send(str(number)), "more": "x" * 50_000} for number in range(20)])
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(house.sends.of("submit")) == 20
        assert held < 10 * 50_000

    async def test_an_answer_after_the_end_is_dropped(self, house: House, wire: Wire) -> None:
        wire.say(self._send("1"))
        wire.handler.gone(1006)
        house.sends.of("submit")[0][-1](Committed("e", 4, "now", duplicate=False))
        assert wire.of("sent") == []

    @pytest.mark.promise("protocol.3.settings")
    async def test_own_settings_are_answered_as_ingest_tells_them(
        self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[Any, ...]] = []

        async def set_settings(user_id: str, device_id: str, frame: frames.Settings) -> OwnSettings:
            asked.append((user_id, device_id, frame.muted, frame.muted_until, frame.archived))
            if frame.archived:
                raise NotFoundError("no such conversation", field="conversation_id")
            return OwnSettings(OTHER, True, None, False)

        monkeypatch.setattr(house.sends, "set_settings", set_settings, raising=False)
        wire.say({"t": "settings", "rid": "1", "conversation_id": OTHER, "muted": True})
        wire.say({"t": "settings", "rid": "2", "conversation_id": OTHER, "archived": True})
        await house.until(lambda: len(wire.of("error")) == 1, "both answers")
        assert asked == [("ann", "phone", True, None, None), ("ann", "phone", None, None, True)]
        told = {"t": "settings", "rid": "1", "conversation_id": OTHER}
        assert wire.of("settings") == [{**told, "muted": True, "muted_until": None, "archived": False}]
        assert (wire.of("error")[0]["rid"], wire.of("error")[0]["code"]) == ("2", "not_found")

    @pytest.mark.promise("protocol.3.create")
    async def test_who_creates_follows_at_once(self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
        async def create(*_: Any) -> Created:
            house.store.make(OTHER, "ann")
            return Created(OTHER, existing=False)

        monkeypatch.setattr(house.sends, "create", create, raising=False)
        wire.say({"t": "create", "rid": "1", "kind": "group", "members": ["bob"]})
        await house.quiet()
        assert wire.of("created") == [{"t": "created", "rid": "1", "conversation_id": OTHER, "existing": False}]
        assert wire.types[-2:] == ["conversation", "event"]


class TestSlowness:
    async def test_who_does_not_read_what_it_asked_for_gets_no_more_of_it(
        self, house: House, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("services.gateway.connection._DRAINED_S", 0.01)
        wire.congested = True
        wire.say({"t": "pull", "rid": "1", "conversation_id": C, "after": 0})
        await house.until(lambda: wire.closed, "the end")
        assert wire.closed == (4408, "too slow")

    async def test_answers_beyond_all_measure_end_it(self, wire: Wire) -> None:
        wire.congested, wire.waiting_bytes = True, 3 * 1024 * 1024
        wire.say({"t": "ping"})
        assert wire.closed == (4408, "too slow")


class TestEnd:
    async def test_the_first_reason_counts_and_nothing_is_left(self, house: House, wire: Wire) -> None:
        wire.handler.end(Close(4409, "replaced"))
        wire.handler.end(Close(4500, "again"))
        wire.handler.gone(1006)
        assert wire.closed == (4409, "replaced")
        assert (house.sessions, house.fanout.users, house.fanout.rooms[C].feeds) == (set(), {}, {})
        assert house.social.of("closed") == [(wire.handler,)]

    async def test_one_that_ended_does_nothing_any_more(self, house: House, wire: Wire) -> None:
        house.live(C)
        wire.handler.gone(1006)
        written = len(wire.frames)
        wire.handler.load(C)
        wire.handler.wake()
        wire.handler.message('{"t":"ping"}')
        house.live(C)
        house.forward(1_000.0)
        await house.quiet()
        assert (len(wire.frames), wire.pings, house.loader._wanted) == (written, 0, {})
        assert house.heap.next == float("inf")

    async def test_one_that_never_said_hello(self, house: House) -> None:
        wire = house.wire()
        wire.handler.writable()
        wire.handler.gone(1006)
        assert (house.sessions, house.social.calls) == (set(), [])

    @pytest.mark.promise("I10")
    async def test_what_was_acked_is_told_again_now_and_then(self, house: House, wire: Wire) -> None:
        for name in (OTHER, QUIET):
            house.store.make(name, "ann")
            house.say(name, 1)
        await house.quiet()
        house.live(C)
        wire.say(*[{"t": "ack", "conversation_id": name, "ranges": [[1, 4]]} for name in (C, OTHER)])
        told = len(house.acks.of("hold"))
        house.forward(299.0)
        assert len(house.acks.of("hold")) == told
        house.forward(2.0)
        again = {device.conversation_id: list(ranges) for device, ranges in house.acks.of("hold")[told:]}
        assert again == {C: [(1, 4)], OTHER: [(1, 1)]}

    @pytest.mark.promise("I10")
    @pytest.mark.parametrize(
        ("answer", "again"),
        [
            (None, [("unread", 1, 1)]),
            ({"user_id": "bob", "read_version": 2, "read_seq": 3}, [("unread", 1, 1)]),
            ({"user_id": "ann", "read_version": 0, "read_seq": 3}, [("unread", 1, 1)]),
            ({"user_id": "ann", "read_version": 0, "read_seq": 3, "device_id": "tablet"}, [("unread", 1, 1)]),
            ({"user_id": "ann", "read_version": 1, "read_seq": 1}, []),
            ({"user_id": "ann", "read_version": 1, "read_seq": 2}, []),
            ({"user_id": "ann", "read_version": 0, "read_seq": 0, "device_id": "phone"}, []),
        ],
    )
    async def test_a_mark_that_nobody_answers_is_told_again(
        self, house: House, wire: Wire, answer: dict[str, Any] | None, again: list[tuple[str, int, int]]
    ) -> None:
        """Only a receipt with this mark or a larger one answers it, or its refusal."""
        house.forward(200.0)
        for frame in ({"t": "read", "seq": 3}, {"t": "unread", "seq": 1, "version": 1}, {"t": "read", "seq": 2}):
            wire.say({"conversation_id": C, **frame})
        if answer is not None:
            house.fanout.receipt(C, json.dumps({"t": "receipt", "conversation_id": C, **answer}).encode())
        house.forward(101.0)
        assert house.acks.of("mark_again") == [], "an answer has at least as long as it takes to ask again"
        house.forward(300.0)
        assert [(mark.kind, mark.version, mark.seq) for (mark,) in house.acks.of("mark_again")] == again

    @pytest.mark.promise("I10")
    async def test_a_mark_that_a_read_finds_is_answered(self, house: House, wire: Wire) -> None:
        wire.say({"t": "read", "conversation_id": C, "seq": 3})
        house.store.of[C].marks["ann"] = (3, 3, 0)
        wire.handler.load(C)
        await house.quiet()
        house.forward(601.0)
        assert house.acks.of("mark_again") == []
