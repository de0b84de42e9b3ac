"""From a conversation to the sessions that follow it."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.fanout import CONVERSATION, EDIT, MEMBER, Fanout
from services.gateway.session import Feed, Session
from shared.ranges import OPEN, RangeSet

MESSAGE = "waybill.event.message"
ALL = RangeSet([(1, OPEN)])


class Follower:
    """A session's connection that keeps what it is told."""

    def __init__(self, user_id: str, device_id: str = "phone") -> None:
        self.user_id, self.device_id = user_id, device_id
        self.session = Session(window=100, resend_s=5, resends=5, page=100)
        self.congested = False
        self.written: list[Any] = []
        self.woken = 0
        self.loads: list[str] = []
        self.held: dict[tuple[str, str], bytes] = {}

    def write(self, frame: bytes) -> None:
        self.written.append(json.loads(frame))

    def wake(self) -> None:
        self.woken += 1

    def load(self, conversation_id: str) -> None:
        self.loads.append(conversation_id)

    def hold_receipt(self, conversation_id: str, user_id: str, frame: bytes) -> None:
        self.held[conversation_id, user_id] = frame

    def seqs(self) -> list[int]:
        return [frame["seq"] for frame in self.written]


def live(fanout: Fanout, follower: Follower, name: str = "c", *, at: int = 1, direct: bool = False) -> Feed:
    fanout.register(follower)
    feed = fanout.enter(follower, name)
    feed.known(at, ALL, "member")
    feed.position, feed.direct = at, direct
    follower.session.loaded(feed, fanout.rooms[name].know(at))
    return feed


def say(fanout: Fanout, seq: int, type_: str = MESSAGE, name: str = "c", **more: Any) -> None:
    frame = {"t": "event", "seq": seq, "sender_id": "bob", "body": {}, **more}
    fanout.event(name, seq, type_, json.dumps(frame).encode(), 0.0)


def receipt(fanout: Fanout, user_id: str, name: str = "c", **more: Any) -> None:
    value = {"t": "receipt", "conversation_id": name, "user_id": user_id, "read_version": 0, "read_seq": 1, **more}
    fanout.receipt(name, json.dumps(value).encode())


@pytest.fixture
def fanout() -> Fanout:
    return Fanout()


class TestRooms:
    def test_only_conversations_with_sessions_and_membership_are_wanted(self, fanout: Fanout) -> None:
        live(fanout, Follower("ann"))
        assert fanout.wants("c", MESSAGE)
        assert not fanout.wants("d", MESSAGE)
        assert fanout.wants("d", MEMBER)
        assert fanout.wants("d", CONVERSATION)

    def test_nothing_is_left_of_a_session_that_ended(self, fanout: Fanout) -> None:
        ann, other = Follower("ann"), Follower("ann", "tablet")
        live(fanout, ann)
        live(fanout, ann, "d")
        live(fanout, other)
        fanout.unregister(ann)
        assert list(fanout.rooms) == ["c"]
        assert fanout.users == {"ann": {other}}
        fanout.unregister(other)
        assert (fanout.rooms, fanout.users) == ({}, {})
        fanout.unregister(other)

    def test_leaving_twice_is_fine(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        live(fanout, ann)
        fanout.leave(ann, "c")
        fanout.leave(ann, "c")
        assert (fanout.rooms, ann.session.feeds) == ({}, {})

    def test_one_frame_goes_to_all(self, fanout: Fanout) -> None:
        followers = [Follower("ann"), Follower("ann", "tablet"), Follower("bob")]
        for follower in followers:
            live(fanout, follower)
        say(fanout, 2)
        say(fanout, 2)
        assert [follower.seqs() for follower in followers] == [[2], [2], [2]]

    def test_an_event_for_nobody(self, fanout: Fanout) -> None:
        say(fanout, 2, MEMBER, sender_id="x", body={"action": "leave"})
        assert fanout.rooms == {}

    def test_a_congested_session_reads_later(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = live(fanout, ann)
        ann.congested = True
        say(fanout, 2)
        assert (ann.written, ann.woken) == ([], 1)
        read = ann.session.next_read()
        assert read is not None
        assert read.feed is feed

    @pytest.mark.promise("I6")
    def test_while_it_loads_only_the_known_head_rises(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        fanout.register(ann)
        feed = fanout.enter(ann, "c")
        say(fanout, 7)
        assert (ann.written, fanout.rooms["c"].head, feed.position) == ([], 7, 0)

    @pytest.mark.promise("I6")
    def test_a_head_that_was_never_there_is_forgotten(self, fanout: Fanout) -> None:
        live(fanout, Follower("ann"))
        room = fanout.rooms["c"]
        assert room.know(1000) == 1000
        assert (room.seen(1000, 1), room.head) == (1, 1)
        assert (room.seen(1, 5), room.head) == (5, 5)
        room.know(9)  # came while the read was under way
        assert (room.seen(5, 4), room.head) == (9, 9)

    @pytest.mark.promise("protocol.3.ack")
    def test_what_the_user_was_told_of_may_be_acked_before_kafka_brings_it(self, fanout: Fanout) -> None:
        ann, tablet = Follower("ann"), Follower("ann", "tablet")
        live(fanout, ann)
        fanout.register(tablet)
        fanout.committed("ann", "c", 3)
        fanout.committed("ann", "c", 2)
        fanout.committed("bob", "gone", 2)
        room = fanout.rooms["c"]
        assert (room.head, room.ackable, list(fanout.rooms)) == (1, 3, ["c"])
        assert (ann.loads, tablet.loads) == ([], ["c"])

    def test_heads_from_the_store_wake_who_is_below(self, fanout: Fanout) -> None:
        below, at, loads = Follower("ann"), Follower("bob"), Follower("cyd")
        live(fanout, below, at=3)
        live(fanout, at, at=5)
        fanout.register(loads)
        fanout.enter(loads, "c")
        fanout.heads({"c": 5, "gone": 9})
        assert (below.session.next_read() is not None, at.session.next_read()) == (True, None)
        assert loads.session.next_read() is None
        assert fanout.rooms["c"].head == 5


class TestMembers:
    @pytest.mark.promise("I6")
    def test_created_conversations_bring_in_all_local_sessions(self, fanout: Fanout) -> None:
        ann, bob, cyd = Follower("ann"), Follower("bob"), Follower("cyd")
        for one in (ann, bob, cyd):
            fanout.register(one)
        say(fanout, 1, CONVERSATION, body={"action": "create", "members": ["bob", "ann"]}, sender_id="bob")
        assert (ann.loads, bob.loads, cyd.loads) == (["c"], ["c"], [])
        assert ann.session.feeds["c"].loading
        assert fanout.rooms["c"].head == 1

    def test_added_users_are_brought_in_once(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        fanout.register(ann)
        for _ in range(2):
            say(fanout, 5, MEMBER, body={"action": "add", "user_id": "ann"})
        assert ann.loads == ["c"]

    def test_a_removed_user_gets_the_removal_and_its_frame(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann"), Follower("bob")
        live(fanout, ann)
        live(fanout, bob)
        say(fanout, 2, MEMBER, body={"action": "remove", "user_id": "ann"})
        say(fanout, 3)
        assert (ann.seqs(), ann.loads) == ([2], ["c"])
        assert (bob.seqs(), bob.loads) == ([2, 3], [])

    def test_leaving_is_about_the_sender(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = live(fanout, ann)
        say(fanout, 2, MEMBER, sender_id="ann", body={"action": "leave"})
        assert list(feed.visible) == [(1, 2)]

    @pytest.mark.promise("I6", "protocol.3.conversation_frame")
    def test_added_again_the_frame_comes_first(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = live(fanout, ann)
        say(fanout, 2, MEMBER, body={"action": "remove", "user_id": "ann"})
        say(fanout, 3)
        say(fanout, 4, MEMBER, body={"action": "add", "user_id": "ann", "role": "admin"})
        assert ann.seqs() == [2]
        assert (feed.loading, feed.role, list(feed.visible), feed.position) == (True, "admin", [(1, 2), (4, OPEN)], 3)

    def test_a_new_role_and_title_are_told_to_members_only(self, fanout: Fanout) -> None:
        ann, gone = Follower("ann"), Follower("bob")
        feed = live(fanout, ann)
        live(fanout, gone).known(1, RangeSet([(1, 1)]), "member")
        say(fanout, 2, MEMBER, body={"action": "role", "user_id": "ann", "role": "admin"})
        assert (feed.role, ann.loads) == ("admin", ["c"])
        say(fanout, 3, CONVERSATION, body={"title": "x"})
        assert (ann.loads, gone.loads) == (["c", "c"], [])

    def test_late_membership_changes_nothing(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        feed = live(fanout, ann, at=9)
        say(fanout, 4, MEMBER, body={"action": "remove", "user_id": "ann"})
        assert (list(feed.visible), ann.loads) == ([(1, OPEN)], [])

    @pytest.mark.parametrize(
        "body", [{"action": 5}, {"action": "add", "user_id": 7}, {"action": "add", "members": {}}, {"big": 1e308}]
    )
    def test_strange_bodies_are_pushed(self, fanout: Fanout, body: dict[str, Any]) -> None:
        ann = Follower("ann")
        live(fanout, ann)
        say(fanout, 2, MEMBER, body=body)
        assert ann.seqs() == [2]

    def test_what_cannot_be_read_is_said(self, fanout: Fanout) -> None:
        live(fanout, Follower("ann"))
        for type_ in (MEMBER, CONVERSATION, EDIT):
            with pytest.raises(msgspec.MsgspecError):
                fanout.event("c", 2, type_, b'{"t":"event"}', 0.0)


class TestEdits:
    @pytest.mark.promise("protocol.3.hidden_edit", "I12")
    def test_of_what_is_hidden_it_is_read(self, fanout: Fanout) -> None:
        sees, hidden, gone = Follower("ann"), Follower("bob"), Follower("cyd")
        live(fanout, sees, at=5)
        live(fanout, hidden, at=5).known(5, RangeSet([(4, OPEN)]), "member")
        live(fanout, gone, at=5).known(5, RangeSet([(1, 4)]), "member")
        say(fanout, 6, EDIT, target_seq=3, body={"text": "secret"})
        assert (sees.seqs(), hidden.seqs(), gone.seqs()) == ([6], [], [])
        assert hidden.session.next_read() is not None
        assert gone.session.next_read() is None
        say(fanout, 6, EDIT, target_seq=3)
        assert sees.session.next_read() is None


class TestReceipts:
    @pytest.mark.promise("protocol.5.receipt_goes_to")
    def test_of_a_direct_chat_go_to_both(self, fanout: Fanout) -> None:
        ann, tablet, bob = Follower("ann"), Follower("ann", "tablet"), Follower("bob")
        for one in (ann, tablet, bob):
            live(fanout, one, direct=True)
        receipt(fanout, "ann", read_version=3)
        assert [len(one.written) for one in (ann, tablet, bob)] == [1, 1, 1]
        assert ann.session.feeds["c"].read_version == 3
        assert bob.session.feeds["c"].read_version == 0

    @pytest.mark.promise("protocol.5.receipt_goes_to")
    def test_of_a_group_go_to_their_user(self, fanout: Fanout) -> None:
        ann, bob = Follower("ann"), Follower("bob")
        for one in (bob, ann):
            live(fanout, one)
        receipt(fanout, "ann")
        assert (len(ann.written), bob.written) == (1, [])

    @pytest.mark.promise("protocol.5.read_refused")
    def test_a_refused_mark_is_answered_to_its_device(self, fanout: Fanout) -> None:
        ann, tablet, bob = Follower("ann"), Follower("ann", "tablet"), Follower("bob")
        for one in (ann, tablet, bob):
            live(fanout, one, direct=True)
        receipt(fanout, "ann", device_id="tablet", read_version=2)
        assert [len(one.written) for one in (ann, tablet, bob)] == [0, 1, 0]

    def test_wait_for_the_conversations_frame(self, fanout: Fanout) -> None:
        ann = Follower("ann")
        fanout.register(ann)
        fanout.enter(ann, "c")
        receipt(fanout, "ann", read_seq=1)
        receipt(fanout, "ann", read_seq=2)
        receipt(fanout, "bob")
        assert ann.written == []
        assert {key: json.loads(value)["read_seq"] for key, value in ann.held.items()} == {
            ("c", "ann"): 2,
            ("c", "bob"): 1,
        }

    def test_of_nobody_here_are_dropped(self, fanout: Fanout) -> None:
        receipt(fanout, "ann")
