"""The conversations and messages that both sides are given."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from bench.reference.seed_outbox import Message

LINES = (
    "ok",
    "on my way, ten minutes",
    "Did the parcel arrive? The tracking page has said “out for delivery” since this morning.",
    "今天晚上一起吃饭吗?七点在老地方见 🍜",
    "Can you check the numbers in the second table once more? The third row adds up to 104 % and I don't see why.",
    "👍",
    "Der Zug hat 20 Minuten Verspätung, fangt ruhig ohne mich an. Ich bringe den Kuchen mit.",
    "The meeting moved to room 4.12. Slides are in the shared folder; please add yours by noon, then I send it all.",
    "did you see this? unbelievable",
    "Gracias, lo miro esta tarde y te digo.",
)
"""Short and long, in several scripts; 1 to 110 characters."""

_BODIES = [msgspec.Raw(msgspec.json.encode({"text": line})) for line in LINES]


@dataclass(frozen=True, slots=True)
class Chat:
    """A direct chat of two users."""

    conversation_id: str
    users: tuple[str, str]


class Messages:
    """An endless supply of messages: the chats in turn, either user at random."""

    def __init__(self, chats: list[Chat], seed: int = 1) -> None:
        self._chats = itertools.cycle(chats)
        self._chance = random.Random(seed)

    def next(self) -> Message:
        """The next message, with a client id of its own."""
        chat = next(self._chats)
        sender = chat.users[self._chance.random() < 0.5]
        return Message(chat.conversation_id, sender, str(uuid4()), self._chance.choice(_BODIES))


def pairs(users: int, chats: int, run: str) -> list[tuple[str, str]]:
    """That many different pairs among that many users, whose names begin with ``run``. The first ones name each user.

    Raises `ValueError` if there are not so many pairs.
    """
    names = [f"{run}-{number}" for number in range(users)]
    found = [
        (names[at], names[(at + step) % users])
        for step in range(1, users // 2 + 1)
        for at in range(users if step * 2 < users else users // 2)
    ]
    if len(found) < chats:
        raise ValueError(f"{users} users have {len(found)} pairs, not {chats}")
    return found[:chats]
