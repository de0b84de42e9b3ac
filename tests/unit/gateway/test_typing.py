"""Who is told that somebody is typing."""

from collections.abc import ItemsView
from dataclasses import dataclass

import pytest

from services.gateway.link import Link
from services.gateway.typing import Typing
from tests.told import Told


@dataclass
class Feed:
    member: bool = True
    loading: bool = False


class Here:
    """A gateway without Redis, and a clock to turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self.feeds: dict[str, dict[Told, Feed]] = {}
        link = Link("redis://127.0.0.1:1/0", prefix="test")
        self.typing = Typing(link, self._feeds_of, prefix="test", most=3, clock=lambda: self.now)

    def _feeds_of(self, conversation_id: str) -> ItemsView[Told, Feed]:
        return self.feeds.get(conversation_id, {}).items()

    def enter(self, conversation_id: str, user_id: str, **feed: bool) -> Told:
        made = Told(user_id)
        self.feeds.setdefault(conversation_id, {})[made] = Feed(**feed)
        return made


@pytest.fixture
async def here() -> Here:
    return Here()


FRAME = {"t": "typing", "conversation_id": "c", "user_id": "ann", "for_ms": 5000}


async def test_the_others_are_told_and_not_the_typer(here: Here) -> None:
    phone, laptop, bob = here.enter("c", "ann"), here.enter("c", "ann"), here.enter("c", "bob")
    here.typing.typed("phone", "ann", "c")
    assert [phone.frames, laptop.frames, bob.frames] == [[], [], [FRAME]]
    here.typing.typed("phone", "ann", "unknown")


@pytest.mark.parametrize("feed", [{"loading": True}, {"member": False}])
async def test_who_does_not_follow_it_now_is_not_told(here: Here, feed: dict[str, bool]) -> None:
    bob = here.enter("c", "bob", **feed)
    here.typing.typed("phone", "ann", "c")
    assert bob.frames == []


async def test_who_is_slow_is_not_told(here: Here) -> None:
    bob = here.enter("c", "bob")
    bob.congested = True
    here.typing.typed("phone", "ann", "c")
    assert bob.frames == []


async def test_at_most_once_in_two_seconds_per_session_and_conversation(here: Here) -> None:
    bob = here.enter("c", "bob")
    here.enter("d", "bob")
    for now in (100.0, 100.5, 101.99, 102.0, 103.0, 104.1):
        here.now = now
        here.typing.typed("phone", "ann", "c")
    assert len(bob.frames) == 3
    here.typing.typed("laptop", "ann", "c")
    here.typing.typed("phone", "ann", "d")
    assert len(bob.frames) == 4
    here.now = 200.0
    here.typing.typed("phone", "ann", "d")
    assert len(here.typing._last) == 1, "what is over is forgotten"


async def test_in_a_crowd_nobody_is_told(here: Here) -> None:
    crowd = [here.enter("c", f"user{n}") for n in range(4)]
    here.typing.typed("phone", "ann", "c")
    assert not any(one.frames for one in crowd)
