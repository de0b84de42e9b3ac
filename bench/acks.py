"""The acks that both sides are given: who acks what, and in which order. Pure, and the same in every run."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5

from shared.kafka import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_AT = "2026-01-02T03:04:05.678901Z"
_READS = 0.25
_LATE = 0.1
_MOST_AT_ONCE = 3
_SPREAD = 50.0

_DEVICES = ("phone", "laptop")


@dataclass(frozen=True, slots=True)
class Mix:
    """All conversations are active at the same time.

    In each step one of them, any, gets 1 to 3 messages. Every device of its members acks them as one range, unless it
    is late, which one in ten is: then it acks them with what comes next. A quarter of the members read up to the head.
    The acks of about 50 steps lie mixed in the topic. Half of the members have two devices.
    """

    name: str
    conversations: int
    members: int = 4

    @property
    def devices(self) -> int:
        """How many, over all conversations."""
        return sum(len(devices_of(member)) for member in range(self.members)) * self.conversations


BUSY = Mix("busy", 2_000)
"""Some ten acks of each device among 200,000."""

WIDE = Mix("wide", 30_000)
"""Next to nothing to fold: about one ack of each device among 200,000."""


class Ack(NamedTuple):
    """One record of the topic of acks."""

    partition: int
    key: bytes
    value: bytes


class Acks(NamedTuple):
    """Acks in the order of the topic, and the head of each conversation, by its number."""

    acks: list[Ack]
    heads: list[int]


def ids(mix: Mix) -> list[UUID]:
    """The conversations."""
    return [uuid5(NAMESPACE_OID, f"bench-receipts-{mix.name}-{number}") for number in range(mix.conversations)]


def user_of(conversation: int, member: int) -> str:
    """The user id of a conversation's member, both by number."""
    return f"user-{conversation}-{member}"


def devices_of(member: int) -> tuple[str, ...]:
    """The device ids of a member."""
    return _DEVICES if member % 2 else _DEVICES[:1]


def acks(mix: Mix, most: int) -> Acks:
    """So many acks. Those of one device are in their order."""
    keys = [str(id_) for id_ in ids(mix)]
    partitions = [partition_of(key) for key in keys]
    heads = [1] * mix.conversations
    made: list[Ack] = []
    for _, at, head, rest in sorted(itertools.islice(_timed(mix), most), key=lambda one: one[0]):
        heads[at] = max(heads[at], head)
        value = f'{{"conversation_id":"{keys[at]}",{rest},"at":"{_AT}"}}'
        made.append(Ack(partitions[at], keys[at].encode(), value.encode()))
    return Acks(made, heads)


def by_partition(given: Iterable[Ack]) -> dict[int, list[Ack]]:
    """The acks of each partition, in order."""
    found: defaultdict[int, list[Ack]] = defaultdict(list)
    for ack in given:
        found[ack.partition].append(ack)
    return dict(found)


def _timed(mix: Mix) -> Iterator[tuple[float, int, int, str]]:
    """Endless: when an ack is written (in steps), its conversation's number and head, and what it says."""
    chance = random.Random(mix.name)
    heads = [0] * mix.conversations
    held: dict[tuple[int, int, str], int] = {}
    last: dict[tuple[int, int, str], float] = {}
    for step in itertools.count():
        at = chance.randrange(mix.conversations)
        heads[at] += chance.randint(1, _MOST_AT_ONCE)
        for member in range(mix.members):
            who = f'"user_id":"{user_of(at, member)}"'
            devices = devices_of(member)
            for name in devices:
                device = (at, member, name)
                if chance.random() < _LATE:
                    continue
                last[device] = time = max(step + chance.random() * _SPREAD, last.get(device, 0.0))
                low, held[device] = held.get(device, 0) + 1, heads[at]
                yield (
                    time,
                    at,
                    heads[at],
                    f'{who},"device_id":"{name}","kind":"delivered","ranges":[[{low},{heads[at]}]]',
                )
            if chance.random() < _READS:
                device = (at, member, chance.choice(devices))
                last[device] = time = max(step + chance.random() * _SPREAD, last.get(device, 0.0))
                yield (
                    time,
                    at,
                    heads[at],
                    f'{who},"device_id":"{device[2]}","kind":"read","seq":{heads[at]},"version":0',
                )
