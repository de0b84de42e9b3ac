"""What `hello` says of many conversations."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from waybill_client._frames import encode
from waybill_client.greeting import MAX_CURSORS, MAX_IDS
from waybill_client.session import Session, Settings
from waybill_client.store import Saved

from .frames_of_server import CHAT, conversation, event, welcome

LISTED = {"t": "listed", "count": 1, "since": "s1"}


def session(**settings: Any) -> Session:
    return Session("d", Settings(**settings), random=lambda: 1.0)


def chat(number: int) -> str:
    return str(UUID(int=number))


def listed(count: int, *, lacking: int = 0) -> Session:
    """A device with so many conversations; of the first ones it lacks what it was told."""
    one = session(sync="live")
    one.hello("t")
    one.receive(welcome(), 0.0)
    for number in range(count):
        one.receive(conversation(7, 7, chat=chat(number), updated_at=f"2026-01-01T00:00:00.{number:06}Z"), 0.0)
        if number < lacking:
            one.receive(conversation(8, 7, chat=chat(number)), 0.0)
    one.receive(LISTED, 0.0)
    return one


def test_since_is_said_with_the_cursors_once_a_listing_was_complete() -> None:
    one = session()
    assert "since" not in one.hello("t")
    one.receive(welcome(), 0.0)
    one.receive(conversation(2, 0), 0.0)
    assert "since" not in one.hello("t")
    one.receive(welcome(), 0.0)
    one.receive(conversation(2, 0), 0.0)
    one.receive(LISTED, 0.0)
    hello = one.hello("t")
    assert (hello["cursors"], hello["since"]) == ({CHAT: 0}, "s1")
    one.receive(welcome(), 0.0)
    one.receive({**LISTED, "since": "s2"}, 0.0)
    assert one.hello("t")["since"] == "s2"


def test_an_emptied_store_says_so() -> None:
    hello = session().hello("t")
    assert hello["cursors"] == {}
    assert "since" not in hello


def test_a_listing_with_a_frame_that_was_not_understood_gives_no_since() -> None:
    one = session()
    one.hello("t")
    one.receive(welcome(), 0.0)
    one.receive(conversation(2, 0) | {"head": "2"}, 0.0)
    one.receive(LISTED, 0.0)
    assert "since" not in one.hello("t")
    one.receive(welcome(), 0.0)
    one.receive({"t": "event"}, 0.0)
    one.receive(LISTED, 0.0)
    assert one.hello("t")["since"] == "s1"


def test_a_server_without_since_is_asked_without() -> None:
    one = session()
    one.hello("t")
    one.receive(welcome(), 0.0)
    one.receive({"t": "listed", "count": 0}, 0.0)
    assert "since" not in one.hello("t")


def test_since_vouches_for_what_does_not_fit() -> None:
    one = listed(MAX_CURSORS + 50, lacking=30)
    hello = one.hello("t")
    assert hello["since"] == "s1"
    assert len(hello["cursors"]) == MAX_CURSORS
    assert all(chat(number) in hello["cursors"] for number in range(30)), "what it lacks has to be named"
    left_out = [number for number in range(MAX_CURSORS + 50) if chat(number) not in hello["cursors"]]
    assert left_out == list(range(30, 80)), "of the others the oldest are not named"


def test_since_that_would_vouch_wrongly_is_not_said() -> None:
    one = listed(MAX_CURSORS + 50, lacking=MAX_CURSORS + 1)
    hello = one.hello("t")
    assert "since" not in hello
    assert len(hello["cursors"]) == MAX_CURSORS


def test_the_newest_are_named_with_their_event_ids_and_all_fits_into_hello() -> None:
    one = session()
    saved = [Saved(chat(number), last_pulled_seq=2**40, event_id=chat(number)) for number in range(MAX_CURSORS)]
    one.restore(saved, [], 0.0)
    one.receive(event(2**40 + 1, chat=chat(7), event_id=chat(8)), 0.0)
    one.stored(chat(7), [2**40 + 1], 0.0)
    hello = one.hello("t")
    assert hello["cursors"][chat(7)] == [2**40 + 1, chat(8)]
    assert len([cursor for cursor in hello["cursors"].values() if isinstance(cursor, list)]) == MAX_IDS
    assert len(encode(hello)) < 2**20
    assert json.loads(encode(hello)) == hello
