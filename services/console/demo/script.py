"""The story: who is there, what they say to whom from which device, and what dies when. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

NAMES = ("ada", "ben", "cleo", "dan", "eva", "finn")
DEVICES = ("phone", "laptop")
PAIRS = (("ada", "ben"), ("cleo", "dan"), ("eva", "finn"))
"""The direct chats; everybody is in the one group."""

AWAY = ("finn", "laptop")
"""The device that is offline for the half of the messages between these two shares."""
LEAVES, RETURNS = 0.25, 0.75

KILLS = ((0.1, "relay"), (0.3, "gateway"), (0.5, "ingest"), (0.7, "receipts"), (0.85, "relay"))
"""After which share of the messages which part gets SIGKILL."""

_BURST = 60
_BURST_SHARE = 0.05

_GROUP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Cast:
    """User ids by name. They carry the run's mark, so that a second run in the same store begins with nothing."""

    run: str

    def user(self, name: str) -> str:
        """The user id of somebody."""
        return f"{name}-{self.run}"

    def device(self, name: str, kind: str) -> str:
        """The device id of one of somebody's devices."""
        return f"{name}-{kind}"


@dataclass(frozen=True, slots=True)
class Line:
    """One message: which chat (an index: 0 is the group, then `PAIRS`), from whom, from which device."""

    chat: int
    name: str
    device: str
    text: str


def burst(count: int) -> int:
    """How many of ``count`` messages are handed over without a pause for a kill, so that it finds rows in flight."""
    return max(2, min(_BURST, round(_BURST_SHARE * count)))


def members(chat: int) -> Sequence[str]:
    """Who is in a chat."""
    return NAMES if chat == 0 else PAIRS[chat - 1]


def lines(texts: Sequence[str], count: int, chance: random.Random) -> Iterator[Line]:
    """That many messages; when the texts are used up they begin again. The device that is away says nothing then."""
    for at, text in enumerate(itertools.islice(itertools.cycle(texts), count)):
        chat = 0 if chance.random() < _GROUP_SHARE else chance.randrange(len(PAIRS)) + 1
        name = chance.choice(members(chat))
        device = chance.choice(DEVICES)
        # A little before it leaves, too: what it has said is settled by then.
        if (name, device) == AWAY and LEAVES / 2 <= at / count < RETURNS:
            device = next(other for other in DEVICES if other != device)
        yield Line(chat, name, device, text)
