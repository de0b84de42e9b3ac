"""What a `conversation` frame says, and in which order frames come."""

import json
from dataclasses import replace

import pytest

from services.gateway.listing import Listed, Marks, newest_first
from shared.ranges import OPEN, RangeSet

LISTED = Listed(
    conversation_id="c",
    kind="group",
    title="T",
    keeps_history=False,
    as_of=9,
    role="member",
    visible=RangeSet([(3, 5), (8, OPEN)]),
    head=9,
    record=4,
    mine=Marks("ann", 4, 5, 2),
    unread=1,
    updated_at="2026-01-02T03:04:05.000006Z",
    peer=None,
)


@pytest.mark.promise("protocol.3.conversation_frame")
def test_the_frame() -> None:
    assert json.loads(LISTED.frame(4)) == {
        "t": "conversation",
        "conversation_id": "c",
        "kind": "group",
        "title": "T",
        "role": "member",
        "head": 9,
        "visible": [[3, 5], [8, None]],
        "cursor": 4,
        "delivered_seq": 4,
        "read_seq": 5,
        "read_version": 2,
        "unread": 1,
        "updated_at": "2026-01-02T03:04:05.000006Z",
    }


def test_members_and_former_ones() -> None:
    assert LISTED.member
    assert LISTED.first_cursor == 2
    left = replace(LISTED, visible=RangeSet([(3, 5)]))
    assert not left.member
    assert json.loads(left.frame(5))["visible"] == [[3, 5]]


@pytest.mark.promise("protocol.3.peer_receipt")
def test_a_peers_receipt() -> None:
    assert LISTED.peer_frame() is None
    frame = replace(LISTED, peer=Marks("bob", 1, 2, 3)).peer_frame()
    assert frame is not None
    assert json.loads(frame) == {
        "t": "receipt",
        "conversation_id": "c",
        "user_id": "bob",
        "delivered_seq": 1,
        "read_seq": 2,
        "read_version": 3,
    }


@pytest.mark.promise("protocol.3.listing_order")
def test_unread_first_and_newest_first() -> None:
    rows = [
        replace(LISTED, conversation_id=name, unread=unread, updated_at=at)
        for name, unread, at in (("a", 0, "2026-09"), ("b", 2, "2026-01"), ("c", 0, None), ("d", 1, "2026-02"))
    ]
    rows.sort(key=newest_first, reverse=True)
    assert [row.conversation_id for row in rows] == ["d", "b", "a", "c"]
