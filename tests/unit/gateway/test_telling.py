"""A record of a user's own settings has that user's sessions read the conversation again; nobody else hears of it."""

import json

import pytest

from services.gateway.fanout import Fanout
from tests.followers import Follower, follow


def settings(fanout: Fanout, user_id: str, conversation_id: str = "c") -> None:
    record = {"t": "receipt", "conversation_id": conversation_id, "user_id": user_id, "delivered_seq": 0, "read_seq": 0}
    value = {**record, "read_version": 0, "kind": "settings", "cause": "set"}
    fanout.receipt(conversation_id, json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.promise("protocol.3.settings", "I12")
@pytest.mark.parametrize("direct", [True, False])
def test_only_the_users_own_sessions_load_it_again(direct: bool) -> None:
    fanout = Fanout()
    ann, tablet, bob = Follower("ann"), Follower("ann", "tablet"), Follower("bob")
    for one in (ann, tablet, bob):
        follow(fanout, one, direct=direct)
    settings(fanout, "ann")
    assert (ann.loads, tablet.loads, bob.loads) == (["c"], ["c"], [])
    assert not any(one.receipts or one.written for one in (ann, tablet, bob))


def test_one_that_sleeps_is_told_too_and_only_once() -> None:
    fanout = Fanout()
    ann, bob = Follower("ann"), Follower("bob")
    for one in (ann, bob):
        fanout.register(one)
        fanout.enter(one, "c").asleep = True
    settings(fanout, "ann")
    feed = ann.session.feeds["c"]
    assert (ann.loads, bob.loads, feed.asleep) == (["c"], [], False)
    feed.wake()
    assert ann.loads == ["c"]


def test_a_conversation_without_sessions_here() -> None:
    fanout = Fanout()
    ann = Follower("ann")
    follow(fanout, ann, "other")
    settings(fanout, "ann")
    assert ann.loads == []
